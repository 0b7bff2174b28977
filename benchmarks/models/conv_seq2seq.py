"""Convolutional sequence to sequence: gated convolutions, and attention in every layer of the decoder.

Gehring et al., Convolutional Sequence to Sequence Learning, ICML 2017.
"""

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy

HALF_VARIANCE = math.sqrt(0.5)  # Keeps the variance of a sum of two.
LAYERS = ((512, 3),) * 9 + ((1024, 3),) * 4 + ((2048, 1),) * 2


def dense(features):
    """A weight-normalised linear map."""
    return nn.WeightNorm(nn.Dense(features))


class GatedConv(nn.Module):
    """Weight-normalised convolution over time and a gated linear unit, `[B, T, C]` to `[B, T, features]`.

    Attributes:
      features: of the result; twice as many leave the convolution.
      width: positions that the kernel sees.
      causal: whether it sees none that come later.
    """

    features: int
    width: int
    causal: bool = False

    @nn.compact
    def __call__(self, x):
        padding = "CAUSAL" if self.causal else "SAME"
        conv = nn.Conv(2 * self.features, (self.width,), padding=padding)
        # The gate takes three quarters of the variance; this gain gives it back.
        return nn.glu(nn.WeightNorm(conv, scale_init=nn.initializers.constant(2.0))(x))


class Embedding(nn.Module):
    """Tokens `[B, T]` to the sums `[B, T, features]` of their vectors and those of their positions."""

    vocabulary: int
    positions: int
    features: int

    @nn.compact
    def __call__(self, tokens):
        def embed(size, name):
            return nn.Embed(size, self.features, embedding_init=nn.initializers.normal(0.1), name=name)

        positions = jnp.arange(tokens.shape[1])
        return embed(self.vocabulary, "tokens")(tokens) + embed(self.positions, "positions")(positions)


class Attention(nn.Module):
    """Adds to `x` `[B, T, C]` what it finds in the source, by one head.

    `target` `[B, T, E]` is the embedded target; `keys` and `values`, each `[B, S, E]`, are the encoder's.
    """

    @nn.compact
    def __call__(self, x, target, keys, values):
        queries = (dense(keys.shape[-1])(x) + target) * HALF_VARIANCE
        weights = nn.softmax(jnp.einsum("bte,bse->bts", queries, keys))
        found = jnp.einsum("bts,bse->bte", weights, values) * math.sqrt(keys.shape[1])
        return (dense(x.shape[-1])(found) + x) * HALF_VARIANCE


class Encoder(nn.Module):
    """Embedded tokens `[B, S, E]` to keys and values, each `[B, S, E]`."""

    layers: Sequence[tuple[int, int]]

    @nn.compact
    def __call__(self, embedded):
        x = dense(self.layers[0][0])(embedded)
        for features, width in self.layers:
            shortcut = x if x.shape[-1] == features else dense(features)(x)
            x = (GatedConv(features, width)(x) + shortcut) * HALF_VARIANCE
        keys = dense(embedded.shape[-1])(x)
        return keys, (keys + embedded) * HALF_VARIANCE


class Decoder(nn.Module):
    """Embedded tokens `[B, T, E]`, keys and values `[B, S, E]` to `[B, T, features]`."""

    layers: Sequence[tuple[int, int]]
    features: int

    @nn.compact
    def __call__(self, embedded, keys, values):
        x = dense(self.layers[0][0])(embedded)
        for features, width in self.layers:
            shortcut = x if x.shape[-1] == features else dense(features)(x)
            x = GatedConv(features, width, causal=True)(x)
            x = (Attention()(x, embedded, keys, values) + shortcut) * HALF_VARIANCE
        return dense(self.features)(x)


class ConvSeq2Seq(nn.Module):
    """Source `[B, S]` and previous target tokens `[B, T]` to logits `[B, T, vocabulary]`.

    As the authors' code, but for: no dropout, no padding and so no masks, no scaling of the encoder's
    gradient by the number of attentions.

    Attributes:
      layers: channels and kernel width of each, in the encoder and again in the decoder.
      vocabulary: of either language.
      embedding: channels of the embeddings.
      features: channels in front of the logits.
      positions: the length that no sequence exceeds.
    """

    layers: Sequence[tuple[int, int]] = LAYERS
    vocabulary: int = 40000
    embedding: int = 768
    features: int = 512
    positions: int = 1024

    @nn.compact
    def __call__(self, source, previous):
        def embed(name):
            return Embedding(self.vocabulary, self.positions, self.embedding, name=name)

        keys, values = Encoder(self.layers)(embed("source")(source))
        x = Decoder(self.layers, self.features)(embed("target")(previous), keys, values)
        return dense(self.vocabulary)(x)


def make(size: str) -> Model:
    """The model for English to German; smaller ones have a layer or two of each kind."""
    module, batch, length = {
        "tiny": (ConvSeq2Seq(((16, 3), (32, 1)), 64, 16, 16, 32), 4, 8),
        "small": (ConvSeq2Seq(((64, 3),) * 2 + ((96, 3), (128, 1)), 512, 64, 64, 64), 8, 32),
        "full": (ConvSeq2Seq(), 64, 64),
    }[size]

    def draw(key: jax.Array):
        tokens = jax.random.randint(key, (2, batch, length + 1), 0, module.vocabulary)
        return (tokens[0, :, 1:], tokens[1, :, :-1]), tokens[1, :, 1:]

    return Model(module, draw, cross_entropy)
