"""`PolicyMap`: matching, inheritance, what is unused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmp_policy as jmpp

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
    rules = jmpp.PolicyMap("mixed_float16", [("a/b", "bfloat16"), ("a", "float32")])
    assert str(rules.resolve("a/b/c").compute_dtype) == "bfloat16"
    assert rules.resolve("a/c/b") == F32


def test_classes_and_predicates():
    rules = jmpp.PolicyMap("mixed_float16", {int: "float32", lambda p, m: p == "x": "bfloat16"})
    assert rules.resolve("a", 3) == F32
    assert rules.resolve("a", "text") == rules.default
    assert str(rules.resolve("x", "text").compute_dtype) == "bfloat16"
    assert rules.resolve("a/b", "text", ancestors=[("a", 3)]) == F32
    assert rules.unused([("a", 3)]) == (rules.overrides[1][0],)
    assert rules.unused([("a", 3), ("x", "")]) == ()
    assert len(rules.unused([])) == 2


def test_value_semantics():
    make = lambda: jmpp.PolicyMap("mixed_float16", {"a": "float32"})  # noqa: E731
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != jmpp.PolicyMap("mixed_float16", {"a": "float32"}, float32_islands=False)
    assert make() != "mixed_float16"
    text = repr(jmpp.PolicyMap("mixed_float16", {int: "float32"}, keep_module_dtypes=True))
    assert "int: 'params=float32" in text
    assert "keep_module_dtypes=True" in text


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
