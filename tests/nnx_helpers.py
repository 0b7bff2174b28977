"""The NNX twins of the tests' table of models, and what they look at."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import images, tokens, vectors


class MLP(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.layers = nnx.List(
            [nnx.Linear(32, 64, dtype=dtype, rngs=rngs), nnx.Linear(64, 64, dtype=dtype, rngs=rngs)]
        )
        self.head = nnx.Linear(64, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


class CNN(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.conv1 = nnx.Conv(3, 8, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.bn1 = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), use_bias=False, dtype=dtype, rngs=rngs)
        self.bn2 = nnx.BatchNorm(16, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(256, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2)):
            x = nnx.max_pool(nnx.relu(norm(conv(x))), (2, 2), (2, 2))
        return self.head(x.reshape(len(x), -1))


class EncoderLayer(nnx.Module):
    def __init__(self, *, rngs, dtype=None, attention_fn=nnx.dot_product_attention):
        self.ln1 = nnx.LayerNorm(32, dtype=dtype, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            4, 32, decode=False, dtype=dtype, attention_fn=attention_fn, rngs=rngs
        )
        self.ln2 = nnx.LayerNorm(32, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(32, 128, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(128, 32, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class Encoder(nnx.Module):
    """Embedding tied to the output, two layers, in a loop, scanned, or scanned and remat'ed."""

    def __init__(self, *, rngs, dtype=None, lift="none", attention_fn=nnx.dot_product_attention):
        self.lift = lift
        self.embed = nnx.Embed(64, 32, dtype=dtype, rngs=rngs)
        make = lambda rngs: EncoderLayer(rngs=rngs, dtype=dtype, attention_fn=attention_fn)  # noqa: E731
        if lift == "none":
            self.layers = nnx.List([make(rngs) for _ in range(2)])
        else:
            self.layers = nnx.vmap(make)(nnx.Rngs(params=jax.random.split(rngs.params(), 2)))
        self.norm = nnx.LayerNorm(32, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.lift == "none":
            for layer in self.layers:
                x = layer(x)
        else:
            run = lambda x, layer: layer(x)  # noqa: E731
            run = nnx.remat(run) if self.lift == "scan+remat" else run
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        return self.embed.attend(self.norm(x))


class LSTM(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(16, 32, dtype=dtype, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(32, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x)[:, -1])


class Raw(nnx.Module):
    """Parameters of its own, used in every way; by hand with explicit casts."""

    def __init__(self, *, rngs, dtype=None):
        self.dtype = dtype
        self.w = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (32, 16)))
        self.parts = nnx.List([nnx.Param(jnp.ones(16)), nnx.Linear(16, 16, dtype=dtype, rngs=rngs)])
        self.scales = nnx.data({"out": nnx.Param(2 * jnp.ones(16))})

    def __call__(self, x):
        x, w, gain, scale = nnx.nn.dtypes.promote_dtype(
            (x, self.w[...], self.parts[0][...], self.scales["out"][...]), dtype=self.dtype
        )
        return jnp.tanh(self.parts[1]((x @ w) * gain)) * scale


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that takes `rngs` and `dtype`, and an input for it."""

    name: str
    make: Callable[..., nnx.Module]
    inputs: Callable[[], Any]

    def __call__(self, dtype=None, **kwargs):
        return self.make(rngs=nnx.Rngs(0), dtype=dtype, **kwargs)

    def __repr__(self):
        return self.name


def encoder(lift):
    return lambda **kwargs: Encoder(lift=lift, **kwargs)


CASES = [
    Case("mlp", MLP, vectors(16, 32)),
    Case("cnn", CNN, images),
    Case("encoder", encoder("none"), tokens),
    Case("scanned_encoder", encoder("scan"), tokens),
    Case("scanned_remat_encoder", encoder("scan+remat"), tokens),
    Case("lstm", LSTM, vectors(4, 6, 16)),
    Case("raw", Raw, vectors(16, 32)),
]


def loss_fn(model, x):
    return jnp.mean(model(x).astype(jnp.float32) ** 2)


def pure_gradient(model, loss=loss_fn):
    """`(params, x) -> ((loss, other state), gradients)` as a function of arrays, and the parameters."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, x):
        merged = nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest))
        value = loss(merged, x)
        return value, nnx.as_pure(nnx.state(merged, nnx.Not(nnx.Param)))

    return jax.value_and_grad(run, has_aux=True), params


def stored(model, kind=nnx.Param):
    """The dtypes in which a model's Variables are stored."""
    return {np.dtype(x.dtype).name for x in jax.tree.leaves(nnx.as_pure(nnx.state(model, kind)))}
