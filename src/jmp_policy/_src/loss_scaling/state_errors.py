"""What is wrong with an optimizer state: no loss scale in it, several, a number, or one in a wrong place."""

from collections.abc import Sequence
from typing import Any

import jax
import optax


def not_one(state: str, paths: Sequence[str]) -> ValueError:
    """Makes the error for a state with no loss scale, or with several.

    Args:
      state: name of its class.
      paths: where the loss scales are.
    """
    if not paths:
        return ValueError(
            f"There is no loss scale in this {state}: wrap the optimizer with "
            "jmp_policy.loss_scaled(optimizer, DynamicLossScale()) and pass the state its init returned, as "
            "the first argument before the parameters."
        )
    places = ", ".join(path or "(the state itself)" for path in paths)
    if paths[1].startswith(f"{paths[0]}.inner_state"):
        return ValueError(
            f"loss_scaled is around the optimizer twice: there are loss scales at {places}. Remove one."
        )
    return ValueError(
        f"There are {len(paths)} loss scales in this optimizer state, at {places}. Name the one you "
        "mean by passing that part of the state, or its .loss_scale, instead of the whole."
    )


def is_number(scale: Any) -> TypeError:
    """Makes the error for a number in the place of a loss scale."""
    return TypeError(
        f"The loss scale of this optimizer state is a number ({scale}), without counters and bounds. Put "
        "it into the loss scale: optax.tree_utils.tree_set(opt_state, loss_scale=dataclasses.replace("
        "jmp_policy.optim.get_loss_scale_state(opt_state).loss_scale, loss_scale=4.0))."
    )


def misplaced(wrapper: Any) -> str:
    """What to say of a wrapper that stands around `loss_scaled`, and belongs inside."""
    if isinstance(wrapper, optax.ApplyIfFiniteState):
        return (
            "optax.apply_if_finite stands around loss_scaled and keeps overflows from it: the loss scale "
            "falls late or never. loss_scaled skips such steps itself, so leave apply_if_finite out, or "
            "put it inside: loss_scaled(optax.apply_if_finite(optimizer, n), loss_scale)."
        )
    if isinstance(wrapper, optax.MultiStepsState) and not jax.tree.leaves(wrapper.skip_state):
        return (
            "optax.MultiSteps stands around loss_scaled and adds up gradients before they are tested: the "
            "first overflow spoils its sum. Put it inside: loss_scaled(optax.MultiSteps(optimizer, n), "
            "loss_scale)."
        )
    return ""
