"""`PolicyMap`: matching, inheritance, what is unused."""

import fnmatch
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jmp_policy as jmpp
from jmp_policy._src.policy.patterns import matches, patterns_below, singles_out

F32 = jmpp.get_policy("float32")
names = st.lists(st.sampled_from(["a", "b", "layer_0", "layer_1"]), max_size=4)


@pytest.mark.parametrize(
    ("pattern", "path", "want"),
    [
        ("decoder/layer_*/attention", "decoder/layer_3/attention", True),
        ("decoder/layer_*/attention", "decoder/layer_3/x/attention", False),
        ("decoder/layer_*/attention", "encoder/layer_3/attention", False),
        ("**/attention", "attention", True),
        ("**/attention", "a/b/attention", True),
        ("**/attention", "a/attention/b", False),
        ("decoder/**", "decoder", True),
        ("decoder/**/x", "decoder/a/b/x", True),
        ("decoder/**/x", "decoder/x", True),
        ("*", "a", True),
        ("*", "a/b", False),
        ("*", "", False),
        ("**", "", True),
        ("", "", True),
        ("", "a", False),
        ("layer_?", "layer_1", True),
        ("layer_[01]", "layer_2", False),
        ("a.b", "axb", False),
    ],
)
def test_globs(pattern, path, want):
    rules = jmpp.PolicyMap("mixed_float16", {pattern: "float32"})
    assert (rules.match(path) == 0) is want
    assert (rules.match(tuple(path.split("/")) if path else ()) == 0) is want


@given(names)
def test_a_literal_path_matches_itself_and_governs_all_below(path):
    rules = jmpp.PolicyMap("mixed_float16", {"/".join(path): "float32"})
    assert rules.resolve(path) == F32
    assert rules.resolve([*path, "below", 3, "deep"]) == F32
    assert rules.match([*path, "below"]) is None


def test_nearest_match_then_first_listed():
    rules = jmpp.PolicyMap("mixed_float16", [("a/**", "float32"), ("a/b", "bfloat16"), ("a/b/c", "float16")])
    assert rules.resolve("a/b") == F32
    assert rules.resolve("a/x/y") == F32
    assert rules.resolve("z") == rules.default
    rules = jmpp.PolicyMap("mixed_float16", [("a", "float32"), ("a/b", "bfloat16")])
    assert str(rules.resolve("a/b").compute_dtype) == "bfloat16"
    assert str(rules.resolve("a/b/c").compute_dtype) == "bfloat16"
    rules = jmpp.PolicyMap("mixed_float16", [("a/b", "bfloat16"), ("a", "float32")])
    assert str(rules.resolve("a/b/c").compute_dtype) == "bfloat16"
    assert rules.resolve("a/c/b") == F32


def test_classes_and_predicates():
    rules = jmpp.PolicyMap("mixed_float16", {int: "float32", lambda p, m: p == "x": "bfloat16"})
    assert rules.resolve("a", 3) == F32
    assert rules.resolve("a", "text") == rules.default
    assert str(rules.resolve("x", "text").compute_dtype) == "bfloat16"
    assert rules.unused([("a", 3)]) == (rules.overrides[1][0],)
    assert rules.unused([("a", 3), ("x", "")]) == ()
    assert len(rules.unused([])) == 2
    assert rules.match("a", True) == 0  # Of a subclass.


def test_which_patterns_single_a_module_out():
    """Those that do decide over a normalisation layer too, which is a float32 island otherwise."""
    named = ["norm", "a/norm", "**/norm", "layer_*", "*/norm", nn.LayerNorm, nnx.LayerNorm, lambda p, m: True]
    not_named = ["*", "**", "a/*", "a/**", nn.Module, nnx.Module, nnx.Pytree, object]
    rules = jmpp.PolicyMap("mixed_float16", [(pattern, "float16") for pattern in (*named, *not_named)])
    assert [singles_out(pattern) for pattern, _ in rules.overrides] == [True] * 8 + [False] * 8


def test_value_semantics():
    make = lambda: jmpp.PolicyMap("mixed_float16", {"a": "float32"})  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != jmpp.PolicyMap("mixed_float16", {"a": "float32"}, float32_islands=False)
    assert make() != "mixed_float16"
    text = repr(jmpp.PolicyMap("mixed_float16", {int: "float32"}, keep_module_dtypes=True))
    assert "int: 'params=float32" in text
    assert "keep_module_dtypes=True" in text


FLAGS = ("keep_module_dtypes", "float32_islands", "keep_small_inputs")


@pytest.mark.parametrize("changed", FLAGS)
def test_every_flag_is_kept_by_what_is_made_of_the_rules(changed):
    value = changed == "keep_module_dtypes"
    rules = jmpp.PolicyMap("mixed_float16", {"a": "float32"}, **{changed: value})
    copies = [
        rules.relative_to("b", rules.default),
        rules.without_output_cast(rules.default),
        rules.with_recipe("fp8_current"),
        jmpp.PolicyMap.from_dict(rules.to_dict()),
        pickle.loads(pickle.dumps(rules)),
    ]
    for made in copies:
        assert [getattr(made, name) == getattr(rules, name) for name in FLAGS] == [True] * 3, made
    others = [getattr(rules, name) for name in FLAGS if name != changed]
    assert getattr(rules, changed) is value
    assert others == [name != "keep_module_dtypes" for name in FLAGS if name != changed]
    assert rules.to_dict()[changed] is value


def test_from_and_to_a_dict():
    rules = jmpp.PolicyMap("mixed_float16", {"a/**": "float32", nn.Dense: "p=f32,c=bf16"})
    settings = {
        "policy": "params=float32,compute=float16,output=float32",
        "rules": [
            ["a/**", "params=float32,compute=float32,output=float32"],
            ["flax.linen.linear:Dense", "params=float32,compute=bfloat16,output=bfloat16"],
        ],
    }
    assert rules.to_dict() == settings
    assert jmpp.PolicyMap.from_dict(settings) == rules
    assert jmpp.PolicyMap.from_dict({**settings, "rules": dict(settings["rules"])}) == rules
    assert jmpp.PolicyMap("float32").to_dict() == {"policy": str(F32)}


def test_a_recipe_leaves_the_rules_as_they_are():
    rules = jmpp.PolicyMap("mixed_bfloat16", {"a": "float32"})
    assert rules.with_recipe("fp8_current").default.recipe == "fp8_current"
    assert rules.with_recipe("fp8_current").overrides == rules.overrides


def test_unpickled_rules_hash_as_those_made_here():
    """Hashes of texts differ between processes: a hash that was pickled would not be found in a jit cache."""
    rules = jmpp.PolicyMap("mixed_float16", {"a": "float32"})
    pickled = pickle.dumps(rules)
    assert {rules: 1}[pickle.loads(pickled)] == 1
    assert b"hash" not in pickled


def test_bad_input():
    with pytest.raises(TypeError, match="path glob, a module class or a predicate"):
        jmpp.PolicyMap("float32", {3: "float32"})
    with pytest.raises(TypeError, match=r"must take \(path, module\)"):
        jmpp.PolicyMap("float32", {lambda path: True: "float32"})
    with pytest.raises(ValueError, match="Unknown policy 'flt32'"):
        jmpp.PolicyMap("float32", {"a": "flt32"})
    with pytest.raises(TypeError, match="mapping {pattern: policy} or a sequence"):
        jmpp.PolicyMap("float32", ["abc"])
    with pytest.raises(TypeError, match="mapping {pattern: policy} or a sequence"):
        jmpp.PolicyMap("float32", 3)


@pytest.mark.parametrize(
    "make", [lambda policy: policy, lambda policy: {"a": policy}], ids=["default", "rule"]
)
def test_policies_that_no_model_can_follow(make):
    """Of the default and of every rule."""

    def intercept(policy):
        made = make(policy)
        return jmpp.linen.intercept(jmpp.PolicyMap("float32", made) if isinstance(made, dict) else made)

    for dtypes in ("p=f32,c=float8_e4m3fn,o=f32", "p=float8_e5m2,c=f32,o=f32", "p=f32,c=f32,o=float8_e5m2"):
        with pytest.raises(ValueError, match="asks for float8_e.*holds nothing above"):
            intercept(dtypes)
    with pytest.raises(ValueError, match="asks for weight gradients in bfloat16"):
        intercept("p=f32,c=f16,o=f32,g=bf16")
    with pytest.raises(ValueError, match="asks for float32 gradients of float16 parameters"):
        intercept("p=f16,c=f16,o=f16,g=f32")
    for dtypes in ("p=f32,c=f16,o=f32,g=f16", "p=f16,c=f16,o=f16,g=f16", "p=f32,c=f16,o=f32,g=f32"):
        intercept(dtypes)


def test_an_unused_rule_is_told_with_the_nearest_paths():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.Dense(2, name="encoder")(nn.Dense(2, name="body")(x)))

    model = jmpp.wrap(Model(), jmpp.PolicyMap("float32", {"heads": "float16"}))
    with pytest.raises(
        ValueError, match=r"'heads' matches no module of Model\. The nearest paths are 'head'"
    ):
        model.init(jax.random.key(0), jnp.ones((1, 2)))


@pytest.mark.parametrize(
    ("pattern", "start", "path"),
    [
        ("a/b/c", "a", "b/c"),
        ("a/*/c", "a/b", "c"),
        ("**/c", "a/b", "x/c"),
        ("**/b/**", "a/b", "x/y"),
        ("a/**", "a", "x"),
        ("a/**/z", "a/b/c", "d/z"),
        ("**", "a/b", "c"),
        ("x/**", "a", "b"),
        ("a/b", "a/b", "c"),
        ("*/b", "a", "b"),
        ("b", "a", "b"),
    ],
)
def test_rules_for_a_part_of_a_model_match_as_in_the_whole(pattern, start, path):
    whole = jmpp.PolicyMap("float32", {pattern: "float16"})
    part = whole.relative_to(start, whole.resolve(start))
    assert part.resolve(path) == whole.resolve(f"{start}/{path}")


def test_a_predicate_of_a_part_is_asked_with_paths_of_the_whole():
    asked = []

    def predicate(path, module):
        asked.append(path)
        return module == "head"

    part = jmpp.PolicyMap("float32", {predicate: "float16", str: "bfloat16"}).relative_to(
        "a/b", jmpp.get_policy("float32")
    )
    assert part.resolve("c", "head") == jmpp.get_policy("float16")
    assert part.resolve("", "") == jmpp.get_policy("bfloat16")
    assert asked == ["a/b/c", "a/b"]
    assert part == jmpp.PolicyMap("float32", {predicate: "float16", str: "bfloat16"}).relative_to(
        "a/b", jmpp.get_policy("float32")
    )


def test_handing_on_in_compute_dtype():
    mixed = jmpp.get_policy("mixed_float16")
    part = jmpp.PolicyMap(mixed, {"a": mixed, "b": "mixed_bfloat16"}).without_output_cast(mixed)
    assert str(part.default) == "params=float32,compute=float16,output=float16"
    assert part.resolve("a") == part.default
    assert part.resolve("b") == jmpp.get_policy("mixed_bfloat16")


def test_many_double_stars_take_no_longer_than_one():
    path = "/".join("abcdefghijklmnopqrstuvwxyz")
    for stars in (1, 30, 300):
        rules = jmpp.PolicyMap("float32", {"**/" * stars + "zz": "float16", "**/" * stars + "z": "float64"})
        assert rules.resolve(path).compute_dtype == jnp.float64
        inside = rules.relative_to("a/b/c", rules.default)
        assert inside.resolve("x/z").compute_dtype == jnp.float64
        assert inside.resolve("x/zzz").compute_dtype == jnp.float32


NAMES = st.sampled_from(["a", "b", "ab"])
PARTS = st.sampled_from(["a", "b", "*", "a*", "**"])


@given(st.lists(PARTS, max_size=5), st.lists(NAMES, max_size=3), st.lists(NAMES, min_size=1, max_size=4))
def test_a_glob_matches_as_its_definition_says(parts, above, below):
    def by_definition(parts, names):
        if not parts:
            return not names
        if parts[0] == "**":
            return any(by_definition(parts[1:], names[i:]) for i in range(len(names) + 1))
        return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and by_definition(parts[1:], names[1:])

    glob = "/".join(parts)
    assert matches(glob, "/".join(above + below), None) == by_definition(parts, above + below)
    inside = any(matches(rest, "/".join(below), None) for rest in patterns_below(glob, "/".join(above)))
    assert inside == by_definition(parts, above + below)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.exp(nn.Dense(8, name="fc")(x))


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(Inner(name="inner")(x))

    def encode(self, x):
        return self(x)


class NNXOuter(nnx.Module):
    def __init__(self):
        self.inner = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
        self.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.head(self.inner(x))

    def encode(self, x):
        return self(x)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["__call__", "encode"])
@pytest.mark.parametrize("kind", [Outer, NNXOuter])
def test_every_path_that_a_report_prints_is_a_rule(kind, method):
    x = jnp.ones((2, 8))

    def products(rules):
        model = kind()
        if kind is NNXOuter:
            wrapped = jmpp.nnx.wrap(model, rules, methods=["encode"])
            return jmpp.audit(lambda m, x: getattr(m, method)(x), wrapped, x).products
        variables = model.init(jax.random.key(0), x)
        wrapped = jmpp.wrap(model, rules)
        jmpp.summary(model, rules, x)
        return jmpp.audit(lambda v, x: wrapped.apply(v, x, method=method), variables, x).products

    half = products("mixed_bfloat16")
    assert {p.path.partition("/")[0].partition(".")[0] for p in half} == {kind.__name__}
    for product in half:
        ruled = {p.path: p.lhs for p in products(jmpp.PolicyMap("mixed_bfloat16", {product.path: "float32"}))}
        assert ruled == {p.path: "float32" if p.path == product.path else "bfloat16" for p in half}
    # The name alone is the whole model.
    whole = jmpp.PolicyMap("mixed_bfloat16", {kind.__name__: "float32"})
    assert {p.lhs for p in products(whole)} == {"float32"}
