"""Measuring compiled steps on the CPU: always as ratios of two things timed in turn in one run."""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
    step: Any, args: Any, repeat: int = 0, clock: Callable[[], float] = time.perf_counter
) -> tuple[dict[str, float], Any, Any]:
    """Seconds to trace and lower a step; nothing is remembered from before.

    Each repetition starts at another depth of the stack, evenly over a chunk of it. CPython keeps its frames
    in chunks, and a call across the end of one asks the system for memory, and the return gives it back.
    Where that falls depends on how many functions lie between here and what is called often, so at one depth
    alone it makes the same trace a third slower or more, by chance (`benchmarks.stack_depth`).

    Args:
      step: to be jitted.
      args: for it.
      repeat: number of the repetition.
      clock: with `time.process_time`, seconds of this process, which others disturb less.
    """
    forget()

    def timed() -> tuple[dict[str, float], Any, Any]:
        start = clock()
        traced = jax.jit(step).trace(*args)
        lowered = traced.lower()
        return {"trace_lower": clock() - start}, traced, lowered

    return deeper(repeat * _STRIDE % CHUNK, timed)


def python_calls(step: Any, args: Any) -> int:
    """Counts calls of Python functions while a step is traced and lowered, the same on a busy machine.

    The second time, when Python itself is warm. Garbage is collected before, so that no finaliser is counted.
    """
    found = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal found
        found += event == "call"

    for _ in range(2):
        forget()
        found = 0
        gc.disable()
        sys.setprofile(count)
        try:
            jax.jit(step).trace(*args).lower()
        finally:
            sys.setprofile(None)
            gc.enable()
    return found


def forget() -> None:
    """Drops what JAX remembers of functions, so that the next trace does all of its work."""
    jax.clear_caches()
    gc.collect()


#: How many calls of `deeper` fill a chunk of the stack in CPython 3.11 and 3.12.
CHUNK = 136
#: Steps of so many calls are soon all over it.
_STRIDE = 29


def deeper(frames: int, function: Callable[[], Any]) -> Any:
    """What a function gives, called from so many frames further down the stack."""
    return function() if frames == 0 else deeper(frames - 1, function)


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


def timed_step(compiled: Any, state: Any, batch: Any) -> Callable[[], float]:
    """A function that does one step and gives its seconds; the state goes on from call to call."""
    states = [state]

    def run() -> float:
        start = time.perf_counter()
        state, loss = compiled(states.pop(), batch)
        jax.block_until_ready((state, loss))
        states.append(state)
        return time.perf_counter() - start

    return run


def on_borrowed_device(
    names: Sequence[str], rows: Callable[[str], Any], seconds: float
) -> Iterator[tuple[str, Any]]:
    """Measures one thing after the other; none begins that would not be done in time.

    Args:
      names: what is measured, the most valuable first.
      rows: measures one.
      seconds: for all, judged by the slowest so far.

    Yields:
      The name, and what was measured, or the first line of what the device says if it fails.
    """
    begin, slowest = time.perf_counter(), 0.0
    for i, name in enumerate(names):
        start = time.perf_counter()
        if i and start - begin + slowest > seconds:
            print(f"Left for another run: {', '.join(names[i:])}.")
            return
        try:
            found = rows(name)
        except jax.errors.JaxRuntimeError as error:
            # Out of memory, most likely; the others may fit.
            found = str(error).splitlines()[0][:300]
        slowest = max(slowest, time.perf_counter() - start)
        yield name, found


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
