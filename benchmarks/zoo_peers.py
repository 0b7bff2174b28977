"""Real models' float16 steps with jmp, mpx and Flax's DynamicScale, and Keras with and without loss scaling.

`python -m benchmarks.zoo_peers` measures in the environment of `peers`, into which it installs JAX's compiler
for GPUs and Keras. `gpu` compiles the models at their published sizes for an H100, about a minute per row,
but for the steps by hand and with this library, which `zoo_gpu` counts. `cpu` times small ones. `keras`
compiles its ResNet-50. With names of models after it, only these, and the other rows stay as they were:
`python -m benchmarks.zoo_peers gpu ResNet-50 GPT-2`.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _peer_steps, _record, _steps, peers
from benchmarks.by_hand import ByHand
from benchmarks.gpu_target import PluginMissingError, Report, compile_for_gpu, table_rows
from benchmarks.models import MODELS, Model

REPEATS = 7
BASE = "by hand"
#: The parts, and which rows of `results/zoo_peers.json` are theirs.
PARTS = {"gpu": "H100", "cpu": "CPU", "keras": "H100, Keras"}
#: Steps that `zoo_gpu` compiles for the same card: they are counted there.
COUNTED_BY_ZOO_GPU = {BASE: "by hand, scaling by hand", "jmp_policy": "wrapped, loss_scaled"}
TARGET = "NVIDIA H100 80GB, compiled only"


def variants(model: Model) -> dict[str, tuple[Any, Any, Any, Callable[[], Any]]]:
    """Library -> model, optimizer, step, and the loss scale held outside the optimizer.

    jmp's loss scale is taken apart outside the step: JAX does not lower a step that takes it whole.
    """
    tx, bare = optax.adamw(1e-4), model.module
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    hand, wrapped = ByHand(bare, jnp.float16), jmpp.wrap(bare, "mixed_float16")
    return {
        BASE: (hand, tx, _steps.hand_scaled_step, _steps.hand_scale),
        "jmp_policy": (wrapped, scaled, _steps.library_step, tuple),
        "jmp": (bare, tx, _peer_steps.jmp_arrays_step, _peer_steps.jmp_arrays),
        "mpx": (bare, tx, _peer_steps.mpx_step, _peer_steps.mpx_scale),
        "flax DynamicScale": (hand, tx, _peer_steps.flax_step, _peer_steps.flax_scale),
    }


def gpu_rows(name: str, size: str = "full", compiled: Callable[..., Report] = compile_for_gpu) -> list[Any]:
    """One row per library: what share of its FLOPs is in half precision, and what its step is on an H100."""
    model = MODELS[name](size)
    batch = model.shapes()
    rows = []
    for library, (module, tx, make_step, make_scale) in variants(model).items():
        row = {"where": PARTS["gpu"], "model": name, "library": library}
        try:
            state = jax.eval_shape(lambda b, m=module, tx=tx, s=make_scale: _steps.init(m, tx, b, s()), batch)
            step = make_step(module, tx, loss=model.loss)
            row["half_share"] = round(jmpp.audit(step, state, batch).half_share, 4)
            if library not in COUNTED_BY_ZOO_GPU:
                report = compiled(jax.jit(step, donate_argnums=0), (state, batch))
                (found,) = table_rows({library: report}, {})
                row |= {quantity: value for quantity, value in found.items() if quantity != "variant"}
        except PluginMissingError:
            raise
        except Exception as error:  # A peer that fails on a model is a result.
            row["error"] = peers.described(error)
        rows.append(row)
    return rows


def cpu_rows(name: str, size: str = "small", repeats: int = REPEATS) -> list[Any]:
    """One row per library: times and counts relative to the step by hand, on the CPU of this machine."""
    model = MODELS[name](size)
    how = {"repeats": repeats, "compiles": 1, "steps": 2, "clock": time.process_time}
    found, errors = peers.measure(variants(model), model.batch(), model.loss, **how)
    rows = []
    for library in variants(model):
        row: dict[str, Any] = {"where": PARTS["cpu"], "model": name, "library": library}
        if library in errors:
            rows.append({**row, "error": errors[library]})
            continue
        for quantity in ("trace_lower", *_measure.COUNTS, "step"):
            row[quantity] = _measure.compare(quantity, found[library][quantity], found[BASE][quantity])
        rows.append(row)
    return rows


def keras_rows(name: str = "ResNet-50") -> list[Any]:
    """Keras's own ResNet-50 without and with its `LossScaleOptimizer`, both branches of its skip counted.

    It is another model than ours: what its loss scaling adds can be compared, and nothing else.
    """
    batch, reports, plain = MODELS[name]("full").shapes(), {}, "keras, no scaling"
    for library, scaled in ((plain, False), ("keras LossScaleOptimizer", True)):
        step, state = _peer_steps.keras_step(scaled)
        reports[library] = compile_for_gpu(jax.jit(step, donate_argnums=0), (state, batch))
    about = {"where": PARTS["keras"], "model": name}
    found = table_rows(reports, {"keras LossScaleOptimizer": plain})
    return [{**about, "library": row.pop("variant"), **row} for row in found]


def measure(part: str, names: list[str]) -> None:
    """Adds the rows of a part, and saves after every model."""
    rows_of = {"gpu": gpu_rows, "cpu": cpu_rows, "keras": keras_rows}[part]
    where, libraries = list(PARTS.values()), (*peers.PEERS, "keras")
    for name in names:
        try:
            new = rows_of(name)
        except PluginMissingError as error:
            print(f"Skipped zoo_peers {part}. {error}")
            return
        _record.update(
            "zoo_peers",
            new,
            {"where": where, "model": list(MODELS)},
            target=TARGET,
            optimizer="AdamW",
            peers=peers.versions(libraries),
            relative_to=BASE,
            repeats=REPEATS,
        )


def main(arguments: list[str] | None = None) -> None:
    """Measures a part, or all of them, in the environment of the peers."""
    arguments = list(arguments or [])
    parts = [arguments.pop(0)] if arguments and arguments[0] in PARTS else list(PARTS)
    jax_version = importlib.metadata.version("jax")
    plugins = [f"jax-cuda12-{part}=={jax_version}" for part in ("plugin", "pjrt")]
    peers.build_environment(*plugins, "nvidia-cuda-nvcc-cu12", "keras")
    for part in parts:
        peers.run_inside("benchmarks.zoo_peers", part, *arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        part, *names = sys.argv[2:]
        measure(part, names or (["ResNet-50"] if part == "keras" else list(MODELS)))
    else:
        main(sys.argv[1:])
