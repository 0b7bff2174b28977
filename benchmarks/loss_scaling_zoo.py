"""What loss scaling adds to the steps of real models on three cards: launches, bytes, memory; compiled only.

`python -m benchmarks.loss_scaling_zoo` compiles all of them, which takes about an hour on two cores. Names of
models and cards, as in `python -m benchmarks.loss_scaling_zoo ResNet-50 GPT-2 A100`, choose these ones, and
keep the other rows as they were. Scaling may add at most 3 % of launches and 1.5 % of bytes to the same step
without it.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import optax

import jmp_policy as jmpp
from benchmarks import _record, _steps
from benchmarks.gpu_target import PluginMissingError, Report, compile_for_gpu
from benchmarks.models import MODELS, Model
from benchmarks.models._model import cross_entropy, images
from benchmarks.zoo_gpu import step_and_arguments
from jmp_policy._src.core.targets import GPUS

CARDS = ("H100", "A100", "V100")
NAME = "loss_scaling_zoo"


class Bottleneck(nn.Module):
    """A block of ResNet-50's kind."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(_norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x)))
        y = nn.relu(_norm()(nn.Conv(self.features, (3, 3), self.stride, use_bias=False)(y)))
        y = _norm()(nn.Conv(4 * self.features, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = _norm()(nn.Conv(4 * self.features, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class SmallConvNet(nn.Module):
    """A small network of 1x1 and 3x3 convolutions with batch normalisation, which nobody tuned for."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(_norm()(nn.Conv(64, (3, 3), 2, use_bias=False)(x)))
        for features, stride in ((64, 1), (64, 1), (128, 2), (128, 1)):
            x = Bottleneck(features, stride)(x)
        return nn.Dense(1000)(x.mean((1, 2)))


def _norm() -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=False)


def _small_conv_net(size: str) -> Model:
    return Model(SmallConvNet(), images(64, 64, 1000), cross_entropy, "none")


#: The zoo, and a model that is small enough to compile in seconds.
ALL = {**MODELS, "Small BatchNorm net": _small_conv_net}


def reports(model: Model, card: str) -> dict[str, Report]:
    """The wrapped step without and with loss scaling, compiled for a card."""
    wrapped, tx = jmpp.wrap(model.module, "mixed_float16"), optax.adamw(1e-4)
    scaled = jmpp.loss_scaled(tx, jmpp.DynamicLossScale())
    variants = {
        "no scaling": (wrapped, tx, _steps.plain_step, ()),
        "loss_scaled": (wrapped, scaled, _steps.library_step, ()),
    }
    return {
        name: compile_for_gpu(*step_and_arguments(model, parts), target=GPUS[card].config())
        for name, parts in variants.items()
    }


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


def save(new: list[dict[str, Any]], size: str = "full") -> None:
    """Writes rows in the place of those of the same models and cards."""
    order = {"model": list(ALL), "card": CARDS}
    _record.update(NAME, new, order, target="compiled only", cards=CARDS, size=size, optimizer="AdamW")


def main(chosen: list[str] | None = None, size: str = "full") -> None:
    cards = [card for card in CARDS if card in (chosen or ())] or CARDS
    names = [name for name in chosen or () if name not in CARDS] or list(ALL)
    for card in cards:
        for name in names:
            try:
                save([row(name, card, reports(ALL[name](size), card))], size)
            except PluginMissingError as error:
                print(f"Skipped {NAME}. {error}")
                return


if __name__ == "__main__":
    main(sys.argv[1:])
