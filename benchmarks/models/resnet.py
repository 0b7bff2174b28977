"""ResNet-50: bottleneck blocks with batch normalisation.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016; strides as in version 1.5.
"""

from collections.abc import Sequence

import flax.linen as nn

from benchmarks.models._model import Model, cross_entropy, images


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 one has the stride.

    Attributes:
      width: channels inside; four times as many leave.
      stride: of the 3x3 convolution.
    """

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        def norm(name=None, **kwargs):
            return nn.BatchNorm(use_running_average=False, momentum=0.9, name=name, **kwargs)

        y = nn.relu(norm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), strides=self.stride, use_bias=False)(y)))
        # A scale of zero makes each block the identity at first.
        y = norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.width, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.width, (1, 1), strides=self.stride, use_bias=False, name="shortcut")(x)
            x = norm("shortcut_norm")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images `[B, H, W, 3]` to logits `[B, classes]`.

    Attributes:
      blocks: per stage; (3, 4, 6, 3) make 50 layers.
      width: channels of the first stage.
      classes: of the result.
    """

    blocks: Sequence[int] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (7, 7), strides=2, padding=[(3, 3), (3, 3)], use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=[(1, 1), (1, 1)])
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def make(size: str) -> Model:
    """ResNet-50 on images of 64 or 224 pixels; the tiny one has one block per stage."""
    module, batch, side = {
        "tiny": (ResNet((1, 1, 1, 1), 8, 16), 16, 64),
        "small": (ResNet(width=16, classes=16), 16, 64),
        "full": (ResNet(), 128, 224),
    }[size]
    return Model(module, images(batch, side, module.classes), cross_entropy)
