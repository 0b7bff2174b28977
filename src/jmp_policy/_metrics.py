"""What a training loop shows of the loss scale."""

from typing import Any

from jmp_policy._state import get_loss_scale_state
from jmp_policy._types import PyTree


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
      (int32), and `stuck` (bool) where the loss scale knows it. With `loss_scaled(..., monitor=True)` also
      `grad_max/G`, `grad_min/G` and `grad_underflow/G` (float32) for each group G of parameters: largest and
      smallest magnitude other than zero, and the share that float16 holds as zero at this scale.

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
    for group, of_group in (state.gradients or {}).items():
        values.update({f"grad_{name}/{group}": value for name, value in of_group.items()})
    return values
