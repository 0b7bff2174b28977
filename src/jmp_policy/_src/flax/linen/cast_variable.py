"""Variables that a module makes or reads itself: parameters and decode caches, in the dtype of use.

A decode cache that the bare model's `init` made is float32, and the keys that a half-precision model writes
into it are not. `lax.dynamic_update_slice` takes one dtype, so the cache is read in the dtype that the module
would make it in, and what is written is stored in the dtype that it has: a loop over tokens carries it.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jmp_policy._src.core.dtypes import cast_floating, cast_leaf, is_floating_array, is_half
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.weight_grads.param_casts import cast_weight


def cast_variable(
    module: nn.Module,
    precision: ModulePrecision,
    variable: Callable[..., Any],
    col: str,
    name: str,
    init_fn: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes or reads a variable that is a parameter, or in the collection "cache".

    Args:
      module: whose variable it is.
      precision: what the rules mean for the module.
      variable: `module.variable` of Flax.
      col, name, init_fn, args, kwargs: its arguments.
    """
    if col == "params":

        def init(*args: Any, **kwargs: Any) -> Any:
            return cast_floating(init_fn(*args, **kwargs), precision.param_dtype)

        made = variable(col, name, init_fn and init, *args, **kwargs)
        dtype, policy = precision.used_param_dtype, precision.policy
        return CastVariable(made, lambda value: cast_weight(value, dtype, policy))
    is_new = not module.has_variable(col, name)
    made = variable(col, name, init_fn, *args, **kwargs)
    if is_new or init_fn is None or not _may_differ(made.value, precision.compute_dtype):
        return made
    kwargs.pop("unbox", None)
    wanted = jax.eval_shape(lambda: init_fn(*args, **kwargs))
    if jax.tree.structure(wanted) != jax.tree.structure(made.value):
        return made
    return CastVariable(made, lambda value: jax.tree.map(_in_dtype_of, wanted, value))


class CastVariable(nn.Variable):
    """A variable that is read in another dtype than the one it is stored in."""

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
            value = jax.tree.map(_in_dtype_of, stored, value)
        nn.Variable.value.fset(self, value)  # type: ignore[attr-defined]


def _may_differ(stored: Any, compute: np.dtype) -> bool:
    """Whether a cache may be one that the module would make in another dtype."""
    dtypes = {x.dtype for x in jax.tree.leaves(stored) if is_floating_array(x)} - {compute}
    return any(is_half(compute) or is_half(dtype) for dtype in dtypes)


def _in_dtype_of(like: Any, x: Any) -> Any:
    both = is_floating_array(like) and is_floating_array(x)
    return cast_leaf(x, like.dtype) if both else x
