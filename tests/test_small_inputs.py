"""Scalars and vectors next to larger inputs stay float32: half precision spoils what is made of them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmpp
from tests.helpers import products

F16, BF16, F32 = map(jnp.dtype, (jnp.float16, jnp.bfloat16, jnp.float32))
POLICIES = ("mixed_float16", "mixed_bfloat16")


class Seen(nn.Module):
    """Returns nothing; notes the dtypes of its arguments."""

    def __call__(self, *args, **kwargs):
        SEEN.append([getattr(x, "dtype", type(x)) for x in (*args, *kwargs.values())])


class SeenNNX(nnx.Module):
    def __call__(self, *args, **kwargs):
        SEEN.append([getattr(x, "dtype", type(x)) for x in (*args, *kwargs.values())])


SEEN: list = []


def seen(policy, *args, module=Seen, **kwargs):
    SEEN.clear()
    if issubclass(module, nnx.Module):
        jmpp.wrap(module(), policy)(*args, **kwargs)
    else:
        jmpp.wrap(module(), policy).apply({}, *args, **kwargs)
    (dtypes,) = SEEN
    return dtypes


def floats(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


CASES = {
    "a batch alone": ((floats(4, 3),), [F16]),
    "a vector alone": ((floats(3),), [F16]),
    "a scalar alone": ((floats(),), [F16]),
    "two vectors": ((floats(3), floats(3)), [F16, F16]),
    "a number per example": ((floats(4, 3), floats(4)), [F16, F32]),
    "a number, and the vector of one example": ((floats(), floats(3)), [F32, F16]),
    "a noise level per image": ((floats(2, 4, 4, 3), floats(2)), [F16, F32]),
    "rank 2 next to rank 4": ((floats(2, 4, 4, 3), floats(2, 1)), [F16, F16]),
    "tokens": ((jnp.zeros((4, 3), jnp.int32), floats(4)), [jnp.dtype(jnp.int32), F32]),
    "a mask is no input of higher rank": ((jnp.zeros((3, 3), bool), floats(3)), [jnp.dtype(bool), F16]),
    "keys are none": (
        (jax.random.split(jax.random.key(0), (2, 2)), floats(3)),
        [jax.random.key(0).dtype, F16],
    ),
    "bfloat16 is as short": ((floats(4, 3), floats(4, dtype=jnp.bfloat16)), [F16, F16]),
    "numpy": ((np.zeros((4, 3), np.float64), np.float64(1), np.zeros(4)), [F16, F32, F32]),
    "in a tree": (({"x": floats(4, 3)}, floats(4)), [dict, F32]),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", [Seen, SeenNNX])
@pytest.mark.parametrize(("args", "want"), CASES.values(), ids=CASES)
def test_which_inputs_are_small(args, want, module):
    assert seen("mixed_float16", *args, module=module) == want
    assert seen("mixed_float16", **{f"x{i}": x for i, x in enumerate(args)}, module=module) == want


@pytest.mark.parametrize("module", [Seen, SeenNNX])
def test_small_inputs_are_cast_when_asked_and_to_float32(module):
    x, sigma = floats(4, 3), floats(4)
    off = jmpp.PolicyMap("mixed_float16", keep_small_inputs=False)
    assert seen(off, x, sigma, module=module) == [F16, F16]
    half = floats(4, dtype=jnp.float16)
    assert seen("float32", x, half, module=module) == [F32, F32]
    assert off != jmpp.PolicyMap("mixed_float16")
    assert "keep_small_inputs=False" in repr(off)


class Inner(nn.Module):
    """Calls `Seen` with what it is given and something made of it."""

    make: object

    @nn.compact
    def __call__(self, x, t):
        Seen()(*self.make(nn.Dense(3)(x), t))


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda h, t: (jnp.log(t),), [F32]),  # an embedding of the noise level
        (lambda h, t: (h, jnp.log(t)), [F16, F32]),
        (lambda h, t: (h * t[:, None],), [F16]),
        (lambda h, t: (h.astype(jnp.float32),), [F16]),
        (lambda h, t: (h[0], jnp.zeros(3)), [F16, F16]),  # step of a recurrence: a state, and half inputs
        (lambda h, t: (jnp.float32(2), h), [F32, F16]),
    ],
)
def test_inside_of_the_outermost_module(make, want):
    model = jmpp.wrap(Inner(make), "mixed_float16")
    variables = jax.eval_shape(model.init, jax.random.key(0), floats(4, 5), floats(4))
    SEEN.clear()
    jax.eval_shape(model.apply, variables, floats(4, 5), floats(4))
    (got,) = SEEN
    assert got == want


def test_a_model_of_one_example_under_vmap_casts_its_vectors_everywhere():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, sigma):
            w = self.param("w", nn.initializers.ones, (3, 3))
            h = x / sigma @ w
            Seen()(h.astype(jnp.float32))
            Seen()(jnp.log(sigma))
            return h

    model, x, sigma = jmpp.wrap(Net(), "mixed_float16"), floats(4, 3), jnp.ones(4)
    variables = model.init(jax.random.key(0), x[0], sigma[0])
    SEEN.clear()
    jax.eval_shape(jax.vmap(model.apply, (None, 0, 0)), variables, x, sigma)
    assert SEEN == [[F16], [F32]]


class Scalings(nn.Module):
    def __call__(self, sigma):
        total = 1 + sigma**2
        return 1 / total, sigma / jnp.sqrt(total), 1 / jnp.sqrt(total), jnp.log(sigma) / 4


class Fourier(nn.Module):
    @nn.compact
    def __call__(self, t):
        angle = jnp.pi * jnp.exp(jnp.linspace(0, jnp.log(2e4), 8)) * t[:, None]
        h = nn.Dense(16)(jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1))
        return nn.Dense(16)(nn.swish(h))


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, t):
        t = Fourier()(t)
        x = nn.Conv(8, (3, 3))(x)
        for _ in range(2):
            x = x + nn.Conv(8, (3, 3))(nn.swish(nn.GroupNorm(4)(x))) * (1 + nn.Dense(8)(t)[:, None, None])
        return nn.Conv(3, (3, 3))(x)


class Preconditioned(Body):
    """The denoiser of EDM (Karras et al., 2022), by inheritance, as published code has it."""

    @nn.compact
    def __call__(self, x, sigma):
        skip, out, into, noise = (c.reshape(-1, 1, 1, 1) for c in Scalings()(sigma))
        return skip * x + out * super().__call__(into * x, noise.reshape(-1))


class PreconditionedPart(nn.Module):
    """The same, with the network as a part."""

    @nn.compact
    def __call__(self, x, sigma):
        skip, out, into, noise = (c.reshape(-1, 1, 1, 1) for c in Scalings()(sigma))
        return skip * x + out * Body()(into * x, noise.reshape(-1))


@pytest.mark.once
@pytest.mark.parametrize(
    ("cls", "policy", "unit"),
    [(Preconditioned, "mixed_bfloat16", 2.0**-8), (PreconditionedPart, "mixed_float16", 2.0**-11)],
)
def test_denoiser_whose_noise_level_meets_high_frequencies(cls, policy, unit):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (4, 6, 6, 3))
    sigma = jnp.exp(1.2 * jax.random.normal(keys[1], (4,)) - 1.2)
    noisy = x + sigma[:, None, None, None] * jax.random.normal(keys[2], x.shape)
    weight = ((1 + sigma**2) / sigma**2)[:, None, None, None]
    variables = jax.jit(cls().init)(keys[3], noisy, sigma)

    def gradient(model):
        def loss(variables):
            return 1024 * (weight * (model.apply(variables, noisy, sigma) - x) ** 2).mean()

        return jax.flatten_util.ravel_pytree(jax.jit(jax.grad(loss))(variables))[0]

    exact, model = gradient(cls()), jmpp.wrap(cls(), policy)
    error = float(jnp.linalg.norm(gradient(model) - exact) / jnp.linalg.norm(exact))
    assert error < 16 * unit  # 0.2 and more when the noise level is half.
    half = jmpp.get_policy(policy).compute_dtype.name
    assert {dtype for eqn in products(model.apply, variables, noisy, sigma) for dtype in eqn[1:]} == {half}


class FourierNNX(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((16, 8)))

    def __call__(self, t):
        angle = jnp.pi * jnp.exp(jnp.linspace(0, jnp.log(2e4), 8)) * t[:, None]
        return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1).astype(self.w.dtype) @ self.w


class DenoiserNNX(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.lin = FourierNNX(rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, sigma):
        return self.lin(x / sigma[:, None]) + self.embed(jnp.log(sigma) / 4)


@pytest.mark.slow
def test_denoiser_in_nnx():
    bare, x = DenoiserNNX(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8))
    sigma = jnp.array([0.02, 0.3, 4.0, 50.0])
    exact = bare(x, sigma)
    for policy, unit in zip(POLICIES, (2.0**-11, 2.0**-8), strict=True):
        model = jmpp.wrap(bare, policy)
        error = float(jnp.linalg.norm(model(x, sigma) - exact) / jnp.linalg.norm(exact))
        assert error < 4 * unit
        half = jmpp.get_policy(policy).compute_dtype.name
        assert {dtype for eqn in products(model, x, sigma) for dtype in eqn[1:]} == {half}
