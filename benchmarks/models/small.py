"""Small models: `dtype=jnp.float16` makes the hand-written version, None the one to wrap."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class MLP(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for width in (512, 512, 512):
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class CNN(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for width in (16, 32, 64):
            x = nn.Conv(width, (3, 3), strides=2, use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class LSTM(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.LSTMCell(128, dtype=self.dtype))(x)
        return nn.Dense(10, dtype=self.dtype)(x[:, -1])


class Layer(nn.Module):
    heads: int
    mlp: int
    dtype: Any = None
    softmax32: bool = False

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, force_fp32_for_softmax=self.softmax32
        )(y)
        x = x + y
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(self.mlp, dtype=self.dtype)(y))
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class LayerStep(Layer):
    """`Layer` as a body of `nn.scan`."""

    @nn.compact
    def __call__(self, x, _):
        return super().__call__(x), None


class Encoder(nn.Module):
    """A pre-norm Transformer encoder whose output layer is the embedding again.

    Args:
      scanned: its layers in one `nn.scan`.
    """

    vocabulary: int = 256
    hidden: int = 128
    heads: int = 4
    mlp: int = 512
    layers: int = 2
    dtype: Any = None
    softmax32: bool = False
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.hidden, dtype=self.dtype)
        x = embed(tokens)
        positions = nn.Embed(tokens.shape[1], self.hidden, dtype=self.dtype, name="positions")
        x = x + positions(jnp.arange(tokens.shape[1]))
        widths = self.heads, self.mlp, self.dtype, self.softmax32
        if self.scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(LayerStep, length=self.layers, **axes)(*widths)(x, None)
        for _ in range(0 if self.scanned else self.layers):
            x = Layer(*widths)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x)


def images(batch: int = 64) -> tuple[Any, Any]:
    return jnp.ones((batch, 32, 32, 3)), jnp.zeros((batch,), jnp.int32)


def vectors(batch: int = 256) -> tuple[Any, Any]:
    return jnp.ones((batch, 256)), jnp.zeros((batch,), jnp.int32)


def sequences(batch: int = 32, length: int = 32) -> tuple[Any, Any]:
    return jnp.ones((batch, length, 64)), jnp.zeros((batch,), jnp.int32)


def tokens(batch: int = 16, length: int = 64, vocabulary: int = 256) -> tuple[Any, Any]:
    ids = jax.random.randint(jax.random.key(0), (batch, length), 0, vocabulary)
    return ids, ids


#: Name -> (model class, batch). The models of the CPU benchmarks.
TABLE: dict[str, tuple[type[nn.Module], Any]] = {
    "MLP": (MLP, vectors),
    "CNN + BatchNorm": (CNN, images),
    "Transformer": (Encoder, tokens),
    "LSTM": (LSTM, sequences),
}
