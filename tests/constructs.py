"""Linen modules that use every way Flax offers to make and run a module, none with a dtype of its own."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from helpers import CASES, Case, images, tokens, vectors


class RawParam(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 8))
        tree = self.param("tree", lambda key: {"b": jnp.zeros(8), "steps": jnp.arange(8)})
        return x @ w + tree["b"]


class Setup(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(16), nn.Dense(16)]
        self.named = {"head": nn.Dense(8)}
        self.scale = self.param("scale", nn.initializers.ones, (16,))

    def __call__(self, x):
        for layer in self.layers:
            x = nn.relu(layer(x)) * self.scale
        return self.named["head"](x)


class Methods(nn.Module):
    def setup(self):
        self.encoder, self.decoder = nn.Dense(16), nn.Dense(8)

    def encode(self, x):
        return self.encoder(x)

    def __call__(self, x):
        return self.decoder(nn.tanh(self.encode(x)))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 16)
        return embed.attend(nn.Dense(16)(embed(tokens)))


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(x.shape[-1])
        return dense(nn.relu(dense(x)))


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Pair()({"a": x, "b": [x * 2, None, 3]}, mask=jnp.ones(x.shape, bool))


class Pair(nn.Module):
    @nn.compact
    def __call__(self, tree, *, mask):
        return nn.Dense(8)(jnp.where(mask, tree["a"] + tree["b"][0], 0) * tree["b"][2])


class Lifted(nn.Module):
    transform: Any

    @nn.compact
    def __call__(self, x):
        return self.transform(Shared)()(x)


class RematMethod(nn.Module):
    @nn.compact
    def __call__(self, x):
        return self.block(self.block(x, 0), 1)

    @functools.partial(nn.remat, static_argnums=(2,))
    @nn.nowrap
    def block(self, x, i):
        return nn.Dense(x.shape[-1], name=f"dense{i}")(x)


class ScanFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(layer, carry, x):
            carry = carry + layer(x)
            return carry, carry

        scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        carry, _ = scan(nn.Dense(8), jnp.zeros((len(x), 8), x.dtype), x)
        return carry


class Cell(nn.Module):
    """A recurrent cell that is no RNNCellBase, with a carry that starts in float32."""

    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(8)(x) + nn.Dense(8)(carry))
        return carry, carry


class ScanCell(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
        carry, _ = scan()(jnp.zeros((len(x), 8)), x)
        return carry


class UserCell(nn.RNNCellBase):
    features: int = 8

    @nn.compact
    def __call__(self, carry, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        carry = nn.tanh(x @ w + nn.Dense(self.features)(carry))
        return carry, carry

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self):
        return 1


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.Dense(16, kernel_init=init)(x)
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        w = self.param("w", init, (16, 8))
        return x @ w


class Stateful(nn.Module):
    @nn.compact
    def __call__(self, x):
        count = self.variable("counts", "n", lambda: jnp.zeros((), jnp.int32))
        mean = self.variable("stats", "mean", jnp.zeros, (8,))
        x = nn.Dense(8)(x)
        self.sow("intermediates", "features", x)
        if not self.is_initializing():
            count.value += 1
            mean.value = 0.9 * mean.value + 0.1 * x.astype(jnp.float32).mean(0)
        return x


class ShareScope(nn.Module):
    @nn.compact
    def __call__(self, x):
        return LoRA(nn.Dense(8), 2)(x)


class LoRA(nn.Module):
    base: nn.Dense
    rank: int

    def setup(self):
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        a = self.param("A", nn.initializers.normal(), (x.shape[-1], self.rank))
        b = self.param("B", nn.initializers.normal(), (self.rank, self.base.features))
        return self.base(x) + x @ a @ b


class OwnDtype(nn.Module):
    """What published models do: float32 for every layer, and self.dtype handed to an initialiser."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (x.shape[-1], 16), self.dtype)
        v = self.param("v", lambda key: jax.random.normal(key, (16, 16), self.dtype))
        x = nn.Dense(16, dtype=self.dtype, param_dtype=jnp.float32)(x @ w)
        return Child(dtype=self.dtype)(x.astype(self.dtype) @ v)


class Child(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.normal(), (x.shape[-1], 8), self.dtype)


class DotGeneral(nn.Module):
    @nn.compact
    def __call__(self, x):
        def dot_general(*args, **kwargs):
            return jax.lax.dot_general(*args, **kwargs)

        x = nn.Dense(16, dot_general=dot_general)(x)
        return nn.DenseGeneral((2, 4), dot_general_cls=lambda: dot_general)(x).reshape(len(x), 8)


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.ConvTranspose(8, (2, 2), (2, 2))(x)
        x = nn.ConvLocal(4, (3, 3), (2, 2))(x)
        x = nn.Einsum((4, 8), "...a,ab->...b")(x)
        return nn.PReLU()(x).mean((1, 2))


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        x = nn.LayerNorm()(x) + nn.RMSNorm()(x) + nn.GroupNorm(2)(x)
        x = nn.InstanceNorm()(x[:, None, :])[:, 0]
        x = nn.SpectralNorm(nn.Dense(8))(x, update_stats=True)
        return nn.WeightNorm(nn.Dense(8))(x)


class Dropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=False)(nn.Dense(64)(x))
        return nn.Dense(8)(x)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(2, normalize_qk=True, dropout_rate=0.1, deterministic=False)
        return attend(x, mask=mask, sow_weights=True)


CELLS = {
    "lstm": lambda: nn.LSTMCell(8),
    "optimized_lstm": lambda: nn.OptimizedLSTMCell(8),
    "gru": lambda: nn.GRUCell(8),
    "mgu": lambda: nn.MGUCell(8),
    "simple": lambda: nn.SimpleCell(8),
    "user": lambda: UserCell(8),
}
sequences = vectors(2, 5, 8)
stack = functools.partial(
    nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=0, out_axes=0
)

CONSTRUCTS = [
    Case("raw_param", RawParam, vectors(4, 8)),
    Case("setup", Setup, vectors(4, 8)),
    Case("methods", Methods, vectors(4, 8)),
    Case("tied", Tied, tokens),
    Case("shared", Shared, vectors(4, 8)),
    Case("nested", Nested, vectors(4, 8)),
    Case("remat", lambda: Lifted(nn.remat), vectors(4, 8)),
    Case("jit", lambda: Lifted(nn.jit), vectors(4, 8)),
    Case("vmap", lambda: Lifted(stack), vectors(3, 4, 8)),
    Case("remat_method", RematMethod, vectors(4, 8)),
    Case("scan_function", ScanFunction, sequences),
    Case("scan_cell", ScanCell, sequences),
    Case("partitioned", Partitioned, vectors(4, 8)),
    Case("stateful", Stateful, vectors(4, 8)),
    Case("share_scope", ShareScope, vectors(4, 8)),
    Case("own_dtype", OwnDtype, vectors(4, 8)),
    Case("dot_general", DotGeneral, vectors(4, 8)),
    Case("convolutions", Convolutions, images),
    Case("norms", Norms, vectors(4, 8)),
    Case("dropout", Dropout, vectors(4, 8)),
    Case("attention", Attention, sequences),
    Case("sequential", lambda: nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)]), vectors(4, 8)),
    Case("bidirectional", lambda: nn.Bidirectional(nn.RNN(nn.GRUCell(8)), nn.RNN(nn.LSTMCell(8))), sequences),
    Case(
        "conv_lstm",
        lambda: nn.RNN(nn.ConvLSTMCell(4, (3, 3))),
        vectors(2, 3, 8, 8, 2),
    ),
    *(Case(f"rnn_{name}", lambda cell=cell: nn.RNN(cell()), sequences) for name, cell in CELLS.items()),
    *CASES,
]
