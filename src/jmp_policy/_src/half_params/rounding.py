"""Rounds float32 numbers to the values of narrower dtypes, to nearest or at random.

An update smaller than half the distance to a parameter's neighbour vanishes when it is added, step after
step. Master weights, stochastic rounding and Kahan summation prevent that, and all three round here: by
integer operations on float32 bits, since XLA may leave out a cast to half and back, and
`lax.reduce_precision` turns the subnormal numbers of float16 into zeros.

Below are the checks and the run of the wrapped transformation that all wrappers of this room share.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_policy._src.core.dtypes import is_floating_array, map_changed, strip_weak_type
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.loss_scale import tree_to_float32

_SIGN = np.uint32(0x8000_0000)
_INFINITY = np.uint32(0x7F80_0000)

#: Random bits with which `rounded` goes towards zero, and away from it.
TOWARDS_ZERO, AWAY_FROM_ZERO = np.uint32(0), np.uint32(0xFFFF_FFFF)


def is_half_array(x: Any) -> bool:
    """Whether a leaf is an array of float16 or bfloat16, the dtypes that are rounded to."""
    return is_floating_array(x) and x.dtype in (jnp.float16, jnp.bfloat16)


def rounded(x: jax.Array, dtype: Any, bits: Any = None) -> jax.Array:
    """Rounds float32 numbers to the values of a half or float8 dtype, and returns them as float32.

    Args:
      x: float32 array.
      dtype: float16, bfloat16 or float8_e4m3fn.
      bits: uint32 of the shape of `x`, uniformly random: each number then goes to one of its two neighbours,
        with the probability that makes the expectation the number itself. None rounds to nearest, ties
        to even.

    Returns:
      float32 array. Numbers of the dtype, infinities and NaN included, are unchanged. Beyond the largest
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
    carry = (mask >> 1) + ((magnitude >> drop) & np.uint32(1)) if bits is None else bits & mask
    new = (magnitude + carry) & ~mask
    if not reaches_as_low:
        smallest = info.smallest_subnormal
        between = _between_zero_and_smallest(magnitude, smallest, bits)
        new = jnp.where(magnitude < _pattern(smallest), between, new)
    midpoint = largest + (np.uint32(1) << np.uint32(spare - 1))
    new = jnp.where(new > largest, jnp.where(magnitude >= midpoint, _INFINITY, largest), new)
    new = jnp.where(magnitude >= _INFINITY, magnitude, new)
    return lax.bitcast_convert_type(sign | new, jnp.float32)


def change(p: jax.Array, new: jax.Array) -> jax.Array:
    """The float32 number that `optax.apply_updates` adds to `p` to get `new`.

    It is -0.0 where the two are equal: p + -0.0 is p for every p, infinity included; -0.0 + 0.0 would lose
    the sign.
    """
    return jnp.where(p == new, np.float32(-0.0), new - p)


def random_bits(seed: Any, count: Any, params: PyTree) -> PyTree:
    """Draws uint32 bits for every number of the half arrays of a tree; None in the places of other leaves.

    They are a function of the seed, the count, the leaf and the place in it, whatever the devices: threefry
    is requested by name, since other generators that may be the default depend on the sharding.
    """
    leaves, treedef = jax.tree.flatten(params)
    half = [i for i, x in enumerate(leaves) if is_half_array(x)]
    found: list[Any] = [None] * len(leaves)
    if half:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
        for i, leaf_key in zip(half, jax.random.split(key, len(half)), strict=True):
            found[i] = jax.random.bits(leaf_key, leaves[i].shape, jnp.uint32)
    return jax.tree.unflatten(treedef, found)


def _between_zero_and_smallest(magnitude: jax.Array, smallest: Any, bits: Any) -> jax.Array:
    """Rounds numbers between 0 and the smallest of a dtype to one of the two; as bit patterns."""
    share = lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(2.0**24 / float(smallest))
    threshold = np.float32(2.0**23) if bits is None else (~bits >> np.uint32(8)).astype(jnp.float32)
    return jnp.where(threshold < share, _pattern(smallest), np.uint32(0))


def _pattern(x: Any) -> np.uint32:
    return np.float32(x).view(np.uint32)


def check_some_half(params: PyTree, wrapper: str) -> None:
    """Raises ValueError where a wrapper that rounds gets floating parameters, and none of them is half."""
    floating = [x for x in jax.tree.leaves(params) if is_floating_array(x)]
    if floating and not any(map(is_half_array, floating)):
        dtypes = ", ".join(sorted({x.dtype.name for x in floating}))
        raise ValueError(
            f"{wrapper} sees no float16 or bfloat16 parameter, only {dtypes}: there is nothing to round. If "
            "the model's parameters are half, another wrapper shows float32 copies of them: put this one "
            "outermost, around loss_scaled(optimizer, loss_scale). If they are float32, leave it out."
        )


def check_seed(seed: Any) -> None:
    """Raises TypeError for a seed that is not an integer, ValueError for one that JAX's keys can't take."""
    is_array = isinstance(seed, jax.Array | np.ndarray | np.generic)
    if is_array and seed.ndim == 0 and jnp.issubdtype(seed.dtype, jnp.integer):
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}.")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an integer of 64 bits, from -2**63 to 2**63 - 1, got {seed}.")


def run_inner(
    inner: optax.GradientTransformationExtraArgs,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> tuple[PyTree, PyTree]:
    """Runs the wrapped transformation on float32 gradients: its updates, and its state, strongly typed."""
    if "grad" in extra_args:
        extra_args = extra_args | {"grad": tree_to_float32(extra_args["grad"])}
    new_updates, new_state = inner.update(tree_to_float32(updates), state, params, **extra_args)
    return new_updates, map_changed(strip_weak_type, new_state)
