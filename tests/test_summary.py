"""`summary` against the parameters of `init` and the dtypes of an actual run."""

import dataclasses
import json

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import nnx_helpers
import numpy as np
import pytest
from flax import nnx
from helpers import paired

import jmp_policy as jmpp
from jmp_policy import PolicyMap, summary
from jmp_policy.linen import intercept

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(0)}


def floating(tree):
    leaves = [
        x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return {str(x.dtype) for x in leaves}


def nbytes(leaves):
    return sum(x.size * x.dtype.itemsize for x in leaves)


class Attention(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.MultiHeadDotProductAttention(2, dtype=self.dtype, dropout_rate=0.5)(x, deterministic=not train)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dropout(0.5)(x, deterministic=not train)


class WithSetup(nn.Module):
    """Submodules of `setup`, one that is called twice, one that is not, and a public method."""

    def setup(self):
        self.twice = nn.Dense(8)
        self.never = nn.Dense(5)
        self.gain = self.param("gain", nn.initializers.ones, (8,))

    def __call__(self, x):
        return self.scaled(self.twice(self.twice(x)))

    def scaled(self, x):
        return x * self.gain


CASES = [
    *helpers.CASES,
    helpers.Case("attention", Attention, helpers.vectors(2, 4, 8)),
    helpers.Case("setup", lambda dtype=None: WithSetup(), helpers.vectors(2, 8)),
    helpers.Case("dense", lambda dtype=None: nn.Dense(3, dtype=dtype), helpers.vectors(2, 3)),
]
POLICIES = {
    "mixed_float16": "mixed_float16",
    "bfloat16_params": "p=bf16,c=bf16,o=bf16",
    "rules": PolicyMap("mixed_bfloat16", {nn.Dense: "mixed_float16", "**/Dense_1": "float32"}),
}


def unused(case, policy):
    """Whether a rule of the policy matches nothing in the model of a case."""
    return policy == "rules" and case.name not in ("mlp", "encoder", "scanned_encoder")


LINEN = [(c, p) for c in CASES for p in POLICIES if not unused(c, p)]


def seen_by_interceptor(model, policy, x):
    """`{path: (received, returned)}` of a run, as a Flax interceptor sees it from outside; the parameters."""
    seen = {}

    def look(next_fun, args, kwargs, context):
        module, method = context.module, context.method_name
        out = next_fun(*args, **kwargs)
        if method == "setup" or not callable(getattr(type(module), method, None)):
            return out
        received, returned = seen.setdefault("/".join(module.path), (set(), set()))
        received |= floating((args, kwargs))
        returned |= floating(out)
        return out

    def run():
        variables = jmpp.wrap(model, policy).init(KEYS, x)
        with nn.intercept_methods(look), intercept(policy):
            model.apply(variables, x, mutable=True, rngs=KEYS)
        return variables["params"]

    # Operation by operation it takes ten times as long.
    return seen, jax.eval_shape(run)


@pytest.mark.once
@pytest.mark.parametrize(("case", "policy"), LINEN, ids=lambda value: str(value))
def test_linen_rows_are_what_a_run_does(case, policy):
    rules, x = POLICIES[policy], case.inputs()
    found = summary(case.make(), rules, x)
    seen, params = seen_by_interceptor(case.make(), rules, x)
    assert {row.path for row in found.modules} == set(seen)
    for row in found.modules:
        assert (set(row.receives), set(row.returns)) == seen[row.path], row.path
        assert row.calls >= 1
    leaves = jax.tree.leaves(params)
    assert found.parameters == sum(x.size for x in leaves)
    assert found.bytes == nbytes(leaves)
    assert sum(row.parameters for row in found.modules) == found.parameters
    # Each module's own: those whose name is one step below its path.
    for row in found.modules:
        inside = params
        for name in filter(None, row.path.split("/")):
            inside = inside.get(name, {})
        own = [x for x in inside.values() if not isinstance(x, dict)]
        if row.path != "" or case.name != "setup":
            assert (row.parameters, row.bytes) == (sum(x.size for x in own), nbytes(own)), row.path


@pytest.mark.once
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_the_same_for_wrapped_models_and_types_of_arrays(case):
    x = case.inputs()
    bare = summary(case.make(), "mixed_float16", x)
    assert summary(jmpp.wrap(case.make(), "mixed_float16"), None, x) == bare
    assert summary(jmpp.wrap(case.make(), "p=bf16,c=bf16,o=bf16"), "mixed_float16", x) == bare
    assert summary(case.make(), PolicyMap("mixed_float16"), jax.ShapeDtypeStruct(x.shape, x.dtype)) == bare


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_an_unused_dtype_field_is_no_wish(case):
    """Models hand their `dtype` on to their layers, and under a policy it is the policy's."""
    assert {row.note for row in summary(case.make(), "mixed_float16", case.inputs()).modules} == {""}


def test_setup_calls_and_own_parameters():
    found = summary(WithSetup(), "mixed_float16", jnp.ones((2, 8)))
    assert [row.path for row in found.modules] == ["", "twice"]
    assert found["twice"].calls == 2
    assert found["twice"].receives == ("float16",)
    assert (found["twice"].parameters, found[""].parameters) == (72, 8)


def test_rows_stand_in_the_order_of_calls_parents_first():
    found = summary(helpers.Encoder(), "mixed_float16", helpers.tokens())
    paths = [row.path for row in found.modules]
    assert paths[:3] == ["", "Embed_0", "EncoderLayer_0"]
    assert paths[-1] == "LayerNorm_0"
    for i, path in enumerate(paths):
        assert all(path.rpartition("/")[0] in paths[:i] for _ in [0] if path)


@pytest.mark.slow
def test_scanned_layers_have_the_parameters_of_all_trips():
    once = summary(helpers.Encoder(), "mixed_float16", helpers.tokens())
    scanned = summary(helpers.Encoder(lift="scan"), "mixed_float16", helpers.tokens())
    assert scanned.parameters == once.parameters
    row = scanned["ScanEncoderLayer_0/Dense_0"]
    assert row.parameters == 2 * once["EncoderLayer_0/Dense_0"].parameters
    assert row.type == "Dense"


# Which rule governs.


class Identity(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x


class Three(nn.Module):
    dtype: object = None
    inner: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first", dtype=self.inner)(x)
        x = Identity(name="id")(x)
        x = nn.LayerNorm(name="norm", dtype=self.dtype)(x)
        return nn.Dense(8, name="last", dtype=self.dtype)(x)


class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Three(name="b")(Three(name="a")(x))


X = jnp.ones((2, 8))


def rows(found):
    return {row.path: (row.rule, row.compute_dtype) for row in found.modules if row.path}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            {},
            {
                "first": ("default", "float16"),
                "norm": ("float32 island", "float32"),
                "id": ("default", "float16"),
            },
        ),
        ({"first": "float32"}, {"first": ("'first'", "float32"), "last": ("default", "float16")}),
        ({nn.Dense: "bfloat16"}, {"first": ("Dense", "bfloat16"), "last": ("Dense", "bfloat16")}),
        ({"norm": "float16"}, {"norm": ("'norm'", "float16"), "last": ("default", "float16")}),
        ({"*": "bfloat16"}, {"norm": ("float32 island", "float32"), "last": ("'*'", "bfloat16")}),
        (
            {"first": "float32", "*": "bfloat16"},
            {"first": ("'first'", "float32"), "last": ("'*'", "bfloat16")},
        ),
    ],
    ids=str,
)
def test_rules(rules, expected):
    found = summary(Three(), PolicyMap("mixed_float16", rules), X)
    assert {path: rows(found)[path] for path in expected} == expected
    by_default = {path for path, (rule, _) in rows(found).items() if rule == "default"}
    assert set(found.no_rule) == (by_default if rules else set())
    assert ("No rule reaches" in found.verdict) == bool(found.no_rule)
    nnx_found = summary(NnxThree(), PolicyMap("mixed_float16", _as_nnx(rules)), X)
    expected = {path: (rule.replace("Dense", "Linear"), dtype) for path, (rule, dtype) in expected.items()}
    assert {path: rows(nnx_found)[path] for path in expected} == expected


def _as_nnx(rules):
    return {nnx.Linear if key is nn.Dense else key: value for key, value in rules.items()}


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_rule_for_a_module_governs_those_below(kind):
    model = Outer() if kind == "linen" else NnxOuter()
    found = summary(model, PolicyMap("mixed_float16", {"a": "bfloat16", "a/last": "float32"}), X)
    assert rows(found)["a/first"] == ("'a'", "bfloat16")
    assert rows(found)["a/last"] == ("'a/last'", "float32")
    assert rows(found)["b/first"] == ("default", "float16")
    assert rows(found)["b/norm"] == ("float32 island", "float32")
    assert "a/first" not in found.no_rule
    assert "b/first" in found.no_rule


@pytest.mark.slow
def test_the_policys_dtypes():
    row = summary(Three(), "p=f32,c=bf16,o=f16", X)["last"]
    assert (row.param_dtype, row.compute_dtype, row.output_dtype) == ("float32", "bfloat16", "float16")
    assert row.type == "Dense"
    found = summary(Three(), "p=f16,c=f16,o=f32", X)
    norm = found["norm"]
    assert norm.compute_dtype == "float32"
    # The island's parameters are stored as the actual ones are.
    stored = jmpp.wrap(Three(), "p=f16,c=f16,o=f32").init(KEYS, X)["params"]
    assert found.bytes == sum(x.nbytes for x in jax.tree.leaves(stored))
    assert norm.bytes == sum(x.nbytes for x in jax.tree.leaves(stored["norm"]))


def test_float32_weight_gradients_are_shown():
    found = summary(Three(), PolicyMap("mixed_float16", {"last": "p=f32,c=f16,o=f32,g=f32"}), X)
    assert [row.grad_dtype for row in found.modules if row.path in ("first", "last")] == [None, "float32"]
    assert "f32/f16/f32 g=f32" in str(found)
    model = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
    assert summary(model, "p=f32,c=bf16,o=f32,g=f32", jnp.ones((1, 6)))[""].grad_dtype == "float32"


def test_bytes_as_used():
    found = summary(Three(), "mixed_float16", X)
    # Two Dense of 72 in half, a LayerNorm of 16 in float32.
    assert (found.parameters, found.bytes, found.compute_bytes) == (160, 640, 2 * 144 + 4 * 16)
    assert "160 parameters: 640 B stored, 352 B as used" in found.verdict


# dtypes that modules ask for themselves.


class NnxIdentity(nnx.Module):
    def __call__(self, x):
        return x


class NnxThree(nnx.Module):
    def __init__(self, dtype=None, inner=None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 8, dtype=inner, rngs=rngs)
        self.id = NnxIdentity()
        self.norm = nnx.LayerNorm(8, dtype=dtype, rngs=rngs)
        self.last = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.id(self.first(x))))


class NnxOuter(nnx.Module):
    def __init__(self):
        self.a, self.b = NnxThree(), NnxThree()

    def __call__(self, x):
        return self.b(self.a(x))


WISHES = [
    # (own dtype of `first`, keep_module_dtypes, what is said)
    (None, False, ""),
    (F16, False, ""),
    (BF16, False, "its dtype=bfloat16 is overruled"),
    (F32, False, "its dtype=float32 is overruled"),
    ("float32", False, "its dtype=float32 is overruled"),
    (BF16, True, "its dtype=bfloat16 is kept"),
    (None, True, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "kind"), paired([*WISHES] * 2, ["linen", "linen_wrapped", "nnx", "nnx_wrapped", "nnx"])
)
def test_wishes_that_are_overruled_or_kept(kind, wish):
    own, keep, note = wish
    rules = PolicyMap("mixed_float16", keep_module_dtypes=keep)
    model = Three(inner=own) if "linen" in kind else NnxThree(inner=own)
    if kind == "nnx_wrapped":
        # Of a wrapped model the first layer has another dtype by now.
        model = jmpp.wrap(model, "mixed_bfloat16")
    elif kind == "linen_wrapped":
        model = jmpp.wrap(model, "mixed_bfloat16")
    found = summary(model, rules, X)
    assert {row.path: row.note for row in found.modules if row.note} == ({"first": note} if note else {})
    kept = {F32: "float32", BF16: "bfloat16"}.get(own) if keep else None
    assert found["first"].compute_dtype == (kept or "float16")


def test_a_models_own_dtype_is_named_once():
    found = summary(Three(dtype=BF16), "mixed_float16", X)
    assert [row.path for row in found.modules if row.note] == [""]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_what_flax_fills_in_is_no_wish(policy):
    """`nnx.Embed` and `nnx.SimpleCell` say float32 where nobody did."""
    cell = nnx.RNN(nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0)))
    assert {row.note for row in summary(cell, policy, jnp.ones((2, 5, 3))).modules} == {""}
    embed = nnx.Embed(4, 2, rngs=nnx.Rngs(0))
    assert [row.note for row in summary(embed, policy, jnp.arange(3)).modules] == [""]


# NNX.


def seen_by_patches(model, policy, x, monkeypatch):
    """`{path: (received, returned)}` of a run, by replacing `__call__` of the modules' classes."""
    half = jmpp.wrap(jmpp.nnx.cast_params(nnx.clone(model), policy), policy)
    paths = {}
    seen, open_calls = {}, []

    def patched(call):
        def look(self, *args, **kwargs):
            if id(self) in open_calls or id(self) not in paths:
                return call(self, *args, **kwargs)
            open_calls.append(id(self))
            out = call(self, *args, **kwargs)
            open_calls.remove(id(self))
            received, returned = seen.setdefault(paths[id(self)], (set(), set()))
            received |= floating((args, kwargs))
            returned |= floating(out)
            return out

        return look

    for cls in {type(m) for _, m in nnx.iter_graph(half) if isinstance(m, nnx.Module) and callable(m)}:
        monkeypatch.setattr(cls, "__call__", patched(cls.__call__))
    graphdef, state = nnx.split(half)

    def run(state):
        merged = nnx.merge(graphdef, state)
        modules = [(path, m) for path, m in nnx.iter_graph(merged) if isinstance(m, nnx.Module)]
        paths.update((id(m), "/".join(map(str, path))) for path, m in modules)
        return merged(x)

    jax.eval_shape(run, state)
    return seen


@pytest.mark.once
@pytest.mark.parametrize(
    ("case", "policy"), paired(nnx_helpers.CASES, ["mixed_float16", "p=bf16,c=bf16,o=bf16"]), ids=str
)
def test_nnx_rows_are_what_a_run_does(case, policy, monkeypatch):
    model, x = case(), case.inputs()
    found = summary(model, policy, x)
    params = jax.tree.leaves(
        nnx.as_pure(nnx.state(jmpp.nnx.cast_params(nnx.clone(model), policy), nnx.Param))
    )
    assert found.parameters == sum(x.size for x in params)
    assert found.bytes == sum(x.nbytes for x in params)
    assert {row.note for row in found.modules} == {""}
    holders = {row.path for row in found.modules if row.type in ("List", "Dict")}
    seen = seen_by_patches(model, policy, x, monkeypatch)
    # Transforms call copies of the modules, which no patch knows.
    called = {"": seen[""]} if "scan" in case.name else seen
    assert set(called) <= {row.path for row in found.modules} - holders
    if called is seen and case.name != "lstm":
        assert set(called) == {row.path for row in found.modules} - holders
    assert all(row.calls for row in found.modules if row.path not in holders)
    for path, (received, returned) in called.items():
        assert (set(found[path].receives), set(found[path].returns)) == (received, returned), path


@pytest.mark.slow
@pytest.mark.parametrize("case", nnx_helpers.CASES, ids=repr)
def test_nnx_wrapped_models_are_the_same_and_none_is_changed(case):
    x = case.inputs()
    model = case()
    wrapped = jmpp.wrap(model, "mixed_bfloat16")
    before = nnx.as_pure(nnx.state(model))
    assert summary(wrapped, "mixed_float16", x) == summary(model, "mixed_float16", x)
    after = nnx.as_pure(nnx.state(model))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, after))
    assert nnx_helpers.stored(model) == {"float32"}


def test_nnx_modules_that_are_not_called():
    class Unused(nnx.Module):
        def __init__(self):
            self.used = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            self.spare = nnx.Linear(8, 2, dtype=BF16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.used(self.used(x))

    for model in (Unused(), jmpp.wrap(Unused(), "mixed_float16")):
        found = summary(model, "mixed_float16", X)
        assert found["spare"].note == "its dtype=bfloat16 is overruled, not called"
        assert (found["spare"].calls, found["spare"].receives, found["spare"].parameters) == (0, (), 18)
        assert (found["used"].calls, found["used"].note) == (2, "")


def test_nnx_parameters_in_lists_and_dicts_are_counted():
    found = summary(nnx_helpers.Raw(rngs=nnx.Rngs(0)), "mixed_float16", jnp.ones((2, 32)))
    assert found.parameters == 32 * 16 + 16 + 16 * 17 + 16
    assert found["parts"].type == "List"
    assert found["parts"].parameters == 16


# Functions.


def of_scopes(x, w):
    with jax.named_scope("encoder"):
        with jax.named_scope("in"):
            x = x @ w
        x = jnp.tanh(x)
    with jax.named_scope("head"):
        return jnp.exp(x @ w).sum()


def test_functions_by_their_named_scopes():
    found = summary(of_scopes, "mixed_float16", X, jnp.ones((8, 8)))
    assert [(row.path, row.type, row.rule) for row in found.modules] == [
        ("encoder/in", "scope", "default"), ("encoder", "scope", "default"), ("head", "scope", "default"),
    ]  # fmt: skip
    assert (found.model, found.parameters, found.bytes) == ("of_scopes", 0, 0)
    assert found["encoder/in"].returns == ("float16",)
    assert found["head"].returns == ("float32",)
    assert found["head"].note == "3 operations"


def test_rules_for_functions():
    rules = PolicyMap("mixed_float16", {"encoder": "float32"})
    found = summary(of_scopes, rules, X, jnp.ones((8, 8)))
    assert rows(found) == {
        "encoder/in": ("'encoder'", "float32"),
        "encoder": ("'encoder'", "float32"),
        "head": ("default", "float16"),
    }
    assert found.no_rule == ("head",)
    assert found["encoder/in"].receives == ("float32",)
    with pytest.raises(
        ValueError, match="The rule for 'decoder' matches no module of the function of_scopes"
    ):
        summary(of_scopes, PolicyMap("mixed_float16", {"decoder": "float32"}), X, jnp.ones((8, 8)))


def test_functions_without_scopes():
    found = summary(lambda x: jnp.exp(x).sum(), "bfloat16", X)
    (row,) = found.modules
    assert (row.path, row.type, row.compute_dtype) == ("", "<lambda>", "bfloat16")


# Arguments.


def test_static_and_keyword_arguments():
    found = summary(Attention(), "mixed_float16", jnp.ones((2, 4, 8)), train=True)
    assert found["RMSNorm_0"].rule == "float32 island"
    assert found == summary(Attention(), "mixed_float16", jnp.ones((2, 4, 8)), True)


def test_nothing_runs():
    class Careful(nn.Module):
        @nn.compact
        def __call__(self, x):
            assert isinstance(x, jax.core.Tracer)
            return nn.Dense(2)(x)

    huge = jax.ShapeDtypeStruct((10**7, 10**6), jnp.float32)
    found = summary(Careful(), "mixed_float16", huge)
    assert found.parameters == 2 * 10**6 + 2


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((Three(), None, X), TypeError, "summary needs a policy for a bare module"),
        (
            (Three, "mixed_float16", X),
            TypeError,
            r"takes a module, not its class: summary\(Three\(...\), ...\)",
        ),
        ((NnxThree, "mixed_float16", X), TypeError, r"not its class: summary\(NnxThree"),
        ((3, "mixed_float16", X), TypeError, "summary takes a module or a function, got 3"),
        ((Three(), "mixed_float61", X), ValueError, "mixed_float61"),
        ((Three(), {"first": "float32"}, X), TypeError, "polic"),
        (
            (Three(), PolicyMap("float32", {"frist": "float16"}), X),
            ValueError,
            "'frist' matches no module of Three",
        ),
    ],
)
def test_mistakes(args, error, message):
    with pytest.raises(error, match=message):
        summary(*args)


def test_mistakes_of_nnx():
    with pytest.raises(TypeError, match=r"a policy for it: summary\(tanh, .* or --policy mixed_float16"):
        jmpp.summary(jnp.tanh, None, jnp.ones(3))
    with pytest.raises(TypeError, match="summary needs a policy for an NNX module"):
        summary(NnxThree(), None, X)
    with pytest.raises(TypeError, match="takes a policy before the inputs"):
        summary(jmpp.wrap(NnxThree(), "mixed_float16"), X)
    with pytest.raises(ValueError, match="'frist' matches no module of NnxThree"):
        summary(NnxThree(), PolicyMap("float32", {"frist": "float16"}), X)


def test_a_wrapped_nnx_model_has_its_policy():
    rules = PolicyMap("mixed_float16", {"id": "float32"})
    model = jmpp.wrap(NnxThree(), rules)
    expected = summary(NnxThree(), rules, X)
    for one in (model, nnx.merge(*nnx.split(model))):
        assert summary(one, None, X).modules == expected.modules


# As a report.


FOUND = summary(Three(inner=BF16), PolicyMap("mixed_float16", {"id": "float32"}), X)


def test_as_text():
    text = " ".join(str(FOUND).split())
    assert str(FOUND).startswith("Three under PolicyMap(")
    assert "first Dense default f32/f16/f32 72 288 B f32 -> f16 its dtype=bfloat16 is overruled" in text
    assert "norm LayerNorm float32 island f32/f32/f16 16 64 B" in text
    assert "id Identity 'id' f32/f32/f32 0 0 B f16 -> f32" in text
    assert text.endswith(" ".join(FOUND.verdict.split()))
    assert "5 modules, 160 parameters: 640 B stored" in FOUND.verdict
    assert "No rule reaches 'first', 'last': the default governs." in FOUND.verdict
    assert max(map(len, str(FOUND).splitlines())) <= 120


def test_as_data():
    data = json.loads(json.dumps(FOUND.to_dict()))
    assert set(data) == {f.name for f in dataclasses.fields(FOUND)} | {"verdict"}
    assert data["modules"][1]["path"] == "first"
    assert data["modules"][1]["receives"] == ["float32"]
    assert data["no_rule"] == ["first", "last"]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        FOUND.model = ""


def test_rows_by_path():
    assert FOUND["first"] is FOUND.modules[1]
    assert FOUND[""].type == "Three"
    known = "There is no module 'frist'; there are .*'first', 'id', 'norm', 'last'"
    with pytest.raises(KeyError, match=known):
        FOUND["frist"]


def test_as_html_is_escaped():
    row = dataclasses.replace(FOUND.modules[1], path="<b>", note="a & b")
    html = dataclasses.replace(FOUND, modules=(row,), model="<i>")._repr_html_()
    assert "<b>" not in html
    assert "<i>" not in html
    assert "&lt;b&gt;" in html
    assert "a &amp; b" in html
    assert (
        np.array(
            [html.count(f"<{tag}") - html.count(f"</{tag}") for tag in ("table", "tr", "td", "p>")]
        ).any()
        == 0
    )


def test_a_summary_leaks_no_tracers():
    with jax.checking_leaks():
        again = summary(Three(inner=BF16), PolicyMap("mixed_float16", {"id": "float32"}), X)
    assert [row.path for row in again.modules] == [row.path for row in FOUND.modules]


def test_an_nnx_module_inside_a_linen_model_is_in_the_row_of_its_bridge():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.layer(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="out")(nnx.bridge.ToLinen(Block, name="block")(x))

    found = summary(Model(), PolicyMap("mixed_float16", {"block": "float32"}), jnp.ones((2, 8)))
    assert [(row.path, row.type) for row in found.modules] == [
        ("", "Model"),
        ("block", "ToLinen"),
        ("out", "Dense"),
    ]
    bridge = found["block"]
    assert (bridge.parameters, bridge.compute_dtype, bridge.returns) == (8 * 8 + 8, "float32", ("float32",))
    assert found.parameters == 72 + 36
