"""Multiplicative LSTM: a language model over bytes, with a recurrent cell of its own.

Krause et al., Multiplicative LSTM for sequence modelling, 2016; sizes of Radford et al., Learning
to Generate Reviews and Discovering Sentiment, 2017.
"""

import flax.linen as nn
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy, next_tokens

BYTES = 256


class MultiplicativeLSTMCell(nn.RNNCellBase):
    """An LSTM whose gates see, in place of the state, its product with a function of the input.

    The carry is the cell and the hidden state, each `[B, features]`; the input is `[B, E]`.
    """

    features: int

    @nn.compact
    def __call__(self, carry, x):
        c, h = carry
        m = nn.Dense(self.features, use_bias=False, name="mx")(x)
        m = m * nn.Dense(self.features, use_bias=False, name="mh")(h)
        gates = nn.Dense(4 * self.features, use_bias=False, name="x")(x)
        gates = gates + nn.Dense(4 * self.features, name="h")(m)
        i, f, o, u = jnp.split(gates, 4, axis=-1)
        c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(u)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        zeros = jnp.zeros((*input_shape[:-1], self.features))
        return zeros, zeros

    @property
    def num_feature_axes(self):
        return 1


class ByteModel(nn.Module):
    """Bytes `[B, T]` to logits of the next ones `[B, T, 256]`. No weight normalisation, no dropout.

    Attributes:
      features: of the recurrent state.
      embedding: channels of a byte.
    """

    features: int = 4096
    embedding: int = 64

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(BYTES, self.embedding)(tokens)
        x = nn.RNN(MultiplicativeLSTMCell(self.features))(x)
        return nn.Dense(BYTES)(x)


def make(size: str) -> Model:
    """One layer of 4096 units on 128 sequences of 256 bytes, or a smaller one."""
    module, batch, length = {
        "tiny": (ByteModel(32, 8), 4, 16),
        "small": (ByteModel(256, 64), 8, 32),
        "full": (ByteModel(), 128, 256),
    }[size]
    return Model(module, next_tokens(batch, length, BYTES), cross_entropy)
