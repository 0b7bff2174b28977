"""What wrapping an NNX module costs: once for the wrap, per trace, per compiled step, per `nnx.jit` call.

Every ratio is of two things measured in turn in this process. The models written by hand have `dtype=` in
every layer; no loss scaling, except where it says so. `nnx_gpu_cost` counts the same on a GPU.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmp_policy as jmpp
from benchmarks import _measure, _nnx_models, _nnx_steps, _record

REPEATS = 21
CALLS = 151  # Timed one by one: a slow moment of the machine then hits few of them.
POLICIES = {jnp.float16: "mixed_float16", jnp.bfloat16: "mixed_bfloat16"}
RULES = jmpp.PolicyMap(
    "mixed_float16", {"head": "float32", "blocks/0/linear": "float32", nnx.LayerNorm: "mixed_bfloat16"}
)
OWN_ATTENTION = "dtype=, attention by hand"


def by_hand(model: str, dtype: Any) -> dict[str, dict[str, Any]]:
    """The ways to write a model by hand, and what they pass to it."""
    if model != "Transformer":
        return {"dtype=": {}}
    own = {OWN_ATTENTION: {"attention_fn": _nnx_models.plain_attention}}
    # Flax's attention does not compile for float16 on a CPU.
    return own if dtype == jnp.float16 else {"dtype=": {}, **own}


def measure(model: str, dtype: Any) -> dict[str, dict[str, list[float]]]:
    """Times and counts of the train step of every variant: variant -> quantity -> repeats."""
    cls, make_batch = _nnx_models.TABLE[model]
    batch = make_batch()
    models = {way: cls(rngs=nnx.Rngs(0), dtype=dtype, **kw) for way, kw in by_hand(model, dtype).items()}
    models["wrapped"] = jmpp.wrap(cls(rngs=nnx.Rngs(0)), POLICIES[dtype])
    made, compiled = {}, {}
    found: dict[str, dict[str, list[float]]] = {name: {"trace_lower": []} for name in models}
    for name, module in models.items():
        optimizer = _nnx_steps.optimizer(module, optax.adamw(1e-3))
        made[name] = _nnx_steps.pure(_nnx_steps.plain_step, module, optimizer)
    for repeat in range(REPEATS + 1):
        for name, (step, state) in made.items():
            times, traced, lowered = _measure.trace_times(step, (state, batch), repeat)
            if repeat == 0:  # The first time around, Python itself is cold.
                _, compiled[name] = _measure.compile_time(lowered)
                found[name] |= {q: [n] for q, n in _measure.counts(traced, compiled[name]).items()}
            else:
                found[name]["trace_lower"].append(times["trace_lower"])

    def run(name: str) -> Callable[[], float]:
        return lambda: _measure.step_time(compiled[name], made[name][1], batch)

    for name, times in _measure.interleaved({name: run(name) for name in made}, REPEATS).items():
        found[name]["step"] = times
    return found


def steps() -> list[dict[str, Any]]:
    """One row per model, dtype and way to write it by hand: wrapped over by hand."""
    rows = []
    for model in _nnx_models.TABLE:
        for dtype in POLICIES:
            found = measure(model, dtype)
            wrapped = found.pop("wrapped")
            for way, hand in found.items():
                row: dict[str, Any] = {"model": model, "dtype": jnp.dtype(dtype).name, "by_hand": way}
                for quantity, values in wrapped.items():
                    row[quantity] = _measure.compare(quantity, values, hand[quantity])
                rows.append(row)
    return rows


def wrapping() -> list[dict[str, Any]]:
    """Milliseconds to build a model of many modules, to clone it and to wrap it."""

    def build() -> nnx.Module:
        return _nnx_models.Deep(rngs=nnx.Rngs(0))

    model = build()
    functions = {
        "build": build,
        "nnx.clone": lambda: nnx.clone(model),
        "wrap": lambda: jmpp.wrap(model, "mixed_float16"),
        "wrap, 3 rules": lambda: jmpp.wrap(model, RULES),
    }
    first = {name: 1e3 * _time(function) for name, function in functions.items()}
    timed = {name: lambda f=function: 1e3 * _time(f) for name, function in functions.items()}
    found = _measure.interleaved(timed, REPEATS)
    modules = sum(isinstance(node, nnx.Module) for _, node in nnx.iter_graph(model))
    return [
        {
            "what": name,
            "modules": modules,
            "first_ms": round(first[name], 1),
            "ms": _measure.spread(times),
            "relative_to_build": _measure.ratio(times, found["build"]),
        }
        for name, times in found.items()
    ]


def calls() -> list[dict[str, Any]]:
    """Milliseconds per call of an `nnx.jit` step whose time is the walk over its graph.

    The step by hand is there twice: what its second copy adds to the first is the noise.
    """
    tx = optax.adamw(1e-3)
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    plain, library = _nnx_steps.plain_step, _nnx_steps.library_step

    def hand() -> nnx.Module:
        return _nnx_models.Deep(rngs=nnx.Rngs(0), dtype=jnp.float16)

    def wrapped() -> nnx.Module:
        return jmpp.wrap(_nnx_models.Deep(rngs=nnx.Rngs(0)), "mixed_float16")

    variants = {
        "by hand": (hand(), tx, plain),
        "by hand again": (hand(), tx, plain),
        "wrapped": (wrapped(), tx, plain),
        "wrapped, loss_scaled": (wrapped(), scaled, library),
    }
    batch = jnp.ones((2, 8)), jnp.zeros((2,), jnp.int32)
    found = _measure.interleaved({n: _calling(*variant, batch) for n, variant in variants.items()}, CALLS)
    base = found["by hand"]
    return [
        {
            "variant": name,
            "ms_per_call": _measure.spread(times),
            "ratio": _measure.ratio(times, base),
            "added_ms": _measure.spread([a - b for a, b in zip(times, base, strict=True)]),
        }
        for name, times in found.items()
    ]


def _calling(model: nnx.Module, tx: Any, step: _nnx_steps.Step, batch: Any) -> Callable[[], float]:
    """Measures milliseconds per call of a step, which is compiled here."""
    optimizer, jitted = _nnx_steps.optimizer(model, tx), nnx.jit(step)

    def call() -> None:
        jax.block_until_ready(jitted(model, optimizer, batch))

    call()
    return lambda: 1e3 * _time(call)


def _time(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    tables = {"wrapping": wrapping(), "calls": calls()}
    for name, rows in tables.items():
        _record.show(f"nnx_cost, {name}", rows)
    _record.save(
        "nnx_cost", steps(), **tables, repeats=REPEATS, timed_calls=CALLS, backend=jax.default_backend()
    )


if __name__ == "__main__":
    main()
