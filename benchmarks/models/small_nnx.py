"""The models of `small` as NNX modules; `dtype=jnp.float16` makes the hand-written version here, too."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import small


class MLP(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        widths = (256, 512, 512, 512)
        self.layers = nnx.List(
            nnx.Linear(a, b, dtype=dtype, rngs=rngs) for a, b in itertools.pairwise(widths)
        )
        self.head = nnx.Linear(512, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


class ConvBlock(nnx.Module):
    def __init__(self, features, width, *, rngs, dtype=None):
        self.conv = nnx.Conv(features, width, (3, 3), strides=2, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.conv(x)))


class CNN(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        widths = (3, 16, 32, 64)
        self.blocks = nnx.List(ConvBlock(a, b, dtype=dtype, rngs=rngs) for a, b in itertools.pairwise(widths))
        self.head = nnx.Linear(64, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class LSTM(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.rnn = nnx.RNN(nnx.LSTMCell(64, 128, dtype=dtype, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(128, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


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


#: Name -> (model class, batch), as in `small.TABLE`.
TABLE: dict[str, tuple[type[nnx.Module], Any]] = {
    "MLP": (MLP, small.vectors),
    "CNN + BatchNorm": (CNN, small.images),
    "Transformer": (Encoder, small.tokens),
    "LSTM": (LSTM, small.sequences),
}
