"""Modules that a module runs by `apply`, such as a head with the weights of the embedding."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import paired, products
from jax import lax

import jmp_policy as jmpp
from jmp_policy._src.flax.linen.framework import FRAMEWORK
from jmp_policy._src.policy.frameworks import looking
from jmp_policy._src.report import tapping

F32, F16, BF16 = "float32", "float16", "bfloat16"
TOKENS = jnp.arange(6).reshape(2, 3)


class Head(nn.Module):
    """Vocabulary product with the table of the embedding, as in Hugging Face's language models."""

    def setup(self):
        self.norm = nn.LayerNorm()
        self.decoder = nn.Dense(8, use_bias=False)

    def __call__(self, x, table):
        return self.decoder.apply({"params": {"kernel": table.T}}, self.norm(x))


class Embedding(nn.Module):
    def setup(self):
        self.embed = nn.Embed(8, 8)

    def __call__(self, x):
        return self.embed(x)


class LanguageModel(nn.Module):
    head: type = Head

    def setup(self):
        self.embedding = Embedding()
        self.layer = nn.Dense(8)
        self.cls = self.head()

    def __call__(self, x):
        x = self.layer(self.embedding(x))
        return self.cls(x, self.embedding.variables["params"]["embed"]["embedding"])


class Inline(nn.Module):
    """Makes the module that it runs on the spot."""

    @nn.compact
    def __call__(self, x, table):
        return nn.Dense(8, use_bias=False).apply({"params": {"kernel": table.T}}, x)


class Detached(nn.Module):
    """Runs a module without a parent, which has no name."""

    @nn.compact
    def __call__(self, x, table):
        return nn.Dense(8, use_bias=False, parent=None).apply({"params": {"kernel": table.T}}, x)


class Deep(nn.Module):
    """Runs a module that runs one."""

    @nn.compact
    def __call__(self, x, table):
        return Inline(name="inner").apply({}, x, table)


class Lifted(nn.Module):
    """Runs a module in a function that a transform lifts."""

    @nn.compact
    def __call__(self, x, table):
        dense = nn.Dense(8, use_bias=False, parent=None, name="dense")
        return nn.remat(lambda _, x: dense.apply({"params": {"kernel": table.T}}, x))(self, x)


class Scanned(nn.Module):
    """Runs a module in a loop of JAX's own: a carry keeps its dtype."""

    @nn.compact
    def __call__(self, x, table):
        def body(carry, row):
            out = nn.Dense(8, use_bias=False, parent=None, name="dense").apply(
                {"params": {"kernel": table.T}}, row
            )
            return carry, out

        return lax.scan(body, jnp.zeros((), x.dtype), x)[1]


class Functional(nn.Module):
    """Keeps what another module's `init` gives as a parameter of its own."""

    @nn.compact
    def __call__(self, x, table):
        net = nn.Dense(8, parent=None, name="net")
        params = self.param("net", lambda key: net.init(key, x)["params"])
        return net.apply({"params": params}, x)


def abstract(model, tokens=TOKENS):
    return jax.eval_shape(model.init, jax.random.key(0), tokens)


def products_of(model, tokens=TOKENS):
    """Products of a wrapped model's forward pass, by dtype; and the dtypes of its parameters."""
    variables = abstract(model, tokens)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {F32}
    return {
        lhs: count for (_, lhs, rhs), count in products(lambda v: model.apply(v, tokens), variables).items()
    }


PATHS = {
    Head: "cls/decoder",
    Inline: "cls/Dense_0",
    Detached: "cls/Dense",
    Deep: "cls/inner/Dense_0",
    Lifted: "cls/dense",
    Scanned: "cls/dense",
    Functional: "cls/net",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "rule"), paired(2 * [*PATHS], ["cls", "path", "**/last", "class of the head"])
)
def test_rules_govern_what_a_module_runs_by_apply(head, rule):
    last = PATHS[head].rpartition("/")[2]
    pattern = {"path": PATHS[head], "**/last": f"**/{last}", "class of the head": head}.get(rule, rule)
    rules = jmpp.PolicyMap("mixed_float16", {"layer": "mixed_float16", pattern: F32})
    assert products_of(jmpp.wrap(LanguageModel(head), rules)) == {F16: 1, F32: 1}


@pytest.mark.slow
@pytest.mark.parametrize("head", PATHS)
def test_without_a_rule_of_its_own_it_has_the_policy_around_it(head):
    assert products_of(jmpp.wrap(LanguageModel(head), "mixed_float16")) == {F16: 2}
    rules = jmpp.PolicyMap(F32, {LanguageModel: "mixed_float16", PATHS[head]: "mixed_bfloat16"})
    assert products_of(jmpp.wrap(LanguageModel(head), rules)) == {F16: 1, BF16: 1}
    assert products_of(jmpp.wrap(LanguageModel(head), "c=f16,o=f32,g=f32")) == {F16: 2}
    rules = jmpp.PolicyMap("mixed_float16", {PATHS[head]: "c=bf16,o=f32,g=f32"})
    assert products_of(jmpp.wrap(LanguageModel(head), rules)) == {F16: 1, BF16: 1}


class InScan(nn.Module):
    head: type = Head

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            nn.remat(Body),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            in_axes=nn.broadcast,
        )
        return scan(self.head, name="layers")(nn.Embed(8, 8)(x), x)[0]


class Body(nn.Module):
    head: type

    @nn.compact
    def __call__(self, x, tokens):
        embed = nn.Embed(8, 8)
        x = x + embed(tokens)
        out = self.head(name="cls")(nn.Dense(8)(x), embed.embedding)
        return x + out[..., :8].astype(x.dtype), None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "rule"), [(Head, "layers/cls"), (Deep, "path"), (Functional, Body), (Functional, "path")]
)
def test_inside_a_scan(head, rule):
    pattern = f"layers/{PATHS[head]}" if rule == "path" else rule
    model = jmpp.wrap(InScan(head), jmpp.PolicyMap("mixed_float16", {pattern: F32}))
    assert products_of(model) == ({F32: 2} if rule is Body else {F16: 1, F32: 1})


def test_root_module_that_runs_others():
    class Root(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = self.param("table", nn.initializers.normal(), (8, 8))
            return nn.remat(Inline)(name="a")(x, table) + Inline(parent=None).apply({}, x, table)

    x = jnp.ones((2, 8))
    for rule, want in ({"a": {F32: 1, F16: 1}, "Inline": {F32: 1, F16: 1}, "**/Dense_0": {F32: 2}}).items():
        assert products_of(jmpp.wrap(Root(), jmpp.PolicyMap("mixed_float16", {rule: F32})), x) == want


def test_a_copy_of_the_running_module_is_governed_as_it_is():
    class Teacher(nn.Module):
        depth: int = 0

        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8)(x)
            if self.depth == 1 or self.is_initializing():
                return y
            return y + self.clone(parent=None, depth=1).apply(self.variables, x)

    for rule in ("Dense_0", Teacher, nn.Dense):
        model = jmpp.wrap(Teacher(), jmpp.PolicyMap("mixed_float16", {rule: F32}))
        assert products_of(model, jnp.ones((2, 8))) == {F32: 2}


def test_a_policy_inside_counts_paths_from_where_it_begins():
    rules = jmpp.PolicyMap(F32, {"decoder": BF16})

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x, table):
            with jmpp.linen.intercept(rules):
                return nn.Dense(8, use_bias=False, name="decoder").apply({"params": {"kernel": table.T}}, x)

    class Wrapped(nn.Module):
        @nn.compact
        def __call__(self, x, table):
            inner = jmpp.wrap(Inline(parent=None), jmpp.PolicyMap(F32, {"Dense_0": BF16}))
            return inner.apply({}, x, table)

    class Decorated(nn.Module):
        @jmpp.linen.intercept(rules)
        @nn.compact
        def __call__(self, x, table):
            return nn.Dense(8, use_bias=False, name="decoder").apply({"params": {"kernel": table.T}}, x)

    for head in (Own, Wrapped, Decorated):
        assert products_of(jmpp.wrap(LanguageModel(head), "mixed_float16")) == {F16: 1, BF16: 1}


def test_equal_rules_inside_are_their_own():
    rules = jmpp.PolicyMap("mixed_float16", {"cls": F32})

    class Student(nn.Module):
        @nn.compact
        def __call__(self, x):
            teacher = jmpp.wrap(LanguageModel(parent=None), rules)
            params = self.param("teacher", lambda key: teacher.init(key, x)["params"])
            return LanguageModel(name="cls")(x) + teacher.apply({"params": params}, x)

    assert products_of(jmpp.wrap(Student(), rules)) == {F16: 1, F32: 3}


def test_rules_that_match_nothing_are_told_the_paths_there_are():
    model = jmpp.wrap(LanguageModel(), jmpp.PolicyMap("mixed_float16", {"cls/dekoder": F32}))
    with pytest.raises(ValueError, match="nearest paths are 'cls/decoder'"):
        jax.eval_shape(model.init, jax.random.key(0), TOKENS)


def test_reports_name_it_by_its_whole_path():
    model = LanguageModel(Deep)
    variables = abstract(model)
    shown = jmpp.summary(model, jmpp.PolicyMap("mixed_float16", {"cls": F32}), TOKENS)
    rows = {row.path: (row.rule, row.compute_dtype) for row in shown.modules}
    assert rows["cls/inner/Dense_0"] == rows["cls/inner"] == rows["cls"] == ("'cls'", F32)
    assert rows[""] == ("default", F16)
    assert sum(row.parameters for row in shown.modules) == sum(x.size for x in jax.tree.leaves(variables))
    for one in (model, jmpp.wrap(model, "mixed_float16")):
        with FRAMEWORK.tapped(), looking(tapping.Calls()) as met:
            jax.eval_shape(one.apply, variables, TOKENS)
        names = [call.name for call, _ in met.calls]
        assert names.index("LanguageModel/cls/inner/Dense_0") == names.index("LanguageModel/cls/inner") - 1
        assert all(name.startswith("LanguageModel") for name in names)
    found = jmpp.audit(
        jmpp.wrap(model, jmpp.PolicyMap("mixed_float16", {"cls": F32})).apply, variables, TOKENS
    )
    assert [p.lhs for p in found.products] == [F16, F32]


def test_autocast_marks_it_by_the_rules_of_its_caller():
    model = LanguageModel()
    variables = abstract(model)
    for rule in ("cls", "cls/decoder"):
        rules = jmpp.PolicyMap("mixed_float16", {rule: F32}, keep_small_inputs=False)
        found = products(jmpp.autocast(model.apply, rules), variables, TOKENS)
        assert {lhs: n for (_, lhs, _), n in found.items()} == {F16: 1, F32: 1}


def test_a_wrapped_module_casts_the_variables_that_it_is_handed():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(8)(x)
            if self.is_initializing():
                return y
            inner = {"params": self.variables["params"]["Dense_0"]}
            return jmpp.wrap(nn.Dense(8, parent=None), "mixed_bfloat16").apply(inner, x)

    # Warnings are errors: reading parameters that nobody casts is one.
    assert products_of(jmpp.wrap(Outer(), "mixed_float16"), jnp.ones((2, 8))) == {F16: 1, BF16: 1}
