"""Reading and running a jaxpr, operation by operation."""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

Literal = core.Literal


def open_jaxpr(jaxpr: Any) -> Any:
    """The equations of a jaxpr, closed or not. From 0.12 on a closed jaxpr is a jaxpr with its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> Sequence[Any]:
    """The values of a jaxpr's constant variables; none for an open one."""
    return getattr(jaxpr, "consts", ())


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
