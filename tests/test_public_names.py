"""Every public name is used by a test of `make test-fast`."""

import ast
import importlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jmp_policy as jmpp
import jmp_policy.compat.jmp as jmp
from jmp_policy._src.report.lowering.compiler import is_installed

TESTS = Path(__file__).parent
MODULES = [
    "jmp_policy",
    *(f"jmp_policy.{name}" for name in ("linen", "nnx", "report", "optim", "compat.jmp")),
]
#: Where tests import public names from, when not from the public module.
SAME = {"jmp_policy._src.api.jmp_names": "jmp_policy.compat.jmp"}
LEFT_OUT = ("pytest.mark.slow", "pytest.mark.once", "pytest.mark.gpu")


def is_left_out(marks):
    return any(ast.unparse(mark).startswith(LEFT_OUT) for mark in marks)


def aliases(tree):
    """What the names that a file imports stand for: `jmpp` for `jmp_policy`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                found[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                found[name.asname or name.name] = SAME.get(whole, whole)
    return found


def definitions(tree):
    """The functions, classes and constants of a file, by name."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {t.id: node for t in node.targets if isinstance(t, ast.Name)}
    return found


def used(source):
    """The dotted names that a file's fast tests use, themselves and in what they call in that file."""
    tree = ast.parse(source)
    known, local = aliases(tree), definitions(tree)
    mark = local.get("pytestmark")
    if mark is not None and is_left_out([mark.value]):
        return set()
    waiting = [
        node
        for name, node in local.items()
        if name.startswith("test")
        and isinstance(node, ast.FunctionDef)
        and not is_left_out(node.decorator_list)
    ]
    seen, found = set(), set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        inside = known | aliases(node)
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute):
                first, _, rest = ast.unparse(part).partition(".")
                found.add(".".join([inside.get(first, first), *rest.split(".")]).rstrip("."))
                waiting += [local[first]] if first in local else []
            elif isinstance(part, ast.arg) and part.arg in local:
                waiting.append(local[part.arg])  # A fixture.
    return found


@pytest.fixture(scope="module")
def touched():
    return set().union(*(used(path.read_text()) for path in TESTS.glob("test_*.py")))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_used_by_a_fast_test(name, touched):
    module = importlib.import_module(name)
    public = [n for n in dir(module) if n[0] != "_" and not inspect.ismodule(getattr(module, n))]
    assert public
    # What stands in two modules is one object.
    names = {n: {f"{name}.{n}"} for n in public}
    for other in map(importlib.import_module, MODULES):
        for n in public:
            if vars(other).get(n) is vars(module)[n]:
                names[n].add(f"{other.__name__}.{n}")
    assert {n for n, all_names in names.items() if not all_names & touched} == set()


def test_what_counts_as_used():
    source = """
import jmp_policy as jmpp
from jmp_policy import nnx as ours
TABLE = [jmpp.StaticLossScale]
def helper(): jmpp.half()
@pytest.fixture
def policy(): return jmpp.get_policy("float32")
def test_one(policy): helper(); ours.wrap; TABLE
@pytest.mark.slow
def test_two(): jmpp.autocast
def never(): jmpp.audit
"""
    found = {name for name in used(source) if name.startswith("jmp_policy")}
    assert found == {
        "jmp_policy", "jmp_policy.StaticLossScale", "jmp_policy.half", "jmp_policy.get_policy",
        "jmp_policy.nnx", "jmp_policy.nnx.wrap",
    }  # fmt: skip
    assert used("import jmp_policy\npytestmark = pytest.mark.once\ndef test(): jmp_policy.half") == set()


# What no other fast test does: the types of what functions return, and a small use of each.


def loss_fn(w, x):
    return jnp.mean((x @ w) ** 2)


W, X = jnp.ones((3, 2)), jnp.ones((4, 3))


def test_what_explain_returns():
    found = jmpp.explain(loss_fn, "mixed_float16")(W, X)
    assert isinstance(found, jmpp.report.Explanation)
    assert isinstance(found.of("dot_general")[0], jmpp.report.Operation)


def rows_of(report):
    return {type(row) for value in vars(report).values() if isinstance(value, tuple) for row in value}


def test_what_an_audit_returns():
    def stored_in_half(w, x):
        logits = (x.astype(jnp.float16) @ w.astype(jnp.float16)) @ w.T.astype(jnp.float16)
        again = x.astype(jnp.float16).sum()
        return again + jnp.exp(logits).sum() + (logits * x).sum()

    found = jmpp.audit(stored_in_half, W, X)
    assert isinstance(found, jmpp.report.Audit)
    assert rows_of(found) == {
        jmpp.report.Product, jmpp.report.HalfOperation, jmpp.report.Upcast
    }  # fmt: skip


def test_what_other_reports_are():
    memory = jmpp.memory_report(loss_fn, W, X)
    assert isinstance(memory, jmpp.report.MemoryReport)
    assert jmpp.report.MemoryRow in rows_of(memory)
    model = jmpp.wrap(nn.Dense(2), "mixed_float16")
    summary = jmpp.summary(model, None, X)
    assert isinstance(summary, jmpp.report.Summary)
    assert jmpp.report.ModuleRow in rows_of(summary)
    spectrum = jmpp.gradient_spectrum(loss_fn, W, X)
    assert isinstance(spectrum, jmpp.report.GradientSpectrum)
    assert isinstance(spectrum.overall(), jmpp.report.Magnitudes)
    assert isinstance(spectrum.overall().float16, jmpp.report.Share)
    assert isinstance(jmpp.report.formats(1.0), jmpp.report.Formats)


def test_a_lowering_report_needs_the_compiler():
    if is_installed():
        pytest.skip("slow where it compiles; tests/test_lowering.py does")
    with pytest.raises(jmpp.report.LoweringUnavailableError, match="gpu"):
        jmpp.lowering_report(loss_fn, W, X)
    assert issubclass(jmpp.report.LoweringReport, type(jmpp.report.formats()).__mro__[1])


def test_what_a_diagnosis_says_of_operands():
    found = jmpp.diagnose(lambda w: jnp.log(w - 1).sum(), W)
    assert {type(operand) for operand in found.operands} == {jmpp.report.Operand}


def test_casts_of_jmp():
    assert jmp.cast_to_full(jmp.cast_to_half(X)).dtype == jnp.float32


def test_states_of_half_parameters():
    params = {"w": W.astype(jnp.float16)}
    kinds = {
        jmpp.master_weights: jmpp.optim.MasterWeightsState,
        jmpp.kahan_summation: jmpp.optim.KahanSummationState,
        jmpp.stochastic_rounding: jmpp.optim.StochasticRoundingState,
        jmpp.half_moments: jmpp.optim.HalfMomentsState,
    }
    for make, kind in kinds.items():
        assert isinstance(jax.eval_shape(make(optax.sgd(0.1)).init, params), kind)


def test_parts_of_models_under_rules_of_the_whole():
    rules = jmpp.PolicyMap("mixed_float16", {"elsewhere": "float32"})
    part = jmpp.linen.wrap_part(nn.Dense(2), rules)
    assert jmpp.linen.policy_of(part) == rules
    assert jmpp.linen.policy_of(nn.Dense(2)) is None
    assert jax.eval_shape(part.init_with_output, jax.random.key(0), X)[0].dtype == jnp.float32
    part, seen = jmpp.nnx.wrap_part(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), rules)
    assert len(seen) == 1
    assert nnx.eval_shape(lambda part: part(X), part).dtype == jnp.float32


def test_the_spectrum_of_an_nnx_step():
    def loss_of(model, x):
        return (model(x) ** 2).mean()

    @nnx.jit
    def step(model):
        state = jmpp.report.SpectrumState.create(model, loss_of, X)
        return jmpp.nnx.spectrum_value_and_grad(loss_of)(8.0, state, model, X)

    (_, grads), state = step(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    assert grads["kernel"].shape == (3, 2)
    assert state.report().tensors


def test_results_of_sensitivity_and_recommend_say_what_they_hold():
    row = jmpp.report.SensitivityRow("head", 0.5, 0.1)
    found = jmpp.report.Sensitivity("loss", "float16", 8.0, (row,))
    assert found.of("head") is row
    assert "head changes the gradient most" in found.verdict
    rule = jmpp.report.RecommendationRow("head", "float32", "2 values exceed the range of float16", 0.5)
    rules = jmpp.PolicyMap("mixed_float16", {"head": "float32"})
    made = jmpp.report.Recommendation(
        "loss", "float16", rules, jmpp.NoOpLossScale(), (rule,), 0.1, 0.05, 0.04, 0.9
    )
    assert "2 values exceed the range of float16" in str(made)
    assert jmpp.report.Kernel("gemm", "triton", flops=2).flops == 2
    assert jmpp.report.Estimate("float16", "as given", 1e-3, 2.0, "memory").speedup == 2.0
    zero = jmpp.report.Zero("exp", "Net/head", "net.py:41 (f)", False, "float16")
    assert zero.place == "Net/head (net.py:41)"
    assert jmpp.report.LostConstant.place is jmpp.report.Zero.place
