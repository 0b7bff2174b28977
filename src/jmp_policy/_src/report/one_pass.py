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
    terms = list(jnp.broadcast_arrays(*(x.astype(jnp.result_type(*terms)) for x in terms)))
    join = _added if magnitude is None else _added_but_the_last
    # The last axis last: compilers for CPUs vectorise no sum along it.
    for axes in (tuple(range(terms[0].ndim - 1)), (0,)) if terms[0].ndim else ():
        terms = list(lax.reduce(tuple(terms), tuple(np.zeros((), x.dtype) for x in terms), join, axes))
    return terms


def _added(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(lax.add, x, y))


def _added_but_the_last(x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
    return (*map(lax.add, x[:-1], y[:-1]), lax.max(x[-1], y[-1]))
