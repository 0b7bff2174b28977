"""Real models with other libraries: the tables, and what of the harness runs without them."""

import importlib
import json
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent
NAME = "Multiplicative LSTM"
LIBRARIES = ("by hand", "jmp_policy", "jmp", "mpx", "flax DynamicScale")


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def benchmark(name):
    return importlib.import_module(f"benchmarks.{name}")


class Normed(nn.Module):
    """Small, and with batch statistics."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


def draw(key):
    x, y = jax.random.split(key)
    return (jax.random.normal(x, (16, 8)),), jax.random.randint(y, (16,), 0, 4)


def result(rows):
    versions = {"jax": "1", "flax": "2", "optax": "3", "python": "4"}
    about = {"target": "a card, compiled only", "optimizer": "AdamW", "date": "today", "repeats": 7}
    return {"versions": versions, **about, "peers": {"jmp": "5"}, "torch": "6", "rows": rows}


def row(where, library, **values):
    return {"where": where, "model": "Net", "library": library, **values}


def ratio(value):
    return {"median": value, "low": value / 2, "high": value * 2}


def test_tables_of_libraries():
    compiled = {"gigabytes": 1.0, "temp_gigabytes": 0.25, "half_share": 1.0}
    timed = {"trace_lower": ratio(2.0), "step": ratio(1.0), "bytes": 0.5, "temp": 3.0}
    rows = [row("H100", library, half_share=1.0) for library in LIBRARIES[:2]]
    rows += [row("H100", library, launches=i, **compiled) for i, library in enumerate(LIBRARIES)][2:]
    rows[3] = row("H100", "mpx", error="TypeError: no")
    rows += [row("CPU", library, **timed) for library in LIBRARIES]
    rows[-2] = row("CPU", "mpx", error="ValueError: never")
    added = {"temp_gigabytes": 0.5, "added_bytes": "+25.00%"}
    rows += [
        row("H100, Keras", "keras, no scaling", kernels=10, gigabytes=4.0, temp_gigabytes=0.25),
        row("H100, Keras", "keras LossScaleOptimizer", kernels=15, gigabytes=5.0, **added),
    ]
    ours = [
        {"model": "Net", "variant": variant, "kernels": 20, "launches": 20, "gigabytes": 1.0, **added}
        for variant in ("by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")
    ]
    page = benchmark("pages.zoo").peers(result(rows), result(ours))
    lines = page.splitlines()
    tables = ["| Net | 20 | 20 | 2 | - | 4 |"]
    tables += ["| Net | 0.50 | 0.50 | 0.25 | - | 0.25 |", "| Net | 100% | 100% | 100% | - | 100% |"]
    assert [line for line in lines if line.startswith("| Net")][:3] == tables
    assert "| Net | jmp | 2.00 | 1.00 | 0.50 | 3.00 |" in lines
    assert not [line for line in lines if line.startswith("| Net | mpx")]
    assert {"mpx fails on Net: `TypeError: no`.", "mpx fails on Net: `ValueError: never`."} <= set(lines)
    words = " ".join(lines)
    assert "+5 kernels (+50.0%), +1.00 GB moved (+25.00%) and +0.25 GB of temporary memory" in words
    assert "+0 kernels (+0.0%), +0.00 GB moved (+25.00%) and +0.00 GB" in words


def test_a_part_that_was_not_measured_has_no_table():
    page = benchmark("pages.zoo").peers(result([]), result([]))
    assert page == ""


def test_table_of_torch():
    about = {"device": "Card", "size": "full", "model": "Net", "variant": "float16", "over_float32": 2.0}
    measured = {"items_per_second": ratio(1234.0), "step_over_float32": ratio(0.5)}
    found = [{**about, **measured, "temp_gigabytes": 1.5, "peak_gigabytes": 3.0}]
    found.append({**found[0], "device": "CPU", "peak_gigabytes": 0.0})
    lines = benchmark("pages.zoo").torch(result(found)).splitlines()
    assert [line for line in lines if "Net" in line] == [
        "| Card | Net, full | float16 | 1234 | 0.50 |",
        "| CPU | Net, full | float16 | 1234 | 0.50 |",
    ]


def test_rows_that_are_measured_again_are_replaced(tmp_path, monkeypatch):
    zoo_peers, record = benchmark("times.peers"), benchmark("table")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert zoo_peers.ZOO.kept([]) == []
    rows = [
        {"where": where, "model": model, "library": "jmp"}
        for where in zoo_peers.PARTS
        for model in (NAME, "GPT-2")
    ]
    saved = {"date": "2026-01-31", "versions": {"jax": "0.4.1"}, "rows": rows}
    (tmp_path / "zoo_peers.json").write_text(json.dumps(saved))
    monkeypatch.setattr(zoo_peers, "cpu_rows", lambda name: [{**rows[2], "step": 1}])
    monkeypatch.setattr(record, "show", lambda name, rows: None)
    zoo_peers.ZOO.inside(["CPU", NAME])
    again = json.loads((tmp_path / "zoo_peers.json").read_text())["rows"]
    assert [found for found in again if "step" in found] == [{**rows[2], "step": 1}]
    others = [{"date": "2026-01-31", "jax": "0.4.1"} | row for row in (*rows[:2], *rows[3:])]
    assert sorted(map(str, again)) == sorted(map(str, [{**rows[2], "step": 1}, *others]))


def test_rows_that_are_kept_stay_those_of_their_day_and_version(tmp_path, monkeypatch):
    record, provenance = benchmark("table"), benchmark("pages.markdown").provenance
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(record, "show", lambda name, rows: None)
    order = {"model": ["A", "B", "C"]}

    def measured(version, date, model):
        versions = {"jax": version, "flax": "2", "optax": "3", "python": "4"}
        monkeypatch.setattr(record, "environment", lambda: {"date": date, "versions": versions})
        record.Table("some", list, by=order).save([{"model": model}])
        return json.loads((tmp_path / "some.json").read_text())

    assert (
        provenance(measured("0.10.2", "2026-01-30", "A"))
        == "jax 0.10.2, flax 2, optax 3, Python 4, 2026-01-30"
    )
    measured("0.11.0", "2026-01-31", "B")
    third = measured("0.12.0", "2026-02-02", "C")
    assert third["rows"] == [
        {"date": "2026-01-30", "jax": "0.10.2", "model": "A"},
        {"date": "2026-01-31", "jax": "0.11.0", "model": "B"},
        {"model": "C"},
    ]
    assert provenance(third) == "jax 0.10.2 to 0.12.0, flax 2, optax 3, Python 4, 2026-01-30 to 2026-02-02"
    # All again, one by one: nothing of the old ones is left.
    for model in "ABC":
        last = measured("0.12.0", "2026-02-03", model)
    assert provenance(last) == "jax 0.12.0, flax 2, optax 3, Python 4, 2026-02-03"
    assert provenance({**last, "rows": {}}) == "jax 0.12.0, flax 2, optax 3, Python 4, 2026-02-03"


def test_every_library_has_a_row_and_the_recurrence_of_a_cast_tree_is_not_half():
    report = benchmark("gpu_target").Report(3, 3, 2 * 10**9, 10**9, 1, {})
    rows = benchmark("times.peers").gpu_rows(NAME, "tiny", lambda jitted, args: report)
    assert tuple(row["library"] for row in rows) == LIBRARIES
    found = {row["library"]: row for row in rows}
    for library in ("by hand", "jmp_policy", "flax DynamicScale"):
        assert found[library]["half_share"] == 1
    # `zoo_gpu` has the counts of the other two.
    assert [library for library in LIBRARIES if found[library].get("kernels") == 3][-1] == "flax DynamicScale"
    assert not {"kernels", "gigabytes"} & (found["by hand"].keys() | found["jmp_policy"].keys())
    assert found["flax DynamicScale"]["gigabytes"] == 2.0
    # The cell's carry begins in float32, and takes the whole recurrence with it.
    for library in ("jmp", "mpx"):
        error = found[library].get("error")
        assert found[library].get("half_share", 0) < 0.5
        assert error is None or error.startswith("ModuleNotFoundError")


def test_what_is_timed_is_relative_to_the_step_by_hand_and_failures_are_told(monkeypatch):
    zoo_peers, models = benchmark("times.peers"), benchmark("models._model")
    model = models.Model(Normed(), draw, models.cross_entropy)
    made = zoo_peers.variants(model)

    def broken(*args, **kwargs):
        raise TypeError("no\nway")

    chosen = {name: made[name] for name in ("by hand", "jmp_policy")}
    chosen["broken"] = (*made["jmp"][:2], broken, tuple)
    monkeypatch.setattr(zoo_peers, "variants", lambda model: chosen)
    monkeypatch.setattr(zoo_peers, "MODELS", {"Net": lambda size: model})
    # Other tests of this process need what JAX remembers.
    monkeypatch.setattr(benchmark("measure"), "forget", lambda: None)
    hand, ours, failed = zoo_peers.cpu_rows("Net", "tiny", repeats=2)
    assert hand["step"] == hand["trace_lower"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert (hand["bytes"], hand["temp"], hand["equations"]) == (1, 1, 1)
    assert ours["step"]["median"] > 0
    assert failed == {"where": "CPU", "model": "Net", "library": "broken", "error": "TypeError: no"}


def peer(name):
    steps = benchmark("times.peers")
    if name == "flax":
        return steps.flax_step, steps.flax_scale
    pytest.importorskip(name)
    return {
        "jmp": (steps.jmp_step, steps.jmp_scale),
        "mpx": (steps.mpx_step, steps.mpx_scale),
    }[name]


@pytest.mark.parametrize("name", ["flax", "jmp", "mpx"])
def test_steps_of_peers_with_batch_statistics(name):
    steps = benchmark("steps")
    hand_model = steps.ByHand(Normed(), jnp.float16)
    make_step, make_scale = peer(name)
    model = hand_model if name == "flax" else Normed()
    tx, batch = optax.adamw(1e-3), draw(jax.random.key(1))
    start = jax.jit(lambda: steps.init(model, tx, batch))()._replace(scale=make_scale())
    step = jax.jit(make_step(model, tx))
    new, loss = step(start, batch)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((new.params, loss)))
    assert not any(map(np.array_equal, jax.tree.leaves(new.params), jax.tree.leaves(start.params)))
    assert {leaf.dtype for leaf in jax.tree.leaves((new.params, new.stats))} == {jnp.dtype("float32")}
    assert not any(map(np.array_equal, jax.tree.leaves(new.stats), jax.tree.leaves(start.stats)))
    if name == "flax":  # The forward pass is that by hand, to the bit.
        hand = jax.jit(steps.hand_scaled_step(model, tx))
        want, want_loss = hand(start._replace(scale=steps.hand_scale()), batch)
        assert float(loss) == float(want_loss)
        assert all(map(np.array_equal, jax.tree.leaves(new.stats), jax.tree.leaves(want.stats)))
    # An overflow: nothing moves, but for Flax's statistics.
    (x,), y = batch
    skipped, _ = step(start, ((x.at[0].set(jnp.inf),), y))
    kept = (skipped.params, skipped.opt_state, () if name == "flax" else skipped.stats)
    old = (start.params, start.opt_state, () if name == "flax" else start.stats)
    jax.tree.map(np.testing.assert_array_equal, kept, old)
    if name == "flax":
        assert not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(skipped.stats))


@pytest.mark.parametrize("size", ["tiny", "small", "full"])
@pytest.mark.parametrize("name", ["ResNet-50", "GPT-2"])
def test_models_in_torch_have_as_many_parameters(name, size):
    torch = pytest.importorskip("torch")
    twin = benchmark("models").MODELS[name](size)
    with torch.device("meta"):
        module = benchmark("models_torch").MODELS[name](size).module
    inputs, _ = twin.shapes()
    params = jax.eval_shape(twin.module.init, jax.random.key(0), *inputs)["params"]
    assert sum(p.numel() for p in module.parameters()) == sum(p.size for p in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["ResNet-50", "GPT-2"])
def test_steps_in_torch(name, request):
    torch = pytest.importorskip("torch")
    zoo_torch, models = benchmark("times.zoo_torch"), benchmark("models_torch")
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)  # More of them wait for each other on a busy machine.
    cpu, first = torch.device("cpu"), []
    for variant in ("float32, highest", "float16", "bfloat16"):
        torch.manual_seed(0)
        step = zoo_torch.train_step(models.MODELS[name]("tiny"), zoo_torch.VARIANTS[variant], cpu)
        losses = [float(step()) for _ in range(3)]
        assert losses[2] < losses[1] < losses[0]
        first.append(losses[0])
    twin = benchmark("models").MODELS[name]("tiny").module
    classes = twin.classes if name == "ResNet-50" else twin.vocabulary
    # Logits begin near zero, so that the loss begins near that of guessing.
    np.testing.assert_allclose(first, np.log(classes), atol=0.25)
    rows = {row["variant"]: row for row in zoo_torch.rows("tiny", name, repeats=2)}
    assert tuple(rows) == zoo_torch.ON_CPU
    assert rows["float32, highest"]["over_float32"] == 1
    assert all(row["items_per_second"]["median"] > 0 for row in rows.values())
