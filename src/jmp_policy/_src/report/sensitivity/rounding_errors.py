"""Measures what rounding would do to a loss and its gradient, for any choice of modules that round.

Every value x of the float32 program that half precision would round passes a tap, and so does its cotangent
g in the backward pass::

    def tap(x, sink): return rounded(x) if sink.on else x
    backward pass:    g arrives; it is rounded if sink.on; counts leave as the cotangent of the sink

A module has two sinks: of what it makes, and of what enters and leaves it. Whether one is on is an argument
of the program, which is compiled once: a module takes one more gradient. Taps have no callbacks, so they work
under jit, in scans, under checkpoint and on several devices; what belongs to one sink adds up.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.narrowing import narrowed
from jmp_policy._src.report import progress
from jmp_policy._src.report.pieces import compiled_quickly, totals
from jmp_policy._src.report.sensitivity.tapped_program import Sink, Which
from jmp_policy._src.report.sensitivity.traced_loss import TracedLoss
from jmp_policy._src.report.tapping import varying_like


def lost(half: jax.Array, x: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Which values become infinite, and which other than zero become zero, in half of what float32 gives."""
    # A number that is infinite in float32 is not this dtype's fault.
    overflow = jnp.isfinite(half) != jnp.isfinite(x if scale is None else x * scale)
    return overflow, (half == 0) != (x == 0)


@functools.partial(jax.jit, static_argnums=1)
def _rounded(x: Any, dtype: str, scale: Any = None) -> Any:
    if scale is None:
        return narrowed(x, dtype).astype(jnp.float32)
    return narrowed(x * scale, dtype).astype(jnp.float32) / scale


@jax.jit
def _counted_rounding(half: jax.Array, x: jax.Array) -> tuple[Sequence[Any], jax.Array]:
    """How many values overflow and underflow, and which become -inf: it may be a mask."""
    overflow, underflow = lost(half, x)
    is_low = overflow & (x < 0)
    return totals([x.astype(jnp.float32) for x in (overflow & ~is_low, underflow)]), is_low


@jax.jit
def _rounded_if(on: Any, x: Any, half: Any) -> Any:
    return jnp.where(on, half, x)


class Tap(NamedTuple):
    """Rounds a value and its cotangent, if it is on, or counts what rounding would do to them.

    It is an argument of the compiled program, so that one program gives the gradient with the rounding of any
    choice of modules. The cotangent of `numbers` holds what `STATISTICS` names.

    Args:
      on: whether they are rounded; boolean scalar.
      scale: what cotangents are multiplied by before they are rounded; float32 scalar.
      numbers: float32, one per statistic; None if nothing is counted.
    """

    on: Any
    scale: Any
    numbers: Any

    def beside(self, x: jax.Array) -> "Tap":
        """The sink on the mesh of x, varying over the devices that x varies over."""
        mesh = jax.typeof(x).sharding.mesh

        def moved(part: Any) -> Any:
            if jax.typeof(part).sharding.mesh != mesh and not mesh.empty:
                # Within jax.sharding.auto_axes, or outside of jax.set_mesh.
                part = jax.sharding.reshard(part, jax.NamedSharding(mesh, jax.P()))
            return varying_like(part, x)

        return jax.tree.map(moved, self)

    def rounded(self, x: jax.Array, dtype: str) -> Any:
        """The value in half, and what is counted of it."""
        x = jax.lax.stop_gradient(x)
        return self.computed(x, _rounded(x, dtype), x)

    def computed(self, x: jax.Array, half: jax.Array, exact: jax.Array) -> Any:
        """The value with the error that an operation makes in half, and what is counted of it."""
        value = jnp.where(jnp.isfinite(half), x + (half - exact), half)
        return (value,) if self.numbers is None else (value, *_counted_rounding(half, exact))

    def of_derivative(self, x: jax.Array, derivative: jax.Array, dtype: str) -> Any:
        """What is counted of an operand whose cotangent is multiplied by a number in half."""
        if self.numbers is None:
            return (x,)
        _, (overflow, underflow), is_low = self.rounded(jnp.abs(derivative), dtype)
        return x, (overflow, jnp.zeros_like(underflow)), is_low

    def without_derivative(self, x: jax.Array, divisor: jax.Array, dtype: str) -> jax.Array:
        """The value; if it is on, without a derivative where that is divided by a number that half has not.

        JAX computes the derivative of a / b as 1 / (b * b), which float16 makes 0 from a b of 256 on.
        """
        is_zero = self.on & jnp.isinf(_rounded(jnp.abs(divisor), dtype))
        return jnp.where(is_zero, jax.lax.stop_gradient(x), x)

    def forward(self, x: jax.Array, rounded: Any) -> jax.Array:
        """The value, rounded or not."""
        return _rounded_if(self.on, x, rounded[0])

    def backward(self, which: Which, rounded: Any, g: jax.Array) -> Any:
        """The cotangent, rounded or not, and the statistics of both."""
        numbers = None if self.numbers is None else _counted(which, rounded, self.scale, g)
        if which.cotangent:
            g = _rounded_if(self.on, g, _rounded(g, which.dtype, self.scale))
        return g, Tap(None, None, numbers)

    def of_sum(self, exact: jax.Array, half: jax.Array, dtype: str) -> Any:
        """The sum, in half or not, and its statistics."""
        _, found = self.backward(Which(False, True, dtype), (), exact)
        return jnp.where(self.on, half, exact), found

    def of_rule(self, exact: jax.Array, error: jax.Array) -> jax.Array:
        """The cotangent, with what computing it in half adds if it is on."""
        return _rounded_if(self.on, exact, exact + error)


STATISTICS = "overflow", "underflow", "gradient_overflow", "gradient_underflow", "largest_gradient"


@functools.partial(jax.jit, static_argnums=0)
def _counted(which: Which, rounded: Any, scale: Any, seen: Any) -> Any:
    """The statistics of a value and its cotangent."""
    found = dict[str, Any]()
    if which.value:
        _, (found["overflow"], found["underflow"]), is_low = rounded
        # What a mask of -1e9 hides from a softmax has no gradient: it may as well be -inf.
        found["overflow"] += jnp.sum(is_low & (seen != 0), dtype=jnp.float32)
    if which.cotangent:
        terms = [x.astype(jnp.float32) for x in lost(_rounded(seen, which.dtype, scale), seen, scale)]
        found.update(zip(STATISTICS[2:], totals(terms, jnp.abs(seen)), strict=True))
    return _statistics(seen, **found)


def _statistics(like: Any, **found: Any) -> Any:
    zero = varying_like(jnp.float32(0), like)
    return jnp.stack([found.get(name, zero) for name in STATISTICS])


#: The largest loss scale that is proposed.
_LARGEST_SCALE = 2.0**24


class Effect(NamedTuple):
    """What rounding to half does.

    Args:
      gradient, loss: squares of their relative errors, in the mean; 0 where they were not measured.
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
        """The relative error of the gradient; infinite where something overflows."""
        return math.inf if self.overflow or self.gradient_overflow else math.sqrt(self.gradient)


class Effects(NamedTuple):
    """What rounding does, by the module that rounds.

    Args:
      name: of the loss function.
      dtype: "float16" or "bfloat16".
      loss_scale: what the cotangents were multiplied by.
      modules: those of the model, by the names that lead to them.
      own: of what a module rounds, if all others compute in float32.
      alone: of the extra rounding of what enters and leaves it, if all others compute in float32.
      largest: the largest cotangent in a module, at a loss scale of 1; 0.0 in bfloat16.
    """

    name: str
    dtype: str
    loss_scale: float
    modules: dict[tuple[str, ...], Any]
    own: dict[str, Effect]
    alone: dict[str, Effect]
    largest: Mapping[str, float] = MappingProxyType({})


def not_finite_error(name: str) -> ValueError:
    """Of a loss of which nothing can be said, since there is nothing that an error could be relative to."""
    return ValueError(
        f"{name} or its gradient is not finite even where nothing is rounded, so that nothing can be said of "
        "what half precision adds. `diagnose` finds the first such value."
    )


def loss_scale_for(largest: Iterable[float]) -> float:
    """The power of two by which the largest cotangent stays a factor of 4 below overflow; at least 1.

    Modules whose cotangents leave no room at all are left out: a scale below 1 would make those of all others
    zero for their sake.

    Args:
      largest: the largest cotangent of each module, at a loss scale of 1.
    """
    most = 65504 / 4
    found = max((x for x in largest if x <= most), default=0.0)
    return min(2.0 ** math.floor(math.log2(most / found)), _LARGEST_SCALE) if found else 1.0


class AppliedRounding:
    """What rounding does, and errors of the loss and its gradient for any choice of modules that round.

    Two programs, compiled once: one counts, and one rounds.

    Args:
      traced: the loss.

    Attributes:
      effects: counts, in a backward pass at the loss scale that suits the model.
    """

    def __init__(self, traced: TracedLoss):
        runs, counts = len(traced.batches) * len(traced.groups), compiled_quickly(self._counts, 2)
        self._run, self._squares = compiled_quickly(self._gradient, runs), compiled_quickly(_squares, runs)
        self._traced = traced
        # bfloat16 has float32's range.
        self._scale, largest = 1.0, dict.fromkeys(traced.groups, 0.0)
        progress.step(f"counting what rounding does in {traced.dtype}")
        if traced.dtype == "float16":
            first = counts(1.0, traced.batches[0])
            largest = {g: max(float(first[Sink(g, which)][-1]) for which in (False, True)) for g in largest}
            self._scale = loss_scale_for(largest.values())
        seen = jax.device_get(counts(self._scale, traced.batches[0]))
        own, alone = (
            {g: Effect(0.0, 0.0, *map(int, seen[Sink(g, which)][:-1])) for g in traced.groups}
            for which in (False, True)
        )
        self.effects = Effects(traced.name, traced.dtype, self._scale, traced.modules, own, alone, largest)

    @functools.cached_property
    def _exact(self) -> list[Any]:
        """The loss and its gradient for each batch, where nothing is rounded."""
        off = [False] * len(self._traced.sinks)
        return [self._run(off, self._scale, arrays) for arrays in self._traced.batches]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and its gradient are, where nothing is rounded."""
        return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(self._exact))

    def __call__(self, sinks: Iterable[Sink]) -> tuple[float, float]:
        """The squares of the relative errors of gradient and loss, as means over the batches."""
        on = list(map(set(sinks).__contains__, self._traced.sinks))
        squares = [
            jax.device_get(self._squares(self._run(on, self._scale, arrays), exact))
            for arrays, exact in zip(self._traced.batches, self._exact, strict=True)
        ]
        mean = np.mean(squares, axis=0, dtype=np.float64)
        gradient, loss = np.where(np.isfinite(mean), mean, np.inf).tolist()
        return gradient, loss

    def of_modules(self, groups: Iterable[str]) -> tuple[float, float]:
        """The same for modules in half, while all others compute in float32."""
        # To round twice is to round once: what comes from another of these modules changes no more.
        return self(Sink(group, alone) for group in groups for alone in (False, True))

    def own(self) -> Effects:
        """What rounding does, measured for each module by itself."""
        own = {}
        for group, effect in progress.steps("measuring modules", list(self.effects.own.items())):
            gradient, loss = self([Sink(group, False)])
            own[group] = effect._replace(gradient=gradient, loss=loss)
        return self.effects._replace(own=own)

    def _counts(self, scale: Any, arrays: Sequence[Any]) -> Any:
        """The statistics by sink: their cotangents in a backward pass."""
        traced, zeros = self._traced, jnp.zeros(len(STATISTICS), jnp.float32)

        def run(numbers: Any) -> Any:
            taps = {sink: Tap(jnp.bool_(False), jnp.float32(scale), numbers[sink]) for sink in traced.sinks}
            return traced.run(taps, traced.params(arrays), arrays)

        return jax.grad(run)(dict.fromkeys(traced.sinks, zeros))

    def _gradient(self, on: Any, scale: Any, arrays: Sequence[Any]) -> Any:
        traced = self._traced
        taps = {sink: Tap(is_on, scale, None) for sink, is_on in zip(traced.sinks, on, strict=True)}
        return jax.value_and_grad(traced.run, 1)(taps, traced.params(arrays), arrays)


def _squares(found: Any, exact: Any) -> Any:
    """The squares of the relative errors of the gradients and the loss."""
    (loss, grads), (exact_loss, exact_grads) = found, exact
    error = sum(jnp.sum(jnp.square(a - b)) for a, b in zip(grads, exact_grads, strict=True))
    norm = sum(jnp.sum(jnp.square(b)) for b in exact_grads)
    pairs = (error, norm), (jnp.square(loss - exact_loss), jnp.square(exact_loss))
    return [jnp.where(b == 0, 0.0, a / b) for a, b in pairs]
