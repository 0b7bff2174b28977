"""Steps against the same steps otherwise, in ratios of times and counts that are measured in turn on the CPU.

`overhead`: what the library costs on top of a step by hand. `grad_dtype_cost`: float32 weight gradients from
half products. `zoo_cost`: real models, smaller.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.counts.encoder import GRADS
from benchmarks.models import MODELS, Model, small
from benchmarks.table import Table

REPEATS, ZOO_REPEATS = 11, 7


def compared(
    model: Model, made: dict[str, steps.Variant], pairs: Sequence[tuple[str, str]], repeats: int, **how: Any
) -> list[dict[str, Any]]:
    """A row for each pair of steps of a model: the first over the second."""
    batch = model.batch()
    found = measure.in_turn(steps.all_begun(made, batch, model.loss), batch, repeats, **how)
    return [
        {"comparison": f"{over} / {under}", **measure.compared(found, over, under)} for over, under in pairs
    ]


def overhead(name: str) -> list[dict[str, Any]]:
    model = small.TABLE[name]
    made = {
        "by hand": steps.hand_scaled(steps.ByHand(model.module, jnp.float16)),
        "library": steps.scaled(jmpp.wrap(model.module, "mixed_float16")),
    }
    # Compiling takes seconds, and varies less than tracing.
    return compared(model, made, [("library", "by hand")], REPEATS, compiles=4)


def float32_gradients(name: str) -> list[dict[str, Any]]:
    model = small.TABLE[name]
    made = {grad: steps.plain(jmpp.wrap(model.module, policy)) for grad, policy in GRADS.items()}
    return compared(model, made, [("grad=float32", "grad=None")], REPEATS)


#: What is compared with what.
COMPARISONS = (
    ("wrapped, loss_scaled", "by hand, scaling by hand"),
    ("mixed_bfloat16", "float32"),
    ("bfloat16, grad=float32", "float32"),
)


def variants(model: Model) -> dict[str, steps.Variant]:
    bare = model.module
    return {
        "by hand, scaling by hand": steps.hand_scaled(steps.ByHand(bare, jnp.float16)),
        "wrapped, loss_scaled": steps.scaled(jmpp.wrap(bare, "mixed_float16")),
        "float32": steps.plain(bare),
        "mixed_bfloat16": steps.plain(jmpp.wrap(bare, "mixed_bfloat16")),
        "bfloat16, grad=float32": steps.plain(jmpp.wrap(bare, "p=f32,c=bf16,o=f32,g=f32")),
    }


def zoo_rows(name: str, size: str, repeats: int = ZOO_REPEATS) -> list[dict[str, Any]]:
    model = MODELS[name](size)
    return compared(model, variants(model), COMPARISONS, repeats, steps=2)


TABLES = (
    Table("overhead", overhead, by={"model": small.TABLE}, about={"repeats": REPEATS}),
    Table("grad_dtype_cost", float32_gradients, by={"model": small.TABLE}, about={"repeats": REPEATS}),
    Table("zoo_cost", zoo_rows, by={"model": MODELS}, about={"repeats": ZOO_REPEATS}, size="small"),
)
