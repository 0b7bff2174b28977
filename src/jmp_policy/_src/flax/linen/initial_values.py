"""Initial values that depend on what a half-precision model computes, drawn as the bare model draws them.

    weight = self.param("weight", he_normal(), shape)              # half, where it is used
    self.param("norm", lambda key: jnp.linalg.norm(weight))        # of half values, and stored as float32

Initialisers run in float32 in any case; but what they close over (a parameter made before, a constant in
`self.dtype`) was computed in half. Then `init` of the bare model is run too, and its parameters are taken.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jmp_policy._src.core.cast import cast_leaf, is_floating_array
from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half


def may_see_half(value: Any, found: set[int] | None = None) -> bool:
    """Returns whether an initialiser, or an argument of one, may hold something that a policy made half.

    Looked into are closures, default values, partials, methods and containers; a module may hold anything.
    """
    found = set() if found is None else found
    if id(value) in found:
        return False
    found.add(id(value))
    if is_floating_array(value):
        return is_half(value.dtype)
    if isinstance(value, nn.Module):
        return True
    if isinstance(value, type | np.dtype):
        return value is not None and is_dtype_or_none(value) and is_half(value)
    return any(may_see_half(part, found) for part in _parts(value))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else []


def with_params_of(variables: Any, bare: Any) -> Any:
    """Returns the variables with the parameters of the bare model, cast to the dtypes that they have."""
    params = jax.tree.map(_as_stored, variables["params"], bare["params"])
    return type(variables)({**variables, "params": params})


def _as_stored(stored: Any, value: Any) -> Any:
    both = is_floating_array(stored) and is_floating_array(value)
    return cast_leaf(value, stored.dtype) if both else value
