"""Identities that find out, in one backward pass of the gradient, what rounding a value would do to it.

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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_policy._src.core.narrowing import rounded
from jmp_policy._src.jaxpr.compat import varying

#: In the order of the statistics of a tap.
DTYPES = ("float16", "bfloat16")


def rounding_error(x: jax.Array, dtype: str, scale: jax.Array | float = 1.0) -> jax.Array:
    """Returns what rounding `x * scale` adds to x; 0 for what is rounded to infinity, which is counted apart.

    Args:
      x: array of any shape; computed with in float32.
      dtype: the half dtype to round to.
      scale: a power of two.
    """
    x = x.astype(jnp.float32)
    error = rounded(x * scale, dtype) / scale - x
    return jnp.where(jnp.isfinite(error), error, 0.0)


def overflows(x: jax.Array, dtype: str) -> jax.Array:
    """Returns how many finite values become infinite; float32 scalar."""
    x = x.astype(jnp.float32)
    # A number that is infinite in float32 is not this dtype's fault.
    return jnp.sum(jnp.isfinite(x) & jnp.isinf(rounded(x, dtype)), dtype=jnp.float32)


def underflows(x: jax.Array, error: jax.Array) -> jax.Array:
    """Returns how many values other than zero become zero, for what rounding adds to them; float32 scalar."""
    return jnp.sum((error == -x) & (x != 0), dtype=jnp.float32)


#: What the cotangent of a sink holds after the backward pass of the loss. That of the backward pass of v . G
#: has the square of the gradient's error in the first place.
STATISTICS = (
    "loss_variance", "overflow", "underflow", "gradient_overflow", "gradient_underflow", "largest_gradient",
)  # fmt: skip


class Which(NamedTuple):
    """Which errors a tap counts.

    Args:
      value: those of the value.
      cotangent: those of its cotangent.
      dtype: "float16" or "bfloat16".
    """

    value: bool
    cotangent: bool
    dtype: str


def sink(scale: Any) -> jax.Array:
    """Returns a sink: float32, one number per statistic."""
    return jnp.full(len(STATISTICS), scale, jnp.float32)


def tap(which: Which, x: jax.Array, sink: jax.Array) -> jax.Array:
    """Returns x; the errors of rounding it, and its cotangent, are counted into the sink."""
    return _tap(which, x, _placed_like(sink, x))


def tap_sum(transposable: Callable[[Any], Any], dtype: str, x: jax.Array, sink: jax.Array) -> jax.Array:
    """Returns a linear function of x whose transpose adds up, such as a broadcast or a look-up.

    What is counted is the difference of its transpose in half and in float32, as this platform computes it.

    Args:
      transposable: the function; it takes x in any dtype.
      dtype: "float16" or "bfloat16".
      x: its operand.
      sink: a sink.
    """
    return _summed(transposable, dtype, x, _placed_like(sink, x))


def transposed(transposable: Callable[[Any], Any], like: Any, dtype: str, g: Any) -> Any:
    """Returns the transpose of a linear function, computed in a dtype and cast to float32."""
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
    """Returns the cotangent of a sink: the square of the gradient's error along v."""
    return jnp.stack([jnp.sum(jnp.square(errors)), *[_zero(errors)] * (len(STATISTICS) - 1)])


@jax.custom_vjp
def _with_error(x: Any, error: Any, sink: Any) -> Any:
    """Returns a value or a cotangent, which half precision would change by an error."""
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
