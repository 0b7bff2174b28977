"""autocast keeps values that float16 cannot hold: quotients, powers, and what a bfloat16 region hands on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_helpers import OPTIONS
from jax import lax

import jmp_policy as jmpp
from jmp_policy import autocast, explain, region

W = jnp.eye(8)


def chosen(fn, half, name, *args):
    return explain(fn, half)(*args).of(name)[0].chosen


#: Of a product `h`: what it becomes where `h` is small, within float16's range again at the end.
SMALL = {
    "power": lambda h: h**-2 * 1e-3,
    "third power": lambda h: h**-3 * 1e-6,
    "reciprocal": lambda h: jnp.reciprocal(h * 1e-2) * 1e-3,
    "number / h": lambda h: 1.0 / (h * 1e-2) * 1e-3,
    "integer / h": lambda h: 7 / (h * 1e-2) * 1e-3,
    "closed-over number / h": lambda h: np.float32(3) / (h * 1e-2) * 1e-3,
    "parameter / h": lambda h: jnp.arange(1.0, 9.0) / (h * 1e-2) * 1e-3,
    "in a jit": lambda h: jax.jit(lambda a, b: a / b)(2.0, h * 1e-2) * 1e-3,
    "in a scan": lambda h: lax.scan(lambda c, _: (c, (c * 1e-2) ** -1), h, None, length=2)[1][1] * 1e-3,
    "pow": lambda h: (h * 1e-2) ** -1.0 * 1e-3,
    "rsqrt": lambda h: lax.rsqrt(h * 1e-3) * 1e-1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_quotients_and_powers_of_small_values_are_finite(name):
    def function(x):
        return SMALL[name](x @ W) @ W

    x = jnp.full((2, 8), 1e-3)
    eps = float(jnp.finfo(jnp.float16).eps)
    np.testing.assert_allclose(autocast(function, "float16")(x), function(x), rtol=8 * eps)


def test_the_derivative_of_a_quotient_is_finite_and_the_quotient_is_half():
    def function(x):
        h = jnp.tanh(x @ W)
        return (h / (h * 2 + 1e-3)) @ W

    x = jnp.full((2, 8), 1e-3)
    functions = (autocast(function, "float16"), function)
    steps = [jax.jit(jax.grad(lambda x, f=f: f(x).sum()), compiler_options=OPTIONS) for f in functions]
    got, expected = (step(x) for step in steps)
    np.testing.assert_allclose(got, expected, rtol=2e-2)
    row = explain(function, "float16")(x).of("div")[0]
    assert (row.operands, row.chosen) == ("float32", "float16")
    assert "its derivative exceeds float16" in row.why


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("div", lambda h: h / 3.0),
        ("div", lambda h: h / np.sqrt(8)),
        ("rem", lambda h: h % 0.75),
        ("integer_pow", lambda h: h**2),
        ("integer_pow", lambda h: h**1 * h**2),
    ],
)
def test_quotients_by_numbers_and_squares_stay_half(name, fn):
    for half in ("float16", "bfloat16"):
        assert chosen(lambda x: jnp.tanh(fn(x @ W)) @ W, half, name, jnp.ones((2, 8))) == half


def test_quotients_stay_half_where_the_range_is_float32s_or_half_is_asked_for():
    def function(x):
        return (1.0 / (x @ W)) ** -3 @ W

    def lowered(x):
        with region("lower"):
            return function(x)

    x = jnp.ones((2, 8))
    for name in ("div", "integer_pow"):
        assert chosen(function, "float16", name, x) == "float32"
        assert chosen(function, "bfloat16", name, x) == "bfloat16"
        assert chosen(lowered, "float16", name, x) == "float16"
        rows = explain(function, "float16", lower={name})(x)
        assert rows.of(name)[0].operands == "float16"


def depth_network(params, image):
    """A network whose sigmoid is a disparity, of which the depth is the reciprocal (as in Monodepth)."""
    features = jnp.tanh(image @ params["body"])
    disparity = 1e-4 + 1e-2 * jax.nn.sigmoid(features @ params["disparity"] - 5)
    fused = jnp.concatenate([features, 1 / disparity * 1e-4, disparity**-2 * 1e-4 * 1e-4], -1)
    return jnp.mean((jnp.tanh(fused @ params["head"]) - 0.5) ** 2)


@pytest.mark.slow
def test_a_network_with_reciprocals():
    rng = np.random.default_rng(0)
    shapes = {"body": (8, 8), "disparity": (8, 1), "head": (10, 3)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in shapes.items()}
    image = jnp.asarray(rng.uniform(size=(5, 8)), jnp.float32)
    functions = (autocast(depth_network, "float16"), depth_network)
    steps = [jax.jit(jax.value_and_grad(f), compiler_options=OPTIONS) for f in functions]
    (got, got_grads), (value, grads) = (step(params, image) for step in steps)
    assert abs(got - value) < 0.01 * value
    for name, grad in grads.items():
        assert jnp.linalg.norm(got_grads[name] - grad) < 0.02 * jnp.linalg.norm(grad)


#: From a product in bfloat16, 1e6 and more, to values of the size of 1e3.
LEAVING = {
    "mul": lambda h: h * 1e-3,
    "add": lambda h: (h + h) * 1e-3,
    "max": lambda h: jnp.maximum(h, -h) * 1e-3,
    "clip": lambda h: jnp.clip(h, 0.0, 1e3),
    "concatenate": lambda h: jnp.concatenate([h, h])[:2] * 1e-3,
    "reshape": lambda h: h.reshape(8, 2).T.reshape(2, 8)[::-1] * 1e-3,
    "gather": lambda h: h[jnp.array([1, 0])] * 1e-3,
    "pooling": lambda h: h.max(-1, keepdims=True) * 1e-3 + jnp.zeros(8),
    "cumulative": lambda h: lax.cummax(h) * 1e-3,
    "where": lambda h: jnp.where(h > 70000.0, h * 1e-3, 0.0),
    "jit": lambda h: jax.jit(lambda h: h * 1e-3)(h),
    "scan": lambda h: lax.scan(lambda c, _: (c * 1e-1, None), h, None, length=3)[0],
    "while": lambda h: lax.fori_loop(0, 3, lambda _, c: c * 1e-1, h),
    "cond": lambda h: lax.cond(h[0, 0] > 0, lambda h: h * 1e-3, lambda h: h, h),
    "checkpoint": lambda h: jax.checkpoint(lambda h: jnp.abs(h) * 1e-3)(h),
    "custom_jvp": lambda h: jax.nn.relu(h) * 1e-3,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVING)
def test_what_leaves_a_bfloat16_region_is_not_narrowed(name):
    def function(w, x):
        with region("bfloat16"):
            h = (x @ w) * 1e6
        return LEAVING[name](h) @ w

    w, x = W * 0.5, jnp.arange(2.0, 18.0).reshape(2, 8)
    got, expected = autocast(function, "float16")(w, x), function(w, x)
    np.testing.assert_allclose(got, expected, rtol=0.02)
    assert got.dtype == jnp.float32


def test_what_leaves_a_float16_region_in_bfloat16_keeps_its_digits():
    def function(w, x):
        with region("float16"):
            h = jnp.tanh(x @ w)
        return (h * 3) @ w

    assert chosen(function, "bfloat16", "mul", W, W) == "float32"


class _Tower(nn.Module):
    """Activations that grow from layer to layer, as in networks without normalisation, and a head."""

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.relu(nn.Dense(8, name=f"grow_{i}", kernel_init=nn.initializers.constant(40.0))(x))
        return nn.Dense(2, name="head")(x / jnp.max(x))


def test_layers_beyond_float16_by_a_rule():
    model, x = _Tower(), jnp.ones((3, 8))
    params = model.init(jax.random.key(0), x)
    half = jax.jit(autocast(model.apply, "float16", rules={"grow_*": "bfloat16"}))
    np.testing.assert_allclose(half(params, x), model.apply(params, x), rtol=0.05, atol=0.05)
    rows = explain(model.apply, "float16", rules={"grow_*": "bfloat16"})(params, x).of("dot_general")
    assert [row.operands for row in rows] == ["bfloat16"] * 3 + ["float16"]


def fourier_mixing(params, x):
    """A block of a model that mixes tokens with a Fourier transform."""
    for w in params:
        h = jnp.tanh(x @ w)
        x = x + jnp.fft.fft(jnp.fft.fft(h, axis=-1), axis=-2).real * 0.1
        x = x @ w + jnp.fft.irfft(jnp.fft.rfft(x) * 0.5)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_fourier_transforms_run_in_float32(half):
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(8, 8)) / 4, jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(2, 4, 8)), jnp.float32)

    def loss(params, x):
        return jnp.mean(fourier_mixing(params, x) ** 2)

    got, expected = (jax.jit(jax.grad(f))(params, x) for f in (autocast(loss, half), loss))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert jnp.linalg.norm(a - b) < 8 * float(jnp.finfo(half).eps) * jnp.linalg.norm(b)
    rows = explain(fourier_mixing, half)(params, x)
    assert {row.operands for row in rows.of("dot_general")} == {half}
    assert "transform" in rows.of("fft")[0].why


def test_a_policy_map_with_two_half_types():
    """A module in bfloat16 inside of a float16 model hands on float32, which a float16 layer narrows."""

    class Net(nn.Module):
        divide: bool

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="large", kernel_init=nn.initializers.constant(1e6))(x)
            return nn.Dense(2, name="head")(x / 1e6 if self.divide else x)

    policy = jmpp.PolicyMap("mixed_float16", {"large": "mixed_bfloat16"})
    x = jnp.ones((1, 8))
    for divide in (True, False):
        model = jmpp.wrap(Net(divide), policy)
        out = jax.jit(lambda x, model=model: model.init_with_output(jax.random.key(0), x)[0])(x)
        assert bool(jnp.isfinite(out).all()) == divide


POSITIONS = 1e5 + jnp.arange(80.0).reshape(10, 8)
ROWS = jnp.arange(9)


def half_rows(x):
    return x @ W


#: Of a half value and an argument that no product reads: what float16 has no range for, bfloat16 no digits.
JOINED = {
    "gather": lambda h, p: p[ROWS] - p[ROWS + 1],
    "take": lambda h, p: jnp.take(p, ROWS, axis=0) - jnp.take(p, ROWS + 1, axis=0),
    "concatenate": lambda h, p: jnp.diff(jnp.concatenate([h, p], 1), axis=0)[:, 8:],
    "stack": lambda h, p: jnp.diff(jnp.stack([h, p]), axis=1)[1],
    "dynamic_update_slice": lambda h, p: jnp.diff(lax.dynamic_update_slice(h, p[:2], (0, 0)), axis=0)[:1],
    "where": lambda h, p: jnp.where(h > 1e9, h, p[1:2]) - p[:1],
    "maximum": lambda h, p: jnp.maximum(h, p[1:2]) - p[:1],
    "column": lambda h, p: (h + p[:, :1]) - (h + p[:1, :1]),
    "scalar": lambda h, p: (h + 1) * p[1, 1] - (h + 1) * p[0, 1],
    "less": lambda h, p: jnp.where(h + 1e5 < p[1:2], 1.0, 0.0),
    "broadcast": lambda h, p: jnp.concatenate([h, jnp.broadcast_to(p[0], h.shape)]) - p[0],
    "outer product": lambda h, p: jnp.sin(jnp.einsum("i,j->ij", p[:, 0] - 1e5, 1 / p[0] * 1e5)),
    "few terms": lambda h, p: p[:, :3] @ jnp.eye(3) - p[:1, :3],
    "ids": lambda h, p: p[(p[:, 0] // 8 % 10).astype(int)] - p[:1],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINED)
def test_arguments_that_no_product_reads_are_not_rounded(name):
    def function(x, p):
        h = half_rows(x)
        return JOINED[name](h, p), h @ W

    x = jnp.zeros((10, 8))
    for half in ("float16", "bfloat16"):
        np.testing.assert_allclose(
            autocast(function, half)(x, POSITIONS)[0], function(x, POSITIONS)[0], atol=0.01
        )
        # Behind them a product reads half.
        grown = lambda x, p: JOINED[name](half_rows(x), p).reshape(-1)[:8] @ W  # noqa: E731
        assert explain(grown, half)(x, POSITIONS).of("dot_general")[-1].operands == half


def test_biases_scales_and_masks_follow():
    def function(x, bias, places, keep):
        h = half_rows(x) + bias
        return (jnp.where(keep, h * bias + places, 0.0)) @ W

    args = jnp.ones((10, 8)), jnp.ones(8), jnp.ones((1, 8)), jnp.ones((10, 8), bool)
    for row in explain(function, "float16")(*args).of("add", "mul", "select_n"):
        assert row.chosen == "float16"


def test_rows_of_a_table_go_into_a_product_as_half_and_the_table_is_not_cast_whole():
    def function(table, ids, w):
        return table[ids] @ w

    jaxpr = jax.make_jaxpr(autocast(function, "float16"))(jnp.ones((1000, 8)), jnp.arange(4), W)
    assert "f16[4,8]" in str(jaxpr)
    assert "f16[1000,8]" not in str(jaxpr)


def test_products_of_few_terms_follow_what_is_half():
    """A head of few terms gains nothing; what is half already is not made float32 for it."""

    def low_rank(x, down, up):
        return (x @ down @ up) @ W

    rows = explain(low_rank, "float16")(jnp.ones((16, 8)), jnp.ones((8, 4)), jnp.ones((4, 8)))
    assert [row.operands for row in rows.of("dot_general")] == ["float16"] * 3
    few = (jnp.ones((16, 3)), jnp.ones((3, 8)))
    (row,) = explain(jnp.dot, "float16")(*few)
    assert (row.operands, row.chosen) == ("float32", "float32")
    assert "it sums 3 terms" in row.why
    policy = jmpp.PolicyMap("mixed_float16", keep_small_inputs=False)
    assert explain(jnp.dot, policy)(*few)[0].operands == "float16"
    conv = explain(lambda x, w: lax.conv(x, w, (1,), "SAME"), "float16")(
        jnp.ones((1, 2, 9)), jnp.ones((8, 2, 3))
    )
    assert conv[0].operands == "float32"
