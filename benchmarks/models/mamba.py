"""Mamba: a decoder of state spaces whose coefficients depend on the input.

Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023; four layers.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy, next_tokens

dense = functools.partial(nn.Dense, use_bias=False)


def _decays(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1.0, shape[1] + 1)), shape)


class Mixer(nn.Module):
    """The selective state space on `[B, L, D]`, twice as wide inside."""

    state: int

    @nn.compact
    def __call__(self, x):
        inside = 2 * x.shape[-1]
        u, gate = jnp.split(dense(2 * inside)(x), 2, axis=-1)
        u = nn.silu(nn.Conv(inside, (4,), padding=((3, 0),), feature_group_count=inside)(u))
        rank = max(x.shape[-1] // 16, 1)
        low, b, c = jnp.split(dense(rank + 2 * self.state)(u), (rank, rank + self.state), axis=-1)
        step = nn.softplus(nn.Dense(inside)(low))
        decay = -jnp.exp(self.param("log_decay", _decays, (inside, self.state)))
        keep = jnp.exp(step[..., None] * decay)
        add = (step * u)[..., None] * b[:, :, None]

        def joined(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, states = jax.lax.associative_scan(joined, (keep, add), axis=1)
        y = jnp.einsum("bldn,bln->bld", states, c)
        y = y + u * self.param("skip", nn.initializers.ones, (inside,), jnp.float32)
        return dense(x.shape[-1])(y * nn.silu(gate))


class Mamba(nn.Module):
    """Tokens `[B, L]` to logits of those that follow."""

    vocabulary: int = 50304
    length: int = 512
    hidden: int = 768
    state: int = 16
    layers: int = 4

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.hidden, embedding_init=nn.initializers.normal(0.02))
        x = embed(tokens)
        for i in range(self.layers):
            x = x + Mixer(self.state, name=f"layer_{i}")(nn.RMSNorm()(x))
        return embed.attend(nn.RMSNorm()(x))


def make(size: str) -> Model:
    """Mamba on sequences of 16, 32 or 512 tokens."""
    module, batch = {
        "tiny": (Mamba(64, 16, 32, 4, 2), 4),
        "small": (Mamba(512, 32, 256, 8, 4), 2),
        "full": (Mamba(), 4),
    }[size]
    return Model(module, next_tokens(batch, module.length, module.vocabulary), cross_entropy)
