"""The same step with jmp, mpx, Flax's DynamicScale and by hand, in an environment that has the peers.

`python -m benchmarks.peers` builds that environment once, as `.venv-peers`, and measures inside it.
"""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _models, _peer_steps, _record, _steps

ENVIRONMENT = pathlib.Path(".venv-peers")
PEERS = ("jmp", "mixed-precision-for-jax")
SAME = ("jax", "flax", "optax", "rich")
REPEATS = 9
COMPILES = 4


def variants(cls: Any) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Name -> model, optimizer, step, and the loss scale held outside the optimizer."""
    tx = optax.adamw(1e-3)
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale(_peer_steps.INITIAL_SCALE))
    hand, wrapped = cls(dtype=jnp.float16), jmpp.wrap(cls(), "mixed_float16")
    return {
        "by hand": (hand, tx, _steps.hand_scaled_step, _steps.hand_scale),
        "jmp_policy": (wrapped, scaled, _steps.library_step, tuple),
        "jmp": (cls(), tx, _peer_steps.jmp_step, _peer_steps.jmp_scale),
        "jmp, scale as arrays": (cls(), tx, _peer_steps.jmp_arrays_step, _peer_steps.jmp_arrays),
        "mpx": (cls(), tx, _peer_steps.mpx_step, _peer_steps.mpx_scale),
        "flax DynamicScale": (hand, tx, _peer_steps.flax_step, _peer_steps.flax_scale),
    }


def measure(
    variants: dict[str, tuple[Any, Any, Any, Any]],
    batch: Any,
    loss: Any = _steps.cross_entropy,
    repeats: int = REPEATS,
    compiles: int = COMPILES,
    steps: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Times and counts, variant -> quantity -> repeats; and the errors of what does not run.

    Args:
      variants: as `variants` gives them.
      batch, loss: of the model.
      repeats, compiles: how often all is done, and how often compiled.
      steps: in one measurement.
      clock: for tracing and lowering.
    """
    made, compiled, errors = {}, {}, {}
    found: dict[str, dict[str, list[float]]] = {}
    for repeat in range(repeats + 1):
        for name, (model, tx, make_step, make_scale) in variants.items():
            if name in errors:
                continue
            try:
                if name not in made:
                    state = jax.jit(lambda b, m=model, tx=tx: _steps.init(m, tx, b))(batch)
                    made[name] = make_step(model, tx, loss=loss), state._replace(scale=make_scale())
                step, state = made[name]
                times, traced, lowered = _measure.trace_times(step, (state, batch), repeat, clock)
                if repeat < compiles:
                    times["compile"], compiled[name] = _measure.compile_time(lowered)
                    times |= _measure.counts(traced, compiled[name])
            except Exception as error:  # A peer that fails on this JAX is a result.
                errors[name] = described(error)
                continue
            for quantity, value in times.items():
                found.setdefault(name, {}).setdefault(quantity, []).append(value)
    # The first time is no measurement; what was done once is all there is.
    found = {name: {q: values[1:] or values for q, values in by.items()} for name, by in found.items()}

    def run(name: str) -> Any:
        return lambda: _measure.step_time(compiled[name], made[name][1], batch, steps)

    for name, times in _measure.interleaved({name: run(name) for name in found}, repeats).items():
        found[name]["step"] = times
    return found, errors


def described(error: Exception) -> str:
    """The type and the first line of an error, without the machine's paths."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/', '', first_line)}"


def rows() -> list[dict[str, Any]]:
    """One row per model and library, relative to the step by hand."""
    result = []
    for model in ("MLP", "Transformer"):
        cls, batch = _models.TABLE[model]
        found, errors = measure(variants(cls), batch())
        for name, by_quantity in found.items():
            row: dict[str, Any] = {"model": model, "library": name}
            for quantity, values in by_quantity.items():
                row[quantity] = _measure.compare(quantity, values, found["by hand"][quantity])
            result.append(row)
        result += [{"model": model, "library": name, "error": text} for name, text in errors.items()]
    return result


def build_environment(*more: str) -> None:
    """Makes the peers' environment, with the versions of JAX, Flax and optax that run here, and `more`."""
    pip = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet"]
    if not ENVIRONMENT.exists():
        print(f"Building {ENVIRONMENT} ...")
        venv.create(ENVIRONMENT, with_pip=True)
        pinned = [f"{name}=={importlib.metadata.version(name)}" for name in SAME]
        subprocess.run([*pip, *pinned], check=True)
    for peer in (*PEERS, *more):  # One by one: what does not install shows up as an error in its rows.
        subprocess.run([*pip, peer], check=False)


def run_inside(module: str, *arguments: str) -> None:
    """Runs `python -m module measure` and the arguments in the peers' environment."""
    sources = pathlib.Path(jmpp.__file__).parents[1], pathlib.Path(__file__).parents[1]
    path = os.pathsep.join(map(str, sources))
    command = [ENVIRONMENT / "bin" / "python", "-m", module, "measure", *arguments]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})


def main() -> None:
    build_environment()
    run_inside("benchmarks.peers")


def versions(peers: tuple[str, ...] = PEERS) -> dict[str, str]:
    """Of the peers, as they are installed here."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {peer: installed.get(peer, "not installed") for peer in peers}


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        _record.save("peers", rows(), peers=versions(), relative_to="by hand", repeats=REPEATS)
    else:
        main()
