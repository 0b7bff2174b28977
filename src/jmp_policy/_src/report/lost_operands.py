"""Finds where the zero, or the infinity, comes from at which a later operation is not finite."""

from collections.abc import Mapping

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr.float32_replay import replay_equation
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.report.eager_replay import VIEWS, EagerReplay, ReplayedEqn


def underflow_before(
    replay: EagerReplay,
    step: ReplayedEqn,
    finite_in_float32: bool,
    numbers: Mapping[tuple[int, int], float],
) -> ReplayedEqn | None:
    """The operation that made the zero at which another one is not finite.

    Args:
      replay: what ran.
      step: the operation that made the first non-finite value.
      finite_in_float32: whether float32 would give a finite value there.
      numbers: of constants that are others in half, as of `LostConstants`.

    Returns:
      The operation whose result is zero in half precision and not in float32, or the one that reads a
      constant which is zero in half (`s + 1e-9`, `maximum(s, 1e-9)`); None where no zero was made so. An
      argument that is zero is its reader's.
    """
    name = step.eqn.primitive.name
    if name not in _POLES:
        return None
    reads = step.reads[1:] if name in _DIVISIONS else step.reads
    if finite_in_float32:
        for place in reads:
            lost = _lost(replay, place)
            if lost.any():
                return _first_lost(replay, place, lost) or step
        return None
    return next(filter(None, (_epsilon(replay, place, numbers) for place in reads)), None)


def infinite_constant(replay: EagerReplay, step: ReplayedEqn) -> ReplayedEqn | None:
    """The operation that reads the infinite half constant from which a step was computed, if any."""
    steps, seen = [step], set()
    while steps:
        step = steps.pop()
        for place in step.reads:
            if replay.ranges[place].is_finite or place in seen:
                continue
            seen.add(place)
            is_half_constant = place in replay.constants and is_half(replay.values[place].dtype)
            # A largest value is searched for from -inf on.
            if is_half_constant and step.eqn.primitive.name not in ("max", "min"):
                return step
            if place in replay.makers:
                steps.append(replay.makers[place])
    return None


def _lost(replay: EagerReplay, place: int) -> np.ndarray:
    """Where a value is zero which in float32 is not."""
    value, exact = np.asarray(replay.values[place]), np.asarray(replay.in_float32(place))
    return (value == 0) & (exact != 0) & np.issubdtype(exact.dtype, np.floating)


def _first_lost(replay: EagerReplay, place: int, lost: np.ndarray) -> ReplayedEqn | None:
    """The operation that made most zeros of operands that were not lost; None for an argument's zeros."""
    made = None
    while place in replay.makers:
        made = replay.makers[place]
        for read in made.reads:
            before = _lost(replay, read)
            least = 1.0
            if before.shape == lost.shape:
                # The same elements, where the operation goes element by element.
                before, least = before & lost, lost.sum() / 2
            if before.sum() >= least:
                place, lost = read, before
                break
        else:
            return made
    return made


def divides_by_constant_zero(replay: EagerReplay, step: ReplayedEqn) -> bool:
    """Whether a step divides by a half constant that is zero, and may have been written as another number."""
    if step.eqn.primitive.name not in _DIVISIONS or step.reads[1] not in replay.constants:
        return False
    divisor = replay.values[step.reads[1]]
    return is_half(divisor.dtype) and not np.asarray(divisor).any()


def _epsilon(replay: EagerReplay, place: int, numbers: Mapping[tuple[int, int], float]) -> ReplayedEqn | None:
    """The operation on a constant that is zero in half (an epsilon) that a zero is the result of."""
    while place in replay.makers:
        step = replay.makers[place]
        name = step.eqn.primitive.name
        if name == "add":
            # On the right: Python's sum() begins with 0 on the left.
            constant = step.reads[1]
            zero = not np.asarray(replay.values[constant]).any()
            is_epsilon = constant in replay.constants and zero and is_half(replay.values[constant].dtype)
            return step if is_epsilon else None
        if _is_zero_by_constant(replay, step, place, numbers):
            return step
        if name not in _KEEPS_ZERO or len(step.reads) > 1:
            return None
        place = step.reads[0]
    return None


def _is_zero_by_constant(
    replay: EagerReplay, step: ReplayedEqn, place: int, numbers: Mapping[tuple[int, int], float]
) -> bool:
    """Whether a result has zeros which with the constants as they are written are none."""
    values = [replay.values[read] for read in step.reads]
    written = {i: numbers[id(step.eqn), i] for i in range(len(values)) if (id(step.eqn), i) in numbers}
    if not written:
        return False
    for i, number in written.items():
        values[i] = jax.numpy.full_like(values[i], number, np.float32)
    exact = np.asarray(replay_equation(step.eqn, values)[step.writes.index(place)])
    return bool(((np.asarray(replay.values[place]) == 0) & (exact != 0)).any())


#: Operations for which an operand that was lost to zero is the end; of these, those that divide.
_POLES, _DIVISIONS = HAVING[Trait.POLE], frozenset({"div", "rem"})

#: Operations that may stand between an epsilon and what it guards.
_KEEPS_ZERO = VIEWS | {"sqrt"}
