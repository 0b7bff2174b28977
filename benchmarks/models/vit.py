"""ViT: a pre-norm encoder of patches; DiT: one whose norms are steered by the noise level, for diffusion.

Dosovitskiy et al., An Image is Worth 16x16 Words, 2021: ViT-B/16 without dropout.
Peebles and Xie, Scalable Diffusion Models with Transformers, 2023: DiT-B/4 on latents.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy, images, squared_error


class Layer(nn.Module):
    """Attention and a feed-forward network of four times the width."""

    heads: int

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class ViT(nn.Module):
    """Images `[B, side, side, 3]` to logits `[B, classes]`."""

    side: int = 224
    patch: int = 16
    hidden: int = 768
    heads: int = 12
    layers: int = 12
    classes: int = 1000

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(self.hidden, (self.patch, self.patch), self.patch, padding="VALID")(image)
        x = x.reshape(x.shape[0], -1, self.hidden)
        token = self.param("class", nn.initializers.zeros, (1, 1, self.hidden), jnp.float32)
        x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]), jnp.float32)
        for i in range(self.layers):
            x = Layer(self.heads, name=f"layer_{i}")(x)
        return nn.Dense(self.classes)(nn.LayerNorm()(x)[:, 0])


def modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalises without parameters of its own; shifts and scales `[B, 1, D]` by the noise level."""
    return nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift


class DiTLayer(nn.Module):
    """A layer whose norms and shortcuts are steered by an embedding `[B, 1, D]`."""

    heads: int

    @nn.compact
    def __call__(self, x, c):
        steer = nn.Dense(6 * x.shape[-1], kernel_init=nn.initializers.zeros)(nn.silu(c))
        a, b, gate, d, e, other = jnp.split(steer, 6, axis=-1)
        x = x + gate * nn.MultiHeadDotProductAttention(self.heads)(modulated(x, a, b))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(modulated(x, d, e)))
        return x + other * nn.Dense(x.shape[-1])(y)


class DiT(nn.Module):
    """Noisy latents `[B, side, side, 4]`, noise levels `[B]` and labels `[B]` to the noise."""

    side: int = 32
    patch: int = 4
    hidden: int = 768
    heads: int = 12
    layers: int = 12
    classes: int = 1000

    @nn.compact
    def __call__(self, latent, level, label):
        channels = latent.shape[-1]
        x = nn.Conv(self.hidden, (self.patch, self.patch), self.patch, padding="VALID")(latent)
        grid = x.shape
        x = x.reshape(grid[0], -1, self.hidden)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]), jnp.float32)
        angles = level[:, None] * 10000.0 ** (-jnp.arange(128) / 128)
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        c = nn.Dense(self.hidden)(nn.silu(nn.Dense(self.hidden)(waves)))
        c = (c + nn.Embed(self.classes + 1, self.hidden)(label))[:, None]
        for i in range(self.layers):
            x = DiTLayer(self.heads, name=f"layer_{i}")(x, c)
        shift, scale = jnp.split(nn.Dense(2 * self.hidden)(nn.silu(c)), 2, axis=-1)
        x = nn.Dense(self.patch**2 * channels)(modulated(x, shift, scale))
        x = x.reshape(*grid[:3], self.patch, self.patch, channels).swapaxes(2, 3)
        return x.reshape(latent.shape)


def make(size: str) -> Model:
    """ViT on images of 16, 32 or 224 pixels; the full one has 86 million parameters."""
    module, batch = {
        "tiny": (ViT(16, 4, 32, 2, 2, 10), 4),
        "small": (ViT(32, 4, 192, 3, 4, 100), 4),
        "full": (ViT(), 64),
    }[size]
    return Model(module, images(batch, module.side, module.classes), cross_entropy)


def make_dit(size: str) -> Model:
    """DiT on latents of 8, 16 or 32 pixels; the full one has 130 million parameters."""
    module, batch = {
        "tiny": (DiT(8, 2, 32, 2, 2, 10), 4),
        "small": (DiT(16, 4, 192, 3, 4, 100), 4),
        "full": (DiT(), 64),
    }[size]

    def draw(key: jax.Array):
        keys = jax.random.split(key, 4)
        noise = jax.random.normal(keys[0], (batch, module.side, module.side, 4))
        level = jax.random.uniform(keys[1], (batch,))
        weight = level[:, None, None, None]
        latent = jax.random.normal(keys[2], noise.shape) * jnp.sqrt(1 - weight) + noise * jnp.sqrt(weight)
        return (latent, 1000 * level, jax.random.randint(keys[3], (batch,), 0, module.classes)), noise

    return Model(module, draw, squared_error)
