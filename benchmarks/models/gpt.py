"""GPT-2: a pre-norm decoder that guesses the next token.

Radford et al., Language Models are Unsupervised Multitask Learners, 2019; 12 layers, no dropout.
"""

import functools

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy, next_tokens

INIT = nn.initializers.normal(0.02)
dense = functools.partial(nn.Dense, kernel_init=INIT)
embedding = functools.partial(nn.Embed, embedding_init=INIT)
norm = functools.partial(nn.LayerNorm, epsilon=1e-5)


class Layer(nn.Module):
    """Attention and a feed-forward network on `[B, L, D]`, each normalised before and added.

    The network is `mlp` wide inside.
    """

    heads: int
    mlp: int

    @nn.compact
    def __call__(self, x, mask):
        x = x + nn.MultiHeadDotProductAttention(self.heads, kernel_init=INIT)(norm()(x), mask=mask)
        y = nn.gelu(dense(self.mlp)(norm()(x)))
        return x + dense(x.shape[-1])(y)


class GPT(nn.Module):
    """Tokens `[B, L]` to logits `[B, L, vocabulary]` of those that follow.

    The vocabulary has 50257 tokens, padded to a multiple of 64; `length` is that of the longest sequence.
    """

    vocabulary: int = 50304
    length: int = 1024
    hidden: int = 768
    heads: int = 12
    mlp: int = 3072
    layers: int = 12

    @nn.compact
    def __call__(self, tokens):
        embed = embedding(self.vocabulary, self.hidden, name="tokens")
        positions = embedding(self.length, self.hidden, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens[:1])
        for _ in range(self.layers):
            x = Layer(self.heads, self.mlp)(x, mask)
        return embed.attend(norm()(x))


def make(size: str) -> Model:
    """GPT-2 on sequences of 16, 32 or 1024 tokens; the full one has 124 million parameters."""
    module, batch = {
        "tiny": (GPT(64, 16, 32, 2, 64, 2), 4),
        "small": (GPT(512, 32, 256, 4, 1024, 4), 2),
        "full": (GPT(), 8),
    }[size]
    return Model(module, next_tokens(batch, module.length, module.vocabulary), cross_entropy)
