"""Real models at their published sizes on GPUs, compiled only: kernels, bytes, memory, estimated speed-up.

`zoo_gpu`: on an H100, by hand and wrapped, without and with loss scaling; half an hour on two cores.
`autocast_zoo`: by hand, the softmax of attention in half, too, and with the loss of the float32 model under
`autocast`. `loss_scaling_zoo`: what loss scaling adds to the wrapped step on three cards, in about an hour.
It may be at most 3 % of launches and 1.5 % of bytes.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.gpu_target import TARGET, Report, compile_for_gpu, table_rows
from benchmarks.models import MODELS, Model
from benchmarks.models._model import cross_entropy, images
from benchmarks.models.resnet import Bottleneck
from benchmarks.table import Table
from jmp_policy._src.core.targets import GPUS

CARDS = ("H100", "A100", "V100")
BASES = {
    "by hand, scaling by hand": "by hand, no scaling",
    "wrapped, no scaling": "by hand, no scaling",
    "wrapped, loss_scaled": "wrapped, no scaling",
}


def variants(model: Model) -> dict[str, steps.Variant]:
    hand, wrapped = steps.ByHand(model.module, jnp.float16), jmpp.wrap(model.module, "mixed_float16")
    return {
        "by hand, no scaling": steps.plain(hand),
        "by hand, scaling by hand": steps.hand_scaled(hand),
        "wrapped, no scaling": steps.plain(wrapped),
        "wrapped, loss_scaled": steps.scaled(wrapped),
    }


def step_and_arguments(model: Model, variant: steps.Variant) -> tuple[Any, Any]:
    """A whole step of a variant, and the types of its arguments."""
    return steps.types(variant, model.shapes(), model.loss)


def rows(name: str, size: str) -> list[dict[str, Any]]:
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
    return found


def autocast_rows(name: str, size: str) -> list[dict[str, Any]]:
    model = MODELS[name](size)
    made = {
        "float16 by hand": variants(model)["by hand, no scaling"],
        "float16 autocast": steps.autocast(model.module, "float16"),
    }
    found = {name: compile_for_gpu(*step_and_arguments(model, variant)) for name, variant in made.items()}
    return table_rows(found, {"float16 autocast": "float16 by hand"})


class SmallConvNet(nn.Module):
    """A small network of 1x1 and 3x3 convolutions with batch normalisation, which nobody tuned for."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(64, (3, 3), 2, use_bias=False)(x)))
        for features, stride in ((64, 1), (64, 1), (128, 2), (128, 1)):
            x = Bottleneck(features, stride)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


#: The zoo, and a model that is small enough to compile in seconds.
ALL = {
    **MODELS,
    "Small BatchNorm net": lambda _: Model(SmallConvNet(), images(64, 64, 1000), cross_entropy, "none"),
}


def scaling_rows(name: str, card: str, size: str) -> list[dict[str, Any]]:
    model = ALL[name](size)
    made = {how: variants(model)[f"wrapped, {how}"] for how in ("no scaling", "loss_scaled")}
    target = GPUS[card].config()
    found = {how: compile_for_gpu(*step_and_arguments(model, v), target) for how, v in made.items()}
    return [row(name, card, found)]


def row(model: str, card: str, found: dict[str, Report]) -> dict[str, Any]:
    """What is counted, in lists by variant."""
    return {
        "model": model,
        "card": card,
        "variants": list(found),
        "launches": [report.launches for report in found.values()],
        "gigabytes": [round(report.bytes / 1e9, 3) for report in found.values()],
        "temp_gigabytes": [round(report.temp_bytes / 1e9, 3) for report in found.values()],
    }


ABOUT = {"target": TARGET, "optimizer": "AdamW"}
CARDS_ABOUT = {**ABOUT, "target": "compiled only", "cards": CARDS}
TABLES = (
    Table("zoo_gpu", rows, by={"model": MODELS}, size="full", about=ABOUT),
    Table("autocast_zoo", autocast_rows, by={"model": MODELS}, size="full", about=ABOUT),
    Table("loss_scaling_zoo", scaling_rows, {"model": ALL, "card": CARDS}, CARDS_ABOUT, size="full"),
)
