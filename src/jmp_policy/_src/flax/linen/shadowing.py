"""A module's fields and its `param`, replaced on the instance for the length of a call.

`module.param` makes parameters in param dtype and hands them out in the dtype of use; `dtype` fields say
what the policy says. What was there before comes back afterwards.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jmp_policy._src.core.cast import cast_floating, has_complex
from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.core.imported import is_instance_of
from jmp_policy._src.flax.linen import layers
from jmp_policy._src.flax.linen.initial_values import may_see_half
from jmp_policy._src.flax.linen.module_precision import ORIGINAL, module_precision, original_fields, own_field
from jmp_policy._src.flax.linen.places import place_of
from jmp_policy._src.flax.linen.variables import shadow_variable
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.rules import (
    matches,
)
from jmp_policy._src.policy.scope import Scope, current
from jmp_policy._src.weight_grads.param_casts import cast_weight


@contextlib.contextmanager
def shadowed(scope: Scope, module: nn.Module, precision: ModulePrecision, inputs: Any) -> Iterator[None]:
    """Replaces the fields and methods of a module that its precision changes, for a with-block.

    Args:
      scope: the active scope.
      module: the module that is called.
      precision: what the rules mean for it.
      inputs: what it is called with.
    """
    new, is_real = {}, not (layers.has_uncast_params(module) or has_complex(inputs))
    if not (scope.rules.keep_module_dtypes and getattr(module, "dtype", None) is not None):
        new.update(layers.field_overrides(module, precision.policy, precision.island))
    if not is_real and "dtype" in new:
        # Flax casts what a layer computes with to its `dtype`, complex numbers too.
        new["dtype"] = own_field(module, "dtype")
    if is_real and scope.rules.float32_islands and is_half(precision.compute_dtype):
        new.update(layers.attention_overrides(module))
    path = scope.relative(place_of(module, scope.place).path)
    new.update(layers.product_overrides(module, precision, path))
    if is_instance_of(module, "flax.nnx.bridge", "ToLinen"):
        new["nnx_class"] = _under_rules(scope, module, precision)
    state = module.__dict__
    # What an enclosing call of the same instance has put there already comes back afterwards.
    before = {name: state[name] for name in (*new, ORIGINAL, *_SHADOWS) if name in state}
    original = {name: getattr(module, name) for name in new} | original_fields(module)
    state.update(new)
    state[ORIGINAL] = original
    for name, make in _SHADOWS.items():
        if name not in before:
            state[name] = make(module)
    try:
        yield
    finally:
        for name in (*new, ORIGINAL, *_SHADOWS):
            state.pop(name, None)
        state.update(before)


def _under_rules(scope: Scope, module: Any, precision: ModulePrecision) -> Callable[..., Any]:
    """Returns the class of a bridged NNX module, with modules under the same rules as the bridge."""
    make, path = module.nnx_class, scope.relative(place_of(module, scope.place).path)
    inside = scope.rules.relative_to(path, precision.policy).without_output_cast(precision.policy)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bridged = make(*args, **kwargs)
        framework = framework_of(bridged)
        if framework is None:
            return bridged
        new, asked = framework.wrap_part(bridged, inside)
        for below, part in asked:
            whole = "/".join(filter(None, (path, below)))
            scope.seen.paths.add(whole)
            overrides = enumerate(scope.rules.overrides)
            scope.seen.matched.update(i for i, (pattern, _) in overrides if matches(pattern, whole, part))
        return new

    return wrapped


def _shadow_param(module: nn.Module) -> Callable[..., Any]:
    """Returns a `module.param` that creates in param dtype and returns in the dtype of use."""
    param = module.param

    @functools.wraps(param)
    def governed_param(name: str, init_fn: Callable[..., Any], *init_args: Any, **init_kwargs: Any) -> Any:
        # Only what was given is handed on: the module's class may have a `param` without `unbox`.
        scope = current()
        if scope is None:
            return param(name, init_fn, *init_args, **init_kwargs)
        # Looked up now, not when the method was entered: an `intercept` inside the method wins.
        precision = module_precision(scope, module)
        draw_dtype = promote_dtype(precision.param_dtype)

        def as_drawn(value: Any) -> Any:
            return draw_dtype if _same_dtype(value, precision.compute_dtype) else value

        def init(*args: Any, **kwargs: Any) -> Any:
            # Of a parameter that exists, Flax asks for the shape alone.
            is_drawn = is_half(precision.compute_dtype) and not module.has_variable("params", name)
            if is_drawn and may_see_half((init_fn, init_args, init_kwargs)):
                scope.seen.drawn_in_half.add(scope.relative(place_of(module, scope.place).path))
            # Modules hand self.dtype to initialisers, and close over it; initial values must be those of
            # the bare module, cast, and not drawn in half.
            with _fields(module, {k: as_drawn(v) for k, v in original_fields(module).items()}):
                value = init_fn(*map(as_drawn, args), **{k: as_drawn(v) for k, v in kwargs.items()})
            return cast_floating(value, precision.param_dtype)

        value = param(name, init, *init_args, **init_kwargs)
        if has_complex(value) and "dtype" in original_fields(module):
            module.__dict__["dtype"] = own_field(module, "dtype")
        return cast_weight(value, precision.used_param_dtype, precision.policy)

    return governed_param


def _shadow_get_variable(module: nn.Module) -> Callable[..., Any]:
    """Returns a `module.get_variable` that casts what it reads from the parameters."""
    get_variable = module.get_variable

    @functools.wraps(get_variable)
    def governed_get_variable(col: str, *args: Any, **kwargs: Any) -> Any:
        value, scope = get_variable(col, *args, **kwargs), current()
        if scope is None or col != "params":
            return value
        precision = module_precision(scope, module)
        return cast_weight(value, precision.used_param_dtype, precision.policy)

    return governed_get_variable


_SHADOWS = {"param": _shadow_param, "get_variable": _shadow_get_variable, "variable": shadow_variable}


@contextlib.contextmanager
def _fields(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    state = module.__dict__
    before = {name: state[name] for name in values}
    state.update(values)
    try:
        yield
    finally:
        state.update(before)


def _same_dtype(value: Any, dtype: np.dtype) -> bool:
    """Returns whether an initialiser's argument is the half type that the policy put into `dtype` fields."""
    if not is_half(dtype) or not isinstance(value, type | np.dtype | str):
        return False
    try:
        return jax.numpy.dtype(value) == dtype
    except TypeError:
        return False
