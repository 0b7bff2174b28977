"""Wraps an optax transformation: divides gradients by the loss scale, and skips steps on which they overflow.

One step::

    grads = float32(scaled gradients) / scale       # the scale that the loss was multiplied by
    finite = all_finite(grads)
    updates, new_inner_state = inner.update(grads, inner_state, params)
    updates = updates if finite else -0.0           # p + -0.0 has every bit of p
    inner_state = new_inner_state if finite else inner_state
    scale = scale.adjust(finite)                    # grown, backed off, or the same

Of several losses, by name, the first two lines and the last run for each, and `inner` gets the sum. One loss
is several with the name "". Different from the peers, the outcome is selected and not branched to (as Keras
does for 3.4x the temporary memory), and `inner` only ever sees float32.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_policy._src.core.dtypes import is_number
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import float8_state, loss_scales, scale_mistakes
from jmp_policy._src.loss_scaling.forgotten_scale import ForgottenScaleCheck
from jmp_policy._src.loss_scaling.gradients import Decision, all_finite
from jmp_policy._src.loss_scaling.loss_scale import (
    LossScale,
    check_loss_scale,
    count_if,
    holds_float8_state,
    tree_to_float32,
)
from jmp_policy._src.loss_scaling.metrics import Groups, check_groups, magnitudes_by_loss
from jmp_policy._src.loss_scaling.state import (
    LossScaledState,
    Transformation,
    check_inner,
    check_no_number,
    check_state,
    init_inner,
)


def loss_scaled(
    inner: Transformation,
    loss_scale: LossScale | Mapping[str, LossScale],
    *,
    axis_name: Any = None,
    count_mode: Literal["hold", "advance"] = "hold",
    monitor: Groups = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer take scaled gradients, and skip the steps on which they are not finite.

    What looks at gradients belongs inside: `loss_scaled(optax.chain(clip, optax.adamw(1e-3)), scale)`.

    Args:
      inner: an optax transformation, or an object with its `init` and `update`.
      loss_scale: the scale to start with; for several losses, a mapping from their names to scales.
      axis_name: axes over which devices agree whether to skip, inside `shard_map` or `pmap`.
      count_mode: whether counts in `inner`'s state, as of schedules, "hold" on a skipped step or "advance".
      monitor: keeps magnitudes of gradients for `metrics`: True, or a function from a path to its group.

    Returns:
      A transformation. `init(params)` gives an `optim.LossScaledState`. `update(grads, state, params,
      **extra)` divides by the scale and runs `inner` in float32 (float64 and complex stay). Where a gradient
      is not finite, updates are -0.0, which changes no bit, `inner`'s state is the old one, and the scale
      backs off. With several losses, `grads` is a mapping by name. `grad=`, for line searches, is unscaled
      too.

    Raises:
      TypeError, ValueError: for what is no transformation, scale or mode; in `update`, for gradients that
        were computed without the scale (a warning where the trace cannot tell).

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale
      >>> tx = loss_scaled(optax.sgd(0.5), DynamicLossScale(4.0))
      >>> state = tx.init(jnp.float32(1.0))
      >>> updates, state = tx.update(jnp.float32(jnp.inf), state)
      >>> float(updates), float(state.loss_scale.loss_scale)
      (-0.0, 2.0)
    """
    transformation = check_inner(inner, "loss_scaled")
    several = isinstance(loss_scale, Mapping)
    if count_mode not in ("hold", "advance"):
        raise ValueError(f"count_mode must be 'hold' or 'advance', got {count_mode!r}.")
    groups = monitor if isinstance(monitor, bool) else check_groups(monitor)
    initial = loss_scales.check(loss_scale) if several else {"": check_loss_scale(loss_scale)}
    check_multiplied = ForgottenScaleCheck(initial)

    def by_loss(grads: Any) -> dict[str, PyTree]:
        return loss_scales.check_gradients(grads, initial) if several else {"": grads}

    def total(grads: dict[str, PyTree]) -> PyTree:
        return loss_scales.total(grads) if several else grads[""]

    def unscale(grads: dict[str, PyTree], scales: Mapping[str, LossScale]) -> dict[str, PyTree]:
        # Loss scales of other libraries may leave them half.
        return {name: tree_to_float32(scales[name].unscale(tree)) for name, tree in grads.items()}

    def init(params: PyTree) -> LossScaledState:
        magnitudes = None
        if groups:
            as_gradients = dict.fromkeys(initial, float8_state.derivatives(params))
            magnitudes = jax.tree.map(jnp.zeros_like, magnitudes_by_loss(as_gradients, initial, groups))
        return LossScaledState(
            inner_state=init_inner(transformation, tree_to_float32(params), params),
            loss_scale=loss_scales.start(initial) if several else jax.tree.map(jnp.array, initial[""]),
            grads_finite=jnp.ones((), jnp.bool_),
            skipped=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
            gradients=magnitudes,
        )

    def update(
        updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaledState]:
        check_state(state, LossScaledState, "loss_scaled")
        check_no_number(state)
        is_pair = type(updates) is tuple and jax.tree.structure(updates[1:]) == jax.tree.structure((params,))
        if is_pair and params is not None:
            raise scale_mistakes.loss_and_gradients()
        scaled = by_loss(updates)
        scales = state.loss_scale.scales if several else {"": state.loss_scale}
        # With the scale the loss was multiplied by, not the adjusted one: on a growth step that is
        # growth_factor times larger, and the gradient would come out halved.
        grads = unscale(scaled, scales)
        check_multiplied(scaled, scales, params, state)
        gradients, run = grads, transformation.update
        if holds_float8_state(updates):
            gradients, run = float8_state.derivatives(grads), float8_state.around(run, params)

        if several:
            each_finite = loss_scales.each_finite(gradients, axis_name)
        else:
            each_finite = {"": all_finite(gradients[""], axis_name)}
        finite = functools.reduce(lax.bitwise_and, each_finite.values())

        if "grad" in extra_args:
            extra_args["grad"] = total(unscale(by_loss(extra_args["grad"]), scales))
        new_updates, inner_state = run(total(grads), state.inner_state, tree_to_float32(params), **extra_args)
        step = Decision(finite)
        skipped = ~step.for_small
        new_updates = jax.tree.map(lambda u: _update_unless_skipped(step, u), new_updates)
        inner_state = _state_unless_skipped(step, inner_state, state.inner_state, count_mode)
        small = {n: step.for_small if f is finite else Decision(f).for_small for n, f in each_finite.items()}
        adjusted = {n: _adjust(scales[n], small[n], gradients[n], axis_name) for n in initial}
        return new_updates, LossScaledState(
            inner_state=inner_state,
            loss_scale=loss_scales.after(state.loss_scale, adjusted, small) if several else adjusted[""],
            grads_finite=finite,
            skipped=count_if(skipped, state.skipped),
            consecutive_skips=count_if(skipped, state.consecutive_skips, jnp.int32(0)),
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            gradients=magnitudes_by_loss(gradients, scales, groups, axis_name) if groups else None,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _adjust(loss_scale: LossScale, finite: jax.Array, grads: PyTree, axis_name: Any) -> LossScale:
    """Adjusts a loss scale, with the gradients and the axis name if its `adjust` takes them."""
    try:
        parameters = inspect.signature(loss_scale.adjust).parameters
    except (TypeError, ValueError):  # Not written in Python.
        return loss_scale.adjust(finite)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    offered = {"grads": grads, "axis_name": axis_name}
    return loss_scale.adjust(finite, **{n: v for n, v in offered.items() if takes_all or n in parameters})


def _update_unless_skipped(step: Decision, update: Any) -> Any:
    """The update on a finite step, else one that leaves every bit of a parameter unchanged."""
    if not isinstance(update, jax.Array | np.ndarray | np.generic) or not is_number(update.dtype):
        return update
    # -0.0 and not 0.0: p + -0.0 is p for every p, while -0.0 + 0.0 loses the sign.
    return step.select(jnp.asarray(update), lax.full_like(update, -np.zeros((), update.dtype)))


def _state_unless_skipped(step: Decision, new: PyTree, old: PyTree, count_mode: str) -> PyTree:
    """The new inner state on a finite step, else the old one; both in the dtypes of the old one."""
    old_leaves, treedef = jax.tree_util.tree_flatten_with_path(old)
    new_leaves, new_treedef = jax.tree.flatten(new)
    if treedef != new_treedef:
        raise ValueError(
            "The wrapped transformation changed the structure of its state in update:\n"
            f"  before: {treedef}\n  after:  {new_treedef}"
        )

    def keep(path: Any, before: Any, after: Any) -> Any:
        if after is before or not isinstance(before, jax.Array | np.ndarray | np.generic):
            return after
        after = jnp.asarray(after)
        if after.dtype != before.dtype:
            after = after.astype(before.dtype)
        if count_mode == "advance" and getattr(path[-1], "name", None) == "count":
            return after
        return step.select(after, jnp.asarray(before))

    kept = [keep(path, b, a) for (path, b), a in zip(old_leaves, new_leaves, strict=True)]
    return jax.tree.unflatten(treedef, kept)
