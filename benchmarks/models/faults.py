"""Small models with one part that half precision spoils, each by another kind of computation.

A part stands between two Dense layers, alone or in a block of its own. What it computes is right in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

WIDTH = 32
BATCH = 16


class Part(nn.Module):
    """A part of a model, whose parameters are its own."""

    fn: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        return self.fn(self, x)


class Net(nn.Module):
    """Dense layer, part, Dense layer."""

    fn: Callable[..., Any]
    nested: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(WIDTH, name="first")(x))
        x = Block(self.fn, name="block")(x) if self.nested else Part(self.fn, name="part")(x)
        return nn.Dense(4, name="last")(x)


class Block(nn.Module):
    """A part with a Dense layer and a norm around it."""

    fn: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="inner")(nn.LayerNorm(name="norm")(x))
        return Part(self.fn, name="part")(x)


def weight(module: nn.Module, name: str, values: Any) -> Any:
    """A parameter that begins at given values."""
    return module.param(name, lambda key: jnp.asarray(values, jnp.float32))


def fourier(module, x):
    times = jnp.linspace(0, 1, BATCH)[:, None].astype(x.dtype)
    return x * jnp.sin(times * weight(module, "frequencies", jnp.geomspace(1e2, 2e4, WIDTH)).astype(x.dtype))


def rotary(module, x):
    angles = jnp.arange(29_000, 29_000 + BATCH)[:, None].astype(x.dtype) * (0.5 ** jnp.arange(16)).astype(
        x.dtype
    )
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1
    )


def log_of_remainder(module, x):
    p = nn.sigmoid(8 + x)
    return jnp.log(1 - p)


def cosine(module, x):
    x = x * 1e-4
    norms = jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))
    return x / norms


def small_variance(module, x):
    x = x * 1e-4
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-12)


def squared_norm(module, x):
    x = x * 300
    return x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))


def masked(module, x):
    mask = jnp.where(jnp.arange(WIDTH) < 8, 0.0, -1e9).astype(x.dtype)
    rows = jnp.where(jnp.arange(BATCH)[:, None] < 2, jnp.asarray(-1e9, x.dtype), mask)
    return nn.softmax(x + rows)


def mean_by_a_constant(module, x):
    return jnp.repeat(x, 2300, 0).reshape(BATCH, 2300, WIDTH).sum(1) * 30 / 70_000


def summed_in_a_loop(module, x):
    steps = jnp.broadcast_to(x + 2, (4000, *x.shape))
    return jax.lax.scan(lambda total, x: (total + x / 16, None), jnp.zeros_like(x), steps)[0] / 500


def decays(module, x):
    rate = weight(module, "rate", jnp.linspace(0.9995, 0.9999, WIDTH)).astype(x.dtype)
    return jax.lax.scan(lambda state, _: (rate * state + (1 - rate) * x, None), x * 0, None, length=1000)[0]


def exponential_mean(module, x):
    return (
        jax.lax.scan(lambda mean, _: (0.9999 * mean + (1 - 0.9999) * x, None), x * 0, None, length=2000)[0]
        * 10
    )


def forward_algorithm(module, x):
    moves = weight(module, "moves", jax.random.normal(jax.random.key(5), (WIDTH, WIDTH))).astype(x.dtype)

    def step(alpha, _):
        return jax.nn.logsumexp(alpha[:, :, None] + moves, 1) + x, None

    return jax.lax.scan(step, x, None, length=600)[0] / 600


def preconditioned(module, x):
    sigma = jnp.linspace(0.002, 300, BATCH)[:, None].astype(x.dtype)
    return x * sigma / jnp.sqrt(jnp.square(sigma) + 0.25)


def distance(module, x):
    a, b = x + 30, x[::-1] + 30
    squares = jnp.square(a).sum(-1, keepdims=True) + jnp.square(b).sum(-1, keepdims=True)
    return jnp.sqrt(jnp.abs(squares - 2 * (a * b).sum(-1, keepdims=True)) + 1e-3) + x


def variance_of_squares(module, x):
    x = x + 100
    variance = jnp.square(x).mean(-1, keepdims=True) - jnp.square(x.mean(-1, keepdims=True))
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.abs(variance) + 1e-3)


def offset(module, x):
    thousand = weight(module, "offset", jnp.full(WIDTH, 1000.0)).astype(x.dtype)
    return jnp.tanh((x + thousand) - thousand)


def hyperbolic_tangent(module, x):
    x = x * 15
    return (jnp.exp(x) - jnp.exp(-x)) / (jnp.exp(x) + jnp.exp(-x))


def unscaled_attention(module, x):
    scores = (x * 150) @ (x * 150).T
    return nn.softmax(scores / 2000) @ x


def large_weights(module, x):
    x = nn.Dense(WIDTH, kernel_init=nn.initializers.normal(6e4), name="large")(x)
    return nn.LayerNorm(name="norm")(x)


def large_residual(module, x):
    x = x * 6e4 + nn.Dense(WIDTH, name="branch")(x) * 6e4
    return nn.LayerNorm(name="norm")(x)


def reciprocal(module, x):
    return 1e-6 / (jnp.square(x) * 1e-6 + 1e-7)


def density(module, x):
    p = jnp.exp(-jnp.square(x * 6) / 2) / 6
    return jnp.log(p + 1e-12)


def divergence(module, x):
    p, q = nn.softmax(x), nn.softmax(x * 12)
    return p * jnp.log(p / q)


def determinant(module, x):
    return jnp.log(jnp.prod(jnp.square(x[:, :8]) * 0.05 + 0.005, -1, keepdims=True)) + x


def focal(module, x):
    p = nn.sigmoid(8 + x)
    return (1 - p) ** 2 * jnp.log(p) * 1e6


def returns(module, x):
    rewards = jnp.broadcast_to(x + 100, (1000, *x.shape))
    return jax.lax.scan(lambda total, r: (r + 0.999 * total, None), x * 0, rewards)[0] / 1e5


def advantage(module, x):
    x = x * 1e-4
    return (x - x.mean()) / jnp.sqrt(jnp.square(x - x.mean()).mean() + 1e-8)


def time_embedding(module, x):
    times = (jnp.linspace(0, 1, BATCH)[:, None] * 1000).astype(x.dtype)
    return x + jnp.sin(times * weight(module, "frequencies", jnp.geomspace(0.1, 30, WIDTH)).astype(x.dtype))


def wave(module, x):
    paths = weight(module, "paths", jnp.linspace(0.05, 0.1, WIDTH)).astype(x.dtype)
    phase = 2 * jnp.pi / 0.5e-3 * paths * jnp.linspace(1, 1.01, BATCH)[:, None].astype(x.dtype)
    return x * jnp.cos(phase)


def cumulative_product(module, x):
    return jnp.cumprod(0.9998 + 0.0001 * jnp.repeat(x, 100, 1), 1)[:, ::100] * 10


def euler_steps(module, x):
    return jax.lax.scan(lambda y, _: (y + 1e-4 * jnp.sin(3 * y), None), x + 2, None, length=3000)[0]


def segments(module, x):
    rows = jnp.repeat(x, 500, 0) / 500
    ids = jnp.zeros(500 * BATCH, jnp.int32)
    return x + jax.ops.segment_sum(rows, ids, 4)[:1]


def polynomial(module, x):
    c = weight(module, "c", [1.0, -8, 24, -32, 16])
    x = x * 0.05 + 0.5
    return sum(c[i].astype(x.dtype) * x**i for i in range(5)) * 2e4


def inverse_square(module, x):
    return 1 / jnp.square(x * 1e-3 + 2e-3) * 1e-6


def harmonic(module, x):
    return 1e4 / jnp.sum(1e4 / (jnp.abs(x) + 0.05), -1, keepdims=True) + x


class NnxPart(nnx.Module):
    """The part, which makes its parameters the first time that it is called."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn

    def param(self, name: str, values: Callable[[Any], Any]) -> Any:
        """A parameter, as `flax.linen.Module.param` gives it."""
        if name not in vars(self):
            setattr(self, name, nnx.Param(values(None)))
        return getattr(self, name)[...]

    def __call__(self, x: Any) -> Any:
        return self.fn(self, x)


class NnxBlock(nnx.Module):
    def __init__(self, fn: Callable[..., Any], rngs: nnx.Rngs):
        self.norm, self.inner = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.part = NnxPart(fn)

    def __call__(self, x: Any) -> Any:
        return self.part(self.inner(self.norm(x)))


class NnxNet(nnx.Module):
    """`Net` in NNX."""

    def __init__(self, fn: Callable[..., Any], nested: bool):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, WIDTH, rngs=rngs)
        self.block = NnxBlock(fn, rngs) if nested else None
        self.part = None if nested else NnxPart(fn)
        out = (self.block or self.part)(jnp.ones((BATCH, WIDTH)))
        self.last = nnx.Linear(out.shape[-1], 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last((self.block or self.part)(nnx.tanh(self.first(x))))


class Fault(NamedTuple):
    """A planted fault.

    Args:
      fn: what the part computes.
      causes: operations that lose the value; one of them is the right answer.
      nested: whether the part is in a block.
    """

    fn: Callable[..., Any]
    causes: tuple[str, ...]
    nested: bool = False

    @property
    def path(self) -> str:
        """The path of the part."""
        return "block/part" if self.nested else "part"

    def model(self) -> tuple[nn.Module, Any]:
        """Model and parameters."""
        module = Net(self.fn, self.nested)
        return module, module.init(jax.random.key(0), batch(0)[0])["params"]

    def nnx_model(self) -> NnxNet | None:
        """The same in NNX; None for a part that holds layers of Linen."""
        return None if self.fn in (large_weights, large_residual) else NnxNet(self.fn, self.nested)


def batch(seed: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    a, b = jax.random.split(jax.random.key(seed))
    return jax.random.normal(a, (BATCH, 16)), jax.random.normal(b, (BATCH, 4))


FAULTS = {
    "Fourier features of 2e4": Fault(fourier, ("mul", "sin")),
    "rotary positions of 29,000": Fault(rotary, ("mul", "cos", "sin", "convert_element_type"), True),
    "logarithm of a softmax": Fault(lambda _, x: jnp.log(nn.softmax(x * 30)), ("div", "exp", "log")),
    "logarithm of 1 - p": Fault(log_of_remainder, ("sub", "logistic", "log")),
    "cosine of small vectors": Fault(cosine, ("mul", "square", "reduce_sum", "integer_pow", "div"), True),
    "variance of 1e-8": Fault(small_variance, ("square", "mul", "add", "constant", "integer_pow", "rsqrt")),
    "exponential of 25": Fault(
        lambda _, x: jnp.log(jnp.sum(jnp.exp(x * 25), -1, keepdims=True)) + x, ("exp",)
    ),
    "squares of 300": Fault(squared_norm, ("square", "integer_pow", "reduce_sum"), True),
    "fully masked row": Fault(masked, ("sub", "constant", "exp", "convert_element_type")),
    "mean by / 70000": Fault(mean_by_a_constant, ("div", "mul", "reduce_sum", "constant")),
    "sum in a loop": Fault(summed_in_a_loop, ("add", "add_any", "scan")),
    "decays near 1": Fault(decays, ("mul", "sub", "convert_element_type", "add"), True),
    "exponential mean": Fault(exponential_mean, ("mul", "sub", "constant", "add")),
    "log of a sum of exponentials": Fault(
        lambda _, x: x - jnp.log(jnp.exp(x * 20).sum(-1, keepdims=True)) / 20, ("exp", "reduce_sum"), True
    ),
    "forward algorithm of a CRF": Fault(forward_algorithm, ("add", "exp", "log", "reduce_sum", "sub")),
    "preconditioning by noise": Fault(preconditioned, ("square", "integer_pow", "div", "sqrt")),
    "distance as a difference": Fault(distance, ("sub", "square", "mul", "reduce_sum", "integer_pow", "add")),
    "variance as a difference": Fault(
        variance_of_squares, ("square", "sub", "integer_pow", "add", "mul"), True
    ),
    "1000 added and subtracted": Fault(offset, ("add",)),
    "log(1 + small)": Fault(lambda _, x: jnp.log(1 + x * x * 1e-4) * 1e4, ("add", "mul", "log")),
    "softplus by hand": Fault(lambda _, x: jnp.log(1 + jnp.exp(x * 20)) / 20, ("exp",), True),
    "sigmoid by hand": Fault(lambda _, x: 1 / (1 + jnp.exp(-x * 30)), ("exp", "div", "integer_pow", "mul")),
    "tanh by hand": Fault(hyperbolic_tangent, ("exp", "div")),
    "eighth power": Fault(lambda _, x: ((x * 6) ** 8) ** 0.125, ("integer_pow",)),
    "attention without a scale": Fault(unscaled_attention, ("dot_general", "mul"), True),
    "weights of 6e4": Fault(large_weights, ("convert_element_type", "dot_general")),
    "residual stream of 6e4": Fault(large_residual, ("mul", "add", "constant")),
    "reciprocal of 1e-7": Fault(reciprocal, ("div", "mul", "add", "integer_pow", "constant"), True),
    "density of a normal": Fault(density, ("exp", "div", "log", "add", "constant")),
    "divergence": Fault(divergence, ("div", "exp", "log")),
    "product of 8 variances": Fault(determinant, ("reduce_prod", "convert_element_type", "mul", "log"), True),
    "temperature of 1e-5": Fault(lambda _, x: nn.softmax(x / 1e-5 * 1e-3) + x, ("div", "constant", "mul")),
    "focal loss of sure answers": Fault(focal, ("sub", "logistic", "log", "mul", "integer_pow", "constant")),
    "discounted returns": Fault(returns, ("add", "mul", "constant"), True),
    "advantages of 1e-8": Fault(advantage, ("square", "add", "integer_pow", "mul", "constant")),
    "time of a diffusion model": Fault(time_embedding, ("mul", "sin", "convert_element_type")),
    "phase of a wave": Fault(wave, ("mul", "cos")),
    "product of 3200 decays": Fault(cumulative_product, ("cumprod", "mul", "add"), True),
    "Euler steps of 1e-4": Fault(euler_steps, ("add", "mul", "constant")),
    "polynomial near its root": Fault(polynomial, ("add", "mul", "integer_pow", "pow"), True),
    "finite difference": Fault(lambda _, x: (jnp.sin(x + 1e-3) - jnp.sin(x)) / 1e-3, ("sub", "add", "sin")),
    "inverse square of 1e-3": Fault(inverse_square, ("square", "integer_pow", "div", "mul", "constant")),
    "harmonic mean": Fault(harmonic, ("reduce_sum", "div"), True),
}
