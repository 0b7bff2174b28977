"""Defines the optimizer state of `loss_scaled`, and finds it inside any other optimizer state."""

import warnings
from collections.abc import Callable, Mapping
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


class Found(NamedTuple):
    """A state of `loss_scaled`, where it is, and what to say of a wrapper around it that belongs inside."""

    path: str
    state: LossScaledState
    misplaced: str


def find_loss_scale(scale_or_state: Any, loss: str | None = None) -> LossScale:
    """The loss scale in a loss scale, in several, or in anything that `get_loss_scale_state` takes.

    Args:
      scale_or_state: the loss scale, the loss scales by name, or an optimizer state that holds either.
      loss: name of the loss whose scale is meant, where there are several.
    """
    scale, state = scale_or_state, None
    if not is_scale(scale):
        found = find_one(scale)
        state, scale = found.state, unwrapped(found.state.loss_scale)
        if found.misplaced and jax.tree.leaves(scale):
            warnings.warn(found.misplaced, UserWarning, stacklevel=3)
    if loss is not None or not is_loss_scale(scale):
        scale = pick(scale, loss)
    SCALE_USE.note(scale, state)
    return scale


def is_scale(x: Any) -> bool:
    """Whether a value is a loss scale or several by name, not a state that holds them."""
    return is_loss_scale(x) or (isinstance(x, Mapping | LossScales) and are_several(x))


def find_one(opt_state: PyTree) -> Found:
    """Finds the one state of `loss_scaled` in an optimizer state, or raises ValueError."""
    found = _find(opt_state)
    if len(found) != 1:
        raise scale_mistakes.not_one(type(opt_state).__name__, [one.path for one in found])
    check_no_number(found[0].state)
    return found[0]


def check_no_number(state: LossScaledState) -> None:
    """Raises TypeError for a number in the place of the loss scale, as optax's `tree_set` puts it there."""
    if isinstance(state.loss_scale, jax.Array | np.ndarray | np.generic | int | float):
        raise scale_mistakes.is_number(state.loss_scale)


def _find(tree: PyTree, prefix: str = "", misplaced: str = "") -> list[Found]:
    inner = {
        LossScaledState: "inner_state",
        optax.ApplyIfFiniteState: "inner_state",
        optax.MultiStepsState: "inner_opt_state",
    }
    wrappers = tuple(inner)
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, wrappers))
    found = []
    for path, leaf in leaves:
        if isinstance(leaf, wrappers):
            place = prefix + jax.tree_util.keystr(path)
            is_it = isinstance(leaf, LossScaledState)
            if is_it:
                found.append(Found(place, leaf, misplaced))
            name, outer = inner[type(leaf)], misplaced or ("" if is_it else scale_mistakes.misplaced(leaf))
            found += _find(getattr(leaf, name), f"{place}.{name}", outer)
    return found


def variable_test() -> Callable[[Any], bool]:
    """Test of leaves for being Variables, into which `nnx.Optimizer` puts the arrays of its state."""
    variable = imported_attr("flax.nnx", "Variable")  # There are none if NNX was never imported.
    return lambda x: variable is not None and isinstance(x, variable)


def unwrapped(state: Any) -> Any:
    """The state with plain arrays, and the same object where it has them already."""
    is_variable = variable_test()
    return map_changed(lambda x: x.get_value() if is_variable(x) else x, state, is_variable)
