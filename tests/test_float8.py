"""Float8 recipes of policies: products of scaled 8-bit operands, where layers and functions have them."""

import collections
import dataclasses
import functools
import itertools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import paired
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.policy.recipes import passes_of
from jmp_policy._src.products.fp8.eligibility import formats_of
from jmp_policy._src.products.fp8.functions import Float8DotGeneral
from jmp_policy._src.products.fp8.scales import _in_two_kernels, scale_of
from jmp_policy._src.report.lowering.compiler import is_installed
from jmp_policy._src.report.lowering.kernels import Kernel
from jmp_policy._src.report.lowering.lowering import check_float8

CURRENT, HALF = "mixed_bfloat16, r=fp8_current", "mixed_bfloat16"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FORWARD, BACKWARD = (E4M3, E4M3), (E5M2, E4M3)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(32, 64)), jnp.bfloat16)
W = jnp.asarray(RNG.normal(size=(64, 48)) / 8, jnp.bfloat16)
DIMS = (((1,), (0,)), ((), ()))
PER_TENSOR, PER_ROW = Float8DotGeneral("fp8_current"), Float8DotGeneral("fp8_rowwise")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))


class Net(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(64, 32)(ids)
        x = (nn.remat(Block) if self.remat else Block)(name="block")(x)
        return nn.Dense(64, name="lm_head")(x)


IDS = jnp.asarray(RNG.integers(0, 64, (2, 16)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.LinearGeneral(64, 32, rngs=rngs)
        self.own = nnx.Linear(32, 32, rngs=rngs, dot_general=of_the_user)
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, x):
        return self.head(self.own(self.down(nnx.gelu(self.up(x)))))


def of_the_user(*args, **kwargs):
    return lax.dot_general(*args, **kwargs)


def formats(fn, *args):
    """Numbers of the products of a program, by the float8 dtypes of their operands and the result's dtype."""
    eqns = [e for e in ir.equations(jax.make_jaxpr(fn)(*args)) if e.primitive.name == "dot_general"]
    return collections.Counter((formats_of(e), e.outvars[0].aval.dtype.name) for e in eqns)


def float8_count(fn, *args):
    return sum(n for (found, _), n in formats(fn, *args).items() if found)


def rounded(x, format, axis=None):
    """What is left of values when they are scaled by a power of two and rounded, by numpy alone."""
    x = np.asarray(x, np.float32)
    largest = np.abs(x).max(axis, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / float(jnp.finfo(format).max)))
    return (x / scale).astype(jnp.dtype(format)).astype(np.float32) * scale


def rounded_in_blocks(x, rows, terms):
    """What is left of the rows of a matrix in e4m3, with a scale for each block, by numpy alone."""
    x = np.asarray(x, np.float32)
    out = np.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], terms):
            out[i : i + rows, j : j + terms] = rounded(x[i : i + rows, j : j + terms], E4M3)
    return out


def error(found, exact):
    found, exact = (np.asarray(x, np.float32) for x in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize(("product", "axes"), [(PER_TENSOR, (None, None)), (PER_ROW, (1, 0))])
def test_products_and_derivatives_are_those_of_the_rounded_operands(product, axes):
    out, vjp = jax.vjp(lambda x, w: product(x, w, DIMS), X, W)
    assert out.dtype == jnp.bfloat16
    # What is left is the rounding of the result to bfloat16.
    assert error(out, rounded(X, E4M3, axes[0]) @ rounded(W, E4M3, axes[1])) < 2**-8
    ct = jnp.asarray(RNG.normal(size=out.shape) * 1e-6, jnp.bfloat16)
    by_x, by_w = vjp(ct)
    # Scales of rows are those of what is summed over, which is another axis here.
    assert error(by_x, rounded(ct, E5M2, axes[0]) @ rounded(W, E4M3, axes[0]).T) < 2**-8
    assert error(by_w, rounded(X, E4M3, axes[1]).T @ rounded(ct, E5M2, axes[1])) < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "others", "weights"),
    [("mxfp8", (1, 32), (1, 32)), ("fp8_block", (1, 128), (128, 128))],
)
def test_products_and_derivatives_are_those_of_rounded_blocks(recipe, others, weights):
    product = Float8DotGeneral(recipe)
    # Blocks of very different size, and sizes that are no multiples of 128.
    sizes = 2.0 ** RNG.integers(-20, 20, (3, 5))
    x = jnp.asarray(np.repeat(np.repeat(sizes, 32, 0), 32, 1) * RNG.normal(size=(96, 160)), jnp.bfloat16)
    w = jnp.asarray(RNG.normal(size=(160, 192)) * np.repeat(sizes[0], 32)[::-1, None], jnp.bfloat16)
    ct = jnp.asarray(RNG.normal(size=(96, 192)) * np.repeat(sizes[:, 0], 32)[:, None], jnp.bfloat16)
    out, vjp = jax.vjp(lambda x, w: product(x.reshape(3, 32, 160), w, (((2,), (0,)), ((), ()))), x, w)
    assert (
        error(out.reshape(96, 192), rounded_in_blocks(x, *others) @ rounded_in_blocks(w.T, *weights).T)
        < 2**-8
    )
    by_x, by_w = vjp(ct.reshape(3, 32, 192))
    assert error(by_x, rounded_in_blocks(ct, *others) @ rounded_in_blocks(w, *weights).T) < 2**-8
    # Terms are those of all axes that are summed over.
    assert error(by_w, rounded_in_blocks(x.T, *others) @ rounded_in_blocks(ct.T, *others).T) < 2**-8
    bad = np.isnan(np.asarray(product(x.at[3, 3].set(np.inf), w, DIMS), np.float32)).any(1)
    assert bad.nonzero()[0].tolist() == [3]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [((2, 3), (0, 1)), ((3, 2), (1, 0))])
def test_derivatives_of_products_of_many_axes_have_the_operands_order(axes):
    x = jnp.asarray(RNG.normal(size=(2, 16, 4, 8)), jnp.bfloat16)
    w = jnp.asarray(RNG.normal(size=(4, 8, 16, 2) if axes[1] == (0, 1) else (4, 8, 2, 16)), jnp.bfloat16)
    dims = (axes, ((), ()))
    out, vjp = jax.vjp(lambda x, w: PER_TENSOR(x, w, dims), x, w)
    ct = jnp.asarray(RNG.normal(size=out.shape), jnp.bfloat16)
    exact = jax.vjp(lambda x, w: lax.dot_general(x, w, dims), *(rounded(v, E4M3) for v in (x, w)))[1](
        rounded(ct, E5M2)
    )
    assert all(error(*pair) < 2**-8 for pair in zip(vjp(ct), exact, strict=True))


def test_compiled_and_eager_products_are_equal():
    assert np.array_equal(PER_TENSOR(X, W, DIMS), jax.jit(lambda x, w: PER_TENSOR(x, w, DIMS))(X, W))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_show(bad):
    assert np.isnan(np.asarray(PER_TENSOR(X.at[3, 3].set(bad), W, DIMS), np.float32)).all()
    rows = np.isnan(np.asarray(PER_ROW(X.at[3, 3].set(bad), W, DIMS), np.float32)).all(1)
    assert rows.nonzero()[0].tolist() == [3]
    by_w = jax.grad(lambda w: jnp.sum(PER_TENSOR(X, w, DIMS)).astype(jnp.float32) * bad)(W)
    assert not np.isfinite(np.asarray(by_w, np.float32)).any()


def test_scales_are_powers_of_two_that_use_the_range():
    largest = np.array([448, 449, 3e38, 2e-38, 0, 57344], np.float32)
    scales = [float(scale_of(jnp.full((2, 2), value), E4M3)) for value in largest]
    assert scales == [1, 2, 2.0**120, 2.0**-126, 2.0**-126, 128]
    assert float(scale_of(jnp.float32([57344]), E5M2)) == 1
    assert np.isfinite(scale_of(jnp.zeros((0, 16), jnp.bfloat16), E4M3))
    assert np.array_equal(PER_TENSOR(0 * X, W, DIMS), np.zeros((32, 48)))
    assert scale_of(X, E4M3, (1,)).shape == (32, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "batched"),
    [("fwd:fp8_current", True), ("bwd:fp8_current", True), ("fwd:fp8_rowwise+bwd:fp8_current", False)],
)
def test_passes_have_recipes_of_their_own(recipe, batched):
    def call(product):
        if batched:
            return lambda x, w: jax.vmap(lambda x: product(x[None], w, DIMS)[0])(x)
        return lambda x, w: product(x, w, DIMS)

    products = {"fp8_current": PER_TENSOR, "fp8_rowwise": PER_ROW, None: lax.dot_general}
    forward, backward = (call(products[name]) for name in passes_of(recipe))
    out, vjp = jax.vjp(call(Float8DotGeneral(recipe)), X, W)
    assert np.array_equal(out, forward(X, W))
    for ours, theirs in zip(vjp(out), jax.vjp(backward, X, W)[1](out), strict=True):
        # Some CPUs add up a bfloat16 product in another order beside another cast: one element of 3072 is the
        # next number. Products in 8 bits are off by 2**-4.
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=2**-7)
        assert np.mean(ours != theirs) < 0.01


@pytest.mark.parametrize("grad", ["", ", g=f32"])
@pytest.mark.parametrize(
    ("recipe", "kind", "why"),
    [
        ("fwd:fp8_current", FORWARD, "no recipe reaches it"),
        ("bwd:fp8_current", BACKWARD, "the recipe is for"),
    ],
)
def test_layers_have_recipes_for_one_pass(recipe, kind, why, grad):
    model, x = jmpp.wrap(nn.Sequential([nn.Dense(32), nn.Dense(48)]), f"{HALF}, r={recipe}{grad}"), X[:, :32]
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    found = jmpp.audit(lambda p: jnp.mean(model.apply(p, x) ** 2), params, grad=True).products
    is_backward = kind == BACKWARD
    assert {(p.lhs, p.rhs, p.scales) for p in found if p.backward == is_backward} == {(*kind, "fp8_current")}
    others = [p for p in found if p.backward != is_backward]
    assert {(p.lhs, p.rhs, p.scales) for p in others} == {("bfloat16", "bfloat16", "")}
    assert any(p.stays.startswith(why) for p in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "found_in_it"),
    paired(
        [(64, 32), (4, 16, 8, 4), (3, 2**14 + 2), (2**13 + 1, 2), (5,)], [1.0, 0.0, np.inf, np.nan, np.inf]
    ),
)
def test_the_largest_of_all_scales_is_that_of_the_tensor(shape, found_in_it):
    x = jnp.asarray(RNG.normal(size=shape) * 2.0 ** RNG.uniform(-9, 9, shape), jnp.bfloat16)
    x = 0 * x if found_in_it == 0 else x.at[(-1,) * x.ndim].multiply(found_in_it)
    assert np.array_equal(_in_two_kernels(E5M2, x), [scale_of(x, E5M2)], equal_nan=True)


@pytest.mark.parametrize(("dtype", "sums"), [("bfloat16", "bf16"), ("float16", "f32")])
def test_on_a_gpu_products_of_float8_sum_to_what_the_result_can_hold(dtype, sums):
    def loss(x, w):
        return jnp.sum(PER_TENSOR(x, w, DIMS)).astype(jnp.float32)

    products = jax.jit(jax.value_and_grad(loss, (0, 1)))
    lowered = products.trace(X.astype(dtype), W.astype(dtype)).lower(lowering_platforms=("cuda",))
    found = re.findall(r"dot_general.*: \((.*)\) -> tensor<(.*)>", lowered.as_text())
    f8, f5 = "f8E4M3FN", "f8E5M2"
    # The weight's gradient is input times cotangent, as it is, and not the transpose of the reverse.
    assert found == [
        (f"tensor<32x64x{f8}>, tensor<64x48x{f8}>", f"32x48x{sums}"),
        (f"tensor<32x64x{f8}>, tensor<32x48x{f5}>", f"64x48x{sums}"),
        (f"tensor<32x48x{f5}>, tensor<64x48x{f8}>", f"32x64x{sums}"),
    ]


@pytest.mark.slow
def test_vmap_makes_one_product_of_many():
    xs = jnp.stack([X, 2 * X, X])

    def loss(product):
        return lambda w: jnp.sum(jax.vmap(lambda x: product(x, w, DIMS))(xs).astype(jnp.float32))

    eqns = jax.make_jaxpr(jax.grad(lambda w: loss(PER_TENSOR)(w) ** 2))(W).eqns
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    # No weight gradient per example: both products have the batch among the rows that they sum over.
    assert [eqn.outvars[0].aval.shape for eqn in products] == [(3, 32, 48), (48, 64)]
    assert error(jax.grad(loss(PER_TENSOR))(W), jax.grad(loss(lax.dot_general))(W)) < 0.05
    by_rows = jax.vmap(lambda x: PER_ROW(x, W, DIMS))(xs)
    assert np.array_equal(by_rows[1], PER_ROW(2 * X, W, DIMS))


@pytest.mark.slow
def test_further_derivatives_are_right():
    def second(product):
        def inner(x, w):
            return jnp.sum(jnp.tanh(product(x, w, DIMS)).astype(jnp.float32))

        return jax.grad(lambda w: jnp.sum(jax.grad(inner)(X, w).astype(jnp.float32) ** 2))(W)

    assert error(second(PER_TENSOR), second(lax.dot_general)) < 0.1
    out, tangent = jax.jvp(lambda x: PER_TENSOR(x, W, DIMS), (X,), (X,))
    # A tangent is not rounded to 8 bits.
    assert np.array_equal(tangent, lax.dot_general(X, W, DIMS))
    assert not np.array_equal(out, tangent)


@pytest.mark.slow
def test_loops_and_remat_differentiate_float8_products():
    ws = jnp.asarray(RNG.normal(size=(3, 64, 64)) / 8, jnp.bfloat16)

    def loss(product, policy=None):
        def body(x, w):
            return jnp.tanh(product(x, w, DIMS)), None

        return lambda ws: jnp.sum(lax.scan(jax.checkpoint(body, policy=policy), X, ws)[0] ** 2).astype("f4")

    # Forward, again for the backward pass, and two gradients.
    assert float8_count(jax.grad(loss(PER_TENSOR)), ws) == 4
    saves = jax.checkpoint_policies.dots_saveable
    assert float8_count(jax.grad(loss(PER_TENSOR, saves)), ws) == 3
    assert error(jax.grad(loss(PER_TENSOR))(ws), jax.grad(loss(lax.dot_general))(ws)) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise"])
def test_rounded_operands_are_kept_and_not_rounded_again(recipe):
    ws = jnp.asarray(RNG.normal(size=(3, 64, 64)) / 8, jnp.bfloat16)
    keeps, product = jmpp.remat_policies.save_quantised, Float8DotGeneral(recipe)

    def gradient(policy, looped):
        def layer(x, w):
            return jnp.tanh(product(x, w, DIMS)), None

        def loss(ws):
            step = layer if policy is None else jax.checkpoint(layer, policy=policy)
            if looped:
                return jnp.sum(lax.scan(step, X, ws)[0] ** 2).astype("f4")
            return jnp.sum(step(step(X, ws[0])[0], ws[1])[0] ** 2).astype("f4")

        return jax.grad(loss)

    def roundings(policy, looped):
        eqns = ir.equations(jax.make_jaxpr(gradient(policy, looped))(ws).jaxpr)
        # What is not computed again leaves an empty call.
        return sum(eqn.params.get("name") == "float8_bits" and bool(eqn.outvars) for eqn in eqns)

    nothing, all_of_it = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable
    counts = [(roundings(keeps, looped), roundings(nothing, looped)) for looped in (False, True)]
    # One scale per row is not that of the gradients' products: nothing is kept.
    assert counts == ([(4, 8), (2, 4)] if recipe == "fp8_current" else [(0, 0)] * 2)
    for policy, looped in itertools.product((keeps, nothing, all_of_it), (False, True)):
        found, plain = (jax.jit(gradient(p, looped))(ws) for p in (policy, None))
        # XLA rounds some half values less often in one program than in the other.
        assert error(found, plain) < 0.1


def test_attention_is_no_batch_of_experts():
    def attention(w, x):
        q, k = jnp.tanh(x @ w[0]), jnp.tanh(x @ w[1])
        return jnp.tanh(jnp.einsum("bqd,bkd->bqk", q, k)) @ jnp.tanh(x)

    rows = jmpp.explain(attention, lower="fp8_current")(jnp.ones((2, 32, 32)), jnp.ones((2, 32, 32)))
    whys = [row.why for row in rows.of("dot_general")]
    assert ["batches, as in attention" in why for why in whys] == [False, False, True, False]
    assert "the result is float32" in whys[3]


def attention(ws, x):
    q, k, v = (jnp.reshape(x @ w, (2, 64, 2, 32)) for w in ws)
    return jnp.tanh(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)) @ jnp.eye(64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "asked"),
    [
        *(("fp8_current", asked) for asked in ("", "+scores", "+values", "+scores+values")),
        ("fwd:mxfp8", "+scores+values"),
    ],
)
def test_attention_is_in_float8_where_it_is_asked_for(recipe, asked):
    ws, x = list(RNG.normal(size=(3, 64, 64)) / 8), jnp.asarray(RNG.normal(size=(2, 64, 64)), jnp.float32)
    # The second head is a thousandth as large, and has scales of its own.
    small = jnp.repeat(jnp.float32([1, 1e-3]), 32)
    ws = [jnp.asarray(w, jnp.float32) * small for w in ws]
    loss = lambda ws, x: jnp.sum(attention(ws, jnp.tanh(x)) ** 2 / small**2)  # noqa: E731
    half = jmpp.autocast(loss, f"mixed_bfloat16, r={recipe}{asked}")
    products = jmpp.audit(half, ws, x, grad=True).products
    found = [p.lhs.startswith("float8") for p in products if p.batch > 1]
    scores, values = "scores" in asked, "values" in asked
    backward = [values] * 2 + [scores] * 2 if recipe == "fp8_current" else [False] * 4
    assert found == [scores, values, *backward]
    grads, exact = (jax.device_get(jax.jit(jax.grad(fn))(ws, x)) for fn in (half, loss))
    assert max(map(error, grads, exact)) < 0.2
    assert error(grads[2][:, 32:], exact[2][:, 32:]) < 0.2


def test_keys_and_values_of_a_cache_are_no_experts():
    def attend(w, x, k, v):
        q = (jnp.tanh(x) @ w).reshape(2, 64, 2, 32)
        return jnp.tanh(jax.nn.dot_product_attention(q, k, v).reshape(2, 64, 64)) @ jnp.eye(64)

    args = jnp.ones((64, 64)), jnp.ones((2, 64, 64)), *[jnp.ones((2, 64, 2, 32))] * 2
    for words, scores, values in (
        ("", False, False),
        ("+scores", True, False),
        ("+scores+values", True, True),
    ):
        half = jmpp.autocast(attend, f"{HALF}, r=nvfp4-sr{words}")
        found = [p.lhs.startswith("float4") for p in jmpp.audit(half, *args).products if p.batch > 1]
        assert found == [scores, values]
    eqns = ir.equations(jax.make_jaxpr(half)(*args).jaxpr)
    assert [eqn.params["weight"] for eqn in eqns if "formats" in eqn.params] == [1, None, None]
    shorter = args[0], args[1], *[jnp.ones((2, 60, 2, 32))] * 2
    rows = jmpp.explain(attend, f"{HALF}, r=fp8_current+scores")(*shorter).of("dot_general")
    assert "not in float8: n=60 is no multiple of 16; the result is float32" in rows[1].why
    rows = jmpp.explain(attend, "mixed_float16, r=fp8_current+scores")(*args).of("dot_general")
    assert "float16 has not the range of scores" in rows[1].why


def test_attention_words_are_for_autocast_only():
    assert jmpp.Policy(f"{HALF}, r=fwd:fp8_current+values+scores").recipe == "fwd:fp8_current+scores+values"
    for recipe in ("scores", "fp8_current+fp8_rowwise", "fp8_current+score"):
        with pytest.raises(ValueError, match=r"Unknown recipe .* 'fp8_current\+scores\+values'"):
            jmpp.Policy(f"{HALF}, r={recipe}")
    with pytest.raises(ValueError, match="Leave out scores and values, or ask for it with autocast"):
        jmpp.wrap(nn.Dense(32), f"{HALF}, r=fp8_current+scores+values").init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="Leave out values, or ask for it with autocast"):
        jmpp.wrap(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), f"{HALF}, r=fp8_current+values")(X[:, :32])
    rules = {"**/first": f"{HALF}, r=fp8_current+values"}

    def two(ws, x):
        with jax.named_scope("first"):
            x = attention(ws, x)
        return attention(ws, x)

    rows = jmpp.explain(two, jmpp.PolicyMap(HALF, rules))(
        [W[:, :1] * jnp.ones((64, 64))] * 3, jnp.ones((2, 64, 64))
    )
    in_float8 = ["in float8 by" in row.why for row in rows.of("dot_general")]
    assert [in_float8[4], in_float8[10]] == [True, False]


def test_a_region_takes_a_recipe_without_some_parts():
    def product(w, x):
        with jmpp.region(jmpp.Policy(f"{HALF}, r=nvfp4-sr")):
            return jnp.tanh(jnp.tanh(x) @ w) @ jnp.eye(64)

    rows = jmpp.explain(product, HALF)(jnp.ones((64, 64)), jnp.ones((32, 64))).of("dot_general")
    assert "in float8 by the recipe nvfp4-sr" in rows[0].why


class LlamaBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        h = nn.RMSNorm()(x)
        q, k, v = (dense(64, name=name)(h).reshape(2, 32, 2, 32) for name in "qkv")
        x = x + dense(64, name="out")(nn.dot_product_attention(q, k, v).reshape(x.shape))
        h = nn.RMSNorm()(x)
        return x + dense(64, name="down")(nn.silu(dense(160, name="wide")(h)) * dense(160, name="up")(h))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "jax"])
def test_residuals_of_a_block_that_keeps_operands_in_8_bits(framework):
    x = jnp.asarray(RNG.normal(size=(2, 32, 64)), jnp.float32)
    params = LlamaBlock().init(jax.random.key(0), x)
    keeps = jmpp.remat_policies.save_quantised

    def bytes_kept(model, policy, around=lambda f: f):
        half = jmpp.wrap(model, policy)
        run = around(lambda params, x: jnp.sum(half.apply(params, x).astype(jnp.float32)))
        jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(run, *args)[1]))(params, x).jaxpr
        kept = {var for var in jaxpr.outvars if isinstance(var, jax.extend.core.Var)} - {*jaxpr.invars}
        return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)

    if framework == "linen":
        kept = bytes_kept(nn.remat(LlamaBlock, policy=keeps)(), CURRENT)
    else:
        kept = bytes_kept(LlamaBlock(), CURRENT, lambda f: jax.checkpoint(f, policy=keeps))
    assert kept < 0.55 * bytes_kept(LlamaBlock(), HALF)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "grad"), [(False, ""), (True, ", g=f32")])
def test_linen_layers_follow_but_for_heads_and_attention(remat, grad):
    model = jmpp.wrap(Net(remat), CURRENT + grad)
    params = jax.eval_shape(model.init, jax.random.key(0), IDS)
    found = formats(jax.grad(lambda p: jnp.mean(model.apply(p, IDS) ** 2)), params)
    # Four projections of attention and two of the MLP; weight gradients are float32 where that is asked for.
    weights = "float32" if grad else "bfloat16"
    assert found[BACKWARD, weights] == (6 if grad else 12)
    assert found[FORWARD, "bfloat16"] == (11 if remat else 6)
    # The head's three and attention's own products, two forward and four backward.
    assert sum(n for (f, _), n in found.items() if f is None) == (11 if remat else 9)


@pytest.mark.once
def test_rules_choose_layers_and_overrule_names():
    x = jnp.ones((2, 16, 32))
    for rules, count in (
        ({}, 6),
        ({"**/Dense_*": HALF}, 4),
        ({"lm_head": CURRENT}, 7),
        ({nn.Dense: CURRENT, nn.MultiHeadDotProductAttention: HALF}, 2),
    ):
        model = jmpp.wrap(Net(), jmpp.PolicyMap(CURRENT, rules))
        params = jax.eval_shape(model.init, jax.random.key(0), IDS)
        assert float8_count(model.apply, params, IDS) == count
    model = jmpp.wrap(Block(), jmpp.PolicyMap(HALF, {"Dense_0": CURRENT}))
    assert float8_count(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x) == 1


def test_shapes_that_the_hardware_refuses_stay():
    for features, rows, float8 in ((48, 16, 1), (40, 16, 0), (48, 8, 0), (1024, 16, 0)):
        model = jmpp.wrap(nn.Dense(features), CURRENT)
        x = jnp.ones((rows, 64))
        assert float8_count(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x) == float8
    for features, blocks in ((64, 1), (48, 0)):
        model = jmpp.wrap(nn.Dense(features), f"{HALF}, r=mxfp8")
        x = jnp.ones((32, 64))
        assert float8_count(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x) == blocks
    precise = jmpp.wrap(nn.Dense(48, precision="highest"), CURRENT)
    x = jnp.ones((16, 64))
    assert float8_count(precise.apply, jax.eval_shape(precise.init, jax.random.key(0), x), x) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "float8"), [(64, 2), (512, 3)], ids=["router", "swiglu"])
def test_a_gate_is_a_router_where_it_has_few_outputs(outputs, float8):
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            gate, up = nn.Dense(outputs, name="gate")(x), nn.DenseGeneral((8, 64), name="up")(x)
            up = up.reshape(len(x), -1)
            return nn.Dense(128, name="down")(up * jax.nn.silu(gate) if outputs == 512 else up) + gate.sum()

    class NNXExperts(nnx.Module):
        def __init__(self, rngs):
            self.gate = nnx.Linear(128, outputs, rngs=rngs)

        def __call__(self, x):
            return self.gate(x)

    x = jnp.ones((32, 128))
    model = Experts()
    variables = model.init(jax.random.key(0), x)
    assert float8_count(jmpp.wrap(model, CURRENT).apply, variables, x) == float8
    cast = jmpp.autocast(lambda v, x: model.apply(v, jnp.tanh(x)), "bfloat16", lower="fp8_current")
    assert float8_count(cast, variables, x) == float8 - 1  # What is last counts as a head.
    note = "fp8_current" if outputs == 512 else "not in float8: a router"
    for bare in (model, NNXExperts(nnx.Rngs(0))):
        assert note in {row.note for row in jmpp.summary(bare, CURRENT, x).modules if row.path == "gate"}


def test_nnx_layers_follow():
    bare, x = NNXNet(nnx.Rngs(0)), jnp.ones((16, 32))
    model = jmpp.wrap(bare, CURRENT)
    assert float8_count(lambda state: nnx.merge(nnx.graphdef(model), state)(x), nnx.state(model)) == 2
    assert nnx.graphdef(model) == nnx.graphdef(jmpp.wrap(bare, CURRENT))
    assert hash(nnx.graphdef(model)) == hash(pickle.loads(pickle.dumps(nnx.graphdef(model))))
    assert model.own.dot_general is of_the_user
    notes = {row.path: row.note for row in jmpp.summary(bare, CURRENT, x).modules}
    assert (notes["up"], notes["head"]) == ("fp8_current", "not in float8: a head")


@pytest.mark.slow
def test_autocast_tells_heads_and_attention_by_the_program():
    def loss(ws, x, labels):
        hidden = jax.nn.gelu(x @ ws[0])
        hidden = hidden + jax.nn.gelu(hidden @ ws[1])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ ws[2], labels).mean()

    ws, x = [jnp.ones((32, 32))] * 3, jnp.ones((16, 32))
    labels = jnp.zeros(16, jnp.int32)
    rows = jmpp.explain(loss, lower="fp8_current")(ws, x, labels).of("dot_general")
    assert [("in float8 by" in row.why, row.chosen) for row in rows] == [
        (False, "bfloat16"),  # Of two arguments: a first layer.
        (True, "bfloat16"),
        (False, "float32"),  # Only the loss uses it: a head.
    ]
    assert "in bfloat16 and not in float8; the result is float32" in rows[2].why
    half = jmpp.autocast(loss, lower="fp8_current")
    assert float8_count(jax.grad(half), ws, x, labels) == 3
    policy = jmpp.autocast(loss, "p=f32,c=bf16,o=f32,g=f32,r=fp8_current")
    assert formats(jax.grad(policy), ws, x, labels)[BACKWARD, "float32"] == 1
    for recipe, count in (("fwd:fp8_current", 1), ("bwd:fp8_current", 2)):
        assert float8_count(jax.grad(jmpp.autocast(loss, lower=recipe)), ws, x, labels) == count

    def marked(w, x):
        with jmpp.region(jmpp.get_policy(f"{HALF}, r=fwd:fp8_rowwise+bwd:fp8_current")):
            return jnp.sum(jax.nn.gelu(jnp.tanh(x) @ w) @ w)

    found = jmpp.audit(jmpp.autocast(marked, HALF), ws[0], x, grad=True).products
    scales = {(p.backward, p.scales) for p in found if p.scales}
    assert scales == {(False, "fp8_rowwise"), (True, "fp8_current")}
    model, params = Net(), Net().init(jax.random.key(0), IDS)
    by_rule = jmpp.autocast(model.apply, jmpp.PolicyMap(CURRENT, {"block/Dense_0": HALF}))
    assert float8_count(by_rule, params, IDS) == 5
    with pytest.raises(TypeError, match=r"a policy or a half dtype, .* or lower='fp8_current'"):
        jmpp.autocast(loss)
    with pytest.raises(ValueError, match="compute=float32.*recipe=fp8_current"):
        jmpp.autocast(loss, "float32", lower="fp8_current")


@pytest.mark.slow
def test_audit_names_float8_products_their_scales_and_the_others_reasons():
    model = jmpp.wrap(Net(), CURRENT)
    params = jax.eval_shape(model.init, jax.random.key(0), IDS)
    found = jmpp.audit(lambda p: jnp.mean(model.apply(p, IDS) ** 2), params, grad=True)
    eight = [p for p in found.products if p.scales]
    assert {(p.lhs, p.rhs, p.backward) for p in eight} == {(*FORWARD, False), (*BACKWARD, True)}
    assert {p.scales for p in eight} == {"fp8_current"}
    stays = {p.stays for p in found.products if not p.scales}
    assert stays == {"a head", "one of batches, as in attention"}
    assert not found.constants
    assert "scales, or" in str(found)
    assert all(not p.stays for p in jmpp.audit(lambda a: a @ a, X[:32, :32]).products)


def test_a_replay_in_float32_has_no_float8():
    exact = replay_in_float32(lambda x, w: PER_TENSOR(x, w, DIMS))(X, W)
    assert error(exact, np.asarray(X, np.float32) @ np.asarray(W, np.float32)) < 1e-6


@pytest.mark.slow
def test_training_steps_with_loss_scale_and_skips():
    model = jmpp.wrap(nn.Dense(32, use_bias=False), "p=f32,c=f16,o=f32,r=fp8_current")
    x = jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32)
    params = model.init(jax.random.key(0), x)
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale(2.0**10))
    state = tx.init(params)

    @jax.jit
    def step(params, state, factor):
        loss_fn = lambda params: jnp.mean(model.apply(params, x) ** 2) * factor  # noqa: E731
        loss, grads = jmpp.scaled_value_and_grad(loss_fn)(state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(8):
        params, state, loss = step(params, state, 1.0)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    before = params
    params, state, _ = step(params, state, jnp.inf)
    assert not jmpp.grads_finite(state)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, before))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(32, name="inner")(x)
        assert y.dtype == jnp.bfloat16
        return y


class Nnx(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(32, 32, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.inner(x)
        assert y.dtype == jnp.bfloat16
        return y


@pytest.mark.parametrize(("outer", "inner"), [(CURRENT, HALF), (HALF, CURRENT)])
def test_a_layer_of_another_recipe_hands_on_compute_dtype(outer, inner):
    """As a recipe changes no dtype, there is no boundary, at which outputs would become float32."""
    rules, x = jmpp.PolicyMap(outer, {"inner": inner}), X[:, :32]
    of_linen = jax.eval_shape(jmpp.wrap(Linen(), rules).init_with_output, jax.random.key(0), x)[0]
    assert {of_linen.dtype, jax.eval_shape(jmpp.wrap(Nnx(), rules), x).dtype} == {np.dtype("float32")}


def test_policies_keep_their_recipe():
    policy = jmpp.get_policy(CURRENT)
    assert (
        jmpp.get_policy(str(policy))
        == policy
        == jmpp.Policy("float32", "bfloat16", "float32", recipe="fp8_current")
    )
    assert jmpp.Policy.from_dict(policy.to_dict()) == policy != jmpp.get_policy(HALF)
    assert policy.to_dict()["recipe"] == "fp8_current"
    precision = jmpp.from_config({"policy": "mixed_bfloat16, r=fp8_rowwise", "rules": [["head", "bf16"]]})
    assert precision.policy.default.recipe == "fp8_rowwise"
    assert jmpp.from_config(precision.to_dict()) == precision
    by_dtypes = jmpp.from_config({"compute": "bfloat16", "recipe": "fp8_current"})
    assert by_dtypes.policy.default.recipe == "fp8_current"
    for one, shortest in (
        ("fwd:fp8_current", None),
        ("bwd:fp8_current+fwd:fp8_rowwise", "fwd:fp8_rowwise+bwd:fp8_current"),
        ("fwd:fp8_current+bwd:fp8_current", "fp8_current"),
    ):
        policy = jmpp.get_policy(f"{HALF}, r={one}")
        assert policy.recipe == (shortest or one)
        assert policy == jmpp.Policy.from_dict(policy.to_dict()) == jmpp.get_policy(str(policy))
        assert jmpp.from_config(jmpp.from_config(str(policy)).to_dict()).policy.default == policy
    kept = jmpp.wrap(nn.Dense(32, dtype=jnp.float32), jmpp.PolicyMap(CURRENT, keep_module_dtypes=True))
    x = jnp.ones((16, 32))
    assert float8_count(kept.apply, jax.eval_shape(kept.init, jax.random.key(0), x), x) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixed_bfloat16, r=fp8_curent", "Unknown recipe 'fp8_curent'.*Did you mean 'fp8_current'.*Known: "),
        ("r=fp8_current", "compute=float32.*is for products in 16 bits.*compute=bfloat16 or float16"),
        ("float64, recipe=fp8_current", "compute=float64.*is for products in 16 bits"),
        ("fp8_current", "is a recipe, which goes with the dtypes.*'mixed_bfloat16,recipe=fp8_current'"),
        ("mixed_bfloat16, r=fp8_current, r=fp8_rowwise", "sets 'recipe' twice"),
        ("mixed_bfloat16, r=fwd:fp8_curent", "Unknown recipe 'fwd:fp8_curent'.*Did you mean 'fp8_current'"),
        ("mixed_bfloat16, r=forward:fp8_current", "Unknown recipe .*'fwd:fp8_current' or 'bwd:fp8_current'"),
        ("mixed_bfloat16, r=fwd:fp8_current+fwd:fp8_current", "Unknown recipe"),
    ],
)
def test_wrong_recipes_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        jmpp.get_policy(text)


MESH = jax.sharding.Mesh(np.array(jax.devices()), "d")
SHARDED, WHOLE = (NamedSharding(MESH, spec) for spec in (P("d"), P()))
#: Rows of very different size: a scale of its own for each device would show.
ROWS = jnp.asarray(RNG.normal(size=(128, 64)) * 2.0 ** np.linspace(-16, 16, 128)[:, None], jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "axis_type"), [("fp8_current", AxisType.Auto), ("mxfp8", AxisType.Explicit)]
)
def test_scales_of_sharded_arrays_are_those_of_the_whole(axis_type, recipe):
    def squares(x, w):
        return jnp.sum(Float8DotGeneral(recipe)(x, w, DIMS).astype(jnp.float32) ** 2)

    mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(ROWS, NamedSharding(mesh, P("d"))), jax.device_put(W, NamedSharding(mesh, P()))
        found = jax.jit(jax.value_and_grad(squares, (0, 1)))(x, w)
    exact = jax.jit(jax.value_and_grad(squares, (0, 1)))(ROWS, W)
    assert np.array_equal(found[1][0], exact[1][0])
    assert error(found[1][1], exact[1][1]) < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_scales_in_shard_map_are_those_of_the_whole(check_vma):
    def body(x, w):
        out, vjp = jax.vjp(lambda x, w: PER_TENSOR(x, w, DIMS), x, w)
        by_x, by_w = vjp(out)
        return out, by_x, by_w if check_vma else lax.psum(by_w, "d")

    specs = {"in_specs": (P("d"), P()), "out_specs": (P("d"), P("d"), P())}
    mapped = jax.jit(jax.shard_map(body, mesh=MESH, check_vma=check_vma, **specs))
    out, vjp = jax.vjp(lambda x, w: PER_TENSOR(x, w, DIMS), ROWS, W)
    by_x, by_w = vjp(out)
    found = mapped(jax.device_put(ROWS, SHARDED), jax.device_put(W, WHOLE))
    assert np.array_equal(found[0], out)
    assert np.array_equal(found[1], by_x)
    assert error(found[2], by_w) < 2**-7
    # Of the input, and of the cotangent for both products, which XLA computes once. The weight is the same
    # everywhere, which JAX knows with check_vma.
    names = [e.primitive.name for e in ir.equations(jax.make_jaxpr(mapped)(ROWS, W))]
    assert sum(name.startswith("pmax") for name in names) == (3 if check_vma else 4)


def test_a_report_requires_float8_kernels():
    def layer(x, w, v):
        with jax.named_scope("mlp"):
            hidden = PER_TENSOR(x, w, DIMS)
        with jax.named_scope("head"):
            return hidden @ v

    jaxpr = jax.make_jaxpr(layer)(X, W, W.T)
    head = Kernel("gemm", "triton", path="head", flops=2, operands="bfloat16 x bfloat16")
    mlp = Kernel("gemm", "triton", path="mlp", line="net.py:3", flops=2, operands="bfloat16 x bfloat16")
    eight = dataclasses.replace(mlp, operands="float8_e4m3fn x float8_e4m3fn", arithmetic="float8")
    check_float8(jaxpr, [head, eight], "layer for H100")
    with pytest.raises(
        AssertionError, match=r"gave up float8 in layer for A100: mlp \(net.py:3\): bfloat16 x"
    ):
        check_float8(jaxpr, [head, mlp], "layer for A100")
    with pytest.raises(AssertionError, match="has no float8 product.*Give its policy a recipe"):
        check_float8(jax.make_jaxpr(lambda x, w: x @ w)(X, W), [head], "layer for H100")
    with pytest.raises(ValueError, match="can require 'float8' and nothing else; got require='fp4'"):
        jmpp.lowering_report(layer, X, W, W.T, require="fp4")


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")
def test_a_scale_takes_two_kernels_whatever_the_order_in_memory():
    def both(heads, weight):
        return scale_of(jnp.swapaxes(heads, 1, 2), E5M2), scale_of(weight.T, E5M2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 16, 128, 64), (1024, 4096))]
    assert len(jmpp.lowering_report(both, *shapes, target="H100").kernels) == 4


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")
def test_an_h100_multiplies_float8_and_an_a100_does_not():
    def loss(x, w):
        with jax.named_scope("mlp"):
            return jnp.sum(PER_TENSOR(x, w, DIMS).astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 1024), (1024, 256))]
    report = jmpp.lowering_report(jax.grad(loss, (0, 1)), *shapes, target="H100", require="float8")
    kinds = [kernel.operands for kernel in report.matrix_kernels]
    assert kinds.count("float8_e4m3fn x float8_e4m3fn") == 1
    assert len(kinds) == 3
    (profit,) = report.recipes
    assert (profit.path, profit.precision) == ("mlp", "fp8_current")
    assert profit.before_seconds - profit.seconds == pytest.approx(
        profit.saved_seconds - profit.added_seconds
    )
    # So small a product loses.
    assert profit.speedup < 1
    assert "slower by their recipe: mlp (fp8_current@H100 leaves such out)" in report.verdict
    with pytest.raises(AssertionError, match="gave up float8 in .* for A100"):
        jmpp.lowering_report(jax.grad(loss, (0, 1)), *shapes, target="A100", require="float8")


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")
def test_a_b200_multiplies_blocks_in_float8_and_others_the_same_numbers_in_bfloat16():
    product = Float8DotGeneral("mxfp8")
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)

    def squared(x):
        return product(x, x, (((1,), (1,)), ((), ())))

    report = jmpp.lowering_report(squared, x, target="B200", require="float8")
    (kernel,) = report.matrix_kernels
    assert (kernel.operands, kernel.arithmetic) == ("float8_e4m3fn x float8_e4m3fn", "float8")
    assert kernel.flops == 2 * 512 * 512 * 1024
    with pytest.raises(AssertionError, match="gave up float8 in .* for H100"):
        jmpp.lowering_report(squared, x, target="H100", require="float8")
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SHARDED)
    with pytest.raises(AssertionError, match="gave up float8 in .* for B200"):
        jmpp.lowering_report(squared, x, target="B200", require="float8")


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")
def test_fully_sharded_weights_are_gathered_in_8_bits():
    size, layers = 1024, 2

    def gathered(product):
        def loss(ws, x):
            for w in ws:
                x = jnp.tanh(product(x, w.astype(jnp.bfloat16), DIMS))
                x = lax.with_sharding_constraint(x, SHARDED)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        ws = [jax.ShapeDtypeStruct((size, size), jnp.float32, sharding=SHARDED)] * layers
        x = jax.ShapeDtypeStruct((2 * size, size), jnp.bfloat16, sharding=SHARDED)
        report = jmpp.lowering_report(jax.grad(loss), ws, x, target="H100")
        return sum(kernel.bytes_read for kernel in report.kernels if kernel.collective == "all-gather")

    part = size * size // len(jax.devices())
    assert gathered(lax.dot_general) == 2 * layers * part
    # Once: what the forward pass multiplied in 8 bits is there for the gradient of the input.
    assert gathered(PER_TENSOR) == layers * part
