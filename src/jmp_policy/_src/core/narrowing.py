"""Rounds arrays to the values of a narrower dtype, to nearest or at random; no compiler undoes it.

XLA may drop a cast to float16 and back ("excess precision"), and then nothing is rounded. It has to do
integer operations on bits, and it does not look through a barrier. `lax.reduce_precision` would flush the
subnormal numbers of float16 to zero. `round_once` rounds a product with a number of double precision.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGN = np.uint32(0x8000_0000)
_INFINITY = np.uint32(0x7F80_0000)
_LEADING = np.uint32(0x0080_0000)

#: Random bits with which `rounded` goes towards zero, and away from it.
TOWARDS_ZERO, AWAY_FROM_ZERO = np.uint32(0), np.uint32(0xFFFF_FFFF)


def rounded(x: jax.Array, dtype: Any, bits: Any = None) -> jax.Array:
    """Rounds float32 numbers to the values of a half or float8 dtype, and returns them as float32.

    Args:
      x: float32 array.
      dtype: of 16 bits or fewer.
      bits: uint32 of the shape of `x`, uniformly random: each number then goes to one of its two neighbours,
        with the probability that makes the expectation the number itself. None rounds to nearest, ties
        to even.

    Returns:
      float32 array. Numbers of the dtype, infinities (or NaN) included, are unchanged. Beyond the largest
      finite number it is always rounded to nearest: none becomes infinite by chance. The subnormal numbers
      of float32 count as 0 for the other two.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> bits = jax.random.bits(jax.random.key(0), (10_000,), jnp.uint32)
      >>> x = rounded(jnp.full(10_000, 1 + 2.0**-9), jnp.bfloat16, bits)
      >>> sorted(set(x.tolist())), round(float((x > 1).mean()), 2)
      ([1.0, 1.0078125], 0.25)
    """
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    sign, magnitude = pattern & _SIGN, pattern & ~_SIGN
    info = jnp.finfo(dtype)
    largest, spare = _pattern(info.max), 23 - info.nmant
    reaches_as_low = info.minexp == jnp.finfo(jnp.float32).minexp
    # Numbers below the smallest normal one have fewer bits: one less per halving, down to the leading one.
    drop = np.uint32(spare)
    if not reaches_as_low:
        drop = jnp.clip(np.uint32(spare + 127 + info.minexp) - (magnitude >> 23), drop, np.uint32(23))
        drop = jnp.where(magnitude >= _pattern(info.smallest_normal), np.uint32(spare), drop)
    mask = (np.uint32(1) << drop) - np.uint32(1)
    last = (magnitude | _LEADING) >> drop & np.uint32(1)  # The last bit that is kept.
    carry = (mask >> 1) + last if bits is None else bits & mask
    new = (magnitude + carry) & ~mask
    if not reaches_as_low:
        smallest = info.smallest_subnormal
        between = _between_zero_and_smallest(magnitude, smallest, bits)
        new = jnp.where(magnitude < _pattern(smallest), between, new)
    # Infinite, or NaN. Half way there it is the number whose last bit is 0, as everywhere.
    beyond = _pattern(np.abs(np.asarray(np.inf, np.float32).astype(dtype)))
    midpoint = (
        largest + (np.uint32(1) << np.uint32(spare - 1)) + (~largest >> np.uint32(spare) & np.uint32(1))
    )
    new = jnp.where(new > largest, jnp.where(magnitude >= midpoint, beyond, largest), new)
    new = jnp.where(magnitude > _INFINITY, magnitude, new)
    return lax.bitcast_convert_type(sign | new, jnp.float32)


def _between_zero_and_smallest(magnitude: jax.Array, smallest: Any, bits: Any) -> jax.Array:
    """Rounds numbers between 0 and the smallest of a dtype to one of the two; as bit patterns."""
    share = lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(2.0**24 / float(smallest))
    threshold = np.float32(2.0**23) if bits is None else (~bits >> np.uint32(8)).astype(jnp.float32)
    return jnp.where(threshold < share, _pattern(smallest), np.uint32(0))


def _pattern(x: Any) -> np.uint32:
    return np.float32(x).view(np.uint32)


def narrowed(x: Any, dtype: Any) -> Any:
    """Casts an array to a half or float8 dtype for good: casts back give rounded values.

    Use it where the narrow array is kept. It takes half the memory of what `rounded` returns, and a CPU casts
    to float16 in a third of the time that this arithmetic takes.

    Args:
      x: array of any shape.
      dtype: dtype of 16 bits or fewer.

    Returns:
      `x.astype(dtype)`.

    Example:
      >>> [float(narrowed(jnp.float32(value), "float16")) for value in (0.1, 1e-7, 65520.0)]
      [0.0999755859375, 1.1920928955078125e-07, inf]
    """
    return lax.optimization_barrier(jnp.asarray(x).astype(dtype))


_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def round_once(scale: jax.Array, factor: float) -> jax.Array:
    """The product of a scale and a factor that is no float32 number, rounded once, as torch does.

    60 steps with 0.8 rounded to float32 drift away from torch's scale. So two errors are added back: that of
    rounding the factor, and that of the product (Dekker's method: both numbers are split into 12-bit halves,
    whose products are exact). One difference is left: products within 1e-9 of the middle between two float32
    numbers may be rounded to the other one, 3 % of those with 1.1.

    Args:
      scale: float32 scalar.
      factor: positive number.
    """
    if factor > _LARGEST_FLOAT32:
        return jnp.full_like(scale, jnp.inf)
    high = np.float32(factor)
    rest = np.float32(factor - float(high))
    if high > 2.0**100:
        return scale * high
    # Dekker's halves of a number above 2**115 are infinite, and the error of a product below 2**-102 is 0.
    # So the scale is first brought between 2**-66 and 2**66, and the product back; neither step rounds.
    small = scale < 1
    near = scale * jnp.where(small, np.float32(2.0**60), np.float32(2.0**-60))
    product = near * high

    def halves(x: Any) -> tuple[Any, Any]:
        upper = x * np.float32(4097)
        upper = upper - (upper - x)
        return upper, x - upper

    (a, b), (c, d) = halves(near), halves(high)
    error = ((a * c - product) + a * d + b * c) + b * d
    corrected = jnp.where(jnp.isfinite(error), product + (error + near * rest), product)
    return corrected * jnp.where(small, np.float32(2.0**-60), np.float32(2.0**60))
