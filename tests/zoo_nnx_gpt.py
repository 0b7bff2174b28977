"""GPT-2 of `benchmarks.models.gpt` as an NNX module: the same computation, the same sizes."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

from benchmarks.models import gpt


class Layer(nnx.Module):
    """Attention and a feed-forward network on `[B, L, D]`, each normalised before and added."""

    def __init__(self, hidden, heads, mlp, *, rngs):
        self.norm_1 = nnx.LayerNorm(hidden, epsilon=1e-5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, hidden, decode=False, kernel_init=gpt.INIT, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(hidden, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(hidden, mlp, kernel_init=gpt.INIT, rngs=rngs)
        self.down = nnx.Linear(mlp, hidden, kernel_init=gpt.INIT, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    """Tokens `[B, L]` to logits `[B, L, vocabulary]` of those that follow; arguments as in `gpt.GPT`."""

    def __init__(self, vocabulary, length, hidden, heads, mlp, layers, *, rngs):
        self.tokens = nnx.Embed(vocabulary, hidden, embedding_init=gpt.INIT, rngs=rngs)
        self.positions = nnx.Embed(length, hidden, embedding_init=gpt.INIT, rngs=rngs)
        self.layers = nnx.List([Layer(hidden, heads, mlp, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(hidden, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens[:1])
        for layer in self.layers:
            x = layer(x, mask)
        return self.tokens.attend(self.norm(x))


def make(size: str) -> tuple[Any, Any, Any]:
    """The module but for its `rngs`, draw and loss, as in `gpt.make`."""
    like = gpt.make(size)
    of: Any = like.module
    module = functools.partial(GPT, of.vocabulary, of.length, of.hidden, of.heads, of.mlp, of.layers)
    return module, like.draw, like.loss
