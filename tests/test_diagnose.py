"""`diagnose` against planted faults: the place, the kind, the trip; and what is no fault."""

import dataclasses
import inspect
import json
import math
import runpy
import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.trials import Mending, Tried
from jmp_policy.report import Diagnosis, diagnose

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16
FILE = __file__.rsplit("/", 1)[-1]
BIG = jnp.float32(300.0)
X = np.full((2, 8), 100.0, np.float32)


def line_of(mark):
    """The line of this file that ends in a comment `# mark: name`."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = [i for i, text in enumerate(lines, 1) if text.endswith(f"# mark: {mark}")]
    return f"{FILE}:{number}"


def line(found):
    return found.line.split(" ")[0]


def square(w):
    return w.astype(F16) ** 2  # mark: square


def to_float32(fn):
    """A loss of float32 from a function whose result is half."""

    def loss(w, *args):
        return fn(w, *args).astype(F32).sum()

    return loss


# A model of four layers, of which one overflows: 100 * 100 * 8 is more than 65504.


class LinenDeep(nn.Module):
    bad: int

    @nn.compact
    def __call__(self, x):
        for i in range(4):
            init = nn.initializers.constant(100.0 if i == self.bad else 0.125)
            x = nn.Dense(8, use_bias=False, name=f"layer_{i}", kernel_init=init)(x)  # mark: linen
        return x


class NnxDeep(nnx.Module):
    def __init__(self, bad):
        inits = [nnx.initializers.constant(100.0 if i == bad else 0.125) for i in range(4)]
        make = lambda init: nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))  # noqa: E731
        self.layers = nnx.List([make(init) for init in inits])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)  # mark: nnx
        return x


def of_linen(model, policy="mixed_float16", x=X, **kwargs):
    """A loss function and parameters of a Linen model."""
    model = model if policy is None else jmpp.wrap(model, policy)
    params = model.init(jax.random.key(0), x)["params"]
    return lambda params, x: model.apply({"params": params}, x, **kwargs).astype(F32).mean(), params


def of_nnx(model, policy="mixed_float16"):
    return lambda model, x: model(x).astype(F32).mean(), jmpp.wrap(model, policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "jitted", "bad"),
    [("linen", i % 2 == 0, i) for i in range(4)] + [("nnx", i % 2 == 1, i) for i in range(4)],
)
def test_overflow_in_layer_k_is_found_there(kind, jitted, bad):
    loss, params = of_linen(LinenDeep(bad)) if kind == "linen" else of_nnx(NnxDeep(bad))
    found = diagnose((jax.jit if kind == "linen" else nnx.jit)(loss) if jitted else loss, params, X)
    path = f"layer_{bad}" if kind == "linen" else f"layers/{bad}"
    assert (found.kind, found.backward, found.finite) == ("overflow", False, False)
    assert found.path == f"{'LinenDeep' if kind == 'linen' else 'NnxDeep'}/{path}"
    assert line(found) == line_of(kind)
    assert (found.operation, found.dtype, found.shape) == ("dot_general", "float16", (2, 8))
    assert not found.is_nan
    assert found.largest_in_float32 == 80000.0
    assert found.largest_before == 100.0
    kernel = f"params/{path}/kernel" if kind == "linen" else f"model/{path}/kernel"
    assert [o.name for o in found.operands] == ["x" if bad == 0 else "", kernel]
    assert [o.largest for o in found.operands] == [100.0, 100.0]
    # What follows has 80000 to hold as well, so that float32 for this layer alone is not enough.
    assert found.tried[0].rule == {path: "float32"}
    assert np.isfinite(found.tried[0].error) == (bad == 3)
    mends = f"The rule {{{path!r}: 'float32'}}" if bad == 3 else "compute=bfloat16,output=float32'"
    assert f"{mends} mends it" in found.advice
    assert found.error_after < 0.01
    assert {"the loss", "the scaled loss"} <= set(found.bad_results)


class Log(nn.Module):
    @nn.compact
    def __call__(self, z):
        return -jnp.log(1 - jax.nn.sigmoid(z) + 1e-7)


class LogOfProbability(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Log(name="bce")(30 * nn.Dense(1, name="out")(x))


@pytest.mark.slow
@pytest.mark.parametrize("report", [diagnose, jmpp.drift])
def test_the_rule_that_is_advised_was_tried_and_mends(report):
    model, x = LogOfProbability(), jax.random.normal(jax.random.key(0), (64, 8))
    params = model.init(jax.random.key(1), x)["params"]

    def loss_under(policy):
        wrapped = jmpp.wrap(model, policy)
        return lambda params: wrapped.apply({"params": params}, x).astype(F32).mean()

    found = report(loss_under("mixed_float16"), params)
    assert dict(found.rule) == {"bce": "float32"}
    assert isinstance(found.tried[-1], jmpp.report.Tried)
    assert "The rule {'bce': 'float32'} mends it" in str(found).replace("\n", " ")
    mended = loss_under(jmpp.PolicyMap("mixed_float16", found.rule))
    exact, got = (jax.jit(jax.grad(loss))(params) for loss in (loss_under("float32"), mended))
    off = jax.tree.map(lambda a, b: np.linalg.norm(a - b), got, exact)
    error = np.linalg.norm(jax.tree.leaves(off)) / np.linalg.norm(
        [np.linalg.norm(leaf) for leaf in jax.tree.leaves(exact)]
    )
    assert error == pytest.approx(found.error_after, rel=0.05)
    assert error < 0.01
    json.dumps(found.to_dict())
    assert not report(mended, params).tried


class NnxLog(nnx.Module):
    def __call__(self, z):
        return -jnp.log(1 - jax.nn.sigmoid(z) + 1e-7)


class NnxLogOfProbability(nnx.Module):
    def __init__(self):
        self.out, self.bce = nnx.Linear(8, 1, rngs=nnx.Rngs(0)), NnxLog()

    def __call__(self, x):
        with jax.named_scope("inside"):
            return self.bce(30 * self.out(x))


def scoped_log_of_probability(w, x):
    with jax.named_scope("inside"):
        z = 30 * (x @ w)
        with jax.named_scope("bce"):
            return -jnp.log(1 - jax.nn.sigmoid(z.astype(jnp.float16)) + 1e-7)


#: Name -> gives, for a policy, a loss and its parameters.
OTHER_KINDS = {
    "a wrapped NNX model": lambda policy: (
        lambda model, x: model(x).astype(F32).mean(),
        jmpp.wrap(NnxLogOfProbability(), policy),
    ),
    "autocast of an NNX model": lambda policy: (
        jmpp.nnx.autocast(lambda model, x: model(x).mean(), policy, full=["add"], lower=["logistic"]),
        NnxLogOfProbability(),
    ),
    "autocast of a Linen model": lambda policy: (
        jmpp.autocast(
            lambda params, x: LogOfProbability().apply(params, x).mean(), policy, lower=["logistic", "sub"]
        ),
        LogOfProbability().init(jax.random.key(1), jnp.ones((2, 8))),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_rules_are_tried_in_other_kinds_of_models(kind):
    x = jax.random.normal(jax.random.key(0), (64, 8))
    found = diagnose(*OTHER_KINDS[kind]("mixed_float16"), x)
    assert dict(found.rule) == {"bce": "float32"}, (found.advice, found.tried)
    mended, params = OTHER_KINDS[kind](jmpp.PolicyMap("mixed_float16", found.rule))
    assert diagnose(mended, params, x).finite
    assert found.error_after < 0.01


@pytest.mark.once
def test_a_rule_that_is_none_for_the_code_that_runs_is_not_tried():
    """Two parts under autocast of their own: a rule for one matches nothing in the other."""
    parts = {name: NnxDeep(None) for name in ("one", "two")}
    halves = [jmpp.nnx.autocast(lambda part, x: part(1e3 * x).mean(), "float16") for _ in parts]

    def loss(parts, x):
        return sum(half(part, x) for half, part in zip(halves, parts.values(), strict=True))

    found = diagnose(loss, parts, X)
    assert not found.finite
    assert dict(found.rule) in ({}, {"layers/0": "float32"})


@pytest.mark.once
def test_an_error_of_casts_that_the_model_writes_has_no_rule():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, name="a")(x)
            h = (1000 + h).astype(jnp.bfloat16).astype(F32) - 1000
            return nn.Dense(8, name="b")(h)

    model, x = jmpp.wrap(Net(), "mixed_bfloat16"), jax.random.normal(jax.random.key(1), (16, 8))
    params = model.init(jax.random.key(0), x)
    found = jmpp.drift(lambda params, x: jnp.square(model.apply(params, x)).mean(), params, x)
    assert found.error > 0.1
    assert found.advice == ""
    assert all(tried.error > 0.1 for tried in found.tried)


@pytest.mark.slow
def test_rules_are_tried_for_named_scopes_of_a_function():
    def loss(w, x):
        x = 1 + jnp.tanh(x @ w["c"]) @ w["c"].T
        with jax.named_scope("big"):
            h = 50 * ((100 * (x @ w["a"])) @ w["b"])
            h = h @ w["b"].T
        return jnp.square(h / 1e6).mean()

    w = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 8)), "c": 1e-3 * jnp.ones((8, 64))}
    found = diagnose(jmpp.autocast(loss, "float16"), w, jnp.ones((4, 8)))
    assert dict(found.rule) == {"big": "float32"}
    assert diagnose(jmpp.autocast(loss, found.policy), w, jnp.ones((4, 8))).finite

    # Where they leave nothing in half, bfloat16 does more.
    alone = {"a": w["a"], "b": w["b"], "c": jnp.zeros((8, 0))}
    found = diagnose(jmpp.autocast(loss, "float16"), alone, jnp.ones((4, 8)))
    assert [dict(tried.rule) for tried in found.tried] == [{}]
    assert found.tried[0].half_share == 1
    assert "The policy 'params=bfloat16,compute=bfloat16,output=bfloat16' mends it" in found.advice


class Overflowing(nn.Module):
    """A module with nearly all of the products, whose own code overflows."""

    @nn.compact
    def __call__(self, x):
        h = x
        for i in range(2):
            h = nn.relu(nn.Dense(64, name=f"layer_{i}")(h))
        return h + jnp.tanh(jnp.square(300 * nn.Dense(64, name="last")(x)) / 1e5)


class WithHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(Overflowing(name="encoder")(x))


@pytest.mark.slow
def test_without_products_the_first_rule_that_mends_ends_the_trials():
    class Square(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(jnp.square(300 * x * self.param("scale", nn.initializers.ones, (8,))) / 1e5)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Square(name="square")(x) + x

    model, x = jmpp.wrap(Net(), "mixed_float16"), jnp.ones((2, 8))
    params = model.init(jax.random.key(0), x)
    found = diagnose(lambda params: model.apply(params, x).mean(), params)
    assert [dict(tried.rule) for tried in found.tried] == [{"square": "float32"}]
    assert "The rule {'square': 'float32'} mends it" in found.advice


@pytest.mark.slow
@pytest.mark.parametrize("report", [diagnose, jmpp.drift])
@pytest.mark.parametrize("head", ["mixed_float16", "float32"])
def test_a_rule_that_leaves_little_in_half_is_advised_only_where_nothing_else_mends(report, head):
    x = jax.random.normal(jax.random.key(0), (64, 16))
    params = WithHead().init(jax.random.key(1), x)

    def loss_under(policy):
        model = jmpp.wrap(WithHead(), policy)
        return lambda params, x: jnp.square(model.apply(params, x).astype(F32)).mean()

    found = report(loss_under(jmpp.PolicyMap("mixed_float16", {"head": head})), params, x)
    assert all(dict(tried.rule) != {"encoder": "float32"} for tried in found.tried)
    assert found.error_after < 2e-3
    mended = loss_under(found.policy)
    assert jmpp.audit(mended, params, x, grad=True).half_share > 0.9
    assert diagnose(mended, params, x).finite


class RMS(nn.Module):
    """Normalises by a root whose derivative, about 1 / eps ** 1.5 of small inputs, float16 does not hold."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale


class Normed(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = nn.Dense(16, name=f"dense_{i}", kernel_init=nn.initializers.normal(3e-3))(x)
            x = nn.tanh(RMS(name=f"norm_{i}")(x))
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "rule"), [(1, {"norm_0": "float32"}), (2, {RMS: "float32"})])
def test_a_derivative_that_overflows_does_so_at_every_loss_scale(layers, rule):
    x = jax.random.normal(jax.random.key(0), (8, 16))
    model = jmpp.wrap(Normed(layers), "mixed_float16")
    params = model.init(jax.random.key(1), x)
    found = diagnose(lambda params, x: jnp.square(model.apply(params, x) - x).mean(), params, x)
    assert (found.kind, found.operation, found.backward) == ("overflow", "div", True)
    assert found.advice.startswith("A derivative exceeds 65504, whatever the loss scale. The rule {")
    assert dict(found.rule) == rule
    assert found.error_after < 0.02


class LooksUp(nn.Module):
    @nn.compact
    def __call__(self, table, x):
        y = nn.Dense(1, name="out")(x)[:, 0]
        place = (5118.9 + 0.01 * jnp.tanh(x[:, 0])).astype(y.dtype)
        return table.at[jnp.round(place).astype(jnp.int32)].get(mode="fill") * y


@pytest.mark.slow
def test_an_index_that_was_rounded_is_no_overflow():
    table, x = jnp.ones(5120), jax.random.normal(jax.random.key(0), (4, 16))
    params = LooksUp().init(jax.random.key(1), table, x)

    def under(policy):
        return lambda params, x: jmpp.wrap(LooksUp(), policy).apply(params, table, x).astype(F32).mean()

    found = diagnose(under("mixed_bfloat16"), params, x)
    assert (found.kind, found.operation) == ("rounding", "gather")
    assert [operand.largest for operand in found.operands] == [1.0, 5120.0]
    assert "a rounding error: an index is outside of its array; in float32 it is finite" in found.verdict
    assert found.advice.startswith(
        "Rounding made an index another one (bfloat16 has whole numbers up to 256,"
    )
    assert diagnose(under(found.policy), params, x).finite


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1, 1024])
def test_a_loss_scale_below_1_mends_a_gradient_that_overflows_at_1(scale):
    """A constant that is lost, and does no harm, is not what is to be mended."""
    x = jax.random.normal(jax.random.key(0), (64, 16))
    layers = [nn.Dense(32), lambda h: jnp.tanh(jnp.sqrt(jnp.square(h) + 1e-8) * jnp.sign(h)), nn.Dense(1)]
    model = jmpp.wrap(nn.Sequential(layers), "mixed_float16")
    params, targets = model.init(jax.random.key(1), x), 1e5 * (1 + jnp.square(x[:, :1]))

    def loss(params, x):
        return jnp.square(model.apply(params, x) - targets).mean()

    found = diagnose(loss, params, x, scale=scale)
    (tried,) = found.tried
    assert tried.is_own
    assert found.constants
    assert tried.loss_scale < 1
    assert found.error_after < 0.02
    assert found.policy == jmpp.PolicyMap("mixed_float16")
    mended = f"A loss scale of {tried.loss_scale:g} (`DynamicLossScale`) mends it: the gradient is "
    assert f"{mended}finite, and off by" in found.advice
    assert diagnose(loss, params, x, scale=tried.loss_scale).finite
    assert f"{mended}off by" in jmpp.drift(loss, params, x, scale=scale).verdict


@pytest.mark.slow
def test_an_activation_that_overflows_on_the_way_to_a_finite_loss_may_do_no_harm():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = 100 * nn.Dense(16)(x)
            return nn.Dense(1)(h / (1 + jnp.square(h).mean(-1, keepdims=True)))  # / inf in some rows

    x = jnp.geomspace(0.1, 10, 64)[:, None] * jax.random.normal(jax.random.key(0), (64, 16))
    model = jmpp.wrap(Net(), "mixed_float16")
    params = model.init(jax.random.key(1), x)
    found = diagnose(lambda params: jnp.square(model.apply(params, x) - 1e3).mean(), params, scale=2.0**16)
    assert (found.operation, found.backward) == ("square", False)
    assert "no loss scale can help" not in found.advice
    assert "A loss scale of" in found.advice


@pytest.mark.slow
@pytest.mark.parametrize("in_bfloat16", [1.3e-3, 3e-2])
def test_a_rule_that_leaves_little_in_half_gives_way_to_one_that_mends(in_bfloat16, monkeypatch):
    errors = {("encoder",): 5e-2, ("head",): 6e-2, ("encoder", "head"): 8e-4, (): in_bfloat16}
    shares = {("encoder",): 0.9, ("head",): 0.9, ("encoder", "head"): 0.01, (): 1.0}

    def tried(self, rule, policy, is_own):
        return Tried(rule, policy, errors[tuple(rule)], is_own=is_own)

    def half_share(self, policy):
        return shares[tuple(pattern for pattern, _ in policy.overrides if pattern in ("encoder", "head"))]

    model, x = jmpp.wrap(WithHead(), "mixed_float16"), jnp.ones((2, 16))
    params = model.init(jax.random.key(0), x)
    monkeypatch.setattr(Mending, "_tried", tried)
    monkeypatch.setattr(Mending, "_half_share", half_share)
    mending = Mending(
        as_function(lambda params: model.apply(params, x).mean(), (params,), {}, ""), 1.0, False
    )
    best = mending.best(["WithHead/encoder", "WithHead/head"], limit=1e-3)
    assert best in mending.tried
    if in_bfloat16 < 2e-2:
        assert (best.rule, best.half_share) == ({}, 1.0)
        assert all(len(tried.rule) < 2 for tried in mending.tried)
    else:
        assert (best.rule, best.half_share) == ({"encoder": "float32", "head": "float32"}, 0.01)
        assert best.price == ", with 1 % of the FLOPs in half"
        none = dataclasses.replace(best, half_share=0.0)
        assert none.price == ", with none of the FLOPs in half, which gains nothing over float32"


@pytest.mark.slow
def test_a_rule_that_leaves_much_of_what_was_in_half_before_ends_the_trials():
    rules = jmpp.PolicyMap("mixed_float16", {"encoder/layer_*": "float32"})
    model, x = jmpp.wrap(WithHead(), rules), jax.random.normal(jax.random.key(0), (64, 16))
    params = model.init(jax.random.key(1), x)
    found = diagnose(lambda params: jnp.square(model.apply(params, x).astype(F32)).mean(), params)
    assert [dict(tried.rule) for tried in found.tried] == [{"encoder": "float32"}]
    assert 0 < found.tried[0].half_share < 0.1


@pytest.mark.slow
def test_a_rule_is_tried_at_a_smaller_loss_scale_where_only_the_scaled_gradient_overflows():
    """As in the first steps of training, when the loss scale is 65,536 still."""

    class Energy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.square(300 * x) / 1e5

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, name="first")(x)
            return nn.Dense(8, name="last")(h + Energy(name="energy")(h))

    model, x = jmpp.wrap(Net(), "mixed_float16"), jax.random.normal(jax.random.key(0), (16, 8))
    params = model.init(jax.random.key(1), x)
    loss = lambda params: 100 * jnp.square(model.apply(params, x) - 1).mean()  # noqa: E731
    found = diagnose(loss, params, scale=jmpp.DynamicLossScale(2.0**16))
    assert dict(found.rule) == {"energy": "float32"}
    assert found.tried[-1].loss_scale < 2**16
    assert "at a loss scale of" in found.advice
    assert found.error_after < 0.01
    assert math.isnan(diagnose(loss, params, scale=16.0).tried[-1].loss_scale)


@pytest.mark.slow
def test_an_argument_that_overflows_is_named_and_no_mask():
    model = jmpp.wrap(nn.Dense(8), "mixed_float16")
    x = jnp.ones((2, 8)).at[0, 0].set(2e5)
    params = model.init(jax.random.key(0), x)
    found = diagnose(lambda params, batch: model.apply(params, batch["obs"]).mean(), params, {"obs": x})
    assert "The argument 'batch/obs' exceeds 65504 where it is cast to float16." in found.advice
    assert "mask" not in found.advice
    masked = diagnose(lambda params, batch: model.apply(params, batch["obs"]).mean(), params, {"obs": -x})
    assert "If it is a mask" in masked.advice


@pytest.mark.slow
def test_the_operation_that_made_most_zeros_is_named():
    def loss(w, x):
        h = x.astype(jnp.float16) * w.astype(jnp.float16)
        h = h - h.mean(-1, keepdims=True)
        return jnp.mean(h / jnp.sqrt(jnp.square(h).sum(-1, keepdims=True))).astype(F32)

    # One difference is zero in half precision, all squares are.
    x = jnp.array([[1.0, 2, 3, 4, 5, 3.0001]]) * 5e-5
    assert diagnose(loss, jnp.ones(6), x).zero.operation == "square"


class Decay(nn.Module):
    decay: float

    @nn.compact
    def __call__(self, x):
        return jax.lax.scan(lambda mean, row: (self.decay * mean + row, None), x[0], x)[0]


class Written(nn.Module):
    @nn.compact
    def __call__(self, x):
        return 0.9999 * x


class Decaying(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="out")(Decay(0.9999, name="decay")(nn.Dense(8, name="in")(x)))


class DecayingTwice(nn.Module):
    last: type = Written

    @nn.compact
    def __call__(self, x):
        x = Written(name="first")(nn.Dense(8, name="in")(x))
        return nn.Dense(8, name="out")(self.last(name="last")(nn.Dense(8, name="mid")(x)))


class OtherwiseWritten(Written):
    """Runs the same line."""


@pytest.mark.slow
@pytest.mark.parametrize("report", [diagnose, jmpp.drift])
def test_a_rule_that_keeps_constants_is_advised(report):
    loss, params = of_linen(Decaying())
    found = report(loss, params, X)
    assert [c.written for c in found.constants] == ["0.9999"]
    assert dict(found.rule) == {"decay": "float32"}
    assert "The rule {'decay': 'float32'} keeps these constants as they are written." in str(found).replace(
        "\n", " "
    )
    mended, _ = of_linen(Decaying(), jmpp.PolicyMap("mixed_float16", found.rule))
    assert not report(mended, params, X).constants
    # Of a whole step no rules are tried.
    assert not report(lambda params: [loss(params, X)], params).rule


@pytest.mark.slow
@pytest.mark.parametrize("report", [diagnose, jmpp.drift])
@pytest.mark.parametrize(
    ("last", "rule"),
    [(Written, {Written: "float32"}), (OtherwiseWritten, {"first": "float32", "last": "float32"})],
)
def test_the_rule_is_for_all_modules_that_run_the_line_of_a_constant(report, last, rule):
    loss, params = of_linen(DecayingTwice(last))
    found = report(loss, params, X)
    (constant,) = found.constants
    assert (constant.path, constant.others) == ("DecayingTwice/first", ("DecayingTwice/last",))
    assert ") and 1 more module" in " ".join(found.verdict.split())
    assert dict(found.rule) == rule
    mended, _ = of_linen(DecayingTwice(last), jmpp.PolicyMap("mixed_float16", found.rule))
    assert not report(mended, params, X).constants


@pytest.mark.slow
@pytest.mark.parametrize("report", [diagnose, jmpp.drift])
def test_a_rule_under_which_the_code_fails_keeps_no_constants(report):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = Written(name="decay")(nn.Dense(8, name="in")(x))
            assert h.dtype == jnp.float16
            return nn.Dense(8, name="out")(h)

    model = jmpp.wrap(Net(), "mixed_float16")
    params = model.init(jax.random.key(0), X)["params"]
    found = report(lambda params, x: model.apply({"params": params}, x).mean(), params, X)
    assert (len(found.constants), dict(found.rule)) == (1, {})


@pytest.mark.once
def test_what_lost_its_digits_on_devices_is_in_the_shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_device(w, x):
        h = (3000 + x * w).astype(jnp.float16).astype(F32)
        h = h - h.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-12)
        return jax.lax.pmean((h * scale * scale.astype(jnp.float16)).mean().astype(F32), "d")

    loss = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    found = diagnose(loss, jnp.ones(8), 0.05 * jax.random.normal(jax.random.key(0), (4, 8)))
    assert (found.kind, found.operation, found.lost_digits) == ("overflow", "shard_map", None)


@pytest.mark.once
def test_what_lost_its_digits_long_before_is_traced_to_where():
    """Of a large stream the norms see differences that float16 has rounded away; what adds it up is named."""

    class Stream(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(32, name="stem")(x) + 3000 * self.param("bias", nn.initializers.ones, (32,))
            for i in range(2):
                h = h + nn.Dense(32, name=f"block{i}")(nn.tanh(nn.LayerNorm(name=f"norm{i}")(h)))
            return nn.Dense(8, name="head")(h - 3000)

    found = diagnose(*of_linen(Stream(), x=jax.random.normal(jax.random.key(1), (64, 16))),
                     jax.random.normal(jax.random.key(0), (64, 16)))  # fmt: skip
    assert (found.lost_digits.path, found.lost_digits.operation) == ("Stream", "add")
    assert "Its digits were lost before, when the result of add in Stream (test_diag" in found.advice


def test_a_rule_that_matched_nothing_is_still_an_error_beside_a_trial():
    model, x = (
        jmpp.wrap(nn.Dense(8), jmpp.PolicyMap("mixed_float16", {"nowhere": "float32"})),
        jnp.ones((2, 8)),
    )
    params = nn.Dense(8).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="nowhere"):
        diagnose(lambda p: (1e6 * model.apply(p, x).astype(jnp.float16)).sum().astype(F32), params)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 3])
def test_a_rule_for_the_module_that_was_named_is_the_cure(bad):
    advised = jmpp.PolicyMap("mixed_float16", {f"layer_{bad}": "float32"})
    # What follows halves 80000 to 20000 by the float32 kernel of .25 only if it is in float32 as well.
    loss, params = of_linen(LinenDeep(bad), advised)
    assert diagnose(loss, params, X).path != f"LinenDeep/layer_{bad}"
    loss, params = of_linen(LinenDeep(bad), "mixed_bfloat16")
    assert diagnose(loss, params, X).finite


# Control flow. Each multiplies by 8 from 1, so that trip 5 makes 8**6 > 65504 of 32768.


def multiply(c, w):
    return c * w.astype(F16)  # mark: multiply


def scanned(w, reverse=False):
    xs = jnp.arange(8)
    return lax.scan(lambda c, _: (multiply(c, w), None), F16(1), xs, reverse=reverse)[0]


def stacked(w):
    """The overflow is in what a scan gives beside its carry, of one trip alone."""

    xs = jnp.where(jnp.arange(8) == 5, F16(32768), F16(1))
    return lax.scan(lambda c, x: (c, multiply(x, w)), F16(1), xs)[1]


def nested(w):
    def outer(c, _):
        return lax.scan(lambda c, _: (multiply(c, w), None), c, None, length=2)[0], None

    return lax.scan(outer, F16(1), None, length=4)[0]


def while_loop(w):
    fixed = lax.stop_gradient(w)

    def body(c):
        return c[0] + 1, multiply(c[1], fixed)

    return lax.while_loop(lambda c: c[0] < 8, body, (0, F16(1)))[1] * w.astype(F16)


def fori_loop(w):
    return lax.fori_loop(0, 8, lambda i, c: multiply(c, w), F16(1))


def branch_in_scan(w):
    def body(c, i):
        return lax.cond(i == 3, lambda c: multiply(c * F16(8) ** 5, w), lambda c: c, c), None

    return lax.scan(body, F16(1), jnp.arange(5))[0]


def jit_in_remat_in_scan(w):
    inner = jax.checkpoint(lambda c: jax.jit(multiply)(c, w))
    return lax.scan(lambda c, _: (inner(c), None), F16(1), None, length=8)[0]


def vmapped_scan(w):
    def one(start):
        return lax.scan(lambda c, _: (multiply(c, w), None), start, None, length=8)[0]

    return jax.vmap(one)(jnp.asarray([0, 1], F16))


@jax.custom_vjp
def with_rule(w):
    return square(w)


with_rule.defvjp(lambda w: (square(w), w), lambda w, ct: (w,))


@jax.custom_jvp
def with_jvp_rule(w):
    return square(w)


with_jvp_rule.defjvp(lambda primals, tangents: (square(*primals), tangents[0].astype(F16)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "trip"),
    [
        (scanned, 5),
        (lambda w: scanned(w, reverse=True), 5),
        (stacked, 5),
        (nested, 1),  # The second trip of the inner loop, in the third of the outer.
        (while_loop, 5),
        (fori_loop, 5),
        (branch_in_scan, 3),
        (jit_in_remat_in_scan, 5),
        (vmapped_scan, 5),
    ],
    ids=["scan", "reverse", "stacked", "nested", "while", "fori", "cond_in_scan", "jit_remat_scan", "vmap"],
)
def test_overflow_in_a_loop_is_found_on_its_trip(fn, trip):
    found = diagnose(to_float32(fn), jnp.float32(8.0))
    assert (found.kind, found.operation, found.trip) == ("overflow", "mul", trip)
    assert line(found) == line_of("multiply")
    assert not found.backward
    assert found.largest_in_float32 == 2.0**18
    assert max(o.largest for o in found.operands) == 32768.0
    assert f"trip {trip}" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [scanned, nested, while_loop, fori_loop])
def test_largest_before_counts_earlier_trips(fn):
    found = diagnose(to_float32(fn), jnp.float32(8.0))
    assert found.largest_before == 32768.0
    assert line_of("multiply") in found.largest_before_place


CALLS = {
    "plain": square,
    "jit": jax.jit(square),
    "jit_in_jit": jax.jit(lambda w: jax.jit(square)(w)),
    "cond": lambda w: lax.cond(w > 1, square, lambda w: w.astype(F16), w),
    "switch": lambda w: lax.switch(2, [lambda w: w.astype(F16), lambda w: -w.astype(F16), square], w),
    "remat": jax.checkpoint(square),
    "custom_vjp": with_rule,
    "custom_jvp": with_jvp_rule,
    "vmap": lambda w: jax.vmap(square)(jnp.stack([w, w])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_overflow_in_a_call_is_found_inside_it(name):
    found = diagnose(to_float32(CALLS[name]), BIG)
    assert (found.kind, found.operation, found.trip) == ("overflow", "integer_pow", None)
    assert line(found) == line_of("square")
    assert found.largest_in_float32 == 90000.0
    assert found.largest_before == 300.0
    assert found.operands[0].largest == 300.0


def test_the_branch_not_taken_is_no_fault():
    found = diagnose(to_float32(CALLS["cond"]), jnp.float32(-300.0))
    assert found.finite


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.constant(0.5)
        return nn.Dense(8, use_bias=False, kernel_init=init)(x), None  # mark: layer


class LinenScan(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=10)
        return stack(name="stack")(x, None)[0]


class NnxScan(nnx.Module):
    def __init__(self, remat=False):
        make = nnx.split_rngs(splits=10)(nnx.vmap(self.layer))
        self.layers, self.remat = make(nnx.Rngs(0)), remat

    @staticmethod
    def layer(rngs):
        init = nnx.initializers.constant(0.5)
        return nnx.Linear(8, 8, use_bias=False, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        def run(x, layer):
            return layer(x)  # mark: nnx_layer

        run = nnx.remat(run) if self.remat else run
        x = x.astype(self.layers.dtype)  # As the layers return it.
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "remat"), [("linen", True), ("nnx", False)])
def test_scanned_modules(kind, remat):
    loss, params = of_linen(LinenScan(remat)) if kind == "linen" else of_nnx(NnxScan(remat))
    found = diagnose(loss, params, X)
    # 100 * 4**4 is 25600, and the fifth layer is too much.
    assert (found.kind, found.operation, found.trip) == ("overflow", "dot_general", 4)
    assert found.path == {"linen": "LinenScan/stack/Dense_0", "nnx": "NnxScan/layers"}[kind]
    assert line(found) == line_of({"linen": "layer", "nnx": "nnx_layer"}[kind])
    assert found.largest_before == 25600.0
    assert [o.largest for o in found.operands] == [25600.0, 0.5]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        ones, half = nn.initializers.ones, nn.initializers.constant(0.5)
        cell = nn.SimpleCell(8, activation_fn=lambda x: x * 20, kernel_init=ones, recurrent_kernel_init=half)
        return nn.RNN(cell, name="rnn")(x)


@pytest.mark.slow
def test_recurrent_layers():
    x = np.full((2, 6, 8), 3 / 8, np.float32)
    loss, params = of_linen(Recurrent(), x=x)
    found = diagnose(loss, params, x)
    assert (found.kind, found.operation, found.trip) == ("overflow", "mul", 2)
    assert "SimpleCell_0" in found.path
    assert found.largest_in_float32 == pytest.approx(388860)


MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def over_devices(w, x):
    def local(w, x):
        return lax.pmean(square(x * w).astype(F32).mean(), "d")

    return jax.shard_map(local, mesh=MESH, in_specs=(P(), P("d")), out_specs=P())(w, x)  # mark: shard_map


@pytest.mark.once
@pytest.mark.parametrize("jitted", [False, True])
def test_shard_map(jitted):
    loss = jax.jit(over_devices) if jitted else over_devices
    x = jnp.ones(8)
    assert jitted or diagnose(loss, jnp.float32(1.0), x).finite
    # On one device of eight alone.
    found = diagnose(loss, BIG, x.at[1:].set(0.0))
    assert (found.kind, found.operation, found.shape) == ("overflow", "shard_map", ())
    assert line(found) == line_of("shard_map")
    assert found.largest_in_float32 == 90000.0 / 8
    assert "in float32 it is finite, at most 1.125e+04" in found.verdict
    inside = f"In shard_map, {line_of('shard_map')}"
    assert found.advice == f"{inside}: diagnose the function inside on one device's arrays."
    # In a loop, after trips that are finite.
    found = diagnose(
        lambda w, x: lax.scan(lambda w, _: (loss(w, x), None), w, None, length=3)[0], jnp.float32(16.0), x
    )
    assert (found.kind, found.operation, found.trip) == ("overflow", "shard_map", 1)
    assert found.advice.startswith("In shard_map, ")


# Backward.


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in ("body", "head"):
            x = nn.Dense(8, use_bias=False, name=name, kernel_init=nn.initializers.constant(0.5))(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("power", "finite"), [(0, True), (8, True), (15, True), (20, False), (24, False)])
def test_overflow_by_the_loss_scale_is_in_the_backward_pass(power, finite):
    loss, params = of_linen(Net())
    found = diagnose(loss, params, X / 100, scale=2.0**power)
    assert found.finite == finite
    assert found.loss == 16.0
    assert found.loss_scale == 2.0**power
    if finite:
        assert (found.kind, found.advice, found.bad_results) == ("", "", ())
        return
    assert (found.kind, found.backward, found.is_nan) == ("overflow", True, False)
    assert found.path.startswith("Net")
    assert found.largest_in_float32 == 2.0**power / 16
    assert set(found.bad_results) == {"params/body/kernel", "params/head/kernel"}
    assert f"at a loss scale of {2.0**power:g}" in found.advice
    assert "DynamicLossScale" in found.advice
    assert found.largest_before == 16.0


def scaled_state(scale):
    return jmpp.loss_scaled(optax.sgd(0.1), scale).init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "scale",
    [
        2.0**20,
        jnp.float32(2.0**20),
        np.float32(2.0**20),
        jmpp.StaticLossScale(2.0**20),
        scaled_state(jmpp.DynamicLossScale(2.0**20)),
        (optax.EmptyState(), scaled_state(jmpp.StaticLossScale(2.0**20))),
    ],
    ids=["float", "jax", "numpy", "loss_scale", "state", "nested_state"],
)
def test_scale_may_be_many_things(scale):
    loss, params = of_linen(Net())
    assert diagnose(loss, params, X / 100, scale=scale).loss_scale == 2.0**20


def test_overflow_in_a_layer_of_the_backward_pass():
    """The gradient grows from layer to layer: it overflows where it is too large, and not before."""

    def loss(w, x):
        with jax.named_scope("first"):
            x = x * w.astype(F16)  # mark: first
        with jax.named_scope("second"):
            x = x * F16(2.0**10)  # mark: second
        with jax.named_scope("third"):
            x = x * F16(2.0**-10)
        return x.astype(F32)

    assert diagnose(loss, jnp.float32(1.0), F16(1.0), scale=2.0**15).finite
    found = diagnose(loss, jnp.float32(1.0), F16(1.0), scale=2.0**16)
    # The seed, 2**16, is no float16 number.
    assert (found.operation, found.backward) == ("convert_element_type", True)

    def grows(w, x):
        with jax.named_scope("inner"):
            x = x * w.astype(F16)
        with jax.named_scope("outer"):
            x = x * F16(2.0**10)  # mark: grows
        return (x.astype(F32) * 2.0**-20).sum()

    found = diagnose(grows, jnp.float32(2.0**-10), F16(1.0), scale=2.0**30)
    assert (found.kind, found.path, found.operation) == ("overflow", "outer", "mul")
    assert found.backward
    assert line(found) == line_of("grows")
    assert found.largest_in_float32 == 2.0**20


def test_overflow_in_the_backward_rule_of_a_custom_vjp():
    @jax.custom_vjp
    def fn(w):
        return w

    def backward(w, ct):
        return (((ct * w).astype(F16) * F16(300.0)).astype(F32),)

    fn.defvjp(lambda w: (w, w), backward)
    # JAX knows of the rule's operations where it was called.
    found = diagnose(lambda w: fn(w), BIG)  # mark: rule
    assert (found.kind, found.backward, found.bad_results) == ("overflow", True, ("w",))
    assert line(found) == line_of("rule")
    assert found.largest_in_float32 == 90000.0


@pytest.mark.slow
def test_overflow_in_the_backward_pass_of_a_scanned_model():
    loss, params = of_nnx(NnxScan())
    found = diagnose(loss, params, X / 1e4, scale=2.0**12)
    assert (found.kind, found.backward, found.path) == ("overflow", True, "NnxScan/layers")
    assert isinstance(found.trip, int)
    assert found.bad_results == ("model/layers/kernel",)


# Real NaNs: float32 has them too.

MASK = jnp.asarray([[True, False], [True, True]])
FULL_ROW = jnp.asarray([[False, False], [True, True]])
VALUES = jnp.arange(4.0).reshape(2, 2)


def softmax(w, mask):
    return jax.nn.softmax(jnp.where(mask, w.astype(F16), -jnp.inf))  # mark: softmax


def softmax_by_hand(w, mask):
    scores = jnp.where(mask, w.astype(F16), -jnp.inf)
    scores = jnp.exp(scores - scores.max(-1, keepdims=True))  # mark: by_hand
    return scores / scores.sum(-1, keepdims=True)


def weighted(attention, *args):
    return jnp.vdot(attention(*args).astype(F32), VALUES)


def zero_by_zero(w):
    return ((w - w) / (w - w)).sum()  # mark: 0/0


def one_by_zero(w):
    return (w.astype(F16) / (w - 1).astype(F16)).astype(F32).sum()  # mark: 1/0


def log_of_negative(w):
    return jnp.log(w - 2).sum()  # mark: log


def log_of_zero(w):
    return jnp.log((w - 1).astype(F16)).astype(F32).sum()  # mark: log0


def sqrt_of_negative(w):
    return jnp.sqrt(w - 2).sum()  # mark: sqrt


def sqrt_at_zero(w):
    return jnp.sqrt(w - 1).sum()  # mark: sqrt0


def guarded_too_late(w):
    return jnp.where(w > 1, jnp.sqrt(w - 1), 0.0).sum()  # mark: where


def guarded(w):
    return jnp.where(w > 1, jnp.sqrt(jnp.where(w > 1, w - 1, 1.0)), 0.0).sum()


def exp_of_much(w):
    return jnp.exp(w * 1000).sum()  # mark: exp


def beyond_bfloat16(w):
    return (w.astype(BF16) * BF16(3e38) * BF16(10)).astype(F32).sum()  # mark: bfloat16


def rows(mask, attention):
    return lambda w: weighted(attention, jnp.stack([w, w]), mask)


@dataclasses.dataclass(frozen=True)
class Fault:
    loss: Callable[..., Any]
    mark: str
    operation: str
    backward: bool
    is_nan: bool
    advice: str


FAULTS = [
    Fault(zero_by_zero, "0/0", "div", False, True, "A division by zero"),
    Fault(one_by_zero, "1/0", "div", False, False, "A division by zero"),
    Fault(log_of_negative, "log", "log", False, True, "A logarithm of zero or of a negative"),
    Fault(log_of_zero, "log0", "log", False, False, "A logarithm of zero or of a negative"),
    Fault(sqrt_of_negative, "sqrt", "sqrt", False, True, "A square root of a negative"),
    Fault(sqrt_at_zero, "sqrt0", "div", True, False, "A division by zero"),
    Fault(guarded_too_late, "where", "div", True, False, "A division by zero"),
    Fault(exp_of_much, "exp", "exp", False, False, "An exponential beyond float32"),
    Fault(beyond_bfloat16, "bfloat16", "mul", False, False, "a product beyond float32"),
    Fault(rows(FULL_ROW, softmax), "softmax", "sub", False, True, "a row of a mask that is all -inf"),
    Fault(rows(FULL_ROW, softmax_by_hand), "by_hand", "sub", False, True, "a row of a mask that is all -inf"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.mark)
def test_what_float32_would_not_have_either(fault):
    found = diagnose(fault.loss, jnp.ones(2))
    assert (found.kind, found.operation) == ("not finite", fault.operation)
    assert line(found) == line_of(fault.mark)
    assert (found.backward, found.is_nan) == (fault.backward, fault.is_nan)
    assert math.isnan(found.largest_in_float32)
    assert fault.advice in found.advice
    assert "not finite in float32 either" in found.verdict


def test_bfloat16_is_named_a_true_overflow_only_where_float32_is_one_too():
    found = diagnose(lambda w: (w.astype(BF16) * 10).astype(F32), jnp.float32(3e38))
    assert (found.kind, found.dtype) == ("not finite", "bfloat16")
    # 3.4e38 is a float32 number; bfloat16's largest is 3.39e38, to which it does not round.
    found = diagnose(lambda w: w.astype(BF16).astype(F32), jnp.float32(3.4e38))
    assert (found.kind, found.dtype) == ("overflow", "bfloat16")
    assert found.largest_in_float32 == pytest.approx(3.4e38)
    assert "the range of bfloat16" in found.advice


NO_FAULTS = {
    "softmax": rows(MASK, softmax),
    "softmax_by_hand": rows(MASK, softmax_by_hand),
    "logsumexp": lambda w: jax.nn.logsumexp(jnp.where(MASK, w, -jnp.inf), axis=-1).sum(),
    "max_pool": lambda w: nn.max_pool(jnp.ones((1, 4, 1)) * w[0], (2,), (2,)).sum(),
    "max": lambda w: jnp.max(w, initial=-jnp.inf),
    "min_of_masked": lambda w: jnp.min(jnp.where(w > 5, 0.0, jnp.inf), initial=3.0) * w.sum(),
    "guarded": guarded,
    "infinity_as_an_integer": lambda w: w.sum() + jnp.isinf(w / 0).sum(),
    "nan_to_num": lambda w: w.sum() + lax.stop_gradient(jnp.nan_to_num(jnp.full(2, jnp.nan) * 0)).sum(),
    "one_hundred_layers": lambda w: lax.fori_loop(0, 100, lambda i, c: jnp.tanh(c * w), w).sum(),
    "no_gradient": lambda w: jnp.float32(1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NO_FAULTS)
def test_what_is_no_fault(name):
    found = diagnose(NO_FAULTS[name], jnp.ones(2))
    assert found.finite
    assert found.verdict.endswith("and all gradients are finite.")
    assert str(found) == found.verdict
    assert dataclasses.replace(found, function="", loss=0.0) == Diagnosis("", True, 0.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [softmax, softmax_by_hand])
def test_an_overflow_is_found_behind_a_masks_infinities(attention):
    def loss(w):
        return weighted(attention, w, MASK) + square(w).astype(F32).sum()

    found = diagnose(loss, jnp.full((2, 2), 300.0))
    assert (found.kind, line(found)) == ("overflow", line_of("square"))


# Numbers that vanish.


def norm_of_squares(w):
    return lax.rsqrt(jnp.square(w.astype(F16)).mean() + 1e-8).astype(F32)  # mark: rsqrt


def ratio(w):
    w = w.astype(F16)
    return (w / (jnp.abs(w) + 1e-8)).astype(F32).sum()  # mark: ratio


def normalised(w):
    w = w.astype(F16)
    return (w / jnp.sqrt(jnp.var(w) + 1e-8)).astype(F32).sum()  # mark: normalised


def log_of_small(w):
    return jnp.log(jnp.square(w.astype(F16))).astype(F32).sum()  # mark: small


def log_with_epsilon(w):
    return jnp.log(w.astype(F16) + 1e-9).astype(F32).sum()  # mark: log_epsilon


def with_a_maximum(w):
    return lax.rsqrt(jnp.maximum(jnp.square(w.astype(F16)), 1e-9)).astype(F32).sum()  # mark: maximum


def with_a_choice(w):
    w = w.astype(F16)
    return (1 / jnp.where(w > 0, w, 1e-9)).astype(F32).sum()  # mark: choice


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "w", "mark", "operation"),
    [
        (norm_of_squares, 1e-5, "rsqrt", "rsqrt"),
        (norm_of_squares, 0.0, "rsqrt", "rsqrt"),
        (ratio, 0.0, "ratio", "div"),
        (normalised, 0.0, "normalised", "div"),
        (log_of_small, 1e-5, "small", "log"),
        (log_with_epsilon, 0.0, "log_epsilon", "log"),
        (with_a_maximum, 0.0, "maximum", "rsqrt"),
        (with_a_choice, 0.0, "choice", "div"),
    ],
)
def test_an_epsilon_or_an_argument_that_became_zero(loss, w, mark, operation):
    found = diagnose(loss, jnp.full(3, w))
    assert (found.kind, found.operation, found.dtype) == ("underflow", operation, "float16")
    assert line(found) == line_of(mark)
    assert "enlarge the epsilon that guards it to 1e-4" in found.advice
    assert "an underflow" in found.verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    "guarded",
    [
        lambda h: 1 / jnp.where(h >= 0, h, 1e-9),
        lambda h: h * 1e-9 / (h * 1e-9),
        lambda h: jnp.maximum(h, 1e-9) + 1 / jnp.maximum(h, 0),
    ],
)
def test_a_zero_that_no_constant_guards_is_one_in_any_precision(guarded):
    found = diagnose(lambda w: guarded(w.astype(F16)).astype(F32).sum(), jnp.zeros(3))
    assert found.kind == "not finite"
    assert "in any precision" in found.verdict + found.advice


@pytest.mark.slow
@pytest.mark.parametrize("loss", [ratio, normalised, log_with_epsilon])
def test_in_float32_the_same_epsilon_does(loss):
    single = diagnose(lambda w: loss(w), jnp.full(3, 0.5))
    assert single.kind in ("", "underflow")
    assert diagnose(replay_in_float32(lambda w: ratio(w)), jnp.full(3, 0.5)).finite


class SoftmaxNet(nn.Module):
    """A classifier that returns probabilities, as examples of older libraries do."""

    @nn.compact
    def __call__(self, x):
        return nn.softmax(15 * nn.Dense(10, name="head")(x))  # mark: softmax_net


def log_loss(policy):
    x = jax.random.normal(jax.random.key(0), (32, 16))
    params = SoftmaxNet().init(jax.random.key(0), x)["params"]
    model = jmpp.wrap(SoftmaxNet(), policy)
    rows = jnp.arange(32)
    return lambda p, x: -jnp.log(model.apply({"params": p}, x)[rows, rows % 10]).mean(), params, x


@pytest.mark.once
def test_an_underflow_is_named_where_the_value_became_zero_and_not_where_its_logarithm_is_taken():
    found = diagnose(*log_loss("mixed_float16"))
    assert (found.kind, found.operation, found.dtype) == ("underflow", "log", "float32")
    assert (found.zero.operation, found.zero.path, found.zero.dtype) == ("exp", "SoftmaxNet", "float16")
    assert found.zero.line.split(" ")[0] == line_of("softmax_net")
    assert "became zero in float16. The policy PolicyMap(" in found.advice
    assert "log_softmax" in found.advice
    assert found.error_after < 0.01
    assert diagnose(*log_loss(found.tried[-1].policy)).finite
    assert found.zero.place in found.verdict


def probabilities(w):
    small = jnp.exp(-30 * w).astype(F16)  # mark: cast_to_zero
    return jnp.log(jnp.stack([small, small]).astype(F32)).sum()


def test_an_underflow_in_a_cast():
    found = diagnose(probabilities, jnp.ones(2))
    assert (found.kind, found.zero.operation) == ("underflow", "convert_element_type")
    assert found.zero.line.split(" ")[0] == line_of("cast_to_zero")


# Constants that half precision makes infinite or zero.

NONE_LEFT = jnp.asarray([[True, False], [False, False]])


def attend(fill):
    def loss(w):
        scores = fill(w.astype(F16))
        return jnp.vdot(jax.nn.softmax(scores).astype(F32), VALUES)

    return loss


MASKS = {
    "where": lambda s: jnp.where(NONE_LEFT, s, -1e9),
    "product": lambda s: s + (1 - NONE_LEFT.astype(F16)) * -1e9,
    "cast": lambda s: s + jnp.where(NONE_LEFT, 0, -1e9).astype(F16),
    "cast constant": lambda s: s + jnp.float32(-1e9).astype(F16),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_a_masks_number_that_half_makes_infinite_is_an_overflow(name):
    found = diagnose(attend(MASKS[name]), jnp.ones((2, 2)))
    assert (found.kind, found.constant.becomes) == ("overflow", "-inf")
    assert float(found.constant.written.removeprefix("*").removeprefix("+")) == -1e9
    if name == "product":
        assert [operand.infinite for operand in found.operands] == [False, True]
        assert " 0 and inf" in str(found)
    assert "not finite in float32 either" not in found.verdict
    assert "jnp.finfo(x.dtype).min / 2" in found.advice


HALF_FILLS = {
    "full_like": lambda s: jnp.full_like(s, -1e9),
    "array": lambda s: jnp.array(-1e9, s.dtype),
    "full": lambda s: jnp.full(s.shape, -1e9, s.dtype),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF_FILLS)
def test_a_masks_number_that_is_made_in_the_dtype_of_the_scores_is_an_overflow(name):
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            q, k = nn.Dense(8)(x), nn.Dense(8)(x)
            scores = q @ k.T
            fill = HALF_FILLS[name](scores)
            return nn.softmax(jnp.where(jnp.arange(4)[:, None] > 0, scores, fill)) @ nn.Dense(8)(x)

    x = jax.random.normal(jax.random.key(0), (4, 16))
    model = jmpp.wrap(Attention(), "mixed_float16")
    params = Attention().init(jax.random.key(1), x)

    def loss(params):
        return jnp.square(model.apply(params, x)).mean()

    found = diagnose(loss, params)
    assert (found.kind, found.constant.written, found.constant.becomes) == ("overflow", "-1e+09", "-inf")
    assert found.policy is not None
    assert found.error_after < 0.01
    seen = jmpp.drift(loss, params)
    assert seen.policy == found.policy
    assert "in both" not in seen.verdict
    assert [constant.written for constant in jmpp.audit(loss, params).constants] == ["-1e+09"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fill",
    [
        lambda s, least: jnp.where(NONE_LEFT, s, least),
        lambda s, least: s + (1 - NONE_LEFT.astype(F16)) * least,
        lambda s, least: s + jnp.where(NONE_LEFT, 0, least).astype(F16),
        lambda s, least: s + jnp.float32(least).astype(F16),
    ],
)
def test_the_number_that_is_advised_for_masks_keeps_them_finite(fill):
    """Also where scores below -16 are added to it, in a row without any that counts."""
    scores = jnp.full((2, 2), -100.0)
    found = diagnose(attend(lambda s: fill(s, jnp.finfo(s.dtype).min / 2)), scores)
    assert (found.finite, found.constants) == (True, ())
    assert not diagnose(attend(lambda s: fill(s, -1e9)), scores).finite


@pytest.mark.slow
def test_an_infinite_mask_is_the_models_own():
    found = diagnose(attend(lambda s: jnp.where(NONE_LEFT, s, -jnp.inf)), jnp.ones((2, 2)))
    assert (found.kind, found.constants) == ("not finite", ())
    mask = jnp.asarray([[0, -jnp.inf], [-jnp.inf] * 2], F16)
    assert diagnose(attend(lambda s: s + mask), jnp.ones((2, 2))).kind == "not finite"
    found = diagnose(lambda w, mask: attend(lambda s: s + mask)(w), jnp.ones((2, 2)), mask)
    assert (found.kind, found.path) == ("argument", "mask")
    assert "finite before its cast to float16" in found.advice


def test_a_divisor_that_half_makes_zero_is_an_underflow(tmp_path):
    file = tmp_path / "written.py"  # With other statements on the line.
    file.write_text(
        "def loss(w, F16, F32):\n    a = w.astype(F16); b = a / 1e-8; return b.astype(F32).sum()\n"
    )
    loss = runpy.run_path(str(file))["loss"]
    found = diagnose(lambda w: loss(w, F16, F32), jnp.ones(2))
    assert (found.kind, found.operation, found.constant.written) == ("underflow", "div", "/ 1e-08")
    assert "an underflow: '/ 1e-08' is 0 in float16, in written.py:2" in found.verdict
    assert "Write constants that half precision holds" in found.advice
    # One that is zero in float32 too is no constant that was lost.
    found = diagnose(lambda w: (w.astype(F16) / 0.0).astype(F32).sum(), jnp.ones(2))
    assert (found.kind, found.constant) == ("not finite", None)


@pytest.mark.slow
@pytest.mark.parametrize(("divisor", "is_lost"), [("1e-6", True), ("d", True), ("2e-5", False)])
def test_a_divisor_whose_reciprocal_is_infinite_in_half(divisor, is_lost, tmp_path):
    """XLA multiplies by the reciprocal of a constant."""
    file, d = tmp_path / "huber.py", 1e-6
    file.write_text(
        f"def loss(h, d, where):\n    return where(abs(h) < {divisor}, h**2 / {divisor}, abs(h)).sum()\n"
    )
    huber = runpy.run_path(str(file))["loss"]

    def loss(w):
        return huber(w.astype(F16) * jnp.linspace(-1, 1, 8).astype(F16), d, jnp.where).astype(F32)

    found, compared = diagnose(loss, jnp.float32(0.7)), jmpp.drift(loss, jnp.float32(0.7))
    assert found.finite == np.isfinite(jax.jit(jax.grad(loss))(0.7)) == compared.is_normal != is_lost
    if is_lost:
        written = "1 / 1.01e-06" if divisor == "d" else "1 / 1e-06"
        assert (found.kind, found.constant.becomes, found.constant.written) == ("overflow", "inf", written)
        assert "divisors from 1.6e-5 on" in found.advice
        assert found.constant.text in compared.verdict
    else:
        assert not found.constants


@pytest.mark.slow
def test_a_loss_that_is_nan_only_when_compiled_is_no_matter_of_its_scale():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, h):
            z = h + 30
            mean = z.mean(-1, keepdims=True)
            return nn.Dense(32)((z - mean) / jnp.sqrt((z**2).mean(-1, keepdims=True) - mean**2 + 1e-3))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(Norm(name="norm")(nn.gelu(nn.Dense(32)(x))))

    x = jax.random.normal(jax.random.key(0), (16, 32))
    model = jmpp.wrap(Net(), "mixed_float16")
    params = model.init(jax.random.key(1), x)

    def loss(params, x):
        return jnp.square(model.apply(params, x) - x[:, :8]).mean()

    if np.isfinite(jax.jit(loss)(params, x)):
        pytest.skip("this processor rounds in compiled programs as it does operation by operation")
    found = diagnose(loss, params, x, scale=1024.0)
    assert (found.path, dict(found.rule)) == ("Net/norm", {"norm": "float32"})
    assert "DynamicLossScale" not in found.advice


def test_a_function_that_prints_and_returns_nothing():
    found = diagnose(lambda x: jax.debug.print("{}", x), jnp.ones(2))
    assert found.finite


def test_a_finite_loss_says_which_constants_were_lost():
    def mse(w, x):
        return (jnp.square(x.astype(F16) * w.astype(F16)).sum() / 100000).astype(F32)  # mark: mean

    found = diagnose(mse, jnp.ones(2), jnp.ones(2))
    assert found.finite
    assert found.verdict.endswith(f"; but '/ 100000' is inf in float16, in {line_of('mean')}.")
    assert "Write constants that half precision holds" in str(found)


# Whole training steps, and other functions without a loss.


def step_of(tx):
    @jax.jit
    def train_step(state, batch):
        params, opt_state = state

        def loss(params):
            return (params["w"] * batch.astype(F16)).sum().astype(F32)  # mark: step_loss

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)  # mark: step_update
        return (optax.apply_updates(params, updates), opt_state), value

    return train_step


def half_state(tx, dtype=F16):
    params = {"w": jnp.ones(3, dtype), "unused": jnp.ones(2, dtype)}
    return params, tx.init(params)


@pytest.mark.slow
def test_a_nan_of_the_optimizer_is_named_with_its_line_and_repair():
    tx = optax.adam(1e-3)
    found = diagnose(step_of(tx), half_state(tx), jnp.ones(3))
    assert (found.kind, found.operation, found.is_nan) == ("underflow", "div", True)
    assert line(found) == line_of("step_update")
    assert found.bad_results == ("result/0/0/unused",)
    assert found.zero.operation == "add"
    assert "master_weights" in found.advice
    assert "eps" in found.advice
    assert math.isnan(found.loss)
    repaired = optax.adam(1e-3, eps=1e-4)
    found = diagnose(step_of(repaired), half_state(repaired), jnp.ones(3))
    assert found.verdict.startswith("train_step: all results are finite. If it is a loss that returns more")
    masters = jmpp.master_weights(tx)
    assert diagnose(step_of(masters), half_state(masters), jnp.ones(3)).finite


@pytest.mark.slow
def test_squares_of_gradients_that_become_zero_in_the_optimizer():
    tx = optax.adam(1e-3)
    params = {"w": jnp.ones(3, F16)}
    found = diagnose(step_of(tx), (params, tx.init(params)), jnp.full(3, 1e-4))
    assert (found.kind, found.is_nan, found.operation) == ("underflow", False, "div")
    assert found.zero.operation != "add"
    assert "master_weights" in found.advice


def test_a_step_is_diagnosed_in_its_forward_pass_and_in_its_arguments_too():
    tx = optax.adam(1e-3)
    found = diagnose(step_of(tx), half_state(tx, F32), jnp.full(3, 1e9))
    assert (found.kind, line(found)) == ("overflow", line_of("step_loss"))
    assert "result/1" in found.bad_results
    found = diagnose(step_of(tx), half_state(tx, F32), jnp.full(3, jnp.nan))
    assert (found.kind, found.path) == ("argument", "batch")


def test_what_a_step_passes_on_is_no_fault():
    def step(state, x):
        return {"best": state["best"], "w": square(state["w"]) * x}

    state = {"best": jnp.float32(np.inf), "w": BIG}
    found = diagnose(step, state, F16(1))
    assert (found.kind, found.operation) == ("overflow", "integer_pow")
    assert diagnose(step, {**state, "w": jnp.float32(1)}, F16(1)).path == "state/best"


def test_a_step_of_nnx_modules():
    model = NnxDeep(2)
    found = diagnose(lambda model, x: {"logits": model(x), "n": 3}, jmpp.wrap(model, "mixed_float16"), X)
    assert (found.kind, found.path) == ("overflow", "NnxDeep/layers/2")


def test_the_loss_scale_of_a_step_is_that_in_its_state():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(8.0))
    params = jnp.ones(2)
    found = diagnose(lambda state, x: (state, x / (x - x)), (params, tx.init(params)), jnp.ones(2))
    assert (found.loss_scale, found.operation) == (8.0, "div")


# Arguments that were not finite to begin with.


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", ["params", "batch"])
def test_what_is_not_finite_to_begin_with(place, value):
    params, batch = {"layer": {"kernel": jnp.ones((2, 2))}}, {"image": jnp.ones(2)}
    if place == "params":
        params["layer"]["kernel"] = params["layer"]["kernel"].at[0, 1].set(value)
    else:
        batch["image"] = batch["image"].at[1].set(value)

    def loss(params, batch):
        return (params["layer"]["kernel"] @ batch["image"]).sum()

    found = diagnose(loss, params, batch)
    assert found.kind == "argument"
    assert found.path == {"params": "params/layer/kernel", "batch": "batch/image"}[place]
    assert found.is_nan == np.isnan(value)
    assert (found.dtype, found.shape) == ("float32", (2, 2) if place == "params" else (2,))
    assert {"params": "last good checkpoint", "batch": "Clean the data"}[place] in found.advice
    assert found.verdict.startswith(f"{found.path} is not finite to begin with")


class FirstOverflows(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        ones = nnx.initializers.ones
        self.first = nnx.Linear(8, 8, kernel_init=ones, rngs=rngs)
        self.last = nnx.Linear(8, 1, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.last(self.first(x * 3e4))


@pytest.mark.slow
def test_rules_are_tried_on_nnx_models_that_keep_the_dtypes_of_their_layers():
    model = jmpp.wrap(FirstOverflows(), jmpp.PolicyMap("mixed_float16", keep_module_dtypes=True))
    found = diagnose(lambda model: model(jnp.ones((2, 8))).mean(), model)
    # Float32 for the first would leave nothing in half.
    assert all(tried.rule != {"first": "float32"} for tried in found.tried)
    assert found.policy.default.compute_dtype == jnp.bfloat16
    assert found.policy.keep_module_dtypes
    assert (model.first.dtype, model.last.dtype) == (jnp.float16, jnp.float32)


def test_a_policy_that_keeps_dtypes_is_written_so():
    whole = jmpp.report.Tried({}, jmpp.PolicyMap("mixed_bfloat16", keep_module_dtypes=True), 0.0)
    assert "keep_module_dtypes=True" in whole.text


def test_what_is_not_finite_in_an_nnx_model():
    loss, model = of_nnx(NnxDeep(-1))
    kernel = model.layers[2].kernel
    kernel[...] = kernel[...].at[0, 0].set(jnp.nan)
    found = diagnose(loss, model, X)
    assert (found.kind, found.path) == ("argument", "model/layers/2/kernel")


def test_an_argument_that_does_not_reach_the_loss_is_no_fault():
    def loss(w, batch):
        return jnp.where(jnp.isnan(batch), 0.0, w).sum()

    assert diagnose(loss, jnp.ones(2), jnp.asarray([jnp.nan, 1.0])).finite


def test_keyword_arguments_and_static_ones():
    def loss(w, *, batch, power, name="x"):
        return (w * batch).sum() ** power

    found = diagnose(loss, jnp.ones(2), batch=jnp.asarray([1.0, np.inf]), power=2, name="y")
    assert (found.kind, found.path) == ("argument", "batch")
    assert diagnose(loss, jnp.ones(2), batch=jnp.ones(2), power=2).loss == 4.0


def test_a_constant_of_the_program():
    found = diagnose(lambda w: w * np.float32(np.inf), jnp.float32(1.0))
    assert (found.kind, found.path) == ("argument", "a constant of the program")
    assert "holds a constant that is not finite" in found.advice


# Losses.


def test_has_aux():
    def loss(w):
        return square(w).astype(F32), {"logits": w, "text": 3}

    assert diagnose(loss, jnp.float32(2.0), has_aux=True).loss == 4.0
    assert diagnose(loss, BIG, has_aux=True).kind == "overflow"
    # What is beside the loss is not what training needs.
    assert diagnose(lambda w: (w, square(w)), BIG, has_aux=True).finite


@pytest.mark.parametrize(
    ("loss", "params", "kwargs", "error", "message"),
    [
        (lambda w: w, jnp.ones(2), {"scale": 8.0}, TypeError, "scalar"),
        (lambda w: (w, w), jnp.float32(1), {"scale": 8.0}, TypeError, "must return one scalar"),
        (lambda w: w, jnp.float32(1), {"has_aux": True}, TypeError, r"must return \(loss, aux\)"),
        (3, jnp.float32(1), {}, TypeError, "diagnose takes a function and its arguments, got 3"),
        (Net(), jnp.float32(1), {}, TypeError, "a Linen module keeps no parameters"),
        (lambda w: w, jnp.float32(1), {"scale": optax.EmptyState()}, ValueError, "There is no loss scale"),
    ],
)
def test_mistakes(loss, params, kwargs, error, message):
    with pytest.raises(error, match=message):
        diagnose(loss, params, **kwargs)


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**24])
def test_a_float16_loss_is_scaled_as_in_training(scale):
    assert diagnose(lambda w: (w.astype(F16) / 2).sum(), jnp.ones(3), scale=scale).finite
    found = diagnose(lambda w: square(w).sum(), jnp.full(3, 200.0), scale=scale)
    # Three times 40000: the sum overflows, unless its accumulator is wider; then the result does.
    assert (found.kind, found.dtype, found.backward) == ("overflow", "float16", False)
    assert found.largest_in_float32 == 120000.0


def test_losses_of_the_healthy_models():
    for loss, params in (of_linen(LinenDeep(-1)), of_nnx(NnxDeep(-1)), of_linen(LinenDeep(2), None)):
        found = diagnose(loss, params, X)
        assert found.finite
        assert found.loss == pytest.approx(100.0 if found.loss < 1000 else 80000.0)


def test_a_finite_loss_is_compiled_whole(monkeypatch):
    def no_replay(*_):
        raise AssertionError("each operation ran on its own")

    monkeypatch.setattr("jmp_policy._src.report.diagnose.EagerReplay", no_replay)
    assert diagnose(lambda w: jnp.sin(w).sum(), jnp.ones(3)).finite
    assert diagnose(lambda w: {"a": jnp.sin(w)}, jnp.ones(3)).finite
    with pytest.raises(AssertionError, match="each operation ran on its own"):
        diagnose(lambda w: jnp.log(-w).sum(), jnp.ones(3))


def test_a_half_value_between_two_operations_in_float32_is_rounded():
    """XLA leaves such casts out where it may: then 80000 is no infinity in float16."""
    found = diagnose(lambda w: ((w * 2).astype(F16).astype(F32) / 4).sum(), jnp.full(3, 40000.0))
    assert (found.kind, found.operation, found.dtype) == ("overflow", "convert_element_type", "float16")


@pytest.mark.parametrize("is_loss", [True, False])
def test_a_side_effect_happens_once(is_loss):
    seen = []

    def fn(w):
        jax.debug.callback(lambda x: seen.append(float(x)), w.sum())
        return w.sum() if is_loss else (w, w)

    assert diagnose(fn, jnp.ones(3)).finite
    jax.effects_barrier()
    assert seen == [3.0]


def test_the_model_is_as_before():
    loss, model = of_nnx(NnxDeep(1))
    before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model)))
    diagnose(loss, model, X)
    after = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.slow
def test_gradients_of_integers_keys_and_static_leaves():
    params = {"w": jnp.ones(2), "steps": jnp.int32(3), "key": jax.random.key(0), "name": 2.0}

    def loss(params):
        noise = jax.random.normal(params["key"], (2,), F16)
        return (params["w"] * noise * params["name"]).astype(F32).sum() * params["steps"]

    assert diagnose(loss, params).finite


# As a report.


def overflowing():
    loss, params = of_linen(LinenDeep(2))
    return diagnose(loss, params, X, scale=8.0)


@pytest.mark.slow
def test_as_text():
    text = " ".join(str(overflowing()).split())
    assert "The first non-finite value is infinite: the result of dot_general (float16[2, 8])" in text
    assert f"forward, in LinenDeep/layer_2 ({line_of('linen')}); an overflow" in text
    assert "Largest float16 value before: 100, convert_element_type in LinenDeep/layer_0" in text
    assert "Not finite in the end: the loss, the scaled loss, params/layer_" in text
    assert "params/layer_2/kernel float16 [8, 8] 100" in text
    assert (
        "Tried, with the error of the gradient: the rule {'layer_2': 'float32'}: not finite; the policy"
        in text
    )


def test_as_data():
    found = overflowing()
    data = json.loads(json.dumps(found.to_dict()))
    assert set(data) == {f.name for f in dataclasses.fields(Diagnosis)} | {"verdict"}
    assert data["path"] == "LinenDeep/layer_2"
    assert data["operands"][1] == {
        "name": "params/layer_2/kernel", "dtype": "float16", "shape": [8, 8], "largest": 100.0,
        "infinite": False,
    }  # fmt: skip
    assert found.place == f"LinenDeep/layer_2 ({line_of('linen')})"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        found.kind = ""


def test_as_html_is_escaped():
    found = dataclasses.replace(overflowing(), path="<b>&", operation="<script>")
    html = found._repr_html_()
    assert "<b>" not in html
    assert "<script>" not in html
    assert "&lt;b&gt;&amp;" in html
    assert html.count("<table>") == html.count("</table>") == 1


# `check` asks when the scale is stuck.


def stuck(loss, params, steps, scale):
    tx = jmpp.loss_scaled(optax.sgd(0.1), scale)
    state = tx.init(params)
    for _ in range(steps):
        _, grads = jmpp.scaled_value_and_grad(loss)(state, params, X)
        _, state = tx.update(grads, state, params)
    return state, grads


@pytest.mark.slow
def test_check_says_where():
    loss, params = of_linen(LinenDeep(2))
    state, grads = stuck(loss, params, 3, jmpp.DynamicLossScale(2.0, min_loss_scale=1.0))
    message = r"at its floor \(1\)(.|\n)*Non-finite gradients:(.|\n)*LinenDeep/layer_2 \(" + line_of("linen")
    with pytest.raises(jmpp.LossScaleStuckError, match=message) as caught:
        jmpp.check(state, grads, loss_fn=loss, args=(params, X))
    found = caught.value.diagnosis
    assert (found.path, found.kind, found.loss_scale) == ("LinenDeep/layer_2", "overflow", 1.0)
    assert str(caught.value).endswith(found.advice)
    with pytest.raises(jmpp.LossScaleStuckError, match="at its floor") as caught:
        jmpp.check(state, grads)
    assert caught.value.diagnosis is None


def test_check_runs_nothing_while_all_is_well():
    def never(*args):
        raise AssertionError

    loss, params = of_linen(LinenDeep(-1))
    state, grads = stuck(loss, params, 2, jmpp.DynamicLossScale(2.0, min_loss_scale=1.0))
    jmpp.check(state, grads, loss_fn=never, args=(params,))
    # Skipped, and not stuck: the scale may still fall.
    loss, params = of_linen(LinenDeep(2))
    state, grads = stuck(loss, params, 1, jmpp.DynamicLossScale(2.0**10))
    jmpp.check(state, grads, loss_fn=never, args=(params,))


def test_check_says_so_when_the_search_fails():
    loss, params = of_linen(LinenDeep(2))
    state, grads = stuck(loss, params, 3, jmpp.DynamicLossScale(2.0, min_loss_scale=1.0))

    def broken(params, x):
        raise KeyError("no such batch")

    message = "at its floor(.|\n)*Looking for the place failed: KeyError: 'no such batch'"
    with pytest.raises(jmpp.LossScaleStuckError, match=message) as caught:
        jmpp.check(state, grads, loss_fn=broken, args=(params, X))
    assert caught.value.diagnosis is None
    with pytest.raises(TypeError, match=r"needs args, what loss_fn was called with: args=\(params, batch\)"):
        jmpp.check(state, grads, loss_fn=loss)


def test_a_constant_that_is_not_finite():
    constant = jnp.asarray([1.0, np.nan])
    found = diagnose(lambda w: (w + constant).sum() * 0 + constant.sum(), jnp.ones(2))
    assert not found.finite
    assert found.is_nan
    assert str(found)


def test_needs_arrays_to_run_on():
    with pytest.raises(ValueError, match="diagnose found no floating arrays in the parameters of <lambda>"):
        diagnose(lambda n: 1.0, jnp.arange(3))


@pytest.mark.parametrize(
    "of", [diagnose, jmpp.drift, jmpp.gradient_spectrum, jmpp.sensitivity, jmpp.recommend]
)
def test_reports_that_run_want_arrays_on_the_host(of):
    def loss_fn(w):
        return jnp.square(w @ w).mean()

    with pytest.raises(TypeError, match=f"{of.__name__} runs .* needs arrays, not jax.ShapeDtypeStructs"):
        of(loss_fn, jax.ShapeDtypeStruct((8, 8), F32))
    w = jnp.ones((8, 8))
    for transform, given in ((jax.jit, w), (jax.grad, w), (jax.vmap, w[None])):
        with pytest.raises(TypeError, match=f"{of.__name__} runs on the host: call it outside of jax.jit"):
            transform(lambda w: [of(loss_fn, w), w.sum()][1])(given)


def test_advise_runs_on_the_host():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale())
    with pytest.raises(TypeError, match=r"advise runs on the host.*use metrics\(opt_state\)"):
        jax.jit(lambda state: [jmpp.advise(state), 0][1])(tx.init(jnp.ones(2)))


@pytest.mark.slow
def test_check_of_a_scale_that_cannot_be_stuck_with_aux_and_nnx():
    loss, model = of_nnx(NnxDeep(1))
    state, _ = stuck(*of_linen(LinenDeep(2)), 3, jmpp.StaticLossScale(4.0))

    def with_aux(model, x):
        return loss(model, x), x

    jmpp.check(state, max_consecutive_skips=4, loss_fn=with_aux, args=(model, X), has_aux=True)
    with pytest.raises(jmpp.LossScaleStuckError, match="3 steps skipped in a row(.|\n)*NnxDeep/layers/1"):
        jmpp.check(state, max_consecutive_skips=3, loss_fn=with_aux, args=(model, X), has_aux=True)
    # A step that was well: the message says so.
    healthy, params = of_linen(LinenDeep(-1))
    with pytest.raises(jmpp.LossScaleStuckError, match="and all gradients are finite.$") as caught:
        jmpp.check(state, max_consecutive_skips=3, loss_fn=healthy, args=(params, X))
    assert caught.value.diagnosis.finite


def test_the_branch_of_the_platform_that_runs_is_looked_into():
    def loss(w, x):
        y = jax.lax.platform_dependent(w * x, cpu=lambda y: y * 1e3, default=lambda y: y)
        return y.astype(jnp.float32).sum()

    found = diagnose(loss, jnp.full(3, 100.0, jnp.float16), jnp.ones(3, jnp.float16))
    is_cpu = jax.default_backend() == "cpu"
    assert (found.kind, found.operation) == (("overflow", "mul") if is_cpu else ("", ""))


@pytest.mark.slow
def test_what_a_loop_met_before_it_is_found_at_fault_as_a_whole_counts():
    # Every trip is finite, and what the loop hands to its last operation is not.
    def loss(w, x):
        def body(carry, x):
            return carry, (x * carry).astype(jnp.float16)

        _, ys = jax.lax.scan(body, w, x)
        return jnp.square(ys).astype(jnp.float32).sum()

    found = diagnose(loss, jnp.float32(300.0), jnp.ones(4))
    assert (found.kind, found.operation, found.largest_before) == ("overflow", "square", 300.0)


@pytest.mark.slow
def test_mutable_references_in_loops():
    def loss(w, x):
        h = jnp.tanh(x.astype(F16) @ w.astype(F16)).astype(F32)
        kept = jax.new_ref(jnp.zeros(h.shape))
        lax.fori_loop(0, 3, lambda i, _: kept.__setitem__(..., kept[...] + lax.stop_gradient(h) * i), None)
        return jnp.square(h + jax.freeze(kept)).mean()

    w, x = jnp.eye(8), jnp.ones((4, 8))
    assert diagnose(loss, w, x).finite
    found = diagnose(lambda w, x: loss(w, x * 1e4) * 1e38, w, x)
    assert not found.finite


def test_no_tracer_leaks():
    with jax.checking_leaks():
        assert diagnose(lambda w: (w @ w).sum(), jnp.eye(2)).finite


def test_a_function_of_what_rounding_made_negative_is_no_overflow():
    def loss(w):
        a = w.astype(jnp.float16)
        return jnp.sqrt(a[0] + a[1] - a[2]).astype(F32)

    found = diagnose(loss, jnp.float32([2049, 1, 2049.9]))
    assert (found.kind, found.operation) == ("rounding", "sqrt")
    assert "sqrt is not defined for one of the numbers it was given" in found.verdict
    said = "Rounding gave sqrt a number for which it is not defined. Its digits were lost before"
    assert found.advice.startswith(said)


def test_a_sum_that_overflows_itself_is_not_called_one_of_partial_sums():
    def total(x):
        return jnp.cumsum(x.astype(jnp.float16)).astype(jnp.float32).sum()

    verdict = jmpp.diagnose(total, jnp.full(16, 1e4)).verdict
    assert "an overflow: in float32 it is finite, at most 1.6e+05" in verdict


@pytest.mark.slow
@pytest.mark.parametrize("masked_rows", [False, True])
@pytest.mark.parametrize("layers", ["unrolled", "scanned", "scanned, cast inside"])
def test_a_harmless_mask_is_not_what_overflows(layers, masked_rows):
    """A mask of -1e9 is -inf in float16; of a row that it hides altogether the softmax is NaN."""
    half, rows = jnp.float16, jnp.arange(16) < (12 if masked_rows else 16)
    mask = jnp.where(jnp.tril(jnp.ones((16, 16), bool)) & rows[:, None], 0, -1e9)
    growth = half(0.5 if masked_rows else 4)

    def layer(h, mask):
        mask = mask.astype(half)
        scores = (h @ h.T) * half(0.01) + mask
        return (h + jax.nn.softmax(scores.astype(jnp.float32)).astype(half) @ h) * growth

    def loss(w, x, mask):
        h = x.astype(half) @ w.astype(half) * half(0.1)
        if layers != "scanned, cast inside":
            mask = mask.astype(half)
        if layers == "unrolled":
            for _ in range(6):
                h = layer(h, mask)
        else:
            h, _ = jax.lax.scan(lambda h, _: (layer(h, mask), None), h, None, length=6)
        return jnp.log1p(jnp.abs(h.astype(jnp.float32))).mean()

    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (16, 32))
    found = jmpp.diagnose(loss, w, x, mask)
    assert found.operation == ("convert_element_type" if masked_rows else "dot_general")
    assert found.kind == "overflow"
    if not masked_rows:
        assert found.trip == (None if layers == "unrolled" else 3)


def test_negative_activations_that_overflow_are_no_mask():
    def loss(w, x):
        energy = (-jnp.square(x * w).sum(-1)).astype(jnp.float16)  # -1e5 becomes -inf.
        p = jnp.exp(energy / 1000 / 100)
        return (energy * jnp.float16(1e-5) - jnp.log(p)).astype(jnp.float32).mean()

    found = jmpp.diagnose(loss, jnp.ones(8), jnp.ones((4, 8)) * 112.0)
    assert (found.kind, found.operation) == ("overflow", "convert_element_type")


@pytest.mark.slow
def test_a_mask_is_named_where_a_loop_inside_a_loop_reads_it():
    """Of a row that is masked altogether the softmax is NaN; the inner loop is not at fault."""

    def loss(w, x, masks):
        def layer(h, m):
            mask = jnp.where(m, 0.0, -1e9).astype(jnp.float16)
            q = h @ w.astype(jnp.float16)

            def chunk(c, i):
                return c, jax.nn.softmax(q[i] @ h.T + mask[i]) @ h

            return jax.lax.scan(chunk, 0.0, jnp.arange(8))[1].astype(jnp.float16), None

        return jax.lax.scan(layer, x.astype(jnp.float16), masks)[0].astype(jnp.float32).sum()

    masks = jnp.ones((2, 8, 8), bool).at[:, 3].set(False)
    x = jax.random.normal(jax.random.key(0), (8, 8))
    found = jmpp.diagnose(loss, jnp.eye(8), x, masks)
    assert found.operation == "convert_element_type"
    assert "mask" in found.advice


def test_an_overflow_that_is_written_to_a_reference():
    def loss(w, x):
        ref = jax.new_ref(jnp.zeros(8, jnp.float16))
        ref[...] = (x[0] * w * 1000).astype(jnp.float16)
        return ref[...].astype(jnp.float32).sum()

    found = jmpp.diagnose(loss, jnp.ones(8), jnp.ones((4, 8)) * 112.0)
    assert (found.finite, found.kind) == (False, "overflow")


@pytest.mark.parametrize("is_loss", [True, False])
def test_what_is_not_finite_only_where_xla_joins_constants(is_loss):
    """It makes (1 + 1e-8) - q of 1 - q + 1e-8, where the epsilon is lost."""

    def loss_fn(q):
        return -jnp.log(1 - q + 1e-8).mean()

    q = jnp.ones(8)
    if jnp.isfinite(jax.jit(loss_fn)(q)):
        pytest.skip("this version of XLA joins no constants")
    found = jmpp.diagnose(loss_fn if is_loss else jax.jit(jax.value_and_grad(loss_fn)), q)
    assert (found.finite, found.kind) == (False, "compiled")
    assert "not finite where XLA joins operations, and finite one by one" in found.verdict
    assert "Clamp what a logarithm or division is given" in " ".join(str(found).split())


class _MaskedRows(nn.Module):
    """A softmax by hand over rows that masks make -inf as a whole: that of the first token."""

    @nn.compact
    def __call__(self, x):
        scores, i = nn.Dense(8)(x), jnp.arange(8)
        scores = jnp.where(i[:, None] < i, -1e9, scores)
        scores = jnp.where(i[:, None] == i, -1e5, scores)
        return jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))


@pytest.mark.slow
def test_an_exponential_of_a_mask_that_became_infinite_is_no_underflow():
    model, x = jmpp.wrap(_MaskedRows(), "mixed_float16"), jnp.linspace(-1, 1, 128).reshape(8, 16)
    variables = model.init(jax.random.key(0), x)
    found = jmpp.diagnose(lambda v: jnp.square(model.apply(v, x)).mean(), variables)
    assert (found.kind, found.zero, found.constant.becomes) == ("overflow", None, "-inf")
    assert "log_softmax" not in found.advice
    assert found.error_after < 0.02


class Encoder(nn.Module):
    def setup(self):
        self.e = nn.Dense(16)

    def encode(self, x):
        return self.e(x * 3e4) / 3e4


class Encodes(nn.Module):
    def setup(self):
        self.sub, self.o = Encoder(), nn.Dense(8)

    def __call__(self, x):
        return self.o(self.sub.encode(x))


@pytest.mark.slow
def test_a_layer_that_a_method_calls_has_the_rule_of_its_path():
    model, x = jmpp.wrap(Encodes(), "mixed_float16"), jax.random.normal(jax.random.key(0), (32, 16))
    variables = model.init(jax.random.key(0), x)
    found = jmpp.diagnose(lambda v: jnp.square(model.apply(v, x)).mean(), variables)
    assert found.path == "Encodes/sub.encode/e"
    assert found.rule == {"sub/e": "float32"}
    assert found.error_after < 1e-3
