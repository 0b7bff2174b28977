"""`recommend` puts into float32 exactly the layers that must be, and says how far the result is off."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from planted_models import PLANTED

import jmp_policy as jmpp
from jmp_policy._src.core.targets import find_target
from jmp_policy._src.report.sensitivity import recommend as recommending
from jmp_policy._src.report.sensitivity.chosen_modules import (
    Choice,
    needing_float32,
    rows_of,
    rules_of,
    widened,
    within,
)
from jmp_policy._src.report.sensitivity.recommend import compared
from jmp_policy._src.report.sensitivity.rounding_errors import Effect, Effects
from jmp_policy._src.report.trials import product_layers, products_alone


@pytest.mark.once
@pytest.mark.parametrize("name", PLANTED)
def test_planted_layers_are_found_and_no_others(name):
    module, inputs, targets, loss, planted = PLANTED[name]
    params = module.init(jax.random.key(0), *inputs)["params"]

    def loss_fn(params, *inputs):
        return loss(module.apply({"params": params}, *inputs), targets)

    found = jmpp.recommend(loss_fn, params, *inputs, dtype="float16")
    assert found.fits
    if name == "sum of 50,000 half terms":
        assert found.policy == jmpp.PolicyMap("mixed_float16, grad=float32")  # No layer has to be float32.
        return
    assert found.policy == jmpp.PolicyMap("mixed_float16", dict.fromkeys(planted, "float32"))
    assert found.measured < 2e-3
    assert [row.pattern for row in found.rows] == ["", *planted]
    assert found.rows[1].predicted > 0.1
    assert jmpp.PolicyMap.from_dict(found.to_dict()["policy"]) == found.policy


class Difference(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * jnp.sqrt(jnp.square(x - x * (1 - 1e-4)).sum(-1, keepdims=True))  # Half: x - x.


class Stages(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(6):
            x = jnp.tanh(nn.Dense(16, name=f"stage_{i}")(x))
        return x


@pytest.mark.slow
def test_a_budget_that_is_missed_by_little_costs_few_more_layers(monkeypatch):
    model, x = Stages(), jax.random.normal(jax.random.key(0), (32, 16))
    params = model.init(jax.random.key(1), x)

    def loss_fn(params, x):
        return jnp.square(model.apply(params, x) - x).mean()

    error = recommending._error
    monkeypatch.setattr(recommending, "_error", lambda *args: 1.4 * error(*args))
    whole = jmpp.recommend(loss_fn, params, x, dtype="bfloat16", budget=0.5).measured
    found = jmpp.recommend(loss_fn, params, x, dtype="bfloat16", budget=0.75 * whole)
    assert found.fits
    assert found.half_share > 0.4  # If all errors were to be halved at once, 0.18.


@pytest.mark.slow
def test_bfloat16_is_tried_where_nothing_is_left_in_float16():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.WeightNorm(nn.Dense(16))(x * 3e4) / 3e4

    x = jax.random.normal(jax.random.key(0), (32, 16))
    found = jmpp.recommend(Scaled(), Scaled().init(jax.random.key(0), x), x)
    assert found.policy == jmpp.PolicyMap("mixed_bfloat16")


@pytest.mark.slow
def test_a_constant_that_is_one_in_half_is_as_written_where_nothing_is_rounded():
    model, x = nn.Sequential([nn.Dense(16), nn.tanh, Difference(), nn.Dense(16)]), jnp.eye(16)
    params = jax.jit(model.init)(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.square(model.apply(params, x) - x).mean()

    assert jmpp.sensitivity(loss_fn, params, x).dtype == "float16"  # Is not refused.
    found = jmpp.recommend(loss_fn, params, x, dtype="float16")
    assert found.policy == jmpp.PolicyMap("mixed_float16", {"layers_2": "float32"})
    assert found.measured < 1e-2


def effects(own, alone=None):
    zeros = dict.fromkeys(own, Effect())
    return Effects("loss", "float16", 8.0, {}, own, {**zeros, **(alone or {})})


OWN = {
    "": Effect(1e-8),
    "a": Effect(4e-4),
    "a/b": Effect(1e-8),
    "a/c": Effect(9e-4, underflow=7),
    "d": Effect(1e-8),
    "d/e": Effect(4e-8),
}


@pytest.mark.parametrize(
    ("wide", "rules"),
    [
        ([], jmpp.PolicyMap("mixed_float16")),
        (["d"], jmpp.PolicyMap("mixed_float16", {"d": "float32", "d/*": "mixed_float16"})),
        (["d", "d/e"], jmpp.PolicyMap("mixed_float16", {"d": "float32"})),
        (
            ["a", "a/c"],
            jmpp.PolicyMap("mixed_float16", {"a": "float32", "a/c": "float32", "a/*": "mixed_float16"}),
        ),
        ([""], jmpp.PolicyMap("float32", {"*": "mixed_float16"})),
        (["", "d/e"], jmpp.PolicyMap("float32", {"d/e": "float32", "*": "mixed_float16"})),
        (list(OWN), jmpp.PolicyMap("float32")),
    ],
)
def test_rules_are_the_fewest_that_say_it(wide, rules):
    choice = Choice(effects(OWN), dict.fromkeys(wide, "because"))
    assert rules_of(choice) == rules
    for path in OWN:
        assert (rules.resolve(path).compute_dtype == np.float32) == (path in wide)
    rows = rows_of(choice, rules)
    assert [row.pattern for row in rows] == ["", *(pattern for pattern, _ in rules.overrides)]


def test_the_worst_go_first_until_the_rest_fits():
    choice = within(needing_float32(effects(OWN), ()), 0.021)
    assert list(choice.reasons) == ["a/c"]
    assert (
        choice.reasons["a/c"] == "brings 69.2 % of the square of the gradient's error; 7 values become zero"
    )
    assert list(within(choice, 1e-3).reasons) == ["a/c", "a"]
    assert choice.predicted == pytest.approx(math.sqrt(4e-4 + 7e-8))


def test_overflow_needs_no_budget():
    own = {"a": Effect(overflow=3), "b": Effect(gradient_overflow=2), "c": Effect(), "d": Effect()}
    choice = needing_float32(effects(own, {"c": Effect(overflow=1200)}), ())
    assert choice.reasons == {
        "a": "3 values exceed the range of float16",
        "b": "2 cotangents exceed the range of float16",
        "c": "1.2 k inputs exceed the range of float16",
    }


X = jax.random.normal(jax.random.key(1), (8, 8))


@pytest.mark.slow
def test_a_loss_in_float16_bounds_the_scale_that_it_is_measured_at():
    model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(8)])
    params = model.init(jax.random.key(0), X)

    def loss_fn(params, x):
        return jnp.square(model.apply(params, x).astype(jnp.float16) / 4).mean()

    found = jmpp.recommend(loss_fn, params, X)
    assert found.policy == jmpp.PolicyMap("mixed_float16")
    assert found.loss_scale.loss_scale > 65504
    assert found.measured < 0.01


def test_products_alone_in_half_are_rules_for_their_classes():
    modules = {("Net",): None, ("Net", "mix"): None, ("Net", "a"): nn.Dense(2), ("Net", "b"): nn.Dense(2)}
    own = {"": Effect(1e-8), "mix": Effect(4e-2), "a": Effect(1e-8), "b": Effect(1e-8)}
    seen = effects(own)._replace(modules=modules)
    alone = products_alone(jmpp.PolicyMap("mixed_float16"), product_layers(modules.values()))
    first, dense = rows_of(within(needing_float32(seen, ()), 0.01), alone)
    assert (first.pattern, first.predicted) == ("", pytest.approx(0.2, rel=1e-3))
    assert first.reason == "brings > 99.9 % of the square of the gradient's error (in mix)"
    assert (dense.pattern, dense.reason) == ("Dense", "2 of 4 modules fit the budget")


@jax.custom_vjp
def same(x):
    """Divides in its own derivative by what float16 does not have: nothing looks into that."""
    return x


same.defvjp(lambda x: (x, None), lambda _, g: (1e5 * g / 1e5,))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return same(nn.Dense(8)(x))


@pytest.mark.once
def test_products_alone_are_in_half_where_no_module_mends():
    model = nn.Sequential([Block() for _ in range(4)])
    params = model.init(jax.random.key(0), X)["params"]

    def loss_fn(params):
        return jnp.square(model.apply({"params": params}, X)).mean()

    found = jmpp.recommend(loss_fn, params, dtype="float16")
    assert (found.fits, found.half_share) == (True, 1)
    half = "params=float32,compute=float16,output=float32"
    assert found.policy == jmpp.PolicyMap("float32", {nn.Dense: half})
    assert [row.pattern for row in found.rows] == ["", "Dense"]
    assert math.isnan(found.predicted)


class LargeConstant(nn.Module):
    """The model's own operations divide by what float16 does not have."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first")(x)
        return nn.Dense(2, name="last")(1e5 * x / 70000)


@pytest.mark.once
def test_a_module_reads_a_constant_that_is_infinite_in_half():
    params = LargeConstant().init(jax.random.key(0), X)["params"]

    def loss_fn(params):
        return jnp.square(LargeConstant().apply({"params": params}, X)).mean()

    found = jmpp.recommend(loss_fn, params, dtype="float16")
    half = "params=float32,compute=float16,output=float32"
    assert found.policy == jmpp.PolicyMap("float32", {"*": half})
    assert (found.fits, found.half_share) == (True, 1)
    assert found.rows[0].reason.endswith("values exceed the range of float16")


def test_a_module_that_makes_the_gradient_infinite_is_named_as_such():
    own = {"a": Effect(gradient=math.inf), "b": Effect(gradient=1e-6)}
    choice = needing_float32(Effects("loss", "float16", 1.0, {}, own, own), [])
    assert widened(choice, choice.next()).reasons == {"a": "makes the gradient not finite"}
    assert "brings 0 of" in widened(choice, "b").reasons["b"]


@pytest.mark.once
def test_nothing_is_predicted_where_everything_fits():
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)])
    found = jmpp.recommend(model, model.init(jax.random.key(0), X), X)
    assert math.isnan(found.predicted)
    assert [row.predicted for row in found.rows] == [found.measured]
    assert "predicted" not in found.verdict


@pytest.mark.once
def test_a_model_is_taken_for_its_loss():
    model = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False), nn.Dense(2)])
    variables = model.init(jax.random.key(0), X)
    found = jmpp.recommend(model, variables, X, target="h100", dtype="bfloat16")
    assert isinstance(found, jmpp.report.Recommendation)
    assert isinstance(found.rows[0], jmpp.report.RecommendationRow)
    assert found.policy == jmpp.PolicyMap("mixed_bfloat16")
    assert isinstance(found.loss_scale, jmpp.NoOpLossScale)
    assert found.budget == 0.01
    assert found.half_share == 1
    assert found.target == "H100"
    # Products of a few numbers are bound by memory, of which half precision moves half.
    assert 1 < found.speedup < 3
    assert "100 % of the FLOPs are in half. H100: products" in str(found).replace("\n", " ")
    assert found.to_dict()["loss_scale"] == 1


@pytest.mark.once
def test_an_nnx_model_and_a_budget_from_batches():
    model = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    found = jmpp.recommend(model, X, batches=[(2 * X,)])
    assert found.dtype == "float16"
    assert found.policy == jmpp.PolicyMap("mixed_float16")
    # The gradient of the kernels is 4 times as large: both are 0.6 of their mean away from it.
    assert found.budget == pytest.approx(0.06, rel=0.05)
    found = jmpp.recommend(model, X, dtype="float16", budget=1e-9)
    assert "the budget of 1e-07 %" in found.verdict
    assert found.policy == jmpp.PolicyMap("float32")
    assert (found.measured, found.half_share) == (0, 0)
    assert found.verdict.endswith("stay in float32.")
    assert [row.pattern for row in found.rows] == [""]


class Kink(nn.Module):
    """With a weight of 1 + 2**-12 and a bias of -1 the relu's input is 0 in half.

    To first order `smooth` is worse.
    """

    @nn.compact
    def __call__(self, x, z):
        decided = nn.relu(nn.Dense(1, name="decided")(x))
        return decided.sum() + jnp.square(nn.Dense(1, name="smooth")(z)).sum()


@pytest.mark.once
def test_modules_whose_rounding_turns_decisions_are_found():
    z = jax.random.normal(jax.random.key(1), (4, 8))
    arguments = jnp.zeros((1, 8)).at[0, 0].set(1), z
    params = Kink().init(jax.random.key(0), *arguments)["params"]
    params["decided"] = {"kernel": jnp.full((8, 1), 1 + 2**-12), "bias": -jnp.ones(1)}

    def loss_fn(params, *arguments):
        return Kink().apply({"params": params}, *arguments).astype(jnp.float32)

    found = jmpp.recommend(loss_fn, params, *arguments, dtype="float16")
    assert found.policy == jmpp.PolicyMap("mixed_float16", {"decided": "float32"})
    assert found.measured < found.budget < found.rows[1].predicted


def test_speed_is_that_of_the_slower_of_arithmetic_and_memory():
    card = find_target("A100")
    loss = jmpp.audit(lambda a, b: a @ b, *[jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2).products
    half = jmpp.audit(lambda a, b: a @ b, *[jax.ShapeDtypeStruct((4096, 4096), jnp.float16)] * 2).products
    cost = compared(loss, half, card)
    assert cost == {"half_share": 1.0, "float8_share": 0.0, "speedup": pytest.approx(312 / 19.5)}
    assert math.isnan(compared(loss, half, None)["speedup"])


@pytest.mark.once
def test_memory_is_that_of_parameters_copies_gradients_and_activations():
    """As memory_report estimates it of the same gradient."""
    model, x = nn.Dense(64, use_bias=False), jax.random.normal(jax.random.key(0), (1024, 32))
    variables = model.init(jax.random.key(1), x)
    found = jmpp.recommend(model, variables, x, target="H100", dtype="float16")
    assert found.half_share == 1
    step = jax.grad(lambda variables: jnp.square(model.apply(variables, x)).mean() / 2)
    plain = jmpp.memory_report(step, variables)
    half = jmpp.wrap(model, found.policy)
    report = jmpp.memory_report(jax.grad(lambda v: jnp.square(half.apply(v, x)).mean() / 2), variables)
    expected = sum(row.expected_policy for row in report.rows) / sum(
        row.expected_policy for row in plain.rows
    )
    assert found.memory == pytest.approx(expected, rel=0.01)
    assert found.memory < 1
    assert math.isnan(jmpp.recommend(model, variables, x, dtype="float16").memory)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"relative error of the gradient, such as 0\.01 for 1 %; got -1"):
        jmpp.recommend(lambda w: w, 1.0, budget=-1)
    with pytest.raises(ValueError, match="Unknown target 'H1000'"):
        jmpp.recommend(lambda w: w, 1.0, target="H1000")


class Mix(nn.Module):
    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.orthogonal(), (8, 8))
        return x @ w + nn.Dense(8, name="below")(x), jnp.linalg.slogdet(w)[1]


class Flow(nn.Module):
    @nn.compact
    def __call__(self, x):
        x, log_det = Mix(name="mix")(nn.Dense(8, name="into")(x))
        return jnp.mean(nn.Dense(8, name="out")(x) ** 2) / 2 - log_det


class Spectral(nn.Module):
    """The model itself has the transform."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="into")(x)
        k = self.param("k", nn.initializers.normal(0.1), (8, 8))
        x = jnp.fft.irfft(jnp.fft.rfft(x, axis=0) * jnp.fft.rfft(k, 16, axis=0), 16, axis=0)
        return jnp.square(nn.Dense(8, name="out")(x)).mean()


class OfNnx(nnx.Module):
    def __init__(self):
        self.into = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.mix = OfNnxMix()

    def __call__(self, x):
        return jnp.square(self.mix(self.into(x))).mean()


class OfNnxMix(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.eye(8))

    def __call__(self, x):
        return jnp.linalg.solve(self.w[...], x.T)


@pytest.mark.once
def test_the_loss_scale_leaves_room_for_gradients_of_biases():
    class Bag(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(3)(jnp.tanh(nn.Dense(32)(jax.nn.one_hot(tokens, 20)).sum(1)))

    tokens = jax.random.randint(jax.random.key(0), (64, 16), 0, 20)
    params = Bag().init(jax.random.key(0), tokens)["params"]

    def loss_fn(params, tokens):
        return 100 * jnp.square(Bag().apply({"params": params}, tokens) - 1).mean()

    found = jmpp.recommend(loss_fn, params, tokens, dtype="float16")
    largest = max(jnp.abs(g).max() for g in jax.tree.leaves(jax.grad(loss_fn)(params, tokens)))
    assert found.loss_scale.loss_scale * largest < 65504 / 2
    assert (found.fits, found.half_share) == (True, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype"),
    [(Flow, "float16"), (Flow, "bfloat16"), (Spectral, "bfloat16"), (OfNnx, "float16")],
)
def test_modules_that_cannot_compute_in_half_stay_in_float32(model, dtype):
    """JAX refuses half arrays when it traces some of these operations, others when it compiles them."""
    x = jax.random.normal(jax.random.key(0), (16, 8))
    if model is OfNnx:
        loss, params = (lambda model, x: model(x)), OfNnx()
    else:
        params = model().init(jax.random.key(1), x)["params"]
        loss = lambda params, x: model().apply({"params": params}, x)  # noqa: E731
    found = jmpp.recommend(loss, params, x, dtype=dtype)
    (row,) = (row for row in found.rows if "linear algebra" in row.reason)
    assert row.pattern == ("" if model is Spectral else "mix")
    assert found.fits
    assert found.half_share > 0.25
    seen = jmpp.sensitivity(loss, params, x, dtype=dtype)
    assert math.isfinite(seen.rows[0].predicted)


@jax.custom_vjp
def doubled(x):
    return 2 * x


def _doubled_backward(_, g):
    n = (jnp.abs(g).max() * 0).astype(jnp.int32) + 2
    return (
        jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + g), (0, jnp.zeros_like(g)))[1],
    )


doubled.defvjp(lambda x: (2 * x, None), _doubled_backward)


class Implicit(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.sin(nn.Dense(8, name="out")(doubled(nn.Dense(8, name="into")(x)))).mean()


@pytest.mark.slow
def test_an_implicit_layer_is_measured():
    """An implicit layer solves with a loop in its backward pass."""
    x = jax.random.normal(jax.random.key(0), (16, 8))
    params = Implicit().init(jax.random.key(1), x)["params"]

    def loss(params, x):
        return Implicit().apply({"params": params}, x)

    found = jmpp.recommend(loss, params, x, dtype="float16")
    assert found.fits
    assert math.isnan(found.predicted)
    assert 0 < jmpp.sensitivity(loss, params, x).of("").predicted < 0.1


class Recurrence(nn.Module):
    """A gated linear recurrence; 1 - decay**2 needs float32, and cotangents inside are large."""

    @nn.compact
    def __call__(self, x):
        a = self.param("a", lambda key: jnp.linspace(4.0, 9.0, 8))
        decay = -8 * nn.sigmoid(x) * nn.softplus(-a.astype(x.dtype))
        values = jnp.exp(decay), jnp.sqrt(1 - jnp.exp(2 * decay)) * x
        return jax.lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), values)[1]


class Around(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name="norm")(nn.Dense(8, name="into")(x))
        return jnp.square(nn.Dense(8, name="out")(x + Recurrence(name="recurrence")(x))).mean()


@pytest.mark.once
def test_cotangents_in_float32_modules_bind_no_loss_scale():
    x = jax.random.normal(jax.random.key(0), (16, 8))
    params = Around().init(jax.random.key(1), x)["params"]

    def loss(params, x):
        return Around().apply({"params": params}, x)

    found = jmpp.recommend(loss, params, x, dtype="float16", budget=0.002)
    assert [row.pattern for row in found.rows] == ["", "recurrence"]
    assert found.fits
    half = jmpp.wrap(Around(), found.policy)

    @jax.jit
    def gradient(scale):
        return jax.grad(lambda params: half.apply({"params": params}, x) * scale)(params)

    def is_finite(exponent):
        grads = gradient(jnp.float32(2.0**exponent))
        return all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))

    largest = max(filter(is_finite, range(24)))
    assert 2.0 ** (largest - 4) <= found.loss_scale.loss_scale <= 2.0**largest


@pytest.mark.once
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_weight_gradients_are_in_float32_where_only_their_sums_are_too_far_off(framework):
    x = jax.random.normal(jax.random.key(0), (2, 32, 32, 8))
    if framework == "linen":
        model = nn.Sequential([nn.Conv(8, (1, 1)), jnp.tanh, nn.Conv(8, (1, 1))])
        params, apply = model.init(jax.random.key(1), x), model.apply
    else:
        layers = [nnx.Conv(8, 8, (1, 1), rngs=nnx.Rngs(seed)) for seed in range(2)]
        params, apply = nnx.Sequential(layers[0], jnp.tanh, layers[1]), lambda model, x: model(x)

    def loss(params, x):  # Each bias gradient is a sum of 2,048 terms, all of one sign in the last.
        return jnp.square(apply(params, x).astype(jnp.float32) - 5).mean()

    found = jmpp.recommend(loss, params, x, dtype="bfloat16", budget=0.01)
    assert found.policy == jmpp.PolicyMap("params=float32,compute=bfloat16,output=float32,grad=float32")
    assert found.fits
    assert found.half_share == 1.0
    assert "with weight gradients in float32" in found.rows[0].reason


def test_a_loss_that_is_not_finite_has_no_recommendation_though_its_gradient_is():
    with pytest.raises(ValueError, match="or its gradient is not finite even where nothing is rounded"):
        jmpp.recommend(lambda w, x: jnp.log(-jnp.square(x @ w)).mean(), jnp.ones((8, 8)), jnp.ones((4, 8)))


def test_a_wrapped_model_is_refused_also_if_its_loss_is_infinite():
    model, x = jmpp.wrap(nn.Dense(8), "mixed_float16"), jnp.full((4, 8), 6e4)
    params = model.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="Dense is wrapped"):
        jmpp.recommend(lambda p, x: jnp.exp(model.apply(p, x)).mean(), params, x)


@pytest.mark.slow
def test_products_alone_are_in_half_with_weight_gradients_in_float32_where_both_are_needed():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8)(x)
            # The noise needs float32, and so does the sum that is the last bias's gradient.
            return nn.Dense(8)(nn.softmax(h + jax.random.gumbel(jax.random.key(2), h.shape, h.dtype)))

    x = jax.random.normal(jax.random.key(0), (4096, 8))
    params = Net().init(jax.random.key(1), x)
    found = jmpp.recommend(
        lambda params, x: jnp.square(Net().apply(params, x).astype(jnp.float32) - 5).mean(),
        params,
        x,
        dtype="bfloat16",
        budget=0.005,
    )
    in_half = "params=float32,compute=bfloat16,output=float32,grad=float32"
    assert found.policy == jmpp.PolicyMap("float32", {nn.Dense: in_half})
    assert (found.half_share, found.fits) == (1.0, True)


@pytest.mark.slow
def test_cotangents_that_overflow_where_a_relu_multiplies_them_by_0_do_no_harm():
    class Fog(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x), nn.relu(nn.Dense(8, bias_init=nn.initializers.constant(-100))(x))

    x = jax.random.normal(jax.random.key(0), (16, 8))
    params = Fog().init(jax.random.key(1), x)

    def loss_fn(params, x):
        colour, density = Fog().apply(params, x)
        return jnp.square(colour * jnp.exp(-density * 1e10) - x).mean()

    assert jmpp.sensitivity(loss_fn, params, x).rows[0].gradient_overflow
    found = jmpp.recommend(loss_fn, params, x)
    assert found.policy == jmpp.PolicyMap("mixed_float16")
    assert found.rows[0].predicted == found.measured < 1e-2
