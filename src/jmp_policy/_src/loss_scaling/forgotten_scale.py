"""Tells users that they differentiated the loss without its loss scale.

`loss_scaled` divides gradients by the scale. Gradients that it never multiplied come out 65536 times too
small, all of them finite: the model learns that much more slowly, and nothing else shows it.

While a program is traced, JAX knows what each value was computed from. So where a step is one jitted
function, the gradients themselves tell: behind them is a backward pass, and nowhere the loss scale of the
state. Gradients that were computed in another function come without a history; there a record of the scales
that were ever asked for (`loss_scaling/scale_use.py`) decides whether to warn.
"""

import collections
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr.data_flow import ancestors, ends_backward_pass, transposes
from jmp_policy._src.loss_scaling.loss_scale import LossScale, Scaling, StaticLossScale
from jmp_policy._src.loss_scaling.scale_use import SCALE_USE

_REPAIR = (
    "Use `loss, grads = jmp_policy.scaled_value_and_grad(loss_fn{loss})(opt_state, params)` in place of "
    "jax.value_and_grad; or, to scale by hand, differentiate what {by_hand} returns."
)


class Division(NamedTuple):
    """Gradients as an update gets them, and the loss scale that it divides them by.

    Args:
      grads: scaled gradients.
      scale: the loss scale of the optimizer's state.
      initial: the loss scale that `loss_scaled` was given.
      params: the parameters, or None.
    """

    grads: PyTree
    scale: LossScale
    initial: LossScale
    params: PyTree


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
        known = {name: is_multiplied(division) for name, division in divisions.items()}
        for name, multiplied in known.items():
            if multiplied is False:
                raise ValueError(_error(name))
            if multiplied:
                SCALE_USE.close(divisions[name].scale)
        # Other classes' scales may multiply without anybody's notice.
        if any(known.values()) or not all(isinstance(d.scale, Scaling) for d in divisions.values()):
            self._is_answered = True
        if divisions and not self._is_answered:
            self._is_answered = True
            if not SCALE_USE.may_have_multiplied([d.scale for d in divisions.values()]):
                warnings.warn(_warning(next(iter(divisions))), UserWarning, stacklevel=3)


def is_multiplied(division: Division) -> bool | None:
    """Returns whether gradients were computed from their loss scale; None where the trace does not show it.

    They were not, where they come out of a backward pass of the running trace, and have no ancestor in common
    with the scale. Three things are no proof. Inputs of the trace, other than the parameters, in the shapes
    of all gradients, from which these may have been computed (clipped, preconditioned) after the backward
    pass; a number among those inputs, by which they may have been multiplied then; and a static scale that is
    a constant of the program.
    """
    leaves = jax.tree.leaves(division.grads)
    of_grads, of_scale = ancestors(leaves), ancestors(jax.tree.leaves(division.scale))
    if of_grads is None or of_scale is None:
        return None
    if of_grads.meet(of_scale):
        return True
    if not any(map(transposes, of_grads.equations)):
        return None
    initial = division.initial
    is_constant = isinstance(initial, StaticLossScale) and SCALE_USE.is_constant(initial.loss_scale)
    return None if is_constant or _may_be_inputs(leaves, division.params) else False


def _has_numbers(grads: PyTree) -> bool:
    arrays = [x for x in jax.tree.leaves(grads) if hasattr(x, "dtype")]
    return any(x.size and jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)


def _may_be_inputs(grads: list[Any], params: PyTree) -> bool:
    """Returns whether inputs of the trace may be gradients, or a scale, behind these gradients.

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
    return _REPAIR.format(loss=f", loss={loss!r}" if loss else "", by_hand=by_hand)
