"""Rounds arrays to the values of a narrower dtype, such that the compiler does not undo it.

It may drop a cast to float16 and back (XLA's "excess precision"), and then nothing is rounded. It has to do
arithmetic, and it does not look through a barrier. `lax.reduce_precision` alone would flush the subnormal
numbers of float16 to zero. `round_once` rounds a product with a number of double precision.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_FLOAT32_EXPONENT_BITS = 8


def rounded(x: Any, dtype: Any) -> Any:
    """Rounds a float32 array to the nearest values of a half or float8 dtype.

    Args:
      x: float32 array of any shape.
      dtype: dtype of 16 bits or fewer.

    Returns:
      A float32 array, equal to `x.astype(dtype).astype(float32)`: ties go to even, what is too large becomes
      infinite, or NaN in formats without infinity.

    Example:
      >>> [float(rounded(jnp.float32(value), "float16")) for value in (0.1, 1e-7, 65520.0)]
      [0.0999755859375, 1.1920928955078125e-07, inf]
    """
    info = jnp.finfo(dtype)
    y = lax.reduce_precision(x, _FLOAT32_EXPONENT_BITS, info.nmant)
    if info.nexp < _FLOAT32_EXPONENT_BITS:
        step = np.float32(info.smallest_subnormal)
        subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
        y = jnp.where(jnp.abs(x) < np.float32(info.smallest_normal), subnormal, y)
        # Infinite, or NaN.
        beyond = np.float32(np.asarray(np.inf, np.float32).astype(dtype))
        y = jnp.where(jnp.abs(y) > np.float32(info.max), beyond * jnp.sign(y), y)
    return y


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
