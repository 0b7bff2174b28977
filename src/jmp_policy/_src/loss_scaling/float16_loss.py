"""Scales a loss that is float16 itself, whose backward pass cannot start from a scale above 2**15."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.float8_state import map_derivatives
from jmp_policy._src.loss_scaling.protocol import LossScale

#: The largest power of two in float16.
_LARGEST_FLOAT16 = 2.0**15


def first_cotangent(dtype: Any, loss_scale: Any) -> Any:
    """The cotangent of a loss of a dtype: its scale, of which float16 holds at most 2**15."""
    return jnp.minimum(loss_scale, _LARGEST_FLOAT16) if dtype == jnp.float16 else loss_scale


def checked_cotangent(scale: LossScale) -> jax.Array:
    """The cotangent of a float16 loss, with a warning."""
    warnings.warn(
        "The loss is float16. The backward pass starts from the loss scale, and float16 ends at 65504: a "
        "scale of 2**16 would overflow on every step. It is limited to 2**15 here, and the gradients are "
        "multiplied by the rest. Compute the loss in float32: cast the logits, or give the model the "
        "output dtype float32 (as mixed_float16 has).",
        UserWarning,
        stacklevel=3,
    )
    return first_cotangent(jnp.float16, jnp.asarray(scale.loss_scale, jnp.float32))


def restore(scale: LossScale, grads: PyTree) -> PyTree:
    """Multiplies gradients by the part of the scale that the cotangent could not hold."""
    rest = jnp.maximum(jnp.asarray(scale.loss_scale, jnp.float32) / _LARGEST_FLOAT16, 1)

    def multiply(g: Any) -> Any:
        if not jnp.issubdtype(g.dtype, jnp.inexact):
            return g
        dtype = promote_dtype(g.dtype)
        # The transpose of this product is the same product, and counts as the end of the backward pass: not
        # as a change of its gradients.
        product = jax.linear_transpose(lambda g: (g.astype(dtype) * rest.astype(dtype)).astype(g.dtype), g)
        return product(g)[0]

    return map_derivatives(multiply, grads)
