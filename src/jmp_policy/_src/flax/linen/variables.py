"""Variables that a module makes or reads itself: parameters and decode caches in the dtype of use, and state.

What a module writes is stored in the dtype that the variable has.

A decode cache that the bare model's `init` made is float32, and the keys that a half-precision model writes
into it are not. `lax.dynamic_update_slice` takes one dtype, so the cache is read in the dtype that the module
would make it in, and what is written is stored in the dtype that it has: a loop over tokens carries it.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core import dtypes
from jmp_policy._src.flax.linen.governing import module_precision
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.scope import ACTIVE
from jmp_policy._src.weight_grads.param_casts import cast_weight


def get_variable(module: nn.Module, own: Callable[..., Any], /, col: str, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `module.get_variable`: casts what it reads from the parameters."""
    value, scope = own(col, *args, **kwargs), ACTIVE.value
    if col != "params" or scope is None:
        return value
    precision = module_precision(scope, module)
    return cast_weight(value, precision.used_param_dtype, precision.policy)


def put_variable(module: nn.Module, own: Callable[..., Any], /, col: str, name: str, value: Any) -> None:
    """Stands in for `module.put_variable`: stores in the dtypes of what is there, or float32."""
    scope = ACTIVE.value
    if scope is not None and dtypes.is_half(module_precision(scope, module).compute_dtype):
        stored = module.scope and module.scope.get_variable(col, name)
        if stored is not None and jax.tree.structure(stored) == jax.tree.structure(value):
            value = jax.tree.map(dtypes.in_dtype_of, stored, value)
        elif col != "cache":
            value = jax.tree.map(_in_float32, value)
    own(col, name, value)


def variable(
    as_bare: Callable[..., Any],
    module: nn.Module,
    own: Callable[..., Any],
    /,
    col: str,
    name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Stands in for `module.variable`: makes or reads one as the policy of its module says.

    Args:
      as_bare: runs an initialiser as the bare module does: `(module, precision, init_fn, *args, **kwargs)`.
      module: whose variable it is.
      own: `module.variable` of Flax.
      col, name, args, kwargs: arguments of `own`.
    """
    scope = ACTIVE.value
    if scope is None:
        return own(col, name, *args, **kwargs)
    precision = module_precision(scope, module)
    if col in ("params", "cache"):
        return _cast_variable(module, precision, own, col, name, *args, **kwargs)
    init_fn, is_new = args[0] if args else None, not module.has_variable(col, name)

    def first_value(*given: Any, **named: Any) -> Any:
        # In half, statistics would stand still.
        return jax.tree.map(_in_float32, as_bare(module, precision, init_fn, *given, **named))

    if init_fn is not None and is_new:
        args = (first_value, *args[1:])
    made = own(col, name, *args, **kwargs)
    # State that a module computes in half and writes would have another dtype after each step.
    return CastVariable(made, lambda value: value) if dtypes.is_half(precision.compute_dtype) else made


def _cast_variable(
    module: nn.Module,
    precision: ModulePrecision,
    own: Callable[..., Any],
    col: str,
    name: str,
    init_fn: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes or reads a variable that is a parameter, or in the collection "cache"."""
    if col == "params":

        def init(*args: Any, **kwargs: Any) -> Any:
            return dtypes.cast_floating(init_fn(*args, **kwargs), precision.param_dtype)

        made = own(col, name, init_fn and init, *args, **kwargs)
        dtype, policy = precision.used_param_dtype, precision.policy
        return CastVariable(made, lambda value: cast_weight(value, dtype, policy))
    is_new = not module.has_variable(col, name)
    made = own(col, name, init_fn, *args, **kwargs)
    compute, stored = precision.compute_dtype, jax.tree.leaves(made.value)
    others = {x.dtype for x in stored if dtypes.is_floating_array(x) and x.dtype != compute}
    if is_new or init_fn is None or not (others and any(map(dtypes.is_half, (compute, *others)))):
        return made
    kwargs.pop("unbox", None)
    wanted = jax.eval_shape(lambda: init_fn(*args, **kwargs))
    if jax.tree.structure(wanted) != jax.tree.structure(made.value):
        return made
    return CastVariable(made, lambda value: jax.tree.map(dtypes.in_dtype_of, wanted, value))


class CastVariable(nn.Variable):
    """A variable that may be read in another dtype than the one it is stored in, and keeps that."""

    def __init__(self, variable: nn.Variable, cast: Callable[[Any], Any]):
        super().__init__(variable.scope, variable.collection, variable.name, variable.unbox)
        self._cast = cast

    @property
    def value(self) -> Any:
        """The value, cast; what is assigned is stored in the dtypes of what it replaces."""
        return self._cast(nn.Variable.value.fget(self))  # type: ignore[attr-defined]

    @value.setter
    def value(self, value: Any) -> None:
        stored = nn.Variable.value.fget(self)  # type: ignore[attr-defined]
        if jax.tree.structure(stored) == jax.tree.structure(value):
            value = jax.tree.map(dtypes.in_dtype_of, stored, value)
        nn.Variable.value.fset(self, value)  # type: ignore[attr-defined]


def _in_float32(x: Any) -> Any:
    return dtypes.cast_leaf(x, dtypes.promote_dtype(x.dtype)) if dtypes.is_floating_array(x) else x
