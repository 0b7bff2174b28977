"""BERT-Large: a post-norm encoder that guesses masked tokens.

Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding,
NAACL 2019; no dropout, no next-sentence prediction.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy

INIT = nn.initializers.truncated_normal(0.02)
dense = functools.partial(nn.Dense, kernel_init=INIT)
embedding = functools.partial(nn.Embed, embedding_init=INIT)
norm = functools.partial(nn.LayerNorm, epsilon=1e-12)

#: The token that stands for a masked one.
MASK = 3


class Layer(nn.Module):
    """Attention and a feed-forward network on `[B, L, D]`, each normalised after its shortcut.

    The network is `mlp` wide inside.
    """

    heads: int
    mlp: int

    @nn.compact
    def __call__(self, x, mask):
        y = nn.MultiHeadDotProductAttention(self.heads, kernel_init=INIT)(x, mask=mask)
        x = norm()(x + y)
        y = dense(x.shape[-1])(nn.gelu(dense(self.mlp)(x)))
        return norm()(x + y)


class BERT(nn.Module):
    """Logits `[B, M, vocabulary]` of the M tokens at `positions`.

    The vocabulary has 30522 tokens, padded to a multiple of 64; `length` is that of the longest sequence.
    """

    vocabulary: int = 30528
    length: int = 512
    hidden: int = 1024
    heads: int = 16
    mlp: int = 4096
    layers: int = 24

    @nn.compact
    def __call__(self, tokens, segments, present, positions):
        """The logits; `tokens`, `segments` (0 or 1) and `present` are `[B, L]`, `positions` `[B, M]`."""
        embed = embedding(self.vocabulary, self.hidden, name="tokens")
        x = embed(tokens)
        x = x + embedding(self.length, self.hidden, name="positions")(jnp.arange(tokens.shape[1]))
        x = x + embedding(2, self.hidden, name="segments")(segments)
        x = norm()(x)
        for _ in range(self.layers):
            x = Layer(self.heads, self.mlp)(x, present[:, None, None, :])
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        x = norm()(nn.gelu(dense(self.hidden)(x)))
        return embed.attend(x) + self.param("bias", nn.initializers.zeros, (self.vocabulary,))


def draw(key: jax.Array, vocabulary: int, batch: int, length: int, masked: int) -> Any:
    """Sequences that fill half of their length at least, with 15 % of their tokens masked."""
    token, long, order = jax.random.split(key, 3)
    tokens = jax.random.randint(token, (batch, length), MASK + 1, vocabulary)
    lengths = jax.random.randint(long, (batch, 1), length // 2, length + 1)
    place = jnp.arange(length)
    present = place < lengths
    # The first ones in random order, those that are not there last.
    positions = jnp.where(present, jax.random.uniform(order, tokens.shape), 1.0).argsort()[:, :masked]
    labels = jnp.take_along_axis(tokens, positions, axis=1)
    # Shorter sequences have fewer masked tokens; the rest of their row counts for nothing.
    counts = jnp.arange(masked) < 0.15 * lengths
    rows = jnp.arange(batch)[:, None]
    tokens = tokens.at[rows, positions].set(jnp.where(counts, MASK, labels))
    segments = jnp.where(place < lengths // 2, 0, 1)
    return (tokens, segments, present, positions), (labels, jnp.where(counts, 1.0, 0.0))


def loss(logits: jax.Array, targets: Any) -> jax.Array:
    """Cross-entropy of the masked tokens."""
    labels, weights = targets
    return cross_entropy(logits, labels, weights)


def make(size: str) -> Model:
    """BERT on sequences of 16, 32 or 512 tokens; the full one is BERT-Large."""
    module, batch, masked = {
        "tiny": (BERT(64, 16, 32, 2, 64, 2), 4, 4),
        "small": (BERT(512, 32, 256, 4, 1024, 4), 2, 8),
        "full": (BERT(), 8, 76),
    }[size]
    shape = {"vocabulary": module.vocabulary, "batch": batch, "length": module.length, "masked": masked}
    return Model(module, functools.partial(draw, **shape), loss)
