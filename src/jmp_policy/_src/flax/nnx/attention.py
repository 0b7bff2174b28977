"""`nnx.dot_product_attention` with its softmax in float32 and everything around it in half.

Flax's computes the whole softmax in half precision where there is dropout. Where there is none it calls
`jax.nn.dot_product_attention`, which saves float32 weights for the backward pass and does not compile for
float16 on a CPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax import lax

from jmp_policy._src.autocast.softmax import attention_weights, drop
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.products.functions import stand_in

#: Rotary embeddings, with their attention: newer versions of Flax have them.
_with_rope: Any = getattr(nnx, "dot_product_attention_with_rope", None)


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
    module: nnx.Module | None = None,
    promote_dtype: Any = dtypes.promote_dtype,
    is_causal: bool = False,
) -> Any:
    """Stands in for `nnx.dot_product_attention`, with the same arguments; grouped queries too."""
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    heads, key_heads = query.shape[-2], key.shape[-2]
    if heads % key_heads or value.shape[-2] != key_heads:
        raise ValueError(
            f"Attention needs as many value heads as key heads, and a multiple of them as query heads; got "
            f"{heads} query, {key_heads} key and {value.shape[-2]} value heads."
        )
    scaled = query / jnp.sqrt(query.shape[-1]).astype(query.dtype)
    logits = _logits(scaled, key, precision)
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], jnp.bool_))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    weights = attention_weights(logits, bias, mask, query.dtype)
    if module is not None:
        module.sow(nnx.Intermediate, "attention_weights", weights)
    if not deterministic and dropout_rate > 0.0:
        weights = drop(weights, dropout_rng, dropout_rate, broadcast_dropout)
    return _weighted_sum(weights, value, precision)


def _einsum(dtype: Any, precision: Any) -> Callable[..., jax.Array]:
    return functools.partial(compat.einsum_with(stand_in(lax.dot_general, dtype)), precision=precision)


def _logits(query: jax.Array, key: jax.Array, precision: Any) -> jax.Array:
    einsum = _einsum(query.dtype, precision)
    heads, key_heads = query.shape[-2], key.shape[-2]
    if heads == key_heads:  # The grouped products of one head each would move 4 % more bytes.
        return einsum("...qhd,...khd->...hqk", query, key)
    grouped = query.reshape(*query.shape[:-2], key_heads, heads // key_heads, query.shape[-1])
    logits = einsum("...qhgd,...khd->...hgqk", grouped, key)
    return logits.reshape(*logits.shape[:-4], heads, *logits.shape[-2:])


def _weighted_sum(weights: jax.Array, value: jax.Array, precision: Any) -> jax.Array:
    einsum = _einsum(value.dtype, precision)
    heads, value_heads = weights.shape[-3], value.shape[-2]
    if heads == value_heads:
        return einsum("...hqk,...khd->...qhd", weights, value)
    grouped = weights.reshape(*weights.shape[:-3], value_heads, heads // value_heads, *weights.shape[-2:])
    out = einsum("...hgqk,...khd->...qhgd", grouped, value)
    return out.reshape(*out.shape[:-3], heads, out.shape[-1])


def attention_with_rope(
    query: Any, key: Any, value: Any, *, rope: Any, input_positions: Any = None, **kwargs: Any
) -> Any:
    """Stands in for `nnx.dot_product_attention_with_rope`: rotations in float32, then `attention`."""
    rotate = jax.vmap(rope, in_axes=(-2, None), out_axes=-2)
    return attention(rotate(query, input_positions), rotate(key, input_positions), value, **kwargs)


#: Attention functions of Flax's own, and what stands in for them.
_STAND_INS = ((nnx.dot_product_attention, attention), (_with_rope, attention_with_rope))


def with_float32_softmax(attention_fn: Any) -> Any:
    """What to call instead of an attention function of Flax's own; any other unchanged."""
    return _replaced(attention_fn, _STAND_INS)


def as_in_flax(attention_fn: Any) -> Any:
    """The function that `with_float32_softmax` replaced."""
    return _replaced(attention_fn, [(ours, theirs) for theirs, ours in _STAND_INS])


def _replaced(function: Any, pairs: Sequence[tuple[Any, Any]]) -> Any:
    if isinstance(function, functools.partial):
        inner = _replaced(function.func, pairs)
        is_other = inner is not function.func
        return functools.partial(inner, *function.args, **function.keywords) if is_other else function
    return next((new for old, new in pairs if function is old and old is not None), function)
