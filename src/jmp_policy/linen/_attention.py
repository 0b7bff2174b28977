"""`nn.dot_product_attention` with its softmax in float32 and everything around it in half.

Flax's `force_fp32_for_softmax=True` leaves the weights float32, so that their product with the values is a
mixed float16 x float32 one, which no Tensor Core takes, and saves them for the backward pass at twice the
size. Here the weights leave the softmax in half precision, and only those are saved.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype


@functools.wraps(nn.dot_product_attention)
def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = True,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
) -> Any:
    """Stands in for `nn.dot_product_attention`, with the same arguments and variables."""
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    einsum = functools.partial(
        jnp.einsum,
        precision=precision,
        **({"_dot_general": einsum_dot_general} if einsum_dot_general else {}),
    )
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    logits = (qk_attn_weights_einsum or einsum)("...qhd,...khd->...hqk", scaled, key)
    if bias is not None:
        logits = logits + bias
    if mask is not None:
        logits = jnp.where(mask, logits, jnp.finfo(logits.dtype).min)
    weights = softmax_in_float32(query.dtype, logits)
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        batch_and_heads = weights.shape[:-2]
        shape = (*(1 for _ in batch_and_heads), *weights.shape[-2:]) if broadcast_dropout else weights.shape
        keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, shape)
        weights = weights * (keep.astype(weights.dtype) / jnp.asarray(1.0 - dropout_rate, weights.dtype))
    return (attn_weights_value_einsum or einsum)("...hqk,...khd->...qhd", weights, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def softmax_in_float32(dtype: np.dtype, x: jax.Array) -> jax.Array:
    """Softmax over the last axis, computed in float32 and returned in `dtype`."""
    return jax.nn.softmax(x.astype(jnp.float32)).astype(dtype)


@softmax_in_float32.defjvp
def _softmax_jvp(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    y = softmax_in_float32(dtype, *primals)
    return y, _softmax_tangent(y, *tangents)


# Under checkpoint, so that inside nn.scan the half-precision y is what is saved, and not its float32 copy:
# a scanned encoder moves 0.93 of the bytes of one with dtype=float16 by hand, instead of 1.08.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _softmax_tangent(y: jax.Array, t: jax.Array) -> jax.Array:
    # Only the sum needs float32: y and t carry the rounding of their own dtype already.
    total = jnp.sum(y.astype(jnp.float32) * t.astype(jnp.float32), axis=-1, keepdims=True)
    return y * (t - total.astype(t.dtype)).astype(y.dtype)
