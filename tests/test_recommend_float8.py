"""`recommend` with a recipe: products in float8 where the budget allows it, and no others."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmp_policy as jmpp
from jmp_policy._src.report.sensitivity import recommend
from jmp_policy._src.report.sensitivity.chosen_modules import Float8, in_float8
from jmp_policy._src.report.sensitivity.traced_loss import Loss

X = jax.random.normal(jax.random.key(0), (32, 32))


class Planted(nn.Module):
    """One weight of `spiky` is so large that the others are 0 in 8 bits; nobody uses what it makes."""

    @nn.compact
    def __call__(self, x):
        for name in ("first", "spiky", "last"):
            x = nn.Dense(32, use_bias=False, name=name)(x)
            x = jnp.tanh(jnp.where(jnp.arange(32) == 0, 0, x)) if name == "spiky" else x
        return jnp.square(nn.Dense(1, name="head")(x)).mean()


def planted():
    params = Planted().init(jax.random.key(1), X)["params"]
    params["spiky"]["kernel"] = params["spiky"]["kernel"].at[0, 0].set(1e6)
    return params


def loss_of(params, x):
    return Planted().apply({"params": params}, x)


HALF, FLOAT8 = "mixed_bfloat16", "mixed_bfloat16, r=fp8_current"


def choose(base, budget, before=0.0):
    loss = Loss(loss_of, planted(), (X,), {}, False, "recommend")
    exact = recommend._gradient(loss, 1.0)
    base = jmpp.PolicyMap(*base)
    return in_float8(
        loss, base, "fp8_current", before, budget, lambda rules: recommend._error(loss, rules, 1.0, exact)
    )


@pytest.mark.once
def test_a_module_that_8_bits_ruin_stays_in_half():
    choice, measured = choose((HALF,), budget=0.3)
    one = 2 * 32**3
    assert choice.flops == {"first": 2 * one, "spiky": 3 * one, "last": 3 * one}
    assert choice.rules() == jmpp.PolicyMap(FLOAT8, {"spiky": HALF})
    assert measured <= 0.3
    # Without the weights of `spiky` the loss has no gradient by any of the kernels below it.
    assert choice.added["spiky"] > 0.9**2
    assert max(choice.added["first"], choice.added["last"]) < 0.2**2
    known = [jmpp.report.RecommendationRow("", HALF, "all fits", 0.0)]
    default, row = choice.rows(known)
    assert default.reason == "all fits; 2 of 3 modules with products for fp8_current have it"
    assert (row.pattern, row.policy) == ("spiky", str(jmpp.get_policy(HALF)))
    assert "of the square of the error that the recipe adds" in row.reason
    assert row.predicted**2 == pytest.approx(choice.added["spiky"])
    assert in_float8(
        Loss(loss_of, planted(), (X,), {}, False, ""), choice.base, "fp8_current", 0.4, 0.3, lambda _: 0.0
    )[0].rules() == jmpp.PolicyMap(HALF)


@pytest.mark.parametrize(
    ("base", "chosen", "rules"),
    [
        ((HALF,), "abc", ("R", {})),
        ((HALF,), "", (HALF, {})),
        ((HALF,), "ab", ("R", {"d/c": HALF})),
        ((HALF,), "c", (HALF, {"d/c": "R"})),
        ((HALF, {"d": "float32", "d/*": HALF}), "a", (HALF, {"a": "R", "d": "float32", "d/*": HALF})),
        (
            (HALF, {"d": "float32", "d/*": HALF}),
            "ab",
            ("R", {"d/c": HALF, "d": "float32", "d/*": "R"}),
        ),
        (("float32", {"*": HALF}), "ab", ("float32", {"d/c": HALF, "*": "R"})),
        (("float32", {"*": HALF}), "", ("float32", {"*": HALF})),
    ],
)
def test_rules_give_the_recipe_to_these_modules_and_no_others(base, chosen, rules):
    paths = {"a": "a", "b": "d/b", "c": "d/c"}

    def policy_map(default, overrides=()):
        texts = {"R": FLOAT8}
        pairs = dict(overrides).items()
        return jmpp.PolicyMap(texts.get(default, default), {p: texts.get(t, t) for p, t in pairs})

    choice = Float8(
        policy_map(*base),
        "fp8_current",
        dict.fromkeys(paths.values(), 1),
        {},
        frozenset(paths[name] for name in chosen),
    )
    found = choice.rules()
    assert found == policy_map(*rules)
    for name, path in paths.items():
        assert (found.resolve(path).recipe is not None) == (name in chosen)


@pytest.mark.parametrize("chosen", [{""}, {"", "a/x"}])
def test_products_of_no_module_need_no_rule(chosen):
    paths: dict[str, int] = dict.fromkeys(("", "a/x", "b/x", "b/y"), 1)
    found = Float8(jmpp.PolicyMap(HALF), "fp8_current", paths, {}, frozenset(chosen)).rules()
    assert "" not in [pattern for pattern, _ in found.overrides]
    assert {path for path in paths if found.resolve(path).recipe} == chosen


def test_siblings_that_stay_share_a_rule():
    paths: dict[str, int] = dict.fromkeys(("a/x", "a/y", "b/x", "b/y"), 1)
    choice = Float8(jmpp.PolicyMap(HALF), "fp8_current", paths, {}, frozenset({"a/x", "a/y"}))
    assert choice.rules() == jmpp.PolicyMap(FLOAT8, {"b": HALF})


def test_rows_of_classes_keep_their_reasons():
    base = jmpp.PolicyMap("float32", {nn.Dense: HALF})
    choice = Float8(base, "fp8_current", {"a": 1}, {"a": 0.0}, frozenset(["a"]))
    known = [jmpp.report.RecommendationRow("", "float32", "the rest", 0.1)]
    known += [jmpp.report.RecommendationRow("Dense", HALF, "fits", 0.2)]
    default, dense = choice.rows(known)
    assert default.reason == "the rest; 1 of 1 modules with products for fp8_current have it"
    assert (dense.pattern, dense.reason, dense.predicted) == ("Dense", "fits", 0.2)
    assert dense.policy == str(jmpp.get_policy(FLOAT8))


@pytest.mark.once
def test_a_model_takes_the_recipe_where_all_fits():
    model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 32, rngs=nnx.Rngs(1)))
    found = jmpp.recommend(model, X, budget=0.2, dtype="bfloat16", recipe="fp8_current")
    assert found.policy == jmpp.PolicyMap(FLOAT8)
    assert (found.recipe, found.float8_share, found.half_share) == ("fp8_current", 1.0, 1.0)
    assert found.predicted != found.predicted
    assert "100 % of the FLOPs are in half, 100 % in float8 by fp8_current." in found.verdict
    assert jmpp.PolicyMap.from_dict(found.to_dict()["policy"]) == found.policy
    products = jmpp.audit(jmpp.wrap(model, found.policy), X).products
    assert {p.scales for p in products} == {"fp8_current"}


@pytest.mark.once
def test_a_card_on_which_nothing_gains_leaves_all_in_half():
    def loss(ws, x):
        return jnp.square(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) @ ws[2]).mean()

    ws = [jnp.eye(32)] * 3
    found = jmpp.recommend(loss, ws, X, budget=0.5, dtype="bfloat16", recipe="fp8_current", target="H100")
    assert found.policy == jmpp.PolicyMap(HALF)
    assert found.rows[0].reason.endswith("; no product suits fp8_current@H100")
    assert found.float8_share == 0
    everywhere = jmpp.recommend(loss, ws, X, budget=0.5, dtype="bfloat16", recipe="fp8_current")
    # The product in the middle, and both of its gradient; autocast leaves first layers and heads alone.
    assert everywhere.policy == jmpp.PolicyMap(FLOAT8)
    assert everywhere.float8_share == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("recipe", "target", "message"),
    [
        ("fp8_curent", None, "Unknown recipe 'fp8_curent'.*Did you mean 'fp8_current'"),
        ("fp8_delayed", None, "measures one step.*Ask for recipe='fp8_current'"),
        ("fp8_current", "A100", "A100 has no float8 arithmetic"),
    ],
)
def test_recipes_are_checked(recipe, target, message):
    with pytest.raises(ValueError, match=message):
        jmpp.recommend(lambda w: w, 1.0, recipe=recipe, target=target)
