"""What the wrappers of this room share: random bits, checks, and the run of the transformation inside.

An update smaller than half the distance to a parameter's neighbour vanishes when it is added, step after
step. Master weights, stochastic rounding and Kahan summation prevent that.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_policy._src.core.dtypes import is_floating_array, map_changed, strip_weak_type
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.loss_scale import tree_to_float32


def is_half_array(x: Any) -> bool:
    """Whether a leaf is an array of float16 or bfloat16, the dtypes that are rounded to."""
    return is_floating_array(x) and x.dtype in (jnp.float16, jnp.bfloat16)


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
