"""What both of Flax's attentions share: the weights, with their softmax in float32.

The weights leave the softmax in half precision, and only those are saved for the backward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.autocast.softmax import softmax_in_float32


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
