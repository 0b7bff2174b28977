"""autocast of small functions: every transformation, every kind of operation, every way to steer it."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import equations, paired, products
from jax import lax
from jax.scipy.optimize import minimize
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy import autocast, explain, full_precision, region

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))
B = jnp.linspace(-1, 1, 8)


def layer(w, x):
    return jnp.sum(jnp.tanh(x @ w + B) @ w)


def names(function, *args):
    """(primitive, dtypes of its array operands) of every equation."""
    jaxpr = jax.make_jaxpr(function)(*args)
    return [
        (e.primitive.name, tuple(v.aval.dtype.name for v in e.invars if hasattr(v.aval, "dtype")))
        for e in equations(jaxpr.jaxpr)
    ]


def casts(function, *args):
    """(from, to) of every cast."""
    return [
        (e.invars[0].aval.dtype.name, e.outvars[0].aval.dtype.name)
        for e in equations(jax.make_jaxpr(function)(*args).jaxpr)
        if e.primitive.name == "convert_element_type"
    ]


def assert_close(got, expected, half="float16", roundings=8):
    """Equal but for `roundings` roundings to half, in norm; the same structure and dtypes."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = roundings * float(jnp.finfo(half).eps) * max(np.linalg.norm(b), 1.0)
        assert np.linalg.norm(a - b) <= bound, (np.linalg.norm(a - b), bound)


def scanned(w, x):
    carry, ys = lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x @ w, length=3)
    return carry.sum() + ys.sum()


def looped(w, x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x @ w))[1].sum()


def branched(w, x):
    return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.exp(x @ w.T), x).sum()


def switched(w, x):
    branches = [lambda x: x @ w, lambda x: x * 2.0, lambda x: x @ w.T]
    return lax.switch(jnp.int32(2), branches, x).sum()


def looped_apart(w, x):
    """Each row to an end of its own."""

    def loop(row, n):
        return lax.while_loop(lambda s: s[1] < n, lambda s: (jnp.tanh(s[0] @ w), s[1] + 1), (row, 0))[0]

    return jax.vmap(loop)(x, jnp.arange(len(x)) % 4).sum()


def checkpointed(w, x):
    return jax.checkpoint(layer)(w, x)


def batched(w, x):
    return jax.vmap(layer, (None, 0))(w, jnp.stack([x, 2 * x])).sum()


def called(w, x):
    return jax.jit(layer)(w, x) + jax.jit(layer)(w.T, x)


@jax.custom_jvp
def gated(x, gate):
    return jnp.exp(x) * gate


@gated.defjvp
def _(primals, tangents):
    (x, gate), (dx, _) = primals, tangents
    return gated(x, gate), gated(x, gate) * dx


def with_custom_jvp(w, x):
    return gated(x @ w / 4, jnp.arange(8)).sum() / 8


FUNCTIONS = [
    layer, scanned, looped, looped_apart, branched, switched, checkpointed, batched, called, with_custom_jvp,
    jax.grad(layer), jax.grad(scanned), jax.grad(checkpointed), jax.value_and_grad(branched),
]  # fmt: skip


def _name(value):
    return getattr(value, "__name__", None)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "half"), paired(FUNCTIONS, ["float16", "bfloat16"]), ids=_name)
def test_values_dtypes_and_products(function, half):
    cast, x = autocast(function, half), jnp.concatenate([X, -X])  # So many that gradients gain from half.
    assert_close(cast(W, x), function(W, x), half, roundings=16)
    found = products(cast, W, x)
    assert found
    assert {operand for _, *operands in found for operand in operands} == {half}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [f for f in FUNCTIONS[:10] if f not in (looped, looped_apart)], ids=_name
)
def test_derivatives(function):
    cast = autocast(function, "bfloat16")
    found = products(jax.grad(cast), W, X)
    assert {operand for _, *operands in found for operand in operands} == {"bfloat16"}
    assert_close(jax.jit(jax.grad(cast))(W, X), jax.grad(function)(W, X), "bfloat16", roundings=32)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    cast, tangent = autocast(layer, "float16"), jnp.ones_like(W)
    out, push = jax.jvp(cast, (W, X), (tangent, X))
    expected, expected_push = jax.jvp(layer, (W, X), (tangent, X))
    assert_close((out, push), (expected, expected_push), roundings=16)
    vector = X[:1]
    assert_close(
        jax.jit(jax.hessian(cast, argnums=1))(W, vector),
        jax.hessian(layer, argnums=1)(W, vector),
        roundings=32,
    )
    nested = jax.grad(lambda w: jnp.sum(jax.grad(cast)(w, X) ** 2))(W)
    assert_close(nested, jax.grad(lambda w: jnp.sum(jax.grad(layer)(w, X) ** 2))(W), roundings=64)


@pytest.mark.slow
def test_outer_vmap_jit_remat_and_eval_shape():
    cast, xs = autocast(layer, "float16"), jnp.stack([X, -X])
    assert_close(jax.vmap(cast, (None, 0))(W, xs), jax.vmap(layer, (None, 0))(W, xs))
    assert_close(jax.jit(jax.grad(jax.checkpoint(cast)))(W, X), jax.grad(layer)(W, X), roundings=16)
    assert jax.eval_shape(cast, W, X) == jax.eval_shape(layer, W, X)
    exported = jax.export.export(jax.jit(cast))(W, X)
    assert_close(exported.call(W, X), layer(W, X))
    donated = jax.jit(autocast(lambda w, x: x @ w, "float16"), donate_argnums=1)
    assert_close(donated(W, X + 0), X @ W)
    inside = jax.jit(lambda w, x: x @ w, donate_argnums=1)
    given = X + 0
    assert_close(autocast(inside, "float16")(W, given), X @ W)
    assert given.is_deleted()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("outside", [False, True])
def test_shard_map_and_sharded_arguments(kind, outside):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(kind,))
    w, x = jax.device_put(W, NamedSharding(mesh, P())), jax.device_put(X, NamedSharding(mesh, P("batch")))

    def local(w, x):
        return lax.psum(jnp.tanh(x @ w + jnp.ones(8)).sum(), "batch")

    def mapped(function):
        return jax.shard_map(function, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())

    cast = mapped(autocast(local, "float16")) if outside else autocast(mapped(local), "float16")
    assert set(products(jax.grad(cast), w, x)) == {("dot_general", "float16", "float16")}
    assert_close(jax.jit(jax.grad(cast))(w, x), jax.jit(jax.grad(mapped(local)))(w, x), roundings=16)
    # Sums over devices, of the loss and of the weight's gradient, are in float32.
    sums = [dtypes for name, dtypes in names(jax.grad(cast), w, x) if name.startswith("psum")]
    assert sums
    assert {d for dtypes in sums for d in dtypes} == {"float32"}
    assert_close(jax.jit(autocast(layer, "float16"))(w, x), layer(W, X))


@pytest.mark.slow
def test_configurations():
    cast = autocast(jax.value_and_grad(layer), "float16")
    with jax.debug_nans(True):
        assert_close(cast(W, X), jax.value_and_grad(layer)(W, X), roundings=16)
    with jax.enable_checks(True):
        jax.clear_caches()
        assert_close(
            jax.jit(jax.grad(autocast(scanned, "float16")))(W, X), jax.grad(scanned)(W, X), roundings=32
        )
    with jax.numpy_dtype_promotion("strict"):
        strict = autocast(lambda w, x: jnp.tanh(x @ w) @ w, "bfloat16")
        assert strict(W, X).dtype == np.float32


def test_symbolic_shapes():
    def function(w, b, x):
        return jax.nn.relu(jnp.tanh(x @ w + jnp.broadcast_to(b, (x.shape[0], 8)))) @ w

    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (8,), (batch, 8))]
    exported = jax.export.export(jax.jit(autocast(function, "float16")))(*shapes)
    assert_close(exported.call(W, B, X), function(W, B, X))


@pytest.mark.slow
def test_eagerly_on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Explicit,))

    def loss(w, x):
        return jax.nn.softmax(jnp.tanh(x @ w + B) @ w)[:, 0].sum() + jax.nn.logsumexp(x @ w)

    with jax.set_mesh(mesh):
        w, x = jax.device_put(W, P()), jax.device_put(X, P("batch"))
        assert_close(jax.grad(autocast(loss, "float16"))(w, x), jax.grad(loss)(W, X), roundings=16)


def test_float64_stays():
    with jax.enable_x64(True):
        wide, narrow = jnp.ones((8, 8), jnp.float64), jnp.ones((8, 8), jnp.float32)
        found = products(autocast(lambda a, b: (a @ a, b @ b), "float16"), wide, narrow)
        assert found == {("dot_general", "float64", "float64"): 1, ("dot_general", "float16", "float16"): 1}
        assert autocast(lambda a: a @ a, "float16")(np.ones((2, 2))).dtype == np.float64


def test_randomness_is_bit_identical():
    def draw(key, w):
        keys = jax.random.split(key)
        noise = jax.random.normal(keys[0], (4, 8))
        return noise, jax.random.bernoulli(keys[1], 0.3, (9,)), noise @ w, jax.random.key_data(keys)

    got, expected = autocast(draw, "bfloat16")(KEY, W), draw(KEY, W)
    for place in (0, 1, 3):
        np.testing.assert_array_equal(got[place], expected[place])


def test_static_arguments_integers_and_other_results():
    def function(x, flag, *, name, power=2):
        assert flag is True
        assert name == "a"
        return {"out": x**power @ W, "count": jnp.arange(3), "text": name, "none": None, "number": 3}

    out = autocast(function, "float16")(X, True, name="a")
    assert (out["text"], out["none"], out["number"], out["count"].dtype) == ("a", None, 3, np.int32)
    assert out["out"].dtype == np.float32
    assert autocast(lambda x: x, "float16")({}) == {}
    assert autocast(lambda: jnp.ones(2), "float16")().dtype == np.float32
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument"):
        autocast(function, "float16")(X, True)


def test_callbacks_and_effects(capfd):
    seen = []

    def function(x):
        y = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x @ W)
        jax.debug.callback(lambda v: seen.append(v.dtype), y)
        return y @ W

    out = jax.block_until_ready(jax.jit(autocast(function, "float16"))(X))
    jax.effects_barrier()
    assert_close(out, (X @ W * 2) @ W)
    assert seen == [np.float32]


def test_references():
    def function(x):
        ref = jax.new_ref(x)
        ref[...] = x @ W
        return ref[...] @ W

    assert_close(autocast(function, "float16")(X), X @ W @ W)


def in_a_loop(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    jax.lax.fori_loop(0, 2, lambda _, c: ref.__setitem__(..., ref[...] + x @ W) or c, 0)
    return ref[...]


def in_a_jit(x):
    ref = jax.new_ref(x)
    jax.jit(lambda ref: ref.__setitem__(..., ref[...] @ W))(ref)
    return ref[...]


@pytest.mark.parametrize("function", [in_a_loop, in_a_jit])
def test_products_beside_references_that_stay_in_float32_are_told(function):
    lowered = autocast(function, "float16")
    with pytest.warns(
        UserWarning, match=r"stay as traced, in float32: .* look into it \(it takes references\)"
    ):
        out = lowered(X)
    np.testing.assert_array_equal(out, function(X))


@pytest.mark.parametrize(
    "product",
    [
        lambda h: (h.astype(jnp.float16) @ W.astype(jnp.float16)).astype(jnp.float32),
        lambda h: jnp.dot(h, W, precision="highest"),
        full_precision(lambda h: h @ W),
        lambda h: h.astype(jnp.int32) @ W.astype(jnp.int32) * 1.0,
    ],
    ids=["cast", "precision", "region", "integers"],
)
def test_of_products_beside_references_that_are_as_they_should_be_nothing_is_told(product):
    def function(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        jax.lax.fori_loop(0, 2, lambda _, c: ref.__setitem__(..., ref[...] + product(x)) or c, 0)
        return ref[...]

    np.testing.assert_array_equal(autocast(function, "float16")(X), function(X))


def test_explicit_casts_are_obeyed():
    def function(x):
        return (x @ W).astype(jnp.bfloat16), x.astype(jnp.float16).astype(jnp.float32) * 2.0

    low, _ = autocast(function, "float16")(X)
    assert low.dtype == jnp.bfloat16
    assert ("mul", ("float32", "float32")) in names(autocast(function, "float16"), X)


def test_a_weight_is_cast_once():
    def function(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w) @ w.T
        return x @ w.reshape(8, 8)

    assert casts(autocast(function, "float16"), W, X).count(("float32", "float16")) == 2  # w and x
    big = jax.jit(lambda w, x: functools.reduce(lambda h, _: jnp.tanh(h @ w + B), range(12), x))
    jaxpr = jax.make_jaxpr(autocast(lambda w, x: big(w, big(w, x)), "float16"))(W, X)
    weights = [
        e for e in equations(jaxpr.jaxpr)
        if e.primitive.name == "convert_element_type" and e.invars[0].aval.shape == (8, 8)
    ]  # fmt: skip
    assert len(weights) == 2  # Inside each call, where XLA finds that both are the same.


def test_nothing_is_cast_there_and_back():
    def function(w, b, x):
        h = jax.nn.relu(x @ w + b)
        return jax.nn.log_softmax(jnp.tanh(h @ w) @ w).mean()

    for program in (autocast(function, "float16"), jax.grad(autocast(function, "float16"))):
        jaxpr = jax.make_jaxpr(program)(W, B, X).jaxpr
        made = {id(v): e for e in jaxpr.eqns for v in e.outvars}
        for eqn in jaxpr.eqns:
            before = made.get(id(eqn.invars[0])) if eqn.invars else None
            if eqn.primitive.name == "convert_element_type" and before is not None:
                assert before.primitive.name != "convert_element_type", (before, eqn)


def test_bias_gradients_are_summed_in_float32():
    def loss(b, w, x):
        return jnp.sum(jnp.tanh(x @ w + b))

    x = jax.random.normal(KEY, (16384, 8))
    got = jax.jit(jax.grad(autocast(loss, "bfloat16")))(B, W, x)
    expected = jax.grad(loss)(B, W, x)
    # Summed in bfloat16 it is 5e-3: each addition rounds to 8 bits.
    assert float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)) < 1.5e-3
    assert ("reduce_sum", ("bfloat16",)) not in names(jax.grad(autocast(loss, "bfloat16")), B, W, x)


@pytest.mark.slow
def test_gradients_of_scalars_are_summed_in_float32():
    def large(s, w, x):
        y = jnp.tanh(x @ w) * s
        for _ in range(12):
            y = jnp.tanh(y @ w) + y
        return y.sum()

    x, scalar = jax.random.normal(KEY, (4096, 8)), jnp.ones((1, 1))
    got = jax.grad(lambda s: 10 * autocast(jax.jit(large), "float16")(s, W, x))(scalar)
    expected = jax.grad(lambda s: 10 * large(s, W, x))(scalar)
    assert_close(got, expected, roundings=64)

    def padded(s, w, x):
        return jnp.sum(lax.pad(x @ w, s, ((1, 1, 0), (0, 0, 0))) @ w)

    gradient = jax.grad(autocast(padded, "float16"), argnums=(0, 1))
    assert ("reduce_sum", ("float16",)) not in names(gradient, 2.0, W, X)


def test_look_ahead():
    # Only float32 operations use the product: it is float32, and so is what follows.
    assert explain(lambda x: jnp.exp(x @ W), "float16")(X).of("dot_general")[0].chosen == "float32"
    big = jnp.full((4, 8), 300.0)
    assert jnp.isfinite(
        autocast(lambda x: jnp.sqrt(jnp.mean(x @ jnp.eye(8) ** 1 * (x @ jnp.eye(8)))), "float16")(big)
    )
    assert explain(lambda x: jnp.tanh(x @ W) @ W, "float16")(X).of("dot_general")[0].chosen == "float16"

    def through_loop(x):
        return jnp.exp(lax.scan(lambda c, _: (c @ W, None), x, length=2)[0])

    def through_branch(x):
        return jnp.exp(lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: x @ W.T, x))

    def through_call(x):
        return jnp.exp(jax.jit(lambda x: x @ W)(x))

    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))

    def through_shards(x):
        spec = {"mesh": mesh, "in_specs": P("a"), "out_specs": P("a")}
        return jnp.exp(jax.shard_map(lambda x: x @ W, **spec)(x))

    for function in (through_branch, through_call, through_shards):
        assert {row.chosen for row in explain(function, "float16")(X).of("dot_general")} == {"float32"}, (
            function
        )
    # A loop's product is used by the next product too.
    assert {row.operands for row in explain(through_loop, "float16")(X).of("dot_general")} == {"float16"}


def test_look_ahead_sees_results_that_are_no_float32():
    large = jnp.full((4, 8), 300.0)
    assert jnp.isfinite(
        autocast(lambda x: ((x @ jnp.eye(8)) ** 2).astype(jnp.bfloat16), "float16")(large)
    ).all()
    spectrum = autocast(lambda x: jnp.abs(jnp.fft.fft((x @ jnp.eye(8)) ** 2)), "float16")(large)
    assert jnp.isfinite(spectrum).all()
    # Decisions are made on float32 logits: 2049.3 and 2049.8 are the same number in half.
    logits = jnp.array([[1.0, 1024.0, 1025.0, 0.0]])
    assert explain(lambda x: jnp.argmax(x @ W, -1), "float16")(X).of("dot_general")[0].chosen == "float32"
    assert explain(lambda x: x @ W > 0.5, "bfloat16")(X).of("dot_general")[0].chosen == "float32"
    weights = jnp.eye(4).at[1, 3].set(1.0)
    for pick in (jnp.argmax, lambda x, axis: jax.lax.top_k(x, 1)[1][:, 0]):
        chosen = autocast(lambda x, pick=pick: pick(x @ weights * 2, axis=-1), "float16")(logits)
        assert chosen.tolist() == [2]


def test_constants_that_half_cannot_hold_keep_float32():
    def epsilon(x):
        return jnp.tanh((x @ W) + 1e-12) @ W

    def mask(x):
        scores = x @ W
        return jnp.maximum(jnp.where(scores > 0, scores, jnp.finfo(jnp.float32).min), -5.0) @ W

    for half in ("float16", "bfloat16"):
        assert_close(autocast(mask, half)(X), mask(X), half, roundings=32)
        assert explain(mask, half)(X).of("select_n")[0].chosen == "float32"
    assert explain(epsilon, "float16")(X).of("add")[0].chosen == "float32"
    assert explain(epsilon, "bfloat16")(X).of("add")[0].chosen == "bfloat16"
    array = jnp.float32(1e-12)
    assert explain(lambda x: jnp.tanh((x @ W) + array) @ W, "float16")(X).of("add")[0].chosen == "float32"


def test_masks_and_numbers_take_no_part_in_promotion():
    def function(x):
        h = (x @ W) * (x > 0).astype(jnp.float32)
        return jnp.where(x > 1, h * 0.5 + 2, 0.0) @ W

    rows = explain(function, "float16")(X)
    assert {row.chosen for row in rows.of("mul", "add", "select_n")} == {"float16"}


@pytest.mark.parametrize(
    ("scaled", "dtype"),
    [
        (lambda mask: mask / 0.9, "float16"),  # As Flax's attention drops weights.
        (lambda mask: (1.0 - mask) * 2.0, "float16"),
        (lambda mask: 1.0 - mask / 0.0, "float16"),  # Infinities are meant.
        (lambda mask: (1.0 - mask) * 1e4 * 1e4, "float32"),  # Out of float16's range.
        (lambda mask: mask / 1e4 / 1e4, "float32"),
        (lambda mask: mask * jnp.sum(mask), "float32"),  # No number of the program.
        (lambda mask: 10.0 / (mask + 1e-4) * 1e-4, "float32"),  # 1e5 where the mask is 0.
    ],
)
def test_masks_times_numbers_are_masks(scaled, dtype):
    def function(x):
        return ((x @ W) * scaled((x > 0).astype(jnp.float32))) @ W

    assert explain(function, "float16")(X).of("mul")[-1].operands == dtype
    out, expected = autocast(function, "float16")(X), function(X)
    assert dtype == "float32" or jnp.allclose(out, expected, 0.01, 0.01, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda b, x: x @ jnp.concatenate([W, W], 1) + jnp.concatenate([b, b]), "float16"),
        # As BEiT, whose keys have no bias.
        (lambda b, x: x @ jnp.concatenate([W, W], 1) + jnp.concatenate([b, jnp.zeros(8)]), "float16"),
        (lambda b, x: x @ jnp.concatenate([W, W], 1) + jnp.concatenate([b, jnp.full(8, 1e5)]), "float32"),
        (lambda b, x: x @ jnp.concatenate([W, W], 1) + jnp.concatenate([b, jnp.sin(b)]), "float32"),
        (lambda b, x: x @ W + jnp.stack([b, b, b, b]), "float32"),  # Rows of its own.
        (lambda b, x: lax.scan(lambda h, wb: (h @ wb[0] + wb[1], None), x,
                               (jnp.stack([W, -W]), jnp.stack([b, b])))[0], "float16"),
    ],
)  # fmt: skip
def test_biases_that_are_joined_are_biases(function, dtype):
    def loss(b, x):
        return jnp.sum(jnp.tanh(jnp.tanh(function(b, x)) @ jnp.eye(function(b, x).shape[-1], 8)))

    assert {row.operands for row in explain(loss, "float16")(B, X).of("add")} == {dtype}
    got, expected = (jax.grad(f)(B, X) for f in (autocast(loss, "float16"), loss))
    assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        lambda h: jnp.clip(h, 0.0, 1.0),
        lambda h: jnp.clip(h, 0, True),
        lambda h: jax.nn.leaky_relu(h, 0.2),
        lambda h: h % 0.75,
        lambda h: h // 0.75,
        lambda h: jnp.fmod(h, 0.75),
        lambda h: jnp.divmod(h, 0.5)[1],
        lambda h: jnp.where(h > 0, h, 2),
        lambda h: lax.scan(jax.jit(lambda c, _: (c * 0.5, jnp.clip(c, 0.0, 1))), h, None, length=2)[1][1],
        lambda h: jax.checkpoint(lambda h, s: jnp.maximum(h, s))(h, 0.5),
        lambda h: lax.cond(h[0, 0] > 0, lambda h, s: h * s, lambda h, s: h + s, h, 0.5),
        lambda h: gated(h, 0.5),
    ],
)
def test_numbers_as_arguments_of_small_functions(fn):
    def function(x):
        return fn(x @ W) @ W

    x, rows = X * 0.5, jnp.stack([X, X])
    out = jax.eval_shape(autocast(function, "float16"), x)
    assert (out.shape, out.dtype) == (X.shape, np.float32)
    for lift in (jax.vmap, jax.jit, jax.checkpoint, lambda f: jax.grad(lambda x: f(x).sum())):
        args = rows if lift is jax.vmap else x
        for cast in (lift(autocast(function, "float16")), autocast(lift(function), "float16")):
            assert jax.eval_shape(cast, args) == jax.eval_shape(lift(function), args)
    # The number is no array of the operand's shape: nothing that is made of it is broadcast.
    clipped = autocast(lambda x: jnp.clip(x @ W, 0.0, 1.0) @ W, "float16")
    assert "broadcast_in_dim" not in {name for name, _ in names(clipped, X)}


def test_a_number_as_an_argument_gives_what_it_gives_without():
    def critic(params, x):
        """A discriminator with clipped scores, as of a GAN."""
        for w in params:
            x = jax.nn.leaky_relu(x @ w, 0.2)
        return jnp.mean(jnp.clip(x, -1.0, 1.0) ** 2) + jnp.mean(x % 2.0)

    cast = jax.jit(jax.value_and_grad(autocast(critic, "float16")))
    assert_close(cast([W, W.T], X), jax.jit(jax.value_and_grad(critic))([W, W.T], X))


def test_what_is_donated_after_it_was_moved():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)

    def weights(x):
        moved = x.T.reshape(64)
        return donating(x) @ moved.reshape(8, 8)

    def activations(x):
        h = x @ W
        moved = h.T
        return donating(h) @ moved + x

    def masks(x):
        moved = (x > 0).astype(jnp.float32)
        return (x @ W) * moved, jax.jit(jnp.logical_not, donate_argnums=0)(x > 0)

    for function in (weights, activations, masks):
        expected = function(jnp.eye(8))
        assert_close(autocast(function, "float16")(jnp.eye(8)), expected)
    given = jnp.eye(8)
    autocast(weights, "float16")(given)
    assert given.is_deleted()


def test_scan_carries_and_constants():
    def function(w, xs):
        return lax.scan(lambda c, x: (c + jnp.tanh(x @ w), None), jnp.zeros((4, 8)), xs)[0]

    xs = jnp.broadcast_to(X, (256, 4, 8)) * 0.1
    jaxpr = jax.make_jaxpr(autocast(function, "bfloat16"))(W, xs).jaxpr
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert {v.aval.dtype for v in scan.invars} == {np.dtype(np.float32)}  # A sum from zero, and a weight.

    def loss(f):
        return jax.jit(jax.grad(lambda w: jnp.mean(f(w, xs) ** 2)))(W)

    got, expected = loss(autocast(function, "bfloat16")), loss(function)
    # 256 bfloat16 additions would err by some 2.5e-2; one rounding of each term errs by eps / 2 at most.
    assert float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)) < float(
        jnp.finfo(jnp.bfloat16).eps
    )


@pytest.mark.slow
def test_identity_in_float32_and_idempotence():
    # A product may differ by a rounding from call to call: jax 0.12 divides it among idle threads of a CPU.
    for function in FUNCTIONS:
        expected = function(W, X)
        for policy in ("float32", jnp.float32, "full"):
            for a, b in zip(
                jax.tree.leaves(autocast(function, policy)(W, X)), jax.tree.leaves(expected), strict=True
            ):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        once = autocast(function, "float16")
        for a, b in zip(
            jax.tree.leaves(once(W, X)), jax.tree.leaves(autocast(once, "float16")(W, X)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_parts_in_which_nothing_changes_are_the_same():
    inner = jax.jit(lambda x: functools.reduce(lambda h, _: jnp.sin(h), range(30), x))
    before = [e for e in jax.make_jaxpr(inner)(X).jaxpr.eqns if e.primitive.name == "jit"]
    after = [e for e in jax.make_jaxpr(autocast(inner, "float16"))(X).jaxpr.eqns if e.primitive.name == "jit"]
    assert str(before) == str(after)


def test_large_calls_stay_calls_and_are_traced_once():
    big = jax.jit(lambda w, x: functools.reduce(lambda h, _: jnp.tanh(h @ w), range(14), x))

    def function(w, x):
        return big(w, big(w, big(w, x @ w)))

    calls = [
        e for e in jax.make_jaxpr(autocast(function, "float16"))(W, X).jaxpr.eqns if e.primitive.name == "jit"
    ]
    assert len(calls) == 3
    assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
    assert calls[0].params["name"] == "<lambda>"


@jax.custom_vjp
def attended(x, w):
    return jnp.tanh(x @ w)


def _attended_forward(x, w):
    return attended(x, w), (x, w)


def _attended_backward(residuals, g):
    x, w = residuals
    return g @ w.T, x.T @ g


attended.defvjp(_attended_forward, _attended_backward)


def test_policies_of_checkpoint_see_the_products():
    def part(w, x):
        return jnp.exp(jax.nn.softmax(x @ w) @ w)

    policy = jax.checkpoint_policies.dots_saveable

    def count(function):
        return sum(products(jax.grad(lambda w, x: jnp.sum(function(w, x))), W, X).values())

    saved = count(jax.checkpoint(part, policy=policy))
    assert count(autocast(jax.checkpoint(part, policy=policy), "float16")) == saved
    assert count(jax.checkpoint(autocast(part, "float16"), policy=policy)) == saved
    assert count(jax.checkpoint(part)) > saved


def test_custom_vjp_stays_and_says_so_once():
    def function(w, x):
        return attended(x @ w, w).sum()

    cast, x = autocast(function, "float16"), jnp.concatenate([X, -X])
    with pytest.warns(
        UserWarning, match=r"custom_vjp_call holds dot_general, .* Autocast the functions that its passes"
    ) as caught:
        jax.grad(cast)(W, x)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(cast)(W, x)  # Once.


def test_functions_that_a_custom_vjp_calls_can_be_autocast():
    multiply = autocast(lambda w: X @ w, "float16")
    product = jax.custom_vjp(multiply)
    product.defvjp(lambda w: (multiply(w.value), None), lambda _, g: (X.T @ g,), symbolic_zeros=True)
    advised = autocast(lambda w: product(w).sum(), "float16")
    assert set(products(advised, W)) == {("dot_general", "float16", "float16")}


@pytest.mark.slow
def test_no_tracer_leaks():
    with jax.checking_leaks():
        autocast(layer, "bfloat16")(W, X)
        jax.grad(autocast(scanned, "bfloat16"))(W, X)


def test_results_keep_their_weak_types():
    def function(x, weak):
        return 2.0 * jnp.asarray(3.0), weak + 1, weak * x, 3.0

    for got in (autocast(function, "float16")(X, jnp.asarray(2.0)), function(X, jnp.asarray(2.0))):
        assert [x.weak_type for x in got[:3]] == [True, True, False]


@pytest.mark.slow
def test_what_algorithms_of_jax_and_optax_multiply_is_float32():
    a = jnp.eye(12) + 0.1
    functions = [
        jnp.linalg.pinv, jax.scipy.linalg.expm, lambda a: jax.image.resize(a, (24, 24), "linear"),
        lambda a: jnp.polyfit(jnp.arange(12.0), a[0], 9), jax.grad(lambda a: jnp.linalg.solve(a, a[0]).sum()),
        jax.grad(lambda a: jnp.linalg.cholesky(a).sum()), jax.grad(jnp.linalg.det),
        lambda a: jax.random.multivariate_normal(KEY, a[0], a), lambda a: jax.scipy.signal.detrend(a[0]),
        lambda a: minimize(lambda v: ((v - a[0]) ** 2).sum(), a[1], method="BFGS", options={"maxiter": 2}).x,
        lambda a: optax.tree.vdot({"a": a}, {"a": a}),
    ]  # fmt: skip
    for function in functions:
        np.testing.assert_array_equal(autocast(function, "bfloat16")(a), function(a))


def test_explain_shows_what_is_inside_operations_that_run_as_traced():
    def function(w, x):
        return attended(x, w) + jnp.linalg.solve(w, x.T).T

    with pytest.warns(UserWarning, match="custom_vjp_call holds dot_general"):
        rows = explain(function, "float16")(W, X)
    assert {"tanh", "triangular_solve", "dot_general"} <= {row.operation for row in rows}
    assert {row.operands for row in rows.of("tanh", "triangular_solve", "dot_general")} == {"float32"}


def test_cudnn_attention_asks_for_half_operands(monkeypatch):
    kernel = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(kernel, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(kernel, "check_compute_capability", lambda *_: True)

    def attention(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    q = jnp.ones((1, 16, 2, 64))
    with pytest.raises(TypeError, match=r"Hand it half ones .*or use jmp_policy.wrap"):
        autocast(attention, "bfloat16")(q)
    half = jax.make_jaxpr(autocast(lambda q: attention(q.astype("bfloat16")), "bfloat16"))(q)
    assert half.out_avals[0].dtype == jnp.bfloat16
    with pytest.raises(NotImplementedError, match="head dim must be"):  # Of half operands: nothing to add.
        autocast(lambda q: attention(q.astype("bfloat16")), "bfloat16")(jnp.ones((1, 16, 2, 132)))


def test_explicit_precision_stays_and_says_so():
    def function(w, x):
        return jnp.matmul(x, w, precision="highest")

    assert set(products(autocast(function, "float16"), W, X)) == {("dot_general", "float32", "float32")}
    (row,) = explain(function, "float16")(W, X)
    assert (row.operands, row.why) == ("float32", "full: it asks for a precision of its own")
    with jax.default_matmul_precision("highest"):
        assert set(products(autocast(layer, "float16"), W, X)) == {("dot_general", "float16", "float16")}
        # JAX's linear algebra asks for it itself.
        for exact in (jax.scipy.linalg.expm, jnp.linalg.pinv, jax.scipy.linalg.polar):
            found = products(autocast(exact, "float16"), W)
            assert {operand for _, *operands in found for operand in operands} == {"float32"}
        found = products(autocast(jnp.linalg.matmul, "float16"), W, W)
        assert set(found) == {("dot_general", "float16", "float16")}


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_weight_follows_what_the_model_has_cast_itself(half):
    def function(w, x):
        h = jnp.tanh(x @ w).astype(jnp.bfloat16)  # As a layer does that is written for bfloat16.
        experts = lax.ragged_dot(h, jnp.stack([w, 2 * w]), jnp.array([3, 1]))
        return jnp.square(h @ w + experts).sum()

    found = [(name, *dtypes[:2]) for name, dtypes in names(autocast(function, half), W, X) if "dot" in name]
    rest = ("bfloat16", "bfloat16")
    assert found == [("dot_general", half, half), ("ragged_dot_general", *rest), ("dot_general", *rest)]
    backward = products(jax.grad(autocast(function, half)), W, X)
    assert {operand for _, *operands in backward for operand in operands} == {half, "bfloat16"}
    gradient, exact = (jax.grad(f)(W, X) for f in (autocast(function, half), function))
    assert_close(gradient, exact, "bfloat16")
    if half == "float16":  # The sum, and the other operand, may be beyond its range.

        def beyond(w, x):
            return jnp.square(((300 * x) @ (3000 * w)) @ x.T.astype("bfloat16")).mean() * 1e-10

        assert_close(jax.grad(autocast(beyond, half))(W, X), jax.grad(beyond)(W, X), "bfloat16")
        large = jax.make_jaxpr(autocast(lambda w: jnp.full((8, 8), 1e5, "bfloat16") @ w, half))(W)
        assert large.out_avals[0].dtype == jnp.float32
        row = explain(lambda w: jnp.ones((8, 8), "bfloat16") @ w, half)(W).of("dot_general")[0]
        assert row.why.endswith("the result is float32, since an operand is bfloat16")


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_product_of_integers_and_a_weight(half):
    def function(w, x):
        return jnp.square(x @ w).sum()

    x = jnp.arange(-32, 32, dtype=jnp.int8).reshape(8, 8)
    assert_close(jax.grad(autocast(function, half))(W, x), jax.grad(function)(W, x), half)


def test_a_product_with_eight_bits_stays():
    def function(w):
        return lax.dot(jnp.ones((8, 8), "float8_e5m2"), w, preferred_element_type=jnp.float32)

    assert products(autocast(function, "float16"), W) == products(function, W)


def test_kernels_that_are_not_looked_into_are_named():
    def function(w, x):
        return lax.platform_dependent(x, w, cpu=lambda x, w: x @ w, default=lambda x, w: x @ w * 2)

    with pytest.warns(UserWarning, match="a cond holds dot_general"):
        out = autocast(function, "float16")(W, X)
    np.testing.assert_array_equal(out, function(W, X))


def test_regions():
    def function(w, x):
        h = x @ w
        with region("off"):
            h = h @ w
            with region("bfloat16"):
                h = h @ w
        with region("lower"):
            h = jnp.exp(h * 0.01) + 1.0
        return full_precision(lambda h: h @ w)(h)

    rows = explain(function, "float16")(W, X)
    assert [row.operands for row in rows.of("dot_general")] == ["float16", "float32", "bfloat16", "float32"]
    assert rows.of("exp")[0].chosen == "float16"
    np.testing.assert_array_equal(function(W, X), function(W, X))  # Outside of autocast: nothing.
    assert {n for n, d in names(function, W, X) if "float16" in d} == set()
    # Kept by a jitted function, wherever it is called.
    inner = jax.jit(function)
    inner(W, X)
    jitted = explain(inner, "float16")(W, X).of("dot_general")
    assert [row.operands for row in jitted] == [row.operands for row in rows.of("dot_general")]


@pytest.mark.slow
def test_region_in_a_linen_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="body")(x)
            with region("off"):
                return nn.Dense(2, name="head")(x)

    model = Net()
    params = model.init(KEY, X)
    rows = explain(model.apply, "float16")(params, X).of("dot_general")
    assert [(row.path, row.operands) for row in rows] == [("Net/body", "float16"), ("Net/head", "float32")]


def test_rules_by_path():
    def function(w, x):
        with jax.named_scope("decoder"):
            with jax.named_scope("layer_0"):
                x = x @ w
            with jax.named_scope("lm_head"):
                return x @ w

    def operands(rules):
        return [row.operands for row in explain(function, "float16", rules=rules)(W, X).of("dot_general")]

    assert operands((("*head*", "off"),)) == ["float16", "float32"]
    assert operands({"decoder/layer_*": "bfloat16"}) == ["bfloat16", "float16"]
    assert operands((("decoder", "off"), ("layer_0", "mixed_float16"))) == ["float16", "float32"]
    assert operands((("decoder/*", "off"), ("*head", "float16"))) == ["float32", "float32"]  # The first wins.
    with pytest.raises(ValueError, match=r"'heads' matches no .*nearest paths are .*lm_head"):
        operands((("heads", "off"),))
    jaxpr = jax.make_jaxpr(
        jax.grad(autocast(lambda w: function(w, X).sum(), "float16", rules={"*head*": "off"}))
    )(W)
    assert "f32" in str(jaxpr)


def test_lists():
    def operands(name, **lists):
        return [row.operands for row in explain(layer, "float16", **lists)(W, X).of(name)]

    assert operands("tanh") == ["float16"]
    assert operands("tanh", full={"tanh"}) == ["float32"]
    assert operands("tanh", full="tanh") == ["float32"]
    assert operands("dot_general", full=["dot_general"]) == ["float32", "float32"]
    assert operands("tanh", ops={"tanh": "full"}) == ["float32"]
    rows = explain(lambda x: jnp.exp(x @ W) @ W, "float16", follow={"exp"})(X)
    assert rows.of("exp")[0].operands == "float16"


def test_a_primitive_of_ones_own():
    primitive = jax.extend.core.Primitive("doubled")
    primitive.def_impl(lambda x: x * 2)
    primitive.def_abstract_eval(lambda x: x)

    def function(x):
        return primitive.bind(x @ W)

    assert explain(function, "float16")(X).of("doubled")[0].why == "on no list: as traced"
    assert explain(function, "float16", lower={"doubled"})(X).of("doubled")[0].chosen == "float16"
    picky = jax.extend.core.Primitive("picky")

    def only_float32(x):
        if x.dtype != np.float32:
            raise TypeError("picky takes float32")
        return x

    picky.def_abstract_eval(only_float32)
    with pytest.raises(TypeError, match="picky takes float32"):
        explain(lambda x: picky.bind(x @ W), "float16", lower={"picky"})(X)
    with pytest.warns(UserWarning, match=r"no operation met so far has the name 'dot_generl'.*'dot_general'"):
        autocast(layer, "float16", full={"dot_generl"})(W, X)


def test_explain():
    rows = explain(layer, "float16")(jax.ShapeDtypeStruct(W.shape, W.dtype), X)
    assert str(rows) == str(explain(layer, "float16")(W, X))
    assert len(rows) == len(rows.operations)
    first = rows[0]
    assert first.operation == "dot_general"
    assert "test_autocast.py" in first.line
    assert (first.traced, first.operands, first.chosen) == ("float32", "float16", "float16")
    assert first.why.startswith("lower: Tensor Cores")
    table = str(rows)
    # No column for a path: nothing has one here.
    assert table.splitlines()[0].split() == [
        "operation",
        "line",
        "traced",
        "operands",
        "chosen",
        "why",
    ]
    assert len(rows.to_dict()["operations"]) == len(rows)
    with pytest.warns(UserWarning, match="custom_vjp"):
        assert "Note: a custom_vjp" in str(explain(lambda w: attended(X, w), "float16")(W))
    assert [row.operation for row in rows[:2]] == ["dot_general", "broadcast_in_dim"]


class _Body(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(8)(x)))


class _Net(nn.Module):
    def setup(self):
        self.body, self.head = _Body(), nn.Dense(2)

    def __call__(self, x):
        return self.head(self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {"head": "float32"},
        {"body": "mixed_bfloat16", "body/Dense_1": "float32"},
        {_Body: "float32"},
        {lambda path, module: path.endswith("Dense_0"): "float32"},
        {"**/Dense_1": "float32", "head": "mixed_bfloat16"},
    ],
    ids=["path", "nested", "class", "predicate", "glob"],
)
def test_a_policy_map_means_what_it_means_to_wrap(overrides):
    rules = jmpp.PolicyMap("mixed_float16", overrides)
    model = _Net()
    params = model.init(KEY, X)
    wrapped = products(jmpp.wrap(model, rules).apply, params, X)
    assert products(autocast(model.apply, rules), params, X) == wrapped
    # Also where the function was traced before, without rules.
    apply = jax.jit(model.apply)
    apply(params, X)
    assert products(autocast(apply, rules), params, X) == wrapped
    # And where equal rules have traced it, so that no module is called again.
    assert products(autocast(apply, jmpp.PolicyMap("mixed_float16", overrides)), params, X) == wrapped


def test_unused_rules_of_a_policy_map():
    model = _Net()
    params = model.init(KEY, X)
    with pytest.raises(ValueError, match=r"'hed' matches no .*nearest paths are 'head'"):
        autocast(model.apply, jmpp.PolicyMap("mixed_float16", {"hed": "float32"}))(params, X)


def test_bad_input():
    with pytest.raises(
        TypeError, match=r"autocast takes a function of arrays, got Dense\. Give it module\.apply"
    ):
        autocast(nn.Dense(2), "float16")
    with pytest.raises(TypeError, match="autocast takes a function of arrays, got int"):
        autocast(3, "float16")
    with pytest.raises(ValueError, match=r"Unknown policy 'fp61'\. Did you mean 'fp16'\?"):
        autocast(layer, "fp61")
    with pytest.raises(ValueError, match="float16, bfloat16 or float32; 'float64' asks for float64"):
        autocast(layer, "float64")
    for given in (jnp.float8_e4m3fn, "c=float8_e4m3fn", jmpp.Policy("float8_e5m2", "float16", "float32")):
        with pytest.raises(ValueError, match=r"asks for float8_e.*every tensor needs a scale"):
            autocast(layer, given)
    with (
        pytest.raises(ValueError, match=r"autocast .* asks for float8_e5m2.*bfloat16"),
        region("float8_e5m2"),
    ):
        pass
    with pytest.raises(ValueError, match=r"autocast .* asks for float8_e5m2"):
        autocast(layer, "float16", rules={"*": "float8_e5m2"})
    with pytest.raises(ValueError, match="int32, which is not floating"):
        autocast(layer, jnp.int32)
    with pytest.raises(TypeError, match=r"Rules are a mapping .* pairs"):
        autocast(layer, "float16", rules=("*head*", "off"))
    with pytest.raises(TypeError, match="is no path glob"):
        autocast(layer, "float16", rules={nn.Dense: "off"})
    with pytest.raises(ValueError, match="neither 'off' nor 'lower'"):
        autocast(layer, "float16", rules={"*": "of"})
    with pytest.raises(ValueError, match=r"Unknown op list 'lowr' for 'exp'"):
        autocast(layer, "float16", ops={"exp": "lowr"})
    with pytest.raises(ValueError, match="'exp' is on two lists, 'lower' and 'full'"):
        autocast(layer, "float16", lower={"exp"}, full={"exp"})
    for name in ("jit", "custom_vjp_call"):
        with pytest.raises(ValueError, match=f"A {name} holds other operations.*autocast the functions"):
            autocast(layer, "float16", lower={name})
    with pytest.raises(TypeError, match="hold names of primitives"):
        autocast(layer, "float16", lower={jnp.exp})
    with pytest.raises(ValueError, match="neither 'off' nor 'lower'"), region("on"):
        pass
    with pytest.raises(TypeError, match="full_precision decorates a function"):
        full_precision("off")
    with pytest.raises(ValueError, match="asks for weight gradients in bfloat16"):
        autocast(layer, "p=f32,c=f16,o=f32,g=bf16")


@pytest.mark.parametrize(
    "policy", ["mixed_float16", "float16", jnp.float16, np.dtype("float16"), jmpp.get_policy("half")]
)
def test_ways_to_say_which_half(policy):
    half = "bfloat16" if isinstance(policy, jmpp.Policy) else "float16"
    assert set(products(autocast(layer, policy), W, X)) == {("dot_general", half, half)}


def test_three_line_step():
    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"] - x) ** 2)

    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(2.0**24))
    params = {"w": W}
    opt_state, traces = tx.init(params), []

    @jax.jit
    def step(params, opt_state, x):
        traces.append(None)
        loss, grads = jmpp.scaled_value_and_grad(autocast(loss_fn, "float16"))(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state, X)
        losses.append(float(loss))
    found = jmpp.metrics(opt_state)
    assert 0 < int(found["skipped_steps"]) < 20  # The first scale is too large for float16 cotangents.
    assert losses[-1] < losses[0]
    assert params["w"].dtype == np.float32
    assert len(traces) == 1


def test_a_scalar_type_among_the_arguments_is_static():
    # It has a dtype and a shape, and is no array.
    def f(w, x, dtype):
        return (x @ w).astype(dtype)

    w, x = jnp.ones((3, 2)), jnp.ones((4, 3))
    assert autocast(f, "float16")(w, x, np.float32).dtype == jnp.float32
    assert autocast(f, "float16")(w, x, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_auto_axes_within_an_explicit_mesh(half):
    """Operands are cast on the mesh that they lie on, not on that to which they are resharded."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        w = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))

        @jax.sharding.auto_axes
        def inner(w, x):
            return jax.nn.softmax(x @ w) @ w.T

        def loss(w, x):
            return jnp.square(inner(w, x, out_sharding=P("data", None))).mean()

        exact = jax.jit(jax.grad(loss))(w, x)
        found = jax.jit(jax.grad(autocast(loss, half)))(w, x)
        assert products(autocast(loss, half), w, x) == {("dot_general", half, half): 2}
        assert jax.typeof(found) == jax.typeof(exact)
        assert jnp.linalg.norm(found - exact) < 8 * jnp.finfo(half).eps * jnp.linalg.norm(exact)
        assert jmpp.drift(autocast(loss, half), w, x).is_normal


def test_products_with_float64_data_are_told():
    with jax.enable_x64(True):
        x, w = np.ones((32, 16)), jnp.ones((16, 8), jnp.float32)

        def fn(w, x):
            return jnp.tanh(x @ w)

        with pytest.warns(UserWarning, match="a dot_general has a float64 operand.*cast it to float32"):
            found = jmpp.audit(jmpp.autocast(fn, "float16"), w, x)
        assert "as an operand is float64, which autocast leaves: cast it to float32" in found.verdict
        with pytest.warns(UserWarning, match="float64 operand"):
            (product,) = jmpp.explain(fn, "float16")(w, x).of("dot_general")
        assert product.why == "as traced: an operand is float64"
