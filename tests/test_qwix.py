"""Policies and qwix in one model, in both orders; skipped where qwix is not installed."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jmp_policy as jmpp

qwix: Any = pytest.importorskip("qwix")
# It uses names that Flax has since given up.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
DTYPES = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(64, name="up")(nn.LayerNorm()(x)))
        return nn.Dense(32, name="down")(x)


class Function(nn.Module):
    """Calls a function under autocast."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(0.1), (32, 48))
        product = jmpp.autocast(lambda w, x: lax.dot_general(x, w, (((1,), (0,)), ((), ()))), "bfloat16")
        return product(w, x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def quantized(model, dtype, *inputs, path=".*"):
    rule = qwix.QtRule(module_path=path, weight_qtype=jnp.dtype(dtype), act_qtype=jnp.dtype(dtype))
    return qwix.quantize_model(model, qwix.QtProvider([rule]), *inputs)


def operands(fn, *args, grad=False):
    products = jmpp.audit(fn, *args, grad=grad).products
    return [(p.path.rpartition("/")[2], p.lhs, p.backward) for p in products]


@DTYPES
def test_linen_models_are_wrapped_before_or_after(dtype):
    variables = Net().init(jax.random.key(0), X)
    net: Any = Net()
    exact, alone = net.apply(variables, X), quantized(net, dtype).apply(variables, X)
    before = quantized(jmpp.wrap(Net(), "mixed_bfloat16"), dtype)
    after: Any = jmpp.wrap(quantized(Net(), dtype), "mixed_bfloat16")
    found = before.apply(variables, X)
    assert found.dtype == jnp.float32
    assert np.array_equal(found, after.apply(variables, X))
    # What bfloat16 adds to qwix's own rounding is little.
    error, own = (np.linalg.norm(out - exact) / np.linalg.norm(exact) for out in (found, alone))
    assert own < error < own + 2**-7
    for model in (before, after):
        seen = operands(lambda v, m=model: jnp.mean(m.apply(v, X) ** 2), variables, grad=True)
        assert [p for p in seen if not p[2]] == [("up", dtype, False), ("down", dtype, False)]
        assert {lhs for _, lhs, backward in seen if backward} == {"bfloat16"}


@DTYPES
def test_nnx_models_are_wrapped_before_or_after(dtype):
    before = quantized(jmpp.wrap(NNXNet(nnx.Rngs(0)), "mixed_bfloat16"), dtype, X)
    after = jmpp.wrap(quantized(NNXNet(nnx.Rngs(0)), dtype, X), "mixed_bfloat16")
    assert np.array_equal(before(X), after(X))
    for model in (before, after):
        seen = operands(lambda m: jnp.mean(m(X).astype(jnp.float32)), model)
        assert seen == [("up", dtype, False), ("down", dtype, False)]


@DTYPES
def test_autocast_goes_around_a_quantized_model_and_inside_of_one(dtype):
    variables = Net().init(jax.random.key(0), X)
    around = jmpp.autocast(quantized(Net(), dtype).apply, "bfloat16")
    of_function = Function().init(jax.random.key(0), X)
    inside = quantized(Function(), dtype)
    says = "a custom_vjp_call holds .* which stay as traced, in float32"
    with pytest.warns(UserWarning, match=says):
        found = operands(around, variables, X)
    assert [lhs for _, lhs, _ in found] == [dtype, dtype]
    with pytest.warns(UserWarning, match=says):
        found = operands(inside.apply, of_function, X)
    assert [lhs for _, lhs, _ in found] == [dtype]


def test_in_a_quantized_model_the_rules_of_qwix_decide_and_no_recipe():
    variables = Net().init(jax.random.key(0), X)
    model = quantized(jmpp.wrap(Net(), "mixed_bfloat16, r=fp8_current"), "int8", path="up")
    assert operands(model.apply, variables, X) == [("up", "int8", False), ("down", "bfloat16", False)]
