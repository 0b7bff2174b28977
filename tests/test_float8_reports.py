"""Reports on programs with float8 recipes: what 8 bits change, and what they lose."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmpp
from jmp_policy._src.policy.recipes import DELAYED, RECIPES, parts_of_nvfp4
from jmp_policy._src.products.fp8.functions import Float8DotGeneral
from jmp_policy._src.products.fp8.scales import has_blocks

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 32)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="down")(nn.gelu(nn.Dense(64, name="up")(x)))


PARAMS = Net().init(jax.random.key(0), X)["params"]


def loss(policy):
    model: Any = jmpp.wrap(Net(), policy)
    return lambda params: jnp.mean(model.apply({"params": params}, X).astype(jnp.float32) ** 2)


@functools.cache
def drift_in_bfloat16():
    return jmpp.drift(loss("mixed_bfloat16"), PARAMS)


def vector(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.once
#: Of fp8_delayed the scales are those of the steps before.
@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {DELAYED}))
def test_drift_measures_what_eight_bits_introduce(recipe):
    recipe = (
        "nvfp4-sr" if recipe == "nvfp4" else recipe
    )  # Of rounding at random the error is another each time.
    policy = f"mixed_bfloat16, r={recipe}"
    found, half = jmpp.drift(loss(policy), PARAMS), drift_in_bfloat16()
    eight, exact = (vector(jax.jit(jax.grad(loss(p)))(PARAMS)) for p in (policy, "float32"))
    error = np.linalg.norm(eight - exact) / np.linalg.norm(exact)
    # XLA rounds some half values less often than the program says, which is little beside 8 bits.
    assert found.gradient_error == pytest.approx(error, rel=0.1)
    assert found.gradient_error > 5 * half.gradient_error
    # Nearly all of it comes from the products, forward and backward, at the rate of the coarser operand.
    products = [row for row in found.rows if row.operation == "dot_general"]
    assert sum(row.share for row in products) > 0.95
    value = "float8_e4m3fn" if parts_of_nvfp4(recipe) is None else "float4_e2m1fn"
    of_gradients = value if has_blocks(recipe) else "float8_e5m2"
    assert {(row.direction, row.dtype) for row in products} == {
        ("outputs", value),
        ("activation gradients", of_gradients),
        ("parameter gradients", of_gradients),
    }
    assert f"a matrix product in {value}" in found.verdict
    assert found.is_normal


@pytest.mark.slow
def test_drift_has_no_rows_for_scales_and_sees_them_in_loops():
    def looped(ws, product, dtype):
        def body(x, w):
            return jnp.tanh(product(jnp.sin(x), w.astype(dtype), (((1,), (0,)), ((), ())))), None

        return jnp.mean(jax.lax.scan(body, jnp.asarray(X, dtype), ws)[0].astype(jnp.float32) ** 2)

    ws = RNG.normal(size=(3, 32, 32)).astype(np.float32) / 6
    eight = functools.partial(looped, product=Float8DotGeneral("fp8_current"), dtype=jnp.bfloat16)
    exact = functools.partial(looped, product=jax.lax.dot_general, dtype=jnp.float32)

    found = jmpp.drift(eight, ws, detail="operation")
    assert {row.operation for row in found.rows}.isdisjoint({"reduce_max", "abs", "reduce_precision"})
    assert any(row.dtype.startswith("float8") and len(row.trips) == 3 for row in found.rows)
    rounded, right = (vector(jax.jit(jax.grad(fn))(ws)) for fn in (eight, exact))
    error = np.linalg.norm(rounded - right) / np.linalg.norm(right)
    assert found.gradient_error == pytest.approx(error, rel=0.1)


#: A row of 2**20 among ones: e4m3 has 17 binary digits of range.
OUTLIER = jnp.ones((32, 32)).at[3].set(2.0**20)


def drift_beside_an_outlier(recipe, call, x=OUTLIER):
    model: Any = jmpp.wrap(nn.Dense(32, kernel_init=nn.initializers.ones), f"mixed_bfloat16, r={recipe}")
    variables = model.init(jax.random.key(0), x)
    return jmpp.drift(call(model.apply), variables, x)


@pytest.mark.slow
def test_drift_tells_what_is_flushed_beside_an_outlier():
    def loss_of(apply):
        return lambda params, x: jnp.tanh(apply(params, x).astype(jnp.float32)).mean()

    found = drift_beside_an_outlier("fp8_current", loss_of)
    rows = {row.direction: row for row in found.rows if row.dtype.startswith("float8")}
    assert rows["outputs"].flushed == (31 / 32, 0)
    assert rows["parameter gradients"].flushed == (0, 31 / 32)
    assert {row.saturated for row in found.rows} == {(0, 0)}
    assert "(96.9 % of the elements of its left operand become zero in 8 bits)" in found.verdict
    assert "96.9 % / 0" in str(found)
    assert [31 / 32, 0.0] in [row["flushed"] for row in found.to_dict()["rows"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "x", "lost"),
    [
        ("fp8_rowwise", OUTLIER, set()),
        ("mxfp8", OUTLIER.T, {((31 / 32, 0), (0, 0))}),
        ("fp8_delayed", OUTLIER, {((0, 0), (1 / 32, 0))}),
    ],
)
def test_drift_tells_which_recipes_an_outlier_harms(recipe, x, lost):
    """Rows have scales of their own, a block has one; `fp8_delayed` has a scale of 1 in its first step."""

    def scanned(apply):
        def body(params, x):
            branches = (lambda x: apply(params, x)), (lambda x: apply(params, -x))
            return jax.lax.cond(x[0, 0] > 0, *branches, x)

        return lambda params, x: jax.lax.scan(lambda carry, x: (carry, body(params, x)), 0, x[None])[1]

    rows = drift_beside_an_outlier(recipe, scanned, x).rows
    assert {(row.flushed, row.saturated) for row in rows} - {((0, 0), (0, 0))} == lost


@pytest.mark.slow
def test_memory_counts_what_waits_for_float8_products_in_8_bits():
    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = nn.Dense(32, use_bias=False)(x)
            return x

    params = Linear().init(jax.random.key(0), X)

    def report(policy):
        model: Any = jmpp.wrap(Linear(), policy)
        return jmpp.memory_report(jax.grad(lambda p: jnp.sum(model.apply(p, X).astype(jnp.float32))), params)

    half, eight = report("mixed_bfloat16"), report("mixed_bfloat16, r=fp8_current")
    # Two results of layers wait for the next layer's weight gradient.
    assert half.row("activations").expected_policy == 2 * 64 * 32 * 2
    # Scales are scalars.
    assert 0 <= eight.row("activations").expected_policy - 2 * 64 * 32 < 64
    assert eight.precision == "bfloat16, float8_e4m3fn, float8_e5m2"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_spectrum_tells_what_a_scaled_cast_to_eight_bits_loses(dtype):
    values = np.float32(np.exp2(RNG.uniform(-60, 3.5, 4096)) * RNG.choice([-1, 1], 4096))
    spectrum = jmpp.gradient_spectrum(lambda w: jnp.vdot(w, values), jnp.ones(4096))
    (row,) = spectrum.tensors

    def cast(scale):
        with np.errstate(over="ignore", invalid="ignore"):
            return np.abs((values / scale).astype(jnp.dtype(dtype)).astype(np.float32))

    scale = 2.0 ** np.ceil(np.log2(np.abs(values).max() / float(jnp.finfo(dtype).max)))
    found, eight = row.in_float8(dtype), cast(scale)
    assert found.zero == np.mean(eight == 0)
    # Numbers just below the smallest normal one round up to it.
    normal = float(jnp.finfo(dtype).smallest_normal)
    assert found.subnormal == np.mean((np.abs(values / scale) < normal) & (eight > 0))
    assert (found.infinite, np.isfinite(eight).all()) == (0, True)
    # A scale from the past that is too small: what is beyond the range saturates.
    small = scale / 8
    beyond = np.mean(np.abs(values) >= small * 2.0 ** np.frexp(float(jnp.finfo(dtype).max))[1])
    assert row.in_float8(dtype, scale=small).infinite == beyond > 0


@pytest.mark.slow
def test_a_spectrum_shows_what_operands_lose_in_eight_bits():
    spectrum = jmpp.gradient_spectrum(loss("mixed_bfloat16, r=fp8_current"), PARAMS)
    text = str(spectrum)
    assert "activations; as float16, and float8_e4m3fn with a scale for each" in text
    assert "activation gradients; as float16, and float8_e5m2 with a scale for each" in text
