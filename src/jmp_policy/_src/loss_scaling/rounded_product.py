"""Multiplies a float32 number by a factor of double precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
