"""What every model of the zoo has beside its layers: sizes, batches, a loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

SIZES = ("tiny", "small", "full")


@dataclasses.dataclass(frozen=True)
class Model:
    """One architecture at one size.

    Args:
      module: a Linen module in plain float32 Flax, without a word about precision.
      draw: `key -> (inputs, targets)`: a batch. `inputs` is the tuple of arguments of the module's call.
      loss: `(outputs, targets) -> scalar`, computed in float32.
    """

    module: nn.Module
    draw: Callable[[jax.Array], tuple[tuple[Any, ...], Any]]
    loss: Callable[[Any, Any], jax.Array]

    def batch(self, seed: int = 0) -> tuple[tuple[Any, ...], Any]:
        """A batch of arrays; the same for the same seed."""
        return self.draw(jax.random.key(seed))

    def shapes(self) -> tuple[tuple[Any, ...], Any]:
        """The types of a batch, without making one."""
        return jax.eval_shape(self.draw, jax.random.key(0))


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: Any = None) -> jax.Array:
    """Mean over labels, or over those with a weight, of softmax cross-entropy in float32."""
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    if weights is None:
        return losses.mean()
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def squared_error(outputs: Any, targets: Any) -> jax.Array:
    """Mean square of the difference in float32."""
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets))


def next_tokens(batch: int, length: int, vocabulary: int) -> Callable[[jax.Array], Any]:
    """Draws tokens, and for each the next one."""

    def draw(key: jax.Array) -> Any:
        tokens = jax.random.randint(key, (batch, length + 1), 0, vocabulary)
        return (tokens[:, :-1],), tokens[:, 1:]

    return draw


def images(batch: int, side: int, classes: int) -> Callable[[jax.Array], Any]:
    """Draws normally distributed images and labels."""

    def draw(key: jax.Array) -> Any:
        x, y = jax.random.split(key)
        return (jax.random.normal(x, (batch, side, side, 3)),), jax.random.randint(y, (batch,), 0, classes)

    return draw
