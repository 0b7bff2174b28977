"""Six more structures, as they are found in published code: for what ten published models do not have."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models._model import Model, squared_error


class Mixer(nn.Module):
    """MLP-Mixer: dense layers over patches and over channels in turn."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(24, (4, 4), strides=4, name="stem")(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for i in range(2):
            y = nn.LayerNorm(name=f"norm_{i}a")(x).swapaxes(1, 2)
            y = nn.Dense(16, name=f"tokens_{i}a")(y)
            x = x + nn.Dense(16, name=f"tokens_{i}b")(nn.gelu(y)).swapaxes(1, 2)
            y = nn.Dense(48, name=f"channels_{i}a")(nn.LayerNorm(name=f"norm_{i}b")(x))
            x = x + nn.Dense(24, name=f"channels_{i}b")(nn.gelu(y))
        return nn.Dense(10, name="head")(x.mean(1))


class Block(nn.Module):
    """Pre-norm Transformer block, as the body of a scan."""

    @nn.compact
    def __call__(self, x, _):
        y = nn.RMSNorm(name="norm_a")(x)
        x = x + nn.SelfAttention(2, name="attention")(y)
        y = nn.RMSNorm(name="norm_b")(x)
        gate, up = nn.Dense(48, use_bias=False, name="gate")(y), nn.Dense(48, use_bias=False, name="up")(y)
        return x + nn.Dense(24, use_bias=False, name="down")(nn.silu(gate) * up), None


class Scanned(nn.Module):
    """Gated Transformer whose layers are one scan over remat, with an embedding and a head of its own."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 24, name="embedding")(tokens)
        layers = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(64, name="head")(nn.RMSNorm(name="norm")(x))


class Residual(nn.Module):
    """Convolutions around a group norm, with a shortcut, shifted by the noise level."""

    width: int

    @nn.compact
    def __call__(self, x, embedding):
        y = nn.Conv(self.width, (3, 3), name="conv_a")(nn.silu(nn.GroupNorm(4, name="norm_a")(x)))
        y = y + nn.Dense(self.width, name="shift")(embedding)[:, None, None]
        y = nn.Conv(self.width, (3, 3), name="conv_b")(nn.silu(nn.GroupNorm(4, name="norm_b")(y)))
        return nn.Conv(self.width, (1, 1), name="shortcut")(x) + y


class Diffusion(nn.Module):
    """Denoiser with Fourier features of the noise level, and one level of a U-Net."""

    @nn.compact
    def __call__(self, x, sigma):
        angles = jnp.log(sigma)[:, None] / 4 * (2 * jnp.pi * 2.0 ** jnp.arange(8))
        embedding = nn.silu(
            nn.Dense(32, name="embed")(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        )
        skip = nn.Conv(16, (3, 3), name="stem")(x)
        y = Residual(32, name="down")(nn.avg_pool(skip, (2, 2), (2, 2)), embedding)
        y = jax.image.resize(y, (*x.shape[:3], 32), "nearest")
        y = Residual(16, name="up")(jnp.concatenate([y, skip], -1), embedding)
        return nn.Conv(3, (3, 3), name="out")(nn.silu(nn.GroupNorm(4, name="norm")(y)))


class Recommender(nn.Module):
    """Deep and cross network on look-ups in three tables."""

    @nn.compact
    def __call__(self, ids, dense):
        x = [nn.Embed(50, 8, name=f"table_{i}")(ids[:, i]) for i in range(3)]
        x = start = jnp.concatenate([*x, dense], -1)
        for i in range(2):
            x = start * nn.Dense(x.shape[-1], name=f"cross_{i}")(x) + x
        y = nn.relu(nn.Dense(32, name="deep_0")(start))
        y = nn.relu(nn.Dense(16, name="deep_1")(y))
        return nn.Dense(2, name="head")(jnp.concatenate([x, y], -1))


class Recurrent(nn.Module):
    """Two directions of gated recurrent cells, and attention over time."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="project")(x)
        forward = nn.RNN(nn.GRUCell(12, name="cell_a"), name="forward")(x)
        backward = nn.RNN(nn.LSTMCell(12, name="cell_b"), name="backward", reverse=True, keep_order=True)(x)
        x = jnp.concatenate([forward, backward], -1)
        weights = nn.softmax(nn.Dense(1, name="score")(jnp.tanh(x)), axis=1)
        return nn.Dense(5, name="head")((weights * x).sum(1))


class Graph(nn.Module):
    """Messages along edges, summed at their ends."""

    @nn.compact
    def __call__(self, nodes, edges):
        x = nn.Dense(16, name="encode")(nodes)
        for i in range(2):
            message = jnp.concatenate([x[edges[:, 0]], x[edges[:, 1]]], -1)
            message = nn.relu(nn.Dense(16, name=f"message_{i}")(message))
            summed = jax.ops.segment_sum(message, edges[:, 1], x.shape[0])
            x = nn.LayerNorm(name=f"norm_{i}")(x + nn.Dense(16, name=f"update_{i}")(summed))
        return nn.Dense(3, name="readout")(x.mean(0, keepdims=True))


def loss(outputs, targets):
    """Half of the mean square distance, in float32."""
    return squared_error(outputs, targets) / 2


normal, integers = jax.random.normal, jax.random.randint
_DRAWN = {
    "MLP-Mixer": (Mixer(), lambda key: ((normal(key, (4, 16, 16, 3)),), normal(key, (4, 10)))),
    "Scanned gated Transformer": (
        Scanned(),
        lambda key: ((integers(key, (4, 12), 0, 64),), normal(key, (4, 12, 64))),
    ),
    "Diffusion U-Net": (
        Diffusion(),
        lambda key: (
            (normal(key, (4, 8, 8, 3)), jnp.exp(normal(key, (4,)))),
            normal(jax.random.fold_in(key, 1), (4, 8, 8, 3)),
        ),
    ),
    "Deep and cross network": (
        Recommender(),
        lambda key: ((integers(key, (32, 3), 0, 50), normal(key, (32, 8))), normal(key, (32, 2))),
    ),
    "GRU, LSTM and attention": (
        Recurrent(),
        lambda key: ((normal(key, (4, 10, 6)),), normal(key, (4, 5))),
    ),
    "Message passing": (
        Graph(),
        lambda key: ((normal(key, (20, 5)), integers(key, (60, 2), 0, 20)), normal(key, (1, 3))),
    ),
}
STRUCTURES = {name: Model(module, draw, loss) for name, (module, draw) in _DRAWN.items()}
