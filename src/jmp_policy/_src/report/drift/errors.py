"""Errors of arrays, and sums of their squares."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.jaxpr.float32_replay import to_float32

#: Squares of gradients leave float32's range below 1e-19: cotangents are multiplied by this first.
_BACKWARD_UNIT = 2.0**32

#: A sum of squares below this may have lost some. Those of errors are smaller, and float32 ends at 1e-38.
LEAST = 1e-22


@dataclasses.dataclass(frozen=True)
class Errors:
    """Computes errors of arrays.

    Args:
      quick: whether to take all numbers for finite, and their squares for normal numbers. Then an error is a
        plain subtraction, which compilers put into the sum over its squares: a CPU adds it up in half the
        time and without memory for it. Sums of other numbers are not finite, or less than `LEAST`.
    """

    quick: bool = False

    def unit(self, backward: bool) -> float:
        """Returns a power of two by which errors are to be multiplied, of gradients or of other values."""
        return _BACKWARD_UNIT if backward and not self.quick else 1.0

    def difference(self, value: Any, exact: Any, unit: float = 1.0) -> Any:
        """Returns the error of a value in float32; none where both are equally infinite, or both NaN.

        Args:
          value, exact: arrays of one shape.
          unit: power of two that the error is multiplied by.
        """
        if value is exact:
            return jnp.zeros((), jnp.float32)
        value, exact = _numbers(value), _numbers(exact)
        if self.quick:
            return _times(value - exact, unit)
        same = (value == exact) | (jnp.isnan(value) & jnp.isnan(exact))
        return jnp.where(same, 0, _times(value, unit) - _times(exact, unit))

    def finite(self, x: Any, unit: float = 1.0) -> Any:
        """Returns the numbers of an array, times a unit; 0 for those that are not finite."""
        x = _numbers(x)
        return _times(x if self.quick else jnp.where(jnp.isfinite(x), x, 0), unit)


def squares(x: Any) -> Any:
    """Returns the sum of the squares of an array's magnitudes."""
    square = jnp.square(jnp.abs(x) if jnp.iscomplexobj(x) else x)
    # The last axis last: compilers for CPUs vectorise no sum along it.
    return jnp.sum(jnp.sum(square, range(square.ndim - 1)))


def _numbers(x: Any) -> Any:
    """Returns the numbers of an array in a floating or complex dtype; zeros for keys."""
    x = to_float32(jnp.asarray(x))
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == jax.dtypes.float0:
        return jnp.zeros(x.shape, jnp.float32)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _times(x: Any, unit: float) -> Any:
    return x * np.asarray(unit, x.dtype) if unit != 1.0 else x
