"""Identities that round a value and its cotangent to half when a switch is on, and else do nothing.

They stand where the taps of `rounding_taps` stand. A switch is an argument of the compiled program, so that
one program gives the gradient with the rounding of any choice of modules.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_policy._src.core.narrowing import rounded
from jmp_policy._src.report.sensitivity.rounding_taps import Which, transposed


class Switch(NamedTuple):
    """What the taps of a module do.

    Args:
      on: whether they round; boolean scalar.
      scale: what cotangents are multiplied by before they are rounded; float32 scalar.
    """

    on: Any
    scale: Any


def tap(which: Which, x: jax.Array, sink: Switch) -> jax.Array:
    """Returns x, rounded if the switch is on; so is its cotangent."""
    return _tap(which, x, sink)


def tap_sum(transposable: Callable[[Any], Any], dtype: str, x: jax.Array, sink: Switch) -> jax.Array:
    """Returns a linear function of x, whose transpose adds up in half if the switch is on."""
    return _summed(transposable, dtype, x, sink)


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
