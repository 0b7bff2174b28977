"""What both of Flax's attentions share: the weights, with their softmax in float32.

The weights leave the softmax in half precision, and only those are saved for the backward pass.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def attention_weights(logits: jax.Array, bias: Any, mask: Any, dtype: np.dtype) -> jax.Array:
    """Returns the softmax of `logits + bias` where `mask` is true; computed in float32, in `dtype`."""
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    return softmax_in_float32(dtype, logits)


def drop(weights: jax.Array, rng: Any, rate: float, broadcast: bool) -> jax.Array:
    """Drops attention weights at random, the same for all batches and heads with `broadcast`."""
    batch_and_heads = weights.shape[:-2]
    shape = (*(1 for _ in batch_and_heads), *weights.shape[-2:]) if broadcast else weights.shape
    keep = jax.random.bernoulli(rng, 1.0 - rate, shape)
    return weights * (keep.astype(weights.dtype) / jnp.asarray(1.0 - rate, weights.dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def softmax_in_float32(dtype: np.dtype, x: jax.Array) -> jax.Array:
    """Computes the softmax over the last axis in float32, and returns it in `dtype`."""
    return jax.nn.softmax(x.astype(jnp.float32)).astype(dtype)


@softmax_in_float32.defjvp
def _softmax_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    y = softmax_in_float32(dtype, *primals)
    return y, _softmax_tangent(y, *tangents)


# Under checkpoint, so that inside nn.scan the half-precision y is what is saved, and not its float32 copy:
# a scanned encoder moves 0.93 of the bytes of one with dtype=float16 by hand, instead of 1.08.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _softmax_tangent(y: jax.Array, t: jax.Array) -> jax.Array:
    # All of it in float32: transposed, the subtraction becomes a sum over the axis as well.
    wide, tangent = y.astype(jnp.float32), t.astype(jnp.float32)
    return (wide * (tangent - jnp.sum(wide * tangent, axis=-1, keepdims=True))).astype(y.dtype)
