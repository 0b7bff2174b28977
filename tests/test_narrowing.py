"""Rounding to nearest on bits is the cast, for every number of a narrow dtype and every tie between two."""

import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy._src.core.narrowing import rounded

DTYPES = [
    "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float4_e2m1fn",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_and_ties_are_those_of_the_cast(name):
    dtype = jnp.dtype(name)
    patterns = np.arange(16 if "float4" in name else 2 ** (8 * dtype.itemsize))
    with np.errstate(invalid="ignore"):  # Signalling NaN.
        numbers = patterns.astype(f"uint{8 * dtype.itemsize}").view(dtype).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(ties, np.float32(side)) for side in (np.inf, -np.inf)]
    x = np.concatenate([numbers.astype(np.float32), ties, *around, np.float32([np.inf, -np.inf])])
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0)]  # What is subnormal in float32 counts as 0.
    with np.errstate(over="ignore", invalid="ignore"):
        cast = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(x), dtype), cast)
