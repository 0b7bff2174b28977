"""What the cures for vanishing updates cost: an AdamW step on half parameters, gradients given, on the CPU.

Every ratio is over the same step on half parameters that rounds to nearest and loses small updates. The
forward and backward pass are left out: they are the same for all, and would hide the difference.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import measure
from benchmarks.table import Table

REPEATS = 21
LAYERS, WIDTH = 8, 512


def adamw() -> optax.GradientTransformation:
    # Float32 moments, whatever the parameters are.
    return jmpp.loss_scaled(optax.adamw(1e-3), jmpp.NoOpLossScale())


BASE = "half parameters"
#: Name -> the optimizer; but for one, the parameters are half.
VARIANTS: dict[str, Callable[[], optax.GradientTransformation]] = {
    BASE: adamw,
    "float32 parameters": adamw,
    "master_weights": lambda: jmpp.master_weights(adamw()),
    "master_weights, stochastic": lambda: jmpp.master_weights(adamw(), stochastic_rounding=True),
    "kahan_summation": lambda: jmpp.kahan_summation(adamw()),
    "stochastic_rounding": lambda: jmpp.stochastic_rounding(adamw()),
}


def drawn(layers: int, width: int, dtype: Any) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), layers)
    return {f"w{i}": jax.random.normal(key, (width, width)).astype(dtype) for i, key in enumerate(keys)}


def rounding_rows(dtype: str) -> list[dict[str, Any]]:
    kept, counts, timed, numbers = {}, {}, {}, LAYERS * WIDTH * WIDTH
    for name, make_tx in VARIANTS.items():
        tx, params = make_tx(), drawn(LAYERS, WIDTH, "float32" if name == "float32 parameters" else dtype)

        def step(state: Any, grads: Any, tx: Any = tx) -> tuple[Any, None]:
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), None

        state, grads = (params, tx.init(params)), jax.tree.map(jnp.sin, params)
        traced = jax.jit(step).trace(state, grads)
        compiled = traced.lower().compile()
        kept[name] = sum(x.nbytes for x in jax.tree.leaves(state)) / numbers
        counts[name] = measure.counts(traced, compiled)
        timed[name] = measure.timed_steps(compiled, state, grads, steps=5)
    times = measure.interleaved(timed, REPEATS)
    return [
        {
            "variant": name,
            "kept_bytes_per_parameter": round(kept[name], 2),
            "bytes": round(counts[name]["bytes"] / counts[BASE]["bytes"], 3),
            "temp_bytes_per_parameter": round(counts[name]["temp"] / numbers, 2),
            "step": measure.ratio(times[name], times[BASE]),
        }
        for name in VARIANTS
    ]


ABOUT = {"layers": LAYERS, "width": WIDTH, "repeats": REPEATS}
TABLES = (Table("rounding_cost", rounding_rows, by={"dtype": ("float16", "bfloat16")}, about=ABOUT),)
