"""Real models on the device of this machine: items per second and memory, in every precision.

`python -m benchmarks.zoo_device` runs them at their published sizes and wants a GPU; with `tiny` it runs on a
CPU. All variants of a model are timed in turn in one process.

A borrowed GPU may be taken away: the models that say most come first, each is saved when it is done, and none
begins that would not be done within `SECONDS`, to judge by the slowest so far. Models that are left are
measured by calling it again with their names; the rows of the others stay.
"""

import contextlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _record, _steps
from benchmarks.by_hand import ByHand
from benchmarks.models import MODELS, SIZES, Model
from jmp_policy._src.core.targets import Target, target_of_device
from jmp_policy._src.report.lowering.kernels import kernels_of
from jmp_policy._src.report.lowering.roofline import kernel_seconds

REPEATS = 15
#: Time for all models, below the ten minutes for which a command often may run.
SECONDS = 540.0
#: Models to begin with: one of each kind, those that other libraries publish numbers for.
FIRST = ("ResNet-50", "BERT-Large", "GPT-2")


def variants(model: Model) -> dict[str, tuple[Any, Any, Any, Any, str | None]]:
    """Name -> model, optimizer, step, loss scale outside the optimizer, precision of float32 products."""
    tx, bare = optax.adamw(1e-4), model.module
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    hand, wrapped = ByHand(bare, jnp.float16), jmpp.wrap(bare, "mixed_float16")
    return {
        "float32, highest": (bare, tx, _steps.plain_step, (), "highest"),
        "float32, TF32 where there is": (bare, tx, _steps.plain_step, (), "default"),
        "float16 by hand": (hand, tx, _steps.hand_scaled_step, _steps.hand_scale(), None),
        "float16, no scaling": (wrapped, tx, _steps.plain_step, (), None),
        "float16": (wrapped, scaled, _steps.library_step, (), None),
        "bfloat16": (jmpp.wrap(bare, "mixed_bfloat16"), tx, _steps.plain_step, (), None),
    }


def rows(name: str, size: str = "full", repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per variant: items per second with their spread, and over float32; memory of the program."""
    model = MODELS[name](size)
    batch = model.batch()
    items = jax.tree.leaves(batch)[0].shape[0]
    compiled, runs = {}, {}
    for variant, (module, tx, make_step, scale, precision) in variants(model).items():
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            state = jax.jit(lambda b, m=module, tx=tx, s=scale: _steps.init(m, tx, b, s))(batch)
            step = jax.jit(make_step(module, tx, loss=model.loss), donate_argnums=0)
            compiled[variant] = step.lower(state, batch).compile()
        runs[variant] = _measure.timed_step(compiled[variant], state, batch)
        runs[variant]()  # The first run is no measurement.
    times = _measure.interleaved(runs, repeats)
    base = statistics.median(times["float32, highest"])
    unscaled = statistics.median(times["float16, no scaling"])
    target = target_of_device(jax.devices()[0].device_kind)
    found = []
    for variant, seconds in times.items():
        memory = compiled[variant].memory_analysis()
        found.append(
            {
                "model": name,
                "variant": variant,
                "items_per_second": _measure.spread([items / s for s in seconds]),
                "over_float32": round(base / statistics.median(seconds), 3),
                **_roofline(compiled[variant], variant, statistics.median(seconds), target),
                "temp_gigabytes": round(memory.temp_size_in_bytes / 1e9, 3),
                "peak_gigabytes": round(_peak() / 1e9, 3),
            }
        )
    scaled = next(row for row in found if row["variant"] == "float16")
    scaled["over_unscaled"] = round(statistics.median(times["float16"]) / unscaled, 4)
    return found


def _roofline(compiled: Any, variant: str, seconds: float, target: Target | None) -> dict[str, float]:
    """The share of the peak rate that the products reach, and the roofline's time beside the measured one."""
    if target is None:
        return {}
    kernels = kernels_of(compiled.as_text(), target)
    exact = variant == "float32, highest"
    products = [kernel for kernel in kernels if kernel.flops]
    peak = sum(k.times * k.flops / target.rate("float32" if exact else k.arithmetic) for k in products)
    estimate = sum(k.times * (kernel_seconds(k, target, exact)[0] + target.launch_seconds) for k in kernels)
    return {
        "share_of_peak": round(peak / seconds, 3),
        "measured_ms": round(seconds * 1e3, 2),
        "estimated_ms": round(estimate * 1e3, 2),
    }


def _peak() -> int:
    """The most memory that the device had in use so far, all variants together; 0 where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def main(arguments: list[str] | None = None) -> None:
    arguments = list(arguments or [])
    size = arguments.pop(0) if arguments and arguments[0] in SIZES else "full"
    if size == "full" and jax.default_backend() == "cpu":
        print(
            "Skipped zoo_device: it wants a GPU or TPU; `python -m benchmarks.zoo_device tiny` runs anywhere."
        )
        return
    device = jax.devices()[0].device_kind
    names = arguments or sorted(MODELS, key=lambda name: (name not in FIRST, list(MODELS).index(name)))
    for name, new in _measure.on_borrowed_device(names, lambda name: rows(name, size), SECONDS):
        found = [{"model": name, "error": new}] if isinstance(new, str) else new
        if size != "full":
            _record.show(f"zoo_device, {size}, {device}", found)
            continue
        order = {"model": list(MODELS)}
        _record.update("zoo_device", found, order, device=device, size=size, repeats=REPEATS)


if __name__ == "__main__":
    main(sys.argv[1:])
