"""Several sums over arrays of one shape in one pass: one kernel to compile, not one for each."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def totals(arrays: Sequence[Any], magnitude: Any = None) -> list[Any]:
    """The sum over each array, and the largest of magnitudes.

    Args:
      arrays: real, of one shape or of shape ().
      magnitude: another array, of numbers that are not negative; None for none.

    Returns:
      Scalars, the largest magnitude last; in the widest dtype of all arrays.
    """
    terms = [*arrays] if magnitude is None else [*arrays, magnitude]
    if not terms:
        return []
    if max(x.size for x in terms) > _LONG:
        return [*map(_total, arrays), *([] if magnitude is None else [jnp.max(magnitude, initial=0)])]
    terms = list(jnp.broadcast_arrays(*(x.astype(jnp.result_type(*terms)) for x in terms)))
    join = _added if magnitude is None else _added_but_the_last
    if terms[0].ndim:
        zeros = tuple(np.zeros((), x.dtype) for x in terms)
        terms = list(lax.reduce(tuple(terms), zeros, join, range(terms[0].ndim)))
    return terms


#: XLA adds up one sum in parts, several one number after the other: 2**25 ones in float32 would be 2**24.
_LONG = 2**16


def _total(x: Any) -> Any:
    return jnp.sum(jnp.sum(x, range(x.ndim - 1)))


def _added(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(lax.add, x, y))


def _added_but_the_last(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return (*map(lax.add, x[:-1], y[:-1]), lax.max(x[-1], y[-1]))
