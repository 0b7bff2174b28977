"""What results say together: the same programs have the same numbers in all tables, and agents learn."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def rows(name: str, **where: Any) -> list[dict[str, Any]]:
    """Returns the rows of a result in which these columns have these values."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in found if where.items() <= row.items()]


def row(name: str, **where: Any) -> dict[str, Any]:
    (found,) = rows(name, **where)
    return found


#: Versions of JAX with rows of their own.
JAX = ("0.10", "0.12")
COUNTED = [(found["model"], found["jax"]) for found in rows("zoo_gpu", variant="wrapped, loss_scaled")]


@pytest.mark.parametrize("model", dict.fromkeys(found["model"] for found in rows("zoo_cards")))
def test_memory_of_a_scaled_step_on_an_h100(model):
    estimated = row("zoo_cards", model=model, card="H100", precision="float16")
    counted = row("zoo_gpu", model=model, variant="wrapped, loss_scaled", jax="0.10")
    # One was exported before it was compiled, and the other not.
    assert estimated["temp_gigabytes"] == pytest.approx(counted["temp_gigabytes"], rel=0.01)


REPAIRED = "float16, actions in float32"


@pytest.mark.parametrize(
    ("algorithm", "precision"),
    [("PPO", "float16"), ("PPO", "bfloat16"), ("SAC", "bfloat16"), ("SAC", REPAIRED)],
)
def test_agents_learn_in_half_precision_what_they_learn_in_float32(algorithm, precision):
    whole, half = (row("rejax", algorithm=algorithm, precision=p) for p in ("float32", precision))
    error = math.hypot(whole["standard_error"], half["standard_error"])
    assert abs(half["mean"] - whole["mean"]) <= 2 * error
    # The return of an agent that has learned nothing is far away.
    assert min(half["mean"], whole["mean"]) - {"PPO": 30, "SAC": -1200}[algorithm] > 20 * error


def test_distributions_of_actions_want_float32():
    plain, repaired = (row("rejax", algorithm="SAC", precision=p) for p in ("float16", REPAIRED))
    assert plain["actor_skipped"] > 20 * repaired["actor_skipped"]
