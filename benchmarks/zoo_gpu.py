"""Real models at their published sizes, compiled for an H100: kernels, bytes, memory, estimated speed-up.

`python -m benchmarks.zoo_gpu` compiles all of them in half an hour on two cores; with names, such as
`python -m benchmarks.zoo_gpu ResNet-50 GPT-2`, these ones, and keeps the other rows as they were.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _record, _steps
from benchmarks.by_hand import ByHand
from benchmarks.gpu_target import PluginMissingError, compile_for_gpu, table_rows
from benchmarks.models import MODELS, Model

BASES = {
    "by hand, scaling by hand": "by hand, no scaling",
    "wrapped, no scaling": "by hand, no scaling",
    "wrapped, loss_scaled": "wrapped, no scaling",
}


def variants(model: Model) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Name -> model, optimizer, step, loss scale held outside the optimizer."""
    tx = optax.adamw(1e-4)
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    hand, wrapped = ByHand(model.module, jnp.float16), jmpp.wrap(model.module, "mixed_float16")
    return {
        "by hand, no scaling": (hand, tx, _steps.plain_step, ()),
        "by hand, scaling by hand": (hand, tx, _steps.hand_scaled_step, _steps.hand_scale()),
        "wrapped, no scaling": (wrapped, tx, _steps.plain_step, ()),
        "wrapped, loss_scaled": (wrapped, scaled, _steps.library_step, ()),
    }


def step_and_arguments(model: Model, variant: tuple[Any, Any, Any, Any]) -> tuple[Any, Any]:
    """A whole step of a variant, and the types of its arguments."""
    module, tx, make_step, scale = variant
    batch = model.shapes()
    state = jax.eval_shape(lambda batch: _steps.init(module, tx, batch, scale), batch)
    return jax.jit(make_step(module, tx, loss=model.loss), donate_argnums=0), (state, batch)


def rows(name: str, size: str = "full") -> list[dict[str, Any]]:
    """One row per variant of a model; the library's has the estimate of its time, too."""
    model = MODELS[name](size)
    made = {variant: step_and_arguments(model, parts) for variant, parts in variants(model).items()}
    found = table_rows({variant: compile_for_gpu(*parts) for variant, parts in made.items()}, BASES)
    step, arguments = made["wrapped, loss_scaled"]
    report = jmpp.lowering_report(step, *arguments, target="H100")
    flops = sum(kernel.times * kernel.flops for kernel in report.matrix_kernels)
    half = sum(k.times * k.flops for k in report.matrix_kernels if k.tensor_cores)
    found[-1]["tensor_core_share"] = round(half / flops, 4)
    found[-1]["estimated_ms"] = {e.precision: round(e.seconds * 1e3, 2) for e in report.estimates}
    return [{"model": name, **row} for row in found]


def main(names: list[str] | None = None) -> None:
    for name in names or MODELS:
        try:
            new = rows(name)
        except (PluginMissingError, jmpp.LoweringUnavailableError) as error:
            print(f"Skipped zoo_gpu. {error}")
            return
        order = {"model": list(MODELS)}
        target = "NVIDIA H100 80GB, compiled only"
        _record.update("zoo_gpu", new, order, target=target, size="full", optimizer="AdamW")


if __name__ == "__main__":
    main(sys.argv[1:])
