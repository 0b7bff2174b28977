"""DLRM: numbers and categories to the chance of a click; nearly all of it is tables.

Naumov et al., Deep Learning Recommendation Model, 2019, with smaller tables.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.models._model import Model


def network(widths: tuple[int, ...]) -> nn.Sequential:
    """Dense layers with ReLU between them."""
    layers = [layer for width in widths for layer in (nn.Dense(width), nn.relu)]
    return nn.Sequential(layers[:-1])


class DLRM(nn.Module):
    """Numbers `[B, 13]` and categories `[B, tables]` to a logit `[B]`."""

    tables: int = 8
    rows: int = 100_000
    width: int = 64
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 256)

    @nn.compact
    def __call__(self, numbers, categories):
        dense = nn.relu(network((*self.bottom, self.width))(numbers))
        looked_up = [
            nn.Embed(self.rows, self.width, name=f"table_{i}")(categories[:, i]) for i in range(self.tables)
        ]
        vectors = jnp.stack([dense, *looked_up], axis=1)
        products = jnp.einsum("bik,bjk->bij", vectors, vectors)
        pairs = products[:, *jnp.tril_indices(self.tables + 1, -1)]
        return network((*self.top, 1))(jnp.concatenate([dense, pairs], axis=1))[:, 0]


def loss(logits: jax.Array, clicks: jax.Array) -> jax.Array:
    """Mean binary cross-entropy in float32."""
    return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), clicks).mean()


def make(size: str) -> Model:
    """DLRM with tables of 50, 1000 or 100,000 rows."""
    module, batch = {
        "tiny": (DLRM(3, 50, 8, (16,), (16,)), 8),
        "small": (DLRM(4, 1000, 32, (64,), (64,)), 64),
        "full": (DLRM(), 8192),
    }[size]

    def draw(key: jax.Array):
        keys = jax.random.split(key, 3)
        categories = jax.random.randint(keys[1], (batch, module.tables), 0, module.rows)
        clicks = jax.random.bernoulli(keys[2], 0.3, (batch,)).astype(jnp.float32)
        return (jax.random.normal(keys[0], (batch, 13)), categories), clicks

    return Model(module, draw, loss)
