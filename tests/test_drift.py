"""Half-precision programs against their float32 replay: errors planted at known places are found there."""

import dataclasses
import functools
import json
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_policy as jmpp
from jmp_policy import report
from jmp_policy._src.core.narrowing import narrowed, rounded
from jmp_policy._src.report.drift.comparison import Comparison

HALF, BF16 = jnp.float16, jnp.bfloat16
W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(64, 8)), jnp.float32)


def relative(value, exact):
    value, exact = np.asarray(value, np.float64), np.asarray(exact, np.float64)
    return np.linalg.norm(value - exact) / np.linalg.norm(exact)


def introducing(found):
    """The rows that introduce an error, as (module, direction)."""
    return {(row.module, row.direction) for row in found.rows if row.introduced}


def module_shares(found):
    shares = {}
    for row in found.rows:
        shares[row.module] = shares.get(row.module, 0.0) + row.share
    return {module: share for module, share in shares.items() if share}


def add_up(found):
    """Norms of two parts of a sum: none of them is larger than the other two together."""
    for row in found.rows:
        parts = sorted((row.introduced, row.inherited, row.total))
        assert parts[2] <= (parts[0] + parts[1]) * (1 + 1e-3) + 1e-12, row
    assert sum(row.share for row in found.rows) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_are_rounded_as_by_a_cast(dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=4000) * 10.0 ** rng.uniform(-10, 6, 4000)).astype(np.float32)
    edges = [
        0,
        np.inf,
        -np.inf,
        np.nan,
        65504,
        65519.9,
        65520,
        2**-14,
        2**-24,
        2**-25,
        2**-25 * 1.01,
        464,
        465,
    ]
    x = np.concatenate([x, np.float32(edges)])
    with np.errstate(over="ignore"):
        wanted = x.astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(functools.partial(rounded, dtype=dtype))(x), wanted)
    there_and_back = jax.jit(lambda x: narrowed(x, dtype).astype(jnp.float32))
    np.testing.assert_array_equal(there_and_back(x), wanted)


def planted(w, x, *, forward=False, backward=False):
    """A float32 program of three parts, with a cast to half in the second one."""

    @jax.custom_vjp
    def cast(x):
        return x.astype(HALF).astype(jnp.float32) if forward else x

    cast.defvjp(
        lambda x: (cast(x), None), lambda _, g: (g.astype(HALF).astype(jnp.float32) if backward else g,)
    )
    with jax.named_scope("first"):
        h = x @ w
    with jax.named_scope("second"):
        h = cast(h * 3)
    with jax.named_scope("third"):
        return jnp.sum(jnp.sin(h * 2))


@pytest.mark.slow
def test_an_error_of_the_forward_pass_is_introduced_at_its_place_and_inherited_behind_it():
    found = jmpp.drift(functools.partial(planted, forward=True), W, X, detail="operation")
    assert introducing(found) == {("second", "outputs")}
    (row,) = (row for row in found.rows if row.introduced)
    exact = (X @ W) * 3
    assert row.introduced == pytest.approx(relative(exact.astype(HALF), exact), rel=1e-4)
    assert (row.operation, row.inherited, row.total) == ("convert_element_type", 0, row.introduced)
    assert row.largest == pytest.approx(float(jnp.abs(exact.astype(HALF) - exact).max()), rel=1e-5)
    assert (row.share, row.loss_share) == pytest.approx((1, 1), abs=1e-3)
    behind = [r for r in found.rows if r.module == "third" and r.operation == "sin"]
    assert behind
    assert all(r.inherited == r.total > 0 == r.introduced for r in behind)
    assert not [r for r in found.rows if r.module == "first" and r.direction == "outputs"]
    assert "100 % of that error is introduced in second (test_drift.py" in found.verdict
    assert "a cast to float16" in found.verdict
    add_up(found)


def test_a_mask_that_half_makes_infinite_draws_no_warning_of_numpys():
    def loss(w, x):
        h = (x @ w).astype(HALF)
        return jax.nn.softmax(jnp.where(jnp.arange(4) < 2, h, -1e9).astype(jnp.float32)).sum()

    found = jmpp.drift(loss, W, X)  # A warning is an error here.
    assert [constant.becomes for constant in found.constants] == ["-inf"]


def test_an_error_of_the_backward_pass_leaves_the_loss_alone():
    found = jmpp.drift(functools.partial(planted, backward=True), W, X)
    assert found.loss_error == 0 < found.gradient_error
    assert introducing(found) == {("second", "activation gradients")}
    ct = jax.grad(lambda h: jnp.sum(jnp.sin(h * 2)))((X @ W) * 3)
    (row,) = (row for row in found.rows if row.introduced)
    assert row.introduced == pytest.approx(relative(ct.astype(HALF), ct), rel=1e-3)
    assert found.gradient_error == pytest.approx(
        relative(X.T @ ct.astype(HALF).astype(jnp.float32), X.T @ ct), rel=1e-3
    )
    first = [r for r in found.rows if r.module == "first"]
    assert first
    assert all(r.inherited == r.total > 0 == r.share for r in first)
    add_up(found)


def test_what_is_exact_in_half_only_inherits():
    def program(x):
        with jax.named_scope("rounds"):
            h = x.astype(HALF)
        with jax.named_scope("exact"):
            return -jnp.concatenate([h.T * HALF(2), h.T]), jnp.abs(h)[::2], jnp.where(h > 0, h, HALF(0))

    found = jmpp.drift(program, X, detail="operation")
    assert introducing(found) == {("rounds", "outputs")}
    assert {r.inherited for r in found.rows if r.module == "exact"} - {0}
    assert found.error == pytest.approx(relative(X.astype(HALF), X), rel=0.05)
    assert jnp.isnan(found.gradient_error)
    assert not found.is_loss


@pytest.mark.slow
def test_a_long_sum_in_half_is_named_and_not_normal():
    def loss_fn(w, x):
        h = (x @ w).astype(HALF)
        with jax.named_scope("decoder/head"):
            bias = jnp.broadcast_to(h[:1], (50_257, 4))
        return jnp.square(bias.astype(jnp.float32)).mean() + jnp.square(h.astype(jnp.float32)).mean()

    found = jmpp.drift(loss_fn, W, X)
    row = found.contributions[0]
    assert (row.module, row.direction, row.terms) == ("decoder/head", "activation gradients", 50_257)
    assert row.share > 0.7
    assert not found.is_normal
    assert "decoder/head (test_drift.py" in found.verdict
    assert "a sum of 50,257 float16 terms" in found.verdict
    assert "times what rounding each operation once would give" in found.verdict


def test_the_expected_error_is_that_of_one_rounding():
    found = jmpp.drift(lambda x: x.astype(HALF), X)
    assert found.is_normal
    # Uniform within half a step, which is u to 2 u times the value.
    assert found.expected == pytest.approx(2**-11 / 3**0.5, rel=1e-6)
    assert found.expected / 2 < found.error < found.expected
    assert "which is normal rounding error. " in found.verdict


@pytest.mark.slow
def test_a_large_error_is_called_so_although_rounding_explains_it():
    def loss_fn(x):
        return jnp.square(jnp.square(x.astype(jnp.float8_e5m2).astype(jnp.float32))).sum()

    found = jmpp.drift(loss_fn, 1 + 0.1 * jax.random.uniform(jax.random.key(0), (64,)))
    assert found.is_normal
    assert found.error > 0.1
    assert "error, but large: what is rounded needs a wider dtype" in found.verdict


def mlp(policy):
    model = jmpp.wrap(nn.Sequential([nn.Dense(16), jnp.tanh, nn.Dense(4)]), policy)

    def loss_fn(params, x):
        return jnp.square(model.apply({"params": params}, x)).mean()

    return loss_fn, model.init(jax.random.key(0), X)["params"]


@functools.cache
def report_of_mlp():
    loss_fn, params = mlp("mixed_float16")
    return jmpp.drift(loss_fn, params, X), loss_fn, params


@pytest.mark.slow
def test_errors_are_those_of_the_two_programs():
    found, loss_fn, params = report_of_mlp()
    flat = [
        np.concatenate([np.ravel(g) for g in jax.tree.leaves(jax.grad(f)(params, X))])
        for f in (loss_fn, mlp("float32")[0])
    ]
    # Float16 operations one by one, as they were traced.
    assert found.gradient_error == pytest.approx(relative(*flat), rel=0.02)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(flat[1]), rel=1e-5)
    assert found.loss == pytest.approx(float(mlp("float32")[0](params, X)), rel=1e-5)
    assert found.cosine == pytest.approx(1, abs=1e-5)
    assert [r.name for r in found.results][:2] == ["the loss", "params/layers_0/bias"]
    directions = {(r.module.rpartition("/")[2], r.direction) for r in found.rows}
    assert directions >= {(f"layers_{i}", d) for i in (0, 2) for d in ("outputs", "parameter gradients")}
    assert found.is_normal
    add_up(found)


@pytest.fixture
def optimizations():
    """Those that XLA does where nobody asks it for less."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
@pytest.mark.usefixtures("optimizations")
def test_a_long_half_sum_is_compiled_as_that_of_the_program():
    """XLA adds float16 in several sums at a time; in one it loses 17 times as much."""
    weights = jax.random.uniform(jax.random.key(0), (8, 32, 32, 8)).astype(jnp.float16)

    def loss_fn(bias, dtype=jnp.float16):
        return jnp.sum((bias.astype(dtype) * weights.astype(dtype)).astype(jnp.float32))

    bias = jnp.ones(8)
    half, exact = (jax.grad(loss_fn)(bias, dtype) for dtype in (jnp.float16, jnp.float32))
    assert jmpp.drift(loss_fn, bias).gradient_error == pytest.approx(relative(half, exact), rel=0.2)


@pytest.mark.once
def test_float32_against_itself_is_exactly_zero():
    found = jmpp.drift(*mlp("float32"), X)
    assert (found.gradient_error, found.loss_error, found.error) == (0, 0, 0)
    assert found.rows == ()
    assert found.verdict == "loss_fn: no difference from float32."
    assert all(result.error == result.largest == 0 for result in found.results)
    jmpp.assert_drift(*mlp("float32"), X, rtol=0.0)


def test_a_product_that_asks_for_a_precision_is_compared_as_it_runs():
    def loss_fn(w, x):
        return jnp.square(jnp.matmul(x, w, precision="highest")).mean()

    w, x = jax.random.normal(jax.random.key(0), (2, 16, 16))
    # autocast leaves the product in float32.
    assert (
        jmpp.drift(jmpp.autocast(loss_fn, "float16"), w, x).verdict == "loss_fn: no difference from float32."
    )


@pytest.mark.once
def test_assert_drift_says_where():
    _, loss_fn, params = report_of_mlp()
    jmpp.assert_drift(loss_fn, params, X, rtol=2e-3)
    with pytest.raises(
        AssertionError, match="gradient is off by .*and may be by 1e-05.*introduced in Sequential"
    ):
        jmpp.assert_drift(loss_fn, params, X, rtol=1e-5)
    with pytest.raises(
        AssertionError, match=r"result/1 is off by inf.* results are not finite \(result/1\) "
    ):
        jmpp.assert_drift(lambda x: (x, x.astype(HALF) * HALF(6e4) * HALF(2)), X[0] + 3, rtol=1e-2)


class LargePhase(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(16, name="stem")(x)
        h = h + nn.Dense(16, name="phase")(jnp.cos(1e4 * nn.Dense(16, name="inside")(h)))
        return nn.Dense(8, name="head")(h)


@pytest.mark.once
def test_what_a_smaller_loss_scale_makes_finite_and_leaves_wrong_is_looked_for_at_that_scale():
    model = jmpp.wrap(LargePhase(), "mixed_float16")
    params = LargePhase().init(jax.random.key(0), X)

    def loss_fn(params, x):
        return jnp.square(model.apply(params, x).astype(jnp.float32) - 1).mean()

    found = jmpp.drift(loss_fn, params, X, scale=2.0**14)
    assert "the gradient is not finite" in found.verdict
    assert {"stem", "inside"} <= set(found.rule)
    assert found.error_after < 0.02
    mended = jmpp.wrap(LargePhase(), found.policy)

    def mended_fn(params, x):
        return jnp.square(mended.apply(params, x).astype(jnp.float32) - 1).mean()

    assert jmpp.drift(mended_fn, params, X, scale=2.0**14).error < 0.02
    alone = jmpp.diagnose(loss_fn, params, X, scale=2.0**14)
    assert not alone.rule
    (scale,) = {t.loss_scale for t in alone.tried if t.is_own}
    assert f"drift(..., scale={scale:g})" in alone.advice


@pytest.mark.parametrize("dtype", [HALF, jnp.bfloat16])
@pytest.mark.parametrize("fn", [jax.nn.sigmoid, jax.nn.silu, jnp.exp2])
def test_what_xla_does_in_several_steps_rounds_in_each(fn, dtype):
    def run(x):
        return fn(x).astype(jnp.float32)

    x = jnp.linspace(-10, 4, 1001).astype(dtype)
    exact = fn(x.astype(jnp.float32))
    measured = jnp.linalg.norm(jax.jit(run)(x) - exact) / jnp.linalg.norm(exact)
    # In bfloat16 XLA may leave roundings out where it joins operations.
    rel = 0.1 if dtype == HALF else 0.3
    assert jmpp.drift(run, x, grad=False).error == pytest.approx(float(measured), rel=rel)


def test_a_sigmoid_that_is_zero_in_float16_alone():
    found = jmpp.drift(lambda x: jnp.log(jax.nn.sigmoid(x)).astype(jnp.float32), HALF([-11.5, 1]), grad=False)
    assert found.error == np.inf
    assert "not finite" in found.verdict


def test_a_gradient_that_rounding_makes_zero_wants_no_loss_scale():
    def loss_fn(w):
        return (1 - jax.nn.sigmoid(w.astype(HALF) + HALF(9.5))).astype(jnp.float32).sum()

    found = jmpp.drift(loss_fn, jnp.float32([0.01, 0.02]), scale=1024.0)
    assert found.gradient_error == 1
    assert "scale=" not in found.verdict


@pytest.mark.once
def test_outside_of_modules_a_row_is_of_one_line():
    @functools.partial(jmpp.autocast, policy="bfloat16")
    def loss_fn(weights):
        h = jnp.tanh(X @ weights[0])
        h = jnp.tanh(h @ weights[1])
        return jnp.mean(jnp.square(h @ weights[2] - 1))

    weights = [jax.random.normal(key, (8, 8)) / 3 for key in jax.random.split(jax.random.key(0), 3)]
    found, parts = (jmpp.drift(loss_fn, weights, detail=detail) for detail in ("module", "operation"))
    lines = {row.line for row in found.contributions}
    assert len(lines) == 3
    for row in found.contributions:
        inside = [p for p in parts.rows if (p.line, p.direction) == (row.line, row.direction)]
        assert row.share == pytest.approx(sum(part.share for part in inside), abs=1e-4)
        assert not any(part.others for part in inside)
    # Of a line with casts, a product and an activation no operation has half of the share.
    first = max(found.rows, key=lambda row: row.share)
    assert first.others
    assert f"introduced in {first.place}, {first.description}" in found.verdict
    assert first.description.endswith("bfloat16, and others")


def test_an_overflow_is_an_infinite_error():
    found = jmpp.drift(
        lambda w, x: jnp.square((w * x).astype(HALF)).astype(jnp.float32).sum(), jnp.float32([300.0]), 1.0
    )
    assert (found.loss_error, found.loss) == (np.inf, pytest.approx(9e4))
    assert "the loss is not finite, the gradient is off by 0" in found.verdict
    json.dumps(found.to_dict())


@pytest.mark.slow
def test_an_overflow_within_a_line_names_its_operation():
    def loss_fn(w):
        h = X.astype(HALF) @ w.astype(HALF)
        return jnp.mean((h * 300 * 300 / 1000).astype(jnp.float32) ** 2)

    found = report.drift(loss_fn, 10 * W)
    (row,) = [row for row in found.rows if row.loss_share > 0.5]
    assert row.operation == "mul"
    assert "the result of mul" in found.verdict
    assert "an overflow: in float32 it is finite" in found.verdict


class Applied(nn.Module):
    call: Any

    @nn.compact
    def __call__(self, h):
        return self.call(h)


#: First part, second part, what becomes zero, and the layer that is to compute in float32.
NOT_FINITE = {
    "epsilon of a norm": (
        nn.relu,
        lambda h: h / jnp.sqrt(jnp.square(h).sum(-1, keepdims=True) + 1e-12),
        "'+ 1e-12' is 0 in float16, in Sequential/layers_2",
        "layers_2",
    ),
    "epsilon of a logarithm": (
        nn.relu,
        lambda h: jnp.log(jax.nn.softmax(25 * h) + 1e-8),
        "'+ 1e-08' is 0 in float16, in Sequential/layers_2",
        "layers_2",
    ),
    "a square of the part before": (
        lambda h: jnp.square((nn.softplus(h) + 0.5) * 1e-5),
        jnp.log,
        "the result of square (float16) in Sequential/layers_1",
        "layers_1",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NOT_FINITE)
def test_of_a_gradient_that_is_not_finite_the_cause_is_told_and_mended(case):
    first, second, cause, layer = NOT_FINITE[case]
    layers = [nn.Dense(32), Applied(first), Applied(second), nn.Dense(3)]
    model = jmpp.wrap(nn.Sequential(layers), "mixed_float16")
    x = X.at[2].set(0)
    params = model.init(jax.random.key(0), x)
    loss = lambda params: jnp.square(model.apply(params, x) - 1).mean()  # noqa: E731
    found = jmpp.drift(loss, params)
    assert found.policy == jmpp.diagnose(loss, params).policy  # One report advises what the other does.
    assert math.isinf(found.error)
    assert {row.module for row in found.contributions} == {"Sequential/layers_2"}
    assert found.verdict.count(cause) == 1
    assert found.rule == {layer: "float32"}
    assert found.error_after < 2e-3
    assert f"The rule {{{layer!r}: 'float32'}} mends it" in found.verdict


@pytest.mark.slow
def test_of_a_scaled_gradient_beyond_float16_it_is_told_what_to_do():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))

    w, x = jnp.eye(8) / 8, jnp.ones((16, 8))
    found, seen = (f(loss, w, x, scale=2.0**15) for f in (jmpp.drift, jmpp.diagnose))
    assert "exceeds float16 at a loss scale of 32768" in seen.advice
    assert seen.advice in found.verdict


def test_an_overflow_of_partial_sums_is_called_so():
    signs = jnp.repeat(jnp.float32([1, -1]), 512)

    def loss(scale, x):
        # The transpose of a broadcast is a sum in half precision.
        return jnp.sum((scale.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32) * signs)

    found = jmpp.diagnose(loss, jnp.float32(1), jnp.full(1024, 300.0))
    assert found.operation == "reduce_sum"
    assert "an overflow of its partial sums: in float32 it is finite, at most 0" in found.verdict


@pytest.mark.slow
def test_of_two_constants_on_a_line_the_one_that_is_read_is_named():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = jnp.abs(nn.Dense(4)(x))
            return 1 / (h + 1e-12) + 1 / (h + 1e-9)

    model = jmpp.wrap(Model(), "mixed_float16")
    found = jmpp.drift(lambda params: model.apply(params, X).mean(), model.init(jax.random.key(0), X))
    assert {constant.written for constant in found.constants} == {"+ 1e-12", "+ 1e-09"}
    assert isinstance(found.tried[0], jmpp.report.Tried)


def test_an_infinite_loss_is_not_normal_though_its_gradient_is():
    def loss_fn(w):
        return jnp.sum((X @ w + 3000).astype(HALF)).astype(jnp.float32)

    found = jmpp.drift(loss_fn, W)
    assert found.error < 1e-2
    assert math.isinf(found.loss_error)
    assert "The first non-finite value is infinite: the result of convert_element_type" in found.verdict
    assert not found.is_normal


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 32])
def test_an_overflow_that_ends_in_finite_numbers_is_named(rows):
    class OwnNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(32)(x)
            mean, squares = h.mean(-1, keepdims=True), (h**2).mean(-1, keepdims=True)
            # The root is 0 where squares are infinite.
            return nn.Dense(10)((h - mean) * jax.lax.rsqrt(squares - mean**2 + 1e-5))

    key, labels = jax.random.key(0), jnp.arange(32) % 10
    x = jax.random.normal(key, (32, 24)).at[:rows].multiply(300)
    params, model = OwnNorm().init(key, x), jmpp.wrap(OwnNorm(), "mixed_float16")

    def loss(params, x):
        logits = model.apply(params, x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    found = jmpp.drift(loss, params, x, scale=256.0)
    assert 0.1 < found.error < 2
    assert math.isfinite(found.loss_error)
    assert not found.is_normal
    assert found.contributions[0].share > 0.8
    assert found.contributions[0].operation == "integer_pow"
    assert "integer_pow in float16, which overflows" in found.verdict
    assert ": which overflows" not in " ".join(str(found).split())
    assert found.error_after < 0.002


@pytest.mark.slow
def test_an_overflow_that_is_made_a_number_again_is_named():
    def loss(w, x):
        squares = jnp.square(x.astype(HALF) @ w.astype(HALF) * 100)
        return jnp.log1p(jnp.nan_to_num(squares).astype(jnp.float32)).mean()

    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (16, 32))
    found = jmpp.drift(loss, w, x)
    assert 0.01 < found.loss_error < 1
    assert not found.is_normal
    assert "square in float16, which overflows" in found.verdict


@pytest.mark.slow
@pytest.mark.parametrize("detail", ["module", "operation"])
@pytest.mark.parametrize("kind", ["where", "minimum"])
def test_an_overflow_in_what_is_not_taken_is_no_cause(kind, detail):
    """A softplus that is its operand where that is large; a clipped ratio, as of PPO."""

    def taken(x):
        if kind == "where":
            return jnp.where(x > 10, x, jnp.log1p(jnp.exp(x)))
        return jnp.minimum(jnp.exp(x), jnp.clip(jnp.exp(x), 0.8, 1.2))

    def function(w, x):
        h = taken(x.astype(HALF) @ w.astype(HALF) * 2) + 500 - 500
        return h @ w.astype(HALF)

    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (16, 32))
    found = jmpp.drift(function, w, x, detail=detail)
    assert not any("overflows" in row.note for row in found.contributions)
    assert "add in float16" in found.verdict
    assert found.is_normal


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pick", [lambda x: jnp.argmax(x, -1)[:, None], lambda x: jax.lax.top_k(x, 4)[1]])
def test_an_overflow_that_makes_ties_is_named_and_a_mask_is_not(pick, masked):
    def loss(w, x):
        scores = x.astype(HALF) @ w.astype(HALF)
        if masked:
            low = -jnp.square(jnp.abs(scores) + 300)  # -inf in half.
            scores = jnp.where(jnp.arange(32) < 24, scores + 2000 - 2000, low)
        else:
            scores = jnp.square(scores * 100)
        return jnp.square(jnp.take_along_axis(x @ w, pick(scores), 1)).mean()

    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (16, 32))
    found = jmpp.drift(loss, w, x, detail="operation")
    assert found.error > 1e-4
    assert any("overflows" in row.note for row in found.contributions) != masked


@pytest.mark.parametrize("first", [1.0003, 1.3])
@pytest.mark.parametrize("name", ["relu", "max_pool", "max", "round", "tanh"])
def test_the_part_of_decisions_that_rounding_turns_is_told(name, first):
    """In float16 1.0003 is 1, so that a relu of the difference passes no gradient on."""
    functions = {
        "relu": lambda h: jax.nn.relu(h[1] - h[0]),
        "max_pool": lambda h: jnp.square(3 * nn.max_pool(h.reshape(1, 2, 1), (2,), (2,))).sum(),
        "max": jnp.max,
        "round": lambda h: jnp.round(2000 * (h[1] - h[0])) * h[1],
        "tanh": lambda h: jnp.tanh(h[1] - h[0]),
    }

    def loss(w):
        return functions[name](w.astype(HALF)).astype(jnp.float32) + jnp.square(w).sum() / 64

    found = jmpp.drift(loss, jnp.float32([1, first]))
    turned = float(name != "tanh" and first == 1.0003)
    assert found.turned == pytest.approx(turned, abs=0.02)
    assert ("of it comes through decisions that rounding turns" in found.verdict) == turned


@pytest.mark.parametrize(("other", "turned"), [(2.0, 0), (3.0, 1)])
def test_a_turned_decision_between_equal_operands_is_no_error(other, turned):
    def loss(w):
        h = w.astype(HALF)
        factor = jax.lax.stop_gradient(jnp.where(h[1] > h[0], h[1] + h[1], HALF(other) * h[1]))
        return (factor * h[0]).astype(jnp.float32)

    found = jmpp.drift(loss, jnp.float32([1, 1.0003]))
    assert found.gradient_error > 0
    assert found.turned == pytest.approx(turned, abs=0.01)


def test_what_autocast_does_in_jitted_functions_of_jax_has_the_users_line():
    def loss(w):
        return jax.nn.silu(w @ w).sum()

    w = jax.random.normal(jax.random.key(0), (16, 16)) / 4
    rows = jmpp.drift(jmpp.autocast(loss, "bfloat16"), w, detail="operation").rows
    assert {row.line.split()[0] for row in rows if row.operation == "logistic"} == {
        f"test_drift.py:{loss.__code__.co_firstlineno + 1}"
    }


def test_powers_round_as_often_as_they_multiply():
    """The derivative of 1 / b is computed as -1 / (b * b): 0 in float16 where b is above 256."""

    def loss(w):
        return (jnp.float16(1000) / (300 * w.astype(HALF))).astype(jnp.float32).sum()

    w = jnp.linspace(0.5, 1.5, 8)
    compiled, exact = jax.jit(jax.grad(loss))(w), -1000 / (300 * w**2)
    found = jmpp.drift(loss, w)
    assert found.error == pytest.approx(np.linalg.norm(compiled - exact) / np.linalg.norm(exact), rel=0.01)
    assert found.error > 0.1
    assert not found.is_normal
    assert found.contributions[0].operation == "integer_pow"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mul", "add", "nested"])
def test_an_overflow_in_a_later_trip_of_a_loop_is_named(kind):
    """Each trip reads what the one before it gave: no operation has finite operands in all trips."""

    def grown(c, length):
        return jax.lax.scan(lambda c, _: (c * 4, None), c, None, length=length)[0]

    def loss(w, x):
        h = x.astype(HALF) @ w.astype(HALF)
        if kind == "add":
            zeros = jnp.zeros_like(h)
            squares, _ = jax.lax.scan(lambda c, _: (c + 64 * h * h, None), zeros, None, length=30)
            h = h * jax.lax.rsqrt(squares.mean(-1, keepdims=True) + 1)
            return jnp.square(h.astype(jnp.float32)).mean()
        h = h * h + 1
        if kind == "nested":
            h, _ = jax.lax.scan(lambda c, _: (grown(c, 3), None), h, None, length=3)
        return jnp.square(1e4 / (1 + grown(h, 6)).astype(jnp.float32)).mean()

    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (16, 32))
    found = jmpp.drift(loss, w, x)
    assert 0.01 < found.error < 10
    name = "add" if kind == "add" else "mul"
    assert f"{name} in float16, which overflows" in found.verdict
    if kind == "nested":  # An error that grows in each trip is not lost on its way back.
        assert found.contributions[0].operation == name
        assert found.contributions[0].share > 0.5


@pytest.mark.slow
def test_squares_beyond_float32_are_an_infinite_error():
    def loss_fn(w):
        return jnp.square(w.astype(HALF)).astype(jnp.float32).sum()

    found = jmpp.drift(loss_fn, jnp.float32([3e12]))
    assert {row.total for row in found.rows} == {np.inf}


def mean_of_70000(w, x):
    with jax.named_scope("pool"):
        mean = jnp.tanh(x.astype(HALF) @ w.astype(HALF)).sum(0) / 70000
    return jnp.square(mean.astype(jnp.float32) - 1).sum()


@pytest.mark.slow
def test_float32_computes_with_the_constants_as_they_are_written():
    found = jmpp.drift(mean_of_70000, W, X)
    (constant,) = found.constants
    assert (constant.written, constant.becomes, constant.path) == ("/ 70000", "inf", "pool")
    exact = jax.grad(lambda w: jnp.square((jnp.tanh(X @ w).sum(0) / 70000) - 1).sum())(W)
    # In half the mean is 0, and so is its gradient.
    assert found.gradient_error == pytest.approx(1, rel=1e-3)
    assert found.gradient_norm == pytest.approx(float(jnp.linalg.norm(exact)), rel=1e-3)
    assert module_shares(found) == {"pool": pytest.approx(1, abs=1e-3)}
    assert not found.is_normal
    with pytest.raises(AssertionError, match="'/ 70000' is inf in float16, in pool"):
        jmpp.assert_drift(mean_of_70000, W, X, rtol=0.01)


def average(decay):
    def ema(old, new):
        return decay * old + (1 - decay) * new

    return ema


def test_an_average_that_stands_still_fails():
    old, new = jnp.ones(8, HALF), jnp.full(8, 2, HALF)

    def ema(old, new):
        return 0.9999 * old + (1 - 0.9999) * new

    with pytest.raises(AssertionError, match=r"'0.9999' is 1 in float16.*lost, in result \(100 %\)"):
        jmpp.assert_drift(ema, old, new, rtol=0.01)
    jmpp.assert_drift(average(0.5), old, new, rtol=0.01)
    assert "lost" not in jmpp.drift(ema, old.astype(jnp.float32), new.astype(jnp.float32)).verdict


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rate", "is_lost"), [("bfloat16", 1e-5, True), ("bfloat16", 0.1, False),
                                                       ("float32", 1e-5, False)])  # fmt: skip
def test_updates_below_the_last_digit_of_parameters_fail(dtype, rate, is_lost):
    tx, params = optax.adamw(rate), {"w": W.astype(dtype)}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = params, tx.init(params), jax.tree.map(jnp.ones_like, params)
    found = jmpp.drift(step, *args)
    assert (found.results[0].change_error > 0.5) == is_lost, found.results[0]
    assert ("lost, in result/0/w" in found.verdict) == is_lost
    if is_lost:
        with pytest.raises(AssertionError, match="master_weights"):
            jmpp.assert_drift(step, *args, rtol=0.1)
    else:
        jmpp.assert_drift(step, *args, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "is_lost"),
    [(lambda tx: tx, True), (lambda tx: jmpp.loss_scaled(tx, jmpp.DynamicLossScale(1.0)), True),
     (lambda tx: jmpp.loss_scaled(jmpp.master_weights(tx), jmpp.DynamicLossScale(1.0)), False),
     (jmpp.master_weights, False), (jmpp.kahan_summation, False), (jmpp.stochastic_rounding, False)],
)  # fmt: skip
def test_updates_that_float32_adds_up_are_lost_in_half_parameters_unless_a_state_keeps_them(wrap, is_lost):
    tx, params = wrap(optax.sgd(1e-5)), W.astype(HALF) + 2

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    _, state = step(params, tx.init(params), X[:8, :4])
    assert ("lost, in result/0" in jmpp.drift(step, params, state, X[:8, :4], grad=False).verdict) == is_lost


def test_a_number_that_half_makes_one_is_rounded_where_it_is_added():
    """The trace in half precision holds 1, and so would a replay of it."""

    def product(x):
        return jnp.cumprod(0.9998 + 1e-4 * x)[-1]

    x = jnp.linspace(-1, 1, 1000)
    half, exact = product(x.astype(HALF)), product(x)
    found = jmpp.drift(lambda x: product(x.astype(HALF)), x, grad=False, detail="operation")
    assert found.error == pytest.approx(abs(float(half) - float(exact)) / float(exact), rel=0.2)
    assert found.error > 0.1
    assert found.contributions[0].operation == "add"
    x = jnp.full(8, 0.25)
    # Which of the numbers of a line an addition has nobody knows.
    assert jmpp.drift(lambda x: (0.9998 + x.astype(HALF)) * (1 + x.astype(HALF)), x, grad=False).error < 1e-4
    one = 1.0
    assert (
        jmpp.drift(lambda x: (0.9998 + x.astype(HALF)) * (one + x.astype(HALF)), x, grad=False).error < 1e-4
    )


@pytest.mark.slow
def test_every_kind_of_value_is_measured_by_operation():
    """Complex numbers, keys, integers and truth values that depend on half ones."""

    def function(w, x):
        h = (x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)
        spectrum = jnp.fft.fft(h).sum(0, keepdims=True) * jnp.ones(h.shape)
        seeds = jnp.stack([h[0, 0].astype(jnp.uint32), jnp.uint32(3)])
        noise = jax.random.normal(jax.random.split(jax.random.wrap_key_data(seeds))[0], (3,))
        return jnp.abs(spectrum).mean() + noise.sum() + (h > 0).any() + jnp.sort(h, 0)[0].sum()

    found = jmpp.drift(function, W[:8, :8], X[:, :8], detail="operation", grad=False)
    assert 0 < found.error < 0.1
    assert found.is_normal


def test_a_moving_average_that_float32_adds_up_is_lost_in_half():
    def ema(old, new):
        return (0.999 * old.astype(jnp.float32) + 0.001 * new).astype(HALF)

    old, new = W.astype(HALF), 1.01 * W
    with pytest.raises(AssertionError, match="below half of its last digit"):
        jmpp.assert_drift(ema, old, new, rtol=0.01)
    jmpp.assert_drift(ema, old, 4 * new, rtol=0.01)
    # Of a float32 argument nothing is kept in half.
    jmpp.assert_drift(ema, W, new, rtol=0.01)


@pytest.mark.parametrize(("offset", "is_normal"), [(0.0, True), (30.0, False)])
def test_of_a_while_loop_a_small_error_is_normal(offset, is_normal):
    def loss_fn(w, x):
        def trip(state):
            trips, h = state
            product = (h.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)
            return trips + 1, jnp.tanh(jax.lax.reduce_precision(product + offset, 5, 10) - offset)

        return jnp.square(jax.lax.while_loop(lambda state: state[0] < 4, trip, (0, x))[1]).mean()

    found = jmpp.drift(loss_fn, 0.5 * jnp.asarray(np.eye(8), jnp.float32), X, grad=False)
    assert found.contributions[0].operation == "while"
    assert 1e-5 < found.error < 1
    assert found.is_normal == is_normal


def test_an_argument_that_is_printed(capfd):
    def loss_fn(w):
        jax.debug.print("{}", w)
        return jnp.square(w.astype(HALF)).astype(jnp.float32).sum()

    assert jmpp.drift(loss_fn, W).gradient_error > 0
    jax.effects_barrier()
    assert capfd.readouterr().out


@pytest.mark.slow
def test_of_a_jitted_function_that_is_called_twice_no_argument_is_named():
    half = jax.jit(lambda x: x.astype(HALF))
    found = jmpp.drift(lambda p: jnp.square(1e3 * (half(p["a"]) + half(p["b"]))).astype(jnp.float32).sum(),
                       {"a": 1e-7 * X, "b": X})  # fmt: skip
    assert not any(row.argument for row in found.rows)


@pytest.mark.slow
def test_an_argument_whose_cast_rounds_is_named():
    model, x = jmpp.wrap(nn.Dense(8), "mixed_float16"), 1e-8 * X
    params = model.init(jax.random.key(0), x)
    found = jmpp.drift(lambda params, batch: jnp.square(1e6 * model.apply(params, batch["obs"])).mean(),
                       params, {"obs": x})  # fmt: skip
    assert found.contributions[0].argument == "batch/obs"
    assert "a cast of the argument 'batch/obs' to float16" in found.verdict


@pytest.mark.slow
def test_a_barrier_over_several_values_moves_no_share():
    def loss_fn(w, x, barrier):
        a = x.astype(BF16)
        h = a @ w["a"].astype(BF16)
        h = jnp.tanh(h) @ w["b"].astype(BF16)
        if barrier:
            h = jnp.add(*jax.lax.optimization_barrier((h, 0 * x.astype(BF16).sum())))
        return jnp.square(h.astype(jnp.float32)).mean()

    w = {"a": W, "b": W.T}
    found = [jmpp.drift(functools.partial(loss_fn, barrier=barrier), w, X) for barrier in (False, True)]
    shares = [{row.operation: 0.0 for row in one.rows} for one in found]
    for share, one in zip(shares, found, strict=True):
        for row in one.rows:
            share[row.operation] += row.share
    assert shares[1]["dot_general"] == pytest.approx(shares[0]["dot_general"], abs=0.02)


def test_what_stands_for_the_cast_of_a_weight_has_no_row():
    """Under `grad=float32` that is an operation of the library's own, which only hands it on."""
    model = jmpp.wrap(nn.Dense(8, name="out"), "params=float32,compute=float16,output=float32,grad=float32")
    params = model.init(jax.random.key(0), X)
    found = jmpp.drift(lambda params: model.apply(params, X).mean(), params, detail="operation")
    operations = {row.operation for row in found.rows}
    assert "convert_element_type" in operations
    assert "as_cast_of" not in operations


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 4])
def test_a_harmless_cast_has_no_share_however_its_reader_is_written(lines):
    """The cast of e makes an error of 0.0002, what is added to a one of 0.25."""

    def loss_fn(w, x):
        with jax.named_scope("table"):
            a = w["a"].astype(HALF) + 1000
        with jax.named_scope("body"):
            e = w["e"].astype(HALF)
        with jax.named_scope("out"):
            if lines == 1:
                y = jnp.tanh(jnp.log1p(a + e - 1000))
            else:
                y = a + e
                y = y - 1000
                y = jnp.log1p(y)
                y = jnp.tanh(y)
        return jnp.sum(y.astype(jnp.float32) * x)

    w = {k: jax.random.uniform(jax.random.key(i), (256,)) for i, k in enumerate("ae")}
    shares = module_shares(jmpp.drift(loss_fn, w, jax.random.normal(jax.random.key(2), (256,))))
    assert shares.get("body", 0) < 1e-4
    assert shares["table"] > 0.2
    assert sum(shares.values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_operation_that_spoils_the_loss_is_named_for_it():
    def loss_fn(w, xs):
        def body(total, x):
            part = jnp.mean(jnp.square(x.astype(HALF) @ w.astype(HALF)))
            total = total + part
            return total, None

        with jax.named_scope("micro"):
            total, _ = jax.lax.scan(body, HALF(0), xs)
        return total.astype(jnp.float32)

    found = jmpp.drift(loss_fn, W, jnp.tile(X, (64, 1, 1)))
    worst = max(found.rows, key=lambda row: row.loss_share)
    assert worst.loss_share > 0.9
    assert worst.operation == "add"


@pytest.mark.slow
@pytest.mark.parametrize(("trips", "is_normal"), [(64, True), (4000, False)])
def test_a_sum_that_stops_growing_is_not_normal(trips, is_normal):
    def loss_fn(w, xs):
        def body(total, x):
            return total + jnp.square(w * x).astype(HALF), None

        return jnp.square(jax.lax.scan(body, HALF(0), xs)[0].astype(jnp.float32))

    xs = jax.random.uniform(jax.random.key(0), (trips,), minval=0.9)
    found = jmpp.drift(loss_fn, jnp.float32(1.0), xs)
    assert found.is_normal == is_normal, found.verdict


@pytest.mark.slow
def test_a_loop_that_settles_at_a_number_is_normal():
    def loss_fn(w):
        def body(h, _):
            return h + HALF(0.1) * h - HALF(0.05) * h * h * w.astype(HALF), None

        return jnp.square(jax.lax.scan(body, jnp.full(8, 0.3, HALF), None, length=120)[0]).mean()

    found = jmpp.drift(
        lambda w: loss_fn(w).astype(jnp.float32), jax.random.uniform(jax.random.key(0), (8,)) + 1
    )
    assert found.error < 0.01
    assert found.is_normal, found.verdict


@pytest.mark.slow
def test_operations_whose_parameters_are_dtypes_of_their_own_kind():
    from jax.experimental import sparse

    def loss_fn(w):
        eye = sparse.BCOO.fromdense(jnp.eye(8), nse=8)
        return jnp.square((eye @ (X[:8].astype(HALF) @ w.astype(HALF))).astype(jnp.float32)).mean()

    assert 1e-5 < jmpp.drift(loss_fn, W).gradient_error < 1e-3


def test_a_loss_that_is_nan_in_both_runs_is_told():
    def loss_fn(w):
        return jnp.log(w.astype(HALF)).astype(jnp.float32).sum()

    found = jmpp.drift(loss_fn, jnp.float32([-1.0]))
    assert found.error == 0
    assert "no difference from float32, but the loss is nan in both: `diagnose`" in found.verdict
    with pytest.raises(AssertionError, match="The loss is nan, which says nothing of an error"):
        jmpp.assert_drift(loss_fn, jnp.float32([-1.0]), rtol=1e-2)


@pytest.mark.once
def test_masks_that_are_infinite_in_both_runs_are_no_error():
    def loss_fn(w, x):
        scores = jnp.where(jnp.arange(4) < 3, (x @ w).astype(HALF), -jnp.inf)
        return jax.nn.softmax(scores).astype(jnp.float32)[:, 0].sum()

    found = jmpp.drift(loss_fn, W, X)
    assert 0 < found.gradient_error < 1e-2
    assert found.loss_error < 1e-3


@pytest.mark.slow
def test_a_result_that_is_zero_but_for_rounding_does_not_decide_on_a_step():
    model = jmpp.wrap(nn.Sequential([nn.Dense(32), nn.BatchNorm(use_running_average=False)]), "mixed_float16")
    variables = model.init(jax.random.key(0), X)

    def gradient(params, x):
        def loss_fn(params):
            y, _ = model.apply(variables | {"params": params}, x, mutable="batch_stats")
            return jnp.square(y - x[:, :1]).mean()

        return jax.grad(loss_fn)(params)

    found = jmpp.drift(gradient, variables["params"], X, grad=False)
    errors = {result.name: result.error for result in found.results}
    assert errors.pop("result/layers_0/bias") > 100  # A BatchNorm takes any bias off again.
    assert 0 < found.error <= max(errors.values()) < 0.01
    assert f"on average ({max(errors, key=errors.get)} by" in found.verdict
    jmpp.assert_drift(gradient, variables["params"], X, grad=False, rtol=0.01)


def test_a_result_that_is_zero_in_float32_alone_is_wrong_and_not_infinite():
    labels = jnp.array([1, 1])

    def evaluate(w, x):
        logits = x @ w
        return logits, (logits.argmax(-1) != labels).sum(), jax.nn.relu(1.00005 - logits[0, 1])

    x = jnp.zeros((2, 8)).at[0, :2].set(jnp.array([1.0, 1.0001])).at[1, 1].set(1.0)
    found = jmpp.drift(jmpp.autocast(evaluate, "float16"), jnp.eye(8), x)
    assert [result.error for result in found.results[1:]] == [1.0, 1.0]
    assert found.results[1].largest == 1.0
    assert "not finite" not in found.verdict
    assert found.error == pytest.approx((2 / 3) ** 0.5, rel=1e-3)


def test_a_residual_beside_large_state_is_compared():
    """The parts of a state have units of their own: a small one is not rounding of a large one."""

    def step(state, x):
        h = x.astype(HALF) * state["w"].astype(HALF)
        residual = h.astype(jnp.float32) - x * state["w"]
        return {"w": state["w"], "count": state["count"] + 1, "residual": residual}

    state = {"w": jnp.linspace(100, 103.0, 8), "count": jnp.int32(100_000)}
    with pytest.raises(AssertionError, match="result/residual is off by 1, and may be by 0.001"):
        jmpp.assert_drift(step, state, jnp.linspace(1, 3, 8), grad=False, rtol=1e-3)


@pytest.mark.slow
def test_train_steps_show_which_part_of_the_new_state_is_off():
    loss_fn, params = mlp("mixed_float16")
    tx = jmpp.loss_scaled(optax.adam(1e-3), jmpp.DynamicLossScale())

    @jax.jit
    def train_step(state, x):
        params, opt_state = state
        loss, grads = jmpp.scaled_value_and_grad(loss_fn)(opt_state, params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    found = jmpp.drift(train_step, (params, tx.init(params)), X, grad=False)
    errors = {r.name: r.error for r in found.results}
    assert errors["result/0/1/inner_state/0/mu/layers_0/kernel"] > 1e-4
    assert errors["result/0/1/inner_state/0/count"] == errors["result/0/1/loss_scale/loss_scale"] == 0
    assert found.error > 0
    assert np.isnan(found.gradient_error)
    add_up(found)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scans_show_each_trip(remat):
    def body(h, w):
        with jax.named_scope("block"):
            return jnp.tanh((h.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)), None

    def loss_fn(ws, x):
        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, ws)[0].sum()

    ws = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8)) / 3, jnp.float32)
    found = jmpp.drift(loss_fn, ws, X)
    (row,) = (r for r in found.rows if r.module == "block" and r.direction == "outputs")
    exact = half = X
    errors = []
    for w in ws:
        exact = jnp.tanh(exact @ w)
        half = jnp.tanh((half.astype(HALF) @ w.astype(HALF)).astype(jnp.float32))
        errors.append(relative(half, exact))
    if not remat:
        assert row.trips == pytest.approx(errors, rel=0.02)
    assert len(row.trips) == 3
    assert row.total > row.introduced
    add_up(found)


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_carries_are_measured_at_the_end_of_the_trip_before(reverse):
    def loss_fn(w, xs):
        def body(h, x):
            with jax.named_scope("block"):
                return jnp.tanh(h * w + x).astype(HALF).astype(jnp.float32), None

        h = w.astype(jnp.bfloat16).astype(jnp.float32)
        return jax.lax.scan(body, h, xs, reverse=reverse)[0].sum()

    xs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    w = jnp.linspace(0.1, 0.9, 5)
    jaxpr = jax.make_jaxpr(loss_fn)(w, xs)
    comparison = Comparison(jaxpr, True)
    _, measured, *_ = jax.jit(comparison)([w, xs])
    (carry,) = (n for n, node in enumerate(comparison.nodes) if node.operation == "carry")
    half, exact, wanted = w.astype(jnp.bfloat16).astype(jnp.float32), w, []
    for x in xs[::-1] if reverse else xs:
        wanted.append(float(jnp.square(half - exact).sum()))
        half, exact = jnp.tanh(half * w + x).astype(HALF).astype(jnp.float32), jnp.tanh(exact * w + x)
    assert measured[carry].total == pytest.approx(wanted[::-1] if reverse else wanted, rel=1e-3)


def test_what_is_measured_quickly_is_measured_again_where_it_must_be():
    def gradients(scale, x):
        def loss_fn(w):
            return scale * jnp.sin((x @ w).astype(HALF).astype(jnp.float32)).sum()

        return jax.value_and_grad(loss_fn)(W)

    def run(quick, *args):
        jaxpr = jax.make_jaxpr(gradients)(*args)
        comparison = Comparison(jaxpr, True, quick=quick)
        compared, measured, *_ = jax.device_get(jax.jit(comparison)(args))
        return list(map(float, compared[1])), comparison.is_reliable(compared, measured)

    (quick, is_reliable), (slow, _) = run(True, jnp.float32(1), X), run(False, jnp.float32(1), X)
    assert is_reliable
    assert quick == pytest.approx(slow, rel=1e-5)
    # Gradients whose squares float32 cannot hold, and an overflow.
    assert not run(True, jnp.float32(1e-18), X)[1]
    assert not run(True, jnp.float32(1), X.at[0, 0].set(1e6))[1]


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.gumbel, jax.random.laplace])
def test_random_numbers_in_half_are_no_error(draw):
    def loss_fn(w, x, key):
        h = x.astype(HALF) @ w.astype(HALF)
        return jnp.square((h + draw(key, h.shape, HALF)).astype(jnp.float32)).mean()

    found = report.drift(loss_fn, W, X, jax.random.key(0), detail="operation")
    assert found.gradient_error < 2**-11
    assert {row.operation for row in found.rows if row.share} <= {
        "dot_general",
        "add",
        "convert_element_type",
    }


def test_gradients_that_vanish_in_the_first_trips_of_a_loop_are_measured_quickly():
    def loss_fn(w):
        def trip(h, x):
            return (w * h).astype(HALF).astype(jnp.float32) + x, None

        return jnp.square(jax.lax.scan(trip, 1.0, jnp.ones(14))[0])

    comparison = Comparison(jax.make_jaxpr(jax.grad(loss_fn))(jnp.float32(0.1)), True, quick=True)
    compared, measured, *_ = jax.device_get(jax.jit(comparison)((jnp.float32(0.1),)))
    assert min(np.min(at.exact) for at in measured.values()) < 1e-24
    assert comparison.is_reliable(compared, measured)


def test_what_a_mask_makes_infinite_is_measured_quickly_too():
    def gradients(x):
        def loss_fn(w):
            rows = jnp.square((x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)).sum(-1)
            hardest = jnp.sort(jnp.where(rows > rows.mean(), -jnp.inf, rows))[-2:]
            return hardest.sum()

        return jax.value_and_grad(loss_fn)(W)

    jaxpr = jax.make_jaxpr(gradients)(X)
    runs = {}
    for quick in (True, False):
        comparison = Comparison(jaxpr, True, quick=quick)
        runs[quick] = compared, measured, *_ = jax.device_get(jax.jit(comparison)((X,)))
        assert comparison.is_reliable(compared, measured)
    assert not any(np.isinf(at.exact).any() for at in runs[True][1].values() if at.exact is not None)
    for quick, slow in zip(runs[True][0], runs[False][0], strict=True):
        assert list(map(float, quick)) == pytest.approx(list(map(float, slow)), rel=1e-5)


def test_what_is_multiplied_in_one_line_has_the_error_of_each_factor():
    times = jnp.linspace(0.3, 1, 64)[:, None]

    def loss_fn(w, x):
        h = jax.named_call(lambda w, x: x.astype(HALF) @ w.astype(HALF), name="first")(w, x)
        # The phase is off by far more than what enters it: a relative error of 2**-12 at 2e4.
        phase = jax.named_call(lambda: times.astype(HALF), name="times")()
        h = jax.named_call(lambda h: h * jnp.sin(phase * HALF(2e4)), name="part")(h)
        return jnp.square(h.astype(jnp.float32)).mean()

    found = jmpp.drift(loss_fn, W, X)
    shares = {
        name: sum(row.share for row in found.rows if name in row.module)
        for name in ("first", "times", "part")
    }
    assert shares["first"] < 0.01
    assert shares["times"] + shares["part"] > 0.98


def test_random_numbers_are_equal_in_both_runs():
    def loss_fn(w, x, key):
        kept = jax.random.bernoulli(key, 0.5, (64, 4))
        return jnp.where(kept, (x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32), 0).sum()

    found = jmpp.drift(loss_fn, W, X, jax.random.key(0))
    assert 0 < found.gradient_error < 1e-3


def half_cast(h):
    return h.astype(HALF).astype(jnp.float32)


def of_operation(found, operation, direction="outputs"):
    (row,) = (r for r in found.rows if (r.operation, r.direction) == (operation, direction))
    return row


@pytest.mark.slow
def test_branches_have_rows_of_what_is_inside():
    def rounding(h):
        with jax.named_scope("rounding"):
            return half_cast(h * 3)

    def loss_fn(w, x, index):
        with jax.named_scope("branch"):
            h = jax.lax.switch(index, [jnp.sin, rounding, jnp.cos], x @ w)
        with jax.named_scope("behind"):
            return jnp.sum(jnp.sin(h * 2))

    found = jmpp.drift(loss_fn, W, X, 1, detail="operation")
    exact = (X @ W) * 3
    forward, back = (
        of_operation(found, "convert_element_type", d) for d in ("outputs", "activation gradients")
    )
    assert (forward.module, forward.inherited, forward.note) == ("branch/rounding", 0, "")
    assert forward.introduced == pytest.approx(relative(half_cast(exact), exact), rel=1e-4)
    ct = jax.grad(lambda h: jnp.sum(jnp.sin(h * 2)))(half_cast(exact))
    assert back.introduced == pytest.approx(relative(half_cast(ct), ct), rel=1e-2)
    assert forward.share + back.share == pytest.approx(1, abs=1e-3)
    # What the branch gives, it inherits from inside.
    whole = of_operation(found, "cond")
    assert (whole.introduced, whole.inherited) == (0, pytest.approx(forward.total, rel=1e-5))
    add_up(found)
    other = jmpp.drift(loss_fn, W, X, 2, detail="operation")
    assert other.error == other.loss_error == 0
    assert not [row for row in other.rows if row.module == "branch/rounding"]


@pytest.mark.slow
def test_what_two_different_branches_give_is_introduced_by_the_branch():
    # Half way between a number and what it is rounded to, which is larger.
    limit = (X[0, 0] + half_cast(X[0, 0])) / 2
    assert half_cast(X[0, 0]) > limit > X[0, 0]

    def program(x, limit):
        h = half_cast(x)
        with jax.named_scope("branch"):
            return jax.lax.cond(h[0, 0] > limit, jnp.cos, lambda h: h * 2, h)

    for detail in ("operation", "module"):
        found = jmpp.drift(program, X, limit, detail=detail)
        row = found.contributions[0]
        assert (row.module, row.operation, row.share) == ("branch", "cond", pytest.approx(1, abs=1e-3))
        assert row.note == "the two runs take different branches"
        assert row.introduced == row.total == pytest.approx(relative(jnp.cos(half_cast(X)), X * 2), rel=1e-5)
    assert "introduced in branch (test_drift.py" in found.verdict
    assert "a cond: the two runs take different branches" in found.verdict
    assert "): the two runs take different branches.\n" in str(found)
    assert not found.is_normal


def test_while_loops_are_one_row():
    def program(x, trips):
        with jax.named_scope("loop"):
            return jax.lax.fori_loop(0, trips, lambda _, h: half_cast(jnp.sin(h * 2)), x)

    def exact(h):
        return jnp.sin(jnp.sin(jnp.sin(h * 2) * 2) * 2)

    for detail in ("operation", "module"):
        found = jmpp.drift(program, X, jnp.int32(3), detail=detail)
        (row,) = found.rows
        assert (row.module, row.operation, row.trips) == ("loop", "while", ())
        assert row.introduced == row.total == pytest.approx(found.error, rel=1e-6)
        assert found.error == pytest.approx(relative(program(X, 3), exact(X)), rel=1e-4)
        assert row.share == pytest.approx(1, abs=1e-3)
        add_up(found)
    assert jmpp.drift(program, X, jnp.int32(0)).error == 0


def test_what_another_number_of_trips_gives_is_in_the_module_of_the_loop():
    def program(x):
        with jax.named_scope("loop"):
            return jax.lax.while_loop(lambda h: h[0] < 1, lambda h: h * 2, half_cast(x))

    # 1/8 in float16, but less in float32, which needs another trip.
    x = jnp.float32([0.125 - 2**-16, 0.1])
    found = jmpp.drift(program, x)
    row = found.contributions[0]
    assert row.module == "loop"
    assert row.total == found.error == pytest.approx(relative(half_cast(x) * 8, x * 16), rel=1e-6)
    assert row.share == pytest.approx(1, abs=1e-3)


def test_loops_that_end_at_different_times_under_vmap_are_one_row():
    def program(x):
        return jax.lax.while_loop(lambda h: h.sum() < 20, lambda h: half_cast(h * 1.1 + 1), x)

    found = jmpp.drift(jax.vmap(program), X)
    row = of_operation(found, "while")
    assert row.introduced == row.total == pytest.approx(found.error, rel=1e-6)
    assert row.total > 0
    assert row.note == "what is inside is not looked at, since it may end at another time in float32"


@pytest.mark.slow
def test_loops_inside_branches_inside_loops():
    def program(x):
        def trip(_, h):
            h = jax.lax.cond(h[0, 0] > -9, lambda h: jax.lax.scan(scanned, h, None, length=2)[0], jnp.cos, h)
            return half_cast(h * 1.5)

        return jax.lax.fori_loop(0, 2, trip, x)

    def scanned(h, _):
        with jax.named_scope("scanned"):
            return half_cast(jnp.sin(h)), None

    found = jmpp.drift(program, X)
    half = exact = X
    for _ in range(2):
        half = half_cast(half_cast(jnp.sin(half_cast(jnp.sin(half)))) * 1.5)
        exact = jnp.sin(jnp.sin(exact)) * 1.5
    assert found.error == pytest.approx(relative(half, exact), rel=1e-3)
    assert "scanned" in {module for module, _ in introducing(found)}
    add_up(found)


@pytest.mark.slow
def test_nnx_models_and_autocast():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(8, 4, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return self.dense(x)

    def loss_fn(model, x):
        return jnp.square(model(x).astype(jnp.float32)).mean()

    found = jmpp.drift(loss_fn, jmpp.wrap(Net(nnx.Rngs(0)), "mixed_bfloat16"), X)
    assert 1e-4 < found.gradient_error < 2e-2
    assert found.is_normal
    assert {r.name for r in found.results} == {"the loss", "model/dense/bias", "model/dense/kernel"}
    found = jmpp.drift(jmpp.autocast(lambda w, x: jnp.square(x @ w).mean(), "bfloat16"), W, X)
    assert 1e-4 < found.gradient_error < 2e-2


@pytest.mark.slow
def test_eight_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(X, jax.NamedSharding(mesh, jax.P("data")))

    def loss_fn(w, x):
        return jnp.square((x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)).mean()

    one, eight = jmpp.drift(loss_fn, W, X), jmpp.drift(loss_fn, W, sharded)
    assert eight.gradient_error == pytest.approx(one.gradient_error, rel=1e-3)
    assert [(r.module, r.direction) for r in eight.rows] == [(r.module, r.direction) for r in one.rows]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_rows_inside_shard_map_are_of_all_devices(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(w, x):
        with jax.named_scope("weights"):
            w = w.astype(HALF).astype(jnp.float32)
        with jax.named_scope("block"):
            h = (x @ w).astype(HALF).astype(jnp.float32)
        with jax.named_scope("head"):
            return jnp.square(h).mean()

    def mapped(w, x):
        def on_device(x, w):
            return jax.lax.pmean(loss_fn(w, x), "data")

        specs = {"in_specs": (jax.P("data"), jax.P()), "out_specs": jax.P()}
        return jax.shard_map(on_device, mesh=mesh, check_vma=check_vma, **specs)(x, w)

    one, eight = (jmpp.drift(fn, W, X, grad=False, detail="operation") for fn in (loss_fn, mapped))
    # Of a mean whose terms are added in another order: float32 rounds at 1e-7.
    assert eight.error == pytest.approx(one.error, abs=5e-7)
    rows = {(row.module, row.operation): row for row in eight.rows}
    for row in one.rows:
        if row.module in ("weights", "block"):
            found = rows[row.module, row.operation]
            parts = ("introduced", "inherited", "total", "largest", "share")
            assert [getattr(found, p) for p in parts] == pytest.approx(
                [getattr(row, p) for p in parts], rel=2e-3, abs=1e-6
            ), row
    gradient = jmpp.drift(mapped, W, X)
    assert gradient.cosine == pytest.approx(1, abs=1e-5)
    assert gradient.gradient_norm == pytest.approx(jmpp.drift(loss_fn, W, X).gradient_norm, rel=1e-4)
    assert {row.module for row in gradient.contributions} <= {"weights", "block", ""}


@pytest.mark.once
def test_the_loss_scale_saves_small_gradients():
    def loss_fn(w, x):
        return 2.0**-22 * jnp.square((x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)).mean()

    lost, kept = (jmpp.drift(loss_fn, W, X, scale=scale) for scale in (1.0, 2.0**16))
    assert lost.gradient_error > 0.1 > 1e-3 > kept.gradient_error
    assert kept.gradient_norm == pytest.approx(lost.gradient_norm, rel=1e-5)
    assert not lost.is_normal
    assert kept.is_normal


def test_metrics_of_a_training_run():
    found, loss_fn, params = report_of_mlp()
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(8.0))
    opt_state, traces, written = tx.init(params), [], {}

    @jax.jit
    def probe(params, opt_state, x):
        traces.append(None)
        return jmpp.report.drift_metrics(loss_fn, params, x, scale=opt_state)

    assert not jax.make_jaxpr(probe)(params, opt_state, X).effects
    log = jmpp.MetricsLogger(written.__setitem__, every=2)
    for step in range(4):
        if step % 2 == 0:
            log(step, opt_state, **probe(params, opt_state, X))
    log.flush()
    assert list(written) == [0, 2]
    assert len(traces) == 1
    assert written[0]["drift/gradient_error"] == pytest.approx(found.gradient_error, rel=0.1)
    assert written[0]["drift/loss_error"] == pytest.approx(found.loss_error, rel=1e-3)
    assert written[0]["drift/gradient_cosine"] == pytest.approx(1, abs=1e-5)
    assert jmpp.report.drift_metrics(lambda x: (x.astype(HALF), 1), X)["drift/error"] > 1e-5
    assert jmpp.report.drift_metrics(lambda x: x, X, prefix="")["error"] == 0


@pytest.mark.slow
def test_plot():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    found = report_of_mlp()[0]
    figure = found.plot()
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == list(dict.fromkeys(row.direction for row in found.rows))
    drawn = {line.get_label(): line.get_ydata() for line in panels[0].lines}
    rows = [row for row in found.rows if row.direction == "outputs"]
    assert list(drawn["total error"]) == [max(row.total, 1e-9) for row in rows]
    assert jmpp.drift(lambda x: x, X).plot().axes[0].get_title() == "<lambda>: no difference from float32."
    pyplot.close("all")


def test_empty_and_odd_arguments():
    assert jmpp.drift(lambda: ()).results == ()
    found = jmpp.drift(lambda x, n: (x.astype(HALF)[:, :0], x.astype(jnp.complex64) * n), X, 3)
    assert found.error == 0
    found = jmpp.drift(lambda x: (x.astype(jnp.float8_e4m3fn), x.astype(HALF).astype(jnp.complex64)), X)
    assert found.results[0].error > 100 * found.results[1].error > 0


def test_messages():
    with pytest.raises(ValueError, match="per 'module' or per 'operation'; got detail='line'"):
        jmpp.drift(planted, W, X, detail="line")
    with pytest.raises(TypeError, match="drift runs the function: it needs arrays"):
        jmpp.drift(planted, jax.ShapeDtypeStruct((8, 4), "float32"), X)
    with pytest.raises(TypeError, match="drift takes a function and its arguments"):
        jmpp.drift(3.0)
    with pytest.raises(ValueError, match="drift found no floating arrays in the parameters of <lambda>"):
        jmpp.drift(lambda n: jnp.float32(n), jnp.int32(1))


def test_faces():
    found = report_of_mlp()[0]
    assert isinstance(found, report.Drift)
    assert isinstance(found.rows[0], report.DriftRow)
    assert isinstance(found.results[0], report.ResultDrift)
    text = str(found)
    assert "activation gradients" in text
    assert "introduced" in text
    assert text.endswith(".")
    assert repr(found).startswith("<Drift: loss_fn: the gradient is off by")
    assert "\n" not in repr(found)
    assert found._repr_html_().count("<table>") == 4
    fields = json.loads(json.dumps(found.to_dict()))
    assert fields["verdict"] == found.verdict
    assert fields["rows"][0]["direction"] == "outputs"


def test_rows_are_a_table_of_pandas():
    pytest.importorskip("pandas")
    found = report_of_mlp()[0]
    frame = found.to_pandas()
    assert len(frame) == len(found.rows)
    assert {"module", "introduced", "inherited", "total"} <= set(frame)


@st.composite
def programs(draw):
    """A chain of operations in float32 and half, as names."""
    names = ["tanh", "matmul", "square", "to half", "to bfloat16", "to float32", "sum", "residual"]
    return draw(st.lists(st.sampled_from(names), min_size=1, max_size=6))


def run(names, w, x):
    steps = {
        "tanh": lambda h: jnp.tanh(h), "matmul": lambda h: h @ w[:, :4].repeat(2, 1).astype(h.dtype),
        "square": lambda h: jnp.square(h), "to half": lambda h: h.astype(HALF),
        "to bfloat16": lambda h: h.astype(jnp.bfloat16), "to float32": lambda h: h.astype(jnp.float32),
        "sum": lambda h: h / (1 + jnp.abs(h).sum(0)), "residual": lambda h: x.astype(h.dtype) + h,
    }  # fmt: skip
    h = x
    for name in names:
        with jax.named_scope(name.replace(" ", "_")):
            h = steps[name](h)
    return jnp.mean(h.astype(jnp.float32))


@pytest.mark.slow
@settings(max_examples=6)
@given(programs())
def test_random_programs(names):
    x = X[:4]
    found = jmpp.drift(functools.partial(run, names), W, x, detail="operation")
    half = any(name in ("to half", "to bfloat16") for name in names)
    assert half or found.rows == ()
    if found.error and np.isfinite(found.error):
        add_up(found)
    if np.isfinite(found.error):
        exact = run([name for name in names if name not in ("to half", "to bfloat16")], W, x)
        assert found.loss == pytest.approx(float(exact), rel=1e-4)


@pytest.mark.once
def test_rules_are_tried_until_one_mends_where_much_is_expected():
    """Three modules bring a third of an error each: one rule does not mend, rules for all do."""

    class Phase(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="phase")(x) * 2000

    class Branches(nn.Module):
        @nn.compact
        def __call__(self, x):
            parts = [jnp.sin(Phase(name=name)(x)) for name in ("left", "right", "middle")]
            return nn.Dense(1, name="out")(sum(parts))

    model, x = jmpp.wrap(Branches(), "mixed_float16"), jax.random.normal(jax.random.key(0), (16, 8))
    params = model.init(jax.random.key(1), x)
    found = jmpp.drift(lambda params, x: jnp.square(model.apply(params, x)).mean(), params, x)
    assert found.error > 0.1
    assert len(found.rule) == 3
    assert found.error_after == min(tried.error for tried in found.tried) < 0.01
    assert "mends it" in found.verdict


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_neither_float32_for_all_nor_a_loss_scale_is_advised_where_sums_are_what_is_wrong(policy):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="out")(nn.relu(nn.Dense(16, name="a")(x)))

    x = jnp.tile(jax.random.normal(jax.random.key(0), (64, 16)), (32, 1))
    model, params = jmpp.wrap(Model(), policy), Model().init(jax.random.key(1), x)
    found = jmpp.drift(lambda params, x: jnp.square(model.apply(params, x) - 5).mean(), params, x)
    assert "grad=float32" in found.advice
    assert found.policy.default.grad_dtype == jnp.float32
    assert found.error_after < found.error / 2
    assert all(tried.error > 0 for tried in found.tried)  # Float32 for both layers is not needed.


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"embed": "params=float32,compute=bfloat16,output=bfloat16"}])
@pytest.mark.parametrize("own_bias", [False, True])
def test_sums_of_weight_gradients_are_mended_by_float32_for_those(overrides, own_bias):
    """A bias and an embedding whose gradients are sums of 2,048 terms lose most of them in bfloat16."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="out", use_bias=not own_bias)(nn.Embed(8, 8, name="embed")(x))
            return x + self.param("bias", nn.initializers.zeros, 4) if own_bias else x

    model, x = jmpp.wrap(Model(), jmpp.PolicyMap("mixed_bfloat16", overrides)), jnp.arange(2048) % 2
    params = model.init(jax.random.key(0), x)
    found = jmpp.drift(lambda params, x: jnp.square(model.apply(params, x) - 1).mean(), params, x)
    (tried,) = found.tried  # No module had to be float32.
    assert not tried.rule
    policies = [tried.policy.default, *(policy for _, policy in tried.policy.overrides)]
    assert all(policy.compute_dtype == BF16 and policy.grad_dtype == jnp.float32 for policy in policies)
    assert found.error > 0.1 > 0.01 > found.error_after
    assert "grad=float32" in found.advice


@pytest.mark.slow
def test_the_cotangent_of_a_result_that_is_cast_counts_for_its_module():
    """The cast of the model's result to float32 has a transpose, which rounds: a float32 head has none."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="head")(jnp.tanh(nn.Dense(8, name="stem")(x)))[:, 0]

    model, x = jmpp.wrap(Net(), "mixed_float16"), jax.random.normal(jax.random.key(0), (4, 8))
    params = model.init(jax.random.key(1), x)

    def loss(params):
        return jnp.square(model.apply(params, x)).mean() * 1000

    rows = jmpp.drift(loss, params, detail="operation").rows
    (cast,) = (
        row for row in rows if row.operation == "convert_element_type" and "gradients" in row.direction
    )
    assert cast.module == "Net/head"
    assert cast.share > 0.01


@pytest.mark.slow
def test_a_loss_scale_that_is_missing_is_advised():
    """Of gradients that float16 makes zero, before any rule; not where a scale is given, or helps nothing."""

    def loss_fn(w, x):
        return 1e-8 * jnp.square(jnp.tanh(x.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)).sum()

    found = jmpp.drift(loss_fn, W, X)
    assert found.error > 0.1
    assert found.advice == "a loss scale of 2**24 (`DynamicLossScale`)"
    assert found.error_after < 0.01
    assert "A loss scale of 2**24 (`DynamicLossScale`) mends it" in found.verdict
    assert jmpp.drift(loss_fn, W, X, scale=2.0**24).error == pytest.approx(found.error_after, rel=1e-4)
    assert not jmpp.drift(lambda w, x: 1e10 * loss_fn(w, x), W, X).advice


@pytest.mark.slow
@pytest.mark.parametrize("activation", [jnp.abs, jax.nn.relu])
def test_cotangents_that_vanish_are_not_blamed_on_decisions_in_the_forward_pass(activation):
    """A few signs differ, each by 1; the cotangents that they choose from are small, and nearly all wrong."""

    def loss_fn(params, x):
        into, out = (param.astype(HALF) for param in params)
        h = activation(x.astype(HALF) @ into)
        with jax.named_scope("mean"):
            h = jnp.cumsum(h, 0) / 4096  # Its transpose divides first, and then adds up.
        return jnp.square((h @ out).astype(jnp.float32) - 1).mean()

    params = [jax.random.normal(jax.random.key(i), shape) / 4 for i, shape in enumerate([(8, 8), (8, 2)])]
    x = jax.random.normal(jax.random.key(2), (4096, 8))
    found = jmpp.drift(loss_fn, params, x, detail="operation")
    first = found.contributions[0]
    assert (first.module, first.operation) == ("mean", "div")
    assert first.direction == "activation gradients"
    assert first.share > 0.9
    assert not found.is_normal
    assert found.advice.startswith("a loss scale of 2**")


@pytest.mark.slow
def test_gradients_that_are_zero_but_for_rounding_are_not_furthest_off():
    def loss_fn(params, x):
        h = (x @ params["w"]).astype(HALF)
        return jnp.square(h.astype(jnp.float32)).mean() + 1e-12 * jnp.square(params["b"].astype(HALF)).sum()

    found = jmpp.drift(loss_fn, {"w": W, "b": jnp.full(3, 0.123)}, X)
    assert any(r.name == "params/b" and r.error for r in found.results)
    text = str(found)
    assert "params/b" not in text[text.index("furthest off") :]


@pytest.mark.slow
def test_a_mask_that_becomes_infinite_has_no_share():
    """The softmax makes it zero in both runs; the share of what is beside it is that under a finite mask."""

    def shares(fill):
        def loss_fn(w, x):
            with jax.named_scope("scores"):
                scores = x.astype(HALF) @ w.astype(HALF)
            with jax.named_scope("mask"):
                scores = jnp.where(jnp.tri(*scores.shape, dtype=bool), scores, jnp.asarray(fill, HALF))
            return jnp.square(jax.nn.softmax(scores.astype(jnp.float32), -1) @ w.T).mean()

        found = jmpp.drift(loss_fn, W, X)
        return {
            module: sum(r.share for r in found.rows if r.module == module) for module in ("scores", "mask")
        }

    with_finite, with_infinite = shares(-3e4), shares(-1e9)
    assert with_infinite == pytest.approx(with_finite, abs=0.02)
    assert with_finite["scores"] > 0.2
    assert with_infinite["mask"] < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    "masked",
    [
        lambda scores, mask: jnp.where(mask, scores, -1e9),
        lambda scores, mask: scores + jnp.where(mask, 0.0, -1e9).astype(scores.dtype),
    ],
    ids=["chosen", "added"],
)
def test_a_mask_that_becomes_infinite_is_no_overflow(masked):
    def loss_fn(w, x):
        scores = x.astype(HALF) @ w.astype(HALF)
        with jax.named_scope("mask"):
            scores = masked(scores, jnp.tri(*scores.shape, dtype=bool))
        return jnp.square(jax.nn.softmax(scores.astype(jnp.float32), -1) @ w.T).mean()

    found = jmpp.drift(loss_fn, W, X)
    assert found.is_normal
    assert "overflows" not in found.verdict


@pytest.mark.slow
def test_an_error_as_large_as_the_gradient_is_not_normal():
    def loss(w, x):
        h = (x @ w).astype(jnp.bfloat16)
        decay = jnp.cumprod(0.9995 * jnp.ones_like(h), -1) ** 200  # 0.9995 is 1 in bfloat16.
        return jnp.square(h * decay).astype(jnp.float32).mean()

    found = jmpp.drift(loss, jnp.ones((8, 32)), jnp.ones((4, 8)))
    assert found.error > 1
    assert not found.is_normal
    assert "normal" not in found.verdict


@pytest.mark.slow
def test_on_an_explicit_mesh_where_indexing_leaves_its_axes():
    """JAX indexes under other types of axes, to and from which it reshards."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        table = jax.device_put(jnp.linspace(-1, 1, 64 * 32).reshape(64, 32), jax.NamedSharding(mesh, jax.P()))
        tokens = jax.device_put(jnp.arange(32).reshape(4, 8), jax.NamedSharding(mesh, jax.P("data", None)))

        def loss(table, tokens):
            rows = table.astype(jnp.bfloat16).at[tokens].get(out_sharding=jax.P("data", None, "model"))
            return jnp.square(rows.astype(jnp.float32)).mean()

        found = jmpp.drift(loss, table, tokens)
    assert 1e-4 < found.error < 4e-3
    assert found.is_normal


class Gated(nn.Module):
    """A layer with a gate of its own, in which float16 makes a few elements 0 by way of infinite ones."""

    activation: Any
    gate: Any

    @nn.compact
    def __call__(self, x):
        h = self.activation(nn.Dense(32, name="pre")(x))
        h = self.gate(h, jax.lax.stop_gradient(nn.Dense(32, name="gate")(x)))
        return nn.Dense(10, name="post")(nn.Dense(32, name="mid")(h))


def _drift_of_gated(activation, gate, dtype=jnp.float32, scale=256.0, **kwargs):
    x = jax.random.normal(jax.random.key(0), (64, 32))
    params = Gated(activation, gate).init(jax.random.key(0), x)
    half = jmpp.wrap(Gated(activation, gate), "mixed_float16")

    def loss_fn(params):
        return jnp.square(half.apply(params, x).astype(jnp.float32)).mean().astype(dtype)

    return jmpp.drift(loss_fn, params, scale=scale, **kwargs)


@pytest.mark.slow
def test_rules_are_tried_for_a_float16_loss_too():
    """It is multiplied in float16 by as much of the loss scale as that holds: float32 needs none."""
    found = _drift_of_gated(lambda h: jnp.sin(1000 * h), lambda h, g: h, jnp.float16, scale=2.0**17)
    assert found.error > 0.1
    assert dict(found.rule) == {"pre": "float32"}
    assert found.error_after < found.error / 10


@pytest.mark.slow
def test_an_overflow_that_matters_little_is_not_blamed_for_the_error_of_another_value():
    found = _drift_of_gated(lambda h: jnp.sin(1000 * h), lambda h, g: h / (1 + (120 * g) ** 2))
    assert found.error > 0.1
    assert dict(found.rule) == {"pre": "float32"}
    assert found.error_after < found.error / 10


@pytest.mark.slow
def test_a_small_error_with_most_of_it_in_one_line_has_a_rule():
    """A finite difference, whose error is what random roundings explain."""
    found = _drift_of_gated(nn.tanh, lambda h, g: (jnp.sin(h + 1e-3) - jnp.sin(h)) / 1e-3)
    assert 0.02 < found.error < 0.1
    assert found.is_normal
    assert max(row.share for row in found.rows) < 0.75
    assert found.error_after < found.error / 10


@pytest.mark.slow
def test_a_saturated_gate_is_normal():
    found = _drift_of_gated(nn.relu, lambda h, g: h / (1 + jnp.exp(-6 * g)), detail="operation")
    assert found.error < 1e-3
    assert found.is_normal


class LossInside(nn.Module):
    """A model that gives its loss, the sum of more terms than float16 holds."""

    @nn.compact
    def __call__(self, x, y):
        logits = nn.Dense(16)(nn.gelu(nn.Dense(16)(x)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum() / y.size


@pytest.mark.slow
def test_a_loss_that_overflows_alone_is_not_mended_by_a_loss_scale():
    """Its gradient is finite; loss_scaled skips every such step."""
    x, y = jax.random.normal(jax.random.key(0), (2**15, 8)), jnp.arange(2**15) % 16
    params = LossInside().init(jax.random.key(1), x, y)
    found = jmpp.drift(jmpp.wrap(LossInside(), "mixed_float16").apply, params, x, y)
    assert math.isfinite(found.gradient_error)
    assert math.isinf(found.loss_error)
    assert "the result of convert_element_type (float16[]), forward, in LossInside" in found.verdict
    assert "mends it: the loss is finite, and the gradient off by" in found.verdict
    mended = jmpp.wrap(LossInside(), found.policy).apply
    assert bool(jnp.isfinite(jax.jit(mended)(params, x, y)))
    assert found.error_after < 0.01


class Branch(nn.Module):
    """A branch whose gradients are too small for float16."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.constant(1e-6), (8,))
        return nn.Dense(1, name="head")(x + scale * nn.Dense(8, name="branch")(x))


def test_gradients_that_are_all_zero_beside_large_ones_are_named():
    x = jax.random.normal(jax.random.key(0), (64, 8))
    params = Branch().init(jax.random.key(1), x)
    model = jmpp.wrap(Branch(), "mixed_float16")
    loss_fn = lambda params: model.apply(params, x).mean() / 8  # noqa: E731
    found = jmpp.drift(loss_fn, params)
    assert "branch/bias is all zero at a loss scale of 1: give that of training (scale=)" in found.verdict
    assert not found.is_normal
    found = jmpp.drift(loss_fn, params, scale=2.0**16)
    assert "all zero" not in found.verdict
    assert found.is_normal


def test_masks_whose_square_is_infinite_and_that_half_values_decide():
    """The square of -1e30 is infinite in float32, and no error of a decision beside it may be NaN."""

    def loss(w, x):
        h = (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)
        h = jnp.where(h < 0, -1e30, h)
        h = jnp.where(h < 0.5, -1e30, h)
        return jnp.exp(h).mean()

    w, x = jax.random.normal(jax.random.key(0), (16, 12)) / 4, jax.random.normal(jax.random.key(1), (32, 16))
    found = jmpp.drift(loss, w, x)
    assert found.is_normal
    assert sum(row.share for row in found.rows) == pytest.approx(1, abs=0.01)


class MaskedByAddition(nn.Module):
    """Attention whose scores get a mask added in half, as in BERT and T5."""

    fill: float

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.Dense(16, name=name)(x) for name in ("query", "key", "value"))
        mask = jnp.where(jnp.tri(x.shape[1], dtype=bool), 0, self.fill).astype(query.dtype)
        return nn.Dense(8, name="out")(jax.nn.softmax(query @ key.swapaxes(-1, -2) / 4 + mask) @ value)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_mask_that_is_added_has_no_part_in_the_error(policy):
    x = jax.random.normal(jax.random.key(0), (4, 12, 16))
    params = MaskedByAddition(-30.0).init(jax.random.key(1), x)

    def shares(fill):
        model = jmpp.wrap(MaskedByAddition(fill), policy)
        found = jmpp.drift(lambda params, x: jnp.square(model.apply(params, x)).mean(), params, x)
        assert found.error < found.expected < 3 * found.error
        return {row.module + row.direction: row.share for row in found.rows}

    first, *others = map(shares, (-1e4, -65504.0, -1e9))
    assert first["MaskedByAddition" + "outputs"] < 0.5
    for other in others:
        assert other == pytest.approx(first, abs=0.01)


def test_rules_are_tried_for_a_small_error_where_one_line_has_more_than_half_of_it():
    def loss_fn(w):
        return jnp.square((X.astype(HALF) @ w.astype(HALF)).astype(jnp.float32)).sum()

    found = jmpp.drift(loss_fn, W)
    assert found.is_normal

    def is_worth(error, share, turned=0.0):
        first, *others = found.rows
        rows = dataclasses.replace(first, share=share), *(dataclasses.replace(row, share=0) for row in others)
        # Expected of many roundings, so that it is a normal error.
        changed = dataclasses.replace(found, error=error, expected=error, rows=rows, turned=turned)
        return changed.is_worth_a_rule

    assert [is_worth(0.03, share) for share in (0.4, 0.5, 0.51, 1)] == [False, False, True, True]
    assert not is_worth(0.01, 1)
    assert is_worth(0.2, 0.5)
    # Where rounding turns decisions shares are rough, and no line is known to have so much.
    assert not is_worth(0.03, 1, turned=0.9)


@pytest.mark.slow
def test_a_moment_of_zero_gradients_does_not_make_a_step_need_a_wider_dtype():
    """The bias changes nothing, as before a BatchNorm: what Adam keeps of its gradient is noise."""
    tx = optax.adam(1e-2)

    def loss(params, x):
        h = x.astype(HALF) @ params["w"].astype(HALF) + params["b"].astype(HALF)
        h = h - jnp.mean(h, 0, dtype=jnp.float32).astype(HALF)
        return jnp.mean((jnp.tanh(h).astype(jnp.float32) - x) ** 2)

    @jax.jit
    def step(state, x):
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = {"w": X[:8] / 3, "b": jnp.ones(8)}
    found = jmpp.drift(step, step((params, tx.init(params)), X), X, grad=False)
    worst = max(found.results, key=lambda r: r.error)
    assert worst.name.endswith("/b")
    assert worst.error > 0.1 < found.error
    assert "which is normal rounding error." in found.verdict
    assert "wider dtype" not in found.verdict


@pytest.mark.once
@pytest.mark.parametrize("is_jitted", [False, True])
def test_results_of_a_step_of_modules_have_the_names_of_its_arguments(is_jitted):
    net = jmpp.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_float16")
    opt = nnx.Optimizer(net, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    def step(net, opt, x):
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        opt.update(net, grads)
        return loss

    found = jmpp.drift(nnx.jit(step) if is_jitted else step, net, opt, X, grad=False)
    names = {r.name for r in found.results}
    assert {"result", "net/kernel", "net/bias", "opt/step", "opt/opt_state/0/trace/kernel"} <= names
