"""The one loop over the equations of a jaxpr.

What a value is, is the caller's: an array, its float32 twin, what is known of it, its index in a list. So
every way to run or to look at a program is a function of an equation and its operands::

    def step(eqn, operands):                       # computes it, as jax.core.eval_jaxpr does
        return compat.bind_primitive(eqn.primitive, operands, eqn.params)

    evaluate(jaxpr, arrays, step)
"""

from collections.abc import Callable, Sequence
from typing import Any

from jmp_policy._src.jaxpr.compat import Literal, constants, open_jaxpr


def evaluate(
    jaxpr: Any,
    values: Sequence[Any],
    step: Callable[[Any, list[Any]], Sequence[Any]],
    *,
    constant: Callable[[Any, Any], Any] = lambda var, value: value,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    last_uses: Sequence[Sequence[Any]] | None = None,
) -> list[Any]:
    """Returns the results of a jaxpr.

    Args:
      jaxpr: closed or not.
      values: its arguments; what `step` takes.
      step: gives the results of an equation for its operands.
      constant: gives the value of a constant variable, for the variable and the constant; that is None in a
        jaxpr that is not closed.
      literal: gives the value of a number that stands in the program.
      last_uses: of `last_uses`, to free values that are not needed any more.
    """
    opened, consts = open_jaxpr(jaxpr), constants(jaxpr)
    known = dict(zip(opened.invars, values, strict=True))
    for var, value in zip(opened.constvars, consts or [None] * len(opened.constvars), strict=True):
        known[var] = constant(var, value)

    if last_uses is not None:
        # What is left of the arguments is in `known`, and goes with its last use.
        del values

    def value_of(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else known[atom]

    for place, eqn in enumerate(opened.eqns):
        known.update(zip(eqn.outvars, step(eqn, list(map(value_of, eqn.invars))), strict=True))
        if last_uses is not None:
            for var in last_uses[place]:
                del known[var]
    return list(map(value_of, opened.outvars))


def last_uses(jaxpr: Any) -> list[list[Any]]:
    """Returns for each equation the variables that are not needed after it."""
    opened = open_jaxpr(jaxpr)
    seen = {atom for atom in opened.outvars if not isinstance(atom, Literal)}
    dead: list[list[Any]] = []
    for eqn in reversed(opened.eqns):
        atoms = [a for a in (*eqn.invars, *eqn.outvars) if not isinstance(a, Literal)]
        dead.append([atom for atom in dict.fromkeys(atoms) if atom not in seen])
        seen.update(atoms)
    return dead[::-1]
