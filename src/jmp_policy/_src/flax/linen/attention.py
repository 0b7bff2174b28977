"""`nn.dot_product_attention` with its softmax in float32 and everything around it in half.

Flax's `force_fp32_for_softmax=True` leaves the weights float32, so that their product with the values is a
mixed float16 x float32 one, which no Tensor Core takes, and saves them for the backward pass at twice the
size. Here the weights leave the softmax in half precision, and only those are saved.
"""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax

from jmp_policy._src.autocast.softmax import attention_weights, drop
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.products.functions import stand_in


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
    dot_general = einsum_dot_general or stand_in(lax.dot_general, query.dtype)
    einsum = functools.partial(compat.einsum_with(dot_general), precision=precision)
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    logits = (qk_attn_weights_einsum or einsum)("...qhd,...khd->...hqk", scaled, key)
    weights = attention_weights(logits, bias, mask, query.dtype)
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        weights = drop(weights, dropout_rng, dropout_rate, broadcast_dropout)
    return (attn_weights_value_einsum or einsum)("...hqk,...khd->...qhd", weights, value)
