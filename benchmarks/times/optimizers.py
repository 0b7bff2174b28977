"""What the state of optimizers costs.

`rounding_cost`: the cures for vanishing updates, in an AdamW step on half parameters, gradients given, on the
CPU. Every ratio is over the same step on half parameters that rounds to nearest and loses small updates. The
forward and backward pass are left out: they are the same for all, and would hide the difference.

`checkpoint_pause`: how long a training loop stands still for an Orbax checkpoint of a few MB, saved in the
background, and at once. `pause` is what the loop waits for the call to return, `save` the time until the
checkpoint is complete; both ways in turn.
"""

import functools
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

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
        timed[name] = functools.partial(measure.step_time, compiled, state, grads)
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


SIZES = {"small": (4, 256), "few MB": (4, 512)}
WAYS = ("async", "sync")


def pauses(state: Any, directory: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of both ways in turn, the first save of each left out: way -> quantity -> repeats."""
    managers = {
        way: ocp.CheckpointManager(
            directory / way,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=way == "async"),
        )
        for way in WAYS
    }
    found: dict[str, dict[str, list[float]]] = {way: {"pause": [], "save": []} for way in managers}
    for step in range(REPEATS + 1):
        for way, manager in managers.items():
            start = time.perf_counter()
            manager.save(step, args=ocp.args.StandardSave(state))
            ends = {"pause": time.perf_counter()}
            manager.wait_until_finished()
            ends["save"] = time.perf_counter()
            for name, end in ends.items() if step else ():
                found[way][name].append(1e3 * (end - start))
    for manager in managers.values():
        manager.close()
    return found


def checkpoint_rows(size: str) -> list[dict[str, Any]]:
    params = drawn(*SIZES[size], "float32")
    tx = jmpp.loss_scaled(optax.adamw(1e-3), jmpp.DynamicLossScale())
    state = jax.block_until_ready({"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)})
    with tempfile.TemporaryDirectory() as directory:
        found = pauses(state, pathlib.Path(directory))
    megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
    return [
        {
            "MB": round(megabytes, 1),
            "way": way,
            "pause_ms": measure.spread(times["pause"]),
            "save_ms": measure.spread(times["save"]),
            "pause_share_of_save": measure.ratio(times["pause"], times["save"]),
            "pause_relative_to_sync": measure.ratio(times["pause"], found["sync"]["pause"]),
        }
        for way, times in found.items()
    ]


ABOUT = {"layers": LAYERS, "width": WIDTH, "repeats": REPEATS}
TABLES = (
    Table("rounding_cost", rounding_rows, by={"dtype": ("float16", "bfloat16")}, about=ABOUT),
    Table("checkpoint_pause", checkpoint_rows, by={"state": SIZES}, about={"repeats": REPEATS}),
)
