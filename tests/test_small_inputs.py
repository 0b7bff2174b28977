"""Inputs are rounded where a product reads them: small ones, ids, masks and coordinates keep their digits."""

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


W = jnp.eye(8)


class Seen(nn.Module):
    """Has a parameter of its own, and notes the dtypes of its arguments."""

    @nn.compact
    def __call__(self, *args, **kwargs):
        self.param("w", nn.initializers.ones, (8, 8))
        SEEN.append([getattr(x, "dtype", type(x)) for x in (*args, *kwargs.values())])


class SeenNNX(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(W)

    def __call__(self, *args, **kwargs):
        SEEN.append([getattr(x, "dtype", type(x)) for x in (*args, *kwargs.values())])


SEEN: list = []


def seen(policy, *args, module=Seen, **kwargs):
    SEEN.clear()
    if issubclass(module, nnx.Module):
        jmpp.wrap(module(), policy)(*args, **kwargs)
    else:
        jmpp.wrap(module(), policy).apply({"params": {"w": W}}, *args, **kwargs)
    (dtypes,) = SEEN
    return dtypes


def floats(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


CASES = {
    "a batch alone": ((floats(4, 8),), [F16]),
    "a vector alone": ((floats(8),), [F16]),
    "a scalar alone": ((floats(),), [F32]),
    "two vectors": ((floats(8), floats(8)), [F16, F16]),
    "a number per example": ((floats(4, 8), floats(8)), [F16, F32]),
    "a number, and the vector of one example": ((floats(), floats(8)), [F32, F16]),
    "a noise level per image": ((floats(2, 4, 4, 8), floats(8)), [F16, F32]),
    "no axis of a parameter": ((floats(2, 4, 4, 8), floats(8, 26)), [F16, F32]),
    "an axis of a parameter": ((floats(2, 4, 4, 8), floats(26, 8)), [F16, F16]),
    "few features": ((floats(8, 3), floats(8, 1), floats(3)), [F32, F32, F32]),
    "few channels of an image": ((floats(2, 8, 8, 3),), [F16]),
    "tokens": ((jnp.zeros((4, 8), jnp.int32), floats(8)), [jnp.dtype(jnp.int32), F32]),
    "a mask is no input of higher rank": ((jnp.zeros((8, 8), bool), floats(8)), [jnp.dtype(bool), F16]),
    "keys are none": (
        (jax.random.split(jax.random.key(0), (2, 2)), floats(8)),
        [jax.random.key(0).dtype, F16],
    ),
    "bfloat16 is as short": ((floats(4, 8), floats(4, dtype=jnp.bfloat16)), [F16, F16]),
    "numpy": ((np.zeros((4, 8), np.float64), np.float64(1), np.zeros(4)), [F16, F32, F32]),
    "in a tree": (({"x": floats(4, 8)}, floats(4)), [dict, F32]),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", [Seen, SeenNNX])
@pytest.mark.parametrize(("args", "want"), CASES.values(), ids=CASES)
def test_which_inputs_of_a_module_with_a_parameter_are_cast(args, want, module):
    assert seen("mixed_float16", *args, module=module) == want
    assert seen("mixed_float16", **{f"x{i}": x for i, x in enumerate(args)}, module=module) == want


@pytest.mark.parametrize("module", [Seen, SeenNNX])
def test_small_inputs_are_cast_when_asked_and_to_float32(module):
    x, sigma = floats(4, 8), floats(8)
    off = jmpp.PolicyMap("mixed_float16", keep_small_inputs=False)
    assert seen(off, x, sigma, module=module) == [F16, F16]
    half = floats(4, dtype=jnp.float16)
    assert seen("float32", x, half, module=module) == [F32, F32]
    assert off != jmpp.PolicyMap("mixed_float16")
    assert "keep_small_inputs=False" in repr(off)


class Container(nn.Module):
    """Hands on what it is given to modules that it holds."""

    inside: nn.Module

    @nn.compact
    def __call__(self, x):
        SEEN.append(x.dtype)
        return self.inside(x)


class ContainerNNX(nnx.Module):
    def __init__(self, inside):
        self.inside = inside

    def __call__(self, x):
        SEEN.append(x.dtype)
        return self.inside(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_module_without_parameters_hands_its_inputs_on(policy):
    x = 30_000 + jnp.arange(16.0).reshape(2, 8)
    half = jmpp.get_policy(policy).compute_dtype
    SEEN.clear()
    linen = jmpp.wrap(Container(nn.Dense(16)), policy)
    variables = jax.eval_shape(linen.init, jax.random.key(0), x)
    assert set(products(linen.apply, variables, x)) == {("dot_general", half.name, half.name)}
    model = jmpp.wrap(ContainerNNX(nnx.Linear(8, 16, rngs=nnx.Rngs(0))), policy)
    assert set(products(model, x)) == {("dot_general", half.name, half.name)}
    assert set(SEEN) == {F32}
    # To a wider type it casts, as a rule for a part of a model asks for.
    jmpp.wrap(ContainerNNX(jnp.sin), "float32")(x.astype(half))
    assert SEEN[-1] == F32


class Ids(nn.Module):
    """Categories in an array of numbers, as DLRM has them."""

    @nn.compact
    def __call__(self, x):
        dense, ids = jnp.split(x, [8], axis=1)
        table = self.param("table", nn.initializers.normal(1.0), (5000, 4))
        return nn.Dense(4)(dense) + table[ids[:, 0].astype(int)]


class Masked(nn.Module):
    """Thins out a mask of paddings by a convolution with ones, as a Conformer does."""

    @nn.compact
    def __call__(self, x):
        numbers = ("NHC", "HIO", "NHC")
        mask = (x.sum(-1, keepdims=True) > 0).astype(jnp.float32)
        mask = Thinned()(mask)
        return nn.Conv(8, (3,), strides=2)(x) * (1 - mask), numbers


class Thinned(nn.Module):
    def __call__(self, mask):
        numbers = ("NHC", "HIO", "NHC")
        return jax.lax.conv_general_dilated(
            mask, jnp.ones([1, 1, 1]), (2,), "SAME", dimension_numbers=numbers
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_ids_in_floats_read_their_own_rows_and_masks_meet_ones(policy):
    x = jnp.concatenate([jnp.ones((3, 8)), jnp.array([[2049.0], [4097.0], [4999.0]])], axis=1)
    variables = Ids().init(jax.random.key(0), x)
    error = jmpp.wrap(Ids(), policy).apply(variables, x) - Ids().apply(variables, x)
    assert abs(error).max() < 0.05  # Other rows are off by 1.
    x = jnp.ones((2, 8, 8)).at[:, 5:].set(0)
    model = jmpp.wrap(Masked(), policy)
    out, variables = model.init_with_output(jax.random.key(0), x)
    np.testing.assert_allclose(out[0], Masked().apply(variables, x)[0], atol=0.05)


class Skips(nn.Module):
    """Joins features with the image that they are made of, as a U-Net does."""

    @nn.compact
    def __call__(self, x):
        return nn.Conv(8, (3, 3))(jnp.concatenate([nn.Conv(8, (3, 3))(x), x], axis=-1))


class SkipsNNX(nnx.Module):
    def __init__(self):
        self.a, self.b = (nnx.Conv(c, 8, (3, 3), rngs=nnx.Rngs(0)) for c in (3, 11))

    def __call__(self, x):
        return self.b(jnp.concatenate([self.a(x), x], axis=-1))


def test_an_image_that_enters_a_model_with_convolutions_is_cast():
    x = floats(2, 8, 8, 3)
    linen, of_nnx = jmpp.wrap(Skips(), "mixed_float16"), jmpp.wrap(SkipsNNX(), "mixed_float16")
    variables = jax.eval_shape(linen.init, jax.random.key(0), x)
    for fn, args in ((linen.apply, (variables, x)), (of_nnx, (x,))):
        joined = [eqn for eqn in jax.make_jaxpr(fn)(*args).eqns if eqn.primitive.name == "concatenate"]
        assert [eqn.outvars[0].aval.dtype for eqn in joined] == [F16]


class Schedule(nn.Module):
    """The noise schedule of a variational diffusion model."""

    @nn.compact
    def __call__(self, t):
        init = nn.initializers.constant
        return nn.Dense(1, kernel_init=init(18.3), bias_init=init(-13.3))(t)


class ScheduleNNX(nnx.Module):
    def __init__(self):
        init = nnx.initializers.constant
        self.line = nnx.Linear(1, 1, kernel_init=init(18.3), bias_init=init(-13.3), rngs=nnx.Rngs(0))

    def __call__(self, t):
        return self.line(t)


class Weighted(nn.Module):
    schedule: nn.Module

    @nn.compact
    def __call__(self, x, t):
        return jnp.expm1(self.schedule(t) - self.schedule(t - 1e-3)), nn.Dense(8)(x)


class WeightedNNX(nnx.Module):
    def __init__(self):
        self.schedule, self.dense = ScheduleNNX(), nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x, t):
        return jnp.expm1(self.schedule(t) - self.schedule(t - 1e-3)), self.dense(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_of_few_features_is_float32(policy):
    x, t = jnp.ones((4, 8)), jnp.array([[0.05], [0.2], [0.3], [0.9]])
    want = np.expm1(18.3e-3)
    linen = jmpp.wrap(Weighted(Schedule()), policy)
    out, variables = linen.init_with_output(jax.random.key(0), x, t)
    np.testing.assert_allclose(out[0], want, rtol=1e-2)
    np.testing.assert_allclose(linen.apply(variables, x, t)[0], want, rtol=1e-2)
    np.testing.assert_allclose(jmpp.wrap(WeightedNNX(), policy)(x, t)[0], want, rtol=1e-2)


LAYERS = {
    "dense": (nn.Dense, nnx.Linear, (), (4, 3)),
    "kernel of 1": (nn.Conv, nnx.Conv, ((1,),), (4, 9, 3)),
    "long kernel": (nn.Conv, nnx.Conv, ((3,),), (4, 9, 3)),
}


@pytest.mark.parametrize("features", [4, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_products_of_few_terms(name, features):
    linen, of_nnx, settings, shape = LAYERS[name]
    half, x = "float16", floats(*shape)
    is_few = name != "long kernel"
    dtype = "float32" if is_few else half
    handed_on = "float32" if is_few and features < 8 else half

    class Whole(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = linen(features, *settings, name="layer")(x)
            assert y.dtype == handed_on
            return y

    class WholeNNX(nnx.Module):
        def __init__(self):
            self.layer = of_nnx(3, features, *settings, rngs=nnx.Rngs(0))

        def __call__(self, x):
            y = self.layer(x)
            assert y.dtype == handed_on
            return y

    for flag, wanted in ((True, dtype), (False, half)):
        rules = jmpp.PolicyMap("mixed_float16", keep_small_inputs=flag)
        handed_on = handed_on if flag else half
        model = jmpp.wrap(Whole(), rules)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        assert {d for eqn in products(model.apply, variables, x) for d in eqn[1:]} == {wanted}
        assert {d for eqn in products(jmpp.wrap(WholeNNX(), rules), x) for d in eqn[1:]} == {wanted}


class Inner(nn.Module):
    """Calls `Seen` with what it is given and something made of it."""

    make: object

    @nn.compact
    def __call__(self, x, t):
        Seen()(*self.make(nn.Dense(8)(x), t))


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda h, t: (jnp.log(t),), [F32]),  # an embedding of the noise level
        (lambda h, t: (h, jnp.log(t)), [F16, F32]),
        (lambda h, t: (h * t[:, None],), [F16]),
        (lambda h, t: (h.astype(jnp.float32),), [F16]),
        (lambda h, t: (h[0], jnp.zeros(8)), [F16, F16]),  # step of a recurrence: a state, and half inputs
        (lambda h, t: (jnp.float32(2), h), [F32, F16]),
    ],
)
def test_inside_of_the_outermost_module(make, want):
    model = jmpp.wrap(Inner(make), "mixed_float16")
    variables = jax.eval_shape(model.init, jax.random.key(0), floats(8, 9), floats(8))
    SEEN.clear()
    jax.eval_shape(model.apply, variables, floats(8, 9), floats(8))
    (got,) = SEEN
    assert got == want


def test_a_model_of_one_example_under_vmap_casts_its_vectors_everywhere():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, sigma):
            w = self.param("w", nn.initializers.ones, (8, 8))
            h = x / sigma @ w
            Seen()(h.astype(jnp.float32))
            Seen()(jnp.log(sigma))
            return h

    model, x, sigma = jmpp.wrap(Net(), "mixed_float16"), floats(4, 8), jnp.ones(4)
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
