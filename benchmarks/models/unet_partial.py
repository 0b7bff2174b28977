"""U-Net with partial convolutions, which fills holes of images: masks decide, division renormalises.

Liu et al., Image Inpainting for Irregular Holes Using Partial Convolutions, ECCV 2018; of its
losses, the two per pixel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model


class PartialConv(nn.Module):
    """A convolution of what is valid, divided by how much of its window is valid.

    Attributes:
      features: channels of the result.
      window: side of the kernel.
      stride: both ways.
      bias: added where the window has seen anything.
    """

    features: int
    window: int
    stride: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x, mask):
        """`x` is `[B, H, W, C]`; `mask` is as `x` or has one channel, 1 where valid. New ones of each."""
        window, strides = (self.window, self.window), (self.stride, self.stride)
        padding = [(self.window // 2, self.window // 2)] * 2
        y = nn.Conv(self.features, window, strides, padding, use_bias=False)(x * mask)
        mask = jnp.broadcast_to(mask, x.shape)
        ones = jnp.ones((*window, x.shape[-1], 1), mask.dtype)
        valid = jax.lax.conv_general_dilated(
            mask, ones, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mask = jnp.sign(valid)
        y = y * (ones.size / jnp.maximum(valid, 1))
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,))
        return y * mask, mask


class UNet(nn.Module):
    """Images `[B, H, W, 3]` and masks `[B, H, W, 1]`, 1 where valid, to images `[B, H, W, 3]`.

    Three channels come in and leave, and 67 meet in the last layer; all other channels are multiples of 8.

    Attributes:
      channels: per level of the encoder; each halves the image.
      windows: of the encoder. The decoder's are 3.
    """

    channels: Sequence[int] = (64, 128, 256, 512, 512, 512, 512, 512)
    windows: Sequence[int] = (7, 5, 5, 3, 3, 3, 3, 3)

    @nn.compact
    def __call__(self, x, mask):
        def norm(name):
            return nn.BatchNorm(use_running_average=False, momentum=0.9, name=name)

        skips = []
        for level, (features, window) in enumerate(zip(self.channels, self.windows, strict=True)):
            skips.append((x, mask))
            x, mask = PartialConv(features, window, 2, bias=level == 0, name=f"down_{level}")(x, mask)
            x = nn.relu(norm(f"down_norm_{level}")(x) if level else x)
        for level in reversed(range(len(self.channels))):
            skip, skip_mask = skips[level]
            x, mask = _twice(x), _twice(mask)
            mask = [jnp.broadcast_to(mask, x.shape), jnp.broadcast_to(skip_mask, skip.shape)]
            x, mask = jnp.concatenate([x, skip], -1), jnp.concatenate(mask, -1)
            features = skip.shape[-1]
            x, mask = PartialConv(features, 3, bias=level == 0, name=f"up_{level}")(x, mask)
            if level:
                x = nn.leaky_relu(norm(f"up_norm_{level}")(x), 0.2)
        return x


def _twice(x: jax.Array) -> jax.Array:
    """Each pixel four times: nearest-neighbour up-sampling."""
    return x.repeat(2, 1).repeat(2, 2)


def holes_and_rest(images: jax.Array, targets: Any) -> jax.Array:
    """Distances per pixel in float32, six times as important in holes; `targets` are images and masks."""
    truth, mask = targets
    distances = jnp.abs(images.astype(jnp.float32) - truth)
    return jnp.mean(distances * mask) + 6 * jnp.mean(distances * (1 - mask))


def masked_images(batch: int, side: int) -> Callable[[jax.Array], Any]:
    """Draws normally distributed images with three rectangular holes each."""

    def draw(key: jax.Array) -> Any:
        x, centre, half = jax.random.split(key, 3)
        truth = jax.random.normal(x, (batch, side, side, 3))
        centre = jax.random.uniform(centre, (batch, 3, 2, 1), maxval=side)
        half = jax.random.uniform(half, (batch, 3, 2, 1), minval=side / 16, maxval=side / 4)
        inside = jnp.abs(jnp.arange(side) - centre) < half
        hole = jnp.any(inside[:, :, 0, :, None] & inside[:, :, 1, None, :], axis=1)
        mask = jnp.ones((batch, side, side, 1)) * ~hole[..., None]
        return (truth * mask, mask), (truth, mask)

    return draw


def make(size: str) -> Model:
    """A U-Net on images of 64, 128 or 512 pixels, which are 4 or 2 in the middle."""
    module, batch, side = {
        "tiny": (UNet((8, 16, 32, 32), (7, 5, 5, 3)), 8, 64),
        "small": (UNet((8, 16, 32, 64, 64), (7, 5, 5, 3, 3)), 4, 128),
        "full": (UNet(), 6, 512),
    }[size]
    return Model(module, masked_images(batch, side), holes_and_rest)
