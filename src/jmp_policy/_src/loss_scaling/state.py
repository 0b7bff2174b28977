"""Defines the optimizer state of `loss_scaled`, and finds it inside any other optimizer state."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jmp_policy._src.core.classes import imported_attr
from jmp_policy._src.core.dtypes import map_changed
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import scale_mistakes
from jmp_policy._src.loss_scaling.forgotten_scale import SCALE_USE
from jmp_policy._src.loss_scaling.loss_scale import LossScale, is_loss_scale
from jmp_policy._src.loss_scaling.loss_scales import LossScales, are_several, pick


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Attributes:
      inner_state: state of the wrapped transformation, as of the last finite step.
      loss_scale: the loss scale that the next loss is to be multiplied by; of several losses a `LossScales`,
        with `loss_scale["name"]` for each.
      grads_finite: whether the last step's gradients were finite, and the step taken; boolean scalar.
      skipped, consecutive_skips: steps skipped so far, and in a row until now; int32 scalars, saturating.
      steps: updates seen so far, skipped ones included; int32 scalar, saturating.
      gradients: magnitudes of the last gradients by group, with `loss_scaled(..., monitor=True)`; or None.

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


def find_loss_scale(scale_or_state: Any, loss: str | None = None) -> LossScale:
    """The loss scale, of several that of `loss`, in itself or in what `get_loss_scale_state` takes."""
    scale, state = scale_or_state, None
    if not is_scale(scale):
        path, state = find_one(scale)
        scale = unwrapped(state.loss_scale)
        if ".inner" in path and (around := scale_mistakes.misplaced(scale_or_state, state)):
            warnings.warn(around, UserWarning, stacklevel=3)
    if loss is not None or not is_loss_scale(scale):
        scale = pick(scale, loss)
    SCALE_USE.note(scale, state)
    return scale


def is_scale(x: Any) -> bool:
    """Whether a value is a loss scale or several by name, not a state that holds them."""
    return is_loss_scale(x) or (isinstance(x, Mapping | LossScales) and are_several(x))


def find_one(opt_state: PyTree) -> tuple[str, LossScaledState]:
    """Finds the one state of `loss_scaled` in an optimizer state, and its path, or raises ValueError."""
    found = list(_find(opt_state))
    if len(found) != 1:
        raise scale_mistakes.not_one(type(opt_state).__name__, [path for path, _ in found])
    check_no_number(found[0][1])
    return found[0]


def check_no_number(state: LossScaledState) -> None:
    """Raises TypeError for a number in the place of the loss scale, as optax's `tree_set` puts it there."""
    if isinstance(state.loss_scale, jax.Array | np.ndarray | np.generic | int | float):
        raise scale_mistakes.is_number(state.loss_scale)


def _find(tree: PyTree, prefix: str = "") -> Iterator[tuple[str, LossScaledState]]:
    def is_one(x: Any) -> bool:
        return isinstance(x, LossScaledState)

    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_one)[0]:
        if is_one(leaf):
            place = prefix + jax.tree_util.keystr(path)
            yield place, leaf
            yield from _find(leaf.inner_state, f"{place}.inner_state")


def unwrapped(state: Any) -> Any:
    """The state with plain arrays, where `nnx.Optimizer` has put them into Variables."""
    variable = imported_attr("flax.nnx", "Variable")
    if variable is None:  # NNX was never imported.
        return state

    def is_variable(x: Any) -> bool:
        return isinstance(x, variable)

    return map_changed(lambda x: x.get_value() if is_variable(x) else x, state, is_variable)
