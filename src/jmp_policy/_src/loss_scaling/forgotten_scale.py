"""Tells users that they differentiated the loss without its loss scale, or clipped what it multiplied.

`loss_scaled` divides gradients by the scale. Gradients that it never multiplied come out 65536 times too
small, all of them finite: the model learns that much more slowly, and nothing else shows it. So do those that
somebody has divided already, or clipped to a norm of 1 before. There are two ways to notice:

1. While a program is traced, JAX knows what each value was computed from. Where a step is one jitted
   function, the gradients tell: behind them is a backward pass, and nowhere the loss scale of the state. That
   is an error. Where they come of the parameters without a backward pass (`jax.jacfwd`, formulas), and where
   something has clipped or divided them since, it is a warning.
2. Gradients that were computed in another jitted function, or outside of any, come without a history. A
   record of the scales that were asked for (`ScaleUse`) decides whether to warn; nothing else reads it.

Right steps are told here; what does not look like one is looked at in `scale_mistakes`.
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


class ScaleUse:
    """Record of the loss scales that losses were multiplied by, in this process.

    Each use of a scale is open until an update with it, or with a scale in its place (a copy, a restored
    one), has followed. A use inside a program stays open if the update is not in that program, since the
    program may run again at any time without being traced: for every optimizer whose state has as many
    arrays as the one that it was traced for.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self._tracers: list[tuple[weakref.ref[Any], int | None]] = []
        self._constants: set[float] = set()
        self._open: set[tuple[int, ...]] = set()
        self._in_other_programs: set[int | None] = set()

    def note(self, scale: Any, state: PyTree = None) -> None:
        """Takes note that a loss scale was asked for, to multiply a loss by; in which state, if in one."""
        self._drop_finished()
        leaves = jax.tree.leaves(scale)
        arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
        if arrays:
            # Of those that no array stands for any more, the update was in a jitted function that ran again.
            self._open = {use for use in self._open if not self._arrays.keys().isdisjoint(use)}
            self._open.add(tuple(map(id, arrays)))
        for leaf in arrays:
            key = id(leaf)
            self._arrays[key] = weakref.ref(leaf, lambda _, key=key: self._arrays.pop(key, None))
        known = {id(ref()) for ref, _ in self._tracers}
        new = [x for x in leaves if isinstance(x, jax.core.Tracer) and id(x) not in known]
        self._tracers += [(weakref.ref(x), _size(state)) for x in new]

    def note_product(self, scale: Any, tree: PyTree) -> None:
        """Takes note that a loss scale multiplies a tree; of its value where that is a program's constant."""
        self.note(scale)
        if _is_known(scale.loss_scale) and any(compat.traced_by(x) for x in jax.tree.leaves(tree)):
            self._constants.add(float(scale.loss_scale))

    def close(self, scale: Any) -> None:
        """Takes note that an update divides by a scale that multiplied the gradients in the same program."""
        leaves = jax.tree.leaves(scale)
        self._tracers = [use for use in self._tracers if not any(use[0]() is leaf for leaf in leaves)]

    def may_have_multiplied(self, scales: PyTree, state: PyTree) -> bool:
        """Whether a scale was asked for that may be one of these of a state; ends one use that was open."""
        self._drop_finished()
        leaves = jax.tree.leaves(scales)
        asked = {id(x) for x in leaves if (ref := self._arrays.get(id(x))) is not None and ref() is x}
        use = next((use for use in self._open if not asked.isdisjoint(use)), None)
        if use is None and self._open:
            use = next(iter(self._open))
        self._open.discard(use or ())
        in_programs = not self._in_other_programs.isdisjoint((None, _size(state)))
        return bool(asked) or use is not None or in_programs or bool(self._tracers)

    def is_constant(self, factor: Any) -> bool:
        """Whether a loss scale of this value multiplied as a constant of a program."""
        return _is_known(factor) and float(factor) in self._constants

    def _drop_finished(self) -> None:
        """Forgets tracers of finished programs. Their uses stay open, as their updates were not seen."""
        self._in_other_programs |= {size for ref, size in self._tracers if ref() is None}
        self._tracers = [use for use in self._tracers if use[0]() is not None]


def _size(state: PyTree) -> int | None:
    """How many arrays a state has, by which one is told from another under every transform."""
    return None if state is None else len(jax.tree.leaves(state))


def _is_known(factor: Any) -> bool:
    return isinstance(factor, jax.Array) and not isinstance(factor, jax.core.Tracer)


#: The record of this process.
SCALE_USE = ScaleUse()


class Division(NamedTuple):
    """Gradients as an update gets them, and the loss scale that it divides them by.

    Args:
      grads: scaled gradients.
      scale: the loss scale of the optimizer's state.
      params: the parameters, or None.
      state: the optimizer's state.
      fixed: the factor that the optimizer was made with, of a loss scale that never changes; else None.
      is_noted: whether a product with such a scale enters the record; those of other libraries do not.
    """

    grads: PyTree
    scale: Any
    params: PyTree
    state: Any
    fixed: Any
    is_noted: bool


class ForgottenScaleCheck:
    """Check of every update of one optimizer.

    What a trace shows is checked each time it is traced. The record is asked until there is an answer, which
    holds for all updates: one warning, or none.
    """

    def __init__(self) -> None:
        self._is_answered = False

    def __call__(self, divisions: Mapping[str, Division]) -> None:
        """Checks the gradients of each loss, by its name ("" for the only one).

        Raises:
          ValueError: where the running trace shows that no loss scale multiplied them.
        """
        # A scale without numbers (NoOpLossScale) has none that could be looked for.
        divisions = {n: d for n, d in divisions.items() if jax.tree.leaves(d.scale) and _has_numbers(d.grads)}
        if all(map(_comes_scaled, divisions.values())):
            for division in divisions.values():
                SCALE_USE.close(division.scale)
        else:
            from jmp_policy._src.loss_scaling.scale_mistakes import explained

            found = explained(divisions, SCALE_USE)
            if found is not None and not self._is_answered:
                warnings.warn(found, UserWarning, stacklevel=3)
        self._is_answered |= bool(divisions)


def _has_numbers(grads: PyTree) -> bool:
    return any(hasattr(x, "dtype") and is_inexact(x) and x.size for x in jax.tree.leaves(grads))


def _comes_scaled(division: Division) -> bool:
    """Whether the trace shows gradients as a backward pass gave them, computed from their loss scale.

    It does in a step that is one jitted function. All other gradients take a closer look.
    """
    grads = jax.tree.leaves(division.grads)
    of_grads, of_scale = ancestors(grads), ancestors(jax.tree.leaves(division.scale))
    near = ancestors(grads, stop=ends_backward_pass)
    if of_grads is None or of_scale is None or near is None:
        return False
    return of_grads.meet(of_scale) and all(map(ends_backward_pass, near.equations))
