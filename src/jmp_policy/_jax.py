"""What differs between versions of JAX in a jaxpr, and the few spots where its parts are taken apart.

Imports public modules of JAX only; takes from jaxprs and equations what `jax.core.eval_jaxpr` takes of them.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend import core, source_info_util

from jmp_policy import _cpu_bfloat16

Literal = core.Literal
current_name_stack = source_info_util.current_name_stack

#: For functions that leave no call behind in a trace. 0.12 tells them from those inlined when lowered.
INLINED: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # type: ignore[attr-defined]

FLOAT32 = np.dtype(np.float32)


def open_jaxpr(jaxpr: Any) -> Any:
    """The equations of a jaxpr, closed or not. From 0.12 on a closed jaxpr is a jaxpr with its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """The values of a jaxpr's constant variables; none for an open one."""
    return getattr(jaxpr, "consts", ())


def evaluate(jaxpr: Any, values: Sequence[Any], step: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """The results of a closed jaxpr, or one without constants.

    Args:
      jaxpr: any.
      values: its arguments; what `step` takes.
      step: gives the results of an equation for its operands.
    """
    opened = open_jaxpr(jaxpr)
    known = dict(zip(opened.invars, values, strict=True))
    known |= dict(zip(opened.constvars, constants(jaxpr), strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in opened.eqns:
        known.update(zip(eqn.outvars, step(eqn, list(map(value_of, eqn.invars))), strict=True))
    return list(map(value_of, opened.outvars))


def dtype_of(atom: Any) -> Any:
    """The dtype of an atom of a jaxpr; None for tokens."""
    return getattr(atom.aval, "dtype", None)


def shape_of(atom: Any) -> Any:
    """The shape of an array of a jaxpr."""
    return atom.aval.shape


def is_array_of(atom: Any, dtype: np.dtype) -> bool:
    """Whether an atom of a jaxpr is an array of such a dtype, and no token, key or reference."""
    aval = atom.aval
    return isinstance(aval, ShapedArray) and aval.dtype == dtype


def is_float32(atom: Any) -> bool:
    """Whether an atom is a float32 array, the only thing that autocast ever lowers."""
    return is_array_of(atom, FLOAT32)


def is_plain_array(atom: Any) -> bool:
    """Whether an atom is an array, and no reference (a mutable array) or token."""
    return isinstance(atom.aval, ShapedArray)


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Numbers of constants and of carries of a scan. 0.12 keeps them as the lengths of three trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def subfunctions(eqn: Any) -> Sequence[Callable[..., Sequence[Any]]]:
    """The functions of a custom_jvp (function, rule) or custom_vjp (function, forward, backward) equation.

    They take and return flat lists.
    """
    return [f.call_wrapped for f in eqn.primitive.get_bind_params(eqn.params)["subfuns"]]


def bound(primitive: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """What a primitive gives for values, with the parameters of an equation; always a list."""
    with _cpu_bfloat16.scope_of(primitive, values):
        out = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def stack_within(eqn: Any, first: int, last: int | None) -> Any:
    """The current name stack, continued by some of the scopes of an equation."""
    own = eqn.source_info.name_stack
    return current_name_stack() + type(own)(own.stack[first:last])


class at:  # noqa: N801 - used like a function
    """Runs a with-block on behalf of an equation: its name stack, source line and configuration.

    Args:
      eqn: the equation.
      stack: the whole name stack; left out, the equation's continues the one that is current.
    """

    __slots__ = ("_context", "_manager")

    def __init__(self, eqn: Any, stack: Any = None):
        info = eqn.source_info
        stack = current_name_stack() + info.name_stack if stack is None else stack
        self._context = source_info_util.user_context(info.traceback, name_stack=stack)
        self._manager = eqn.ctx.manager

    def __enter__(self) -> None:
        self._context.__enter__()
        self._manager.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._manager.__exit__(*exc)
        self._context.__exit__(*exc)


def source_line(eqn: Any) -> str:
    """Where the user wrote the operation: "file.py:12 (function)"; "" if unknown.

    Within models made of layers of Flax and others that is where the model calls the layer; the layer's own
    line where no other is known.
    """
    for frame in _frames(eqn):
        if not frame.file_name.startswith((*_libraries(), "<frozen")):
            return f"{_short(frame.file_name)}:{frame.line_num} ({_plain(frame.function_name)})"
    text = source_info_util.summarize(eqn.source_info)
    return "" if text == "unknown" else re.sub(r"^.*[/\\](?=[^/\\]+:\d)", "", text)


def is_promotion(eqn: Any) -> bool:
    """Whether a conversion was made for a value to meet one of another dtype, and not asked for by name.

    What jax.numpy promotes counts, and what a layer of Flax without a dtype converts to that of its operands.
    Flax's normalisation layers and JAX's sums compute in float32 on purpose.
    """
    by_name = False
    for frame in _frames(eqn):
        if not frame.file_name.startswith(_directory("jax")):
            # The first that is not JAX's own.
            if _short(frame.file_name) == "normalization.py":
                return False
            return not by_name or "promote_dtype" in frame.function_name
        if _short(frame.file_name) == "reductions.py":
            return False
        name = _plain(frame.function_name)
        by_name = by_name or name in ("astype", "asarray", "array", "convert_element_type")
    return True


def _frames(eqn: Any) -> Sequence[Any]:
    traceback = eqn.source_info.traceback
    return () if traceback is None else traceback.frames


def _short(file_name: str) -> str:
    return re.sub(r"^.*[/\\]", "", file_name)


def _plain(function: str) -> str:
    """A function's name without where it was defined: "Net.__call__"."""
    return function.rpartition("<locals>.")[2]


def _libraries() -> tuple[str, ...]:
    """Directories of the packages in which a user does not look for the line that matters."""
    return tuple(filter(None, map(_directory, ("jax", "flax", "optax", "equinox", "haiku", "jmp_policy"))))


@functools.cache
def _directory(name: str) -> str:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    return "" if found is None or not found.origin else os.path.dirname(found.origin) + os.sep


def closed_over_arguments(jaxpr: Any) -> Any:
    """A jaxpr whose constants have become its first arguments."""
    jaxpr = open_jaxpr(jaxpr)
    if not jaxpr.constvars:
        return jaxpr
    without = {"consts": []} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], **without)


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Every jaxpr among the parameters of an equation."""
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(open_jaxpr(part), "eqns"):
                yield part


def holds_jaxpr(eqn: Any) -> bool:
    """Whether an operation has a jaxpr inside, whose dtypes are fixed."""
    return any(True for _ in subjaxprs(eqn))


def primitives(jaxpr: Any) -> Iterator[str]:
    """Names of all primitives in a jaxpr, those of jaxprs inside it included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn.primitive.name
        for inside in subjaxprs(eqn):
            yield from primitives(inside)


def is_traced(value: Any) -> bool:
    """Whether a value is not known yet."""
    return isinstance(value, Tracer)


def broadcast_like(value: Any, atom: Any) -> Any:
    """A scalar, or an array with axes of size 1, in the shape (and explicit sharding) of an atom."""
    shape, axes = atom.aval.shape, range(len(atom.aval.shape)) if value.ndim else ()
    sharding = atom.aval.sharding if is_explicit([atom]) else None
    return jax.lax.broadcast_in_dim(value, shape, tuple(axes), out_sharding=sharding)


def is_explicit(atoms: Sequence[Any]) -> bool:
    """Whether an atom is laid out on a mesh whose axes are part of its type."""
    shardings = [getattr(atom.aval, "sharding", None) for atom in atoms]
    return any(s is not None and jax.sharding.AxisType.Explicit in s.mesh.axis_types for s in shardings)


def asks_for_precision(eqn: Any) -> bool:
    """Whether a product has a `precision=` of its own, and not the one that is the default everywhere."""
    precision = eqn.params.get("precision")
    default = (None, (jax.lax.Precision.DEFAULT,) * 2, jax.lax.Precision.DEFAULT)
    if precision in default:
        return False
    return precision != _default_precision(jax.config.values["jax_default_matmul_precision"])


@functools.lru_cache(maxsize=16)
def _default_precision(_: Any) -> Any:
    """What `jax.default_matmul_precision` now puts into every product."""
    one = np.ones((1, 1), np.float32)
    return open_jaxpr(jax.make_jaxpr(jax.lax.dot)(one, one)).eqns[0].params["precision"]


def is_array(value: Any) -> bool:
    """Whether a value is an array that can be traced, and no symbolic zero, None or tangent of an integer."""
    return getattr(value, "dtype", jax.dtypes.float0) != jax.dtypes.float0 and not isinstance(
        value, jax.custom_derivatives.SymbolicZero
    )


def retyped(aval: Any, dtype: Any) -> Any:
    """A type of arrays with another dtype; its shape, sharding and varying axes stay."""
    return aval.update(dtype=dtype, weak_type=False)


def trace_as(function: Callable[..., Any], arrays: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """The jaxpr of a function of arrays like these, in other dtypes."""
    types = [
        jax.typeof(array) if dtype is None or array.dtype == dtype else retyped(jax.typeof(array), dtype)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]
    return jax.make_jaxpr(function)(*types)


def has_shardings(params: dict[str, Any]) -> bool:
    """Whether a jit equation says how an argument or result is laid out."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings) or any(x is not None for x in layouts)


def manual_axes(params: dict[str, Any]) -> Any:
    """The mesh axes that a shard_map equation maps over."""
    return params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]


def residual_places(eqn: Any) -> Sequence[int | None]:
    """For each residual of a custom_vjp equation: which argument it is, None if the forward pass makes it."""
    return eqn.params["out_trees"]()[2]


def cotangents(outs: Any) -> Sequence[Any]:
    """What a backward pass of a custom_vjp equation gives; from 0.12 on together with a log."""
    return outs[0] if isinstance(outs, tuple) and len(outs) == 2 and isinstance(outs[0], list) else outs


def name_of(eqn: Any) -> str:
    """The name of the function that an equation calls."""
    return getattr(getattr(open_jaxpr(eqn.params["call_jaxpr"]), "debug_info", None), "func_name", "function")


def as_array(value: Any, atom: Any) -> Any:
    """A result as an array: a number that stands in the program is one too."""
    return jax.numpy.asarray(value, dtype_of(atom)) if isinstance(atom, Literal) else value
