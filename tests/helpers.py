"""The table of models that the tests share, and what they look at in a traced or compiled program."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class MLP(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for features in (64, 64):
            x = nn.relu(nn.Dense(features, dtype=self.dtype)(x))
        return nn.Dense(8, dtype=self.dtype)(x)


class CNN(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(8, dtype=self.dtype)(x.reshape(len(x), -1))


class ResNetBlock(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), dtype=self.dtype)(x)
        y = nn.GroupNorm(4, dtype=self.dtype)(x)
        y = nn.Conv(16, (3, 3), dtype=self.dtype)(nn.relu(y))
        y = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)
        return nn.Dense(8, dtype=self.dtype)(nn.relu(x + y).mean((1, 2)))


class EncoderLayer(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(128, dtype=self.dtype)(y))
        return x + nn.Dense(32, dtype=self.dtype)(y), None


class Encoder(nn.Module):
    dtype: Any = None
    lift: str = "none"

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32, dtype=self.dtype)
        x = embed(tokens)
        if self.lift == "none":
            for _ in range(2):
                x, _ = EncoderLayer(self.dtype)(x)
        else:
            layer = nn.remat(EncoderLayer) if self.lift == "scan+remat" else EncoderLayer
            stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            x, _ = stack(self.dtype)(x, None)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


class LSTM(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.OptimizedLSTMCell(32, dtype=self.dtype))(x)
        return nn.Dense(8, dtype=self.dtype)(x[:, -1])


@dataclasses.dataclass(frozen=True)
class Case:
    """A model that takes `dtype`, and an input for it."""

    name: str
    make: Callable[..., nn.Module]
    inputs: Callable[[], Any]

    def __repr__(self):
        return self.name


def images():
    return np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)


def tokens():
    return np.random.default_rng(0).integers(0, 64, (4, 16)).astype(np.int32)


def vectors(*shape):
    return lambda: np.random.default_rng(0).normal(size=shape).astype(np.float32)


CASES = [
    Case("mlp", MLP, vectors(16, 32)),
    Case("cnn", CNN, images),
    Case("resnet_block", ResNetBlock, images),
    Case("encoder", Encoder, tokens),
    Case("scanned_encoder", lambda dtype=None: Encoder(dtype, "scan"), tokens),
    Case("scanned_remat_encoder", lambda dtype=None: Encoder(dtype, "scan+remat"), tokens),
    Case("lstm", LSTM, vectors(4, 6, 16)),
]


def loss_of(model, variables, x):
    """A loss over the outputs, with mutable collections updated."""
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params):
        out, new = model.apply({"params": params, **state}, x, mutable=list(state))
        return jnp.mean(out.astype(jnp.float32) ** 2), new

    return loss


def equations(jaxpr):
    """All equations of a jaxpr, inner jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda v: hasattr(v, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from equations(getattr(inner, "jaxpr", inner))


def is_of_one_term(eqn):
    """Whether it is a sum over axes of size 1: the gradient of `x[:, None]`."""
    return eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def products(function, *args):
    """How often each (primitive, operand dtypes) occurs among the products of a traced function."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    return collections.Counter(
        (e.primitive.name, *(v.aval.dtype.name for v in e.invars[:2]))
        for e in equations(jaxpr)
        if e.primitive.name in PRODUCTS
    )


def cost(compiled):
    """(bytes accessed, temporary bytes) of a compiled program."""
    return (
        compiled.cost_analysis()["bytes accessed"],
        compiled.memory_analysis().temp_size_in_bytes,
    )


def dtypes(tree):
    return jax.tree.map(lambda x: np.dtype(x.dtype).name, tree)


def paired(*parameters):
    """Cases for `parametrize` in which each value of each parameter occurs, and not each with all others.

    The values of each parameter follow one another, those of the shorter lists again and again.
    """
    lists = [list(values) for values in parameters]
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]
