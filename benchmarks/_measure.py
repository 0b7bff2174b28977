"""Measuring compiled steps on the CPU: always as ratios of two things timed in turn in one run."""

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

COUNTS = ("equations", "bytes", "temp")


def equations(jaxpr: Any) -> int:
    """Equations of a jaxpr and of all jaxprs inside it."""
    found = 0
    for equation in jaxpr.eqns:
        found += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                found += equations(inner) if hasattr(inner, "eqns") else 0
    return found


def trace_times(
    step: Any, args: Any, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, float], Any, Any]:
    """Seconds to trace and lower a step; call `jax.clear_caches()` first, or it is remembered.

    With `clock=time.process_time`, seconds of this process: other processes then disturb less.
    """
    gc.collect()
    start = clock()
    traced = jax.jit(step).trace(*args)
    lowered = traced.lower()
    return {"trace_lower": clock() - start}, traced, lowered


def compile_time(lowered: Any) -> tuple[float, Any]:
    """Seconds to compile, and the compiled step."""
    start = time.perf_counter()
    compiled = lowered.compile()
    return time.perf_counter() - start, compiled


def step_time(compiled: Any, state: Any, batch: Any, steps: int = 5) -> float:
    """Seconds per step, over a few steps one after the other."""
    start = time.perf_counter()
    for _ in range(steps):
        state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / steps


def counts(traced: Any, compiled: Any) -> dict[str, float]:
    """What does not vary from run to run."""
    return {
        "equations": equations(traced.jaxpr.jaxpr),
        "bytes": compiled.cost_analysis()["bytes accessed"],
        "temp": compiled.memory_analysis().temp_size_in_bytes,
    }


def interleaved(functions: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Calls all functions in turn, `repeats` times; a slow moment of the machine hits all alike.

    In another order each time: what a function leaves in the caches is not always there for the same one.
    """
    found: dict[str, list[float]] = {name: [] for name in functions}
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(functions), len(functions)):
            found[name].append(functions[name]())
    return found


def compare(quantity: str, values: list[float], base: list[float]) -> Any:
    """What stands in a table for one thing over another: one number for counts, with its spread for times."""
    return round(values[0] / base[0], 3) if quantity in COUNTS else ratio(values, base)


def ratio(values: list[float], base: list[float]) -> dict[str, float]:
    """Median of the paired ratios, and their quartiles as the spread."""
    return spread([a / b for a, b in zip(values, base, strict=True)])


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
