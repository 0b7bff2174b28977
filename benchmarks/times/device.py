"""Training steps on the device of this machine, all variants of a model timed in turn in one process.

`zoo_device`: real models at their published sizes in every precision, and with jmp, mpx and Flax's
DynamicScale where they are installed: items per second and memory.
`fp8_device`: the steps of `fp8_gpu` under float8 recipes beside bfloat16, on a GPU with float8 arithmetic.
With `tiny` they run on a CPU.

A borrowed GPU may be taken away: the models that say most come first, each is saved when it is done, and none
begins that would not be done in time. Models that are left are measured by calling it again with their names.
Beside an H100 the programs of ResNet-50 compile in three minutes, of Llama in two, of GPT-2 in four, and are
measured in less than half of one; that of `fp8_current` compiles in two.
"""

import concurrent.futures
import contextlib
import importlib.util
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.counts.float8 import SIZES, STEP_RECIPES, policy_of
from benchmarks.models import MODELS, TODAY, Model
from benchmarks.models.small import Encoder, language
from benchmarks.table import Table
from benchmarks.times import peers
from jmp_policy._src.core.targets import Target, target_of_device
from jmp_policy._src.report.lowering.kernels import kernel_seconds, kernels_of

REPEATS = 9
#: Steps in one measurement: what Python does for one hides behind the one before.
STEPS = 4
#: Time for all models, below the ten minutes for which a command often may run.
SECONDS = 540.0
#: Models to begin with: one of each kind, those that other libraries publish numbers for.
FIRST = ("BERT-Large", "ResNet-50", "Llama")


def timed(
    variants: dict[str, steps.Variant], model: Model, repeats: int, precisions: Any = None
) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, float]]:
    """The compiled steps, seconds of each, and milliseconds in which its kernels run.

    They are compiled side by side, and start from the same values.
    """
    batch, begin, device = model.batch(), time.perf_counter(), jax.devices()[0]
    compiled: dict[str, Any] = {}

    def compile_step(name: str, lowered: Any) -> None:
        compiled[name] = lowered.compile()
        print(f"{name}: compiled after {time.perf_counter() - begin:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = []
        # Traced one by one: `ByHand` changes Flax's modules meanwhile.
        for name, variant in variants.items():
            precision = (precisions or {}).get(name)
            with jax.default_matmul_precision(precision) if precision else contextlib.nullcontext():
                step, types = steps.types(variant, model)
                futures.append(pool.submit(compile_step, name, step.lower(*types)))
        # On the CPU: for a GPU, XLA compiles random numbers for minutes, and each small function for long.
        with jax.default_device(jax.devices("cpu")[0]):
            start = jax.jit(lambda batch: steps.init(model.module, steps.ADAMW, batch))(model.batch())
            states = {
                name: steps.State(*start[:2], variant.tx.init(start.params), variant.make_scale())
                for name, variant in variants.items()
            }
    for future in futures:
        future.result()
    runs = {}
    for name in variants:
        state = jax.tree.map(lambda x: jax.device_put(x, device, may_alias=False), states.pop(name))
        runs[name] = measure.timed_steps(compiled[name], state, batch, STEPS)
        runs[name]()  # The first run is no measurement.
    print(f"ready after {time.perf_counter() - begin:.0f} s", flush=True)
    times = measure.interleaved(runs, repeats)
    on_gpu = jax.default_backend() == "gpu"
    return compiled, times, {name: _in_kernels(run) for name, run in runs.items() if on_gpu}


def _in_kernels(run: Callable[[], float]) -> float:
    """Milliseconds of kernels in one step, without the gaps between them, which vary."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (written,) = pathlib.Path(folder).glob("**/*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(written)).planes)
    events = (
        event
        for plane in planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
    return round(sum(event.duration_ns for event in events) / STEPS / 1e6, 3)


def variants(model: Model) -> dict[str, steps.Variant]:
    bare, wrapped = model.module, jmpp.wrap(model.module, "mixed_float16")
    return {
        "float32, highest": steps.plain(bare),
        "float32, TF32 where there is": steps.plain(bare),
        "float16 by hand": steps.hand_scaled(steps.ByHand(bare, jnp.float16)),
        "float16, no scaling": steps.plain(wrapped),
        "float16, constant scale": steps.times_constant(wrapped, 2.0**15),
        "float16": steps.scaled(wrapped),
        "float16, autocast": steps.autocast(bare, "float16"),
        "bfloat16": steps.plain(jmpp.wrap(bare, "mixed_bfloat16")),
        **{f"float16, {peer}": made for peer, made in peers.variants(model).items() if _has(peer)},
    }


def _has(peer: str) -> bool:
    return peer.startswith("flax") or (peer in ("jmp", "mpx") and importlib.util.find_spec(peer) is not None)


PRECISIONS = {"float32, highest": "highest", "float32, TF32 where there is": "default"}
ALL = MODELS | TODAY


def rows(name: str, size: str, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per variant: items per second with their spread, and over float32; memory of the program."""
    model = ALL[name](size)
    items = jax.tree.leaves(model.shapes())[0].shape[0]
    compiled, times, kernels = timed(variants(model), model, repeats, PRECISIONS)
    medians = {variant: statistics.median(seconds) for variant, seconds in times.items()}
    target = target_of_device(jax.devices()[0].device_kind)
    found = [
        {
            "variant": variant,
            "items_per_second": measure.spread([items / s for s in seconds]),
            "over_float32": round(medians["float32, highest"] / medians[variant], 3),
            "over_tf32": round(medians["float32, TF32 where there is"] / medians[variant], 3),
            **_roofline(compiled[variant], variant, medians[variant], target),
            "temp_gigabytes": _temporary(compiled[variant]),
            **({"kernel_ms": kernels[variant]} if kernels else {}),
        }
        for variant, seconds in times.items()
    ]
    scaled = next(row for row in found if row["variant"] == "float16")
    scaled["over_unscaled"] = measure.ratio(times["float16"], times["float16, no scaling"])
    scaled["over_constant"] = measure.ratio(times["float16"], times["float16, constant scale"])
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


POLICIES = {recipe: policy_of(recipe) for recipe in STEP_RECIPES}
#: Most to gain first.
ORDER = ("4096 wide, 1 layer", "BERT width, 4 layers", "GPT-2", "4096 wide, 4 layers, 4 times as many tokens")
TINY = language(Encoder(vocabulary=64, hidden=32, heads=2, mlp=64, layers=1), 2, 32)


def fp8_rows(model: Model, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per policy: seconds of a step, over bfloat16's, and which products its program has."""
    tokens = jax.tree.leaves(model.shapes())[0].size
    variants = {name: steps.plain(jmpp.wrap(model.module, policy)) for name, policy in POLICIES.items()}
    compiled, times, _ = timed(variants, model, repeats)
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
ZOO = Table("zoo_device", lambda name, size: rows(name, size), by={"model": ALL}, first=FIRST, **HOW)
FP8 = Table(
    "fp8_device",
    lambda name, size: fp8_rows(SIZES[name] if size == "full" else TINY),
    by={"size": ORDER},
    **HOW,
)
TABLES = (ZOO, FP8)
