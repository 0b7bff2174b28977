"""A traced program computed in float32: what half precision would give if it had float32's digits and range.

Half types are few enough that an array's type decides everything: each value that was traced in 16 bits or
fewer is float32, in loops and calls as well, and all others are as they were traced.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.dtypes import promote_dtype as wide_dtype
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.flatten import is_array

#: Operations that run as they were traced, between casts: what they do depends on the bits of their operands,
#: they draw random numbers in their dtype, or they are written for it.
_AS_TRACED = frozenset(
    [
        "bitcast_convert_type",
        "nextafter",
        "rng_uniform",
        "random_gamma",
        "pallas_call",
        "custom_partitioning",
        "debug_print",
        "scaled_matmul_wrapper",
    ]
)

#: What the names of kernels, foreign functions and callbacks end in.
_FOREIGN = ("callback", "ffi_call", "custom_call", "_fwd_wrapper", "_bwd_wrapper")

#: Calls of a program whose equations are evaluated in their place, and the parameter that holds it.
_INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def replay_in_float32(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes what another does, in float32 wherever that one computes in half precision.

    The function is traced as it is, and what it does is then done with every float16, bfloat16 and float8
    value replaced by a float32 one. Random numbers stay the same; float64 stays float64. Custom kernels and
    callbacks are given the dtypes that they were traced with.

    Args:
      fn: a function of pytrees of arrays that `jax.jit` could trace. Arguments that are no arrays are static.

    Returns:
      A function of the same arguments. Its results have the structure of `fn`'s, and are float32 where those
      are half.

    Raises:
      TypeError: for something that is no function.

    Example:
      >>> import jax.numpy as jnp
      >>> def square(x):
      ...     return x.astype(jnp.float16) ** 2
      >>> x = jnp.float32(300.0)
      >>> float(square(x)), float(replay_in_float32(square)(x))
      (inf, 90000.0)
    """
    if not callable(fn):
        raise TypeError(f"widened takes a function, got {fn!r:.200}. Did you call it already?")

    def in_float32(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        taken = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        result = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal result
            whole = list(leaves)
            for i, array in zip(taken, arrays, strict=True):
                whole[i] = array
            new_args, new_kwargs = jax.tree.unflatten(structure, whole)
            outs, result = jax.tree.flatten(fn(*new_args, **new_kwargs))
            return outs

        arrays = [leaves[i] for i in taken]
        jaxpr = jax.make_jaxpr(flat)(*arrays)
        assert result is not None
        return jax.tree.unflatten(result, evaluate(jaxpr, arrays))

    return in_float32


def evaluate(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """The results of a closed jaxpr, computed in float32.

    Args:
      jaxpr: any closed jaxpr.
      values: its arguments, in the dtypes that it was traced with or widened already.
    """
    opened = compat.open_jaxpr(jaxpr)
    known = dict(zip(opened.invars, map(wide, values), strict=True))
    known.update(zip(opened.constvars, map(_constant, compat.constants(jaxpr)), strict=True))
    last_use = {atom: i for i, eqn in enumerate(opened.eqns) for atom in _variables(eqn.invars)}
    kept = set(_variables(opened.outvars))

    def read(atom: Any) -> Any:
        return _literal(atom) if isinstance(atom, compat.Literal) else known[atom]

    for i, eqn in enumerate(opened.eqns):
        known.update(zip(eqn.outvars, widened_equation(eqn, [read(a) for a in eqn.invars]), strict=True))
        for atom in set(_variables(eqn.invars)) - kept:
            if last_use[atom] == i:
                del known[atom]
    return [read(atom) for atom in opened.outvars]


def widened_equation(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """What one equation gives in float32, programs inside it included.

    Args:
      eqn: an equation of a jaxpr.
      values: its operands; half ones are widened.

    Returns:
      Its results; those traced in half are float32.
    """
    values = [wide(value) for value in values]
    with compat.eqn_context(eqn):
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            return rule(eqn, values)
        if eqn.primitive.name in _INLINED and not _is_placed(eqn):
            return evaluate(eqn.params[_INLINED[eqn.primitive.name]], values)
        params = {name: _param(value) for name, value in eqn.params.items()}
        if _is_foreign(eqn.primitive.name) or any(_mentions_half(value) for value in params.values()):
            return _as_traced(eqn, values)
        return compat.bind_primitive(eqn.primitive, values, params)


def wide(value: Any) -> Any:
    """An array in float32 if it is half; anything else as it is."""
    if not is_half(getattr(value, "dtype", None)):
        return value
    return jax.lax.convert_element_type(value, np.float32)


def _constant(value: Any) -> Any:
    if ir.is_traced(value):
        return wide(value)
    # At once: within a trace the cast would be another operation.
    with jax.ensure_compile_time_eval():
        return wide(value)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, compat.Literal)]


def _literal(atom: Any) -> Any:
    dtype = ir.dtype_of(atom)
    return np.asarray(atom.val, dtype).astype(np.float32) if is_half(dtype) else atom.val


def _is_placed(eqn: Any) -> bool:
    """Whether a jit says where its arguments are kept, or that they may be overwritten."""
    return any(eqn.params.get("donated_invars", ())) or ir.has_shardings(eqn.params)


def _is_foreign(name: str) -> bool:
    return name in _AS_TRACED or name.endswith(_FOREIGN)


def _param(value: Any) -> Any:
    """A parameter of an equation, for operands in float32."""
    if _is_jaxpr(value):
        return _retraced(value)
    if isinstance(value, tuple) and any(map(_is_jaxpr, value)):
        parts = [_param(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, np.dtype):
        return wide_dtype(value)
    if isinstance(value, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        # F16_F16_F32 and the like round their operands; BF16_BF16_F32_X6 takes float32 apart instead.
        return None if re.search(r"F8|float8|F16(?!.*_X\d)|float16", str(value)) else value
    return value


def _is_jaxpr(value: Any) -> bool:
    return hasattr(compat.open_jaxpr(value), "eqns")


def _retraced(jaxpr: Any) -> Any:
    """A jaxpr of the same kind, closed or open, whose values are float32 where they were half."""
    opened = compat.open_jaxpr(jaxpr)
    if not _has_half(opened):
        return jaxpr
    closed = jax.make_jaxpr(lambda *values: evaluate(jaxpr, values))(*map(_wide_type, opened.invars))
    if hasattr(jaxpr, "consts"):
        return closed
    assert not compat.constants(closed)
    return compat.open_jaxpr(closed)


def _wide_type(var: Any) -> Any:
    aval = var.aval
    if not is_half(ir.dtype_of(var)):
        return aval
    if ir.is_plain_array(var):
        return ir.retyped(aval, np.float32)
    # A reference to an array.
    return aval.update(inner_aval=ir.retyped(aval.inner_aval, np.float32))


def _has_half(jaxpr: Any) -> bool:
    """Whether a value in a jaxpr, or one in a program inside it, is half."""
    for eqn in jaxpr.eqns:
        if any(is_half(ir.dtype_of(atom)) for atom in (*eqn.invars, *eqn.outvars)):
            return True
        if any(_has_half(compat.open_jaxpr(inner)) for inner in ir.subjaxprs(eqn)):
            return True
    return any(is_half(ir.dtype_of(atom)) for atom in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars))


def _mentions_half(value: Any) -> bool:
    """Whether a parameter names a half dtype in a way that nobody here knows."""
    if isinstance(value, tuple | list):
        return any(map(_mentions_half, value))
    return is_half(value if isinstance(value, np.dtype) else getattr(value, "dtype", None))


def _as_traced(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The operation itself, on operands cast to the dtypes that it was traced with."""
    values = [
        jax.lax.convert_element_type(value, ir.dtype_of(atom)) if is_half(ir.dtype_of(atom)) else value
        for value, atom in zip(values, eqn.invars, strict=True)
    ]
    return [wide(out) for out in compat.bind_primitive(eqn.primitive, values, eqn.params)]


def _convert(eqn: Any, values: Sequence[Any]) -> list[Any]:
    params = {**eqn.params, "new_dtype": wide_dtype(eqn.params["new_dtype"])}
    if values[0].dtype == params["new_dtype"] and params.get("sharding") is None:
        return list(values)
    return compat.bind_primitive(eqn.primitive, values, params)


def _round(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """reduce_precision: nothing, unless it keeps as much as float32 does."""
    keeps = eqn.params["mantissa_bits"] >= np.finfo(np.float32).nmant
    return compat.bind_primitive(eqn.primitive, values, eqn.params) if keeps else list(values)


def _checkpoint(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """jax.checkpoint: constants of what is inside become its first operands."""
    inner = eqn.params["jaxpr"]
    types = map(_wide_type, compat.open_jaxpr(inner).invars)
    closed = jax.make_jaxpr(lambda *values: evaluate(inner, values))(*types)
    params = {**eqn.params, "jaxpr": compat.convert_constvars_jaxpr(closed)}
    return compat.bind_primitive(eqn.primitive, [*compat.constants(closed), *values], params)


def _shard_map(eqn: Any, values: Sequence[Any]) -> list[Any]:
    params = eqn.params
    mapped = jax.shard_map(
        lambda *values: tuple(evaluate(params["jaxpr"], values)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=set(compat.manual_axes(params)),
    )
    return list(mapped(*values))


_RULES: dict[str, Callable[[Any, Sequence[Any]], list[Any]]] = {
    "convert_element_type": _convert,
    "reduce_precision": _round,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "shard_map": _shard_map,
}
