"""The encoder of `small` as an NNX module, and a deep one; with `dtype=jnp.float16` as written by hand."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Layer(nnx.Module):
    def __init__(self, hidden, heads, mlp, *, rngs, dtype=None, attention_fn=nnx.dot_product_attention):
        self.norm_1 = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, hidden, decode=False, dtype=dtype, attention_fn=attention_fn, rngs=rngs
        )
        self.norm_2 = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(hidden, mlp, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(mlp, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Encoder(nnx.Module):
    """A pre-norm Transformer encoder whose output layer is the embedding again."""

    def __init__(
        self, *, rngs, vocabulary=256, hidden=128, heads=4, mlp=512, layers=2, length=64, dtype=None, **kwargs
    ):
        self.embed = nnx.Embed(vocabulary, hidden, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(length, hidden, dtype=dtype, rngs=rngs)
        more = {"dtype": dtype, "rngs": rngs, **kwargs}
        self.layers = nnx.List(Layer(hidden, heads, mlp, **more) for _ in range(layers))
        self.norm = nnx.LayerNorm(hidden, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


class Block(nnx.Module):
    def __init__(self, width, *, rngs, dtype=None):
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.linear = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.norm(x))


class Deep(nnx.Module):
    """Many modules that compute next to nothing: 300 with 99 blocks, itself and the list among them."""

    def __init__(self, *, rngs, width=8, blocks=99, dtype=None):
        self.blocks = nnx.List([Block(width, dtype=dtype, rngs=rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain_attention(query: Any, key: Any, value: Any, **_: Any) -> jax.Array:
    """Attention as one writes it by hand: products in half precision, the softmax in float32."""
    logits = jnp.einsum("...qhd,...khd->...hqk", query / query.shape[-1] ** 0.5, key)
    weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(query.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)
