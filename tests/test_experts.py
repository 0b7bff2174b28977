"""Float8 recipes on experts: batched and ragged products, with scales of each expert."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import paired
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.report.lowering.compiler import is_installed

RECIPES = ["fp8_current", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4-sr"]
RNG = np.random.default_rng(0)

#: Experts, rows, inputs, outputs. An expert has no row, one has a single row, and six rows have no expert.
G, M, K, N = 4, 96, 32, 64
SIZES = jnp.int32([30, 0, 1, 59])
#: How large the weights of each are.
SCALES = jnp.float32([1, 1, 1e-3, 30])[:, None, None]


def error(found, exact):
    found, exact = (np.asarray(x, np.float32) for x in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def rounded(x, format):
    """Values divided by a power of two, rounded, and multiplied again, by NumPy alone."""
    x = np.asarray(x, np.float32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(jnp.finfo(format).max)))
    return (x / scale).astype(format).astype(np.float32) * scale


def ragged(w, x, sizes):
    return ragged_of(w, jnp.tanh(x), sizes)


def ragged_of(w, x, sizes=SIZES):
    """The first product has a half result, which another one takes."""
    of_rows = jnp.repeat(SCALES[:, 0], sizes, axis=0, total_repeat_length=len(x))
    return jnp.tanh(lax.ragged_dot(x, w, sizes) / of_rows) @ jnp.eye(N)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "weight_first"), paired(RECIPES, [False, True]))
def test_experts_have_scales_of_their_own(recipe, weight_first):
    sizes = jnp.float32([1, 1e-3, 1e-6, 30])[:, None, None]
    w = jnp.asarray(RNG.normal(size=(4, 32, 64)) / 6, jnp.float32) * sizes
    x = jnp.asarray(RNG.normal(size=(4, 32, 32)), jnp.float32)

    def outputs(w, x):
        x, equation = jnp.tanh(x), "etd,edf->etf"
        h = jnp.einsum("edf,etd->etf", w, x) if weight_first else jnp.einsum(equation, x, w)
        return jnp.einsum(equation, jax.nn.relu(h), jnp.swapaxes(w, 1, 2))

    half = jmpp.autocast(outputs, lower=recipe)
    whys = {row.path: row.why for row in jmpp.explain(outputs, lower=recipe)(w, x).of("dot_general")}
    assert "in float8" in next(iter(whys.values()))
    loss = lambda f: lambda w: jnp.sum(jnp.square(f(w, x)) / jnp.square(sizes) ** 2)  # noqa: E731
    found, exact = (jax.jit(jax.grad(loss(f)))(w) for f in (half, outputs))
    # With one scale for all, what the smallest expert holds would be 0.
    assert max(error(a, b) for a, b in zip(found, exact, strict=True)) < (0.3 if "fp4" in recipe else 0.12)
    both = jax.vmap(lambda x: half(w, x))(jnp.stack([x, 2 * x]))
    # Of each expert, also the smallest.
    each = zip(both[0], outputs(w, x), strict=True)
    assert max(error(a, b) for a, b in each) < (0.3 if "fp4" in recipe else 0.12)


@functools.cache
def arrays():
    return jnp.asarray(RNG.normal(size=(G, K, N)) / 6, jnp.float32) * SCALES, jnp.asarray(
        RNG.normal(size=(M, K)), jnp.float32
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*RECIPES, "nvfp4", "fwd:fp8_current", "fwd:nvfp4-sr+bwd:fp8_current"])
def test_ragged_products_have_a_scale_for_each_expert(recipe):
    w, x = arrays()

    def loss(w, x, sizes):
        return jnp.sum(jnp.sin(ragged(w, x, sizes) + 1))

    (row,) = jmpp.explain(loss, lower=recipe)(w, x, SIZES).of("ragged_dot_general")
    assert f"in float8 by the recipe {recipe}" in row.why
    with jmpp.rounding_key(jax.random.key(0)):
        found = jax.jit(jax.grad(jmpp.autocast(loss, lower=recipe), (0, 1)))(w, x, SIZES)
    exact = jax.grad(loss, (0, 1))(w, x, SIZES)
    limit = 0.45 if "fp4" in recipe else 0.12
    assert max(error(found[0][e], exact[0][e]) for e in (0, 2, 3)) < limit  # Of the single row, too.
    assert error(found[1], exact[1]) < limit
    assert not found[0][1].any()
    assert not found[1][90:].any()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "value"), paired(RECIPES, [jnp.nan, 1e6, 1e30]))
def test_rows_of_no_group_may_hold_anything(recipe, value):
    w, x = arrays()
    half = jmpp.autocast(lambda w, x: lax.ragged_dot(x * 1.0, w, SIZES).astype(jnp.bfloat16), lower=recipe)

    def run(value):
        out, vjp = jax.vjp(half, w, x.at[92].set(value))
        return out[:90], *vjp(jnp.ones((M, N), jnp.bfloat16).at[93].set(value))

    (out, of_w, of_x), plain = run(value), run(0)
    for found, wanted in zip((out, of_w, of_x[:90]), (plain[0], plain[1], plain[2][:90]), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(wanted))


def weights_of(fn, *args):
    """Which operand is the weight, and which the gradient, of each float8 product of a gradient."""
    eqns = ir.equations(jax.make_jaxpr(jax.grad(fn, (0, 1)))(*args).jaxpr)
    return [(eqn.params["weight"], eqn.params["gradient"]) for eqn in eqns if "formats" in eqn.params]


@pytest.mark.slow
def test_a_weight_is_told_from_what_it_is_multiplied_with():
    w, x = arrays()
    of_ragged = {(1, None), (None, 1), (1, 0)}
    for make in (
        lambda w, x: (w, jnp.tanh(x)),
        lambda w, x: (jnp.tanh(w), x),
        lambda w, x: (jnp.sin(w), jnp.cos(x)),
    ):

        def loss(w, x, make=make):
            return jnp.sum(ragged_of(*make(w, x)) ** 2)

        assert set(weights_of(jmpp.autocast(loss, lower="nvfp4-sr"), w, x)) == of_ragged

    def dense(w, x):
        return jnp.sum((jnp.tanh(jnp.tanh(x) @ jnp.tanh(w)) @ jnp.eye(N)) ** 2)

    assert set(weights_of(jmpp.autocast(dense, lower="nvfp4-sr"), w[0], x)) == {(1, None), (None, 0), (1, 0)}


def test_gradients_of_ragged_products_take_the_bits_that_are_kept():
    w, x = arrays()
    loss = jmpp.autocast(lambda w, x: jnp.sum(ragged(w, x, SIZES) ** 2), lower="fp8_current")
    eqns = ir.equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(w, x).jaxpr)
    products = [eqn for eqn in eqns if "formats" in eqn.params]
    bits = [sum(ir.dtype_of(atom) == jnp.uint8 for atom in eqn.invars[5:7]) for eqn in products]
    assert bits == [2, 1, 1]


@pytest.mark.slow
def test_ragged_numbers_are_those_of_numpy():
    w, x = arrays()
    x, ct = jnp.bfloat16(x), jnp.bfloat16(RNG.normal(size=(M, N)))

    def product(w, x):
        return lax.ragged_dot(x.astype(jnp.float32), w, SIZES).astype(jnp.bfloat16)

    half = jmpp.autocast(product, lower="fp8_current")
    out, vjp = jax.vjp(half, w, x)
    of_w, of_x = vjp(ct)
    x8, ct8, each = rounded(x, "float8_e4m3fn"), rounded(ct, "float8_e5m2"), np.cumsum([0, *SIZES])
    for e, (start, end) in enumerate(itertools.pairwise(each)):
        w8 = rounded(jnp.bfloat16(w[e]), "float8_e4m3fn")
        for mine, numpys in (
            (out[start:end], x8[start:end] @ w8),
            (of_x[start:end], ct8[start:end] @ w8.T),
            (of_w[e], x8[start:end].T @ ct8[start:end]),
        ):
            np.testing.assert_allclose(
                np.float32(mine), numpys, rtol=2**-8, atol=1e-6 * np.abs(numpys).max(initial=0)
            )


@pytest.mark.slow
def test_reports_and_float32_gradients_know_ragged_products():
    w, x = arrays()
    loss = lambda w, x: jnp.sum(ragged(w, x, SIZES) ** 2)  # noqa: E731
    for grad, dtype in (("bf16", "bfloat16"), ("f32", "float32")):
        half = jmpp.autocast(loss, f"p=f32,c=bf16,o=f32,g={grad},r=fp8_current")
        found = [p for p in jmpp.audit(half, w, x, grad=True).products if "ragged" in p.operation]
        assert [(p.lhs, p.rhs, p.backward) for p in found] == [
            ("float8_e4m3fn", "float8_e4m3fn", False),
            ("float8_e4m3fn", "float8_e5m2", True),
        ]
        assert found[1].result == dtype
    assert "ragged_dot_general in float8_e5m2" in jmpp.report.drift(half, w, x).verdict
    assert "finite" in str(jmpp.report.diagnose(half, w, x))


@pytest.mark.slow
def test_each_of_a_batch_of_ragged_products():
    w, x = arrays()
    half = jmpp.autocast(ragged, lower="fp8_current")
    batch = jnp.stack([w, 2 * w]), jnp.stack([x, x / 2]), jnp.stack([SIZES, SIZES[::-1]])
    loss = lambda f: lambda *args: jnp.sum(jax.vmap(f)(*args) ** 2)  # noqa: E731
    found, exact = (jax.grad(loss(f), (0, 1))(*batch) for f in (half, ragged))
    assert max(map(error, found, exact)) < 0.12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "each", "check_vma"),
    [("fp8_current", 2, True), ("fp8_current", 1, False), ("nvfp4-sr", 1, True)],
)
@pytest.mark.parametrize("kind", ["ragged", "batched"])
def test_experts_of_several_devices_have_scales_of_their_own(kind, recipe, each, check_vma):
    mesh = jax.make_mesh((4,), ("experts",), (AxisType.Auto,), devices=jax.devices()[:4])
    sizes = jnp.repeat(jnp.float32([1, 1e-7, 1, 1]), each)[:, None, None]
    w = jnp.asarray(RNG.normal(size=(4 * each, K, N)) / 6, jnp.float32) * sizes

    def local(w, x):
        if kind == "batched":
            h = jnp.einsum("emk,ekn->emn", jnp.tanh(x).reshape(each, -1, K), w)
        else:
            h = lax.ragged_dot(jnp.tanh(x), w, 4 + 24 * jnp.arange(each) + 0 * w[:, 0, 0].astype(int))
        return h @ jnp.eye(N)

    place = NamedSharding(mesh, P("experts"))
    x = jnp.asarray(RNG.normal(size=(4 * 32, K)), jnp.float32)
    w, x = jax.device_put((w, x), place)
    whole = jax.shard_map(
        local, mesh=mesh, in_specs=(P("experts"),) * 2, out_specs=P("experts"), check_vma=check_vma
    )
    half, limit = jmpp.autocast(whole, lower=recipe), 0.4 if "fp4" in recipe else 0.12
    loss = lambda f: lambda w, x: jnp.sum(f(w, x) ** 2)  # noqa: E731
    found, exact = (jax.jit(jax.grad(loss(f), (0, 1)))(w, x) for f in (half, whole))
    assert max(map(error, found[0], exact[0])) < limit
    if (kind, recipe) != ("ragged", "nvfp4-sr"):  # Rows of all devices share a scale, of 4 bits' range.
        parts = zip(*(jnp.split(g[1], 4) for g in (found, exact)), strict=True)
        assert max(error(a, b) for a, b in parts) < limit
    # Without jit, too, where operations see the parts of each device.
    assert error(half(w, x)[:8], jax.jit(whole)(w, x)[:8]) < limit


def test_remat_keeps_the_bits_of_ragged_products():
    w, x = arrays()
    half = jmpp.autocast(ragged, lower="fp8_current")

    def roundings(policy):
        kept = jax.checkpoint(lambda w, x: half(w, x, SIZES), policy=policy)
        eqns = ir.equations(jax.make_jaxpr(jax.grad(lambda w, x: kept(w, x).sum()))(w, x).jaxpr)
        return sum(eqn.params.get("name") == "float8_bits" and bool(eqn.outvars) for eqn in eqns)

    assert roundings(jmpp.remat_policies.save_quantised) == 2
    assert roundings(jax.checkpoint_policies.nothing_saveable) == 4


@pytest.mark.slow
def test_ragged_products_that_stay():
    w, x = arrays()
    why = lambda fn, *args: jmpp.explain(fn, lower="fp8_current")(*args).of("ragged_dot_general")[0].why  # noqa: E731
    assert "m=90 is no multiple of 16" in why(ragged, w, x[:90], SIZES)
    first = lambda w, x: jnp.tanh(lax.ragged_dot(x, w, SIZES)) @ jnp.eye(N)  # noqa: E731
    assert "both operands are arguments" in why(first, w, x)
    wide = jnp.zeros((4, 32, 32)), jnp.zeros((96, 32))
    stays = jmpp.explain(
        lambda w, x: ragged_of(jnp.pad(w, ((0, 0), (0, 0), (0, 32))), x * 2), lower="fp8_current@H100"
    )
    assert "no gain on H100" in stays(*wide).of("ragged_dot_general")[0].why
    mesh = jax.make_mesh((4,), ("a",), (AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
        placed = lambda w, x: (  # noqa: E731
            jnp.tanh(lax.ragged_dot_general(x * 2, w, SIZES, numbers, out_sharding=P())) @ jnp.eye(N)
        )
        assert "its out_sharding is given" in why(placed, w, x)
        assert jmpp.autocast(placed, lower="mxfp8")(w, x).shape == (M, N)
    sums = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    over_rows = lambda w, x: jnp.tanh(lax.ragged_dot_general(jnp.tanh(x), w, SIZES, sums)) @ jnp.eye(N)  # noqa: E731
    assert "its groups are not those of rows" in why(over_rows, jnp.ones((M, N)), x)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("cuda"), reason="XLA's GPU compiler is not installed")
def test_ragged_products_reach_the_float8_cores():
    def loss(w, x, sizes):
        h = lax.ragged_dot(jnp.tanh(x), w, sizes)
        return jnp.sum(jnp.square(jnp.tanh(h) @ jnp.eye(2048)))

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 1024, 2048), (4096, 1024)))
    step = jax.grad(jmpp.autocast(loss, lower="fp8_current"))
    report = jmpp.lowering_report(step, w, x, jax.ShapeDtypeStruct((8,), jnp.int32), target="H100")
    arithmetic = sorted(kernel.arithmetic for kernel in report.kernels if kernel.arithmetic)
    assert arithmetic == ["bfloat16"] * 2 + ["float8"] * 2, str(report)
