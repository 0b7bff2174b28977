"""What `drift` costs: time and memory of its compiled program beside those of one float32 step.

A step is the loss and its gradients. Times are of this process's CPU, which other processes disturb less,
and every number is a ratio to the float32 step, timed in turn. Aim at the default detail: at most 3 times the
time and twice the memory.
"""

import functools
import statistics
import time
from typing import Any

import jax

import jmp_policy as jmpp
from benchmarks import _measure, _models, _record, _steps
from jmp_policy._src.report.drift.comparison import Comparison

REPEATS = 7
DETAILS = ("result", "module", "operation")


def programs(cls: Any, batch: Any) -> tuple[dict[str, Any], Any]:
    """Functions of the parameters, to be jitted: the step in both precisions, and what `drift` runs."""
    bare, half = cls(), jmpp.wrap(cls(), "mixed_float16")
    tx = jmpp.loss_scaled(_steps.optax.sgd(0.1), jmpp.DynamicLossScale())
    state = _steps.init(bare, tx, batch)

    def step(model: Any, params: Any) -> Any:
        loss_fn = functools.partial(_loss, model, state.stats, batch)
        return jax.value_and_grad(loss_fn)(params)

    jaxpr = jax.make_jaxpr(functools.partial(step, half))(state.params)
    found = {"float32": functools.partial(step, bare), "mixed_float16": functools.partial(step, half)}
    for detail in DETAILS:
        comparison = Comparison(jaxpr, detail, quick=detail != "result")
        found[f"drift, {detail}"] = functools.partial(_compared, comparison)
    return found, state.params


def _loss(model: Any, stats: Any, batch: Any, params: Any) -> Any:
    return _steps.loss_and_stats(model, params, stats, batch)[0]


def _compared(comparison: Comparison, params: Any) -> Any:
    return comparison(jax.tree.leaves(params))


def bytes_of(compiled: Any) -> float:
    """Bytes of arguments, results and everything between."""
    sizes = compiled.memory_analysis()
    return sizes.temp_size_in_bytes + sizes.argument_size_in_bytes + sizes.output_size_in_bytes


def cpu_time(compiled: Any, params: Any) -> float:
    """Seconds of this process's CPU for one call."""
    start = time.process_time()
    jax.block_until_ready(compiled(params))
    return time.process_time() - start


def rows() -> list[dict[str, Any]]:
    """One row per model and program."""
    found = []
    for model, (cls, batch) in _models.TABLE.items():
        functions, params = programs(cls, batch())
        lowered = {name: jax.jit(f).lower(params) for name, f in functions.items()}
        timed = {name: _measure.compile_time(low) for name, low in lowered.items()}
        for _, compiled in timed.values():
            cpu_time(compiled, params)
        times: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(REPEATS):
            for name, (_, compiled) in timed.items():
                times[name].append(cpu_time(compiled, params))
        for name, (_, compiled) in timed.items():
            ratios = sorted(a / b for a, b in zip(times[name], times["float32"], strict=True))
            found.append({
                "model": model,
                "program": name,
                "cpu_time": round(statistics.median(ratios), 3),
                "cpu_time_low": round(ratios[0], 3),
                "cpu_time_high": round(ratios[-1], 3),
                "memory": round(bytes_of(compiled) / bytes_of(timed["float32"][1]), 3),
                "temp": round(_temp(compiled) / _temp(timed["float32"][1]), 3),
            })  # fmt: skip
    return found


def _temp(compiled: Any) -> float:
    return compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    _record.save("drift_cost", rows(), repeats=REPEATS, backend=jax.default_backend())


if __name__ == "__main__":
    main()
