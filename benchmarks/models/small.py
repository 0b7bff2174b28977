"""Small models, in plain Flax: `TABLE` has those of the CPU benchmarks."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (512, 512, 512):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (16, 32, 64):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.LSTMCell(128))(x)
        return nn.Dense(10)(x[:, -1])


class Layer(nn.Module):
    heads: int
    mlp: int
    softmax32: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, force_fp32_for_softmax=self.softmax32)(y)
        y = nn.gelu(nn.Dense(self.mlp)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y), None


class Encoder(nn.Module):
    """A pre-norm Transformer encoder whose output layer is the embedding again.

    Args:
      softmax32: the softmax in float32, whatever else is.
      scanned: its layers in one `nn.scan`.
    """

    vocabulary: int = 256
    hidden: int = 128
    heads: int = 4
    mlp: int = 512
    layers: int = 2
    softmax32: bool = False
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.hidden)
        x = embed(tokens)
        positions = nn.Embed(tokens.shape[1], self.hidden, name="positions")
        x = x + positions(jnp.arange(tokens.shape[1]))
        widths = self.heads, self.mlp, self.softmax32
        if self.scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(Layer, length=self.layers, **axes)(*widths)(x, None)
        for _ in range(0 if self.scanned else self.layers):
            x, _ = Layer(*widths)(x)
        return embed.attend(nn.LayerNorm()(x))


def labelled(module: nn.Module, *shape: int) -> Model:
    """A model with a batch of ones, whose class is always the first."""

    def draw(_: jax.Array) -> Any:
        return (jnp.ones(shape),), jnp.zeros(shape[:1], jnp.int32)

    return Model(module, draw, cross_entropy)


def language(module: Encoder, batch: int = 16, length: int = 64) -> Model:
    """An encoder that gives its tokens back."""

    def draw(key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (batch, length), 0, module.vocabulary)
        return (tokens,), tokens

    return Model(module, draw, cross_entropy)


TABLE = {
    "MLP": labelled(MLP(), 256, 256),
    "CNN + BatchNorm": labelled(CNN(), 64, 32, 32, 3),
    "Transformer": language(Encoder()),
    "LSTM": labelled(LSTM(), 32, 32, 64),
}
