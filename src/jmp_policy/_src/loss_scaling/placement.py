"""What stands around `loss_scaled` in an optimizer, and belongs inside: seen by the states around its own.

A skipped step changes nothing inside of `loss_scaled`; what is around it runs all the same.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jmp_policy._src.core.types import PyTree


def misplaced(opt_state: PyTree, state: Any) -> str:
    """What to say of a wrapper that stands around the state of `loss_scaled`, and belongs inside."""
    if not jax.tree.leaves(state.loss_scale):  # Nothing that could fall.
        return ""
    kind = type(state)
    for outer in jax.tree.leaves(opt_state, is_leaf=lambda node: bool(_advice(node, kind))):
        if any(node is state for node in jax.tree.leaves(outer, is_leaf=lambda node: node is state)):
            return _advice(outer, kind)
    return ""


def _advice(wrapper: Any, kind: type) -> str:
    """What to say of a wrapper around a state of `loss_scaled`, whose class is `kind`."""
    if isinstance(groups := getattr(wrapper, "inner_states", None), Mapping):
        # The state of a group is that of optax.masked; a frozen one has none of its own.
        states = {name: getattr(group, "inner_state", group) for name, group in groups.items()}
        trained = {name: state for name, state in states.items() if not _is_frozen(state)}
        without = [name for name, group in trained.items() if not _holds(group, kind)]
        if without and len(without) < len(trained):
            return (
                "loss_scaled is around one group of optax.multi_transform (partition), and the loss is "
                f"scaled for all: gradients of the group {without[0]!r} are never divided by the loss scale. "
                "Put it around the whole: loss_scaled(optax.multi_transform(...), loss_scale)."
            )
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
    if _is_chain(wrapper) and _holds(wrapper, kind):
        return _advice_on_chain(wrapper if isinstance(wrapper, tuple) else tuple(wrapper.values()), kind)
    if _is_state(wrapper, "optax.") and not isinstance(wrapper, optax.MultiStepsState | _COUNTING):
        held = [_holds(part, kind) for part in wrapper]
        own = [part for part, is_around in zip(wrapper, held, strict=True) if not is_around]
        if any(held) and jax.tree.leaves(own):
            name = type(wrapper).__name__.removesuffix("State")
            return (
                f"optax's {name} stands around loss_scaled: it runs on skipped steps as well. Put it inside, "
                "and loss_scaled around the whole."
            )
    return ""


def _advice_on_chain(states: Sequence[Any], kind: type) -> str:
    masked = [state.inner_state for state in states if isinstance(state, optax.MaskedState)]
    trained = [_holds(state, kind) for state in masked if not _is_frozen(state)]
    if any(trained) and not all(trained):
        return (
            "loss_scaled is inside one optax.masked of several, and the loss is scaled for all: gradients of "
            "the others are never divided by the loss scale. Put it around the whole: "
            "loss_scaled(optax.chain(...), loss_scale)."
        )
    first = [_holds(state, kind) for state in states].index(True)
    behind = [one for one in states[first + 1 :] if _is_state(one) and not isinstance(one, _BESIDE)]
    if jax.tree.leaves(behind):
        return (
            "optax.chain has transformations behind loss_scaled, and these run on skipped steps as well: "
            "counts and averages go on, weight decay changes parameters. Put all of them inside: "
            "loss_scaled(optax.chain(...), loss_scale)."
        )
    return ""


def _is_chain(state: Any) -> bool:
    """Whether a state is that of an `optax.chain`: others in a plain tuple, or by names in order."""
    if isinstance(state, collections.OrderedDict):
        state = tuple(state.values())
    return type(state) is tuple and all(_is_chain(one) or _is_state(one) for one in state)


def _is_state(x: Any, *packages: str) -> bool:
    """Whether something is the state of a transformation of optax or of this library, or of one of them."""
    return isinstance(x, tuple) and type(x).__module__.startswith(packages or ("optax.", "jmp_policy."))


def _is_frozen(state: Any) -> bool:
    """Whether a state may be that of `optax.set_to_zero`."""
    while type(state) is tuple and len(state) == 1:
        (state,) = state
    return isinstance(state, optax.EmptyState)


def _holds(tree: Any, kind: type) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return any(isinstance(leaf, kind) for leaf in leaves)


#: States of wrappers that only count steps, as schedules do, and keep the hyperparameters of the last one.
_COUNTING = (
    optax.InjectHyperparamsState
    | optax.InjectStatefulHyperparamsState
    | optax.ConditionallyMaskState
    | optax.ConditionallyTransformState
)

#: States that may be of another optimizer beside this one, or an average of parameters, and no part of a
#: chain; and of what only watches gradients.
_BESIDE = (
    _COUNTING
    | optax.EmaState
    | optax.MultiStepsState
    | optax.PartitionState
    | optax.SnapshotState
    | optax.ZeroNansState
)
