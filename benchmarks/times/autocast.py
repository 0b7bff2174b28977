"""What op-level autocast costs: per trace, and in bytes kept for the backward pass.

Every ratio is of two things measured in turn in this process: the loss under `autocast`, and the same loss in
float32 or with `dtype=` in every layer. Tracing and lowering is Python in one thread: it is timed in seconds
of this process, and its calls of Python functions are counted. `autocast_gpu_cost` has bytes and memory of a
GPU: XLA on a CPU computes half products in float32.
"""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.models import small
from benchmarks.table import Table

REPEATS = 11
LAYERS = 4
MODELS = {
    "Transformer": small.language(small.Encoder(layers=LAYERS)),
    "Transformer, scanned": small.language(small.Encoder(layers=LAYERS, scanned=True)),
    **{name: small.TABLE[name] for name in ("MLP", "CNN + BatchNorm")},
}


def residuals(loss: Any, state: Any, batch: Any) -> int:
    """Bytes that the backward pass gets before the compiler sees it.

    What the function of `jax.vjp` closes over, each array once; not arguments, but half copies of parameters.
    """

    def kept(state: Any, batch: Any) -> Any:
        params, stats = state
        return jax.tree.leaves(jax.vjp(lambda p: loss((p, stats), batch), params, has_aux=True)[1])

    jaxpr = jax.make_jaxpr(kept)(state, batch).jaxpr
    variables = {var for var in jaxpr.outvars if not isinstance(var, Literal)} - set(jaxpr.invars)
    return sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in variables)


def rows(name: str, dtype: str) -> list[dict[str, Any]]:
    """What the loss under autocast costs over the loss in float32 and by hand."""
    bare, batch = MODELS[name].module, MODELS[name].batch()
    first = steps.init(bare, steps.ADAMW, batch)
    state = first.params, first.stats

    def loss_of(model: Any) -> Any:
        return lambda state, batch: steps.loss_and_stats(model, *state, batch)

    losses = {
        "float32": loss_of(bare),
        "by hand": loss_of(steps.ByHand(bare, jnp.dtype(dtype))),
        "autocast": jmpp.autocast(loss_of(bare), dtype),
    }
    gradients = {
        name: lambda state, batch, loss=loss: jax.value_and_grad(
            lambda params, stats: loss((params, stats), batch), has_aux=True
        )(*state)
        for name, loss in losses.items()
    }
    each = {name: lambda step=step: (step, state) for name, step in gradients.items()}
    found = measure.in_turn(each, batch, 0, traces=REPEATS, clock=time.process_time)
    for name, loss in losses.items():
        found[name]["residuals"] = [residuals(loss, state, batch)]
        found[name]["python_calls"] = [measure.python_calls(gradients[name], (state, batch))]
    bases = ("float32", "by hand")
    return [{base: measure.compared(found, "autocast", base, *QUANTITIES) for base in bases}]


QUANTITIES = ("trace_lower", *measure.COUNTS, "residuals", "python_calls")
TABLES = (
    Table(
        "autocast_cost",
        rows,
        by={"model": MODELS, "dtype": ("float16", "bfloat16")},
        about={"repeats": REPEATS, "layers": LAYERS},
    ),
)
