"""Multiplies operands whose scales come from the largest values that they had in the steps before.

The state is Flax's, name by name (`flax.linen.fp8_ops`): for both operands and the cotangent a scale, and a
history of largest values whose newest is the first. As in Flax, its new value is the "gradient" of the old
one. Otherwise than there, scales are powers of two; values that are not finite show in the result, so that a
loss scale sees an overflow, and do not enter the history.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.policy.recipes import DELAYED
from jmp_policy._src.products.fp8.primitive import bind_float8
from jmp_policy._src.products.fp8.scales import GRADIENT, VALUE, float8_scale, largest_of

#: Names of what has a scale and a history, in the order of the scales of a product.
_OF = ("input", "kernel", "output_grad")

#: Names of the state.
STATE = tuple(f"{name}_{part}" for name in _OF for part in ("scale", "amax_history"))


def delayed_product(
    operands: Sequence[Any], params: dict[str, Any], state: Mapping[str, Any], unmarked: Sequence[Any]
) -> Any:
    """Returns the product of two half operands; the cotangent of the state is the state of the next step.

    Args:
      operands, params, unmarked: as for `bind_float8`.
      state: float32 arrays by the names in `STATE`.
    """
    state = {name: state[name] for name in STATE}
    formats = dict(zip(_OF, (VALUE, VALUE, GRADIENT), strict=True))
    scales = {name: _scale(state, name, format) for name, format in formats.items()}
    out = bind_float8(operands, DELAYED, params, scales=[scales[name] for name in _OF])
    return _with_next_state(out, state, jax.lax.stop_gradient((scales, *unmarked)))


def _scale(state: Mapping[str, Any], name: str, format: str) -> Any:
    """Returns a scale from a history; the last one where the history is empty, as at first."""
    largest = jax.lax.stop_gradient(jnp.max(state[f"{name}_amax_history"]))
    known = (largest > 0) & jnp.isfinite(largest)
    last = jax.lax.stop_gradient(state[f"{name}_scale"]).reshape(())
    # The state of a layer that was not used in a step has become its gradient, zero.
    last = jnp.where(last > 0, last, 1)
    return jnp.where(known, float8_scale(largest, format, None, ()), last)


@jax.custom_vjp
def _with_next_state(out: Any, state: Any, seen: Any) -> Any:
    return out


def _forward(out: Any, state: Any, seen: Any) -> Any:
    scales, lhs, rhs = seen
    return out, (state, scales, largest_of(lhs), largest_of(rhs))


def _backward(residuals: Any, cotangent: Any) -> Any:
    state, scales, *largest = residuals
    new = {}
    # In `vmap` these are of the whole batch: of states per example JAX would return the sum.
    for name, newest in zip(_OF, (*largest, largest_of(cotangent)), strict=True):
        finite = jnp.where(jnp.isfinite(newest), newest, 0)
        new[f"{name}_amax_history"] = jnp.roll(state[f"{name}_amax_history"], -1).at[0].set(finite)
        new[f"{name}_scale"] = jnp.broadcast_to(scales[name], state[f"{name}_scale"].shape)
    return cotangent, new, None


_with_next_state.defvjp(_forward, _backward)
