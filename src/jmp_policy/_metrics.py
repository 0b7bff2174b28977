"""What a training loop shows of the loss scale, and when it gives up."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._state import get_loss_scale_state
from jmp_policy._types import PyTree


class LossScaleStuckError(FloatingPointError):
    """Gradients stay non-finite at the smallest loss scale: training cannot go on."""


def grads_finite(opt_state: PyTree) -> Any:
    """Whether the last update was applied; boolean scalar.

    For keeping other state on a skipped step, since a forward pass that overflowed poisons batch
    statistics for good: `batch_stats = select_tree(grads_finite(opt_state), new, old)`.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several.
    """
    return get_loss_scale_state(opt_state).grads_finite


def metrics(opt_state: PyTree) -> dict[str, Any]:
    """A flat dictionary of scalars for a logger; usable inside `jax.jit`.

    Returns:
      `loss_scale` (float32), `grads_finite` (bool), `skipped_steps`, `consecutive_skips`, `steps`
      (int32), and `stuck` (bool) where the loss scale knows it.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several.
    """
    state = get_loss_scale_state(opt_state)
    values = {
        "loss_scale": state.loss_scale.loss_scale,
        "grads_finite": state.grads_finite,
        "skipped_steps": state.skipped,
        "consecutive_skips": state.consecutive_skips,
        "steps": state.steps,
    }
    if hasattr(state.loss_scale, "stuck"):
        values["stuck"] = state.loss_scale.stuck
    return values


def check(opt_state: PyTree, grads: PyTree = None, *, max_consecutive_skips: int | None = None) -> None:
    """Raises when training is hopeless; call it on the host every so many steps.

    Args:
      opt_state: the optimizer state after an update.
      grads: the gradients of the last step, to be told which of them are not finite.
      max_consecutive_skips: also raise after this many skipped steps in a row; for scales that cannot
        be stuck (`StaticLossScale`, `NoOpLossScale`).

    Raises:
      LossScaleStuckError: when gradients overflow at the scale's floor.
      TypeError: inside `jax.jit`, where nothing can be raised at run time.
    """
    values = metrics(opt_state)
    if any(isinstance(v, jax.core.Tracer) for v in values.values()):
        raise TypeError(
            "check runs on the host, on the state that a jitted step has returned; inside jax.jit use "
            "metrics(opt_state)."
        )
    values = {name: np.asarray(value) for name, value in values.items()}
    skips = int(values["consecutive_skips"].max())
    stuck = bool(values.get("stuck", np.False_).any())
    if not stuck and (max_consecutive_skips is None or skips < max_consecutive_skips):
        return
    scale = float(values["loss_scale"].min())
    reason = "is at its floor" if stuck else "cannot help"
    message = (
        f"The loss scale {reason} ({scale:g}) and the gradients are still not finite: {skips} steps "
        f"skipped in a row, {int(values['skipped_steps'].max())} in all. A smaller scale cannot help; the "
        "model overflows in the forward pass, or a value is NaN."
    )
    if grads is not None:
        message += "\n" + _describe_non_finite(grads)
    raise LossScaleStuckError(message)


def _describe_non_finite(grads: PyTree) -> str:
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        nan, inf = int(jnp.isnan(leaf).sum()), int(jnp.isinf(leaf).sum())
        if nan or inf:
            name = jax.tree_util.keystr(path) or "(the gradient)"
            lines.append(f"  {name}: {nan} NaN, {inf} inf of {leaf.size} ({leaf.dtype})")
    if not lines:
        return "None of the gradients given is non-finite: are they of the step that was skipped?"
    return "Non-finite gradients:\n" + "\n".join(lines)
