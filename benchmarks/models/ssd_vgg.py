"""SSD300: boxes and classes at six scales of VGG-16, learned from the hardest negatives.

Liu et al., SSD: Single Shot MultiBox Detector, ECCV 2016; base: Simonyan and Zisserman, Very Deep
Convolutional Networks for Large-Scale Image Recognition, ICLR 2015, configuration D.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model


class L2Normalize(nn.Module):
    """The channels of each pixel as a vector of unit length, times a learned scale per channel.

    Attributes:
      scale: at first.
    """

    scale: float = 20.0

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.constant(self.scale), (x.shape[-1],))
        return scale * x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-10)


class SSD(nn.Module):
    """Images `[B, H, W, 3]` to offsets `[B, boxes, 4]` and logits `[B, boxes, classes]`.

    The published network has 21 classes, background among them; three more that no box ever has make the
    channels of all heads multiples of 8. Its base is pre-trained; here it begins as He et al. say, 2015.

    Attributes:
      stages: of the base; width and number of 3x3 convolutions. The fourth one's result has boxes, too.
      top: channels of the two convolutions that stand for the fully connected layers.
      dilation: of the first of them.
      extras: width inside and outside, and stride; without a stride, they don't pad.
      boxes: per pixel at each scale.
      classes: the first is the background.
    """

    stages: Sequence[tuple[int, int]] = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
    top: int = 1024
    dilation: int = 6
    extras: Sequence[tuple[int, int, int]] = ((256, 512, 2), (128, 256, 2), (128, 256, 1), (128, 256, 1))
    boxes: Sequence[int] = (4, 6, 6, 6, 4, 4)
    classes: int = 24

    @nn.compact
    def __call__(self, x):
        def conv(x, width, window, **kwargs):
            layer = nn.Conv(width, (window, window), kernel_init=nn.initializers.he_normal(), **kwargs)
            return nn.relu(layer(x))

        scales = []
        for stage, (width, depth) in enumerate(self.stages):
            for _ in range(depth):
                x = conv(x, width, 3)
            if stage == 3:
                scales.append(L2Normalize()(x))
            # Of an odd number of pixels, the last one stands alone: 75 become 38.
            window, stride = (2, 2) if stage < 4 else (3, 1)
            x = nn.max_pool(x, (window, window), (stride, stride), "SAME")
        x = conv(x, self.top, 3, kernel_dilation=self.dilation)
        x = conv(x, self.top, 1)
        scales.append(x)
        for inside, outside, stride in self.extras:
            padding = [(1, 1), (1, 1)] if stride > 1 else "VALID"
            x = conv(conv(x, inside, 1), outside, 3, strides=stride, padding=padding)
            scales.append(x)
        offsets, logits = [], []
        for x, boxes in zip(scales, self.boxes, strict=True):
            for parts, size in ((offsets, 4), (logits, self.classes)):
                parts.append(nn.Conv(boxes * size, (3, 3))(x).reshape(len(x), -1, size))
        return jnp.concatenate(offsets, 1), jnp.concatenate(logits, 1)


def multibox_loss(outputs: Any, targets: Any) -> jax.Array:
    """Smooth L1 of the boxes that match, cross-entropy of them and three times as many others, in float32.

    The others are those of an image with the largest losses. `targets` are labels `[B, boxes]` and offsets.
    """
    offsets, logits = (x.astype(jnp.float32) for x in outputs)
    labels, wanted = targets
    matched = labels > 0
    away = jnp.abs(offsets - wanted)
    smooth = jnp.where(away < 1, away**2 / 2, away - 0.5).sum(-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    entropy = jax.nn.logsumexp(logits, axis=-1) - chosen
    order = jnp.argsort(jnp.where(matched, -jnp.inf, jax.lax.stop_gradient(entropy)), descending=True)
    rank = jnp.argsort(order)
    hard = ~matched & (rank < 3 * matched.sum(-1, keepdims=True))
    total = jnp.sum(matched * smooth) + jnp.sum((matched | hard) * entropy)
    return total / jnp.maximum(matched.sum(), 1)


def matched_boxes(batch: int, side: int, boxes: int, classes: int) -> Callable[[jax.Array], Any]:
    """Draws normally distributed images, labels that are background 49 times of 50, and offsets."""

    def draw(key: jax.Array) -> Any:
        x, match, label, offset = jax.random.split(key, 4)
        matched = jax.random.bernoulli(match, 0.02, (batch, boxes))
        labels = jnp.where(matched, jax.random.randint(label, (batch, boxes), 1, classes), 0)
        images = jax.random.normal(x, (batch, side, side, 3))
        return (images,), (labels, jax.random.normal(offset, (batch, boxes, 4)))

    return draw


def make(size: str) -> Model:
    """SSD on images of 96 or 300 pixels, with boxes at four or six scales."""
    fewer = {"dilation": 2, "boxes": (4, 6, 6, 4), "classes": 8}
    tiny = ((8, 1), (16, 1), (16, 2), (32, 2), (32, 2))
    small = ((8, 2), (16, 2), (32, 3), (64, 3), (64, 3))
    module, batch, side, boxes = {
        "tiny": (SSD(tiny, 64, extras=((16, 32, 2), (16, 32, 1)), **fewer), 4, 96, 850),
        "small": (SSD(small, 128, extras=((32, 64, 2), (16, 32, 1)), **fewer), 2, 96, 850),
        "full": (SSD(), 32, 300, 8732),
    }[size]
    # Of the published classes: those that pad the full one are never drawn.
    drawn = 21 if size == "full" else module.classes
    return Model(module, matched_boxes(batch, side, boxes, drawn), multibox_loss)
