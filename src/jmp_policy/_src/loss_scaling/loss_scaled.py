"""Wraps an optax transformation: divides gradients by the loss scale, and skips steps on which they overflow.

One step::

    grads = float32(scaled gradients) / scale       # the scale that the loss was multiplied by
    finite = all_finite(grads)
    updates, new_inner_state = inner.update(grads, inner_state, params)
    updates = updates if finite else -0.0           # p + -0.0 has every bit of p
    inner_state = new_inner_state if finite else inner_state
    scale = scale.adjust(finite)                    # grown, backed off, or the same

Of several losses each has a scale: the first two lines and the last run for each, by its name, and `inner`
gets the sum. One loss is several with the name "".

Different from the peers: gradients are divided by the scale that the loss was multiplied by (mpx divides by
the adjusted one), the outcome is selected and not branched to (Keras branches, which costs 3.4x the temporary
memory), and the wrapped transformation only ever sees float32.
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

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import float8_state, loss_scales
from jmp_policy._src.loss_scaling.finiteness import all_finite, everywhere
from jmp_policy._src.loss_scaling.fixed_scale import StaticLossScale
from jmp_policy._src.loss_scaling.forgotten_scale import Division, ForgottenScaleCheck
from jmp_policy._src.loss_scaling.loss_scale import (
    LossScale,
    Scaling,
    check_loss_scale,
    count_if,
    holds_float8_state,
    tree_to_float32,
)
from jmp_policy._src.loss_scaling.metrics import Groups, check_groups, magnitudes_by_loss
from jmp_policy._src.loss_scaling.small_arrays import Decision, fusable_flag
from jmp_policy._src.loss_scaling.state import LossScaledState, check_no_number
from jmp_policy._src.loss_scaling.transformation import Transformation, check_inner, check_state, init_inner


def loss_scaled(
    inner: Transformation,
    loss_scale: LossScale | Mapping[str, LossScale],
    *,
    axis_name: Any = None,
    count_mode: Literal["hold", "advance"] = "hold",
    on_nonfinite: Literal["skip_step", "drop_loss"] = "skip_step",
    monitor: Groups = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes an optimizer take scaled gradients, and skip the steps on which they are not finite.

    Put everything that looks at gradients inside: `loss_scaled(optax.chain(optax.clip_by_global_norm(1.0),
    optax.adamw(1e-3)), DynamicLossScale())`. For gradient accumulation, `loss_scaled(optax.MultiSteps(tx, k),
    scale)` drops single micro-batches and accumulates in float32. The other way round, optax's MultiSteps
    never gets rid of the first NaN in its accumulator.

    What is tested is gradients. A NaN that `inner` itself makes of finite ones reaches the parameters, and
    from then on every step is skipped. Inside `loss_scaled` that is rare: `inner` computes in float32, where
    Adam's `eps=1e-8` is not 0, as it is in float16.

    Args:
      inner: any optax transformation, or object with `init` and `update` (`optax.MultiSteps`).
      loss_scale: the loss scale to start with. It is copied: states may be donated. For several losses with
        a scale each, a mapping from their names: `{"adversarial": DynamicLossScale(), ...}`.
      axis_name: mapped axis or axes over which all devices must agree whether to skip (`shard_map`,
        `pmap`). Not needed under `jax.jit` with shardings.
      count_mode: "hold": step counts inside `inner` (leaves named `count`, which move learning-rate schedules
        and bias corrections) stay the same on a skipped step. "advance": they count skipped steps too.
      on_nonfinite: where there are several losses, one with infinite or NaN gradients makes the step skipped
        ("skip_step"), or is left out of it ("drop_loss"). With all of them left out the step is skipped.
      monitor: keep magnitudes of the gradients by group of parameters, for `metrics`. True for one group
        per part of the model, or a function from a parameter's path to its group. False adds nothing.

    Returns:
      A transformation. `init(params)` gives a `LossScaledState`. `update(grads, state, params, **extra)`
      divides the gradients by the scale they were multiplied with, and runs `inner` on them as float32
      (float64 and complex keep their types, integers and `float0` pass through; 16-bit `params` are passed to
      it as float32 as well). Where a gradient is infinite or NaN, the updates are -0.0, which leaves every
      bit of a parameter as it was, and `inner_state` is the old one. An extra argument `grad`, as the
      line searches of optax take, is unscaled too; `value` must be the unscaled loss. `overflowed`, a
      boolean scalar, says that gradients left out of `grads` were not finite (a dropped micro-batch): the
      scale then adjusts as after an overflow, and finite `grads` are applied all the same. That is no
      skipped step: of the metrics only `loss_scale` and `stuck` show it.

      The state that float8 layers keep beside the parameters (`_overwrite_with_gradient`) is not tested, and
      `inner` gets zeros for it; its updates lead to the values of the next step, or to the old ones on a
      skipped step.

      For several losses `update({"adversarial": grads, ...}, state, params)` takes the gradients of each,
      divides them by the scale of that loss and tests them separately; `inner` gets the sum. Each scale
      adjusts by the gradients of its loss only. `grad` is by name too; `overflowed` may be. Of optax's
      wrappers only `optax.chain` can stand around it: the others expect gradients of the parameters'
      structure.

    Raises:
      TypeError, ValueError: for something that is not a transformation or a loss scale, and for an unknown
        mode; in `update`, while it is traced, for gradients that were computed without the loss scale. Where
        they were computed outside of the function that is traced, and no loss scale was ever asked for, it
        warns instead.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale
      >>> tx = loss_scaled(optax.sgd(0.5), DynamicLossScale(4.0))
      >>> params = jnp.float32(1.0)
      >>> state = tx.init(params)
      >>> grads = state.loss_scale.scale(jnp.float32(2.0))  # As those of a scaled loss are.
      >>> updates, state = tx.update(grads, state, params)
      >>> float(updates)
      -1.0
      >>> updates, state = tx.update(jnp.float32(jnp.inf), state, params)
      >>> float(optax.apply_updates(params, updates)), float(state.loss_scale.loss_scale)
      (1.0, 2.0)

    References:
      NVIDIA, "Training With Mixed Precision", SDK guide, section 3.2.
    """
    transformation = check_inner(inner, "loss_scaled")
    if count_mode not in ("hold", "advance"):
        raise ValueError(f"count_mode must be 'hold' or 'advance', got {count_mode!r}.")
    if on_nonfinite not in ("skip_step", "drop_loss"):
        raise ValueError(f"on_nonfinite must be 'skip_step' or 'drop_loss', got {on_nonfinite!r}.")
    groups = monitor if isinstance(monitor, bool) else check_groups(monitor)
    several = isinstance(loss_scale, Mapping)
    initial = loss_scales.check(loss_scale) if several else {"": check_loss_scale(loss_scale)}
    if on_nonfinite == "drop_loss" and not several:
        raise ValueError(
            "on_nonfinite='drop_loss' leaves one of several losses out, and this optimizer has one loss "
            "scale for all. Give it a mapping from losses to loss scales."
        )
    check_multiplied = ForgottenScaleCheck()

    def by_name(grads: Any) -> dict[str, PyTree]:
        return loss_scales.check_gradients(grads, initial) if several else {"": grads}

    def init(params: PyTree) -> LossScaledState:
        return LossScaledState(
            inner_state=init_inner(transformation, tree_to_float32(params), params),
            loss_scale=loss_scales.start(initial) if several else jax.tree.map(jnp.array, initial[""]),
            grads_finite=jnp.ones((), jnp.bool_),
            skipped=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
            steps=jnp.zeros((), jnp.int32),
            gradients=no_magnitudes(params) if groups else None,
        )

    def magnitudes(grads: dict[str, PyTree], scales: Mapping[str, LossScale], axis_name: Any = None) -> Any:
        # A leaf where there is no group: `optax.tree_map_params` calls `init` with a placeholder, and takes
        # the result for a prefix of the state.
        return magnitudes_by_loss(grads, scales, groups, axis_name) or jnp.zeros(())

    def no_magnitudes(params: PyTree) -> Any:
        as_gradients = dict.fromkeys(initial, float8_state.derivatives(params))
        return jax.tree.map(jnp.zeros_like, magnitudes(as_gradients, initial))

    def unscale(grads: Any, scales: Mapping[str, LossScale]) -> dict[str, PyTree]:
        """Gradients by loss, as float32 and divided by the scale that they were multiplied by."""
        # Loss scales of other libraries may leave them half.
        return {name: tree_to_float32(scales[name].unscale(grads[name])) for name in initial}

    def update(
        updates: PyTree, state: Any, params: PyTree = None, *, overflowed: Any = None, **extra_args: Any
    ) -> tuple[PyTree, LossScaledState]:
        check_state(state, LossScaledState, "loss_scaled")
        check_no_number(state)
        scaled = by_name(updates)
        scales = state.loss_scale.scales if several else {"": state.loss_scale}
        left_out = loss_scales.flags(overflowed, initial) if several else {"": overflowed}
        # With the scale the loss was multiplied by, not the adjusted one: on a growth step that is
        # growth_factor times larger, and the gradient would come out halved.
        grads = unscale(scaled, scales)
        check_multiplied({n: _division(scaled[n], scales[n], initial[n], params, state) for n in initial})
        gradients, run = grads, transformation.update
        if has_float8 := holds_float8_state(updates):
            gradients, run = float8_state.derivatives(grads), float8_state.around(run, params)

        each_finite = _each_finite(gradients, axis_name)
        together = lax.bitwise_and if on_nonfinite == "skip_step" else lax.bitwise_or
        finite = functools.reduce(together, each_finite.values())
        kept = each_finite if on_nonfinite == "drop_loss" else None

        def total(grads: dict[str, PyTree]) -> PyTree:
            return loss_scales.total(grads, kept, has_float8) if several else grads[""]

        if "grad" in extra_args:
            extra_args["grad"] = total(unscale(by_name(extra_args["grad"]), scales))
        new_updates, inner_state = run(total(grads), state.inner_state, tree_to_float32(params), **extra_args)
        step = Decision(finite)
        skipped = ~step.for_small
        new_updates = jax.tree.map(lambda u: _update_unless_skipped(step, u), new_updates)
        inner_state = _state_unless_skipped(step, inner_state, state.inner_state, count_mode)
        small = {n: step.for_small if f is finite else fusable_flag(f) for n, f in each_finite.items()}
        adjusted = {
            n: _adjust(scales[n], _clean(small[n], left_out.get(n), axis_name), gradients[n], axis_name)
            for n in initial
        }
        return new_updates, LossScaledState(
            inner_state=inner_state,
            loss_scale=loss_scales.after(state.loss_scale, adjusted, small) if several else adjusted[""],
            grads_finite=finite,
            skipped=count_if(skipped, state.skipped),
            consecutive_skips=count_if(skipped, state.consecutive_skips, jnp.int32(0)),
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            gradients=magnitudes(gradients, scales, axis_name) if groups else None,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _division(
    grads: PyTree, scale: LossScale, initial: LossScale, params: PyTree, state: LossScaledState
) -> Division:
    fixed = initial.loss_scale if isinstance(initial, StaticLossScale) else None
    return Division(grads, scale, params, state, fixed, isinstance(scale, Scaling))


def _each_finite(grads: dict[str, PyTree], axis_name: Any) -> dict[str, jax.Array]:
    """Whether the gradients of each loss are finite; boolean scalars, the same on all devices."""
    if len(grads) == 1 or axis_name is None:
        return {name: all_finite(tree, axis_name) for name, tree in grads.items()}
    # One all-reduce for all losses.
    flags = jnp.stack([all_finite(tree) for tree in grads.values()])
    agreed = everywhere(flags, axis_name)
    return {name: agreed[i] for i, name in enumerate(grads)}


def _clean(finite: jax.Array, overflowed: Any, axis_name: Any) -> jax.Array:
    """Whether gradients, and those left out of them on any device, are finite; boolean scalar."""
    if overflowed is None:
        return finite
    if np.shape(overflowed) != () or jnp.asarray(overflowed).dtype != jnp.bool_:
        raise TypeError(
            "update(..., overflowed=) takes one boolean: whether gradients that were left out of this step "
            f"were not finite; got {overflowed!r}. From several, jnp.any makes one."
        )
    if axis_name is None:
        return finite & ~jnp.asarray(overflowed)
    return finite & everywhere(~jnp.asarray(overflowed), axis_name)


def _adjust(loss_scale: LossScale, finite: jax.Array, grads: PyTree, axis_name: Any) -> LossScale:
    """Adjusts a loss scale, with the gradients and the axis name if its `adjust` takes them."""
    offered = {"grads": grads, "axis_name": axis_name}
    try:
        parameters = inspect.signature(loss_scale.adjust).parameters.values()
    except (TypeError, ValueError):  # Not written in Python.
        return loss_scale.adjust(finite)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return loss_scale.adjust(finite, **{n: v for n, v in offered.items() if takes_all or n in named})


def _update_unless_skipped(step: Decision, update: Any) -> Any:
    """The update on a finite step, else one that leaves every bit of a parameter unchanged."""
    if not isinstance(update, jax.Array | np.ndarray | np.generic):
        return update
    if update.dtype == jax.dtypes.float0 or not jnp.issubdtype(update.dtype, jnp.number):
        return update
    zero = -0.0 if jnp.issubdtype(update.dtype, jnp.floating) else 0
    if jnp.issubdtype(update.dtype, jnp.complexfloating):
        zero = complex(-0.0, -0.0)
    # -0.0 and not 0.0: p + -0.0 is p for every p, while -0.0 + 0.0 loses the sign.
    return step.select(jnp.asarray(update), lax.full_like(update, zero))


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
