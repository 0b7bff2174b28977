"""What wrapping an NNX module costs, over the module with `dtype=` in every layer, without loss scaling.

`nnx_cost`: per trace and per step. `nnx_calls`: once, to wrap a model of many modules; and per call of
`nnx.jit`, whose time is the walk over its graph.
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


def step_rows(model: str, dtype: str) -> list[dict[str, Any]]:
    cls, make_batch = small_nnx.TABLE[model]
    # Flax's attention does not compile for float16 on a CPU.
    has_own = (model, dtype) == ("Transformer", "float16")
    own = {"attention_fn": small_nnx.plain_attention} if has_own else {}

    def made(module: nnx.Module) -> tuple[Any, Any]:
        return steps.pure(steps.nnx_step, module, nnx.Optimizer(module, steps.ADAMW, wrt=nnx.Param))

    each = {
        "by hand": functools.partial(made, cls(rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype), **own)),
        "wrapped": functools.partial(made, jmpp.wrap(cls(rngs=nnx.Rngs(0)), f"mixed_{dtype}")),
    }
    found = measure.in_turn(each, make_batch(), REPEATS)
    return [measure.compared(found, "wrapped", "by hand", *measure.USUAL)]


def calls() -> list[dict[str, Any]]:
    def build(dtype: Any = None) -> nnx.Module:
        return small_nnx.Deep(rngs=nnx.Rngs(0), dtype=dtype)

    def step(model: nnx.Module) -> Any:
        batch = jnp.ones((2, 8)), jnp.zeros((2,), jnp.int32)
        optimizer = nnx.Optimizer(model, steps.ADAMW, wrt=nnx.Param)
        return functools.partial(nnx.jit(steps.nnx_step), model, optimizer, batch)

    def ratio(repeats: int, call: Any, base: Any) -> dict[str, float]:
        timed = {"call": measure.milliseconds(call), "base": measure.milliseconds(base)}
        found = measure.interleaved(timed, repeats)
        return measure.ratio(found["call"], found["base"])

    model = build()
    modules = sum(isinstance(node, nnx.Module) for _, node in nnx.iter_graph(model))
    # The result is dropped: to wait for its arrays would take as long.
    wrapping = ratio(REPEATS, lambda: jmpp.wrap(model, "mixed_float16") is None, lambda: build() is None)
    called = ratio(CALLS, step(jmpp.wrap(build(), "mixed_float16")), step(build(jnp.float16)))
    return [
        {"what": "wrap, over building", "modules": modules, "ratio": wrapping},
        {"what": "call of nnx.jit, over by hand", "modules": modules, "ratio": called},
    ]


BY = {"model": small_nnx.TABLE, "dtype": ("float16", "bfloat16")}
TABLES = (
    Table("nnx_cost", step_rows, by=BY, about={"repeats": REPEATS}),
    Table("nnx_calls", calls, about={"repeats": REPEATS, "timed_calls": CALLS}),
)
