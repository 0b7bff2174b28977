"""Variables that a module makes or reads itself: parameters and decode caches, in the dtype of use.

A decode cache that the bare model's `init` made is float32, and the keys that a half-precision model writes
into it are not. `lax.dynamic_update_slice` takes one dtype, so the cache is read in the dtype that the module
would make it in, and what is written is stored in the dtype that it has: a loop over tokens carries it.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jmp_policy._src.core.cast import cast_floating, cast_leaf, is_floating_array
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.flax.linen.module_precision import module_precision
from jmp_policy._src.policy.scope import current
from jmp_policy._src.weight_grads.param_casts import cast_weight

#: The collection in which Flax's attention, and models that follow it, keep what they decoded.
CACHE = "cache"


class CastVariable(nn.Variable):
    """A variable that is read in another dtype than the one it is stored in."""

    def __init__(self, variable: nn.Variable, cast: Callable[[Any], Any]):
        super().__init__(variable.scope, variable.collection, variable.name, variable.unbox)
        self._cast = cast

    @property
    def value(self) -> Any:
        """Reads the value, cast; what is assigned is stored in the dtypes of what it replaces."""
        return self._cast(nn.Variable.value.fget(self))  # type: ignore[attr-defined]

    @value.setter
    def value(self, value: Any) -> None:
        stored = nn.Variable.value.fget(self)  # type: ignore[attr-defined]
        if jax.tree.structure(stored) == jax.tree.structure(value):
            value = jax.tree.map(lambda new, old: _in_dtype_of(old, new), value, stored)
        nn.Variable.value.fset(self, value)  # type: ignore[attr-defined]


def shadow_variable(module: nn.Module) -> Callable[..., Any]:
    """Returns a `module.variable` whose parameters and caches read in the dtype of use."""
    variable = module.variable

    @functools.wraps(variable)
    def governed_variable(col: str, name: str, init_fn: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Only what was given is handed on: the module's class may have a `variable` without `unbox`.
        scope = current()
        if scope is None or col not in ("params", CACHE):
            return variable(col, name, init_fn, *args, **kwargs)
        precision = module_precision(scope, module)
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

    return governed_variable


def _may_differ(stored: Any, compute: np.dtype) -> bool:
    """Returns whether a cache may be one that the module would make in another dtype."""
    dtypes = {x.dtype for x in jax.tree.leaves(stored) if is_floating_array(x)} - {compute}
    return any(is_half(compute) or is_half(dtype) for dtype in dtypes)


def _in_dtype_of(like: Any, x: Any) -> Any:
    both = is_floating_array(like) and is_floating_array(x)
    return cast_leaf(x, like.dtype) if both else x
