"""What wrapping an NNX module costs: once for the wrap, per trace, per compiled step, per `nnx.jit` call.

Every ratio is of two things measured in turn in this process. The models written by hand have `dtype=` in
every layer; no loss scaling, except where it says so. Flax's attention does not compile for float16 on a CPU:
there, and once more in bfloat16, the model by hand has a function of its own.
"""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.models import small_nnx
from benchmarks.table import Table

REPEATS = 21
CALLS = 151  # Timed one by one: a slow moment of the machine then hits few of them.
DTYPES = ("float16", "bfloat16")
RULES = jmpp.PolicyMap(
    "mixed_float16", {"head": "float32", "blocks/0/linear": "float32", nnx.LayerNorm: "mixed_bfloat16"}
)


def by_hand(model: str, dtype: str) -> dict[str, dict[str, Any]]:
    """The ways to write a model by hand, and what they pass to it."""
    own = {"dtype=, attention by hand": {"attention_fn": small_nnx.plain_attention}}
    if model != "Transformer":
        return {"dtype=": {}}
    return own if dtype == "float16" else {"dtype=": {}, **own}


def step_rows(model: str, dtype: str) -> list[dict[str, Any]]:
    cls, make_batch = small_nnx.TABLE[model]
    models = {
        way: cls(rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype), **more)
        for way, more in by_hand(model, dtype).items()
    }
    models["wrapped"] = jmpp.wrap(cls(rngs=nnx.Rngs(0)), f"mixed_{dtype}")

    def made(module: nnx.Module) -> tuple[Any, Any]:
        return steps.pure(steps.nnx_step, module, nnx.Optimizer(module, steps.ADAMW, wrt=nnx.Param))

    each = {name: functools.partial(made, module) for name, module in models.items()}
    found = measure.in_turn(each, make_batch(), REPEATS)
    ways = [name for name in models if name != "wrapped"]
    return [{"by_hand": way, **measure.compared(found, "wrapped", way, *measure.USUAL)} for way in ways]


def rows() -> dict[str, Any]:
    found = [
        {"model": model, "dtype": dtype, **row}
        for model in small_nnx.TABLE
        for dtype in DTYPES
        for row in step_rows(model, dtype)
    ]
    return {"rows": found, "wrapping": wrapping(), "calls": calls()}


def wrapping() -> list[dict[str, Any]]:
    """Milliseconds to build a model of many modules, to clone it and to wrap it."""

    def build() -> nnx.Module:
        return small_nnx.Deep(rngs=nnx.Rngs(0))

    model = build()
    functions = {
        "build": build,
        "nnx.clone": lambda: nnx.clone(model),
        "wrap": lambda: jmpp.wrap(model, "mixed_float16"),
        "wrap, 3 rules": lambda: jmpp.wrap(model, RULES),
    }
    # The result is dropped: to wait for its arrays would take as long.
    calls = {name: lambda make=make: make() is None for name, make in functions.items()}
    first = {name: 1e3 * measure.seconds(call) for name, call in calls.items()}
    timed = {name: measure.milliseconds(call) for name, call in calls.items()}
    found = measure.interleaved(timed, REPEATS)
    modules = sum(isinstance(node, nnx.Module) for _, node in nnx.iter_graph(model))
    return [
        {
            "what": name,
            "modules": modules,
            "first_ms": round(first[name], 1),
            "ms": measure.spread(times),
            "relative_to_build": measure.ratio(times, found["build"]),
        }
        for name, times in found.items()
    ]


def calls() -> list[dict[str, Any]]:
    """Milliseconds per call of an `nnx.jit` step whose time is the walk over its graph.

    The step by hand is there twice: what its second copy adds to the first is the noise.
    """
    batch = jnp.ones((2, 8)), jnp.zeros((2,), jnp.int32)
    scaled = jmpp.loss_scaled(steps.ADAMW, jmpp.DynamicLossScale())

    def deep(dtype: Any = None) -> nnx.Module:
        return small_nnx.Deep(rngs=nnx.Rngs(0), dtype=dtype)

    variants = {
        "by hand": (deep(jnp.float16), steps.ADAMW, steps.nnx_step),
        "by hand again": (deep(jnp.float16), steps.ADAMW, steps.nnx_step),
        "wrapped": (jmpp.wrap(deep(), "mixed_float16"), steps.ADAMW, steps.nnx_step),
        "wrapped, loss_scaled": (jmpp.wrap(deep(), "mixed_float16"), scaled, steps.nnx_library_step),
    }
    timed = {
        name: measure.milliseconds(
            functools.partial(nnx.jit(step), model, nnx.Optimizer(model, tx, wrt=nnx.Param), batch)
        )
        for name, (model, tx, step) in variants.items()
    }
    found = measure.interleaved(timed, CALLS)
    base = found["by hand"]
    return [
        {
            "variant": name,
            "ms_per_call": measure.spread(times),
            "ratio": measure.ratio(times, base),
            "added_ms": measure.spread([a - b for a, b in zip(times, base, strict=True)]),
        }
        for name, times in found.items()
    ]


TABLES = (Table("nnx_cost", rows, about={"repeats": REPEATS, "timed_calls": CALLS}),)
