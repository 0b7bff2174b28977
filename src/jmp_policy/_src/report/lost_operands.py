"""Finds where the zero comes from at which a later operation is not finite."""

import numpy as np

from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.report.eager_replay import EagerReplay, ReplayedEqn


def underflow_before(replay: EagerReplay, step: ReplayedEqn) -> ReplayedEqn | None:
    """The operation that made the zero at which another one is not finite.

    Args:
      replay: what ran.
      step: the operation that made the first non-finite value, which is finite in float32.

    Returns:
      The operation whose result is zero in half precision and not in float32, with constants as they are
      written (`s + 1e-9`, `maximum(s, 1e-9)`); the step itself where it divides by such a constant. None
      where no zero was made so.
    """
    name = step.eqn.primitive.name
    if name not in _POLES:
        return None
    for i in range(1 if name in _DIVISIONS else 0, len(step.reads)):
        lost = _lost(replay, step, i)
        if lost.any():
            return _first_lost(replay, step.reads[i], lost) or step
    return None


def _lost(replay: EagerReplay, step: ReplayedEqn, i: int) -> np.ndarray:
    """Where an operand of a step is zero which in float32 is not."""
    value, exact = np.asarray(replay.values[step.reads[i]]), np.asarray(replay.read_in_float32(step, i))
    return (value == 0) & (exact != 0) & np.issubdtype(exact.dtype, np.floating)


def _first_lost(replay: EagerReplay, place: int, lost: np.ndarray) -> ReplayedEqn | None:
    """The operation that made most zeros of operands that were not lost; None for a constant."""
    made = None
    while place in replay.makers:
        made = replay.makers[place]
        for i, read in enumerate(made.reads):
            before = _lost(replay, made, i)
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


#: Operations for which an operand that was lost to zero is the end; of these, those that divide.
_POLES, _DIVISIONS = HAVING[Trait.POLE], frozenset({"div", "rem"})
