"""How long a training loop stands still for an Orbax checkpoint: saved in the background, and at once.

The state is that of `loss_scaled(adamw)` and its parameters, a few MB. `pause` is what the loop waits for the
call to return, `save` the time until the checkpoint is complete; both ways in turn.
"""

import pathlib
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jmp_policy as jmpp
from benchmarks import _measure, _record

REPEATS = 21
SIZES = {"small": (4, 256), "few MB": (4, 512)}


def state_of(layers: int, width: int) -> dict[str, Any]:
    """Parameters and optimizer state."""
    keys = jax.random.split(jax.random.key(0), layers)
    params = {f"layer_{i}": jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}
    tx = jmpp.loss_scaled(optax.adamw(1e-3), jmpp.DynamicLossScale())
    return {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}


def save(manager: ocp.CheckpointManager, step: int, state: Any) -> dict[str, float]:
    """Milliseconds that the loop waits, and until the checkpoint is complete."""
    start = time.perf_counter()
    manager.save(step, args=ocp.args.StandardSave(state))
    paused = time.perf_counter() - start
    manager.wait_until_finished()
    return {"pause": 1e3 * paused, "save": 1e3 * (time.perf_counter() - start)}


def measure(state: Any, directory: pathlib.Path) -> dict[str, dict[str, list[float]]]:
    """Both ways in turn, the first save of each left out: way -> quantity -> repeats."""
    managers = {
        way: ocp.CheckpointManager(
            directory / way,
            options=ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=way == "async"),
        )
        for way in ("async", "sync")
    }
    found: dict[str, dict[str, list[float]]] = {way: {"pause": [], "save": []} for way in managers}
    for step in range(REPEATS + 1):
        for way, manager in managers.items():
            for name, milliseconds in save(manager, step, state).items():
                found[way][name] += [milliseconds] if step else []
    for manager in managers.values():
        manager.close()
    return found


def rows() -> list[dict[str, Any]]:
    """One row per size and way."""
    result = []
    for size, (layers, width) in SIZES.items():
        state = jax.block_until_ready(state_of(layers, width))
        with tempfile.TemporaryDirectory() as directory:
            found = measure(state, pathlib.Path(directory))
        megabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
        for way, times in found.items():
            shares = [a / b for a, b in zip(times["pause"], times["save"], strict=True)]
            against_sync = [a / b for a, b in zip(times["pause"], found["sync"]["pause"], strict=True)]
            result.append(
                {
                    "state": size,
                    "MB": round(megabytes, 1),
                    "way": way,
                    "pause_ms": _measure.spread(times["pause"]),
                    "save_ms": _measure.spread(times["save"]),
                    "pause_share_of_save": _measure.spread(shares),
                    "pause_relative_to_sync": _measure.spread(against_sync),
                }
            )
    return result


def main() -> None:
    _record.save("checkpoint_pause", rows(), repeats=REPEATS, backend=jax.default_backend())


if __name__ == "__main__":
    main()
