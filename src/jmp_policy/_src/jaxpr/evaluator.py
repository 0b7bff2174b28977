"""The one loop over the equations of a jaxpr."""

from collections.abc import Callable, Sequence
from typing import Any

from jmp_policy._src.jaxpr.compat import Literal, constants, open_jaxpr


def evaluate(jaxpr: Any, values: Sequence[Any], step: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """The results of a closed jaxpr, or one without constants.

    Args:
      jaxpr: any.
      values: its arguments; what `step` takes.
      step: gives the results of an equation for its operands.
    """
    opened = open_jaxpr(jaxpr)
    known = dict(zip(opened.invars, values, strict=True))
    known |= dict(zip(opened.constvars, constants(jaxpr), strict=True))

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else known[atom]

    for eqn in opened.eqns:
        known.update(zip(eqn.outvars, step(eqn, list(map(value_of, eqn.invars))), strict=True))
    return list(map(value_of, opened.outvars))
