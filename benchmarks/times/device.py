"""Training steps on the device of this machine, all variants of a model timed in turn in one process.

`zoo_device`: real models at their published sizes in every precision, items per second and memory.
`fp8_device`: the steps of `fp8_gpu` under float8 recipes beside bfloat16, on a GPU with float8 arithmetic.
With `tiny` they run on a CPU.

A borrowed GPU may be taken away: the models that say most come first, each is saved when it is done, and none
begins that would not be done in time. Models that are left are measured by calling it again with their names.
"""

import contextlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.counts.float8 import SIZES, policy_of
from benchmarks.models import MODELS, Model
from benchmarks.models.small import Encoder, language
from benchmarks.table import Table
from jmp_policy._src.core.targets import Target, target_of_device
from jmp_policy._src.report.lowering.kernels import kernel_seconds, kernels_of

REPEATS = 15
#: Time for all models, below the ten minutes for which a command often may run.
SECONDS = 540.0
#: Models to begin with: one of each kind, those that other libraries publish numbers for.
FIRST = ("ResNet-50", "BERT-Large", "GPT-2")


def timed(
    variants: dict[str, steps.Variant], batch: Any, loss: Any, repeats: int, precisions: Any = None
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """The compiled steps, and seconds of each."""
    compiled, runs = {}, {}
    for name, variant in variants.items():
        precision = (precisions or {}).get(name)
        with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
            step, state = steps.begun(variant, batch, loss)
            compiled[name] = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        runs[name] = measure.timed_steps(compiled[name], state, batch)
        runs[name]()  # The first run is no measurement.
    return compiled, measure.interleaved(runs, repeats)


def variants(model: Model) -> dict[str, steps.Variant]:
    bare, wrapped = model.module, jmpp.wrap(model.module, "mixed_float16")
    return {
        "float32, highest": steps.plain(bare),
        "float32, TF32 where there is": steps.plain(bare),
        "float16 by hand": steps.hand_scaled(steps.ByHand(bare, jnp.float16)),
        "float16, no scaling": steps.plain(wrapped),
        "float16": steps.scaled(wrapped),
        "bfloat16": steps.plain(jmpp.wrap(bare, "mixed_bfloat16")),
    }


PRECISIONS = {"float32, highest": "highest", "float32, TF32 where there is": "default"}


def rows(name: str, size: str, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per variant: items per second with their spread, and over float32; memory of the program."""
    model = MODELS[name](size)
    batch = model.batch()
    items = jax.tree.leaves(batch)[0].shape[0]
    compiled, times = timed(variants(model), batch, model.loss, repeats, PRECISIONS)
    medians = {variant: statistics.median(seconds) for variant, seconds in times.items()}
    device = jax.devices()[0]
    target = target_of_device(device.device_kind)
    # The most that was in use so far, all variants together; 0 where the device does not say.
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    found = [
        {
            "variant": variant,
            "items_per_second": measure.spread([items / s for s in seconds]),
            "over_float32": round(medians["float32, highest"] / medians[variant], 3),
            **_roofline(compiled[variant], variant, medians[variant], target),
            "temp_gigabytes": _temporary(compiled[variant]),
            "peak_gigabytes": round(peak / 1e9, 3),
        }
        for variant, seconds in times.items()
    ]
    scaled = next(row for row in found if row["variant"] == "float16")
    scaled["over_unscaled"] = round(medians["float16"] / medians["float16, no scaling"], 4)
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


def _temporary(compiled: Any) -> float:
    return round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3)


RECIPES = ("bfloat16", "fp8_current", "fp8_rowwise", "fwd:fp8_current", "fp8_block", "mxfp8")
POLICIES = {recipe: policy_of(recipe) for recipe in RECIPES}
#: Most to gain first.
ORDER = ("4096 wide, 1 layer", "BERT width, 4 layers", "GPT-2", "4096 wide, 4 layers, 4 times as many tokens")
TINY = language(Encoder(vocabulary=64, hidden=32, heads=2, mlp=64, layers=1), 2, 32)


def fp8_rows(model: Model, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per policy: seconds of a step, over bfloat16's, and which products its program has."""
    batch = model.batch()
    tokens = jax.tree.leaves(batch)[0].size
    variants = {name: steps.plain(jmpp.wrap(model.module, policy)) for name, policy in POLICIES.items()}
    compiled, times = timed(variants, batch, model.loss, repeats)
    target = target_of_device(jax.devices()[0].device_kind)
    found = []
    for policy, seconds in times.items():
        products = [k for k in kernels_of(compiled[policy].as_text(), target) if k.flops] if target else []
        found.append({
            "policy": policy,
            "milliseconds": round(statistics.median(seconds) * 1e3, 3),
            "tokens_per_second": round(tokens / statistics.median(seconds)),
            "of_bfloat16": measure.ratio(seconds, times["bfloat16"]),
            "float8_products": sum("float8" in k.operands for k in products),
            "other_products": sum("float8" not in k.operands for k in products),
            "temp_gigabytes": _temporary(compiled[policy]),
        })  # fmt: skip
    return found


HOW = {"about": {"repeats": REPEATS}, "size": "full", "seconds": SECONDS}
ZOO = Table("zoo_device", lambda name, size: rows(name, size), by={"model": MODELS}, first=FIRST, **HOW)
FP8 = Table(
    "fp8_device",
    lambda name, size: fp8_rows(SIZES[name] if size == "full" else TINY),
    by={"size": ORDER},
    **HOW,
)
TABLES = (ZOO, FP8)
