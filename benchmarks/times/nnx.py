"""What wrapping an NNX module costs, over the module with `dtype=` in every layer, without loss scaling.

`nnx_cost`: per trace and per step. `nnx_calls`: once, to wrap a model of many modules; and per call of
`nnx.jit`, whose time is the walk over its graph.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.models import small, small_nnx
from benchmarks.table import Table

REPEATS = 21
CALLS = 151  # Timed one by one: a slow moment of the machine then hits few of them.


def step(model: Any, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    """A step of training, without loss scaling."""
    loss, grads = nnx.value_and_grad(lambda model: steps.cross_entropy(model(batch[0]), batch[1]))(model)
    optimizer.update(model, grads)
    return loss


def begun(model: nnx.Module) -> tuple[Any, Any]:
    """The step as `(state, batch) -> (state, loss)` over arrays, and its first state."""
    graphdef, state = nnx.split((model, nnx.Optimizer(model, steps.ADAMW, wrt=nnx.Param)))

    def run(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        both = nnx.merge(graphdef, state)
        loss = step(*both, batch)
        return nnx.state(both), loss

    return run, state


def step_rows(dtype: str) -> list[dict[str, Any]]:
    # Flax's attention does not compile for float16 on a CPU.
    own = {"attention_fn": small_nnx.plain_attention} if dtype == "float16" else {}
    encoder = functools.partial(small_nnx.Encoder, rngs=nnx.Rngs(0))
    each = {
        "by hand": functools.partial(begun, encoder(dtype=jnp.dtype(dtype), **own)),
        "wrapped": functools.partial(begun, jmpp.wrap(encoder(), f"mixed_{dtype}")),
    }
    (tokens,), _ = small.TABLE["Transformer"].batch()
    found = measure.in_turn(each, (tokens, tokens), REPEATS)
    return [measure.compared(found, "wrapped", "by hand", *measure.USUAL)]


def calls() -> list[dict[str, Any]]:
    def build(dtype: Any = None) -> nnx.Module:
        return small_nnx.Deep(rngs=nnx.Rngs(0), dtype=dtype)

    def called(model: nnx.Module) -> Any:
        batch = jnp.ones((2, 8)), jnp.zeros((2,), jnp.int32)
        optimizer = nnx.Optimizer(model, steps.ADAMW, wrt=nnx.Param)
        return functools.partial(nnx.jit(step), model, optimizer, batch)

    def ratio(repeats: int, call: Any, base: Any) -> dict[str, float]:
        timed = {"call": measure.milliseconds(call), "base": measure.milliseconds(base)}
        found = measure.interleaved(timed, repeats)
        return measure.ratio(found["call"], found["base"])

    model = build()
    modules = sum(isinstance(node, nnx.Module) for _, node in nnx.iter_graph(model))
    # The result is dropped: to wait for its arrays would take as long.
    wrapping = ratio(REPEATS, lambda: jmpp.wrap(model, "mixed_float16") is None, lambda: build() is None)
    calling = ratio(CALLS, called(jmpp.wrap(build(), "mixed_float16")), called(build(jnp.float16)))
    return [
        {"what": "wrap, over building", "modules": modules, "ratio": wrapping},
        {"what": "call of nnx.jit, over by hand", "modules": modules, "ratio": calling},
    ]


TABLES = (
    Table("nnx_cost", step_rows, by={"dtype": ("float16", "bfloat16")}, about={"repeats": REPEATS}),
    Table("nnx_calls", calls, about={"repeats": REPEATS, "timed_calls": CALLS}),
)
