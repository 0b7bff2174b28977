"""How much the time of a trace depends on where on the stack it begins: `python -m benchmarks.stack_depth`.

The real models whose traces have the most small calls, with the same functions, at depths all over a chunk of
CPython's stack (see `_measure.trace_times`). Only the mean over them compares two steps.
"""

from typing import Any

import jax

from benchmarks import _measure, _record, _steps, zoo_cost
from benchmarks.models import MODELS

NAMES = ("Conv seq2seq", "DeepSpeech2")
VARIANTS = zoo_cost.COMPARISONS[0]
#: Traces at each depth, of which the quickest counts.
REPEATS = 2


def rows(name: str, size: str = "small", stride: int = 8) -> list[dict[str, Any]]:
    """One row per variant and depth; the first trace, when Python itself is cold, is not among them."""
    model = MODELS[name](size)
    batch = model.batch()
    made = {}
    for variant in VARIANTS:
        module, tx, make_step, scale = zoo_cost.variants(model)[variant]
        state = jax.jit(lambda b, m=module, tx=tx, s=scale: _steps.init(m, tx, b, s))(batch)
        made[variant] = make_step(module, tx, loss=model.loss), (state, batch)
        _measure.trace_times(*made[variant])
    return [
        {"model": name, "variant": variant, "frames": frames}
        | {"seconds": min(_seconds(frames, *made[variant]) for _ in range(REPEATS))}
        for frames in range(0, _measure.CHUNK, stride)
        for variant in VARIANTS
    ]


def _seconds(frames: int, step: Any, args: Any) -> float:
    times, _, _ = _measure.deeper(frames, lambda: _measure.trace_times(step, args))
    return times["trace_lower"]


def main() -> None:
    found = [row for name in NAMES for row in rows(name)]
    _record.save("stack_depth", found, size="small", repeats=REPEATS, backend=jax.default_backend())


if __name__ == "__main__":
    main()
