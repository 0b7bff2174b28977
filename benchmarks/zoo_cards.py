"""Real models at their published sizes, compiled for three cards: estimated speed-ups, Tensor Cores, memory.

`python -m benchmarks.zoo_cards` compiles all of them in half an hour on two cores; with names, such as
`python -m benchmarks.zoo_cards ResNet-50 GPT-2`, these ones, and keeps the other rows as they were. The
numbers are those of `lowering_report`; its parts are used one by one, because its estimates under autocast,
which these tables do not show, would take as long again.
"""

import sys
from typing import Any

import optax

import jmp_policy as jmpp
from benchmarks import _record, _steps
from benchmarks.models import MODELS, Model
from benchmarks.zoo_gpu import step_and_arguments, variants
from jmp_policy._src.core.targets import TARGETS, Target
from jmp_policy._src.jaxpr.float32_replay import replay_in_float32
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import Exported, compiled, exported
from jmp_policy._src.report.lowering.kernels import Kernel, kernels_of
from jmp_policy._src.report.lowering.lowered import HALVES
from jmp_policy._src.report.lowering.roofline import estimates

CARDS = ("V100", "A100", "H100")


def programs(model: Model) -> dict[str, Exported]:
    """Whole steps by precision: float16 with loss scaling, the same in float32, and bfloat16 without."""
    bfloat16 = jmpp.wrap(model.module, "mixed_bfloat16")
    half, shapes = _flat(model, variants(model)["wrapped, loss_scaled"])
    brain, brain_shapes = _flat(model, (bfloat16, optax.adamw(1e-4), _steps.plain_step, ()))
    made = {
        "float32": (replay_in_float32(half.call), half.arrays, shapes),
        "float16": (half.call, half.arrays, shapes),
        "bfloat16": (brain.call, brain.arrays, brain_shapes),
    }
    return {precision: exported(*parts) for precision, parts in made.items()}


def _flat(model: Model, variant: tuple[Any, Any, Any, Any]) -> tuple[Any, range]:
    """A step as a function of arrays, and the positions of those that it may overwrite."""
    step, (state, batch) = step_and_arguments(model, variant)
    function = as_function(step, (state, batch), {}, "zoo_cards")
    return function, range(len(as_function(step, (state,), {}, "zoo_cards").arrays))


def rows(made: dict[str, Exported], card: Target) -> list[dict[str, Any]]:
    """One row per precision that the card has; what does not compile is a row with the error."""
    chosen = {p: program for p, program in made.items() if p == "float32" or p in card.on_tensor_cores}
    try:
        answers = dict(zip(chosen, compiled(list(chosen.values()), card), strict=True))
    except jmpp.LoweringUnavailableError:
        raise
    except RuntimeError as error:
        answers = {precision: Compiled(error=str(error)) for precision in chosen}
    kernels = {p: kernels_of(answer.text, card) for p, answer in answers.items() if not answer.error}
    found = estimates({p: ("as given", some) for p, some in kernels.items()}, card)
    seconds = {estimate.precision: estimate.seconds for estimate in found}
    done = [
        {
            "precision": estimate.precision,
            "estimated_ms": round(estimate.seconds * 1e3, 2),
            **_ratios(estimate.seconds, seconds),
            "bound_by": estimate.bound_by,
            **_counts(estimate.precision, kernels, answers),
        }
        for estimate in found
    ]
    failed = [
        {"precision": p, "error": answer.error.splitlines()[-1][:300]}
        for p, answer in answers.items()
        if answer.error
    ]
    return [*done, *failed]


def _ratios(seconds: float, by_precision: dict[str, float]) -> dict[str, float]:
    bases = [base for base in ("float32", "tf32") if base in by_precision]
    return {f"over_{base}": round(by_precision[base] / seconds, 2) for base in bases}


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


def main(names: list[str] | None = None, size: str = "full") -> None:
    for name in names or MODELS:
        made = programs(MODELS[name](size))
        for card in CARDS:
            try:
                new = [{"model": name, "card": card, **row} for row in rows(made, TARGETS[card])]
            except jmpp.LoweringUnavailableError as error:
                print(f"Skipped zoo_cards. {error}")
                return
            order = {"model": list(MODELS), "card": CARDS}
            _record.update(
                "zoo_cards", new, order, target="compiled only", cards=CARDS, size=size, optimizer="AdamW"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
