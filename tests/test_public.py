"""Pickles, reprs and trees of public objects name the module that users import from, and never `_src`."""

import ast
import importlib
import inspect
import json
import os
import pickle
import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_policy as jmpp
from jmp_policy import report
from jmp_policy._src.core.report_base import Table
from jmp_policy.compat import jmp

MODULES = ["jmp_policy", *(f"jmp_policy.{m}" for m in ("linen", "nnx", "report", "optim", "compat.jmp"))]

PARAMS = {"body": {"kernel": jnp.ones((3, 3))}, "head": {"kernel": jnp.ones((3, 2))}}
HALF = jax.tree.map(lambda x: x.astype(jnp.float16), PARAMS)
X = jnp.ones((4, 3))


def public_names(module):
    """What users can import from a module, by name; modules left out."""
    loaded = importlib.import_module(module)
    names = {n: getattr(loaded, n) for n in dir(loaded) if not n.startswith("_")}
    return {n: v for n, v in names.items() if not inspect.ismodule(v)}


def at_the_head(path, module):
    """A predicate, which pickle finds by its name."""
    return path == "head"


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, name="head")(nn.LayerNorm()(nn.Dense(3, name="body")(x)))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(3, 4, rngs=rngs)
        self.conv = nnx.Conv(4, 4, (1,), rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.attention(self.norm(self.conv(self.body(x)))))


def loss_fn(params, x):
    half = (x @ params["body"]["kernel"]).astype(jnp.float16)
    hidden = jmpp.report.tap(jnp.tanh(half), "hidden").astype(jnp.float32)
    return jnp.mean(hidden @ params["head"]["kernel"])


def overflowing(params, x):
    return jnp.mean(jnp.exp((100 * x).astype(jnp.float16)) @ params["head"]["kernel"].astype(jnp.float16))


def rules():
    return jmpp.PolicyMap(
        "mixed_float16", {at_the_head: "float32", nn.Dense: "p=f32,c=bf16,o=f32", "**": "float32"}
    )


def scaled(inner=None, scale=None, **options):
    return jmpp.loss_scaled(inner or optax.adam(1e-3), scale or jmpp.DynamicLossScale(), **options)


def scaled_sgd(learning_rate):
    return scaled(optax.sgd(learning_rate))


def losses():
    return {"generator": jmpp.DynamicLossScale(), "critic": jmpp.StatisticLossScale()}


def wrapped_linen():
    return jmpp.wrap(LinenNet(), jmpp.PolicyMap("mixed_float16", {"head": "float32"}))


def wrapped_nnx(policy="p=f32,c=f16,o=f32,g=f32"):
    return jmpp.wrap(NNXNet(nnx.Rngs(0)), jmpp.PolicyMap(policy, {"head": "float32"}))


def lowering():
    kernel = report.Kernel("gemm", "triton", operands="float16 x float16", flops=2)
    estimate = report.Estimate("float16", "as given", 1e-3, 2.0, "memory")
    return jmpp.report.LoweringReport("step", "H100", 1, (kernel,), 1, 2, 3, (estimate,), None, (), "verdict")


#: What users make or get, by name.
OBJECTS = {
    "Policy": lambda: jmpp.Policy("float32", "float16", "float32", "float32"),
    "PolicyMap": rules,
    "Precision": lambda: jmpp.Precision(rules(), {"critic": "dynamic", "actor": 8.0}),
    "PolicyMap of a part": lambda: rules().relative_to("body", jmpp.get_policy("float16")),
    "Advice": lambda: jmpp.report.Advice((jmpp.report.Change("", "found", "do"),)),
    "NoOpLossScale": jmpp.NoOpLossScale,
    "StaticLossScale": lambda: jmpp.StaticLossScale(8.0),
    "DynamicLossScale": jmpp.DynamicLossScale,
    "StatisticLossScale": jmpp.StatisticLossScale,
    "PIDLossScale": jmpp.PIDLossScale,
    "LossScales": lambda: scaled(scale=losses()).init(PARAMS).loss_scale,
    "jmp.NoOpLossScale": jmp.NoOpLossScale,
    "jmp.StaticLossScale": lambda: jmp.StaticLossScale(8.0),
    "jmp.DynamicLossScale": lambda: jmp.DynamicLossScale(jnp.float32(8.0)),
    "LossScaledState": lambda: scaled().init(PARAMS),
    "LossScaledState, monitored": lambda: scaled(monitor=True).init(PARAMS),
    "LossScaledState of several": lambda: scaled(scale=losses(), monitor=True).init(PARAMS),
    "MasterWeightsState": lambda: jmpp.master_weights(scaled(), stochastic_rounding=True).init(HALF),
    "KahanSummationState": lambda: jmpp.kahan_summation(scaled()).init(HALF),
    "HalfMomentsState": lambda: jmpp.half_moments(scaled()).init(PARAMS),
    "StochasticRoundingState": lambda: jmpp.stochastic_rounding(scaled()).init(HALF),
    "chain": lambda: optax.chain(optax.clip(1.0), scaled()).init(PARAMS),
    "MultiSteps": lambda: optax.MultiSteps(scaled(), 2).init(PARAMS),
    "inject_hyperparams": lambda: optax.inject_hyperparams(scaled_sgd)(learning_rate=0.1).init(PARAMS),
    "SpectrumState": lambda: jmpp.report.SpectrumState.create(PARAMS, loss_fn, X),
    "MetricsLogger": lambda: jmpp.MetricsLogger(print, every=2),
    "LossScaleStuckError": lambda: jmpp.LossScaleStuckError("stuck"),
    "LoweringUnavailableError": lambda: jmpp.report.LoweringUnavailableError("no compiler"),
    "Summary": lambda: jmpp.summary(LinenNet(), "mixed_float16", X),
    "Summary of NNX": lambda: jmpp.summary(NNXNet(nnx.Rngs(0)), "mixed_float16", X),
    "Audit": lambda: jmpp.audit(jax.grad(loss_fn), PARAMS, X),
    "Diagnosis": lambda: jmpp.diagnose(overflowing, PARAMS, X),
    "Drift": lambda: jmpp.drift(jmpp.autocast(loss_fn, "bfloat16"), PARAMS, X),
    "GradientSpectrum": lambda: jmpp.gradient_spectrum(loss_fn, PARAMS, X),
    "Sensitivity": lambda: jmpp.sensitivity(loss_fn, PARAMS, X),
    "Recommendation": lambda: jmpp.recommend(loss_fn, PARAMS, X),
    "MemoryReport": lambda: jmpp.memory_report(jax.grad(loss_fn), PARAMS, X),
    "LoweringReport": lowering,
    "Explanation": lambda: jmpp.explain(loss_fn, "float16")(PARAMS, X),
    "Formats": lambda: report.formats(1.0, 0.1),
    "HalfOperation": lambda: report.HalfOperation(*("",) * len(report.HalfOperation.__dataclass_fields__)),
    "LostConstant": lambda: report.LostConstant(*("",) * len(report.LostConstant.__dataclass_fields__)),
    "Tried": lambda: report.Tried({"head": "float32"}, jmpp.PolicyMap("mixed_float16"), 0.0),
    "Zero": lambda: report.Zero(*("",) * len(report.Zero.__dataclass_fields__)),
    "Upcast": lambda: report.Upcast(*("",) * len(report.Upcast.__dataclass_fields__)),
    "intercept": lambda: jmpp.linen.intercept("mixed_float16"),
    "Linen module": wrapped_linen,
    "NNX module": wrapped_nnx,
    "NNX module in bfloat16": lambda: wrapped_nnx("mixed_bfloat16"),
    "NNX graph definition": lambda: nnx.graphdef(wrapped_nnx()),
    "NNX state": lambda: nnx.state(wrapped_nnx()),
}  # fmt: skip


def names_a_file(text):
    return "jmp_policy._src" in str(text)


def shown(value):
    """What a value looks like, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def equal(a, b):
    """Equal in class, structure, look, and in the bits of every array."""
    assert type(a) is type(b)
    assert shown(a) == shown(b)
    assert jax.tree.structure(a) == jax.tree.structure(b) or isinstance(a, jmp.LossScale | jmpp.PolicyMap)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(x, jax.Array | np.ndarray):
            np.testing.assert_array_equal(x, y)
    return True


@pytest.mark.parametrize("module", MODULES)
def test_public_objects_name_the_module_that_they_are_imported_from(module):
    for name, value in public_names(module).items():
        if not isinstance(value, types.UnionType):  # Which has no name.
            assert value.__module__ in MODULES, name
            assert getattr(importlib.import_module(value.__module__), name) is value
            assert value.__name__ == value.__qualname__ == name
        pickled = pickle.dumps(value)
        assert pickle.loads(pickled) == value
        assert not names_a_file(pickled)
        assert not names_a_file(repr(value))


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_pickle_by_public_names(name):
    value = OBJECTS[name]()
    pickled = pickle.dumps(value)
    assert not names_a_file(pickled)
    assert equal(pickle.loads(pickled), value)
    for text in (repr(value), str(value), repr(type(value)), str(jax.tree.structure(value))):
        assert not names_a_file(text)


def test_a_private_class_is_found():
    assert names_a_file(pickle.dumps(Table(("a",), ())))
    assert names_a_file(repr(Table))


@pytest.mark.slow
def test_every_public_class_is_among_these_objects():
    pickled = b"".join(pickle.dumps(make()) for make in OBJECTS.values())
    classes = {n for module in MODULES for n, v in public_names(module).items() if inspect.isclass(v)}
    without = {name for name in classes if not re.search(rf"\b{name}\b".encode(), pickled)}
    # A protocol, and what holds optax's functions, which pickle does not know.
    assert without == {"LossScale", "TrainState", "Optimizer"}


#: Runs in a process of its own, which imports no more of the library than users do.
SCRIPT = """
import json, pickle, sys
from flax import nnx
import jmp_policy

class Net(nnx.Module):
    def __init__(self):
        self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)

assert "jmp_policy.nnx" not in sys.modules
assert b"jmp_policy._src" not in pickle.dumps(jmp_policy.wrap(Net(), "mixed_float16"))

from test_public import shown

with open(sys.argv[1], "rb") as file:
    objects = pickle.load(file)
json.dump({name: shown(value) for name, value in objects.items()}, sys.stdout)
"""


@pytest.mark.once
def test_pickles_load_in_another_process(tmp_path):
    objects = {name: make() for name, make in OBJECTS.items()}
    path = tmp_path / "objects.pickle"
    path.write_bytes(pickle.dumps(objects))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: shown(value) for name, value in objects.items()}


#: Trains one step in each of the three ways; runs in a process of its own.
STEPS = """
import sys, flax.linen, jax, jax.numpy as jnp, optax
from flax import nnx
import jmp_policy
from jmp_policy import report
from jmp_policy.report import tap

jax.make_user_context = None  # After a new one JAX would trace and compile every function again.

def update(tx, loss_of, state, params, x):
    loss, grads = jmp_policy.scaled_value_and_grad(loss_of)(state, params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

x = jnp.ones((2, 3))
tx = jmp_policy.loss_scaled(optax.adam(0.1), jmp_policy.DynamicLossScale())
model = jmp_policy.wrap(flax.linen.Dense(4), "mixed_float16")
params = model.init(jax.random.key(0), x)
_, state = update(tx, lambda p, x: tap(model.apply(p, x), "out").mean(), tx.init(params), params, x)
jmp_policy.check(state)

policy = "params=float32, compute=float16, output=float32, grad=float32"
net = jmp_policy.wrap(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), policy)
optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
loss, grads = jmp_policy.nnx.scaled_value_and_grad(lambda net, x: net(x).mean())(optimizer, net, x)
optimizer.update(net, grads)

cast = jmp_policy.autocast(lambda w, x: jnp.tanh(x @ w).mean(), "float16")
update(tx, cast, tx.init(jnp.ones((3, 2))), jnp.ones((3, 2)), x)
assert not [name for name in sys.modules if name.startswith("jmp_policy._src.report")]
assert report.formats(1.0) and [name for name in sys.modules if name.startswith("jmp_policy._src.report")]
"""


@pytest.mark.once
def test_training_loads_no_report():
    subprocess.run([sys.executable, "-c", STEPS], check=True)


#: Asks for names before anything was loaded, in the ways that Python has.
NAMES = """
import inspect, sys
import jmp_policy
assert "jmp_policy._src.report" not in sys.modules
assert not hasattr(jmp_policy, "no_name") and not hasattr(jmp_policy, "Product")
assert not hasattr(jmp_policy.report, "__wrapped__")
assert "jmp_policy._src.report" not in sys.modules
from jmp_policy import audit
from jmp_policy.report import Product
assert audit is jmp_policy.report.audit and not hasattr(jmp_policy, "Product")
assert (audit.__module__, Product.__module__) == ("jmp_policy", "jmp_policy.report")
assert {"audit", "wrap", "report"} < set(dir(jmp_policy)) and "Product" in dir(jmp_policy.report)
assert "spectrum_value_and_grad" in dir(jmp_policy.nnx)
assert jmp_policy.nnx.spectrum_value_and_grad is not jmp_policy.report.spectrum_value_and_grad
names = {}
exec("from jmp_policy import *", names)
assert {"wrap", "audit", "drift"} < set(names) and "Drift" not in names and "Product" not in names
"""


@pytest.mark.once
def test_names_of_reports_are_there_before_they_are_loaded():
    subprocess.run([sys.executable, "-c", NAMES], check=True)


@pytest.mark.parametrize("module", ["jmp_policy", "jmp_policy.report", "jmp_policy.nnx"])
def test_type_checkers_see_the_names_that_are_loaded_later(module):
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    (seen,) = (
        n.body for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "_typing.TYPE_CHECKING"
    )
    loaded, names = importlib.import_module(module), set()
    for node in seen:
        (alias,), source = node.names, importlib.import_module(node.module)
        assert alias.name in (alias.asname, "*")
        taken = source.__all__ if alias.name == "*" else [alias.name]
        assert all(getattr(loaded, name) is getattr(source, name) for name in taken)
        names.update(taken)
    names |= {a.asname for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(public_names(module)) <= names


@pytest.mark.parametrize("name", ["Audit", "LossScaledState", "tap"])
def test_names_that_have_moved_warn_at_the_line_that_uses_them(name):
    with pytest.warns(
        DeprecationWarning, match=rf"jmp_policy\.{name} is jmp_policy\.(report|optim)\.{name}"
    ) as found:
        value = getattr(jmpp, name)
    assert found[0].filename == __file__
    assert value is getattr(jmpp.optim if name == "LossScaledState" else report, name)
    assert name not in dir(jmpp)
    assert len([n for n in dir(jmpp) if not n.startswith("__")]) <= 50


def test_the_first_help_that_is_asked_for_is_short():
    assert len(pydoc.plain(pydoc.render_doc(jmpp.loss_scaled)).split()) < 300
