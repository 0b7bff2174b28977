"""Remembers which loss scales were asked for, so that gradients that no scale multiplied are noticed.

Where the loss is differentiated in another jitted function than the update, or outside of any, no program
shows whether a loss scale multiplied it. What is known then is whether anybody ever asked for one. Nothing
is computed from this record: it only decides whether a warning is due.
"""

import weakref
from typing import Any

import jax
import jax.core

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import compat


class ScaleUse:
    """Record of the loss scales that losses were multiplied by, in this process.

    Each use of a scale is open until an update with it, or with a scale in its place (a copy, a restored
    one), has followed. A use inside a program stays open if the update is not in that program, since the
    program may run again at any time without being traced.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref[Any]] = {}
        self._tracers: list[weakref.ref[Any]] = []
        self._constants: set[float] = set()
        self._ever = self._open = self._in_other_programs = False

    def note(self, scale: Any) -> None:
        """Takes note that a loss scale was asked for, to multiply a loss by."""
        self._drop_finished()
        for leaf in jax.tree.leaves(scale):
            self._ever = True
            if isinstance(leaf, jax.core.Tracer):
                self._tracers.append(weakref.ref(leaf))
            elif isinstance(leaf, jax.Array):
                self._open, key = True, id(leaf)
                self._arrays[key] = weakref.ref(leaf, lambda _, key=key: self._arrays.pop(key, None))

    def note_product(self, scale: Any, tree: PyTree) -> None:
        """Takes note that a loss scale multiplies a tree; of its value where that is a program's constant."""
        self.note(scale)
        if _is_known(scale.loss_scale) and any(compat.traced_by(x) for x in jax.tree.leaves(tree)):
            self._constants.add(float(scale.loss_scale))

    def close(self, scale: Any) -> None:
        """Takes note that an update divides by a scale that multiplied the gradients in the same program."""
        leaves = jax.tree.leaves(scale)
        self._tracers = [ref for ref in self._tracers if not any(ref() is leaf for leaf in leaves)]

    def may_have_multiplied(self, scales: PyTree) -> bool:
        """Returns whether a scale was asked for that may be one of these; ends the uses open so far."""
        self._drop_finished()
        was_open, self._open = self._open, False
        leaves = jax.tree.leaves(scales)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._ever  # Whatever arrays will take its place.
        asked = any((ref := self._arrays.get(id(leaf))) is not None and ref() is leaf for leaf in leaves)
        return asked or was_open or self._in_other_programs or bool(self._tracers)

    def is_constant(self, factor: Any) -> bool:
        """Returns whether a loss scale of this value multiplied as a constant of a program."""
        return _is_known(factor) and float(factor) in self._constants

    def _drop_finished(self) -> None:
        """Forgets tracers of finished programs. Their uses stay open, as their updates were not seen."""
        alive = [ref for ref in self._tracers if ref() is not None]
        self._in_other_programs |= len(alive) < len(self._tracers)
        self._tracers = alive


def _is_known(factor: Any) -> bool:
    return isinstance(factor, jax.Array) and not isinstance(factor, jax.core.Tracer)


#: The record of this process.
SCALE_USE = ScaleUse()
