"""ConvNeXt: depthwise convolutions of 7 x 7 with layer normalisation and shortcuts.

Liu et al., A ConvNet for the 2020s, 2022: ConvNeXt-T without stochastic depth.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy, images


class Block(nn.Module):
    """A depthwise convolution, and a layer four times as wide, on `[B, H, W, C]`."""

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(1e-6)(nn.Conv(width, (7, 7), feature_group_count=width)(x))
        y = nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(y)))
        return x + y * self.param("scale", nn.initializers.constant(1e-6), (width,), jnp.float32)


class ConvNeXt(nn.Module):
    """Images `[B, H, W, 3]` to logits `[B, classes]`."""

    widths: tuple[int, ...] = (96, 192, 384, 768)
    depths: tuple[int, ...] = (3, 3, 9, 3)
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, (width, depth) in enumerate(zip(self.widths, self.depths, strict=True)):
            side = 2 if i else 4
            x = x if i == 0 else nn.LayerNorm(1e-6)(x)
            x = nn.Conv(width, (side, side), side, padding="VALID")(x)
            x = x if i else nn.LayerNorm(1e-6)(x)
            for j in range(depth):
                x = Block(name=f"block_{i}_{j}")(x)
        return nn.Dense(self.classes)(nn.LayerNorm(1e-6)(x.mean((1, 2))))


def make(size: str) -> Model:
    """ConvNeXt on images of 16, 32 or 224 pixels; the full one has 28 million parameters."""
    module, batch, side = {
        "tiny": (ConvNeXt((8, 16), (1, 1), 10), 4, 16),
        "small": (ConvNeXt((32, 64, 128), (1, 1, 2), 100), 4, 32),
        "full": (ConvNeXt(), 32, 224),
    }[size]
    return Model(module, images(batch, side, module.classes), cross_entropy)
