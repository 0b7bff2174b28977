"""A traced program computed in float32: what half precision would give if it had float32's digits and range.

Half types are few enough that an array's type decides everything: each value that was traced in 16 bits or
fewer is float32, in loops and calls as well, and all others are as they were traced.
"""

import contextvars
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.interpreter import Interpreter
from jmp_policy._src.jaxpr.ir import flattened
from jmp_policy._src.jaxpr.op_table import HAVING, Trait

#: Operations that run as they were traced, between casts: what they do depends on the bits of their operands,
#: they draw random numbers in their dtype, or they are written for it.
_AS_TRACED = HAVING[Trait.DTYPE_BOUND]

_MANY_STEPS = HAVING[Trait.ACCUMULATES] | HAVING[Trait.IN_STEPS]

#: What the names of kernels, foreign functions and callbacks end in.
_FOREIGN = ("callback", "ffi_call", "custom_call", "_fwd_wrapper", "_bwd_wrapper")


def replay_in_float32(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes in float32 what another one computes in half precision.

    The function is traced as it is, and what it does is then done with every float16, bfloat16 and float8
    value replaced by a float32 one, products in the precision that they ask for. Random numbers stay the
    same, half ones too; float64 stays float64. Custom kernels and callbacks are given the dtypes that they
    were traced with.

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
        raise TypeError(f"replay_in_float32 takes a function, got {fn!r:.200}. Did you call it already?")

    def in_float32(*args: Any, **kwargs: Any) -> Any:
        jaxpr, arrays, rebuild = flattened(fn, args, kwargs)
        token = _AS_ASKED.set(True)
        try:
            return rebuild(evaluate_in_float32(jaxpr, arrays))
        finally:
            _AS_ASKED.reset(token)

    return in_float32


def evaluate_in_float32(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, computed in float32; products in full precision, but inside a replay as asked.

    Args:
      jaxpr: closed or not.
      values: its arguments, in the dtypes that it was traced with or float32 already.
    """
    return _REPLAY.run(jaxpr, list(map(to_float32, values)))


def replay_equation(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """What one equation gives in float32, jaxprs inside it included.

    Args:
      eqn: an equation of a jaxpr.
      values: its operands; half ones are converted to float32.

    Returns:
      Its results; those traced in half are float32.
    """
    with compat.eqn_context(eqn):
        return list(_REPLAY.equation(eqn, list(map(to_float32, values)), None))


class Replay(Interpreter):
    """Runs a program in float32. Values are arrays.

    Loops and branches are operations like others: the jaxprs among their parameters are traced again.
    """

    def enters(self, eqn: Any, kind: Kind, values: list[Any]) -> bool:
        """Whether a call is run: not a loop or branch, nor a jit that is bound to layouts or donations."""
        return kind in _ENTERED and not calls.is_bound(eqn) and not calls.is_draw(eqn)

    def constant(self, atom: Any, value: Any) -> Any:
        """A constant in float32, if it is half."""
        dtype = ir.dtype_of(atom)
        if not is_half(dtype) or ir.is_traced(value):
            return to_float32(value)
        if isinstance(atom, compat.Literal):
            return np.asarray(value, dtype).astype(np.float32)
        # At once: within a trace the cast would be another operation.
        with jax.ensure_compile_time_eval():
            return to_float32(value)

    def operation(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Does an operation in float32; one that is written for its dtypes between casts."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is not None:
            return rule(eqn, values)
        params = {name: _param(value) for name, value in eqn.params.items()}
        mentions_half = any(_mentions_half(value) for value in params.values())
        if is_foreign(eqn.primitive.name) or mentions_half or calls.is_draw(eqn):
            return as_traced(eqn, values)
        if not _AS_ASKED.get() and isinstance(params.get("precision", ""), tuple | None):
            params["precision"] = (jax.lax.Precision.HIGHEST,) * 2  # TF32 would be an error of its own.
        return list(map(to_float32, compat.bind_primitive(eqn.primitive, values, params)))


#: Calls that are run; of a `lax.platform_dependent` all branches are traced again.
_ENTERED = frozenset(Kind) - {Kind.SCAN, Kind.WHILE, Kind.COND, Kind.PLATFORM}

_REPLAY = Replay()

#: Whether products are in the precision that they ask for: in programs that are compiled to be compared.
_AS_ASKED = contextvars.ContextVar("as asked", default=False)


def to_float32(value: Any) -> Any:
    """Casts an array to float32 if it is half; returns anything else unchanged."""
    return _cast(value, np.float32) if is_half(getattr(value, "dtype", None)) else value


def _cast(value: Any, dtype: Any) -> Any:
    with ir.on_its_mesh(value):
        return jax.lax.convert_element_type(value, dtype)


def is_foreign(name: str) -> bool:
    """Whether an operation runs as it was traced, between casts, also in float32."""
    return name in _AS_TRACED or name.endswith(_FOREIGN)


def _param(value: Any) -> Any:
    """A parameter of an equation, for operands in float32."""
    if ir.is_jaxpr(value):
        return _retraced(value)
    if isinstance(value, tuple) and any(map(ir.is_jaxpr, value)):
        parts = [_param(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, np.dtype):
        return promote_dtype(value)
    if isinstance(value, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        # F16_F16_F32 and the like round their operands; BF16_BF16_F32_X6 takes float32 apart instead.
        return None if re.search(r"F8|float8|F16(?!.*_X\d)|float16", str(value)) else value
    return value


def _retraced(jaxpr: Any) -> Any:
    """A jaxpr of the same kind, closed or open, whose values are float32 where they were half."""
    opened = compat.open_jaxpr(jaxpr)
    if not has_half(opened):
        return jaxpr
    closed = jax.make_jaxpr(lambda *values: evaluate_in_float32(jaxpr, values))(
        *map(_float32_type, opened.invars)
    )
    if hasattr(jaxpr, "consts"):
        return closed
    assert not compat.constants(closed)
    return compat.open_jaxpr(closed)


def _float32_type(var: Any) -> Any:
    aval = var.aval
    if not is_half(ir.dtype_of(var)):
        return aval
    if ir.is_plain_array(var):
        return ir.retyped(aval, np.float32)
    # A reference to an array.
    return aval.update(inner_aval=ir.retyped(aval.inner_aval, np.float32))


def has_half(jaxpr: Any) -> bool:
    """Whether a value in a jaxpr, or one in a program inside it, is half."""
    opened = compat.open_jaxpr(jaxpr)
    atoms = (*opened.invars, *opened.constvars, *opened.outvars)
    return _are_half(atoms) or any(map(holds_half, opened.eqns))


def holds_half(eqn: Any) -> bool:
    """Whether an operation, or one inside it, has half operands or results."""
    return _are_half((*eqn.invars, *eqn.outvars)) or any(map(has_half, ir.subjaxprs(eqn)))


def _are_half(atoms: Sequence[Any]) -> bool:
    return any(is_half(ir.dtype_of(atom)) for atom in atoms)


def _mentions_half(value: Any) -> bool:
    """Whether a parameter names a half dtype in a way that nobody here knows."""
    if isinstance(value, tuple | list):
        return any(map(_mentions_half, value))
    if isinstance(value, type) and issubclass(value, np.generic):
        value = np.dtype(value)
    dtype = value if isinstance(value, np.dtype) else getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and is_half(dtype)


def rounds_in_steps(eqn: Any) -> bool:
    """Whether an operation in half rounds more than once, as only the operation itself does."""
    name = eqn.primitive.name
    if name == "integer_pow":
        # Repeated multiplication: 1 / (b * b), the derivative of a division, is 0 where b * b is infinite.
        return is_half(ir.dtype_of(eqn.outvars[0])) and not -1 <= eqn.params["y"] <= 2
    return name in _MANY_STEPS and _are_half(eqn.outvars)


def as_traced(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Does the operation itself, on operands cast to the dtypes that it was traced with.

    Returns:
      Its results; half ones are converted to float32.
    """
    values = [
        _cast(value, ir.dtype_of(atom)) if is_half(ir.dtype_of(atom)) else value
        for value, atom in zip(values, eqn.invars, strict=True)
    ]
    return [to_float32(out) for out in compat.bind_primitive(eqn.primitive, values, eqn.params)]


def _convert(eqn: Any, values: Sequence[Any]) -> list[Any]:
    params = {**eqn.params, "new_dtype": promote_dtype(eqn.params["new_dtype"])}
    if values[0].dtype == params["new_dtype"] and params.get("sharding") is None:
        return list(values)
    return compat.bind_primitive(eqn.primitive, values, params)


def _round(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Skips a reduce_precision, unless it keeps as much as float32 does."""
    keeps = eqn.params["mantissa_bits"] >= np.finfo(np.float32).nmant
    return compat.bind_primitive(eqn.primitive, values, eqn.params) if keeps else list(values)


#: By primitive's name.
_RULES: Mapping[str, Callable[[Any, Sequence[Any]], list[Any]]] = {
    "convert_element_type": _convert,
    "reduce_precision": _round,
}
