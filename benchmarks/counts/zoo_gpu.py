"""Real models at their published sizes on an H100, compiled only: kernels, bytes and memory of a step.

By hand and wrapped, without and with loss scaling, which may add 3 % of launches and 1.5 % of bytes; and the
float32 model under `autocast`. An hour on two cores for each version of JAX: a version has rows of its own,
which come from a run under it.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.gpu_target import TARGET, compile_for_gpu, table_rows
from benchmarks.models import MODELS, TODAY, Model
from benchmarks.models._model import cross_entropy, images
from benchmarks.models.resnet import Bottleneck
from benchmarks.table import Table

BASES = {
    "by hand, scaling by hand": "by hand, no scaling",
    "wrapped, no scaling": "by hand, no scaling",
    "wrapped, loss_scaled": "wrapped, no scaling",
    "autocast": "by hand, no scaling",
}
#: Both ends of the range.
JAX = ("0.10", "0.12")


def variants(model: Model) -> dict[str, steps.Variant]:
    hand, wrapped = steps.ByHand(model.module, jnp.float16), jmpp.wrap(model.module, "mixed_float16")
    return {
        "by hand, no scaling": steps.plain(hand),
        "by hand, scaling by hand": steps.hand_scaled(hand),
        "wrapped, no scaling": steps.plain(wrapped),
        "wrapped, loss_scaled": steps.scaled(wrapped),
        "autocast": steps.autocast(model.module, "float16"),
    }


def rows(name: str, version: str, size: str) -> list[dict[str, Any]]:
    """One row per variant of a model; none under another version of JAX than this one."""
    if not jax.__version__.startswith(version):
        return []
    model = ALL[name](size)
    made = {name: steps.types(variant, model) for name, variant in variants(model).items()}
    return table_rows({name: compile_for_gpu(*parts) for name, parts in made.items()}, BASES)


class SmallConvNet(nn.Module):
    """A small network of 1x1 and 3x3 convolutions with batch normalisation, which nobody tuned for."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(64, (3, 3), 2, use_bias=False)(x)))
        for features, stride in ((64, 1), (64, 1), (128, 2), (128, 1)):
            x = Bottleneck(features, stride)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


ALL = {
    **TODAY,
    **MODELS,
    "Small BatchNorm net": lambda _: Model(SmallConvNet(), images(64, 64, 1000), cross_entropy),
}

ABOUT = {"target": TARGET, "optimizer": "AdamW"}
TABLES = (Table("zoo_gpu", rows, by={"model": ALL, "jax": JAX}, size="full", about=ABOUT),)
