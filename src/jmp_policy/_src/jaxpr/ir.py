"""Jaxprs and their atoms: dtypes, shapes, shardings, jaxprs inside an operation, the loop over equations.

And how functions of pytrees become jaxprs of arrays: what is no array among the arguments is static.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import primitives as jax_primitives

from jmp_policy._src.core.dtypes import ARRAYS
from jmp_policy._src.jaxpr import source_lines
from jmp_policy._src.jaxpr.compat import Literal, constants, open_jaxpr, platforms_of_branches, varying

FLOAT32 = np.dtype(np.float32)


def dtype_of(atom: Any) -> Any:
    """The dtype of an atom of a jaxpr; None for tokens."""
    return getattr(atom.aval, "dtype", None)


def shape_of(atom: Any) -> Any:
    """The shape of an array of a jaxpr."""
    return atom.aval.shape


def is_float32(atom: Any) -> bool:
    """Whether an atom is a float32 array, the only thing that autocast ever lowers."""
    aval = atom.aval
    # By class, which nothing in JAX derives from: asked several times of each atom of a program.
    return aval.__class__ is ShapedArray and aval.dtype == FLOAT32


def is_plain_array(atom: Any) -> bool:
    """Whether an atom is an array, and no reference (a mutable array) or token."""
    return isinstance(atom.aval, ShapedArray)


def has_references(eqn: Any) -> bool:
    """Whether an operation takes or gives anything but arrays."""
    return not all(map(is_plain_array, (*eqn.invars, *eqn.outvars)))


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Yields every jaxpr among the parameters of an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(part):
                yield part


def is_jaxpr(value: Any) -> bool:
    """Whether a value is a jaxpr, closed or open."""
    return hasattr(open_jaxpr(value), "eqns")


def holds_jaxpr(eqn: Any) -> bool:
    """Whether an operation has a jaxpr inside, whose dtypes are fixed."""
    return any(True for _ in subjaxprs(eqn))


def default_branch(eqn: Any) -> Any:
    """The branch of a `lax.platform_dependent` that runs where no platform is named.

    None for every other operation, and where each branch names its platforms.
    """
    platforms = platforms_of_branches(eqn)
    if platforms is None or None not in platforms:
        return None
    return eqn.params["branches"][platforms.index(None)]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations of a jaxpr, those of jaxprs inside it included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inside in subjaxprs(eqn):
            yield from equations(inside)


def primitives(jaxpr: Any) -> Iterator[str]:
    """Yields the names of all primitives in a jaxpr, those of jaxprs inside it included."""
    return (eqn.primitive.name for eqn in equations(jaxpr))


def is_traced(value: Any) -> bool:
    """Whether a value is not known yet."""
    return isinstance(value, Tracer)


def broadcast_like(value: Any, aval: Any) -> Any:
    """Broadcasts a scalar, or axes of size 1, to the shape (and explicit sharding) of a type of arrays."""
    axes = tuple(range(aval.ndim)) if value.ndim else ()
    sharding = aval.sharding if _is_explicit(aval) else None
    return jax.lax.broadcast_in_dim(value, aval.shape, axes, out_sharding=sharding)


def is_explicit(atoms: Sequence[Any]) -> bool:
    """Whether an atom is laid out on a mesh whose axes are part of its type."""
    return any(_is_explicit(atom.aval) for atom in atoms)


def _is_explicit(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and jax.sharding.AxisType.Explicit in sharding.mesh.axis_types


def on_its_mesh(array: Any) -> contextlib.AbstractContextManager[None]:
    """A with-block on the mesh of an array: what reads it may run on another one, as a `reshard` does."""
    now = jax.sharding.get_abstract_mesh()
    mesh = now if now.empty else jax.typeof(array).sharding.mesh
    return contextlib.nullcontext() if mesh.empty or mesh == now else jax.sharding.use_abstract_mesh(mesh)


def asked_precision(eqn: Any) -> str:
    """The name of the `precision=` that a product has of its own; "" if it has the ambient default."""
    asked, default = eqn.params.get("precision"), jax.lax.Precision.DEFAULT
    if asked in (None, default, (default,) * 2) or source_lines.is_ambient_precision(eqn):
        return ""
    return str(asked[0] if isinstance(asked, tuple) else asked)


def retyped(aval: Any, dtype: Any) -> Any:
    """A type of arrays with another dtype; its shape, sharding and varying axes stay."""
    return aval.update(dtype=dtype, weak_type=False)


def zeros(aval: Any) -> Any:
    """Zeros of a type of arrays, inside shard_map over the axes that it varies over."""
    array, axes = jax.numpy.zeros(aval.shape, aval.dtype), tuple(varying(aval))
    return jax.lax.pcast(array, axes, to="varying") if axes else array


def has_shardings(params: dict[str, Any]) -> bool:
    """Whether a jit equation says how an argument or result is laid out."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings) or any(x is not None for x in layouts)


def as_array(value: Any, atom: Any) -> Any:
    """A result as an array: a number that stands in the program is one too. A weak type stays one."""
    array = jax.numpy.asarray(value, dtype_of(atom)) if isinstance(atom, Literal) else value
    if getattr(atom.aval, "weak_type", False) and not jax.typeof(array).weak_type:
        params = {"new_dtype": dtype_of(atom), "weak_type": True, "sharding": None}
        return jax_primitives.convert_element_type_p.bind(array, **params)
    return array


def evaluate(
    jaxpr: Any,
    values: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    constant: Callable[[Any, Any], Any] = lambda var, value: value,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    eqns: Sequence[Any] | None = None,
) -> list[Any]:
    """Gives each equation of a jaxpr to a function, in order; returns the values of the results.

    A value is freed after its last use.

    Args:
      jaxpr: closed or not.
      values: its arguments; what `step` takes.
      step: gives the results of an equation for its operands.
      constant: gives the value of a constant variable, for the variable and the constant; that is None in a
        jaxpr that is not closed.
      literal: gives the value of a number that stands in the program.
      eqns: other equations than the jaxpr's, to the same results.
    """
    opened, consts = open_jaxpr(jaxpr), constants(jaxpr)
    known = dict(zip(opened.invars, values, strict=True))
    for var, value in zip(opened.constvars, consts or [None] * len(opened.constvars), strict=True):
        known[var] = constant(var, value)
    del values  # What is left of the arguments is in `known`, and goes with its last use.
    program: Sequence[Any] = opened.eqns if eqns is None else eqns

    def value_of(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else known[atom]

    for eqn, unused in zip(program, _last_uses(opened, program), strict=True):
        known.update(zip(eqn.outvars, step(eqn, list(map(value_of, eqn.invars))), strict=True))
        for var in unused:
            del known[var]
    return list(map(value_of, opened.outvars))


def _last_uses(opened: Any, eqns: Sequence[Any]) -> list[list[Any]]:
    """The variables that are not needed after each equation; `eqns` as for `evaluate`."""
    seen = {atom for atom in opened.outvars if not isinstance(atom, Literal)}
    dead: list[list[Any]] = []
    for eqn in reversed(eqns):
        atoms = [a for a in (*eqn.invars, *eqn.outvars) if not isinstance(a, Literal)]
        dead.append([atom for atom in dict.fromkeys(atoms) if atom not in seen])
        seen.update(atoms)
    return dead[::-1]


def fixed_point(start: Any, after: Callable[[Any], Any]) -> Any:
    """Repeats `after` until it changes nothing: what is known of carries at the start of every trip."""
    while (new := after(start)) != start:
        start = new
    return start


def is_array(value: Any) -> bool:
    """Whether a leaf is an array that a trace takes, or its type; no Python scalar, no `float0`."""
    # By type: a scalar type (`np.float32`) has a `dtype` and a `shape` too.
    return isinstance(value, ARRAYS) and value.dtype != jax.dtypes.float0


class Split(NamedTuple):
    """A pytree, taken apart into its arrays and the rest.

    Args:
      arrays: its leaves that are arrays.
      places: which of its leaves those are.
      leaves: all of them.
      structure: as `jax.tree.structure` gives it.
    """

    arrays: list[Any]
    places: list[int]
    leaves: list[Any]
    structure: Any

    def merged(self, arrays: Sequence[Any]) -> Any:
        """The pytree with other arrays in place of its own."""
        leaves = list(self.leaves)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def split_arrays(tree: Any) -> Split:
    """Takes a pytree apart into its arrays and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    return Split([leaves[place] for place in places], places, leaves, structure)


class Flat(NamedTuple):
    """A traced function.

    Args:
      jaxpr: of its arrays alone.
      arrays: its arguments, of those that are arrays.
      rebuild: gives the function's result from a list of its arrays.
    """

    jaxpr: Any
    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def flattened(fn: Callable[..., Any], args: Any, kwargs: Any, dtypes: Sequence[Any] | None = None) -> Flat:
    """Traces a function; arguments and results that are no arrays are static.

    Args:
      fn: the function.
      args, kwargs: its arguments.
      dtypes: what to trace each leaf of the arguments in, if they are in others.
    """
    given, results = split_arrays((args, kwargs)), list[Split]()

    def flat(*arrays: Any) -> list[Any]:
        new_args, new_kwargs = given.merged(arrays)
        made = split_arrays(fn(*new_args, **new_kwargs))
        # Without the tracers of a trace that will be over.
        leaves = [None if is_array(leaf) else leaf for leaf in made.leaves]
        results.append(made._replace(arrays=[], leaves=leaves))
        return made.arrays

    types = given.arrays
    if dtypes is not None:
        pairs = [(jax.typeof(given.leaves[place]), dtypes[place]) for place in given.places]
        types = [aval if aval.dtype == dtype else retyped(aval, dtype) for aval, dtype in pairs]
    jaxpr = jax.make_jaxpr(flat)(*types)
    # As the trace took them: NumPy's float64 is float32 here, unless x64 is on.
    arrays = [jax.numpy.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in given.arrays]
    return Flat(jaxpr, arrays, results[-1].merged)
