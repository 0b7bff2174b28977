"""Measures what rounding would do to a loss and its gradient: to first order, or with the rounding done.

The gradient G of a loss depends on every value x of the forward pass, and on every cotangent g of the
backward pass. Half precision adds errors d to the former and d' to the latter, small and independent of each
other, so that to first order the square of the gradient's error is, in the mean,

    |dG|^2 = sum over x of |dG/dx|^2 d(x)^2  +  sum over g of |dG/dg|^2 d'(g)^2.

With a random vector v of signs, the mean of (v . dG/dx)^2 is |dG/dx|^2 (Hutchinson). v . G is one number:
its gradient gives c = v . dG/dx for all values of the program, and t = v . dG/dg for all cotangents, in one
pass. A tap is where they come by::

    def tap(x, sink): return x
    backward pass of the loss:    g arrives; statistics of x and g leave as the cotangent of the sink
    backward pass of v . G:       c and t arrive; c^2 d(x)^2 and t^2 d'(g)^2 leave as that of the sink

Taps have no callbacks, so they work under jit, in scans, under checkpoint and on several devices; what
belongs to one sink adds up. There are two kinds of sinks: a `Counter` counts, a `Switch` rounds if it is on.

References:
  M. F. Hutchinson, A stochastic estimator of the trace of the influence matrix (1990).
"""

import contextlib
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


@functools.partial(jax.jit, static_argnums=1)
def rounding(x: jax.Array, dtype: str, scale: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """What rounding `x * scale` does to x.

    Args:
      x: float32 array of any shape.
      dtype: the half dtype to round to.
      scale: a power of two; None for 1.

    Returns:
      What it adds, 0 for what becomes infinite; which finite values become infinite; and which values other
      than zero become zero.
    """
    return _difference(_rounded(x, dtype, scale), x, scale)


def _difference(half: jax.Array, x: jax.Array, scale: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """As `rounding`, of what an operation gave in half and in float32."""
    finite = jnp.isfinite(half)
    # A number that is infinite in float32 is not this dtype's fault.
    overflow = finite != jnp.isfinite(x if scale is None else x * scale)
    return jnp.where(finite, half - x, np.float32(0)), overflow, (half == 0) != (x == 0)


@functools.partial(jax.jit, static_argnums=1)
def _rounded(x: Any, dtype: str, scale: Any = None) -> Any:
    if scale is None:
        return narrowed(x, dtype).astype(jnp.float32)
    return narrowed(x * scale, dtype).astype(jnp.float32) / scale


@jax.jit
def _counted_rounding(half: jax.Array, x: jax.Array) -> tuple[jax.Array, Sequence[Any], jax.Array]:
    """What rounding adds, how many values overflow and underflow, and which become -inf: it may be a mask."""
    error, overflow, underflow = _difference(half, x)
    is_low = overflow & (x < 0)
    return error, totals([x.astype(jnp.float32) for x in (overflow & ~is_low, underflow)]), is_low


@jax.jit
def _rounded_if(on: Any, x: Any, half: Any) -> Any:
    return jnp.where(on, half, x)


class Counter(NamedTuple):
    """Sink that counts what rounding would do, and rounds nothing.

    After the backward pass of the loss the cotangent of `numbers` holds what `STATISTICS` names; after that
    of v . G the cotangent of `square` is the square of the gradient's error.

    Args:
      scale: the loss scale.
      numbers: float32, one per statistic.
      square: float32 scalar.
    """

    scale: Any
    numbers: Any
    square: Any

    def beside(self, x: jax.Array) -> "Counter":
        """The sink on the mesh of x, varying over the devices that x varies over."""
        mesh = jax.typeof(x).sharding.mesh

        def moved(part: Any) -> Any:
            if jax.typeof(part).sharding.mesh != mesh and not mesh.empty:
                # Within jax.sharding.auto_axes, or outside of jax.set_mesh.
                part = jax.sharding.reshard(part, jax.NamedSharding(mesh, jax.P()))
            return varying_like(part, x)

        return Counter(*map(moved, self))

    def rounded(self, x: jax.Array, dtype: str) -> Any:
        """What rounding adds, and counts."""
        x = jax.lax.stop_gradient(x)
        return _counted_rounding(_rounded(x, dtype), x)

    def computed(self, x: jax.Array, half: jax.Array, exact: jax.Array) -> Any:
        """The same of what an operation gives in half and in float32, of rounded operands."""
        return _counted_rounding(half, exact)

    def of_derivative(self, derivative: jax.Array, dtype: str) -> Any:
        """What is counted of an operand whose cotangent is multiplied by a number in half."""
        _, (overflow, underflow), is_low = self.rounded(jnp.abs(derivative), dtype)
        return np.float32(0), (overflow, jnp.zeros_like(underflow)), is_low

    def forward(self, x: jax.Array, rounded: Any) -> jax.Array:
        """The value as it is; it passes another tap, at which c arrives."""
        return _with_error(x, rounded[0], self.square)

    def backward(self, which: Which, rounded: Any, g: jax.Array) -> Any:
        """The cotangent as it is, and the statistics of both."""
        change, numbers = _counted(which, rounded, self.scale, jax.lax.stop_gradient(g))
        return (_with_error(g, change, self.square) if which.cotangent else g), Counter(None, numbers, None)

    def of_sum(self, exact: jax.Array, half: jax.Array, dtype: str) -> Any:
        """The sum in float32, and statistics of its difference from that in half."""
        seen, half = jax.lax.stop_gradient((exact, half))
        error, numbers = _counted_sum(dtype, seen, half - seen, self.scale)
        return _with_error(exact, error, self.square), Counter(None, numbers, None)

    def of_rule(self, exact: jax.Array, error: jax.Array) -> jax.Array:
        """A cotangent, with what computing it in half adds."""
        return _with_error(exact, jnp.where(jnp.isfinite(error), error, np.float32(0)), self.square)


STATISTICS = (
    "loss_variance", "overflow", "underflow", "gradient_overflow", "gradient_underflow", "largest_gradient",
)  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def _counted(which: Which, rounded: Any, scale: Any, seen: Any) -> Any:
    """What rounding adds to a cotangent, and the statistics of a value and its cotangent."""
    terms, change, counts = dict[str, Any](), None, dict[str, Any]()
    if which.value:
        error, (counts["overflow"], counts["underflow"]), is_low = rounded
        terms["loss_variance"] = jnp.square(seen * error)
        # What a mask of -1e9 hides from a softmax has no gradient: it may as well be -inf.
        counts["overflow"] += jnp.sum(is_low & (seen != 0), dtype=jnp.float32)
    if which.cotangent:
        change, terms["gradient_overflow"], terms["gradient_underflow"] = rounding(seen, which.dtype, scale)
    names = [*terms, "largest_gradient"] if which.cotangent else terms
    sums = totals([x.astype(jnp.float32) for x in terms.values()], jnp.abs(seen) if which.cotangent else None)
    return change, _statistics(seen, **counts, **dict(zip(names, sums, strict=True)))


@functools.partial(jax.jit, static_argnums=0)
def _counted_sum(dtype: str, exact: Any, error: Any, scale: Any) -> Any:
    """What rounding adds to a sum, and the statistics."""
    _, overflow, _ = rounding(exact, dtype, scale)
    largest = jnp.max(jnp.abs(exact), initial=0.0)
    overflowed = jnp.sum(overflow, dtype=jnp.float32)
    numbers = _statistics(exact, gradient_overflow=overflowed, largest_gradient=largest)
    return jnp.where(jnp.isfinite(error), error, np.float32(0)), numbers


def _statistics(like: Any, **found: Any) -> Any:
    zero = varying_like(jnp.float32(0), like)
    return jnp.stack([found.get(name, zero) for name in STATISTICS])


@jax.custom_vjp
def _with_error(x: Any, error: Any, square: Any) -> Any:
    """A value or a cotangent, which half precision would change by an error."""
    return x


def _square_of_error(error: Any, arrived: Any) -> Any:
    return arrived, None, jnp.sum(jnp.square(arrived * error))


_with_error.defvjp(lambda x, error, square: (x, error), _square_of_error)


class Switch(NamedTuple):
    """Sink that rounds a value and its cotangent, if it is on.

    It is an argument of the compiled program, so that one program gives the gradient with the rounding of any
    choice of modules.

    Args:
      on: whether they are rounded; boolean scalar.
      scale: what cotangents are multiplied by before they are rounded; float32 scalar.
    """

    on: Any
    scale: Any

    def beside(self, x: jax.Array) -> "Switch":
        """The sink itself."""
        return self

    def rounded(self, x: jax.Array, dtype: str) -> Any:
        """The value, rounded."""
        return _rounded(x, dtype)

    def computed(self, x: jax.Array, half: jax.Array, exact: jax.Array) -> Any:
        """The value as an operation in half gives it."""
        return jnp.where(jnp.isfinite(half), x + (half - exact), half)

    def of_derivative(self, derivative: jax.Array, dtype: str) -> Any:
        """Nothing is rounded there that is not in the cotangent."""
        return None

    def forward(self, x: jax.Array, rounded: Any) -> jax.Array:
        """The value, rounded or not."""
        return _rounded_if(self.on, x, rounded)

    def backward(self, which: Which, rounded: Any, g: jax.Array) -> Any:
        """The cotangent, rounded or not."""
        if which.cotangent:
            g = _rounded_if(self.on, g, _rounded(g, which.dtype, self.scale))
        return g, None

    def of_sum(self, exact: jax.Array, half: jax.Array, dtype: str) -> Any:
        """The sum in half."""
        return jnp.where(self.on, half, exact), None

    def of_rule(self, exact: jax.Array, error: jax.Array) -> jax.Array:
        """The cotangent, with what computing it in half adds if it is on."""
        return _rounded_if(self.on, exact, exact + error)


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
        """The relative error of the gradient; infinite where something overflows."""
        return math.inf if self.overflow or self.gradient_overflow else math.sqrt(self.gradient)


class Effects(NamedTuple):
    """What rounding does, by the module that rounds.

    Args:
      name: of the loss function.
      dtype: "float16" or "bfloat16".
      loss_scale: what the cotangents were multiplied by.
      modules: those of the model, by the names that lead to them.
      own: of what a module rounds, whatever other modules do.
      alone: of the extra rounding of what enters and leaves it, if all others compute in float32.
      largest: the largest cotangent in a module, at a loss scale of 1; 0.0 in bfloat16.
      finite: whether the loss and its gradient are where nothing is rounded.
    """

    name: str
    dtype: str
    loss_scale: float
    modules: dict[tuple[str, ...], Any]
    own: dict[str, Effect]
    alone: dict[str, Effect]
    largest: Mapping[str, float] = MappingProxyType({})
    finite: bool = True


def effects(traced: TracedLoss, probes: int) -> Effects:
    """Measures to first order what rounding does to a loss and its gradient.

    Without probes only counts and the variance of the loss are found out, which takes half as long.
    """
    batches = list(traced.batches) * (probes or 1)
    run = compiled_quickly(functools.partial(_probe, traced), 1 + len(batches))

    def backward(number: int, scale: float, arrays: Sequence[Any]) -> _Seen:
        return run(_signs(number, traced) if probes else None, scale, arrays)

    # bfloat16 has float32's range.
    scale, largest = 1.0, dict.fromkeys(traced.groups, 0.0)
    if traced.dtype == "float16":
        place, first = STATISTICS.index("largest_gradient"), backward(0, 1.0, batches[0]).first
        largest = {g: max(float(first[Sink(g, which)][place]) for which in (False, True)) for g in largest}
        scale = loss_scale_for(largest.values())
    runs: list[_Seen] = []
    with progress.interruptible("errors are means over those before it", known=runs):
        for number, arrays in enumerate(progress.steps("backward passes", batches)):
            runs.append(jax.device_get(backward(number + 1, scale, arrays)))
    found = dict.fromkeys(traced.sinks, Effect())
    for number, seen in enumerate(runs):
        # Counts are those of one batch; squares are means.
        for name in traced.sinks:
            found[name] += _effect(seen, name, len(runs), counted=not number)
    own, alone = ({g: found[Sink(g, which)] for g in traced.groups} for which in (False, True))
    finite = all(bool(np.isfinite(seen.loss) & np.isfinite(seen.square)) for seen in runs)
    return Effects(traced.name, traced.dtype, scale, traced.modules, own, alone, largest, finite)


def not_finite_error(name: str) -> ValueError:
    """Of a loss of which nothing can be said, since there is nothing that an error could be relative to."""
    return ValueError(
        f"{name} or its gradient is not finite even where nothing is rounded, so that nothing can be said of "
        "what half precision adds. `diagnose` finds the first such value."
    )


def effects_if_smooth(traced: TracedLoss, probes: int) -> tuple[Effects, bool]:
    """As `effects`, and whether first order says which modules matter.

    It does not where the loss decides by half values, where float32 cannot hold its second derivatives, and
    where its gradient cannot be differentiated once more, as that of a custom_vjp with a loop in it: then
    nothing is known but counts.
    """
    # What is wrong with the loss itself is raised below too.
    with contextlib.suppress(Exception):
        found = effects(traced, probes)
        if all(math.isfinite(e.gradient) for of in (found.own, found.alone) for e in of.values()):
            return found, not traced.decides
    return effects(traced, 0), False


class _Seen(NamedTuple):
    """Cotangents of the sinks in both backward passes, the loss, and the square of the gradient's norm."""

    first: Any
    second: Any
    loss: Any
    square: Any


def _signs(number: int, traced: TracedLoss) -> list[np.ndarray]:
    """Random signs, one for each number of each parameter."""
    # Drawn by NumPy: a program that draws them has a loop to compile for each shape.
    draw = np.random.default_rng(number).integers
    return [1 - 2 * draw(0, 2, traced.batches[0][i].shape, np.int8) for i in traced.trained]


def _probe(traced: TracedLoss, signs: Sequence[Any] | None, scale: Any, arrays: Sequence[Any]) -> _Seen:
    """One backward pass, and one of the gradient's product with signs, if there are any."""
    params = traced.params(arrays)
    scale, zero, zeros = jnp.float32(scale), jnp.float32(0), jnp.zeros(len(STATISTICS), jnp.float32)

    def gradient(squares: Any) -> Any:
        def run(numbers: Any, params: Any) -> Any:
            sinks = {name: Counter(scale, numbers[name], squares[name]) for name in traced.sinks}
            return traced.run(sinks, params, arrays)

        # Of the sinks too: cotangents are wanted where no parameter leads to, at the inputs.
        loss, (first, grads) = jax.value_and_grad(run, (0, 1))(dict.fromkeys(traced.sinks, zeros), params)
        return grads, _Seen(first, None, loss, sum(jnp.sum(jnp.square(g)) for g in grads))

    squares = dict.fromkeys(traced.sinks, zero)
    if signs is None:
        return gradient(squares)[1]._replace(second=squares)
    _, along, seen = jax.vjp(gradient, squares, has_aux=True)
    return seen._replace(second=along([x.astype(jnp.float32) for x in signs])[0])


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


def _effect(seen: _Seen, name: Sink, runs: int, counted: bool) -> Effect:
    statistics: dict[str, Any] = dict(zip(STATISTICS, seen.first[name], strict=True))
    counts = [int(statistics[field]) if counted else 0 for field in Effect._fields[2:]]
    square, loss = float(seen.square), float(np.square(seen.loss))
    gradient = float(seen.second[name]) / square if square else 0.0
    return Effect(gradient / runs, float(statistics["loss_variance"]) / loss / runs if loss else 0.0, *counts)


class AppliedRounding:
    """Errors of the loss and its gradient for any choice of modules that round; one program, compiled once.

    Args:
      traced: the loss.
      scale: the loss scale, a power of two.
    """

    def __init__(self, traced: TracedLoss, scale: float):
        self._traced, self._scale = traced, scale
        runs = len(traced.batches) * len(traced.groups)
        self._run, self._squares = compiled_quickly(self._gradient, runs), compiled_quickly(_squares, runs)
        off = [False] * len(traced.sinks)
        self._exact = [self._run(off, scale, arrays) for arrays in traced.batches]

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

    def own(self, found: Effects) -> Effects:
        """What rounding does, measured for each module by itself."""
        own = {}
        for group, effect in progress.steps("measuring modules", list(found.own.items())):
            gradient, loss = self([Sink(group, False)])
            own[group] = effect._replace(gradient=gradient, loss=loss)
        return found._replace(own=own)

    def _gradient(self, on: Any, scale: Any, arrays: Sequence[Any]) -> Any:
        traced = self._traced
        switches = {sink: Switch(is_on, scale) for sink, is_on in zip(traced.sinks, on, strict=True)}
        return jax.value_and_grad(traced.run, 1)(switches, traced.params(arrays), arrays)


def _squares(found: Any, exact: Any) -> Any:
    """The squares of the relative errors of the gradients and the loss."""
    (loss, grads), (exact_loss, exact_grads) = found, exact
    error = sum(jnp.sum(jnp.square(a - b)) for a, b in zip(grads, exact_grads, strict=True))
    norm = sum(jnp.sum(jnp.square(b)) for b in exact_grads)
    pairs = (error, norm), (jnp.square(loss - exact_loss), jnp.square(exact_loss))
    return [jnp.where(b == 0, 0.0, a / b) for a, b in pairs]
