"""What results say together: the same programs have the same numbers in all tables, and agents learn."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
#: A variant in the table of the zoo -> its place in the rows of what loss scaling adds.
VARIANTS = {"wrapped, no scaling": 0, "wrapped, loss_scaled": 1}


def rows(name: str, **where: Any) -> list[dict[str, Any]]:
    """Returns the rows of a result in which these columns have these values."""
    found = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in found if where.items() <= row.items()]


def row(name: str, **where: Any) -> dict[str, Any]:
    (found,) = rows(name, **where)
    return found


MODELS = [found["model"] for found in rows("zoo_gpu", variant="wrapped, loss_scaled")]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
def test_wrapped_steps_on_an_h100(model, variant):
    counted = row("zoo_gpu", model=model, variant=variant)
    added, place = row("loss_scaling_zoo", model=model, card="H100"), VARIANTS[variant]
    assert counted.get("launches", counted["kernels"]) == added["launches"][place]
    assert counted["gigabytes"] == pytest.approx(added["gigabytes"][place], abs=0.006)
    assert counted["temp_gigabytes"] == added["temp_gigabytes"][place]


@pytest.mark.parametrize("model", MODELS)
def test_estimates_for_an_h100(model):
    counted = row("zoo_gpu", model=model, variant="wrapped, loss_scaled")
    for precision in ("float32", "tf32", "float16"):
        estimated = row("zoo_cards", model=model, card="H100", precision=precision)
        assert counted["estimated_ms"][precision] == estimated["estimated_ms"]
    assert (
        counted["temp_gigabytes"]
        == row("zoo_cards", model=model, card="H100", precision="float16")["temp_gigabytes"]
    )


@pytest.mark.parametrize("card", ["V100", "A100", "H100"])
@pytest.mark.parametrize("model", MODELS)
def test_memory_of_a_scaled_step_on_three_cards(model, card):
    estimated = row("zoo_cards", model=model, card=card, precision="float16")
    added = row("loss_scaling_zoo", model=model, card=card)
    # One was exported before it was compiled, and the other not.
    assert estimated["temp_gigabytes"] == pytest.approx(added["temp_gigabytes"][1], rel=0.01)


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
