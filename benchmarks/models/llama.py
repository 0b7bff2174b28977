"""Llama: a decoder with RMSNorm, rotary positions, grouped queries and gated layers; also with experts.

Touvron et al., LLaMA, 2023, with the grouped queries of Llama 3; cut to a few layers.
Fedus et al., Switch Transformers, 2022: Llama's layers with two of eight experts per token.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from benchmarks.models._model import Model, cross_entropy, next_tokens

INIT = nn.initializers.normal(0.02)
dense = functools.partial(nn.DenseGeneral, use_bias=False, kernel_init=INIT)


def rotated(x: jax.Array) -> jax.Array:
    """Rotates queries or keys `[B, L, heads, D]` by their positions."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nn.Module):
    """Causal attention on `[B, L, D]`; `groups` of the `heads` share keys and values."""

    heads: int
    groups: int

    @nn.compact
    def __call__(self, x):
        size = x.shape[-1] // self.heads
        q = rotated(dense((self.heads, size), name="q")(x))
        k = rotated(dense((self.groups, size), name="k")(x))
        v = dense((self.groups, size), name="v")(x)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return dense(x.shape[-1], axis=(-2, -1), name="out")(y)


class Gated(nn.Module):
    """The feed-forward network of Llama, `width` wide inside."""

    width: int

    @nn.compact
    def __call__(self, x):
        return dense(x.shape[-1])(nn.silu(dense(self.width)(x)) * dense(self.width)(x))


class Experts(nn.Module):
    """Gated networks of which each token goes to two, within the room that an expert has.

    `axis` is that of the mesh over which experts lie; tokens are sent to them and back.
    """

    width: int
    experts: int
    axis: str | None = None
    room: float = 1.25

    @nn.compact
    def __call__(self, x):
        batch, length, features = x.shape
        room = int(2 * length * self.room / self.experts)
        weights, chosen = jax.lax.top_k(nn.softmax(dense(self.experts, name="router")(x)), 2)
        picked = jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32)
        # The place of a token in its expert's queue; beyond the room it is dropped.
        place = jnp.cumsum(picked.reshape(batch, -1, self.experts), 1).reshape(picked.shape) * picked - 1
        place = jax.nn.one_hot(place, room, dtype=x.dtype)
        combine = jnp.einsum("blk,blke,blkec->blec", weights, picked.astype(x.dtype), place)
        dispatch = (combine > 0).astype(x.dtype)
        up, gate = (
            self.param(name, INIT, (self.experts, features, self.width), jnp.float32)
            for name in ("up", "gate")
        )
        down = self.param("down", INIT, (self.experts, self.width, features), jnp.float32)
        inside = self.placed(jnp.einsum("blec,bld->ebcd", dispatch, x), self.axis)
        inside = nn.silu(jnp.einsum("ebcd,edf->ebcf", inside, gate)) * jnp.einsum(
            "ebcd,edf->ebcf", inside, up
        )
        outside = self.placed(jnp.einsum("ebcf,efd->ebcd", inside, down), self.axis)
        outside = self.placed(outside, None, self.axis)
        return jnp.einsum("blec,ebcd->bld", combine.astype(x.dtype), outside)

    def placed(self, x: jax.Array, *axes: Any) -> jax.Array:
        return x if self.axis is None else jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


class Layer(nn.Module):
    """Attention and a gated network, or experts, each normalised before and added."""

    heads: int
    groups: int
    width: int
    experts: int = 0
    axis: str | None = None

    @nn.compact
    def __call__(self, x, _=None):
        x = x + Attention(self.heads, self.groups)(nn.RMSNorm()(x))
        network = Experts(self.width, self.experts, self.axis) if self.experts else Gated(self.width)
        return x + network(nn.RMSNorm()(x)), None


class Llama(nn.Module):
    """Tokens `[B, L]` to logits of those that follow.

    `scanned` compiles the equal layers once, and `remat` keeps only what goes from one to the next. `axis` is
    that of the mesh over which experts lie.
    """

    vocabulary: int = 32000
    length: int = 2048
    hidden: int = 2048
    heads: int = 16
    groups: int = 4
    width: int = 5632
    layers: int = 4
    experts: int = 0
    scanned: bool = False
    remat: bool = False
    axis: str | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.hidden, embedding_init=INIT)(tokens)
        each = self.heads, self.groups, self.width, self.experts, self.axis
        kind = nn.remat(Layer, prevent_cse=not self.scanned) if self.remat else Layer
        if self.scanned:
            layer = nn.scan(
                kind, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
            )
            x, _ = layer(*each, name="layers")(x, None)
        else:
            for i in range(self.layers):
                x, _ = kind(*each, name=f"layers_{i}")(x)
        return dense(self.vocabulary, name="head")(nn.RMSNorm()(x))


def make(size: str, **more: Any) -> Model:
    """Llama on sequences of 16, 32 or 2048 tokens; the full one has the widths of a billion parameters."""
    module, batch = {
        "tiny": (Llama(64, 16, 32, 4, 2, 64, 2, **more), 4),
        "small": (Llama(512, 32, 256, 8, 2, 704, 4, **more), 2),
        "full": (Llama(**more), 8),
    }[size]
    return Model(module, next_tokens(batch, module.length, module.vocabulary), cross_entropy)


def make_scanned(size: str) -> Model:
    """The same with `nn.scan` over its layers."""
    return make(size, scanned=True)


def make_moe(size: str) -> Model:
    """The same, with experts."""
    return make(size, experts=8)
