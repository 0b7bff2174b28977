"""Real models at their published sizes under `autocast`, compiled for an H100: bytes and temporary memory.

The AdamW step, with `dtype=` in every layer by hand (the softmax of attention in half, too) and with the loss
of the float32 model under `autocast`. `python -m benchmarks.autocast_zoo GPT-2` compiles one model and keeps
the rows of the others as they were.
"""

import sys
from typing import Any

import jax.numpy as jnp
import optax

from benchmarks import _record, _steps
from benchmarks.by_hand import ByHand
from benchmarks.gpu_target import PluginMissingError, compile_for_gpu, table_rows
from benchmarks.models import MODELS
from benchmarks.zoo_gpu import step_and_arguments

DTYPE = "float16"
BY_HAND, AUTOCAST = f"{DTYPE} by hand", f"{DTYPE} autocast"


def rows(name: str, size: str = "full") -> list[dict[str, Any]]:
    """Two rows of a model."""
    model, tx = MODELS[name](size), optax.adamw(1e-4)

    def under_autocast(module: Any, tx: Any, loss: Any) -> Any:
        return _steps.plain_step(module, tx, DTYPE, loss)

    hand = ByHand(model.module, jnp.dtype(DTYPE))
    reports = {
        BY_HAND: compile_for_gpu(*step_and_arguments(model, (hand, tx, _steps.plain_step, ()))),
        AUTOCAST: compile_for_gpu(*step_and_arguments(model, (model.module, tx, under_autocast, ()))),
    }
    return [{"model": name, **row} for row in table_rows(reports, {AUTOCAST: BY_HAND})]


def main(names: list[str] | None = None) -> None:
    for name in names or MODELS:
        try:
            new = rows(name)
        except PluginMissingError as error:
            print(f"Skipped autocast_zoo. {error}")
            return
        order = {"model": list(MODELS)}
        target = "NVIDIA H100 80GB, compiled only"
        _record.update("autocast_zoo", new, order, target=target, size="full", optimizer="AdamW")


if __name__ == "__main__":
    main(sys.argv[1:])
