"""ResNet-50 as an NNX module: the twin of `benchmarks.models.resnet`, with its sizes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flax import nnx

from benchmarks.models import resnet


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 one has the stride.

    Args:
      features: channels that come in.
      width: channels inside; four times as many leave.
      stride: of the 3x3 convolution.
    """

    def __init__(self, features: int, width: int, stride: int = 1, *, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, momentum=0.9, rngs=rngs)
        self.conv_0, self.norm_0 = conv(features, width, (1, 1)), norm(width)
        self.conv_1, self.norm_1 = conv(width, width, (3, 3), strides=stride), norm(width)
        # A scale of zero makes each block the identity at first.
        self.conv_2 = conv(width, 4 * width, (1, 1))
        self.norm_2 = norm(4 * width, scale_init=nnx.initializers.zeros)
        changes = stride > 1 or features != 4 * width
        self.shortcut = conv(features, 4 * width, (1, 1), strides=stride) if changes else None
        self.shortcut_norm = norm(4 * width) if changes else None

    def __call__(self, x):
        y = nnx.relu(self.norm_0(self.conv_0(x)))
        y = nnx.relu(self.norm_1(self.conv_1(y)))
        y = self.norm_2(self.conv_2(y))
        if self.shortcut is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return nnx.relu(x + y)


class ResNet(nnx.Module):
    """Images `[B, H, W, 3]` to logits `[B, classes]`.

    Args:
      blocks: per stage; (3, 4, 6, 3) make 50 layers.
      width: channels of the first stage.
      classes: of the result.
    """

    def __init__(
        self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000, *, rngs: nnx.Rngs
    ):
        padding = [(3, 3), (3, 3)]
        self.conv = nnx.Conv(3, width, (7, 7), strides=2, padding=padding, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List()
        features = width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(Bottleneck(features, width * 2**stage, stride, rngs=rngs))
                features = 4 * width * 2**stage
        self.head = nnx.Linear(features, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1), (1, 1)])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def make(size: str) -> tuple[Callable[..., nnx.Module], Any, Any]:
    """`(module, draw, loss)`: `module(rngs=rngs)` makes one; batches and the loss are the Linen twin's."""
    twin = resnet.make(size)
    module = functools.partial(ResNet, twin.module.blocks, twin.module.width, twin.module.classes)
    return module, twin.draw, twin.loss
