"""Tells users that they differentiated the loss without its loss scale.

`loss_scaled` divides gradients by the scale. Gradients that it never multiplied come out 65536 times too
small, all of them finite: the model learns that much more slowly, and nothing else shows it. There are two
ways to notice:

1. While a program is traced, JAX knows what each value was computed from. Where a step is one jitted
   function, the gradients tell: behind them is a backward pass, and nowhere the loss scale of the state. That
   is an error.
2. Gradients that were computed in another jitted function, or outside of any, come without a history. A
   record of the scales that were ever asked for (`ScaleUse`) decides whether to warn; nothing else reads it.
"""

import collections
import warnings
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.data_flow import ancestors, ends_backward_pass, transposes


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
        """Whether a scale was asked for that may be one of these; ends the uses open so far."""
        self._drop_finished()
        was_open, self._open = self._open, False
        leaves = jax.tree.leaves(scales)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._ever  # Whatever arrays will take its place.
        asked = any((ref := self._arrays.get(id(leaf))) is not None and ref() is leaf for leaf in leaves)
        return asked or was_open or self._in_other_programs or bool(self._tracers)

    def is_constant(self, factor: Any) -> bool:
        """Whether a loss scale of this value multiplied as a constant of a program."""
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


class Division(NamedTuple):
    """Gradients as an update gets them, and the loss scale that it divides them by.

    Args:
      grads: scaled gradients.
      scale: the loss scale of the optimizer's state.
      params: the parameters, or None.
      fixed: the factor that the optimizer was made with, of a loss scale that never changes; else None.
      is_noted: whether a product with such a scale enters the record; those of other libraries do not.
    """

    grads: PyTree
    scale: Any
    params: PyTree
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
        known = {name: _is_multiplied(division) for name, division in divisions.items()}
        for name, multiplied in known.items():
            if multiplied is False:
                raise ValueError(_error(name))
            if multiplied:
                SCALE_USE.close(divisions[name].scale)
        if any(known.values()) or not all(d.is_noted for d in divisions.values()):
            self._is_answered = True
        if divisions and not self._is_answered:
            self._is_answered = True
            if not SCALE_USE.may_have_multiplied([d.scale for d in divisions.values()]):
                warnings.warn(_warning(next(iter(divisions))), UserWarning, stacklevel=3)


def _has_numbers(grads: PyTree) -> bool:
    arrays = [x for x in jax.tree.leaves(grads) if hasattr(x, "dtype")]
    return any(x.size and jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)


def _is_multiplied(division: Division) -> bool | None:
    """Whether gradients were computed from their loss scale; None where the trace does not show it.

    They were not, where they come out of a backward pass of the running trace, and have no ancestor in common
    with the scale. But they may have been all the same, and the answer is None, where

    1. the trace has inputs, other than the parameters, in the shapes of all gradients: these may have been
       computed from them after the backward pass (clipped, preconditioned);
    2. one of these inputs is a number, by which they may have been multiplied then;
    3. the scale never changes, and is a constant of the program.
    """
    leaves = jax.tree.leaves(division.grads)
    of_grads, of_scale = ancestors(leaves), ancestors(jax.tree.leaves(division.scale))
    if of_grads is None or of_scale is None:
        return None
    if of_grads.meet(of_scale):
        return True
    if not any(map(transposes, of_grads.equations)):
        return None
    return None if SCALE_USE.is_constant(division.fixed) or _may_be_inputs(leaves, division.params) else False


def _may_be_inputs(grads: list[Any], params: PyTree) -> bool:
    """Whether inputs of the trace may be gradients, or a scale, behind these gradients.

    Only what happens after the backward pass counts.
    """
    near, of_params = ancestors(grads, stop=ends_backward_pass), ancestors(jax.tree.leaves(params))
    known = {} if of_params is None else of_params.nodes
    inputs = [] if near is None else [x for x in near.inputs if id(x) not in known]
    may_be_scales = any(x.shape == () and jnp.issubdtype(x.dtype, jnp.inexact) for x in inputs)
    shapes = collections.Counter(map(np.shape, inputs))
    return may_be_scales or collections.Counter(map(np.shape, grads)) <= shapes


def _error(loss: str) -> str:
    return (
        f"loss_scaled divides the gradients{f' of {loss!r}' if loss else ''} by the loss scale in its state, "
        "and they were computed in this function without it: the parameters would learn as many times more "
        f"slowly as the scale is large. {_repair(loss)}"
    )


def _warning(loss: str) -> str:
    return (
        "loss_scaled divides gradients by the loss scale in its state, and nobody has asked for a loss scale "
        "to multiply a loss by: if nothing else did, the parameters learn as many times more slowly as the "
        f"scale is large. {_repair(loss)}"
    )


def _repair(loss: str) -> str:
    state = "get_loss_scale_state(opt_state)"
    by_hand = f"{state}.loss_scale[{loss!r}].scale(loss)" if loss else f"{state}.loss_scale.scale(loss)"
    argument = f", loss={loss!r}" if loss else ""
    return (
        f"Use `loss, grads = jmp_policy.scaled_value_and_grad(loss_fn{argument})(opt_state, params)` in "
        f"place of jax.value_and_grad; or, to scale by hand, differentiate what {by_hand} returns."
    )
