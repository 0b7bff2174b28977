"""Runs the gradient of a loss in float32 with the rounding of some modules applied.

First order sees small changes of smooth functions. Where rounding turns a decision (a relu's input that is
nearly 0, a maximum, a sign), the gradient jumps, and no derivative says by how much. A gradient with the
rounding does.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.report.sensitivity import rounding_switches
from jmp_policy._src.report.sensitivity.probes import Effects
from jmp_policy._src.report.sensitivity.rounding_switches import Switch
from jmp_policy._src.report.sensitivity.tapped_program import Sink
from jmp_policy._src.report.sensitivity.traced_loss import TracedLoss, compiled_quickly


class AppliedRounding:
    """Errors of the loss and its gradient for any choice of modules that round; one program, compiled once.

    Args:
      traced: the loss.
      scale: the loss scale, a power of two.
    """

    def __init__(self, traced: TracedLoss, scale: float):
        self._traced, self._scale = traced, scale
        self._run = compiled_quickly(self._gradient)
        off = np.zeros(len(traced.sinks), bool)
        self._exact = [self._run(off, scale, arrays) for arrays in traced.batches]

    def __call__(self, sinks: Iterable[Sink]) -> tuple[float, float]:
        """Returns the squares of the relative errors of gradient and loss, as means over the batches."""
        chosen = set(sinks)
        on = np.array([sink in chosen for sink in self._traced.sinks])
        pairs = [
            jax.device_get(_squares(self._run(on, self._scale, arrays), exact))
            for arrays, exact in zip(self._traced.batches, self._exact, strict=True)
        ]
        gradients, losses = zip(*pairs, strict=True)
        return _mean(gradients), _mean(losses)

    def of_modules(self, groups: Iterable[str]) -> tuple[float, float]:
        """Returns the same for modules in half, while all others compute in float32."""
        # To round twice is to round once: what comes from another of these modules changes no more.
        return self(Sink(group, alone) for group in groups for alone in (False, True))

    def own(self, found: Effects) -> Effects:
        """Returns what rounding does, measured for each module by itself."""
        own = {}
        for group, effect in found.own.items():
            gradient, loss = self([Sink(group, False)])
            own[group] = effect._replace(gradient=gradient, loss=loss)
        return found._replace(own=own)

    def _gradient(self, on: Any, scale: Any, arrays: Sequence[Any]) -> Any:
        traced = self._traced
        switches = {sink: Switch(is_on, scale) for sink, is_on in zip(traced.sinks, on, strict=True)}

        def loss_of(params: Sequence[Any]) -> Any:
            return traced.run(rounding_switches, switches, params, arrays)

        return jax.value_and_grad(loss_of)(traced.params(arrays))


@jax.jit
def _squares(found: Any, exact: Any) -> Any:
    """Returns the squares of the relative errors of the gradients and the loss."""
    (loss, grads), (exact_loss, exact_grads) = found, exact
    error = sum(jnp.sum(jnp.square(a - b)) for a, b in zip(grads, exact_grads, strict=True))
    norm = sum(jnp.sum(jnp.square(b)) for b in exact_grads)
    return _quotient(error, norm), _quotient(jnp.square(loss - exact_loss), jnp.square(exact_loss))


def _quotient(a: Any, b: Any) -> Any:
    return jnp.where(b == 0, 0.0, a / b)


def _mean(squares: Sequence[Any]) -> float:
    mean = float(np.mean(squares, dtype=np.float64))
    return mean if math.isfinite(mean) else math.inf
