"""Runs the gradient of a loss with taps, and the backward pass of its product with random vectors."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.report.sensitivity import rounding_taps
from jmp_policy._src.report.sensitivity.rounding_taps import STATISTICS
from jmp_policy._src.report.sensitivity.tapped_program import Sink
from jmp_policy._src.report.sensitivity.traced_loss import TracedLoss, compiled_quickly

#: The largest loss scale that is proposed.
_LARGEST_SCALE = 2.0**24


class Effect(NamedTuple):
    """What rounding to half does.

    Args:
      gradient, loss: squares of their relative errors, in the mean.
      overflow, underflow: number of values that become infinite and zero.
      gradient_overflow, gradient_underflow: the same of cotangents times the loss scale.
    """

    gradient: float = 0.0
    loss: float = 0.0
    overflow: int = 0
    underflow: int = 0
    gradient_overflow: int = 0
    gradient_underflow: int = 0

    def __add__(self, other: Any) -> "Effect":
        return Effect(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def error(self) -> float:
        """Returns the relative error of the gradient; infinite where something overflows."""
        return math.inf if self.overflow or self.gradient_overflow else math.sqrt(self.gradient)


class Effects(NamedTuple):
    """What rounding does, by the module that rounds.

    Args:
      name: of the loss function.
      dtype: "float16" or "bfloat16".
      loss_scale: what the cotangents were multiplied by.
      modules: those of the model, by the names that lead to them.
      own: of what a module rounds, whatever other modules do.
      alone: of what it rounds besides if all others compute in float32.
    """

    name: str
    dtype: str
    loss_scale: float
    modules: dict[tuple[str, ...], Any]
    own: dict[str, Effect]
    alone: dict[str, Effect]


def effects(traced: TracedLoss, probes: int) -> Effects:
    """Measures what rounding does to a loss and its gradient."""
    run = _compiled(traced)
    scale = 1.0  # bfloat16 has float32's range.
    if traced.dtype == "float16":
        scale = _loss_scale(run(jax.random.key(0), 1.0, traced.batches[0]).first)
    found = dict.fromkeys(traced.sinks, Effect())
    for i, arrays in enumerate(traced.batches):
        for j in range(probes):
            seen = jax.device_get(run(jax.random.key(i * probes + j + 1), scale, arrays))
            # Counts are those of one batch; squares are means.
            for name in traced.sinks:
                runs = probes * len(traced.batches)
                found[name] += _effect(seen, name, runs, counted=not i and not j)
    own, alone = ({g: found[Sink(g, which)] for g in traced.groups} for which in (False, True))
    return Effects(traced.name, traced.dtype, scale, traced.modules, own, alone)


class _Seen(NamedTuple):
    """Cotangents of the sinks, the loss, and the square of the gradient's norm."""

    first: Any
    second: Any
    loss: Any
    square: Any


def _compiled(traced: TracedLoss) -> Callable[..., Any]:
    def of_params(params: Sequence[Any], sinks: Any, arrays: Sequence[Any]) -> Any:
        return traced.run(rounding_taps, sinks, params, arrays)

    def run(key: Any, scale: Any, arrays: Sequence[Any]) -> _Seen:
        params = traced.params(arrays)
        signs = [
            jax.random.rademacher(jax.random.fold_in(key, i), param.shape, jnp.float32)
            for i, param in enumerate(params)
        ]

        def along(sinks: Any) -> Any:
            # Of the sinks too: cotangents are wanted where no parameter leads to, at the inputs.
            gradient = jax.value_and_grad(of_params, (0, 1))
            loss, (grads, first) = gradient(params, sinks, arrays)
            product = sum(jnp.sum(a * b) for a, b in zip(signs, grads, strict=True))
            return product, _Seen(first, None, loss, sum(jnp.sum(jnp.square(g)) for g in grads))

        sinks = {name: rounding_taps.sink(scale) for name in traced.sinks}
        second, seen = jax.grad(along, has_aux=True)(sinks)
        return seen._replace(second=second)

    return compiled_quickly(run)


def _loss_scale(first: Any) -> float:
    """Returns the power of two by which the largest cotangent stays a factor of 4 below overflow; at least 1.

    Modules whose cotangents leave no room at all are left out: a scale below 1 would make those of all others
    zero for their sake.
    """
    place, most = STATISTICS.index("largest_gradient"), 65504 / 4
    found = (float(statistics[place]) for statistics in first.values())
    largest = max((x for x in found if x <= most), default=0.0)
    return min(2.0 ** math.floor(math.log2(most / largest)), _LARGEST_SCALE) if largest else 1.0


def _effect(seen: _Seen, name: Sink, runs: int, counted: bool) -> Effect:
    statistics: dict[str, Any] = dict(zip(STATISTICS, seen.first[name], strict=True))
    counts = [int(statistics[field]) if counted else 0 for field in Effect._fields[2:]]
    square, loss = float(seen.square), float(np.square(seen.loss))
    gradient = float(seen.second[name][0]) / square if square else 0.0
    return Effect(gradient / runs, float(statistics["loss_variance"]) / loss / runs if loss else 0.0, *counts)
