"""Real models on this machine's CPU: the library against the same step by hand, bfloat16 against float32.

`python -m benchmarks.zoo_cost` measures all of them; with names these ones, and keeps the other rows. Ratios
of steps measured in turn.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _record, _steps
from benchmarks.by_hand import ByHand
from benchmarks.models import MODELS, Model

REPEATS = 7
#: What is compared with what.
COMPARISONS = (
    ("wrapped, loss_scaled", "by hand, scaling by hand"),
    ("mixed_bfloat16", "float32"),
    ("bfloat16, grad=float32", "float32"),
)


def variants(model: Model) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Name -> model, optimizer, step, loss scale held outside the optimizer."""
    tx, wrap = optax.adamw(1e-4), jmpp.wrap
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    hand = ByHand(model.module, jnp.float16)
    return {
        "by hand, scaling by hand": (hand, tx, _steps.hand_scaled_step, _steps.hand_scale()),
        "wrapped, loss_scaled": (wrap(model.module, "mixed_float16"), scaled, _steps.library_step, ()),
        "float32": (model.module, tx, _steps.plain_step, ()),
        "mixed_bfloat16": (wrap(model.module, "mixed_bfloat16"), tx, _steps.plain_step, ()),
        "bfloat16, grad=float32": (wrap(model.module, "p=f32,c=bf16,o=f32,g=f32"), tx, _steps.plain_step, ()),
    }


def rows(name: str, size: str = "small", repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per comparison."""
    model = MODELS[name](size)
    batch = model.batch()
    states, steps, compiled = {}, {}, {}
    found: dict[str, dict[str, list[float]]] = {}
    for variant, (module, tx, make_step, scale) in variants(model).items():
        states[variant] = jax.jit(lambda b, m=module, tx=tx, s=scale: _steps.init(m, tx, b, s))(batch)
        steps[variant] = make_step(module, tx, loss=model.loss)
        found[variant] = {"trace_lower": []}
    for repeat in range(repeats + 1):
        for variant, step in steps.items():
            times, traced, lowered = _measure.trace_times(step, (states[variant], batch), repeat)
            if repeat == 0:
                _, compiled[variant] = _measure.compile_time(lowered)
                counts = _measure.counts(traced, compiled[variant])
                found[variant] |= {quantity: [number] for quantity, number in counts.items()}
            else:
                found[variant]["trace_lower"].append(times["trace_lower"])

    def run(variant: str) -> Any:
        return lambda: _measure.step_time(compiled[variant], states[variant], batch, steps=2)

    for variant, times in _measure.interleaved({v: run(v) for v in steps}, repeats).items():
        found[variant]["step"] = times
    return [
        {"model": name, "comparison": f"{one} / {other}"}
        | {
            quantity: _measure.compare(quantity, found[one][quantity], found[other][quantity])
            for quantity in ("trace_lower", *_measure.COUNTS, "step")
        }
        for one, other in COMPARISONS
    ]


def main(names: list[str] | None = None) -> None:
    for name in names or MODELS:
        order = {"model": list(MODELS)}
        backend = jax.default_backend()
        _record.update("zoo_cost", rows(name), order, size="small", repeats=REPEATS, backend=backend)


if __name__ == "__main__":
    main(sys.argv[1:])
