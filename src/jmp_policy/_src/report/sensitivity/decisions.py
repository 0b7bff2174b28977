"""Which programs make decisions that rounding may turn: there the gradient jumps, and has no derivative.

A program is asked that computes a gradient. A maximum that only keeps an exponential from overflowing, as in
a softmax, leaves no comparison in it; that of a relu does.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls, compat, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.op_table import Trait, having

#: Decisions if their operands are half. In float32 most compare what is nowhere near equal: a variance with
#: 0, a random number with the rate of a dropout. So the absolute values of a float32 loss are not seen.
_COMPARISONS = having(Trait.DECIDES)

#: Decisions in float32 too: a router of experts, max pooling.
_CHOICES = having(Trait.RANKS)


def makes_decisions(jaxpr: Any) -> bool:
    """Returns whether a program decides anything that its results hang on by numbers that half rounds."""
    search = _Search()
    search.inputs_of(jaxpr, [True] * len(compat.open_jaxpr(jaxpr).outvars))
    return search.found


class _Search:
    """Search backward from the results: traced gradients hold much that no result needs.

    Attributes:
      found: whether there is a decision.
    """

    def __init__(self) -> None:
        self.found = False

    def inputs_of(self, jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
        """Returns which arguments of a jaxpr the wanted ones of its results need."""
        opened = compat.open_jaxpr(jaxpr)
        needed = set(_variables(itertools.compress(opened.outvars, wanted)))
        for eqn in reversed(opened.eqns):
            outs = [var in needed for var in eqn.outvars]
            if any(outs):
                self.found |= _decides(eqn)
                needed.update(_variables(self._operands(eqn, outs)))
        return [var in needed for var in opened.invars]

    def _operands(self, eqn: Any, outs: Sequence[bool]) -> Iterable[Any]:
        """Returns the operands that results of an operation need."""
        called = calls.called(eqn)
        if calls.kind_of(eqn) is Kind.CUSTOM_JVP:
            return eqn.invars  # Its derivative stands beside it: of softplus that is smooth.
        if called is not None:
            return itertools.compress(eqn.invars[called.skipped :], self.inputs_of(called.jaxpr, outs))
        for inner in ir.subjaxprs(eqn):
            self.inputs_of(inner, [True] * len(compat.open_jaxpr(inner).outvars))
        return eqn.invars


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, compat.Literal)]


def _decides(eqn: Any) -> bool:
    dtypes = list(map(ir.dtype_of, eqn.invars))
    if eqn.primitive.name in _COMPARISONS:
        return any(map(is_half, dtypes)) and not any(map(_is_infinite, eqn.invars))
    return eqn.primitive.name in _CHOICES and jnp.issubdtype(dtypes[0], jnp.floating)


def _is_infinite(atom: Any) -> bool:
    """Returns whether an operand is the number infinity, to which nothing is nearly equal."""
    return isinstance(atom, compat.Literal) and bool(np.all(np.isinf(np.asarray(atom.val, np.float32))))
