"""What rounding to half precision does to float32 values, with float32 arithmetic alone.

A pair of casts would not do: XLA may drop it. `lax.reduce_precision` stays, but makes float16's subnormal
numbers zero, which are rounded here as multiples of the smallest.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Grid(NamedTuple):
    """Numbers of a half dtype.

    Args:
      exponent_bits, mantissa_bits: as `lax.reduce_precision` takes them.
      normal: smallest normal number.
      spacing: distance of the subnormal numbers; 0 where float32 has no smaller ones to speak of.
      limit: the smallest magnitude that is rounded to infinity.
    """

    exponent_bits: int
    mantissa_bits: int
    normal: float
    spacing: float
    limit: float


#: By dtype, in the order of the statistics of a tap.
GRIDS = {
    "float16": Grid(5, 10, 2.0**-14, 2.0**-24, 65520.0),
    "bfloat16": Grid(8, 7, 2.0**-126, 0.0, 2.0**128 * (1 - 2.0**-9)),
}


def rounded(x: jax.Array, grid: Grid) -> jax.Array:
    """Returns the nearest numbers of a half dtype, ties to even, as float32."""
    x = x.astype(jnp.float32)
    nearest = lax.reduce_precision(x, grid.exponent_bits, grid.mantissa_bits)
    if not grid.spacing:
        return nearest
    return jnp.where(jnp.abs(x) < grid.normal, jnp.round(x / grid.spacing) * grid.spacing, nearest)


def rounding_error(x: jax.Array, grid: Grid, scale: jax.Array | float = 1.0) -> jax.Array:
    """Returns what rounding `x * scale` adds to x; 0 for what is rounded to infinity, which is counted apart.

    Args:
      x: float32, any shape.
      grid: the numbers to round to.
      scale: a power of two.
    """
    error = rounded(x * scale, grid) / scale - x
    return jnp.where(jnp.isfinite(error), error, 0.0)


def overflows(x: jax.Array, grid: Grid) -> jax.Array:
    """Returns how many finite values become infinite; float32 scalar."""
    magnitude = jnp.abs(x)
    # A number that is infinite in float32 is not this dtype's fault.
    return jnp.sum((magnitude >= np.float32(grid.limit)) & (magnitude < jnp.inf), dtype=jnp.float32)


def underflows(x: jax.Array, error: jax.Array) -> jax.Array:
    """Returns how many values other than zero become zero, for what rounding adds to them; float32 scalar."""
    return jnp.sum((error == -x) & (x != 0), dtype=jnp.float32)
