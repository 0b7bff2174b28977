"""Measures magnitudes of gradients by group of parameters, for the optimizer's state."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.types import PyTree

#: From a parameter's path ("encoder/layer_0/kernel") to its group; True for the first name of the path.
Groups: TypeAlias = bool | Callable[[str], str]

#: float16 rounds magnitudes up to this one to zero.
_BECOMES_ZERO = 2.0**-25


def check_groups(groups: Any) -> Groups:
    """Raises TypeError for something that does not say which parameter is in which group."""
    if isinstance(groups, bool):
        return groups
    if callable(groups):
        return cast(Groups, groups)
    raise TypeError(
        "monitor is True (one group per part of the model) or a function from a parameter's path to the name "
        f"of its group; got {groups!r}."
    )


def magnitudes(
    grads: PyTree, loss_scale: Any, groups: Groups, axis_name: Any = None
) -> dict[str, dict[str, jax.Array]]:
    """Measures the largest, the smallest and the vanishing magnitudes per group of parameters.

    Args:
      grads: unscaled gradients.
      loss_scale: what they were multiplied by; float32 scalar.
      groups: which parameter is in which group.
      axis_name: mapped axis or axes over which gradients are split: magnitudes are those of all devices.

    Returns:
      By group: `max`, the largest magnitude; `min`, the smallest that is not zero (0 if all are);
      `underflow`, the share of values that are zero in float16 at this loss scale. float32 scalars.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    ]
    parts: dict[str, list[jax.Array]] = {}
    for text, leaf in leaves:
        # Linen's variables have the parts of the model below "params".
        name = groups(text) if callable(groups) else text.removeprefix("params/").split("/")[0] or "all"
        parts.setdefault(name, []).append(jnp.abs(leaf).astype(jnp.float32))
    limit = _BECOMES_ZERO / jnp.asarray(loss_scale, jnp.float32)
    return {name: _of_group(group, limit, axis_name) for name, group in parts.items()}


def _of_group(group: list[jax.Array], limit: Any, axis_name: Any) -> dict[str, jax.Array]:
    largest = jnp.stack([jnp.max(x) for x in group]).max()
    smallest = jnp.stack([jnp.min(jnp.where(x > 0, x, jnp.inf)) for x in group]).min()
    vanishing = jnp.stack([jnp.sum(x <= limit, dtype=jnp.float32) for x in group]).sum()
    share = vanishing / sum(x.size for x in group)
    if axis_name is not None:
        largest, smallest = lax.pmax(largest, axis_name), lax.pmin(smallest, axis_name)
        share = lax.pmean(share, axis_name)
    return {"max": largest, "min": jnp.where(jnp.isinf(smallest), 0.0, smallest), "underflow": share}
