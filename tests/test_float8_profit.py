"""Float8 only where it gains: estimates per product, recipes that name a device, what reports say of it."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmpp
from jmp_policy._src.core.targets import TARGETS
from jmp_policy._src.jaxpr.matrix_products import Size
from jmp_policy._src.policy.recipes import RECIPES
from jmp_policy._src.products.fp8.eligibility import profit_of
from jmp_policy._src.products.fp8.scales import has_blocks
from jmp_policy._src.report.lowering.kernels import Kernel, gains
from jmp_policy._src.report.lowering.lowered import verdict_of
from jmp_policy._src.report.lowering.lowering import products_in_half

WHERE_IT_PAYS = "mixed_bfloat16, r=fp8_current@H100"
TOKENS = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(4096, name="up")(x))
        return nn.Dense(1024, name="down")(nn.gelu(nn.Dense(4096, name="wide")(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(1024, 4096, rngs=rngs)
        self.wide = nnx.Linear(4096, 4096, rngs=rngs)
        self.odd = nnx.Linear(4096, 4100, rngs=rngs)

    def __call__(self, x):
        return self.odd(self.wide(self.up(x)))


def size(m, n, k):
    return Size(1, m, n, k, 2 * m * n * k)


def products(model, x=TOKENS):
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = jmpp.audit(lambda v, x: jnp.mean(model.apply(v, x)), variables, x, grad=True)
    return found.products


def test_a_large_product_takes_half_of_its_time_in_float8():
    card = TARGETS["H100"]
    profit = profit_of(size(8192, 8192, 8192), "fp8_current", card)
    assert profit.half == pytest.approx(3 * 2 * 8192**3 / 989.4e12)
    assert profit.saved == pytest.approx(profit.half / 2, rel=1e-3)
    # Bound by memory: 8 bits save one byte of each element of the operands, and add more.
    thin = profit_of(size(16, 4096, 4096), "fp8_current", card)
    moved = 2 * (16 * 4096 + 4096 * 4096 + 16 * 4096)
    assert thin.saved == pytest.approx(moved / card.bandwidth, rel=0.02)
    assert not thin.gains


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("card", ["H100", "H200", "B200"])
def test_recipes_gain_at_the_width_of_large_models_and_not_at_that_of_bert(recipe, card):
    assert not profit_of(size(4096, 1024, 1024), recipe, TARGETS[card]).gains
    # Only a B200 multiplies operands with scales for blocks in 8 bits.
    gains = not has_blocks(recipe) or card == "B200"
    assert profit_of(size(8192, 16384, 4096), recipe, TARGETS[card]).gains == gains


def test_fp8_alone_is_what_gains_on_an_h100():
    policy = jmpp.Policy("mixed_bfloat16, r=fp8")
    assert policy.recipe == "fp8_current@H100"
    assert jmpp.get_policy("mixed_bfloat16, recipe=fp8") == jmpp.get_policy(str(policy)) == policy
    assert jmpp.report.worthwhile("fp8", target="B200") == "fp8_current@B200"
    rows = jmpp.explain(lambda w, x: jnp.tanh(jnp.tanh(jnp.tanh(x) @ w) @ w), lower="fp8")(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (32, 64)))
    )
    assert "no gain on H100" in rows.of("dot_general")[0].why


def test_a_layer_follows_a_recipe_where_it_gains_and_reports_say_why_not():
    found = products(jmpp.wrap(Net(), WHERE_IT_PAYS))
    in_float8 = [(p.path, p.scales) for p in found if p.scales]
    assert in_float8 == 3 * [("Net/wide", "fp8_current")]
    stays = {(p.path, p.stays) for p in found if not p.scales}
    assert {path for path, _ in stays} == {"Net/up", "Net/down"}
    # Of the gradients too the reason is that of the layer.
    (why,) = {why for _, why in stays}
    saved, added = (float(text.split(" us ")[0]) for text in why.split(": ")[1].split(", "))
    assert why.startswith("no gain on H100: ")
    assert saved < added
    few = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    assert not any(p.scales for p in products(jmpp.wrap(Net(), WHERE_IT_PAYS), few))
    notes = {row.path: row.note for row in jmpp.summary(Net(), WHERE_IT_PAYS, TOKENS).modules}
    assert notes["wide"] == "fp8_current@H100"
    assert notes["up"] == f"not in float8: {why}"


def test_nnx_layers_and_autocast_follow_where_it_gains():
    model = nnx.eval_shape(lambda: NNXNet(nnx.Rngs(0)))
    notes = {row.path: row.note for row in jmpp.summary(model, WHERE_IT_PAYS, TOKENS).modules}
    assert (notes["wide"], notes["odd"]) == ("fp8_current@H100", "not in float8: n=4100 is no multiple of 16")
    assert notes["up"].startswith("not in float8: no gain on H100")

    def loss(w, v, x):
        x = jax.nn.gelu(jnp.sin(x) @ w)
        return jnp.mean(jax.nn.gelu(x @ v) @ v)

    w, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 4096), (4096, 4096)))
    rows = jmpp.explain(loss, lower="fp8_current@H100")(w, v, TOKENS).of("dot_general")
    assert "not in float8: no gain on H100" in rows[0].why
    assert "in float8 by the recipe fp8_current@H100" in rows[1].why
    half = jmpp.autocast(loss, lower=jmpp.report.worthwhile("fp8_current", target="H100"))
    assert [p.scales for p in jmpp.audit(half, w, v, TOKENS).products] == ["", "fp8_current", ""]


def test_sizes_that_are_not_known_stay():
    model = jmpp.wrap(nn.Dense(4096), WHERE_IT_PAYS)
    (batch,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 4096), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((16, 4096)))
    jaxpr = str(jax.make_jaxpr(model.apply)(variables, x))
    assert "dot_general" in jaxpr
    assert "float8" not in jaxpr


def test_texts_of_recipes_with_a_device():
    recipe = jmpp.report.worthwhile("fp8_current", target="h100")
    policy = jmpp.Policy("mixed_bfloat16", recipe=recipe)
    assert policy == jmpp.get_policy(str(policy)) == jmpp.get_policy("mixed_bfloat16, r=fp8_current@h100")
    assert (policy.recipe, policy.to_dict()["recipe"]) == ("fp8_current@H100", "fp8_current@H100")
    assert jmpp.Policy.from_dict(policy.to_dict()) == policy
    with pytest.raises(ValueError, match="A100 has no float8 arithmetic.* L4, H100, H200, B200, v7x have"):
        jmpp.report.worthwhile("fp8_current", target="A100")
    with pytest.raises(ValueError, match="Unknown target 'h1000'. Did you mean 'H100'"):
        jmpp.get_policy("mixed_bfloat16, r=fp8_current@H1000")
    with pytest.raises(ValueError, match="Unknown recipe 'fp8_curent'.*Did you mean 'fp8_current'"):
        jmpp.get_policy("mixed_bfloat16, r=fp8_curent@H100")
    with pytest.raises(ValueError, match="Unknown recipe 'fp9'"):
        jmpp.report.worthwhile("fp9", target="H100")


@pytest.mark.slow
def test_a_program_without_its_recipe_is_that_of_the_policy_without():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.remat(nn.Dense)(32)(nn.gelu(nn.Dense(32)(x))), None

    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(
                x, None
            )[0]

    x = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    params = Loop().init(jax.random.key(0), x)

    def grad(policy):
        model: Any = jmpp.wrap(Loop(), policy)
        return jax.jit(jax.value_and_grad(lambda params: jnp.mean(model.apply(params, x) ** 2)))

    eight, half = grad("mixed_bfloat16, r=fp8_current"), grad("mixed_bfloat16")(params)
    found = jax.jit(products_in_half(eight))(params)
    assert jax.tree.all(jax.tree.map(np.array_equal, found, half))
    assert float(eight(params)[0]) != float(half[0])


def test_a_report_tells_saved_from_added_time_by_module():
    card = TARGETS["H100"]
    half = [
        Kernel("a", "triton", path="mlp", flops=10**12, arithmetic="bfloat16", tensor_cores=True),
        Kernel("b", "fusion", path="mlp", bytes_read=10**6),
        Kernel("c", "triton", path="head", flops=10**9, arithmetic="bfloat16", tensor_cores=True),
    ]
    eight = [
        Kernel("a", "triton", path="mlp", flops=10**12, arithmetic="float8", tensor_cores=True),
        Kernel("b", "fusion", path="mlp", bytes_read=10**6),
        Kernel("scale", "reduction", path="mlp", bytes_read=10**9, times=2),
        half[2],
    ]
    (found,) = gains(half, eight, {"mlp": "fp8_current", "gone": "fp8_current"}, card)
    assert found.saved_seconds == pytest.approx(1e12 / 989.4e12 - 1e12 / 1978.9e12)
    assert found.added_seconds == pytest.approx(2 * (1e9 / card.bandwidth + card.launch_seconds))
    assert found.speedup == pytest.approx(found.before_seconds / found.seconds)
    verdict = verdict_of(
        eight, (), card, (found, dataclasses.replace(found, path="slow", before_seconds=0.0))
    )
    assert "slower by their recipe: mlp, slow (fp8_current@H100 leaves such out)" in verdict


@pytest.mark.once
def test_what_is_timed_on_a_gpu_is_relative_to_bfloat16(monkeypatch):
    """On a model that compiles in a moment; a policy of every kind has its row."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    device = importlib.import_module("benchmarks.times.device")
    chosen = {name: device.POLICIES[name] for name in ("bfloat16", "fp8_current")}
    monkeypatch.setattr(device, "POLICIES", chosen)
    tokens = jnp.zeros((4, 8), jnp.int32)
    net = nn.Sequential([nn.Embed(64, 32), nn.Dense(64)])
    small = device.Model(net, lambda key: ((tokens,), tokens), mean_loss)
    half, eight = device.fp8_rows(small, repeats=2)
    assert (half["policy"], eight["policy"]) == tuple(chosen)
    assert half["of_bfloat16"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert eight["milliseconds"] > 0
    assert half["tokens_per_second"] > 0
    assert set(device.ORDER) == set(device.SIZES)


def mean_loss(logits, labels):
    return jnp.mean(logits.astype(jnp.float32) ** 2) + 0 * labels.sum()
