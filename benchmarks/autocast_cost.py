"""What op-level autocast costs: per trace, per call, and in bytes kept for the backward pass.

Every ratio is of two things measured in turn in this process: the loss under `autocast`, the same loss in
float32, with `dtype=` in every layer, and of the wrapped model. Tracing and lowering is Python in one thread:
it is timed in seconds of this process, and its calls of Python functions are counted. `autocast_gpu_cost`
counts the same on a GPU. `python -m benchmarks.autocast_cost counts` counts residuals and calls alone and
keeps what was timed, which takes two minutes.
"""

import functools
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import jmp_policy as jmpp
from benchmarks import _measure, _models, _record, _steps

REPEATS = 11
CALLS = 151  # Timed one by one: a slow moment of the machine then hits few of them.
DTYPES = ("float16", "bfloat16")
LAYERS = 4
#: Name -> (model class, batch).
MODELS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "Transformer": (functools.partial(_models.Encoder, layers=LAYERS), _models.tokens),
    "Transformer, scanned": (functools.partial(_models.ScannedEncoder, layers=LAYERS), _models.tokens),
    "MLP": (_models.MLP, _models.vectors),
    "CNN + BatchNorm": (_models.CNN, _models.images),
}
#: Most of what tracing and lowering may take under autocast, over float32.
TARGETS = {"Transformer": 1.3, "Transformer, scanned": 1.15}
COMPARISONS = [
    ("autocast", "float32"),
    ("autocast", "by hand"),
    ("autocast", "wrapped"),
    ("by hand", "float32"),
    ("wrapped", "float32"),
]


def losses(cls: Any, dtype: str) -> dict[str, Callable[..., Any]]:
    """The ways to write a loss of `(params, stats, batch)`, which also gives the new statistics."""

    def loss(model: Any) -> Callable[..., Any]:
        def of(params: Any, stats: Any, batch: Any) -> Any:
            return _steps.loss_and_stats(model, params, stats, batch)

        return of

    return {
        "float32": loss(cls()),
        "by hand": loss(cls(dtype=jnp.dtype(dtype))),
        "wrapped": loss(jmpp.wrap(cls(), f"mixed_{dtype}")),
        "autocast": jmpp.autocast(loss(cls()), dtype),
    }


def arguments(cls: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Parameters, statistics and batch: float32, whatever computes with them."""
    variables = cls().init(jax.random.key(0), batch[0])
    return variables["params"], variables.get("batch_stats", {}), batch


def measure(cls: Any, dtype: str, args: Any) -> dict[str, dict[str, list[float]]]:
    """Times and counts of every variant's gradient: quantity -> variant -> repeats."""
    found: dict[str, dict[str, list[float]]] = {"trace_lower": {}}
    for repeat in range(REPEATS + 1):
        for name, loss in losses(cls, dtype).items():
            step = jax.value_and_grad(loss, has_aux=True)
            times, traced, lowered = _measure.trace_times(step, args, repeat, time.process_time)
            if repeat:  # The first time around, Python itself is cold.
                found["trace_lower"].setdefault(name, []).append(times["trace_lower"])
                continue
            _, compiled = _measure.compile_time(lowered)
            counts = _measure.counts(traced, compiled) | kept(loss, args)
            counts["python_calls"] = _measure.python_calls(step, args)
            for quantity, value in counts.items():
                found.setdefault(quantity, {})[name] = [value]
    return found


def kept(loss: Any, args: Any) -> dict[str, float]:
    """Bytes that the backward pass gets from the forward pass, before the compiler sees it.

    What `jax.vjp`'s function closes over, each array once: "parameters" are those that are arguments, and are
    in memory anyway; "residuals" are the others, half copies of parameters among them.
    """
    params, *others = args

    def residuals(params: Any, others: Any) -> Any:
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, *others), params, has_aux=True)[1])

    jaxpr = jax.make_jaxpr(residuals)(params, others).jaxpr
    variables = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    arguments = set(jaxpr.invars)
    sizes = {var: math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in variables}
    return {
        "residuals": sum(size for var, size in sizes.items() if var not in arguments),
        "parameters": sum(size for var, size in sizes.items() if var in arguments),
    }


def tables() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Ratios of one variant over another, and the bytes of each variant."""
    ratios, memory = [], []
    for model, (cls, make_batch) in MODELS.items():
        args = arguments(cls, make_batch())
        for dtype in DTYPES:
            found = measure(cls, dtype, args)
            for over, under in COMPARISONS:
                row: dict[str, Any] = {"model": model, "dtype": dtype, "comparison": f"{over} / {under}"}
                for quantity in ("trace_lower", *_measure.COUNTS):
                    values = found[quantity]
                    row[quantity] = _measure.compare(quantity, values[over], values[under])
                for quantity in ("residuals", "python_calls"):
                    row[quantity] = round(found[quantity][over][0] / found[quantity][under][0], 3)
                if model in TARGETS and (over, under) == ("autocast", "float32"):
                    row["target"] = TARGETS[model]
                ratios.append(row)
            for name in found["trace_lower"]:
                row = {"model": model, "dtype": dtype, "variant": name}
                for quantity in ("residuals", "parameters", "temp", "bytes"):
                    row[f"{quantity}_megabytes"] = round(found[quantity][name][0] / 1e6, 3)
                row["trace_lower_ms"] = _measure.spread([1e3 * t for t in found["trace_lower"][name]])
                memory.append(row)
    return ratios, memory


def calls() -> list[dict[str, Any]]:
    """Milliseconds per call of a small network, compiled and not.

    Uncompiled, `autocast` traces its function in every call. Each compiled function is there twice: what its
    second copy adds to the first is the noise.
    """
    cls, dtype = _models.MLP, "bfloat16"
    args = arguments(cls, _models.vectors(8))
    made = losses(cls, dtype)
    plain, half = made["float32"], made["autocast"]
    by_hand = [jax.jit(losses(cls, dtype)["by hand"]) for _ in range(2)]
    in_half = [jax.jit(losses(cls, dtype)["autocast"]) for _ in range(2)]
    #: Name -> (function, what it is compared with).
    variants = {
        "f(x)": (plain, "f(x)"),
        "f(x), by hand": (made["by hand"], "f(x)"),
        "autocast(f)(x)": (half, "f(x)"),
        "jit(f, by hand)(x)": (by_hand[0], "jit(f, by hand)(x)"),
        "jit(f, by hand)(x), again": (by_hand[1], "jit(f, by hand)(x)"),
        "jit(autocast(f))(x)": (in_half[0], "jit(f, by hand)(x)"),
        "jit(autocast(f))(x), again": (in_half[1], "jit(f, by hand)(x)"),
    }

    def timed(function: Callable[..., Any]) -> Callable[[], float]:
        def call() -> float:
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            return 1e3 * (time.perf_counter() - start)

        call()
        return call

    found = _measure.interleaved({name: timed(function) for name, (function, _) in variants.items()}, CALLS)
    return [
        {
            "call": name,
            "ms": _measure.spread(found[name]),
            "compared_with": base,
            "ratio": _measure.ratio(found[name], found[base]),
        }
        for name, (_, base) in variants.items()
    ]


def recounted(result: dict[str, Any]) -> dict[str, Any]:
    """A saved result with its residuals and calls counted again."""
    for model, (cls, make_batch) in MODELS.items():
        args = arguments(cls, make_batch())
        for dtype in DTYPES:
            sizes, calls = {}, {}
            for name, loss in losses(cls, dtype).items():
                sizes[name] = kept(loss, args)
                calls[name] = _measure.python_calls(jax.value_and_grad(loss, has_aux=True), args)
            for row in result["rows"]:
                if (row["model"], row["dtype"]) == (model, dtype):
                    over, under = row["comparison"].split(" / ")
                    row["residuals"] = round(sizes[over]["residuals"] / sizes[under]["residuals"], 3)
                    row["python_calls"] = round(calls[over] / calls[under], 3)
            for row in result["memory"]:
                if (row["model"], row["dtype"]) == (model, dtype):
                    found = sizes[row["variant"]]
                    row |= {f"{quantity}_megabytes": round(size / 1e6, 3) for quantity, size in found.items()}
    return result


def main(names: list[str] | None = None) -> None:
    if names == ["counts"]:
        path = _record.RESULTS / "autocast_cost.json"
        path.write_text(json.dumps(recounted(json.loads(path.read_text())), indent=1) + "\n")
        return
    timed = calls()
    ratios, memory = tables()
    _record.show("autocast_cost, calls", timed)
    _record.show("autocast_cost, memory", memory)
    _record.save(
        "autocast_cost",
        ratios,
        memory=memory,
        calls=timed,
        repeats=REPEATS,
        timed_calls=CALLS,
        layers=LAYERS,
        backend=jax.default_backend(),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
