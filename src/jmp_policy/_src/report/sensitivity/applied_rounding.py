"""Identities that round a value and its cotangent to half when a switch is on, and else do nothing.

They stand where the counters of `first_order` stand. A switch is an argument of the compiled program, so that
one program gives the gradient with the rounding of any choice of modules.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.narrowing import rounded
from jmp_policy._src.report.sensitivity.first_order import Effects, transposed
from jmp_policy._src.report.sensitivity.tapped_program import Sink, Which
from jmp_policy._src.report.sensitivity.traced_loss import TracedLoss, compiled_quickly


class Switch(NamedTuple):
    """Sink that rounds, or does not.

    Args:
      on: whether they round; boolean scalar.
      scale: what cotangents are multiplied by before they are rounded; float32 scalar.
    """

    on: Any
    scale: Any

    def tap(self, which: Which, x: jax.Array) -> jax.Array:
        """Rounds x, and its cotangent, if the switch is on."""
        return _tap(which, x, self)

    def tap_sum(self, transposable: Callable[[Any], Any], dtype: str, x: jax.Array) -> jax.Array:
        """Computes a linear function of x, whose transpose adds up in half if the switch is on."""
        return _summed(transposable, dtype, x, self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(which: Which, x: Any, switch: Switch) -> Any:
    return jnp.where(switch.on, rounded(x, which.dtype), x) if which.value else x


def _tap_forward(which: Which, x: Any, switch: Switch) -> Any:
    return _tap(which, x, switch), switch


def _tap_backward(which: Which, switch: Switch, g: Any) -> Any:
    if not which.cotangent:
        return g, None
    return jnp.where(switch.on, rounded(g * switch.scale, which.dtype) / switch.scale, g), None


_tap.defvjp(_tap_forward, _tap_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(transposable: Any, dtype: str, x: Any, switch: Switch) -> Any:
    return transposable(x)


def _summed_forward(transposable: Any, dtype: str, x: Any, switch: Switch) -> Any:
    return transposable(x), (jnp.zeros_like(x), switch)


def _summed_backward(transposable: Any, dtype: str, residuals: Any, g: Any) -> Any:
    like, switch = residuals
    exact = transposed(transposable, like, "float32", g)
    half = transposed(transposable, like, dtype, g * switch.scale) / switch.scale
    return jnp.where(switch.on, half, exact), None


_summed.defvjp(_summed_forward, _summed_backward)


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
        """The squares of the relative errors of gradient and loss, as means over the batches."""
        chosen = set(sinks)
        on = np.array([sink in chosen for sink in self._traced.sinks])
        pairs = [
            jax.device_get(_squares(self._run(on, self._scale, arrays), exact))
            for arrays, exact in zip(self._traced.batches, self._exact, strict=True)
        ]
        gradients, losses = zip(*pairs, strict=True)
        return _mean(gradients), _mean(losses)

    def of_modules(self, groups: Iterable[str]) -> tuple[float, float]:
        """The same for modules in half, while all others compute in float32."""
        # To round twice is to round once: what comes from another of these modules changes no more.
        return self(Sink(group, alone) for group in groups for alone in (False, True))

    def own(self, found: Effects) -> Effects:
        """What rounding does, measured for each module by itself."""
        own = {}
        for group, effect in found.own.items():
            gradient, loss = self([Sink(group, False)])
            own[group] = effect._replace(gradient=gradient, loss=loss)
        return found._replace(own=own)

    def _gradient(self, on: Any, scale: Any, arrays: Sequence[Any]) -> Any:
        traced = self._traced
        switches = {sink: Switch(is_on, scale) for sink, is_on in zip(traced.sinks, on, strict=True)}

        def loss_of(params: Sequence[Any]) -> Any:
            return traced.run(switches, params, arrays)

        return jax.value_and_grad(loss_of)(traced.params(arrays))


@jax.jit
def _squares(found: Any, exact: Any) -> Any:
    """The squares of the relative errors of the gradients and the loss."""
    (loss, grads), (exact_loss, exact_grads) = found, exact
    error = sum(jnp.sum(jnp.square(a - b)) for a, b in zip(grads, exact_grads, strict=True))
    norm = sum(jnp.sum(jnp.square(b)) for b in exact_grads)
    return _quotient(error, norm), _quotient(jnp.square(loss - exact_loss), jnp.square(exact_loss))


def _quotient(a: Any, b: Any) -> Any:
    return jnp.where(b == 0, 0.0, a / b)


def _mean(squares: Sequence[Any]) -> float:
    mean = float(np.mean(squares, dtype=np.float64))
    return mean if math.isfinite(mean) else math.inf
