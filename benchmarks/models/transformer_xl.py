"""Transformer-XL: relative attention that looks back into the segment before.

Dai et al., Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context, ACL 2019; no
dropout, a plain softmax in place of the adaptive one.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy

INIT = nn.initializers.normal(0.02)
dense = functools.partial(nn.Dense, kernel_init=INIT)


def distances(length: int, width: int) -> jax.Array:
    """Sines and cosines `[length, width]` of the distances from `length - 1` down to 0."""
    distance = jnp.arange(length - 1, -1, -1.0)
    frequency = 10000.0 ** -(jnp.arange(0, width, 2.0) / width)
    angle = distance[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def relative_shift(x: jax.Array) -> jax.Array:
    """Scores by distance become scores by key: row i of the last two axes moves to the left by `Q - 1 - i`.

    Args:
      x: `[..., Q, K]`, the last column at distance 0.

    Returns:
      `[..., Q, K]`. Where a key comes after its query stands something else's score, to be masked.
    """
    *rest, queries, keys = x.shape
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])
    x = x.reshape(*rest, keys + 1, queries)[..., 1:, :]
    return x.reshape(*rest, queries, keys)


class RelativeAttention(nn.Module):
    """Attention of `x` `[B, Q, D]` to `context` `[B, K, D]`, which ends with `x`, by content and by distance.

    Attributes:
      heads, width: how many, and of which width each.
    """

    heads: int
    width: int

    @nn.compact
    def __call__(self, x, context, distance, u, v):
        """The result `[B, Q, D]`; `distance` is `[K, D]`, `u` and `v` are `[heads, width]`."""

        def projected(name, x):
            widths = self.heads, self.width
            return nn.DenseGeneral(widths, use_bias=False, kernel_init=INIT, name=name)(x)

        query = projected("query", x)
        key, value = projected("key", context), projected("value", context)
        distance = projected("distance", distance)
        content = jnp.einsum("bqhd,bkhd->bhqk", query + u, key)
        position = relative_shift(jnp.einsum("bqhd,khd->bhqk", query + v, distance))
        scores = (content + position) / math.sqrt(self.width)
        queries, keys = x.shape[1], context.shape[1]
        past = jnp.arange(keys) <= jnp.arange(keys - queries, keys)[:, None]
        weights = nn.softmax(jnp.where(past, scores, -jnp.inf))
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, kernel_init=INIT, name="out")(y)


class Layer(nn.Module):
    """Relative attention and a feed-forward network, `mlp` wide, each normalised after its shortcut."""

    heads: int
    width: int
    mlp: int

    @nn.compact
    def __call__(self, x, memory, distance, u, v):
        context = jnp.concatenate([memory, x], axis=1)
        y = RelativeAttention(self.heads, self.width)(x, context, distance, u, v)
        x = nn.LayerNorm(epsilon=1e-5)(x + y)
        y = dense(x.shape[-1])(nn.relu(dense(self.mlp)(x)))
        return nn.LayerNorm(epsilon=1e-5)(x + y)


class TransformerXL(nn.Module):
    """Tokens `[B, L]` and a memory to logits `[B, L, vocabulary]` of what follows, and a new memory.

    The memory `[layers, B, M, hidden]` holds what came into each layer at the M tokens before; no gradient
    flows into it. The base model of the paper for WikiText-103 has a hidden width of 410, 10 heads of 41 and
    an inner width of 2100. None is a multiple of 8, as Tensor Cores want them: the defaults are those of
    NVIDIA's version, with 16 layers as well.

    Attributes:
      vocabulary: of subwords, in place of 267735 words.
      hidden, heads, width, mlp: of the layers; `width` is that of a head.
      layers: how many.
    """

    vocabulary: int = 32000
    hidden: int = 512
    heads: int = 8
    width: int = 64
    mlp: int = 2048
    layers: int = 16

    @nn.compact
    def __call__(self, tokens, memory):
        embed = nn.Embed(self.vocabulary, self.hidden, embedding_init=INIT, name="tokens")
        u = self.param("u", INIT, (self.heads, self.width))
        v = self.param("v", INIT, (self.heads, self.width))
        distance = distances(memory.shape[2] + tokens.shape[1], self.hidden)
        x = embed(tokens) * math.sqrt(self.hidden)
        states = []
        for layer in range(self.layers):
            states.append(x)
            x = Layer(self.heads, self.width, self.mlp)(x, memory[layer], distance, u, v)
        seen = jnp.concatenate([memory, jnp.stack(states)], axis=2)
        new_memory = jax.lax.stop_gradient(seen[:, :, x.shape[1] :])
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        return embed.attend(x) + bias, new_memory


def draw(key: jax.Array, module: TransformerXL, batch: int, length: int) -> Any:
    """Tokens, a memory of as many, and for each token the next one."""
    token, state = jax.random.split(key)
    tokens = jax.random.randint(token, (batch, length + 1), 0, module.vocabulary)
    memory = jax.random.normal(state, (module.layers, batch, length, module.hidden))
    return (tokens[:, :-1], memory), tokens[:, 1:]


def loss(outputs: Any, labels: jax.Array) -> jax.Array:
    """Cross-entropy of the next tokens."""
    logits, _ = outputs
    return cross_entropy(logits, labels)


def make(size: str) -> Model:
    """Transformer-XL on segments of 16, 32 or 192 tokens, after a memory of as many."""
    module, batch, length = {
        "tiny": (TransformerXL(64, 32, 2, 16, 64, 2), 4, 16),
        "small": (TransformerXL(512, 256, 4, 64, 1024, 4), 2, 32),
        "full": (TransformerXL(), 32, 192),
    }[size]
    return Model(module, functools.partial(draw, module=module, batch=batch, length=length), loss)
