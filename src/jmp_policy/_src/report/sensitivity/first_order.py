"""Measures what rounding would do to a gradient, to first order, in backward passes of the float32 program.

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
belongs to one sink adds up. The value of a sink is the loss scale.

References:
  M. F. Hutchinson, A stochastic estimator of the trace of the influence matrix (1990).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.narrowing import rounded
from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.report.sensitivity.tapped_program import Sink, Which
from jmp_policy._src.report.sensitivity.traced_loss import TracedLoss, compiled_quickly


def rounding_error(x: jax.Array, dtype: str, scale: jax.Array | float = 1.0) -> jax.Array:
    """What rounding `x * scale` adds to x; 0 for what is rounded to infinity, which is counted apart.

    Args:
      x: array of any shape; computed with in float32.
      dtype: the half dtype to round to.
      scale: a power of two.
    """
    x = x.astype(jnp.float32)
    error = rounded(x * scale, dtype) / scale - x
    return jnp.where(jnp.isfinite(error), error, 0.0)


def overflows(x: jax.Array, dtype: str) -> jax.Array:
    """How many finite values become infinite; float32 scalar."""
    x = x.astype(jnp.float32)
    # A number that is infinite in float32 is not this dtype's fault.
    return jnp.sum(jnp.isfinite(x) & jnp.isinf(rounded(x, dtype)), dtype=jnp.float32)


def underflows(x: jax.Array, error: jax.Array) -> jax.Array:
    """How many values other than zero become zero, for what rounding adds to them; float32 scalar."""
    return jnp.sum((error == -x) & (x != 0), dtype=jnp.float32)


#: What the cotangent of a sink holds after the backward pass of the loss. That of the backward pass of v . G
#: has the square of the gradient's error in the first place.
STATISTICS = (
    "loss_variance", "overflow", "underflow", "gradient_overflow", "gradient_underflow", "largest_gradient",
)  # fmt: skip


class Counter(NamedTuple):
    """Sink that counts what rounding would do, and rounds nothing.

    Args:
      numbers: float32, one per statistic; each holds the loss scale.
    """

    numbers: jax.Array

    @classmethod
    def create(cls, scale: Any) -> "Counter":
        """A counter for gradients of a loss that is multiplied by `scale`."""
        return cls(jnp.full(len(STATISTICS), scale, jnp.float32))

    def tap(self, which: Which, x: jax.Array) -> jax.Array:
        """Counts the errors of rounding x and its cotangent; returns x."""
        return _tap(which, x, _placed_like(self.numbers, x))

    def tap_sum(self, transposable: Callable[[Any], Any], dtype: str, x: jax.Array) -> jax.Array:
        """Computes a linear function of x whose transpose adds up, such as a broadcast or a look-up.

        What is counted is the difference of its transpose in half and in float32, as this platform computes
        it.

        Args:
          transposable: the function; it takes x in any dtype.
          dtype: "float16" or "bfloat16".
          x: its operand.
        """
        return _summed(transposable, dtype, x, _placed_like(self.numbers, x))


def transposed(transposable: Callable[[Any], Any], like: Any, dtype: str, g: Any) -> Any:
    """The transpose of a linear function, computed in a dtype and cast to float32."""
    (out,) = jax.linear_transpose(transposable, like.astype(dtype))(g.astype(dtype))
    return out.astype(jnp.float32)


def _placed_like(sink: Any, x: Any) -> Any:
    mesh = jax.typeof(x).sharding.mesh
    if jax.typeof(sink).sharding.mesh != mesh and not mesh.empty:
        # Within jax.sharding.auto_axes, or outside of jax.set_mesh.
        sink = jax.sharding.reshard(sink, jax.NamedSharding(mesh, jax.P()))
    missing = varying(jax.typeof(x)) - varying(jax.typeof(sink))
    return jax.lax.pcast(sink, tuple(sorted(missing)), to="varying") if missing else sink


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(which: Which, x: Any, sink: Any) -> Any:
    return x


def _tap_forward(which: Which, x: Any, sink: Any) -> Any:
    error = None
    if which.value:
        error = rounding_error(jax.lax.stop_gradient(x), which.dtype)
        x = _with_error(x, error, sink)
    return x, (x, error, sink)


def _tap_backward(which: Which, residuals: Any, g: Any) -> Any:
    x, error, sink = residuals
    dtype, zero = which.dtype, _zero(x)
    x, error, scale, seen = jax.lax.stop_gradient((x, error, sink[0], g))
    found = [zero] * len(STATISTICS)
    if which.value:
        found[:3] = jnp.sum(jnp.square(seen * error)), overflows(x, dtype), underflows(x, error)
    if which.cotangent:
        change, scaled = rounding_error(seen, dtype, scale), seen * scale
        g = _with_error(g, change, sink)
        found[3:] = overflows(scaled, dtype), underflows(seen, change), jnp.max(jnp.abs(seen), initial=0.0)
    return g, jnp.stack(found)


_tap.defvjp(_tap_forward, _tap_backward)


def _zero(x: Any) -> Any:
    # Varying over devices as x does.
    return jnp.sum(x, dtype=jnp.float32) * 0 if varying(jax.typeof(x)) else jnp.float32(0)


def _squares(errors: Any) -> Any:
    """The cotangent of a sink: the square of the gradient's error along v."""
    return jnp.stack([jnp.sum(jnp.square(errors)), *[_zero(errors)] * (len(STATISTICS) - 1)])


@jax.custom_vjp
def _with_error(x: Any, error: Any, sink: Any) -> Any:
    """A value or a cotangent, which half precision would change by an error."""
    return x


_with_error.defvjp(
    lambda x, error, sink: (x, error), lambda error, t: (t, jnp.zeros_like(error), _squares(t * error))
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(transposable: Any, dtype: str, x: Any, sink: Any) -> Any:
    return transposable(x)


def _summed_forward(transposable: Any, dtype: str, x: Any, sink: Any) -> Any:
    return transposable(x), (jnp.zeros_like(x), sink)


def _summed_backward(transposable: Any, dtype: str, residuals: Any, g: Any) -> Any:
    like, sink = residuals
    exact = transposed(transposable, like, "float32", g)
    half = transposed(transposable, like, dtype, jax.lax.stop_gradient(g) * sink[0]) / sink[0]
    error = half - jax.lax.stop_gradient(exact)
    error = jnp.where(jnp.isfinite(error), error, 0.0)
    found = [_zero(exact)] * len(STATISTICS)
    found[3] = overflows(jax.lax.stop_gradient(exact) * sink[0], dtype)
    return _with_error(exact, error, sink), jnp.stack(found)


_summed.defvjp(_summed_forward, _summed_backward)


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
        return traced.run(sinks, params, arrays)

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

        sinks = {name: Counter.create(scale) for name in traced.sinks}
        second, seen = jax.grad(along, has_aux=True)(sinks)
        return seen._replace(second=second)

    return compiled_quickly(run)


def _loss_scale(first: Any) -> float:
    """The power of two by which the largest cotangent stays a factor of 4 below overflow; at least 1.

    Modules whose cotangents leave no room at all are left out: a scale below 1 would make those of all others
    zero for their sake.
    """
    place, most = STATISTICS.index("largest_gradient"), 65504 / 4
    found = (float(counter.numbers[place]) for counter in first.values())
    largest = max((x for x in found if x <= most), default=0.0)
    return min(2.0 ** math.floor(math.log2(most / largest)), _LARGEST_SCALE) if largest else 1.0


def _effect(seen: _Seen, name: Sink, runs: int, counted: bool) -> Effect:
    statistics: dict[str, Any] = dict(zip(STATISTICS, seen.first[name].numbers, strict=True))
    counts = [int(statistics[field]) if counted else 0 for field in Effect._fields[2:]]
    square, loss = float(seen.square), float(np.square(seen.loss))
    gradient = float(seen.second[name].numbers[0]) / square if square else 0.0
    return Effect(gradient / runs, float(statistics["loss_variance"]) / loss / runs if loss else 0.0, *counts)
