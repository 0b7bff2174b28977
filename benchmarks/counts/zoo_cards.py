"""Real models at their published sizes, compiled for cards and TPUs: what `lowering_report` says of them.

Its parts are used one by one, because its estimates under autocast, which these tables do not show, would
take as long again. `zoo_cards`: estimated speed-ups, Tensor Cores and memory on three cards, half an hour on
two cores. `zoo_tpu`: bytes, memory and products in bfloat16, hours. Bytes are those between a chip and its
memory, loops counted as often as they run; memory is the most in use at a time, because a TPU's compiler
often reports no temporary memory.
"""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.counts.zoo_gpu import variants
from benchmarks.gpu_target import compiled_for
from benchmarks.models import MODELS, Model
from benchmarks.table import Table
from jmp_policy._src.core.targets import TARGETS, Target, find_target
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import Exported, compiled, exported
from jmp_policy._src.report.lowering.kernels import Kernel, estimates, kernels_of
from jmp_policy._src.report.lowering.lowered import HALVES

CARDS = ("V100", "A100", "H100")


@functools.lru_cache(maxsize=1)
def programs(name: str, size: str) -> dict[str, Exported]:
    """Whole steps by precision: float16 with loss scaling, the same in float32, and bfloat16 without."""
    model = MODELS[name](size)
    bfloat16 = jmpp.wrap(model.module, "mixed_bfloat16")
    half, shapes = _flat(model, variants(model)["wrapped, loss_scaled"])
    brain, brain_shapes = _flat(model, steps.plain(bfloat16))
    made = {
        "float32": (replay_in_float32(half.call), half.arrays, shapes),
        "float16": (half.call, half.arrays, shapes),
        "bfloat16": (brain.call, brain.arrays, brain_shapes),
    }
    return {precision: exported(*parts) for precision, parts in made.items()}


def _flat(model: Model, variant: steps.Variant) -> tuple[Any, range]:
    """A step as a function of arrays, and the positions of those that it may overwrite."""
    step, (state, batch) = steps.types(variant, model)
    function = as_function(step, (state, batch), {}, "zoo_cards")
    return function, range(len(jax.tree.leaves(state)))


def rows(made: dict[str, Exported], card: Target) -> list[dict[str, Any]]:
    """One row per precision that the card has; what does not compile is a row with the error."""
    chosen = {p: program for p, program in made.items() if p == "float32" or p in card.on_tensor_cores}
    try:
        answers = dict(zip(chosen, compiled(list(chosen.values()), card), strict=True))
    except jmpp.report.LoweringUnavailableError:
        raise
    except RuntimeError as error:
        answers = {precision: Compiled(error=str(error)) for precision in chosen}
    kernels = {p: kernels_of(answer.text, card) for p, answer in answers.items() if not answer.error}
    found = estimates({p: ("as given", some) for p, some in kernels.items()}, card)
    seconds = {estimate.precision: estimate.seconds for estimate in found}
    rows = []
    for estimate in found:
        over = {base: seconds[base] / estimate.seconds for base in ("float32", "tf32") if base in seconds}
        rows.append({
            "precision": estimate.precision,
            "estimated_ms": round(estimate.seconds * 1e3, 2),
            **{f"over_{base}": round(times, 2) for base, times in over.items()},
            "bound_by": estimate.bound_by,
            **_counts(estimate.precision, kernels, answers),
        })  # fmt: skip
    failed = {p: answer.error.splitlines()[-1][:300] for p, answer in answers.items() if answer.error}
    return [*rows, *({"precision": p, "error": error} for p, error in failed.items())]


def _counts(
    precision: str, kernels: dict[str, tuple[Kernel, ...]], answers: dict[str, Compiled]
) -> dict[str, Any]:
    """What the program of a precision launches and needs; float32's stands for TF32, too."""
    program = precision if precision in answers else "float32"
    some, answer = kernels[program], answers[program]
    counts: dict[str, Any] = {
        "kernels": sum(kernel.times for kernel in some),
        "argument_gigabytes": round(answer.argument_bytes / 1e9, 3),
        "temp_gigabytes": round(answer.temp_bytes / 1e9, 3),
    }
    if precision in HALVES:
        flops = sum(kernel.times * kernel.flops for kernel in some)
        on = sum(kernel.times * kernel.flops for kernel in some if kernel.tensor_cores)
        counts["tensor_core_share"] = round(on / flops, 4)
    return counts


SLICES = ("v5e", "v6e")


def tpu_variants(model: Model) -> dict[str, steps.Variant]:
    hand, wrapped = steps.ByHand(model.module, jnp.bfloat16), jmpp.wrap(model.module, "mixed_bfloat16")
    return {
        "float32": steps.plain(model.module),
        "by hand": steps.plain(hand),
        "wrapped": steps.plain(wrapped),
        "autocast": steps.autocast(model.module, "bfloat16"),
    }


def tpu_row(model: Model, variant: steps.Variant, slice_: str) -> dict[str, Any]:
    """What a whole step is on one TPU, or why it does not compile."""
    step, (state, batch) = steps.types(variant, model)
    kernels, answer = compiled_for(find_target(slice_), step, state, batch)
    if answer.error:
        return {"error": answer.error.splitlines()[-1][:300]}
    products = [kernel for kernel in kernels if kernel.flops]
    operands = Counter(" x ".join(dict.fromkeys(kernel.operands.split(" x "))) for kernel in products)
    return {
        "gigabytes": round(sum(kernel.times * kernel.bytes for kernel in kernels) / 1e9, 2),
        "peak_gigabytes": round(answer.peak_bytes / 1e9, 3),
        "products": dict(operands),
    }


def tpu_rows(name: str, slice_: str, size: str) -> list[dict[str, Any]]:
    model = MODELS[name](size)
    return [{"variant": v, **tpu_row(model, made, slice_)} for v, made in tpu_variants(model).items()]


ADAMW = {"optimizer": "AdamW"}
TABLES = (
    Table(
        "zoo_cards",
        lambda name, card, size: rows(programs(name, size), TARGETS[card]),
        by={"model": MODELS, "card": CARDS},
        size="full",
        about={**ADAMW, "target": "compiled only", "cards": CARDS},
    ),
    Table("zoo_tpu", tpu_rows, {"model": MODELS, "target": SLICES}, {**ADAMW, "slices": SLICES}, size="full"),
)
