"""Defines what layers call in place of `lax.dot_general` under a float8 recipe.

Under a delayed one scales come from the largest values that operands had in the steps before. The state is
Flax's, name by name (`flax.linen.fp8_ops`): for both operands and the cotangent a scale, and a history of
largest values whose newest is the first. As in Flax, its new value is the "gradient" of the old one.
Otherwise than there, scales are powers of two; values that are not finite show in the result, so that a loss
scale sees an overflow, and do not enter the history.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr.matrix_products import size_of
from jmp_policy._src.policy.recipes import DELAYED, of_attention, staying, without_target
from jmp_policy._src.products import functions
from jmp_policy._src.products.fp8.eligibility import loses, stays_because
from jmp_policy._src.products.fp8.primitive import bind_float8
from jmp_policy._src.products.fp8.scales import GRADIENT, VALUE, float8_scale, largest_of


@dataclasses.dataclass(frozen=True)
class Float8DotGeneral:
    """Function that stands in for `lax.dot_general`: a float8 product, where that suits the operands.

    Args:
      recipe: name of a recipe, and of the device on which it must gain.
      is_asked_for: whether a rule names the layer, so that only what the hardware refuses stays.
      instead_of: what the layer had: a function, or None for the default.
      key: gives the data of a key for rounding gradients at random, or None; None for `rounding_key`'s.
    """

    recipe: str
    is_asked_for: bool = False
    instead_of: Any = dataclasses.field(default=None, compare=False, repr=False)
    key: Callable[[], Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if words := of_attention(self.recipe):
            raise ValueError(
                f"The recipe {self.recipe} is for attention's own products, too, which no layer hands on. "
                f"Leave out {' and '.join(words)}, or ask for it with autocast."
            )

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the product of two arrays; the arguments are those of `lax.dot_general`."""
        if any(not is_half(getattr(x, "dtype", None)) for x in (lhs, rhs)):
            return functions.dot_general(lhs, rhs, *args, **kwargs)

        def bind(eqn: Any, operands: Sequence[Any]) -> Any:
            if stays_because(eqn, self.recipe, self.is_asked_for):
                return functions.bind_suited(eqn, operands)
            size = size_of(eqn)
            if loses(size, self.recipe):
                with staying(self.recipe, size):
                    return functions.bind_suited(eqn, operands)
            return self.product(operands, eqn.params, (lhs, rhs))

        return functions.bound_by(bind, lax.dot_general, lhs, rhs, *args, **kwargs)

    def product(self, operands: Sequence[Any], params: dict[str, Any], unmarked: Sequence[Any]) -> Any:
        """Computes a float8 product; the arguments are those of `bind_float8`."""
        scales = (None, None, self.key and self.key())
        return bind_float8(operands, without_target(self.recipe), params, scales=scales, unmarked=unmarked)


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
