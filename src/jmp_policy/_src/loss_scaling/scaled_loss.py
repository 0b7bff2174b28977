"""Multiplies a loss by its scale: what all who differentiate a loss function do to what it returns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import float16_loss, scale_mistakes
from jmp_policy._src.loss_scaling.protocol import LossScale


def split_loss(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Splits what a loss function returned into the loss and the auxiliary output."""
    if has_aux and isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    if has_aux or jax.tree.structure(out) != jax.tree.structure(0):
        raise scale_mistakes.no_loss(out, has_aux)
    return out, None


def scale_loss(scale: LossScale, loss: Any) -> Any:
    """Multiplies the loss by its scale in float32; gradients of a loss that is not finite become NaN."""
    dtype = getattr(loss, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return scale.scale(loss)  # A Python number, or what jax.value_and_grad will refuse.
    # A NaN loss whose gradients happen to be finite is a bad step too (Flax's DynamicScale counts it as
    # good). A NaN factor turns the cotangent, and so all gradients, to NaN for the price of one scalar:
    # x - x is 0 for every finite number, and NaN for inf and NaN.
    promoted = loss.astype(promote_dtype(dtype))
    one_if_finite = lax.stop_gradient(promoted - promoted) + 1
    if dtype == jnp.float16:
        return promoted * (float16_loss.checked_cotangent(scale) * one_if_finite)
    return scale.scale(loss) * one_if_finite


def restore_scale(scale: LossScale, loss: Any, grads: PyTree) -> PyTree:
    """Multiplies gradients of a float16 loss by the part of the scale that its cotangent could not hold."""
    return float16_loss.restore(scale, grads) if getattr(loss, "dtype", None) == jnp.float16 else grads
