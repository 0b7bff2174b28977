"""Finds what half precision made zero or infinite before the operation whose result is not finite."""

import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr.op_table import Trait, having
from jmp_policy._src.report.diagnose.eager_replay import VIEWS, EagerReplay, ReplayedEqn


def underflow_before(replay: EagerReplay, step: ReplayedEqn, finite_in_float32: bool) -> ReplayedEqn | None:
    """Returns the operation that made the zero at which another one is not finite.

    Args:
      replay: what ran.
      step: the operation that made the first non-finite value.
      finite_in_float32: whether float32 would give a finite value there.

    Returns:
      The operation whose result is zero in half precision and not in float32, or the addition of a constant
      that is zero in half; None where no zero was made so. An argument that is zero is its reader's.
    """
    name = step.eqn.primitive.name
    if name not in _POLES:
        return None
    reads = step.reads[1:] if name in _DIVISIONS else step.reads
    makers = {write: made for made in replay.steps for write in made.writes}
    if finite_in_float32:
        for place in reads:
            lost = _lost(replay, place)
            if lost.any():
                return _first_lost(replay, makers, place, lost) or step
        return None
    epsilons = (_epsilon(replay, makers, place) for place in reads)
    return next((made for made in epsilons if made is not None), None)


def infinite_constant(replay: EagerReplay, step: ReplayedEqn) -> ReplayedEqn | None:
    """Returns the operation that reads the infinite half constant from which a step was computed, if any."""
    makers = {write: made for made in replay.steps for write in made.writes}
    steps, seen = [step], set()
    while steps:
        step = steps.pop()
        for place in step.reads:
            if replay.ranges[place].is_finite or place in seen:
                continue
            seen.add(place)
            is_half_constant = replay.is_constant(place) and is_half(replay.values[place].dtype)
            # A largest value is searched for from -inf on.
            if is_half_constant and step.eqn.primitive.name not in ("max", "min"):
                return step
            if place in makers:
                steps.append(makers[place])
    return None


def _lost(replay: EagerReplay, place: int) -> np.ndarray:
    """Returns where a value is zero which in float32 is not."""
    value = replay.values[place]
    if not np.issubdtype(np.asarray(replay.in_float32(place)).dtype, np.floating):
        return np.zeros(np.shape(value), bool)
    return (np.asarray(value) == 0) & (np.asarray(replay.in_float32(place)) != 0)


def _first_lost(
    replay: EagerReplay, makers: dict[int, ReplayedEqn], place: int, lost: np.ndarray
) -> ReplayedEqn | None:
    """Returns the operation that made zeros of operands that were not lost; None for an argument's zeros."""
    made = None
    while place in makers:
        made = makers[place]
        for read in made.reads:
            before = _lost(replay, read)
            # The same elements, where the operation goes element by element.
            before = before & lost if before.shape == lost.shape else before
            if before.any():
                place, lost = read, before
                break
        else:
            return made
    return made


def _epsilon(replay: EagerReplay, makers: dict[int, ReplayedEqn], place: int) -> ReplayedEqn | None:
    """Returns the addition of a constant that is zero in half (an epsilon) that a zero is the result of."""
    while place in makers:
        step = makers[place]
        if step.eqn.primitive.name == "add":
            # On the right: Python's sum() begins with 0 on the left.
            constant = step.reads[1]
            zero = not np.asarray(replay.values[constant]).any()
            is_epsilon = replay.is_constant(constant) and zero and is_half(replay.values[constant].dtype)
            return step if is_epsilon else None
        if step.eqn.primitive.name not in _KEEPS_ZERO or len(step.reads) > 1:
            return None
        place = step.reads[0]
    return None


#: Operations for which an operand that was lost to zero is the end; of these, those that divide.
_POLES = having(Trait.POLE)
_DIVISIONS = frozenset({"div", "rem"})

#: Operations that may stand between an epsilon and what it guards.
_KEEPS_ZERO = VIEWS | {"sqrt"}
