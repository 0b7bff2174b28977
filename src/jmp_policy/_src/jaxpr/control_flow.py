"""Takes loops and branches apart, and runs them, and whatever else calls a jaxpr, around other functions.

The functions here know how JAX writes these down; who calls them says what runs inside. Arguments and results
of the functions inside are pytrees of arrays, one per operand and result.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr import calls, compat, ir

#: One pytree of arrays per operand, to one per result.
Function = Callable[..., Sequence[Any]]

#: Runs a jaxpr on arrays, which may be in other dtypes than it was traced with. A dtype is wanted of each
#: result; None for results as they come.
Run = Callable[[Any, Sequence[Any], Sequence[Any] | None], Sequence[Any]]


#: Jits of jaxprs with at most so many operations are inlined: activation functions, `jnp.where`.
_SMALL = 24


def is_inlined(eqn: Any) -> bool:
    """Whether the operations of a call take its place: a plain one's, and those of a small and free jit."""
    kind = calls.kind_of(eqn)
    if kind is not calls.Kind.JIT:
        return kind is calls.Kind.CALL
    return not calls.is_bound(eqn) and len(compat.open_jaxpr(eqn.params["jaxpr"]).eqns) <= _SMALL


class Loop(NamedTuple):
    """A scan or while loop, with its operands (or what is known of them) taken apart.

    Args:
      body: jaxpr of a trip: `fixed`, carries and a slice of each of `xs`, to carries and a slice of outputs.
      fixed: constants of the body.
      start: the first carries.
      xs: inputs that have a slice for each trip.
      trips: how many there are; None where only the test knows.
      test: jaxpr of `tested` and the carries, to whether there is another trip; None for a scan.
      tested: constants of the test.
    """

    body: Any
    fixed: Sequence[Any]
    start: Sequence[Any]
    xs: Sequence[Any]
    trips: int | None
    test: Any = None
    tested: Sequence[Any] = ()


def loop(eqn: Any, operands: Sequence[Any]) -> Loop:
    """Takes the operands of a scan or while loop apart."""
    params = eqn.params
    if calls.kind_of(eqn) is calls.Kind.SCAN:
        first, carries = compat.scan_sizes(params)
        stop = first + carries
        return Loop(
            params["jaxpr"], operands[:first], operands[first:stop], operands[stop:], params["length"]
        )
    first, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    body, test = params["body_jaxpr"], params["cond_jaxpr"]
    return Loop(body, operands[first:stop], operands[stop:], (), None, test, operands[:first])


def ends_at_once(eqn: Any) -> bool:
    """Whether a while loop ends for all its values at once; under vmap each example has its own end."""
    return not ir.shape_of(compat.open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0])


def branches(eqn: Any) -> Sequence[Any]:
    """The jaxprs of a cond or switch; they take the operands after the index."""
    return eqn.params["branches"]


def scan(eqn: Any, trip: Callable[[Any, Any], Any], start: Any, xs: Any) -> Any:
    """Runs `trip(carry, x) -> carry, y` as often, and in the order, that a scan's equation says."""
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(trip, start, xs, **options)


def with_jaxprs(
    eqn: Any, jaxprs: Sequence[Any], operands: Sequence[Any], bind: Callable[..., Any]
) -> Sequence[Any]:
    """Does a jit, loop or branch with other jaxprs inside: a while loop's are its body and its test."""
    kind = calls.kind_of(eqn)
    if kind is calls.Kind.WHILE:
        return bind(eqn, *operands, body_jaxpr=jaxprs[0], cond_jaxpr=jaxprs[1])
    if kind is calls.Kind.COND:
        return bind(eqn, *operands, branches=tuple(jaxprs))
    return bind(eqn, *operands, jaxpr=jaxprs[0])


def cond(branches: Sequence[Function], operands: Sequence[Any]) -> list[Any]:
    """Runs a cond or switch: `operands` begin with the index."""
    return list(lax.switch(operands[0], branches, *operands[1:]))


def checkpoint(eqn: Any, function: Function, operands: Sequence[Any], bind: Callable[..., Any]) -> list[Any]:
    """Runs a jax.checkpoint; one of a backward pass that is in the program already stays one.

    A fresh checkpoint would not keep XLA from merging that with the forward pass.
    """
    if not eqn.params["differentiated"]:
        options = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
        return list(jax.checkpoint(function, **options)(*operands))
    closed, results = jax.make_jaxpr(function, return_shape=True)(*operands)
    arrays = [*compat.constants(closed), *jax.tree.leaves(list(operands))]
    outs = bind(eqn, *arrays, jaxpr=compat.convert_constvars_jaxpr(closed))
    return list(jax.tree.unflatten(jax.tree.structure(results), outs))


def shard_map(eqn: Any, function: Function, operands: Sequence[Any], out_specs: Any = None) -> list[Any]:
    """Runs a function under a jax.shard_map like that of an equation.

    Args:
      eqn: the equation.
      function: what runs on each device.
      operands: its arguments, of all devices.
      out_specs: where its results lie, if it has others than the equation.
    """
    params = eqn.params
    mapped = jax.shard_map(
        lambda *operands: tuple(function(*operands)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]) if out_specs is None else out_specs,
        check_vma=params["check_vma"],
        axis_names=set(compat.manual_axes(params)),
    )
    return list(mapped(*operands))


def traced_once(function: Callable[[Any], Any], argument: Any) -> tuple[Callable[[Any], Any], Any]:
    """Traces a function of one pytree; gives a function that runs the trace, and the types of the results."""
    closed, types = jax.make_jaxpr(function, return_shape=True)(argument)
    run, structure = jaxpr_as_fun(closed), jax.tree.structure(types)
    return lambda argument: jax.tree.unflatten(structure, run(*jax.tree.leaves(argument))), types


def custom_jvp(
    eqn: Any, function: Function, arrays: Sequence[Any], run: Run, dtypes: Sequence[Any]
) -> Sequence[Any]:
    """Runs a custom_jvp around another function; the rule for tangents is the user's.

    Args:
      eqn: the equation.
      function: what it computes, of arrays.
      arrays: its operands.
      run: runs the user's rule, traced in the dtypes that it was written for.
      dtypes: what is wanted of its results and their tangents; None for results as they come.
    """
    _, user_rule = compat.subfunctions(eqn)
    function.__name__ = compat.name_of(eqn).rsplit(".", 1)[-1]
    whole: Any = jax.custom_jvp(function)
    zero, written_for = jax.custom_derivatives.SymbolicZero, [ir.dtype_of(atom) for atom in eqn.invars]

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        # Symbolic zeros are of the dtypes that the rule was written for.
        kept = [
            zero(ir.retyped(t.aval, dtype)) if isinstance(t, zero) and is_floating(dtype) else t
            for t, dtype in zip(tangents, written_for, strict=True)
        ]
        flat = _traced(user_rule, [*primals, *kept], written_for * 2)
        wanted = [*dtypes, *dtypes]
        # What is no array among its results, a symbolic zero, is there already.
        there = flat.rebuild([None] * len(compat.open_jaxpr(flat.jaxpr).outvars))
        of_arrays = [dtype for out, dtype in zip(there, wanted, strict=True) if out is None]
        outs = [
            zero(ir.retyped(out.aval, dtype)) if isinstance(out, zero) and dtype is not None else out
            for out, dtype in zip(flat.rebuild(run(flat.jaxpr, flat.arrays, of_arrays)), wanted, strict=True)
        ]
        return outs[: len(dtypes)], outs[len(dtypes) :]

    whole.defjvp(rule, symbolic_zeros=eqn.params["symbolic_zeros"])
    return whole(*arrays)


def _traced(function: Function, values: Sequence[Any], dtypes: Sequence[Any]) -> ir.Flat:
    """Traces a function of flat lists in the dtypes that it was written for."""
    return ir.flattened(lambda *values: list(function(*values)), values, {}, dtypes)
