"""Deep Speech 2: convolutions over a spectrogram, bidirectional recurrent layers, and CTC.

Amodei et al., Deep Speech 2: End-to-End Speech Recognition in English and Mandarin, ICML 2016.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.models._model import Model

LETTERS = 28  # a to z, space, apostrophe; the blank comes first.
CHARACTERS = 32  # With the blank, and padding to a multiple of 8.


def norm(x):
    """Batch normalisation over all but the last dimension."""
    return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)


def clipped_relu(x):
    return jnp.minimum(nn.relu(x), 20.0)


class DeepSpeech2(nn.Module):
    """Spectrograms `[B, T, F]` to logits `[B, T / 2, 32]`.

    Unlike the paper, batch normalisation stands in front of a recurrent layer and not inside it, between the
    product with the input and that with the state. No dropout; all spectrograms are of one length.

    Attributes:
      channels: of both convolutions.
      layers: recurrent ones.
      width: of the recurrent layers, whose two directions are added.
    """

    channels: int = 32
    layers: int = 7
    width: int = 880

    @nn.compact
    def __call__(self, x):
        def gru():
            return nn.RNN(nn.GRUCell(self.width))

        x = nn.Conv(self.channels, (11, 41), strides=(2, 2), use_bias=False)(x[..., None])
        x = clipped_relu(norm(x))
        x = nn.Conv(self.channels, (11, 21), strides=(1, 2), use_bias=False)(x)
        x = clipped_relu(norm(x))
        x = x.reshape(*x.shape[:2], -1)
        for _ in range(self.layers):
            x = norm(nn.Bidirectional(gru(), gru(), merge_fn=jnp.add)(x))
        return nn.Dense(CHARACTERS)(x)


def loss(logits, targets):
    """Mean of the CTC loss in float32; `targets` are letters `[B, N]` and 1.0 where they are padding."""
    unpadded = jnp.zeros(logits.shape[:2])
    return optax.ctc_loss(logits.astype(jnp.float32), unpadded, *targets).mean()


def make(size: str) -> Model:
    """Seven bidirectional layers of gated units, of a width that gives the paper's 68 million parameters."""
    module, batch, frames, bins, letters = {
        "tiny": (DeepSpeech2(4, 2, 16), 4, 32, 33, 4),
        "small": (DeepSpeech2(8, 3, 96), 2, 64, 161, 8),
        "full": (DeepSpeech2(), 32, 800, 161, 160),
    }[size]

    def draw(key: jax.Array):
        x, y, n = jax.random.split(key, 3)
        spectrograms = jax.random.normal(x, (batch, frames, bins))
        lengths = jax.random.randint(n, (batch, 1), letters // 2, letters + 1)
        paddings = jnp.where(jnp.arange(letters) < lengths, 0.0, 1.0)
        return (spectrograms,), (jax.random.randint(y, (batch, letters), 1, LETTERS + 1), paddings)

    return Model(module, draw, loss)
