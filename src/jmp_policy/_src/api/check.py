"""Raises when a training loop cannot go on, and says why."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.public import load
from jmp_policy._src.core.settings import positive_int
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.metrics import metrics_on_host, static_scales

if TYPE_CHECKING:
    from jmp_policy._src.report.diagnosis import Diagnosis

#: Steps from which on the share of skipped ones says something: a scale that starts too large needs some.
_FEW_STEPS = 100
_MANY_SKIPS = 0.2
#: Loss scale from which on gradients of at most 1 with the scale in them are suspiciously small.
_LARGE_SCALE = 2.0**12


class LossScaleStuckError(FloatingPointError):
    """Error for gradients that stay non-finite at the smallest loss scale, so that training cannot go on.

    Attributes:
      diagnosis: the result of `diagnose`, if `check` was given the loss function; else None.

    Example:
      >>> try:
      ...     raise LossScaleStuckError("gradients overflow at the smallest scale")
      ... except LossScaleStuckError as error:
      ...     print(error.diagnosis)
      None
    """

    def __init__(self, message: str, diagnosis: "Diagnosis | None" = None):
        super().__init__(message)
        self.diagnosis = diagnosis


def check(
    opt_state: PyTree,
    grads: PyTree = None,
    *,
    max_consecutive_skips: int | None = 60,
    loss_fn: Callable[..., Any] | None = None,
    args: Sequence[Any] = (),
    has_aux: bool = False,
) -> None:
    """Raises when training cannot go on; call it on the host, once in a while.

    It warns when more than a fifth of at least 100 steps so far were skipped, however they lie; and, of
    `loss_scaled(..., monitor=True)`, when gradients are so small before they are divided by the scale that it
    seems never to have multiplied them, or that something has clipped or divided them since.

    Args:
      opt_state: the optimizer state after an update.
      grads: the gradients of the last step; the message then says which of them are not finite.
      max_consecutive_skips: also raise after this many skipped steps in a row, which no scale can help; None
        for scales that are meant to take longer to their floor.
      loss_fn, args: the loss function and the arguments of the last step, `loss_fn(*args)`; the message then
        says where a value became non-finite: `diagnose` runs it, operation by operation.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Raises:
      LossScaleStuckError: when gradients overflow at the scale's floor, or after so many skipped steps, and
        for a scale that is no positive, finite number; `.diagnosis` is the result of
        `diagnose`, if it ran.
      TypeError: inside `jax.jit`, where nothing can be raised at run time; for `loss_fn` without `args`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale, loss_scaled
      >>> tx = loss_scaled(optax.sgd(0.1), DynamicLossScale(8.0, min_loss_scale=8.0))
      >>> params = jnp.ones(2)
      >>> _, opt_state = tx.update(jnp.array([1.0, jnp.inf]), tx.init(params), params)
      >>> try:
      ...     check(opt_state)
      ... except LossScaleStuckError as error:
      ...     print(str(error)[:39])
      The loss scale is at its floor (8) and
    """
    if loss_fn is not None and not args:
        raise TypeError(
            "check(..., loss_fn=loss_fn) needs args, what loss_fn was called with: args=(params, batch)."
        )
    if max_consecutive_skips is not None:
        max_consecutive_skips = positive_int(max_consecutive_skips, "max_consecutive_skips")
    values = metrics_on_host(opt_state, "check")
    found = _hopeless(values, static_scales(opt_state), max_consecutive_skips)
    if found is None:
        _warn_of_many_skips(values)
        _warn_of_small_gradients(values)
        return
    message, scale = found
    if grads is not None:
        message += "\n" + _describe_non_finite(grads)
    diagnosis = None
    if loss_fn is not None:
        try:  # Reports are loaded where one is asked for.
            diagnose = load("jmp_policy._src.api.reports").diagnose
            diagnosis = diagnose(loss_fn, *args, scale=scale, has_aux=has_aux)
            message += f"\n{diagnosis.verdict}\n{diagnosis.advice}".rstrip()
        except Exception as error:  # The reason to stop must not be lost with the search for its cause.
            message += f"\nLooking for the place failed: {type(error).__name__}: {error}"
    raise LossScaleStuckError(message, diagnosis)


def _hopeless(values: dict[str, np.ndarray], static: set[str], limit: int | None) -> tuple[str, float] | None:
    """Why training cannot go on and at which loss scale, or None if it can.

    Args:
      values: metrics of the optimizer state, with a leading axis where `pmap` or `vmap` mapped them.
      static: loss scales that never change, as `static_scales` names them.
      limit: skipped steps in a row at which training counts as hopeless.
    """
    losses = [name.removeprefix("loss_scale") for name in values if name.split("/")[0] == "loss_scale"]
    skips, skipped = int(values["consecutive_skips"].max()), int(values["skipped_steps"].max())
    for loss in losses:  # "" or "/name"
        scales = values[f"loss_scale{loss}"]
        if not (np.isfinite(scales) & (scales > 0)).all():
            return (
                f"The loss scale is {scales[()]}, with which every gradient is NaN or 0: it was set so, or "
                "restored from a damaged checkpoint. jmp_policy.restore_state refuses such a checkpoint."
            ), 1.0
        stuck = bool(values.get(f"stuck{loss}", np.False_).any())
        in_a_row = int(values.get(f"consecutive_nonfinite{loss}", values["consecutive_skips"]).max())
        if not stuck and (limit is None or in_a_row < limit):
            continue
        whose, count = (f" of {loss[1:]!r}", f"{in_a_row} times in a row, ") if loss else ("", "")
        scale = float(scales.min())
        reason, repair = "is at its floor" if stuck else "cannot help", "A smaller scale cannot help: the"
        if loss in static and scale > 1:
            repair = "It never changes: use DynamicLossScale(), or a smaller one. If none helps, the"
        return (
            f"The loss scale{whose} {reason} ({scale:g}) and the gradients are still not finite: {count}"
            f"{skips} steps skipped in a row, {skipped} in all. {repair} model overflows in the forward "
            "pass, or data or parameters are NaN. Ask jmp_policy.all_finite(params); an optimizer that "
            "computes in float16 makes NaN where its eps is 0 there, as 1e-8 is."
        ), scale
    if limit is None or skips < limit:
        return None
    times = ", ".join(f"{loss[1:]!r} {values[f'nonfinite_steps{loss}'].max()}" for loss in losses)
    return (
        f"{skips} steps skipped in a row, {skipped} in all, by no single loss: the gradients of the "
        f"losses were not finite this often: {times}."
    ), max(float(values[f"loss_scale{loss}"].max()) for loss in losses)


def _warn_of_many_skips(values: dict[str, np.ndarray]) -> None:
    steps, skipped = int(values["steps"].max()), int(values["skipped_steps"].max())
    if steps >= _FEW_STEPS and skipped > _MANY_SKIPS * steps:
        warnings.warn(
            f"{skipped} of {steps} steps were skipped ({skipped / steps:.0%}); a loss scale that suits the "
            "model skips one in 2000. Use DynamicLossScale() with its defaults. If that skips as many, the "
            "gradients overflow by themselves: jmp_policy.diagnose(loss_fn, *args, scale=opt_state) says "
            "where, given the batch of a skipped step.",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_small_gradients(values: dict[str, np.ndarray]) -> None:
    largest = max((float(v.max()) for name, v in values.items() if name.startswith("grad_max/")), default=0.0)
    scale = max(float(v.max()) for name, v in values.items() if name.split("/")[0] == "loss_scale")
    if scale >= _LARGE_SCALE and 0 < largest * scale <= 1:
        warnings.warn(
            f"The largest gradient is {largest:.2g}: loss_scaled has divided {largest * scale:.2g} by the "
            f"loss scale, {scale:g}. If the loss is not at its minimum, the gradients were computed without "
            "scaled_value_and_grad, or clipped, normalised or divided before update. What looks at "
            "gradients belongs inside: loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optimizer), "
            "loss_scale).",
            UserWarning,
            stacklevel=3,
        )


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
