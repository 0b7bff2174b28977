"""Where memory goes: exact where the arguments decide, adding up to XLA's totals, and the estimate."""

import dataclasses

import jax
import jax.numpy as jnp
import nnx_helpers
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import MLP, vectors
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_policy
from jmp_policy._src.report.lowering import memory
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import is_installed
from jmp_policy._src.report.lowering.memory import memory_report

pytestmark = pytest.mark.usefixtures("names_of_operations")
BATCH, WIDTH, LAYERS = 2048, 64, 3


def weights(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), layers)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys]


def network(params, x, dtype):
    for w in params:
        x = jax.nn.relu(x.astype(dtype) @ w.astype(dtype))
    return (x.astype(jnp.float32) ** 2).mean()


def step(params, x, dtype=jnp.float16):
    loss, grads = jax.value_and_grad(network)(params, x, dtype)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def scanned(params, x):
    def loss(params):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        out, _ = jax.lax.scan(layer, x.astype(jnp.bfloat16), params)
        return (out.astype(jnp.float32) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, params - 0.1 * grads


def linen_step():
    model = jmp_policy.wrap(MLP(), "mixed_float16")
    inputs = vectors(256, 32)()
    tx = jmp_policy.loss_scaled(optax.adam(1e-3), jmp_policy.DynamicLossScale())
    params = model.init(jax.random.key(0), inputs)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def train_step(state, x):
        def loss(params):
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        value, grads = jmp_policy.scaled_value_and_grad(loss)(state.opt_state, state.params)
        return state.apply_gradients(grads=grads), value

    return train_step, (state, inputs)


def nnx_step():
    model = jmp_policy.wrap(nnx_helpers.MLP(rngs=nnx.Rngs(0)), "mixed_float16")
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def train_step(model, optimizer, x):
        value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return value

    return train_step, (model, optimizer, vectors(256, 32)())


def optax_step():
    tx = optax.adam(1e-3)

    def train_step(batch, tree, slots):
        grads = jax.grad(network)(tree, batch, jnp.bfloat16)
        updates, slots = tx.update(grads, slots, tree)
        return optax.apply_updates(tree, updates), slots

    return train_step, (jnp.ones((BATCH, WIDTH)), weights(), tx.init(weights()))


def dropped(key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


CASES = {
    "plain": lambda: (step, (weights(), jnp.ones((BATCH, WIDTH)))),
    "scan": lambda: (scanned, (jnp.stack(weights()), jnp.ones((BATCH, WIDTH)))),
    "donated": lambda: (jax.jit(step, donate_argnums=0), (weights(), jnp.ones((BATCH, WIDTH)))),
    "linen": linen_step,
    "nnx": nnx_step,
    "optax": optax_step,
    "half arguments": lambda: (jnp.matmul, (jnp.ones((8, 8), jnp.bfloat16),) * 2),
    "constants": lambda: (lambda x: x @ np.ones((64, 64), np.float32), (jnp.ones((8, 64)),)),
    "keys": lambda: (dropped, (jax.random.key(0), jnp.ones(64, jnp.float16))),
}


@pytest.fixture(scope="module")
def reports():
    known = {}

    def report(name):
        if name not in known:
            fn, args = CASES[name]()
            known[name] = memory_report(fn, *args)
        return known[name]

    return report


@pytest.mark.once
@pytest.mark.parametrize("name", CASES)
def test_categories_add_up_to_what_xla_allots(reports, name):
    report = reports(name)
    assert sum(row.float32 for row in report.rows) == report.float32
    assert sum(row.policy for row in report.rows) == report.policy
    assert all(value >= 0 for row in report.rows for value in dataclasses.astuple(row)[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_arguments_are_exact(reports, name):
    report = reports(name)
    for category in ("parameters", "optimizer state", "inputs"):
        row = report.row(category)
        assert row.policy == row.expected_policy
        assert row.float32 == row.expected_float32


@pytest.mark.slow
def test_totals_are_those_of_the_compiled_program(reports):
    stats = jax.jit(step).lower(weights(), jnp.ones((BATCH, WIDTH))).compile().memory_analysis()
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert reports("plain").policy == total


def test_estimate_of_a_network_of_known_size(reports):
    report = reports("plain")
    count = LAYERS * WIDTH * WIDTH
    assert report.parameters == count
    assert report.row("parameters").expected_policy == 4 * count
    assert report.row("gradients").expected_policy == 4 * count
    assert report.row("half copies").expected_policy == 2 * count
    assert report.row("half copies").expected_float32 == 0
    # One value per layer, example and feature.
    assert report.row("activations").expected_float32 == 4 * LAYERS * BATCH * WIDTH
    assert report.row("activations").expected_policy == 2 * LAYERS * BATCH * WIDTH
    # XLA keeps at least the inputs of the second and third product.
    assert report.row("temporaries").float32 >= (LAYERS - 1) * 4 * BATCH * WIDTH
    assert 0.4 < report.accounted[0] < 1.1


def test_estimate_of_a_scan(reports):
    report = reports("scan")
    assert report.row("half copies").expected_policy == 2 * report.parameters
    # tanh keeps its result, and in newer versions nothing else; each layer's input is kept for its product.
    layer = LAYERS * BATCH * WIDTH
    assert 2 * layer <= report.row("activations").expected_policy <= 2 * 4 * layer
    assert report.row("activations").expected_float32 == 2 * report.row("activations").expected_policy
    assert report.row("temporaries").float32 >= 4 * layer


def test_donated_arguments_count_once(reports):
    plain, donated = reports("plain"), reports("donated")
    assert donated.row("parameters").policy == plain.row("parameters").policy
    saved = plain.row("results").policy - donated.row("results").policy
    assert saved >= plain.row("parameters").policy
    assert donated.row("results").expected_policy == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_training_steps_of_flax(reports, name):
    report = reports(name)
    count = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8
    assert report.parameters == count
    assert report.row("parameters").policy == 4 * count
    assert 0 <= report.row("optimizer state").policy - 8 * count < 64
    assert report.row("inputs").policy - 4 * 256 * 32 <= 8
    assert report.row("half copies").expected_policy == 2 * count
    assert report.row("activations").expected_float32 > 0


def test_states_and_parameters_go_by_any_name(reports):
    report = reports("optax")
    assert report.parameters == LAYERS * WIDTH * WIDTH
    assert report.row("optimizer state").policy == 8 * report.parameters + 4
    assert report.row("inputs").policy == 4 * BATCH * WIDTH


def test_without_half_precision_both_columns_are_the_same():
    report = memory_report(lambda p, x: step(p, x, jnp.float32), weights(), jnp.ones((BATCH, WIDTH)))
    assert report.precision == "float32"
    assert all(row.float32 == row.policy for row in report.rows)
    assert all(row.expected_float32 == row.expected_policy for row in report.rows)
    assert report.float32 == report.policy
    assert "nothing in half precision" in report.verdict


def test_a_loss_and_its_gradients():
    report = memory_report(jax.value_and_grad(network), weights(), jnp.ones((BATCH, WIDTH)), jnp.float16)
    # The gradients are results, and in the estimate no other ones.
    gradients = report.row("gradients").expected_policy
    assert gradients == report.row("parameters").policy
    assert gradients + 4 <= report.row("results").policy <= gradients + 64
    assert report.row("results").expected_policy == 4
    loss = memory_report(network, weights(), jnp.ones((BATCH, WIDTH)), jnp.float16)
    assert loss.row("gradients").expected_policy == loss.row("activations").expected_policy == 0


@pytest.mark.parametrize("remat", [False, True])
def test_only_what_is_trained_has_gradients(remat):
    """As of adapters (LoRA) beside frozen weights, which a checkpoint casts again in the backward pass."""
    rank = 8
    frozen = [jnp.ones((WIDTH, WIDTH))] * 2
    params = {"frozen": frozen, "a": jnp.ones((WIDTH, rank)), "b": jnp.zeros((rank, WIDTH))}

    def train(params, x):
        def loss(adapter):
            h, (a, b) = x.astype(jnp.bfloat16), [adapter[name].astype(jnp.bfloat16) for name in ("a", "b")]
            for w in params["frozen"]:
                h = jnp.tanh(h @ w.astype(jnp.bfloat16) + h @ a @ b)
            return jnp.square(h.astype(jnp.float32)).mean()

        adapter = {name: params[name] for name in ("a", "b")}
        grads = jax.grad(jax.checkpoint(loss) if remat else loss)(adapter)
        return params | jax.tree.map(lambda p, g: p - g, adapter, grads)

    report = memory_report(train, params, jnp.ones((BATCH, WIDTH)))
    assert report.row("parameters").policy == 4 * (2 * WIDTH * WIDTH + 2 * WIDTH * rank)
    assert report.row("gradients").expected_policy == 4 * 2 * WIDTH * rank


@pytest.mark.parametrize(
    "summed",
    [
        lambda g, factor: g.mean(0),
        lambda g, factor: jnp.tensordot(factor, g, 1),
        lambda g, factor: (g * factor.reshape(-1, *[1] * (g.ndim - 1))).sum(0),
    ],
    ids=["mean", "tensordot", "factor and sum"],
)
def test_gradients_of_each_example_are_gradients_of_what_is_trained(summed):
    weights = {"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    params = {"frozen": {"w": jnp.ones((WIDTH, 8)), "b": jnp.ones(8)}, "trained": weights}

    def loss(trained, frozen, x):
        h = jnp.tanh(x @ trained["w"] + trained["b"])
        return jnp.square(h @ frozen["w"] + frozen["b"]).mean()

    def train(params, x):
        grads = jax.vmap(jax.grad(loss), (None, None, 0))(params["trained"], params["frozen"], x)
        factor = 1 / jnp.maximum(jax.vmap(optax.tree.norm)(grads), 1)
        return params | {
            "trained": jax.tree.map(lambda p, g: p - summed(g, factor), params["trained"], grads)
        }

    report = memory_report(train, params, jnp.ones((BATCH, WIDTH)))
    assert report.row("gradients").expected_policy == pytest.approx(4 * (WIDTH * WIDTH + WIDTH), rel=0.02)


def test_gradients_of_each_example_of_layers_in_a_scan_are_counted():
    def loss(w, x):
        return jnp.square(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]).mean()

    def train(w, x):
        return w - jax.vmap(jax.grad(loss), (None, 0))(w, x).mean(0)

    w = jnp.ones((LAYERS, WIDTH, WIDTH))
    report = memory_report(train, w, jnp.ones((BATCH, WIDTH)))
    assert report.row("gradients").expected_policy == 4 * w.size


@pytest.mark.parametrize("heads", [1, 4])
def test_frozen_weights_of_the_shape_of_batched_products_have_no_gradients(heads):
    """Keys and their gradients are (batch, heads, time, features): of the weight's shape, of one example."""

    def loss(trained, frozen, x):
        x = x * trained["scale"]
        query, key, value = (jnp.einsum("btd,dhf->bhtf", x, frozen[name]) for name in "qkv")
        weights = jax.nn.softmax(query @ key.swapaxes(-1, -2))
        return jnp.square(weights @ value).mean()

    def train(params, x):
        return params["trained"]["scale"] - jax.grad(loss)(params["trained"], params["frozen"], x)["scale"]

    kernel = jnp.ones((WIDTH, heads, WIDTH // heads))
    params = {"frozen": dict.fromkeys("qkv", kernel), "trained": {"scale": jnp.ones(WIDTH)}}
    report = memory_report(train, params, jnp.ones((2, WIDTH, WIDTH)))
    assert report.row("gradients").expected_policy == 4 * WIDTH


@pytest.mark.parametrize("inside", [False, True])
def test_weights_that_are_split_in_a_shard_map_have_gradients(inside):
    """There they and their gradients have the shapes of a part."""
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec()

    def loss(w, x):
        return jax.lax.psum(jnp.square(jnp.tanh(x @ w)).sum(), "model")

    def part(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    def train(params, x):
        if inside:
            return jax.shard_map(part, mesh=mesh, in_specs=(split, whole), out_specs=split)(params, x)
        outer = jax.shard_map(loss, mesh=mesh, in_specs=(split, whole), out_specs=whole)
        return params - 0.1 * jax.grad(outer)(params, x)

    report = memory_report(train, jnp.ones((WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH)))
    assert report.row("gradients").expected_policy == report.row("parameters").policy > 0


def test_types_will_do_and_nothing_runs():
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    report = memory_report(step, params, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    assert report.row("parameters").policy == 4 * LAYERS * WIDTH * WIDTH


def test_sharded_arguments_are_counted_per_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batch = jax.device_put(jnp.ones((BATCH, WIDTH)), place)
    report = memory_report(step, jax.device_put(weights(), everywhere), batch)
    assert report.row("inputs").policy == 4 * BATCH * WIDTH // 8
    assert report.row("parameters").policy == 4 * LAYERS * WIDTH * WIDTH


def half_step(params, x):
    def loss(params):
        h = x.astype(jnp.float16)
        for w in params:
            h = jnp.tanh(h @ w.astype(jnp.float16))
        return h.astype(jnp.float32).mean()

    return jax.value_and_grad(loss)(params)


@pytest.mark.slow
def test_the_estimate_is_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    place, everywhere = (jax.sharding.NamedSharding(mesh, s) for s in (spec("data"), spec()))

    def types(rows, of_weights=None, of_rows=None):
        params = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=of_weights)] * 2
        return params, jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=of_rows)

    alone = memory_report(half_step, *types(128))
    parallel = memory_report(half_step, *types(8 * 128, everywhere, place))
    for category in ("parameters", "half copies", "gradients", "activations", "inputs"):
        assert parallel.row(category).expected_policy == alone.row(category).expected_policy
    fsdp = memory_report(half_step, *types(8 * 128, place, place))
    assert fsdp.row("parameters").expected_policy == alone.row("parameters").policy // 8
    assert fsdp.row("gradients").expected_policy == alone.row("gradients").expected_policy // 8

    def mapped(params, x):
        specs = {"in_specs": (spec(), spec("data")), "out_specs": spec(), "check_vma": False}
        return jax.shard_map(lambda p, x: jax.lax.pmean(half_step(p, x), "data"), mesh=mesh, **specs)(
            params, x
        )

    sharded = memory_report(mapped, *types(8 * 128, everywhere, place))
    assert sharded.row("activations").expected_policy == alone.row("activations").expected_policy


def test_changes_from_next_to_nothing_are_no_percentages():
    row = memory.MemoryRow("temporaries", 8, 87408, 0, 0)
    assert "> 10 times" in memory._shown(row)
    assert not any("%" in cell for cell in memory._shown(row))
    assert "-50 %" in memory._shown(memory.MemoryRow("temporaries", 8, 4, 0, 0))


def test_what_it_says(reports):
    report = reports("plain")
    text = str(report)
    assert "Memory of step on cpu" in text
    assert "half copies" in text
    assert " ".join(text.split()).endswith(report.verdict)
    assert report.verdict.startswith("float16 takes ")
    costs_more = report.policy > report.float32
    assert ("a CPU computes half products in float32" in report.verdict) == costs_more
    assert "estimate from the jaxpr" in text
    assert "recipe" not in text
    assert "float32's memory" in report.verdict
    assert report.verdict.endswith("Estimated: activations -50 %, half copies +2 bytes per parameter.")
    assert "Processors have no half products" in text
    assert report.to_dict()["rows"][0]["category"] == "parameters"
    assert "only its size is known" in " ".join(text.split())


def test_mistakes():
    with pytest.raises(TypeError, match=r"memory_report takes a function.*call it already"):
        memory_report(jnp.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a Linen module keeps no parameters"):
        memory_report(MLP(), jnp.ones((2, 8)))
    with pytest.raises(KeyError, match="No memory is called 'weights': parameters, half copies"):
        memory_report(jnp.sin, jnp.ones(2)).row("weights")


@pytest.mark.slow
def test_of_an_nnx_module():
    model = jmp_policy.wrap(nnx_helpers.MLP(rngs=nnx.Rngs(0)), "mixed_float16")
    report = memory_report(model, vectors(256, 32)())
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert report.row("parameters").policy == report.row("parameters").float32 == stored


def _half_loss(w, x):
    return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).mean()


@pytest.fixture
def target_compiler(monkeypatch):
    """Answers for whatever is compiled for a target: the program as it is, then the one in float32."""
    asked = []

    def compiled(exported, target):
        asked.append((exported, target.name))
        return [
            Compiled("", 3000, 1000, 0, alias_bytes=500, peak_bytes=5500),
            Compiled("", 3000, 1000, 6000, alias_bytes=500, peak_bytes=0),
        ][: len(exported)]

    monkeypatch.setattr(memory, "compiled", compiled)
    return asked


def test_a_target_is_compiled_for_without_a_device(target_compiler):
    pytest.importorskip("flatbuffers")
    w, x = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
    step = jax.jit(lambda w, x: w - jax.grad(_half_loss)(w, x), donate_argnums=0)
    report = memory.memory_report(step, w, x, target="V5E")
    ((given, name),) = target_compiler
    assert (name, report.backend, [p.donated for p in given]) == ("v5e", "v5e", [(0,), (0,)])
    # A TPU says no temporary memory, but the peak.
    assert (report.policy, report.float32) == (5500, 9500)
    assert report.row("temporaries").policy == 5500 - (3000 + 1000 - 500)
    assert report.row("parameters").policy == 16 * 16 * 4
    assert report.verdict.startswith("bfloat16 takes 57.9 % of float32's memory. Estimated: activations ")
    assert "only its size is known" in str(report)
    assert "float32 copies of their operands" not in str(report)


def test_a_program_that_does_not_fit_a_target_is_an_error(monkeypatch):
    pytest.importorskip("flatbuffers")
    error = Compiled(error="RESOURCE_EXHAUSTED: 23.86G exceeds available HBM (15.75G)")
    monkeypatch.setattr(memory, "compiled", lambda programs, target: [Compiled("", 1, 1, 1), error])
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(RuntimeError, match=r"in float32 does not compile for v5e:\nRESOURCE_EXHAUSTED"):
        memory.memory_report(_half_loss, x, x, target="v5e")


def test_without_an_accelerator_the_report_advises_a_target():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert "target='H100', 'v5e'" in str(memory.memory_report(_half_loss, x, x))
    with pytest.raises(ValueError, match="Unknown target 'H10O'"):
        memory.memory_report(_half_loss, x, x, target="H10O")


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target, marks=pytest.mark.skipif(not is_installed(platform), reason="needs its compiler")
        )
        for platform, target in [("cuda", "H100"), ("tpu", "v5e")]
    ],
)
def test_live_per_device_on_a_mesh(target):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    w = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
    report = memory.memory_report(jax.value_and_grad(_half_loss), w, x, target=target)
    assert report.row("parameters").policy == 256 * 256 * 4
    assert report.row("inputs").policy == pytest.approx(1024 * 256 * 4, rel=0.01)
    assert report.row("temporaries").policy > 0
