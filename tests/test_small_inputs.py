"""Inputs are rounded where a product reads them: small ones, ids, masks and coordinates keep their digits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import products

import jmp_policy as jmpp

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


@pytest.mark.slow
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


def drawn(*shape):
    return jax.random.normal(jax.random.key(7), shape)


def waves(x):
    """Fourier features of the last axis: an error of 2**-9 in `x` is one of a radian."""
    return jnp.sin(x[..., None] * 2.0 ** jnp.arange(6, 8) * 2 * jnp.pi).reshape(*x.shape[:-1], -1)


class Image(nn.Module):
    """Joins features with the image that they are made of, as diffusion models do."""

    @nn.compact
    def __call__(self, x):
        return nn.Conv(8, (3, 3))(jnp.concatenate([x, waves(x)], axis=-1))


class ImageNNX(nnx.Module):
    def __init__(self):
        self.conv = nnx.Conv(9, 8, (3, 3), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.conv(jnp.concatenate([x, waves(x)], axis=-1))


class Coordinates(nn.Module):
    """A layer of its own on a few features."""

    @nn.compact
    def __call__(self, x):
        y = x @ self.param("kernel", nn.initializers.normal(10.0), (x.shape[-1], 16))
        return jnp.cos(y + self.param("bias", nn.initializers.normal(10.0), (16,)))


class CoordinatesNNX(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(10 * jax.random.normal(jax.random.key(0), (2, 16)))
        self.bias = nnx.Param(10 * jax.random.normal(jax.random.key(1), (16,)))

    def __call__(self, x):
        return jnp.cos(x @ self.kernel[...] + self.bias[...])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("linen", "of_nnx", "shape"),
    [
        (Image(), ImageNNX, (2, 8, 8, 3)),
        (Coordinates(), CoordinatesNNX, (64, 2)),
        (Coordinates(), CoordinatesNNX, (4, 16, 2)),
    ],
)
def test_what_few_features_enter_is_exact(linen, of_nnx, shape, policy):
    x = 30 * drawn(*shape)
    variables, bare = linen.init(jax.random.key(0), x), of_nnx()
    for exact, found in (
        (linen.apply(variables, x), jmpp.wrap(linen, policy).apply(variables, x)),
        (bare(x), jmpp.wrap(bare, policy)(x)),
    ):
        error = jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)
        assert error < (1e-3 if policy == "mixed_float16" else 1e-2)


class OwnConvolution(nn.Module):
    """A kernel of many terms on one feature: both operands are half."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (25, 1, 16))
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def test_a_convolution_of_one_feature_with_many_terms_is_half():
    x = drawn(2, 64, 1)
    model = jmpp.wrap(OwnConvolution(), "mixed_float16")
    variables = model.init(jax.random.key(0), x)
    assert {(p.lhs, p.rhs) for p in jmpp.audit(model.apply, variables, x).products} == {
        ("float16", "float16")
    }


class FrontEnd(nn.Module):
    """Without parameters: powers above 65504, and paddings."""

    def __call__(self, x, mask):
        return jnp.square(x[:, ::2] * 1e3), mask[:, ::2]


class Subsampled(nn.Module):
    """With parameters: paddings are passed on beside features of a higher rank."""

    @nn.compact
    def __call__(self, x, mask):
        kernel = jnp.ones((1, 1, 1))
        layout = ("NWC", "WIO", "NWC")
        mask = jax.lax.conv_general_dilated(mask[..., None], kernel, (2,), "SAME", dimension_numbers=layout)
        x = x[:, ::2] @ self.param("w", nn.initializers.normal(), (x.shape[-1], 8))
        return x, mask[..., 0]


class Speech(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        power, mask = FrontEnd()(x, mask)
        x, mask = Subsampled()(jnp.log(power), mask)
        return Subsampled()(x, mask)


class Likelihood(nn.Module):
    def __call__(self, x, y):
        return -jnp.sum(jnp.square(x - y) * 1e4, axis=1)


class WithLikelihood(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Likelihood()(x, nn.Dense(16)(x))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_what_modules_hand_on_in_float32_is_not_rounded(policy):
    x, mask = 1 + jnp.abs(drawn(2, 16, 8)), jnp.zeros((2, 16)).at[:, 9:].set(1)
    variables = Speech().init(jax.random.key(0), x, mask)
    exact, padding = Speech().apply(variables, x, mask)
    found, found_padding = jmpp.wrap(Speech(), policy).apply(variables, x, mask)
    np.testing.assert_allclose(found, exact, atol=0.3)
    np.testing.assert_array_equal(found_padding, padding)
    x = 10 * drawn(4, 16)
    variables = WithLikelihood().init(jax.random.key(0), x)
    exact = WithLikelihood().apply(variables, x)
    assert float(jnp.abs(exact).min()) > 65504
    np.testing.assert_allclose(jmpp.wrap(WithLikelihood(), policy).apply(variables, x), exact, rtol=0.02)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_a_number_per_position_is_no_operand_of_products(policy, dtype):
    """Also where there are as many positions as a parameter of the module has rows."""
    mask, ids = floats(4, 8), jnp.zeros((4, 8), jnp.int32)
    x = ids if dtype == jnp.int32 else drawn(4, 8, 16)
    for module in (Seen, SeenNNX):
        assert seen(policy, x, mask, module=module)[1] == F32


class OfNumber(nn.Module):
    """Calls a schedule with a Python number and with an array."""

    @nn.compact
    def __call__(self, x, t):
        schedule = Line()
        return nn.Dense(8)(x), schedule(t), schedule(jnp.float32(t))


class Line(nn.Module):
    @nn.compact
    def __call__(self, t):
        init = nn.initializers.constant
        return self.param("b", init(-13.3), (1,)) + self.param("w", init(18.3), (1,)) * t


def test_a_python_number_is_a_small_input():
    x = floats(2, 8)
    variables = OfNumber().init(jax.random.key(0), x, 0.3)
    _, of_number, of_array = jmpp.wrap(OfNumber(), "mixed_bfloat16").apply(variables, x, 0.3)
    np.testing.assert_allclose(of_number, -7.81, rtol=1e-5)
    np.testing.assert_array_equal(of_number, of_array)


class Statistics(nn.Module):
    """Running statistics in the dtype of the module's field, as DeepSpeech has them."""

    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        mean = self.variable("batch_stats", "mean", lambda: jnp.zeros(x.shape[-1], self.dtype))
        dtype = self.dtype
        other = self.variable("batch_stats", "other", lambda: jnp.zeros(8, dtype))
        if not self.is_initializing():
            mean.value = 0.999 * mean.value + 0.001 * jnp.mean(x, 0)
        return x - mean.value + other.value


def test_running_statistics_are_made_as_the_bare_model_makes_them():
    x = jnp.full((4, 8), 10.0)
    model = jmpp.wrap(Statistics(), "mixed_bfloat16")
    stats = model.init(jax.random.key(0), x)["batch_stats"]
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype(F32)}
    _, state = model.apply({"batch_stats": stats}, x, mutable=["batch_stats"])
    np.testing.assert_allclose(state["batch_stats"]["mean"], 0.01, rtol=1e-2)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
    with pytest.warns(UserWarning, match="'w' is half there and meets float32 values"):  # By sigma.
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


@pytest.mark.once
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
