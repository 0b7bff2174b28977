"""Measures what rounding to half precision does to float32 values."""

import jax
import jax.numpy as jnp

from jmp_policy._src.core.narrowing import rounded

#: In the order of the statistics of a tap.
DTYPES = ("float16", "bfloat16")


def rounding_error(x: jax.Array, dtype: str, scale: jax.Array | float = 1.0) -> jax.Array:
    """Returns what rounding `x * scale` adds to x; 0 for what is rounded to infinity, which is counted apart.

    Args:
      x: array of any shape; computed with in float32.
      dtype: the half dtype to round to.
      scale: a power of two.
    """
    x = x.astype(jnp.float32)
    error = rounded(x * scale, dtype) / scale - x
    return jnp.where(jnp.isfinite(error), error, 0.0)


def overflows(x: jax.Array, dtype: str) -> jax.Array:
    """Returns how many finite values become infinite; float32 scalar."""
    x = x.astype(jnp.float32)
    # A number that is infinite in float32 is not this dtype's fault.
    return jnp.sum(jnp.isfinite(x) & jnp.isinf(rounded(x, dtype)), dtype=jnp.float32)


def underflows(x: jax.Array, error: jax.Array) -> jax.Array:
    """Returns how many values other than zero become zero, for what rounding adds to them; float32 scalar."""
    return jnp.sum((error == -x) & (x != 0), dtype=jnp.float32)
