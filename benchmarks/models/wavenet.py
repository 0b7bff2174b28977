"""WaveNet: dilated causal convolutions over audio samples, without conditioning.

van den Oord et al., WaveNet: A Generative Model for Raw Audio, 2016; it gives no widths, these are
of van den Oord et al., Parallel WaveNet, ICML 2018.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, cross_entropy, next_tokens

LEVELS = 256  # Of a sample after mu-law companding.


class Layer(nn.Module):
    """A dilated causal convolution with a gate, `[B, T, C]` to `[B, T, C]` and a skip `[B, T, skip]`.

    Attributes:
      gated: channels of the gated unit; twice as many leave the convolution.
      skip: channels that the end of the model gets.
      dilation: distance of the two samples that the kernel sees.
    """

    gated: int
    skip: int
    dilation: int

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(2 * self.gated, (2,), kernel_dilation=self.dilation, padding="CAUSAL")(x)
        filtered, gate = jnp.split(y, 2, axis=-1)
        y = jnp.tanh(filtered) * nn.sigmoid(gate)
        return x + nn.Dense(x.shape[-1], name="residual")(y), nn.Dense(self.skip, name="skip")(y)


class WaveNet(nn.Module):
    """Samples `[B, T]`, integers below 256, to logits of the next ones `[B, T, 256]`. No dropout.

    What the last layer adds to its input goes nowhere, so that those parameters have zero gradients.

    Attributes:
      blocks: each with the dilations 1, 2, 4 and so on.
      depth: layers of a block.
      channels: from layer to layer.
      gated: channels of the gated units.
      skip: channels of the sum over all layers.
    """

    blocks: int = 3
    depth: int = 10
    channels: int = 512
    gated: int = 256
    skip: int = 256

    @nn.compact
    def __call__(self, samples):
        x = nn.Conv(self.channels, (2,), padding="CAUSAL")(jax.nn.one_hot(samples, LEVELS))
        skips = []
        for i in range(self.blocks * self.depth):
            x, skip = Layer(self.gated, self.skip, 2 ** (i % self.depth))(x)
            skips.append(skip)
        x = nn.relu(nn.Dense(self.skip)(nn.relu(sum(skips))))
        return nn.Dense(LEVELS)(x)


def make(size: str) -> Model:
    """Three blocks with dilations of 1 to 512 on 7680 samples, or fewer and narrower ones."""
    module, batch, length = {
        "tiny": (WaveNet(2, 4, 16, 8, 8), 2, 64),
        "small": (WaveNet(2, 10, 32, 32, 32), 1, 1024),
        "full": (WaveNet(), 8, 7680),
    }[size]
    return Model(module, next_tokens(batch, length, LEVELS), cross_entropy)
