"""The comparison in `benchmarks/accuracy/tasks.py`: it tells ways of training apart; and what it found."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import jmp_policy as jmpp

pytestmark = pytest.mark.once
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
try:
    accuracy = importlib.import_module("benchmarks.accuracy.tasks")
finally:
    sys.path.remove(str(ROOT))

TASK, SEEDS, STEPS = "breast cancer, MLP", (0, 1, 2), 12
BASE, CONTROL, FAILS = accuracy.BASE, accuracy.CONTROL, "float16 unscaled, small loss"
HALF = ["bfloat16", "float16", "float16, small loss"]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "accuracy.json").read_text())


def test_planted_faults_are_told_from_parity():
    rows = accuracy.rows(TASK, [BASE, CONTROL, "bfloat16", FAILS], SEEDS, STEPS)
    assert [(r["measure"], r["precision"]) for r in rows] == [
        (measure, precision)
        for measure in ("test accuracy, %", "training loss")
        for precision in (BASE, CONTROL, "bfloat16", FAILS)
    ]
    losses = [r for r in rows if r["measure"] == "training loss"]
    assert all(len(r["values"]) == len(set(r["values"])) == len(SEEDS) for r in losses)
    verdicts = {r["precision"]: r.get("verdict") for r in losses}
    assert verdicts == {BASE: None, CONTROL: "worse", "bfloat16": "parity", FAILS: "worse"}
    zeros = {r["precision"]: r["zero gradients"] for r in rows}
    assert zeros[FAILS] > 0.9
    # The same share of activations is 0, whatever the precision.
    assert zeros["bfloat16"] == pytest.approx(zeros[BASE], abs=0.01)
    json.dumps(rows, allow_nan=False)


def test_a_seed_is_on_its_own_and_the_weight_of_the_loss_is_nothing_to_float32():
    """Alone and among others; 2**-24 times the loss. Equal up to the order of sums and fused products."""
    task, scale = accuracy.TASKS[TASK], jmpp.DynamicLossScale(2.0**20)
    precision = accuracy.Precision("mixed_float16", scale)
    among = accuracy.train(task, precision, SEEDS, STEPS)
    # Of 12 steps some seeds skip two and some three.
    assert len(set(among["skipped"])) > 1
    alone = accuracy.train(task, precision, SEEDS[1:2], STEPS)
    for name, values in alone.items():
        np.testing.assert_allclose(among[name][1:2], values, rtol=1e-2, err_msg=name)
    small = accuracy.PRECISIONS[BASE]._replace(loss_weight=accuracy.SMALL)
    want, got = (accuracy.train(task, p, SEEDS, STEPS) for p in (accuracy.PRECISIONS[BASE], small))
    for name, values in want.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("differences", "verdict", "zero_inside", "within"),
    [
        ([0.0, 0.0, 0.0, 0.0, 0.0], "parity", True, True),
        ([0.01, -0.01, 0.01, -0.01, 0.0], "parity", True, True),
        ([0.9, 0.9, 0.9, 0.9, 0.9], "parity", False, True),
        ([0.9, -0.9, 2.0, 2.0, 0.9], "parity", True, False),
        ([1.1, 1.1, 1.1, 1.1, 1.2], "better", False, False),
        ([-1.1, -1.1, -1.1, -1.1, -1.2], "worse", False, False),
        ([9.0, 0.0, 0.0, 0.0, 0.0], "unclear", True, False),
        ([0.0, 0.0, np.nan, 0.0, 0.0], "worse", None, None),
    ],
)
@pytest.mark.parametrize("more_is_better", [True, False])
def test_verdict(differences, verdict, zero_inside, within, more_is_better):
    """In units of the deviation of float32 over the seeds; the interval is that of SciPy's paired test."""
    base = np.asarray([5.0, 5.3, 4.9, 5.2, 5.1])
    deviation = base.std(ddof=1)
    other = base + np.asarray(differences) * deviation * (1 if more_is_better else -1)
    found = accuracy.compare(base, other, more_is_better)
    assert found["verdict"] == verdict
    assert found["margin"] == deviation
    assert (found.get("zero inside"), found.get("interval within margin")) == (zero_inside, within)
    if zero_inside is not None and np.ptp(differences) > 0:
        interval = stats.ttest_rel(other, base).confidence_interval(accuracy.CONFIDENCE)
        np.testing.assert_allclose(found["interval"], interval, rtol=1e-9)


def test_batches_of_an_epoch_do_not_overlap_and_come_from_the_seed():
    order = accuracy.batches(10, 3, 7, 0)
    assert order.shape == (7, 3)
    assert all(np.unique(order[i : i + 3]).size == 9 for i in (0, 3))
    assert order.min() == 0 and order.max() == 9  # noqa: PT018
    assert (order == accuracy.batches(10, 3, 7, 0)).all()
    assert (order != accuracy.batches(10, 3, 7, 1)).any()


@pytest.mark.parametrize("name", accuracy.TASKS)
def test_training_and_test_data_are_apart(name):
    data = accuracy.TASKS[name].load()
    assert len(data.x) == len(data.y) > len(data.test_x) == len(data.test_y) >= 100
    if np.issubdtype(data.x.dtype, np.floating):
        seen = {x.tobytes() for x in data.x}
        # Two patients or two images may be the same; in these data none are.
        assert not any(x.tobytes() in seen for x in data.test_x)


def recorded(task):
    rows = [r for r in RESULT["rows"] if r["task"] == task]
    return {(r["measure"], r["precision"]): r for r in rows}


@pytest.mark.parametrize("name", accuracy.TASKS)
def test_measured_parity_in_half_precision_and_failure_without_scaling(name):
    rows, measures = recorded(name), [m.name for m in accuracy.TASKS[name].measures()]
    assert list(rows) == [(m, p) for m in measures for p in accuracy.PRECISIONS]
    for measure in measures:
        assert {rows[measure, p]["verdict"] for p in HALF} == {"parity"}
        assert rows[measure, FAILS]["verdict"] == "worse"
        assert rows[measure, FAILS]["zero gradients"] > 0.9
    # The control: these results would have shown half the learning rate.
    assert rows["training loss", CONTROL]["verdict"] == "worse"


def test_the_record_agrees_with_its_own_values():
    assert RESULT["seeds"] == list(accuracy.SEEDS)
    assert set(RESULT["tasks"]) == set(accuracy.TASKS)
    for row in RESULT["rows"]:
        values = np.asarray(row["values"])
        assert row["mean"] == pytest.approx(values.mean())
        if row["precision"] != BASE:
            base = np.asarray(recorded(row["task"])[row["measure"], BASE]["values"])
            better = row["measure"] in ("test accuracy, %", "test R2")
            found = accuracy.compare(base, values, better)
            for key in found.keys() - {"verdict"}:
                assert row[key] == pytest.approx(found[key])
            assert row["verdict"] == found["verdict"]
