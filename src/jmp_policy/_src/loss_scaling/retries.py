"""Repeats a training step whose gradients overflow, with smaller loss scales."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.pytree import replace
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.loss_scaling.float8_state import derivatives
from jmp_policy._src.loss_scaling.gradients import all_finite
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.loss_scales import LossScales
from jmp_policy._src.loss_scaling.selection import select_tree
from jmp_policy._src.loss_scaling.state import find_one, is_scale, unwrapped


def repeat_until_finite(
    step: Callable[[LossScale], tuple[Any, PyTree]], scale: LossScale, retries: int
) -> tuple[tuple[Any, PyTree], LossScale]:
    """Runs `step` until its gradients are finite: once, and at most `retries` times more."""

    def body(carry: Any) -> Any:
        tries, scale, _, _ = carry
        # The first pass, with the unchanged scale, runs in the loop too: one body to trace and compile.
        # np.False_ is known before tracing: scales that look at gradients need none then.
        lowered = select_tree(tries > 0, scale.adjust(np.False_), scale)
        result = jax.tree.map(jnp.asarray, step(lowered))
        return tries + jnp.int32(1), lowered, result, all_finite(derivatives(result[1]))

    def unfinished(carry: Any) -> Any:
        tries, _, _, finite = carry
        return ~finite & (tries <= retries)

    scale = jax.tree.map(jnp.asarray, scale)
    shapes = jax.eval_shape(lambda: step(scale))
    if any(map(varying, jax.tree.leaves(shapes))):
        raise ValueError(
            "scaled_value_and_grad(..., retries=...) cannot run inside shard_map: each device would repeat "
            "the step on its own. Use jax.jit with shardings, or leave retries out."
        )
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    start = (jnp.int32(0), scale, empty, jnp.zeros((), jnp.bool_))
    _, scale, result, _ = lax.while_loop(unfinished, body, start)
    return result, scale


def replace_loss_scale(scale_or_state: Any, new: LossScale, loss: str | None = None) -> Any:
    """What `find_loss_scale` takes, with another loss scale in the place of the one that it finds."""
    if is_scale(scale_or_state):
        return _with(scale_or_state, new, loss)
    _, old = find_one(scale_or_state)
    new_scale = _with(unwrapped(old.loss_scale), new, loss)
    # The arrays into the Variables of `nnx.Optimizer`, if they are in such.
    new_scale = jax.tree.unflatten(jax.tree.structure(old.loss_scale), jax.tree.leaves(new_scale))
    return jax.tree.map(
        lambda x: x._replace(loss_scale=new_scale) if x is old else x,
        scale_or_state,
        is_leaf=lambda x: x is old,
    )


def _with(scale: Any, new: LossScale, loss: str | None) -> Any:
    if loss is None:
        return new
    if isinstance(scale, LossScales):
        return replace(scale, scales={**scale.scales, loss: new})
    return {**scale, loss: new}
