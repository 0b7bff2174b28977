"""Models in which one layer cannot compute in float16, each with a batch, a loss, and that layer's path."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Fourier(nn.Module):
    """Sine and cosine of eight times, `(batch, 8)`, each at a frequency of its own up to 2e4."""

    @nn.compact
    def __call__(self, x):
        angles = x * self.param("frequencies", lambda key: jnp.geomspace(1e3, 2e4, 8))
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class LogOfSoftmax(nn.Module):
    """Logarithms of probabilities: those that float16 makes zero are infinite."""

    @nn.compact
    def __call__(self, x):
        return jnp.log(nn.softmax(x))


class NoiseConditioned(nn.Module):
    @nn.compact
    def __call__(self, x, sigma):
        shift = nn.Dense(16, name="embed")(Fourier(name="fourier")(sigma))
        x = nn.tanh(nn.Dense(16, name="first")(x) + shift)
        return nn.Dense(4, name="last")(x)


class Tables(nn.Module):
    """50,000 tokens look up one of two rows: the row's gradient is a sum of half terms, one by one."""

    @nn.compact
    def __call__(self, x, segments):
        x = nn.Dense(8, name="first")(x)
        x = x + nn.Embed(2, 8, name="segments")(segments)
        return nn.Dense(1, name="last")(x)


class LargeActivations(nn.Module):
    """A layer whose outputs are of the size 1e5, and are normalised."""

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8, name="first")(x))
        x = nn.Dense(8, kernel_init=nn.initializers.normal(6e4), name="large")(x)
        return nn.Dense(4, name="last")(nn.LayerNorm(name="norm")(x))


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16, name="first")(x))
        return LogOfSoftmax(name="log")(nn.Dense(6, kernel_init=nn.initializers.normal(4.0), name="last")(x))


def _normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def _square(outputs, targets):
    return jnp.mean(jnp.square(outputs.astype(jnp.float32) - targets))


def _negative_log(outputs, targets):
    return -jnp.mean(jnp.take_along_axis(outputs.astype(jnp.float32), targets[:, None], 1))


#: Name -> module, inputs, targets, loss, paths of the layers that must be in float32.
PLANTED = {
    "Fourier features of 2e4": (
        NoiseConditioned(),
        (_normal(0, 8, 8), jnp.exp(_normal(1, 8, 8))),
        _normal(2, 8, 4),
        _square,
        ["fourier"],
    ),
    "sum of 50,000 half terms": (
        Tables(),
        (_normal(0, 50_000, 8), jnp.arange(50_000) % 2),
        _normal(1, 50_000, 1) + 3,
        _square,
        ["segments"],
    ),
    "activations of 1e5": (LargeActivations(), (_normal(0, 8, 8),), _normal(1, 8, 4), _square, ["large"]),
    "logarithm of a softmax": (
        Classifier(),
        (_normal(0, 16, 8),),
        jnp.arange(16) % 6,
        _negative_log,
        ["log"],
    ),
}
