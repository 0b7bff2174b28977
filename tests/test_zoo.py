"""Real architectures train in half precision: loss and gradients are those of float32, up to its rounding.

What rounding may do is not tuned, but found out: the float32 model runs with random relative errors of half
precision's unit roundoff on all parameters and on all that enters or leaves a module, forward and backward.
That is the standard model of rounding, fl(x) = x (1 + d) with |d| <= u (Higham, Accuracy and Stability of
Numerical Algorithms, 2.2). A program rounds more often than at these places; as errors of random sign add up
by squares, the bound is the largest of a few draws times the root of how many more, times two: a draw is of
the size of a standard deviation.
"""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import types
from collections import Counter
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import CASES

import jmp_policy as jmpp
from jmp_policy._src.core.targets import GPUS
from jmp_policy._src.report.lowering.compile_process import Compiled

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent
UNIT = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8}
DRAWS = 8
TABLE = 2**18
NAMES = (
    "ResNet-50",
    "Conv seq2seq",
    "DeepSpeech2",
    "Multiplicative LSTM",
    "WaveNet",
    "BERT-Large",
    "GPT-2",
    "Transformer-XL",
    "U-Net, partial convolutions",
    "SSD300, VGG-16",
)


#: Models with biases at many positions. Their half gradients are added up in half, on a CPU by XLA one after
#: another, also when written by hand; `grad=float32` adds them in float32.
SUMS_OVER_MANY = ("Multiplicative LSTM", "SSD300, VGG-16", "U-Net, partial convolutions", "WaveNet")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def zoo():
    return importlib.import_module("benchmarks.models").MODELS


def steps():
    return importlib.import_module("benchmarks.steps")


def random_table(i):
    """A table of random numbers; places read it from different starts. To draw at each compiles for long."""
    return np.random.default_rng(i).uniform(-1, 1, 2 * TABLE).astype(np.float32)


def read(table, place, shape):
    start = place * 40_503 % TABLE
    return jnp.resize(table[start : start + min(math.prod(shape), TABLE)], shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def disturbed(x, table, unit, place):
    return x * (1 + unit * read(table, place, x.shape).astype(x.dtype))


def _forward(x, table, unit, place):
    return disturbed(x, table, unit, place), (table, unit)


def _backward(place, kept, ct):
    # Halfway between the starts of two places.
    return disturbed(ct, *kept, place + TABLE // 2), None, None


disturbed.defvjp(_forward, _backward)


class Disturbed:
    """A Linen module with errors on its parameters, and on what passes from module to module."""

    def __init__(self, module, table, unit):
        self.module, self.table, self.unit, self.places = module, table, unit, itertools.count()

    def _all(self, tree):
        def one(x):
            if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
                return x
            return disturbed(jnp.asarray(x), self.table, self.unit, next(self.places))

        return jax.tree.map(one, tree)

    def _intercept(self, call, args, kwargs, context):
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        args, kwargs = self._all((args, kwargs))
        return self._all(call(*args, **kwargs))

    def apply(self, variables, *args, **kwargs):
        variables = {**variables, "params": self._all(variables["params"])}
        with nn.intercept_methods(self._intercept):
            return self.module.apply(variables, *args, **kwargs)


def operations(jaxpr):
    """How many operations of a program give floating numbers, those inside loops once."""
    count = 0
    for eqn in jaxpr.eqns:
        parts = [p for v in eqn.params.values() for p in (v if isinstance(v, tuple | list) else (v,))]
        inner = [j for j in (getattr(p, "jaxpr", p) for p in parts) if hasattr(j, "eqns")]
        dtypes = [getattr(var.aval, "dtype", None) for var in eqn.outvars]
        count += (
            sum(map(operations, inner)) if inner else any(jnp.issubdtype(d, jnp.floating) for d in dtypes)
        )
    return count


@functools.cache
def in_float32(name):
    """The model, a batch, the state, the step, the gradients of float32 and how they vary by unit."""
    model = zoo()[name]("tiny")
    batch = jax.jit(model.batch)()
    start = jax.jit(lambda: steps().init(model.module, optax.sgd(0.0), batch))()
    places = []

    def loss_fn(params, table, unit):
        noisy = Disturbed(model.module, table, unit)
        loss, _ = steps().loss_and_stats(noisy, params, start.stats, batch, model.loss)
        places.append(next(noisy.places))
        return loss

    def bare(params):
        return steps().loss_and_stats(model.module, params, start.stats, batch, model.loss)[0]

    draw = jax.jit(jax.value_and_grad(loss_fn))
    exact = draw(start.params, random_table(0), 0.0)
    program = jax.make_jaxpr(jax.grad(bare))(start.params).jaxpr
    more = math.sqrt(max(1.0, operations(program) / (2 * places[0])))
    return model, batch, start, exact, lambda i, unit: draw(start.params, random_table(i), unit), more


def distances(tree, other):
    def one(a, b):
        return float(np.linalg.norm(np.asarray(a, np.float64).ravel() - np.asarray(b, np.float64).ravel()))

    return np.array(jax.tree.leaves(jax.tree.map(one, tree, other)))


def nothing_like(tree):
    return jax.tree.map(np.zeros_like, tree)


def test_names():
    assert tuple(zoo()) == NAMES


def test_bytes_of_loops_and_slices_are_those_that_are_moved():
    count = importlib.import_module("benchmarks.gpu_target").count
    rows = jnp.ones((64, 1024))

    def moved(function):
        return count(jax.jit(function).lower(rows).compile().as_text()).bytes

    # A loop reads each row once, and not all rows in each of its 64 trips.
    assert moved(lambda x: jax.lax.map(lambda row: jnp.sin(row) + 1, x)) < 4 * 2 * rows.nbytes
    assert moved(lambda x: jax.lax.map(lambda row: jnp.sin(row) + 1, x)) > 2 * rows.nbytes
    assert moved(lambda x: jnp.sin(jax.lax.slice(x, (0, 0), (1, 1024)))) < rows.nbytes / 16


TODAY = (
    *("Llama", "Llama, scanned", "Llama, experts", "ViT-B/16", "DiT-B/4", "ConvNeXt-T", "Mamba"),
    *("DLRM", "Graph network"),
)


@pytest.mark.parametrize("name", TODAY)
def test_models_of_today_are_as_exact_as_by_hand(name):
    makers = importlib.import_module("benchmarks.models").TODAY
    assert tuple(makers) == TODAY
    model = makers[name]("tiny")
    batch = jax.jit(model.batch)()
    params = jax.jit(lambda: steps().init(model.module, optax.sgd(0.0), batch))().params
    # `jax.nn.dot_product_attention` in float16 is not for CPUs.
    half = "bfloat16" if "Llama" in name else "float16"

    def gradient(module):
        def loss_fn(params):
            return 2.0**10 * steps().loss_and_stats(module, params, {}, batch, model.loss)[0]

        return jax.jit(jax.grad(loss_fn))(params)

    hand, wrapped = steps().ByHand(model.module, jnp.dtype(half)), jmpp.wrap(model.module, f"mixed_{half}")
    exact = gradient(model.module)
    size = np.linalg.norm(distances(exact, nothing_like(exact)))
    ours, theirs = (np.linalg.norm(distances(gradient(module), exact)) / size for module in (wrapped, hand))
    # Attention keeps its weights in half, once: that is less memory, and in a small ViT 1.7 times the error.
    assert 1e-4 < ours < 2 * theirs
    assert ours < 0.02


# The library treats both half types alike: bfloat16 on a model of convolutions and norms, and on one of
# attention.
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "mixed_float16") for name in NAMES),
        *((name, "mixed_bfloat16") for name in ("U-Net, partial convolutions", "Transformer-XL")),
    ],
)
def test_one_step_is_that_of_float32_up_to_rounding(name, policy):
    model, batch, start, exact, draw, more = in_float32(name)
    errors = [distances(draw(i, UNIT[policy]), exact) for i in range(DRAWS)]
    bound = 2 * more * np.max(errors, axis=0)

    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale(2.0**10))
    used = jmpp.get_policy(policy)
    if name in SUMS_OVER_MANY:
        used = dataclasses.replace(used, grad_dtype="float32")
    wrapped = jmpp.wrap(model.module, used)
    state = start._replace(opt_state=tx.init(start.params))
    step = jax.jit(steps().library_step(wrapped, tx, model.loss))
    new, loss = step(state, batch)
    assert bool(jmpp.grads_finite(new.opt_state))
    # The step of SGD with learning rate 1 is the gradient.
    grads = jax.tree.map(np.subtract, *map(jax.device_get, (start.params, new.params)))
    found = distances((loss, grads), exact)
    # What subtracting the gradient from the parameters rounds.
    rounding = 2.0**-24 * distances(start.params, nothing_like(start.params)).max()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(exact)]
    assert not [row for row in zip(paths, found, bound, strict=True) if row[1] > row[2] + rounding]
    if policy == "mixed_float16":  # The bound says something: a gradient that is twice too large is outside.
        assert np.linalg.norm(bound[1:]) < np.linalg.norm(distances(exact, nothing_like(exact))[1:])


def operation_dtypes(function, *args):
    """How often which operation has operands and results of which types."""

    def inside(jaxpr):
        for eqn in jaxpr.eqns:
            parts = [p for v in eqn.params.values() for p in (v if isinstance(v, tuple | list) else (v,))]
            inner = [j for j in (getattr(p, "jaxpr", p) for p in parts) if hasattr(j, "eqns")]
            yield eqn.primitive.name, *(str(var.aval) for var in (*eqn.invars, *eqn.outvars))
            for part in inner:
                yield from inside(part)

    return Counter(inside(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize("case", CASES)
def test_by_hand_is_dtype_in_every_layer(case):
    cls, hand = case.make, importlib.import_module("benchmarks.steps")
    x = jmpp.get_policy("float16").cast_to_compute(case.inputs())
    variables = jax.eval_shape(cls().init, jax.random.key(0), x)
    found = []
    for model in (cls(dtype=jnp.float16), hand.ByHand(cls(), jnp.float16)):
        apply = functools.partial(model.apply, mutable=["batch_stats"])
        found.append(operation_dtypes(apply, variables, x))
    assert found[0] == found[1]
    bare = operation_dtypes(functools.partial(cls().apply, mutable=["batch_stats"]), variables, x)
    assert bare != found[0]


def test_raw_parameters_by_hand_are_half_where_they_are_read():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) * self.param("scale", nn.initializers.ones, (4,))

    model = importlib.import_module("benchmarks.steps").ByHand(Scaled(), jnp.float16)
    variables = model.init(jax.random.key(0), jnp.ones((2, 3)))
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    assert model.apply(variables, jnp.ones((2, 3))).dtype == jnp.float16
    assert Scaled().apply(variables, jnp.ones((2, 3))).dtype == jnp.float32


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(8)(x)))


def test_the_harness_compares_what_it_says(monkeypatch):
    """On a model that compiles in a moment: what the rows are is the same for all."""
    models = importlib.import_module("benchmarks.models")
    base = importlib.import_module("benchmarks.models._model")
    two_layers = base.Model(TwoLayers(), lambda key: ((jnp.ones((4, 3)),), jnp.arange(4)), base.cross_entropy)
    cost, device = map(importlib.import_module, ("benchmarks.times.overhead", "benchmarks.times.device"))
    for named in (models.MODELS, device.ALL):
        monkeypatch.setitem(named, "two layers", lambda size: two_layers)
    # Other tests of this process need what JAX remembers, and no time is compared here.
    monkeypatch.setattr(importlib.import_module("benchmarks.measure"), "forget", lambda: None)
    rows = {row["comparison"]: row for row in cost.zoo_rows("two layers", "tiny", repeats=2)}
    assert tuple(rows) == tuple(f"{one} / {other}" for one, other in cost.COMPARISONS)
    # More is traced than in float32: the casts.
    assert all(row["equations"] > 1 for name, row in rows.items() if name.endswith("/ float32"))
    rows = {row["variant"]: row for row in device.rows("two layers", "tiny", repeats=2)}
    assert rows["float32, highest"]["over_float32"] == 1
    assert {"float16 by hand", "float16, autocast", "bfloat16", "float16, flax DynamicScale"} <= set(rows)
    assert rows["float16"]["over_unscaled"]["median"] > 0
    assert all(row["items_per_second"]["median"] > 0 for row in rows.values())


def test_a_gpu_that_is_taken_away_leaves_the_models_that_were_done(monkeypatch, tmp_path):
    """The best models come first, each is saved when it is done, and none begins that would be cut off."""
    device, record = map(importlib.import_module, ("benchmarks.times.device", "benchmarks.table"))
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "show", lambda name, rows: None)
    monkeypatch.setattr(device.jax, "default_backend", lambda: "gpu")
    clock = iter(range(0, 100_000, 70))
    monkeypatch.setattr(record.time, "perf_counter", lambda: float(next(clock)))

    def rows(name, size):
        if name == "ResNet-50":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return [{"model": name, "variant": "float16"}]

    monkeypatch.setattr(device, "rows", rows)
    device.ZOO.main()
    saved = {row["model"]: row for row in json.loads((tmp_path / "zoo_device.json").read_text())["rows"]}
    assert set(saved) == set(device.FIRST)
    assert "RESOURCE_EXHAUSTED" in saved["ResNet-50"]["error"]
    # A second call, with what was left, keeps the rows.
    device.ZOO.main(["WaveNet"])
    assert len(json.loads((tmp_path / "zoo_device.json").read_text())["rows"]) == 4


def test_the_share_of_peak_is_the_time_of_the_products_at_peak_rates():
    """The roofline's time stands beside the measured one."""
    device = importlib.import_module("benchmarks.times.device")
    text = """
ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  ROOT %d = (f32[1024,1024]{1,0}, s8[1024]) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501
    compiled = types.SimpleNamespace(as_text=lambda: text)
    card = GPUS["H200"]
    for variant, rate in (("float32, highest", card.rates["float32"]), ("float16", card.rates["tf32"])):
        found = device._roofline(compiled, variant, 1e-4, card)
        assert found["share_of_peak"] == round(2 * 1024**3 / rate / 1e-4, 3)
        assert found["measured_ms"] == 0.1
        assert 0 < found["estimated_ms"] <= 0.05
    assert device._roofline(compiled, "float16", 1e-4, None) == {}


def test_rows_of_tpus_are_the_compilers_numbers(monkeypatch):
    """Bytes, the peak and products by variant; what does not fit says so."""
    pytest.importorskip("flatbuffers")
    tpu, models = map(importlib.import_module, ("benchmarks.counts.zoo_cards", "benchmarks.models._model"))
    model = models.Model(TwoLayers(), lambda key: ((jnp.ones((4, 3)),), jnp.arange(4)), models.cross_entropy)
    text = """
ENTRY %main (a: bf16[512,512]) -> bf16[512,512] {
  %a = bf16[512,512]{1,0} parameter(0)
  ROOT %d = bf16[512,512]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
}
"""
    answers = [Compiled(text, peak_bytes=3_000_000)] * 3 + [Compiled(error="RESOURCE_EXHAUSTED")]
    asked = []

    def compiled(programs, target):
        asked.append((programs[0].donated, target.name))
        return [answers[len(asked) - 1]]

    monkeypatch.setattr(importlib.import_module("benchmarks.gpu_target"), "compiled", compiled)
    found = {name: tpu.tpu_row(model, made, "v6e") for name, made in tpu.tpu_variants(model).items()}
    assert list(found) == ["float32", "by hand", "wrapped", "autocast"]
    assert found["wrapped"] == {"gigabytes": 0.0, "peak_gigabytes": 0.003, "products": {"bfloat16": 1}}
    assert found["autocast"] == {"error": "RESOURCE_EXHAUSTED"}
    assert {name for _, name in asked} == {"v6e"}
    assert all(donated for donated, _ in asked)
