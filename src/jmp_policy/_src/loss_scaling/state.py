"""Defines the optimizer state of `loss_scaled`, and finds it inside any other optimizer state."""

import warnings
from typing import Any, NamedTuple

import jax
import optax

from jmp_policy._src.core.dtypes import map_changed
from jmp_policy._src.core.imported import is_instance_of
from jmp_policy._src.core.pytree import replace
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.loss_scales import LossScales, are_several, is_one, pick
from jmp_policy._src.loss_scaling.scale_use import SCALE_USE


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Attributes:
      inner_state: state of the wrapped transformation, as of the last finite step.
      loss_scale: the loss scale that the next loss is to be multiplied by; of several losses a `LossScales`,
        with `loss_scale["name"]` for each.
      grads_finite: whether the last step's gradients were finite, and the step taken; boolean scalar, True
        at first.
      skipped: steps skipped so far; int32 scalar, saturating.
      consecutive_skips: steps skipped since the last one that was not; int32 scalar, saturating.
      steps: updates seen so far, skipped ones included; int32 scalar, saturating.
      gradients: magnitudes of the last gradients by group of parameters, where `loss_scaled` was asked to
        `monitor` them; None otherwise.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import StaticLossScale, loss_scaled
      >>> state = loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)).init(jnp.ones(2))
      >>> int(state.steps), bool(state.grads_finite)
      (0, True)
    """

    inner_state: optax.OptState
    loss_scale: Any
    grads_finite: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    steps: jax.Array
    gradients: Any = None


def get_loss_scale_state(opt_state: PyTree) -> LossScaledState:
    """Returns the one `LossScaledState` inside an optimizer state, however deeply nested.

    Args:
      opt_state: the state of `loss_scaled`, or of `optax.chain`, `multi_transform`, `masked`,
        `MultiSteps`, `inject_hyperparams` around it, or any pytree that holds one (`TrainState`,
        `nnx.Optimizer`, inside a transform too).

    Raises:
      ValueError: when there is none, or more than one; the message lists where they are.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import StaticLossScale, loss_scaled
      >>> tx = optax.chain(optax.identity(), loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)))
      >>> float(get_loss_scale_state(tx.init(jnp.ones(2))).loss_scale.loss_scale)
      8.0
    """
    return _unwrapped(_find_one(opt_state))


def _find_one(opt_state: PyTree) -> LossScaledState:
    found = _find(opt_state)
    if not found:
        raise ValueError(
            f"There is no loss scale in this {type(opt_state).__name__}: wrap the optimizer with "
            "jmp_policy.loss_scaled(optimizer, DynamicLossScale()) and pass the state its init returned."
        )
    if len(found) > 1:
        places = ", ".join(path or "(the state itself)" for path, _ in found)
        raise ValueError(
            f"There are {len(found)} loss scales in this optimizer state, at {places}. Name the one you "
            "mean by passing that part of the state, or its .loss_scale, instead of the whole."
        )
    return found[0][1]


def _is_variable(x: Any) -> bool:
    """Returns whether a leaf is a Variable, into which `nnx.Optimizer` puts the arrays of its state."""
    return is_instance_of(x, "flax.nnx", "Variable")


def _unwrapped(state: Any) -> Any:
    """Returns the state with plain arrays, and the same object where it has them already."""
    return map_changed(lambda x: x.get_value() if _is_variable(x) else x, state, _is_variable)


def find_loss_scale(scale_or_state: Any, loss: str | None = None) -> LossScale:
    """Returns the loss scale in a loss scale, in several, or in anything that `get_loss_scale_state` takes.

    Args:
      scale_or_state: the loss scale, the loss scales by name, or an optimizer state that holds either.
      loss: name of the loss whose scale is meant, where there are several.
    """
    if not (is_one(scale_or_state) or are_several(scale_or_state)):
        _warn_unless_overflows_arrive(scale_or_state)
        scale_or_state = get_loss_scale_state(scale_or_state).loss_scale
    scale = pick(scale_or_state, loss)
    SCALE_USE.note(scale)
    return scale


def replace_loss_scale(scale_or_state: Any, new: LossScale, loss: str | None = None) -> Any:
    """Returns what `find_loss_scale` takes, with another loss scale in the place of the one that it finds."""
    if is_one(scale_or_state) or are_several(scale_or_state):
        return _with(scale_or_state, new, loss)
    old = _find_one(scale_or_state)
    new_scale = jax.tree.map(
        lambda before, value: before.replace(value) if _is_variable(before) else value,
        old.loss_scale,
        _with(_unwrapped(old.loss_scale), new, loss),
        is_leaf=_is_variable,
    )
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


def _find(tree: PyTree, prefix: str = "") -> list[tuple[str, LossScaledState]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, LossScaledState))
    found = []
    for path, leaf in leaves:
        if isinstance(leaf, LossScaledState):
            place = prefix + jax.tree_util.keystr(path)
            found += [(place, leaf), *_find(leaf.inner_state, f"{place}.inner_state")]
    return found


def _warn_unless_overflows_arrive(opt_state: PyTree) -> None:
    """Warns where `optax.apply_if_finite` stands around `loss_scaled` with a scale that could fall."""
    stops = LossScaledState, optax.ApplyIfFiniteState
    for node in jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, stops)):
        inside = _find(node.inner_state) if isinstance(node, optax.ApplyIfFiniteState) else []
        if any(jax.tree.leaves(state.loss_scale) for _, state in inside):
            warnings.warn(
                "optax.apply_if_finite stands around loss_scaled and keeps overflows from it: the loss scale "
                "falls late or never. loss_scaled skips such steps itself, so leave apply_if_finite out, or "
                "put it inside: loss_scaled(optax.apply_if_finite(optimizer, n), loss_scale).",
                UserWarning,
                stacklevel=4,
            )
