"""Draws the figures of these pages from a real run: `python docs/figures.py`, which takes less than a minute.

A CNN learns to read scikit-learn's digits in float32. Then one backward pass is counted: how large the
gradients are, of weights and of activations. Run it again on the same versions and it writes the same bytes.
"""

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_policy as jmpp

IMAGES = Path(__file__).parent / "images"
BATCH_SIZE = 128

#: Names of an SVG's elements are random unless they are salted.
STYLE = {"svg.hashsalt": "jmp_policy", "savefig.facecolor": "white"}


class Digits(nn.Module):
    """Two convolutions and a head."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """From images to logits."""
        for layer, features in enumerate((16, 32)):
            x = nn.relu(nn.Conv(features, (3, 3), name=f"conv_{layer}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


def digits_loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy, all in float32."""
    logits = Digits().apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def trained(steps: int) -> tuple[Any, jax.Array, jax.Array]:
    """Parameters after some steps of Adam, and a batch."""
    digits = load_digits()
    images = jnp.asarray(digits.images[..., None] / 16, jnp.float32)
    labels = jnp.asarray(digits.target, jnp.int32)
    rows = np.random.default_rng(0).integers(len(labels), size=(steps + 1, BATCH_SIZE))
    params = Digits().init(jax.random.key(0), images[:1])["params"]
    tx = optax.adam(3e-3)

    @jax.jit
    def step(params: Any, state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
        grads = jax.grad(digits_loss)(params, images, labels)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for batch in rows[:-1]:
        params, state = step(params, state, images[batch], labels[batch])
    return params, images[rows[-1]], labels[rows[-1]]


def draw(spectrum: jmpp.report.GradientSpectrum, path: Path) -> None:
    """The magnitudes of gradients, over what float16 can hold."""
    with matplotlib.rc_context(STYLE):
        figure = spectrum.plot()
        figure.set_size_inches(5, 6.6)  # A telephone's width: the words are large enough to read there.
        figure.legends[0].remove()
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside upper left", fontsize=8, ncols=2
        )
        figure.axes[0].set_title("")
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Draws the figure and says what is in it."""
    IMAGES.mkdir(exist_ok=True)
    spectrum = jmpp.gradient_spectrum(digits_loss, *trained(steps=300))
    draw(spectrum, IMAGES / "gradient_spectrum.svg")
    print(spectrum)
    return 0


if __name__ == "__main__":
    sys.exit(main())
