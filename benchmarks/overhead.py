"""What the library costs on top of a step written by hand, and what loss scaling costs on top of none.

Every number is a ratio of two steps traced, compiled and run in turn in this process.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _models, _record, _steps

REPEATS = 11
COMPILES = 4  # Compiling takes seconds, and varies less than tracing.
#: Numerator and denominator of each table.
COMPARISONS = {
    "library / by hand": ("library", "by hand"),
    "library / library without scaling": ("library", "without scaling"),
    "by hand / by hand without scaling": ("by hand", "by hand without scaling"),
}


def variants(cls: Any, batch: Any) -> dict[str, tuple[Any, _steps.State]]:
    """Step and initial state of the four ways to write it."""
    tx = optax.adamw(1e-3)
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    hand, wrapped = cls(dtype=jnp.float16), jmpp.wrap(cls(), "mixed_float16")
    return {
        "by hand": (_steps.hand_scaled_step(hand, tx), _steps.init(hand, tx, batch, _steps.hand_scale())),
        "by hand without scaling": (_steps.plain_step(hand, tx), _steps.init(hand, tx, batch)),
        "library": (_steps.library_step(wrapped, scaled), _steps.init(wrapped, scaled, batch)),
        "without scaling": (_steps.plain_step(wrapped, tx), _steps.init(wrapped, tx, batch)),
    }


def measure(cls: Any, batch: Any) -> dict[str, dict[str, list[float]]]:
    """Times and counts of every variant: quantity -> variant -> repeats."""
    made = variants(cls, batch)
    found: dict[str, dict[str, list[float]]] = {}
    compiled = {}
    for repeat in range(REPEATS + 1):
        for name, (step, state) in made.items():
            times, traced, lowered = _measure.trace_times(step, (state, batch), repeat)
            if repeat < COMPILES:
                times["compile"], compiled[name] = _measure.compile_time(lowered)
                times |= _measure.counts(traced, compiled[name])
            for quantity, value in times.items():
                found.setdefault(quantity, {}).setdefault(name, []).append(value)
    # The first time around, Python itself is cold.
    found = {q: {name: values[1:] for name, values in by_name.items()} for q, by_name in found.items()}

    def run(name: str) -> Any:
        return lambda: _measure.step_time(compiled[name], made[name][1], batch)

    found["step"] = _measure.interleaved({name: run(name) for name in made}, REPEATS)
    return found


def rows() -> list[dict[str, Any]]:
    """One row per model and comparison."""
    found = []
    for model, (cls, batch) in _models.TABLE.items():
        measured = measure(cls, batch())
        for comparison, (over, under) in COMPARISONS.items():
            row: dict[str, Any] = {"model": model, "comparison": comparison}
            for quantity, by_variant in measured.items():
                row[quantity] = _measure.compare(quantity, by_variant[over], by_variant[under])
            found.append(row)
    return found


def main() -> None:
    _record.save("overhead", rows(), repeats=REPEATS, backend=jax.default_backend())


if __name__ == "__main__":
    main()
