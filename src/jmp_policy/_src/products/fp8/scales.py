"""Computes the scales by which operands are divided before they are rounded to float8.

A scale is a power of two, so that dividing by it and multiplying the product with it are exact.
TransformerEngine divides by the largest value itself by default, and rounds twice; a power of two costs at
most one binary digit of range, of the 17 to 32 that float8 has.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.device_dispatch import by_devices

#: Types of values, with three binary digits after the point and a range of 2**17, and of gradients, with two
#: and 2**32.
VALUE, GRADIENT = "float8_e4m3fn", "float8_e5m2"


def scale_of(x: Any, format: str, axes: Sequence[int] | None = None) -> jax.Array:
    """Computes the scale of an array from its largest absolute value; it has no gradient.

    Args:
      x: a floating array. Inside `shard_map` it is one device's part, and the largest value is that of the
        whole array.
      format: name of the float8 dtype.
      axes: axes that share a scale; None for all.

    Returns:
      float32 powers of two, of the shape of `x` with 1 for `axes`, or a scalar. Infinity where a value is not
      finite, which makes all of the product NaN; where all are 0 it is the smallest, and the product is 0.
    """
    x = lax.stop_gradient(x)
    return float8_scale(x, format, None if axes is None else tuple(axes), _split_over(x))


def _split_over(x: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh over which the parts of an array may differ, inside `shard_map`.

    Without `check_vma` JAX does not know them: then it is all axes. The maximum over equal parts is theirs.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return ()
    varying = compat.varying(jax.typeof(x))
    is_known = compat.varying(jax.eval_shape(lambda: lax.axis_index(manual[0])))
    return tuple(axis for axis in manual if axis in varying or not is_known)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def float8_scale(x: Any, format: str, axes: tuple[int, ...] | None, over: tuple[str, ...]) -> jax.Array:
    """Computes a scale; a `jit`, so that jaxprs and profiles show one operation of this name."""
    is_empty = any(isinstance(size, int) and size == 0 for size in x.shape)  # Sizes may be symbolic.
    x = jnp.zeros((1,) * x.ndim, x.dtype) if is_empty else x
    if axes is None:
        (scale,) = _OF_TENSOR[format](x)
    else:
        scale = _power_for(jnp.max(jnp.abs(x), axis=axes, keepdims=True), format)
    return lax.pmax(scale, over) if over else scale


def _power_for(largest: jax.Array, format: str) -> jax.Array:
    """Returns the least powers of two by which largest values can be divided to fit a format."""
    # Half as much more, a little less for exact powers, rounds to the next power of two.
    more = largest.astype(jnp.float32) * np.float32(1.499 / float(jnp.finfo(format).max))
    power = lax.reduce_precision(more, exponent_bits=8, mantissa_bits=0)
    return lax.max(power, np.finfo(np.float32).tiny)


def _at_once(format: str, x: jax.Array) -> list[jax.Array]:
    """Reduces a tensor, then computes the scale: several devices communicate one scalar."""
    return [_power_for(jnp.max(jnp.abs(x)), format)]


def _in_two_kernels(format: str, x: jax.Array) -> list[jax.Array]:
    """Computes the scale of each element, or of each row of a matrix, then the largest of them.

    XLA reduces a large tensor in two kernels either way. Computed from the one result, the scale is often a
    third kernel, as all that use it would have to compute it again. XLA itself divides a tensor best, as it
    knows the order in memory; but a matrix, such as a weight, it would first copy transposed for its product.
    """
    if x.ndim == 2:
        if x.shape[0] > _ROWS or x.shape[1] > _ROW_SIZE:
            return _at_once(format, x)
        x = jnp.max(jnp.abs(x), axis=1)
    return [jnp.max(_power_for(jnp.abs(x), format))]


#: What XLA reduces in one kernel: so many rows of so many elements to one value each, and their results to
#: one. A longer row takes two kernels, and so does the second step for more rows.
_ROWS, _ROW_SIZE = 2**13, 2**14

#: How the scale of a whole tensor is computed, by format.
_OF_TENSOR = {
    format: by_devices(
        "float8_scale",
        functools.partial(_at_once, format),
        one_gpu=functools.partial(_in_two_kernels, format),
        types=lambda _: [jax.ShapeDtypeStruct((), jnp.float32)],
    )
    for format in (VALUE, GRADIENT)
}


def quantised(x: Any, scale: Any, format: str, *, saturates: bool = False) -> jax.Array:
    """Returns an array, divided by its scale, in float8: 0 or NaN where the scale is infinite.

    Args:
      x: a half array.
      scale: its scale.
      format: name of the float8 dtype.
      saturates: whether values beyond the range become the largest. What is not finite is NaN then.
    """
    divided = x.astype(jnp.float32) / scale
    if saturates:
        largest = float(jnp.finfo(format).max)
        divided = jnp.where(jnp.isfinite(divided), jnp.clip(divided, -largest, largest), jnp.nan)
    return divided.astype(format)


@jax.custom_batching.custom_vmap
def largest_of(x: Any) -> jax.Array:
    """Computes the largest absolute value of an array: inside `shard_map` of the whole, in `vmap` of all."""
    largest, over = jnp.max(jnp.abs(x)).astype(jnp.float32), _split_over(x)
    return lax.pmax(largest, over) if over else largest


@largest_of.def_vmap
def _largest_of_batch(axis_size: int, in_batched: Sequence[bool], x: Any) -> tuple[jax.Array, bool]:
    return largest_of(x), False


def is_float8_scale(eqn: Any) -> bool:
    """Returns whether an equation computes scales: the call of `float8_scale` as jaxprs show it."""
    return eqn.params.get("name") == "float8_scale"
