"""Reads from an optimizer state what a training loop logs about the loss scale."""

from typing import Any

import jax

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.loss_scales import LossScales, pick
from jmp_policy._src.loss_scaling.state import get_loss_scale_state


def grads_finite(opt_state: PyTree, loss: str | None = None) -> jax.Array:
    """Returns whether the last update was applied; boolean scalar.

    Use it to keep other state on a skipped step, since a forward pass that overflowed leaves NaN in batch
    statistics for good: `batch_stats = select_tree(grads_finite(opt_state), new, old)`.

    Args:
      opt_state: an optimizer state that holds a loss scale, or one for each of several losses.
      loss: of several losses, the one whose last gradients are asked about.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several; for an unknown name.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import StaticLossScale, loss_scaled
      >>> tx, params = loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)), jnp.ones(2)
      >>> _, opt_state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(params), params)
      >>> bool(grads_finite(opt_state))
      False
    """
    state = get_loss_scale_state(opt_state)
    if loss is None:
        return state.grads_finite
    pick(state.loss_scale, loss)  # Raises for a name that is not one of the losses.
    return state.loss_scale.grads_finite[loss]


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns a flat dictionary of scalars for a logger; usable inside `jax.jit`.

    Returns:
      `loss_scale` (float32), `grads_finite` (bool), `skipped_steps`, `consecutive_skips`, `steps`
      (int32), and `stuck` (bool) where the loss scale has it. With `loss_scaled(..., monitor=True)` also
      `grad_max/G`, `grad_min/G` and `grad_underflow/G` (float32) for each group G of parameters: largest and
      smallest magnitude other than zero, and the share that float16 holds as zero at this scale.

      Of several losses `loss_scale/L`, `grads_finite/L`, `nonfinite_steps/L`, `consecutive_nonfinite/L`
      (int32: how often this loss's gradients were not finite) and `stuck/L` for each loss L, and
      `grad_max/L/G`; `grads_finite` is whether the last update was applied.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several without names.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale, loss_scaled
      >>> opt_state = loss_scaled(optax.sgd(0.1), DynamicLossScale(8.0)).init(jnp.ones(2))
      >>> found = metrics(opt_state)
      >>> list(found)
      ['loss_scale', 'grads_finite', 'skipped_steps', 'consecutive_skips', 'steps', 'stuck']
      >>> float(found["loss_scale"])
      8.0
    """
    state = get_loss_scale_state(opt_state)
    scale = state.loss_scale
    values = _of_losses(scale) if isinstance(scale, LossScales) else {"loss_scale": scale.loss_scale}
    values |= {
        "grads_finite": state.grads_finite,
        "skipped_steps": state.skipped,
        "consecutive_skips": state.consecutive_skips,
        "steps": state.steps,
    }
    stuck = getattr(scale, "stuck", None)
    if stuck is not None:
        values["stuck"] = stuck
    for group, of_group in (state.gradients or {}).items():
        values.update({f"grad_{name}/{group}": value for name, value in of_group.items()})
    return values


def _of_losses(scales: LossScales) -> dict[str, Any]:
    values = {}
    for loss, scale in scales.scales.items():
        values |= {
            f"loss_scale/{loss}": scale.loss_scale,
            f"grads_finite/{loss}": scales.grads_finite[loss],
            f"nonfinite_steps/{loss}": scales.nonfinite_steps[loss],
            f"consecutive_nonfinite/{loss}": scales.consecutive_nonfinite[loss],
        }
        if hasattr(scale, "stuck"):
            values[f"stuck/{loss}"] = scale.stuck
    return values
