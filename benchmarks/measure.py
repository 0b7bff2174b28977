"""Measuring compiled steps on the CPU: always as ratios of two things timed in turn in one run."""

import gc
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

COUNTS = ("equations", "bytes", "temp")
#: What most tables show of two steps.
USUAL = ("trace_lower", *COUNTS, "step")

Clock = Callable[[], float]
#: Quantity -> one number per repeat, by name.
Found = dict[str, dict[str, list[float]]]


def equations(jaxpr: Any) -> int:
    """Equations of a jaxpr and of all jaxprs inside it."""
    found = len(jaxpr.eqns)
    for value in (value for equation in jaxpr.eqns for value in equation.params.values()):
        for inner in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            found += equations(inner) if hasattr(inner, "eqns") else 0
    return found


def trace_time(
    step: Any, args: Any, repeat: int = 0, clock: Clock = time.perf_counter
) -> tuple[float, Any, Any]:
    """Seconds to trace and lower a step, of which nothing is remembered; what is traced, and lowered.

    Each repetition starts at another depth of the stack, evenly over a chunk of it. CPython keeps its frames
    in chunks, and a call across the end of one asks the system for memory, and the return gives it back.
    Where that falls depends on how many functions lie between here and what is called often, so at one depth
    alone it makes the same trace a third slower or more, by chance.
    With `time.process_time`, seconds are those of this process, which others disturb less.
    """
    forget()

    def timed() -> tuple[float, Any, Any]:
        start = clock()
        traced = jax.jit(step).trace(*args)
        lowered = traced.lower()
        return clock() - start, traced, lowered

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


def seconds(function: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Seconds until all that a function gives is computed."""
    start = clock()
    jax.block_until_ready(function())
    return clock() - start


def milliseconds(function: Callable[[], Any]) -> Callable[[], float]:
    """Times calls of a function, which is called once before."""
    seconds(function)
    return lambda: 1e3 * seconds(function)


def timed_steps(compiled: Any, state: Any, batch: Any, steps: int = 1) -> Callable[[], float]:
    """A function that does some steps and gives seconds per step; the state goes on from call to call."""

    def some() -> Any:
        nonlocal state
        for _ in range(steps):
            state, loss = compiled(state, batch)
        return state, loss

    return lambda: seconds(some) / steps


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


def in_turn(
    made: dict[str, Callable[[], tuple[Any, Any]]],
    batch: Any,
    repeats: int,
    *,
    traces: int | None = None,
    compiles: int = 1,
    steps: int = 5,
    clock: Clock = time.perf_counter,
    errors: dict[str, str] | None = None,
) -> Found:
    """Traces, compiles and runs steps in turn.

    Args:
      made: makes each step, `(state, batch) -> (state, loss)`, and its first state.
      batch, repeats: of the steps that are timed.
      traces: how often they are traced, if not as often; once more than that, when Python itself is cold.
      compiles: how often they are compiled, of which the first is no measurement if there are more.
      steps, clock: steps in one measurement, and the clock for tracing and lowering.
      errors: where what a step fails with is put, in place of its numbers; without, it is raised.
    """
    ready: dict[str, tuple[Any, Any]] = {}
    compiled: dict[str, Any] = {}
    found: Found = {}
    for repeat in range((repeats if traces is None else traces) + 1):
        for name in [name for name in made if name not in (errors or {})]:
            try:
                ready[name] = step, state = ready.get(name) or made[name]()
                taken, traced, lowered = trace_time(step, (state, batch), repeat, clock)
                numbers = {"trace_lower": taken}
                if repeat < compiles:
                    start = time.perf_counter()
                    compiled[name] = lowered.compile()
                    numbers["compile"] = time.perf_counter() - start
                if repeat == 0:
                    numbers |= counts(traced, compiled[name])
            except Exception as error:
                if errors is None:
                    raise
                errors[name] = described(error)
                continue
            for quantity, value in numbers.items():
                found.setdefault(name, {}).setdefault(quantity, []).append(value)
    # The first time is no measurement; what was done once is all there is.
    found = {name: {q: values[1:] or values for q, values in by.items()} for name, by in found.items()}
    timed = {name: timed_steps(compiled[name], ready[name][1], batch, steps) for name in found}
    for name, times in interleaved(timed, repeats).items():
        found[name]["step"] = times
    return found


def described(error: Exception) -> str:
    """The type and the first line of an error, without the machine's paths."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/', '', first_line)}"


def compared(found: Found, over: str, under: str, *quantities: str) -> dict[str, Any]:
    """Columns of a table: one thing over another, with its spread where it was measured more than once."""
    return {
        q: round(found[over][q][0] / found[under][q][0], 3)
        if len(found[over][q]) == 1
        else ratio(found[over][q], found[under][q])
        for q in quantities or found[over]
    }


def ratio(values: list[float], base: list[float]) -> dict[str, float]:
    """Median of the paired ratios, and their quartiles as the spread."""
    return spread([a / b for a, b in zip(values, base, strict=True)])


def spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
