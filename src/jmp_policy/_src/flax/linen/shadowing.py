"""A module's fields and its `param` and the like, replaced on the instance for the length of a call.

`module.param` makes parameters in param dtype and hands them out in the dtype of use; `dtype` fields say what
the policy says. What was there before comes back afterwards.

Initial values are those of the bare module, cast, and not drawn in half precision: initialisers run in
float32, with the module's own fields. But what they close over may have been computed in half:

    weight = self.param("weight", he_normal(), shape)              # half, where it is used
    self.param("norm", lambda key: jnp.linalg.norm(weight))        # of half values, and stored as float32

Such modules are noted in `Seen.drawn_in_half`, and `init` takes the parameters of the bare model instead.
"""

import contextlib
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jmp_policy._src.core import dtypes
from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.flax.linen import layers
from jmp_policy._src.flax.linen.governing import Location, locate, module_precision
from jmp_policy._src.flax.linen.special_calls import class_under_rules
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.scope import ACTIVE, Scope
from jmp_policy._src.weight_grads.param_casts import cast_weight


@contextlib.contextmanager
def shadow(
    scope: Scope, module: nn.Module, precision: ModulePrecision, location: Location, inputs: Any
) -> Iterator[None]:
    """Replaces the fields and methods of a module that its precision changes, for a call with some inputs."""
    state = module.__dict__
    path = scope.relative(location.path) if precision.policy.recipe else ""
    new = layers.overridden_fields(module, precision, scope, path, inputs)
    if "nnx_class" in state and is_instance_of(module, "flax.nnx.bridge", "ToLinen"):
        new["nnx_class"] = class_under_rules(scope, module, scope.relative(location.path), precision)
    # What an enclosing call of the same instance has put there already comes back afterwards.
    names = (*new, layers.ORIGINAL, layers.IN_FLOAT32, *_SHADOWS)
    before = {name: state[name] for name in names if name in state}
    original = {name: getattr(module, name) for name in new} | layers.original_fields(module)
    state.update(new)
    state[layers.ORIGINAL] = original
    if precision.island and not isinstance(module, layers.ISLANDS):
        state[layers.IN_FLOAT32] = True
    for name, stand_in in _SHADOWS.items():
        if name not in before:
            state[name] = functools.partial(stand_in, module, getattr(module, name))
    try:
        yield
    finally:
        for name in names:
            state.pop(name, None)
        state.update(before)


# Of the arguments only what was given is handed on: the module's class may have a `param` without `unbox`.
# Precisions are looked up at each read, not when the method was entered: an `intercept` in the method wins.


def _param(
    module: nn.Module, param: Any, /, name: str, init_fn: Any, *init_args: Any, **init_kwargs: Any
) -> Any:
    """Stands in for `module.param`: creates in param dtype, and returns in the dtype of use."""
    scope = ACTIVE.value
    if scope is None:
        return param(name, init_fn, *init_args, **init_kwargs)
    precision = module_precision(scope, module)
    # Of a parameter that exists, Flax asks for the shape alone.
    is_drawn = dtypes.is_half(precision.compute_dtype) and not module.has_variable("params", name)
    if is_drawn and _may_see_half((init_fn, init_args, init_kwargs), set()):
        scope.seen.drawn_in_half.add(scope.relative(locate(module, scope.location).path))
    value = param(name, functools.partial(_draw, module, precision, init_fn), *init_args, **init_kwargs)
    if dtypes.has_complex(value) and "dtype" in layers.original_fields(module):
        module.__dict__["dtype"] = layers.own_dtype(module)
    return cast_weight(value, precision.used_param_dtype, precision.policy)


def _draw(module: nn.Module, precision: ModulePrecision, init_fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Initial values as the bare module draws them, in param dtype.

    Modules hand `self.dtype` to initialisers, and close over it.
    """
    value = _as_bare(module, precision, init_fn, *args, **kwargs)
    return dtypes.cast_floating(value, precision.param_dtype)


def _as_bare(
    module: nn.Module, precision: ModulePrecision, init_fn: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Initial values with the module's own fields."""
    draw_dtype, compute_dtype = dtypes.promote_dtype(precision.param_dtype), precision.compute_dtype

    def as_drawn(value: Any) -> Any:
        return draw_dtype if _same_dtype(value, compute_dtype) else value

    state, original = module.__dict__, layers.original_fields(module)
    governed = {name: state[name] for name in original}
    if dtypes.is_half(compute_dtype):
        original = {name: as_drawn(value) for name, value in original.items()}
        args, kwargs = map(as_drawn, args), {name: as_drawn(value) for name, value in kwargs.items()}  # type: ignore[assignment]
    state.update(original)
    try:
        return init_fn(*args, **kwargs)
    finally:
        state.update(governed)


def _same_dtype(value: Any, dtype: np.dtype) -> bool:
    """Whether an initialiser's argument is the half type that the policy put into `dtype` fields."""
    if not isinstance(value, type | np.dtype | str):
        return False
    try:
        return jax.numpy.dtype(value) == dtype
    except TypeError:
        return False


def _may_see_half(value: Any, found: set[int]) -> bool:
    """Whether an initialiser, or an argument of one, may hold something that a policy made half.

    Looked into are closures, default values, partials, methods and containers; a module may hold anything.
    """
    if id(value) in found:
        return False
    found.add(id(value))
    if isinstance(value, dtypes.ARRAYS):
        return dtypes.is_half(value.dtype)
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type | np.dtype):
        return dtypes.is_dtype_or_none(value) and dtypes.is_half(value)
    parts: Any = ()
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, types.MethodType):
        parts = [value.__self__, value.__func__]
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple | list):
        parts = value
    return any(_may_see_half(part, found) for part in parts)


def _stand_in(name: str, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `module.get_variable` and the like."""
    from jmp_policy._src.flax.linen import variables  # Few modules read or make any.

    return getattr(variables, name)(*args, **kwargs)


_SHADOWS: Mapping[str, Any] = {
    "param": _param,
    "get_variable": functools.partial(_stand_in, "get_variable"),
    "put_variable": functools.partial(_stand_in, "put_variable"),
    "variable": functools.partial(_stand_in, "variable", _as_bare),
}
