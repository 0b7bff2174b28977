"""Divides and selects arrays: the small ones so that a GPU starts few kernels for all of them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.jaxpr.data_flow import before_cast
from jmp_policy._src.jaxpr.device_dispatch import by_devices
from jmp_policy._src.loss_scaling import one_gpu


def is_small(x: Any) -> bool:
    """Whether starting a kernel for an array takes longer than its arithmetic."""
    return all(isinstance(size, int) for size in x.shape) and x.size <= one_gpu.SMALL


class Decision:
    """Boolean scalar that many selections depend on."""

    def __init__(self, flag: jax.Array):
        self.flag = flag

    @functools.cached_property
    def for_small(self) -> jax.Array:
        """The same boolean, for arithmetic on small arrays that XLA may merge."""
        return fusable_flag(self.flag)

    def select(self, on_true: jax.Array, on_false: jax.Array) -> jax.Array:
        """The first array where the boolean holds, else the second; both of one shape and dtype."""
        # Large arrays are selected by the scalar: a kernel that reads and writes dozens of them saves
        # launches, but no time that anybody has measured.
        return lax.select(self.for_small if is_small(on_true) else self.flag, on_true, on_false)


def fusable_flag(flag: jax.Array) -> jax.Array:
    """The same boolean scalar, such that XLA fuses what reads it."""
    return _flag(flag)[0]


_flag = by_devices(
    "shared_flag",
    lambda flag: [flag],
    one_gpu=one_gpu.flag_in_array,
    types=lambda flag: [jax.ShapeDtypeStruct((), jnp.bool_)],
)


def divide(numbers: Sequence[Any], divisor: jax.Array) -> list[jax.Array]:
    """Divides floating and complex arrays by a scalar, in float32 those that have fewer bits, and floats."""
    arrays = [_as_made(jnp.asarray(x, jnp.float32 if isinstance(x, float) else None)) for x in numbers]
    return _divide(jnp.asarray(divisor), *arrays) if arrays else []


def _as_made(x: jax.Array) -> jax.Array:
    """The half array that a large one with three axes was cast from; any other itself."""
    source = before_cast(x) if x.ndim == one_gpu.AXES and not is_small(x) else x
    return source if is_half(source.dtype) and x.dtype == promote_dtype(source.dtype) else x


def _quotients(divisor: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    types = [promote_dtype(x.dtype) for x in arrays]
    wide = [lax.convert_element_type(x, dtype) for x, dtype in zip(arrays, types, strict=True)]
    return [lax.div(x, lax.broadcast(lax.convert_element_type(divisor, x.dtype), x.shape)) for x in wide]


_divide = by_devices(
    "unscale",
    _quotients,
    one_gpu=functools.partial(one_gpu.jointly, _quotients),
    types=lambda _, *arrays: [jax.ShapeDtypeStruct(x.shape, promote_dtype(x.dtype)) for x in arrays],
    derivative="of anywhere",
)
