"""`gradient_spectrum` and its counts: against NumPy, against planted gradients, through every transform."""

import dataclasses
import json
import math

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import nnx_helpers
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import paired
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.report.spectrum import histogram

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16
W = jnp.ones(4)
MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
count = jax.jit(histogram.count)


def expected_counts(x, inverse_scale):
    """The same counts with NumPy, the shares by casting."""
    with np.errstate(invalid="ignore"):
        x = np.abs(np.asarray(x).astype(np.float32)).ravel()
    with np.errstate(invalid="ignore"):
        unscaled = x.astype(np.float64) * inverse_scale
    finite = unscaled[np.isfinite(unscaled) & (unscaled > 0)]
    exponents = np.zeros(histogram.HIGHEST - histogram.LOWEST + 1)
    np.add.at(exponents, (np.frexp(finite)[1] - 1 - histogram.LOWEST).astype(int), 1)
    lost = {}
    for name, dtype in HALVES.items():
        info = ml_dtypes.finfo(dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            cast = x.astype(dtype).astype(np.float32)
        sane = np.isfinite(x) & (x > 0)
        lost[name] = (
            np.sum(sane & (cast == 0)),
            np.sum(sane & (cast > 0) & (cast < float(info.smallest_normal))),
            np.sum(sane & np.isinf(cast)),
        )
    return np.sum(x == 0), exponents, np.sum(np.isinf(x)), np.sum(np.isnan(x)), lost


def check_counts(x, scale=1.0):
    counts = count(x, 1.0 / scale)
    np.testing.assert_array_equal(histogram._on_host(x, np.float32(1.0 / scale))[0], counts)
    got = histogram.take_apart(counts)
    zeros, exponents, infinite, nan, lost = expected_counts(x, 1.0 / scale)
    assert (got[0], got[2], got[3]) == (zeros, infinite, nan)
    np.testing.assert_array_equal(got[1], exponents)
    assert {"float16": tuple(got[4]), "bfloat16": tuple(got[5])} == lost
    assert sum(map(np.sum, got[:4])) == np.size(x)


BITS = {np.dtype(np.float32): np.uint32, HALVES["float16"]: np.uint16, HALVES["bfloat16"]: np.uint16}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BITS, ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_histogram_is_numpys(dtype, data):
    # Any bits: subnormal numbers, infinities and NaN are as likely as others. One shape compiles once.
    bits = data.draw(hnp.arrays(BITS[dtype], 64))
    check_counts(bits.view(dtype))


@settings(max_examples=60)
@given(
    x=hnp.arrays(np.float32, 32, elements=st.floats(2.0**-60, 2.0**60, width=32)),
    shift=st.integers(-20, 40),
)
@example(x=np.float32([2.0**-24] * 32), shift=0)
@example(x=np.full(32, 65504.0, np.float32), shift=15)
def test_histogram_of_scaled_gradients_takes_the_scale_off(x, shift):
    check_counts(np.ldexp(x, shift).astype(np.float32), 2.0**shift)


EDGES = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 65504.0, 65519.996, 65520.0, 65536.0, 3.0e38, 3.4e38]
EDGES += [2.0**e * f for e in (-14, -24, -25, -126) for f in (1.0, 1 - 2.0**-11, 1 - 2.0**-12, 1.5, 0.9999)]
EDGES += [2.0**-149, 2.0**-134, 2.0**-133, 1.5 * 2.0**-134]


@pytest.mark.parametrize("value", EDGES)
def test_histogram_at_the_limits(value):
    check_counts(np.full(64, value, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((0,), F32), ((3, 0, 2), F16), ((), F32), ((), BF16), ((2, 3, 4), F16), ((1, 7), BF16)],
)
def test_histogram_of_any_shape(shape, dtype):
    rng = np.random.default_rng(0)
    check_counts(np.asarray(2.0 ** rng.uniform(-30, 10, shape)).astype(dtype))


@pytest.mark.parametrize("missing", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2])
def test_histogram_of_whole_chunks_and_of_one_value_more_or_less(chunks, missing):
    x = np.random.default_rng(0).normal(size=chunks * histogram._CHUNK - missing)
    x[::7] = 0
    check_counts(x.astype(np.float32))


def test_histogram_of_every_power_of_two():
    powers = np.ldexp(np.float32(1), np.arange(histogram.LOWEST, histogram.HIGHEST + 1)).astype(np.float32)
    zeros, exponents, *_ = histogram.take_apart(count(powers))
    assert (exponents == 1).all()
    assert zeros == 0


def test_the_number_of_values_may_be_unknown():
    (rows,) = jax.export.symbolic_shape("rows")
    exported = jax.export.export(jax.jit(histogram.count))(jax.ShapeDtypeStruct((rows, 3), F32))
    zeros, exponents, *_ = histogram.take_apart(exported.call(jnp.ones((5, 3))))
    assert (zeros, exponents[-histogram.LOWEST]) == (0, 15)


def test_counts_are_whole_beyond_half_a_million():
    exponents = histogram.take_apart(count(jnp.full(600_001, 2.0**-3, F16)))[1]
    assert exponents[-3 - histogram.LOWEST] == 600_001


# Planted gradients: one parameter's are below float16's smallest number.


class LinenNet(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, use_bias=False, name="body", dtype=self.dtype)(x)
        tiny = nn.Dense(4, use_bias=False, name="tiny", dtype=self.dtype)(x)
        return x + (tiny * jnp.asarray(2.0**-30, x.dtype))


class NnxNet(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.body = nnx.Linear(4, 4, use_bias=False, dtype=dtype, rngs=rngs)
        self.tiny = nnx.Linear(4, 4, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.body(x)
        return x + self.tiny(x) * jnp.asarray(2.0**-30, x.dtype)


X = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.0, (8, 4)), F32)


#: Layers of 4 features in half, too.
HALF = jmpp.PolicyMap("mixed_float16", keep_small_inputs=False)


def linen_case(wrapped):
    model = jmpp.wrap(LinenNet(), HALF) if wrapped else LinenNet()
    params = model.init(jax.random.key(0), X)["params"]
    return lambda params, x: model.apply({"params": params}, x).astype(F32).mean(), params, "LinenNet"


def nnx_case(wrapped):
    model = NnxNet(rngs=nnx.Rngs(0))
    model = jmpp.wrap(model, HALF) if wrapped else model
    return lambda model, x: model(x).astype(F32).mean(), model, "NnxNet"


def plain_case(wrapped):
    dtype = F16 if wrapped else F32
    rng = np.random.default_rng(0)
    params = {name: {"kernel": jnp.asarray(rng.normal(size=(4, 4)), F32)} for name in ("body", "tiny")}

    def loss(params, x):
        body, tiny = (params[name]["kernel"].astype(dtype) for name in ("body", "tiny"))
        x = jmpp.report.tap(x.astype(dtype) @ body, "plain/body")
        y = jmpp.report.tap(x @ tiny, "plain/tiny") * jnp.asarray(2.0**-30, dtype)
        return jmpp.report.tap(x + y, "plain").astype(F32).mean()

    return loss, params, "plain"


KINDS = {"linen": linen_case, "nnx": nnx_case, "plain": plain_case}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_below_the_smallest_float16_is_named(kind):
    loss, params, model = KINDS[kind](False)
    found = jmpp.gradient_spectrum(loss, params, X)
    assert [row.path for row in found.tensors if row.kind == "weight gradient"] == [
        "body/kernel",
        "tiny/kernel",
    ]
    tiny, body = found.of("tiny/kernel"), found.of("body/kernel")
    assert (tiny.float16.zero, body.float16.zero) == (1.0, 0.0)
    assert tiny.bfloat16.zero == 0
    assert max(tiny.exponents) < -25
    assert found.overall().float16.zero == 0.5
    assert "50 % of weight gradients become zero in float16" in found.verdict
    # A scale saves them, by exactly as much as their exponents say.
    assert [tiny.recovered(k) for k in (3, 15)] == [
        np.mean([e + k >= -25 for e, n in tiny.exponents.items() for _ in range(n)]) for k in (3, 15)
    ]
    assert found.recovered[24] == 1
    # So they do when the loss is scaled.
    scaled = jmpp.gradient_spectrum(loss, params, X, scale=2.0**15, activations=False)
    assert scaled.of("tiny/kernel").exponents == tiny.exponents
    assert scaled.of("tiny/kernel").float16.zero == 0
    assert f"{model}/tiny" in {row.path for row in found.tensors if row.kind == "activation gradient"}
    assert found.of(f"{model}/tiny", "activation gradient").float16.zero == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_float16_model_loses_what_the_float32_model_foretold(kind):
    loss, params, model = KINDS[kind](False)
    half_loss, half_params, _ = KINDS[kind](True)
    wide = jmpp.gradient_spectrum(loss, params, X)
    half = jmpp.gradient_spectrum(half_loss, half_params, X)
    assert half.of("tiny/kernel").zeros == half.of("tiny/kernel").size
    assert half.of("body/kernel").zeros == 0
    for path in (model, f"{model}/body", f"{model}/tiny"):
        # Activations are counted unscaled, one per output.
        assert half.of(path, "activation").size == wide.of(path, "activation").size == 32
        assert sum(half.of(path, "activation").exponents.values()) == 32
    # 2**-30 is below float16 itself: no loss scale saves what a constant makes zero.
    scaled = jmpp.gradient_spectrum(half_loss, half_params, X, scale=2.0**10, activations=False)
    assert scaled.of("tiny/kernel").zeros == 16
    # The loss scale is taken off again.
    assert scaled.of("body/kernel").largest == pytest.approx(wide.of("body/kernel").largest, rel=0.01)
    assert scaled.loss_scale == 2.0**10


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_weight_gradients_are_those_of_jax(kind):
    loss, trained, _ = KINDS[kind](False)
    if kind == "linen":
        grads = jax.jit(jax.grad(loss))(trained, X)
    else:
        gradient, params = nnx_helpers.pure_gradient(trained, loss)
        grads = nnx.as_pure(jax.jit(gradient)(params, X)[1])
        before = jax.tree.map(np.asarray, nnx.state(trained))
    found = jmpp.gradient_spectrum(loss, trained, X, activations=False)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    assert [row.path for row in found.tensors] == [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
    ]
    for row, (_, grad) in zip(found.tensors, leaves, strict=True):
        assert row.size == grad.size == sum(row.exponents.values()) + row.zeros
        assert row.largest == pytest.approx(float(jnp.max(jnp.abs(grad))), rel=1e-5)
    if kind == "nnx":
        same = jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, nnx.state(trained)))
        assert all(jax.tree.leaves(same))


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(4)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return stack(name="layers")(x, None)[0]


class NnxStack(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
        self.layers = make(nnx.Rngs(params=jax.random.split(rngs.params(), 3)))

    def __call__(self, x):
        run = nnx.remat(lambda x, layer: layer(x))
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.once
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_activations_of_scanned_layers_add_up_over_trips(kind, wrapped):
    model = Stack() if kind == "linen" else NnxStack(nnx.Rngs(0))
    model = jmpp.wrap(model, "mixed_float16") if wrapped else model
    if kind == "linen":
        params = model.init(jax.random.key(0), X)
        found = jmpp.gradient_spectrum(lambda p, x: model.apply(p, x).mean(), params, X)
    else:
        found = jmpp.gradient_spectrum(lambda m, x: m(x).mean(), model, X)
    sizes = {row.path: row.size for row in found.tensors if row.kind == "activation"}
    assert sizes == {row.path: row.size for row in found.tensors if row.kind == "activation gradient"}
    deepest = max(sizes, key=len)
    assert "layers" in deepest
    assert sizes[deepest] == 3 * X.size
    assert found.overall().size == 3 * (16 + 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_module_called_twice_adds_up(kind):
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(4, name="shared")
            return dense(dense(x))

    class NnxTwice(nnx.Module):
        def __init__(self):
            self.shared = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.shared(self.shared(x))

    if kind == "linen":
        params = Twice().init(jax.random.key(0), X)
        found = jmpp.gradient_spectrum(lambda p: Twice().apply(p, X).mean(), params)
    else:
        found = jmpp.gradient_spectrum(lambda m: m(X).mean(), NnxTwice())
    assert found.of("shared", "activation").size == 2 * X.size
    assert found.of("shared", "activation gradient").size == 2 * X.size
    assert found.of("shared/kernel").size == 16


# Taps.


def halved(c):
    return jmpp.report.tap(c * 0.5, "t")


TAPPED = {
    "bare": (lambda w: halved(w), 4, {-1: 4}, {0: 4}),
    "scan": (
        lambda w: lax.scan(lambda c, _: (halved(c), None), w, None, length=3)[0],
        12, {-1: 4, -2: 4, -3: 4}, {0: 4, -1: 4, -2: 4},
    ),
    "remat": (jax.checkpoint(lambda w: halved(w)), 4, {-1: 4}, {0: 4}),
    "remat in scan": (
        lambda w: lax.scan(jax.checkpoint(lambda c, _: (halved(c), None)), w, None, length=2)[0],
        8, {-1: 4, -2: 4}, {0: 4, -1: 4},
    ),
    "vmap": (jax.vmap(lambda w: halved(w)), 4, {-1: 4}, {0: 4}),
    "jit": (jax.jit(lambda w: halved(w)), 4, {-1: 4}, {0: 4}),
    "cond": (lambda w: lax.cond(w[0] > 0, lambda w: halved(w), lambda w: w, w), 4, {-1: 4}, {0: 4}),
    "branch not taken": (lambda w: lax.cond(w[0] < 0, lambda w: halved(w), lambda w: w, w), 0, {}, {}),
    "twice": (lambda w: halved(halved(w)), 8, {-1: 4, -2: 4}, {0: 4, -1: 4}),
    "other value unused": (lambda w: (halved(w), w)[0], 4, {-1: 4}, {0: 4}),
}  # fmt: skip


@pytest.mark.once
@pytest.mark.parametrize(("name", "scale"), paired(TAPPED, [1.0, 2.0**10]))
def test_taps_count_forward_and_backward_through_transforms(name, scale):
    fn, size, forward, backward = TAPPED[name]
    found = jmpp.gradient_spectrum(lambda w: fn(w).sum(), W, scale=scale)
    row, gradient = found.of("t", "activation"), found.of("t", "activation gradient")
    assert (row.size, row.exponents) == (size, forward)
    assert (gradient.size, gradient.exponents) == (size, backward)


@pytest.mark.slow
def test_a_tap_in_a_shard_map_adds_up_over_devices():
    def loss(w, x):
        def shard(w, x):
            return lax.psum(jmpp.report.tap(x * w, "t").sum(), "d")

        return jax.shard_map(shard, mesh=MESH, in_specs=(P(), P("d")), out_specs=P())(w, x)

    found = jmpp.gradient_spectrum(loss, W, jnp.ones((16, 4)), scale=4.0)
    assert found.of("t", "activation").exponents == {0: 64}
    assert found.of("t", "activation gradient").exponents == {0: 64}
    assert found.of("w").exponents == {4: 4}


def test_a_tap_takes_any_tree():
    def loss(w):
        tree = jmpp.report.tap({"a": w, "b": (2 * w, jnp.arange(3)), "n": 7, "s": None}, "tree")
        return tree["a"].sum() + tree["b"][0].sum() + tree["n"]

    found = jmpp.gradient_spectrum(loss, W)
    assert [row.path for row in found.tensors if row.kind == "activation"] == ["tree['a']", "tree['b'][0]"]


def test_nothing_is_there_when_nobody_looks():
    x, tree = jnp.ones(3), {"a": jnp.ones(2)}
    assert jmpp.report.tap(x, "x") is x
    assert jmpp.report.tap(tree, "tree") is tree

    def step(tap):
        def loss(w):
            return lax.scan(lambda c, _: (tap(jnp.sin(tap(c))), None), w, None, length=3)[0].sum()

        return str(jax.make_jaxpr(jax.value_and_grad(loss))(W))

    assert step(lambda x: jmpp.report.tap(x, "x")) == step(lambda x: x)


@pytest.mark.slow
def test_looking_leaves_nothing_behind():
    loss, params, _ = nnx_case(False)
    jitted = jax.jit(lambda w: jmpp.report.tap(w * 2, "t"))
    found = jmpp.gradient_spectrum(lambda w: jitted(w).sum(), W)
    assert found.of("t", "activation").size == 4
    assert "custom_vjp" not in str(jax.make_jaxpr(jitted)(W))
    assert jitted(W).sum() == 8
    types = [type(m) for _, m in nnx.iter_modules(params)]
    jmpp.gradient_spectrum(loss, params, X)
    assert [type(m) for _, m in nnx.iter_modules(params)] == types


def test_no_callback_is_in_the_counting():
    state = jmpp.report.SpectrumState.create(W, lambda w: jmpp.report.tap(w, "t").sum())
    step = jmpp.report.spectrum_value_and_grad(lambda w: jmpp.report.tap(w, "t").sum())
    assert "callback" not in str(jax.make_jaxpr(step)(jnp.float32(2), state, W))


# The state in a training step.


def params_and_loss():
    params = {"a": jnp.asarray([1.0, 2.0, -4.0]), "b": {"c": jnp.ones((2, 2)), "n": jnp.arange(3)}}

    def loss(params, x):
        return (jmpp.report.tap(params["a"] * x, "h") ** 2).sum() + params["b"]["c"].sum() * 2.0**-30

    return params, loss


def states_equal(one, other):
    equal = jax.tree.map(lambda a, b: np.array_equal(a, b) and a.dtype == b.dtype, one, other)
    return all(jax.tree.leaves(equal)) and jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.slow
def test_value_and_gradients_are_those_of_scaled_value_and_grad():
    params, loss = params_and_loss()
    params["b"].pop("n")
    for scale in (jmpp.DynamicLossScale(), jmpp.NoOpLossScale()):
        state = jmpp.report.SpectrumState.create(params, loss, 3.0)
        (value, grads), state = jax.jit(jmpp.report.spectrum_value_and_grad(loss))(scale, state, params, 3.0)
        expected = jax.jit(jmpp.scaled_value_and_grad(loss))(scale, params, 3.0)
        assert states_equal((value, grads), expected)
        assert float(state.loss_scale) == float(scale.loss_scale)


def test_two_steps_add_up():
    params, loss = params_and_loss()
    params["b"].pop("n")
    step = jax.jit(jmpp.report.spectrum_value_and_grad(loss))
    zero = jmpp.report.SpectrumState.create(params, loss, 3.0)
    once = step(2.0, zero, params, 3.0)[1]
    other = step(8.0, zero, params, 5.0)[1]
    both = step(8.0, once, params, 5.0)[1]
    assert (int(both.steps), int(both.calls)) == (2, 2)
    for a, b, c in zip(once.gradients, other.gradients, both.gradients, strict=True):
        np.testing.assert_array_equal(a + b, c)
    np.testing.assert_array_equal(once.activations["h"] + other.activations["h"], both.activations["h"])
    report = both.report("training")
    assert (report.steps, report.loss_scale, report.function) == (2, 8.0, "training")
    assert report.of("a").size == 2 * 3
    # d(a x)^2 = 2 a x^2.
    assert report.of("a").largest == 2 * 4 * 5**2
    assert report.of("b/c").exponents == {-30: 8}
    assert report.of("h", "activation").size == 6


@pytest.mark.slow
def test_as_in_jit_in_a_scan_and_donated():
    params, loss = params_and_loss()
    params["b"].pop("n")
    step = jmpp.report.spectrum_value_and_grad(loss)
    scale = jmpp.StaticLossScale(4.0)

    def run(state, x):
        return step(scale, state, params, x)[1]

    xs = jnp.asarray([1.0, 3.0, 0.5])
    zero = jmpp.report.SpectrumState.create(params, loss, xs[0])
    donated, traces = jax.tree.map(jnp.copy, zero), []

    @jax.jit
    def plain(state, x):
        traces.append(1)
        return run(state, x)

    donating = jax.jit(run, donate_argnums=0)
    for x in xs:
        donated = donating(donated, x)
    jitted = zero
    for x in xs:
        jitted = plain(jitted, x)
    scanned = jax.jit(lambda s, xs: lax.scan(lambda s, x: (run(s, x), None), s, xs)[0])(zero, xs)
    assert len(traces) == 1
    assert states_equal(jitted, donated)
    assert states_equal(jitted, scanned)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_so_many_calls_are_counted(every):
    grads, state, traces = {"w": jnp.ones(5)}, jmpp.report.SpectrumState.create({"w": jnp.ones(5)}), []

    @jax.jit
    def update(state, grads):
        traces.append(1)
        return state.update(grads, every=every)

    for call in range(7):
        state = update(state, jax.tree.map(lambda g: g * 2.0**call, grads))
    counted = range(0, 7, every)
    assert (int(state.calls), int(state.steps)) == (7, len(counted))
    assert state.report().overall().exponents == dict.fromkeys(counted, 5)
    assert len(traces) == 1


@pytest.mark.once
def test_the_state_takes_an_optimizer_state_and_a_number():
    grads = {"w": jnp.full(3, 2.0**12)}
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(2.0**10))
    for scale in (
        2.0**10,
        np.float32(2.0**10),
        jnp.float32(2.0**10),
        tx.init(grads),
        jmpp.StaticLossScale(2.0**10),
    ):
        state = jmpp.report.SpectrumState.create(grads).update(grads, scale)
        assert state.report().overall().exponents == {2: 3}
        assert float(state.loss_scale) == 2.0**10


@pytest.mark.once
def test_the_state_is_saved_and_restored():
    params, loss = params_and_loss()
    zero = jmpp.report.SpectrumState.create(params, loss, 1.0)
    grads = {"a": jnp.asarray([1.0, 0.0, jnp.inf]), "b": {"c": jnp.ones((2, 2))}}
    state = zero.update(grads, 2.0, activations={"h": zero.activations["h"] + 1})
    for restored in (
        flax.serialization.from_bytes(zero, flax.serialization.to_bytes(state)),
        flax.serialization.from_state_dict(zero, flax.serialization.to_state_dict(state)),
        jax.tree.unflatten(jax.tree.structure(zero), jax.tree.leaves(state)),
    ):
        assert states_equal(state, restored)
        assert restored.names == ("a", "b/c")


@pytest.mark.slow
def test_sharded_gradients_count_alike_and_shardings_stay():
    sharded = NamedSharding(MESH, P("d"))
    grads = jax.device_put(jnp.asarray(2.0 ** -np.arange(32.0), F32), sharded)
    replicated = NamedSharding(MESH, P())
    zero = jax.device_put(jmpp.report.SpectrumState.create(grads), replicated)
    state = jax.jit(lambda s, g: s.update(g), out_shardings=replicated)(zero, grads)
    assert states_equal(state, jmpp.report.SpectrumState.create(grads).update(np.asarray(grads)))
    assert all(leaf.sharding == replicated for leaf in jax.tree.leaves(state))


class NnxNorm(nnx.Module):
    def __init__(self, *, rngs):
        self.a = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.a(x))


@pytest.mark.once
@pytest.mark.parametrize("has_aux", [False, True])
def test_in_the_step_of_an_nnx_model(has_aux):
    def loss(model, x, power):
        value = (model(x) ** power).mean()
        return (value, {"power": power}) if has_aux else value

    models = [jmpp.wrap(NnxNorm(rngs=nnx.Rngs(0)), "mixed_bfloat16") for _ in range(2)]
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(8.0))
    optimizers = [nnx.Optimizer(model, tx, wrt=nnx.Param) for model in models]
    state = jmpp.report.SpectrumState.create(models[0], loss, X, power=2)
    assert state.names == ("a/bias", "a/kernel", "norm/bias", "norm/scale")

    @nnx.jit
    def counted(model, optimizer, state, x):
        count = jmpp.nnx.spectrum_value_and_grad(loss, has_aux=has_aux)
        (value, grads), state = count(optimizer, state, model, x, power=2)
        optimizer.update(model, grads)
        return value, state

    @nnx.jit
    def plain(model, optimizer, x):
        count = jmpp.nnx.scaled_value_and_grad(loss, has_aux=has_aux)
        value, grads = count(optimizer, model, x, power=2)
        optimizer.update(model, grads)
        return value

    for _ in range(2):
        value, state = counted(models[0], optimizers[0], state, X)
        expected = plain(models[1], optimizers[1], X)
        assert jax.tree.all(jax.tree.map(lambda a, b: float(a) == float(b), value, expected))
    # Watching changes nothing: parameters and batch statistics are the same.
    for one, other in zip(*(jax.tree.leaves(nnx.state(model)) for model in models), strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(jnp.abs(models[0].norm.mean[...]).sum()) > 0
    found = state.report()
    assert found.steps == 2
    assert found.of("a/kernel").size == 2 * 16
    assert found.of("NnxNorm/a", "activation").size == 2 * 32


@pytest.mark.slow
def test_gradients_of_an_nnx_model_by_update():
    loss, model, _ = nnx_case(False)
    state = jmpp.report.SpectrumState.create(model).update(nnx.grad(loss)(model, X))
    assert state.report().of("tiny/kernel").float16.zero == 1.0


@pytest.mark.slow
def test_explicit_axes():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(None, "d")))
        x = jax.device_put(X, NamedSharding(mesh, P()))
        found = jmpp.gradient_spectrum(lambda w, x: (jmpp.report.tap(x @ w, "h") ** 2).sum(), w, x)
    assert (found.of("w").size, found.of("h", "activation").size) == (32, 64)
    expected = expected_counts(2 * np.asarray(X).T @ np.asarray(X).sum(1, keepdims=True) @ np.ones((1, 8)), 1)
    assert sum(found.of("w").exponents.values()) == 32
    assert found.of("w").exponents == {
        int(e) + histogram.LOWEST: int(n) for e, n in enumerate(expected[1]) if n
    }


def test_float64_gradients_below_float32s_range():
    with jax.enable_x64(True):
        found = jmpp.gradient_spectrum(lambda w: (w * 1e-60).sum(), jnp.ones(3)).overall()
    # No half has them, and none are lost from the count.
    assert found.size == 3
    assert found.zeros + sum(found.exponents.values()) == 3
    assert found.float16.zero == 1.0 or found.zeros == 3


def test_taps_without_a_gradient_are_named():
    found = jmpp.gradient_spectrum(
        lambda w: (jax.lax.stop_gradient(jmpp.report.tap(w * 2, "stopped")) * w).sum(), W
    )
    assert "Not counted, since no gradient flows through it: stopped" in str(found).replace("\n", " ")


class ReturnsLoss(nn.Module):
    @nn.compact
    def __call__(self, x):
        predicted = nn.Dense(4, name="out")(x)
        return jnp.square(predicted - x[:, :4]).mean(), predicted


def test_the_loss_that_a_model_returns_is_no_activation():
    model, x = ReturnsLoss(), jax.random.normal(jax.random.key(0), (64, 16))
    params = model.init(jax.random.key(1), x)

    def outside(params, x):
        return jnp.square(model.apply(params, x)[1] - x[:, :4]).mean()

    found = jmpp.gradient_spectrum(lambda params, x: model.apply(params, x)[0], params, x)
    assert found.largest.path == "params/out/kernel"
    assert found.recommended_scale == jmpp.gradient_spectrum(outside, params, x).recommended_scale


def test_int_parameters_are_left_out():
    params, loss = params_and_loss()
    found = jmpp.gradient_spectrum(loss, params, 3.0)
    assert [row.path for row in found.tensors if row.kind == "weight gradient"] == ["a", "b/c"]
    state = jmpp.report.SpectrumState.create(params)
    assert state.names == ("a", "b/c")


# Losses that are not as they should be.


def test_a_float16_loss_warns_and_is_counted_right():
    with pytest.warns(UserWarning, match="The loss is float16"):
        found = jmpp.gradient_spectrum(
            lambda w: jmpp.report.tap(w.astype(F16), "t").sum(), jnp.full(4, 0.5), scale=2.0**18
        )
    assert found.of("w").exponents == {0: 4}
    assert found.of("w").largest == 1
    assert found.of("t", "activation gradient").exponents == {0: 4}
    # At this scale float16 does not hold 1.
    assert found.of("w").float16.infinite == 1


def test_a_nan_loss_shows_as_nan_gradients():
    found = jmpp.gradient_spectrum(lambda w: jnp.log(w - 2).sum(), W)
    assert (found.of("w").nan, found.of("w").size) == (4, 4)
    assert "Not finite already: w" in found.verdict
    assert math.isnan(found.recommended_scale)


def test_an_infinite_gradient_counts_as_infinite():
    found = jmpp.gradient_spectrum(lambda w: jnp.sqrt(w).sum(), jnp.asarray([0.0, 1.0, 0.0, 4.0]))
    row = found.of("w")
    assert (row.infinite, row.nan, row.exponents) == (2, 0, {-1: 1, -2: 1})
    assert row.float16.infinite == 0.5
    assert row.largest == 0.5
    assert "Not finite already: w" in found.verdict


def test_zero_gradients():
    found = jmpp.gradient_spectrum(lambda w: (w * 0).sum(), W)
    row = found.overall()
    assert (row.zeros, row.exponents, row.float16.zero) == (4, {}, 0.0)
    assert math.isnan(found.recommended_scale)
    assert math.isnan(row.recovered(3))
    assert "Constant scale" not in found.verdict
    assert jmpp.gradient_spectrum(lambda w: w.sum(), jnp.ones(0)).verdict == "No gradient was counted."


# What a report makes of it.


@pytest.mark.slow
@settings(max_examples=40)
@given(st.floats(2.0**-100, 2.0**100, width=32))
@example(65504.0)
@example(1.0)
@example(float(np.nextafter(np.float32(65504), np.float32(np.inf))))
@example(65504.0 / 8)
def test_the_recommended_scale_is_the_largest_that_does_not_overflow(most):
    state = jmpp.report.SpectrumState.create(W).update(jnp.asarray([most, 0.0, most / 2, -most / 4], F32))
    report = state.report(margin=3)
    scale = report.recommended_scale
    assert most * scale < 65504 <= most * 2 * scale
    assert math.frexp(scale)[0] == 0.5
    assert report.safe_scale == scale / 8
    assert report.largest.largest == most


@pytest.mark.once
@settings(max_examples=40)
@given(hnp.arrays(np.int32, 16, elements=st.integers(-60, 0)))
def test_recovered_grows_with_the_scale(exponents):
    values = np.ldexp(1.0, exponents)
    report = jmpp.report.SpectrumState.create(jnp.ones(16)).update(jnp.asarray(values, F32)).report()
    row = report.overall()
    # 2**-25 itself, a tie, is zero too; by exponents it counts as kept.
    assert row.float16.zero == np.mean(values.astype(np.float16) == 0)
    below = values[exponents < -25]
    for shift in (0, 3, 15, 40):
        share = row.recovered(shift)
        if len(below):
            assert share == pytest.approx(np.mean(np.ldexp(below, shift) >= 2.0**-25))
        else:
            assert np.isnan(share)
    if len(below):
        shares = [row.recovered(k) for k in range(41)]
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0, 1)
        assert list(report.recovered) == sorted(report.recovered)
        assert {3, 15} <= set(report.recovered)


def example_report(scale=8.0):
    params = {"big": jnp.ones(3), "tiny": jnp.ones(5), "dead": jnp.ones(2)}

    def loss(params):
        return (
            jmpp.report.tap(params["big"], "h").sum()
            + params["tiny"].sum() * 2.0**-40
            + 0 * params["dead"].sum()
        )

    return jmpp.gradient_spectrum(loss, params, scale=scale)


def test_overall_is_the_sum_of_the_tensors():
    found = example_report()
    row = found.overall()
    assert (row.size, row.zeros, row.exponents) == (10, 2, {-40: 5, 0: 3})
    assert row.float16.zero == 0.5
    assert found.overall("activation").size == 3
    assert found.largest.path in ("big", "h")
    assert found.of("tiny").bars().strip()
    assert len(found.of("tiny").bars()) == 28
    assert found.of("dead").bars() == " " * 28


def test_a_report_is_read_as_text_html_and_data():
    found = example_report()
    text = " ".join(str(found).split())
    assert text.endswith(" ".join(found.verdict.split()))
    assert "Of gradients that become zero, a scale saves:" in text
    for part in ("weight gradients; as float16", "activation gradients", "tiny", "all"):
        assert part in text
        assert part in found._repr_html_()
    assert "At a loss scale of 8" in found._repr_html_()
    data = json.loads(json.dumps(found.to_dict()))
    assert data["tensors"][0]["float16"].keys() == {"zero", "subnormal", "infinite"}
    assert data["loss_scale"] == 8.0
    assert [row["path"] for row in data["tensors"]] == [row.path for row in found.tensors]


def test_tensors_as_a_data_frame():
    pytest.importorskip("pandas")
    assert list(example_report().to_pandas()["path"]) == [row.path for row in example_report().tensors]


PLOTTED = {
    "scaled": lambda: example_report(),
    "unscaled": lambda: example_report(1.0),
    "all zero": lambda: jmpp.gradient_spectrum(lambda w: (w * 0).sum(), W),
    "empty": lambda: jmpp.gradient_spectrum(lambda w: w.sum(), jnp.ones(0)),
    "nan": lambda: jmpp.gradient_spectrum(lambda w: (w * jnp.nan).sum(), W, scale=4.0),
    "huge": lambda: jmpp.report.SpectrumState.create(W).update(3e38 * W, 1.0).report(),
    "far below": lambda: jmpp.report.SpectrumState.create(W).update(jnp.full(4, 2.0**-120), 2.0**20).report(),
}


@pytest.mark.once
@pytest.mark.parametrize("name", PLOTTED)
def test_plot_is_a_figure_with_labelled_axes(name):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = PLOTTED[name]().plot()
    try:
        figure.canvas.draw()
        top, bottom, *_ = figure.axes
        assert "log2 |x|" in top.get_xlabel()
        assert "share of values" in top.get_ylabel()
        assert "log2 |gradient|" in bottom.get_xlabel()
        assert top.get_title()
        texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        assert any("becomes zero" in text for text in texts)
        assert len(set(texts)) == len(texts)
    finally:
        pyplot.close(figure)


def with_state(model):
    return jmpp.report.SpectrumState.create(model), model


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: jmpp.gradient_spectrum(W, W),
            TypeError,
            "gradient_spectrum takes a function and its arguments",
        ),
        (lambda: jmpp.gradient_spectrum(nn.Dense(2), W), TypeError, "a Linen module keeps no parameters"),
        (lambda: jmpp.gradient_spectrum(lambda w: w, W), TypeError, "scalar-output"),
        (lambda: jmpp.gradient_spectrum(lambda w: (w.sum(), 1), W), TypeError, "use has_aux=True"),
        (
            lambda: jmpp.gradient_spectrum(lambda w: w.sum(), W, has_aux=True),
            TypeError,
            r"must return \(loss, aux\)",
        ),
        (
            lambda: jmpp.gradient_spectrum(lambda n: 1.0, jnp.arange(3)),
            ValueError,
            "found no floating arrays in the parameters of <lambda>",
        ),
        (lambda: jmpp.gradient_spectrum(lambda w: w.sum(), W, scale=0.0), ValueError, "loss_scale is 0"),
        (
            lambda: jmpp.gradient_spectrum(lambda w: w.sum(), W, scale={}),
            ValueError,
            "no loss scale in this dict",
        ),
        (
            lambda: example_report().of("smal"),
            KeyError,
            "no weight gradient 'smal'; there are big, dead, tiny",
        ),
        (
            lambda: jmpp.report.SpectrumState.create([W, W]).update([W]),
            ValueError,
            r"1 floating arrays and the spectrum was made for 2 parameters.*SpectrumState.create\(params\)",
        ),
        (
            lambda: jmpp.report.SpectrumState.create(W).report().of("w", "activation"),
            KeyError,
            "There is no activation 'w'",
        ),
        (lambda: jmpp.gradient_spectrum(jnp.sum, W, margin=-3), ValueError, "margin is .*0 or more, got -3"),
        (
            lambda: jmpp.report.spectrum_value_and_grad(jnp.sum)(1.0, W, W),
            TypeError,
            r"counts into a SpectrumState, made by SpectrumState.create\(params\); it got ArrayImpl",
        ),
        (
            lambda: jmpp.report.spectrum_value_and_grad(jnp.sum)(1.0, *with_state(NnxNet(rngs=nnx.Rngs(0)))),
            TypeError,
            "Use jmp_policy.nnx.spectrum_value_and_grad",
        ),
        (
            lambda: jmpp.gradient_spectrum(
                lambda w: jax.jvp(lambda w: jmpp.report.tap(w * 2, "a"), (w,), (w,))[1].sum(), W
            ),
            TypeError,
            "taps on activations cannot follow.*activations=False",
        ),
    ],
)
def test_errors_say_what_to_do(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.once
def test_rows_are_values():
    one, other = example_report(), example_report()
    assert one == other
    assert dataclasses.replace(one, margin=5).safe_scale == one.recommended_scale / 32


@pytest.mark.once
def test_has_aux():
    def loss(w, x):
        return (w * x).sum(), {"n": x}

    for run in (loss, lambda w, x: (loss(w, x)[0], "no array")):
        assert jmpp.gradient_spectrum(run, W, 4 * W, has_aux=True).of("w").exponents == {2: 4}
    state = jmpp.report.SpectrumState.create(W)
    ((value, aux), grads), state = jmpp.report.spectrum_value_and_grad(loss, has_aux=True)(
        2.0, state, W, 4 * W
    )
    assert float(value) == 16
    assert set(aux) == {"n"}
    assert grads[0] == 8
    assert state.report().of("params").exponents == {2: 4}


class Frontend(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 1e-3 * jnp.sin(x)


class Behind(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = Frontend(name="frontend")(x)
        return nn.Dense(8, name="head")(nn.tanh(nn.Dense(32, name="body")(1e4 * h)))


@pytest.mark.slow
def test_activations_that_no_parameter_leads_to_say_nothing_of_the_scale():
    """Training computes no gradients of them: in a layer without parameters, or before the first one."""
    x = jax.random.normal(jax.random.key(0), (16, 16))
    params = Behind().init(jax.random.key(1), x)["params"]
    found = jmpp.gradient_spectrum(lambda params: Behind().apply({"params": params}, x).sum(), params)
    assert {row.path for row in found.tensors if "activation" in row.kind} == {
        "Behind", "Behind/body", "Behind/head"
    }  # fmt: skip
    largest = max(row.largest for row in found.tensors if row.kind == "weight gradient")
    assert found.recommended_scale * largest > 2.0**14


def test_under_jax_numpy_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        assert jmpp.gradient_spectrum(lambda w, x: (x @ w).sum(), jnp.ones((3, 4)), jnp.ones((2, 3))).verdict
