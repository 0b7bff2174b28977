"""Selects by one decision so that XLA can merge the small selections.

On a skipped step moments, counters and batch statistics keep their values. So each of them is a selection by
one boolean, which is known at the end of the backward pass: a kernel for each small array, in a network with
batch normalisation one for every mean and every variance. XLA's GPU compiler merges operations of one shape
that read the same array, and does not count a scalar as one. So where a program is for one GPU, small arrays
are selected by an element of an array of two.

Large arrays are selected by the scalar: a kernel that reads and writes dozens of them saves launches, but no
time that anybody has measured.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.jaxpr.device_dispatch import by_devices

#: Arrays of at most this many elements are small: starting a kernel takes longer than their arithmetic.
SMALL = 2**13


def is_small(x: Any) -> bool:
    """Returns whether starting a kernel for an array takes longer than its arithmetic."""
    return all(isinstance(size, int) for size in x.shape) and x.size <= SMALL


class Decision:
    """Boolean scalar that many selections depend on."""

    def __init__(self, flag: jax.Array):
        self.flag = flag

    @functools.cached_property
    def for_small(self) -> jax.Array:
        """Returns the boolean for selections that XLA may merge; same value."""
        return shared(self.flag)

    def select(self, on_true: jax.Array, on_false: jax.Array) -> jax.Array:
        """Returns the first array where the boolean holds, else the second; both of one shape and dtype."""
        return lax.select(self.for_small if is_small(on_true) else self.flag, on_true, on_false)


def shared(flag: jax.Array) -> jax.Array:
    """Returns a boolean scalar, for arithmetic on small arrays that XLA may merge; same value."""
    return _shared(flag)[0]


def _element(flag: jax.Array) -> list[jax.Array]:
    # Without the barrier XLA would see that the element is the scalar.
    return [lax.optimization_barrier(lax.broadcast(flag, (2,)))[0]]


_shared = by_devices(
    "shared_flag",
    lambda flag: [flag],
    one_gpu=_element,
    types=lambda flag: [jax.ShapeDtypeStruct((), jnp.bool_)],
)
