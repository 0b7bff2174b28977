"""Notes the loss scales that losses are multiplied by, and checks that gradients of an update had theirs.

A right step is told here; what does not look like one is looked at in `scale_mistakes`, which says why.
"""

import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.data_flow import ancestors, ends_backward_pass
from jmp_policy._src.loss_scaling.gradients import is_inexact
from jmp_policy._src.loss_scaling.scale_mistakes import Division, explained, warn_if_scaled


class Use(NamedTuple):
    """One use of a loss scale: its leaves, and how many arrays the state has that it is from, if from one."""

    leaves: list[weakref.ref[Any]]
    is_traced: bool
    state_size: int | None

    def is_of(self, scale: PyTree) -> bool:
        """Whether it was a use of this scale: they have an array in common."""
        return not {id(ref()) for ref in self.leaves}.isdisjoint(map(id, jax.tree.leaves(scale)))


class ScaleUse:
    """Record of the loss scales that losses were multiplied by, in this process.

    A use is open until an update with it, or with a scale in its place (a copy, a restored one), has
    followed. One inside a program without the update stays open, since the program may run again without
    being traced: for every optimizer whose state has as many arrays as the one that it was traced for.
    """

    def __init__(self) -> None:
        self.open: list[Use] = []
        self.sizes_in_other_programs: set[int | None] = set()
        self.constants: set[float] = set()

    def note(self, scale: Any, state: PyTree = None) -> None:
        """Takes note that a loss scale was asked for, to multiply a loss by; in which state, if in one."""
        self.drop_finished()
        leaves = [x for x in jax.tree.leaves(scale) if isinstance(x, jax.Array)]
        if leaves and not any(use.is_of(leaves) for use in self.open):
            is_traced = isinstance(leaves[0], jax.core.Tracer)
            if not is_traced:
                # Of those whose arrays are gone, the update was in a jitted function that ran again.
                self.open = [use for use in self.open if any(ref() is not None for ref in use.leaves)]
            # The number of its arrays tells a state from another one under every transform.
            size = None if state is None else len(jax.tree.leaves(state))
            self.open.append(Use([weakref.ref(x) for x in leaves], is_traced, size))

    def note_product(self, scale: Any, tree: PyTree) -> None:
        """Takes note that a loss scale multiplies a tree; of its value where that is a program's constant."""
        self.note(scale)
        traced = list(filter(None, map(compat.traced_by, jax.tree.leaves(tree))))
        if traced and is_known(scale.loss_scale):
            self.constants.add(float(scale.loss_scale))
        if products := [(eqn, xs) for _, eqn, xs in traced if eqn and eqn.primitive.name == "mul"]:
            warn_if_scaled(products, scale)

    def close(self, scale: Any) -> None:
        """Takes note that an update divides by a scale that multiplied the gradients in the same program."""
        self.open = [use for use in self.open if not (use.is_traced and use.is_of(scale))]

    def drop_finished(self) -> None:
        """Forgets tracers of finished programs. Their uses stay open, as their updates were not seen."""
        unfinished = []
        for use in self.open:
            if use.is_traced and any(ref() is None for ref in use.leaves):
                self.sizes_in_other_programs.add(use.state_size)
            else:
                unfinished.append(use)
        self.open = unfinished


def is_known(factor: Any) -> bool:
    """Whether a factor is a number, and not traced."""
    return isinstance(factor, jax.Array) and not isinstance(factor, jax.core.Tracer)


#: The record of this process.
SCALE_USE = ScaleUse()


class ForgottenScaleCheck:
    """Check of every update of one optimizer: of each trace, and of the record until there is an answer."""

    def __init__(self, initial: Mapping[str, Any]) -> None:
        self._initial, self._is_answered, self._has_warned = initial, False, False

    def __call__(
        self, grads: Mapping[str, PyTree], scales: Mapping[str, Any], params: PyTree, state: Any
    ) -> None:
        """Checks the scaled gradients of each loss, by its name ("" for the only one).

        Raises:
          ValueError: where the running trace shows that no loss scale multiplied them.
        """
        # A scale without numbers (NoOpLossScale) has none that could be looked for.
        divisions = {
            name: Division(grads[name], scales[name], self._initial[name], params, state)
            for name in grads
            if jax.tree.leaves(scales[name])
            and any(hasattr(x, "dtype") and is_inexact(x) and x.size for x in jax.tree.leaves(grads[name]))
        }
        if all(map(_comes_scaled, divisions.values())):
            for division in divisions.values():
                SCALE_USE.close(division.scale)
        else:
            found = explained(divisions, SCALE_USE, self._is_answered)
            if found is not None and not self._has_warned:
                self._has_warned = True
                warnings.warn(found, UserWarning, stacklevel=3)
        self._is_answered |= bool(divisions)


def _comes_scaled(division: Division) -> bool:
    """Whether the trace shows gradients as a backward pass gave them, computed from their loss scale."""
    near = ancestors(division.grads, stop=ends_backward_pass)
    is_scaled = ancestors(division.grads).meet(ancestors(division.scale))
    return is_scaled and all(map(ends_backward_pass, near.equations))
