"""A step of an encoder of BERT's width on an H100, compiled only: kernels, bytes and memory.

`loss_scaling_cost`: loss scaling, which may add at most 3 % of kernels and 1.5 % of bytes.
`autocast_gpu_cost`: the loss under `autocast`. It and `wrap` keep the softmax in float32, so both are
compared with the model by hand that does. `grad_dtype_gpu_cost`: float32 weight gradients.
"""

from typing import Any

import jax.numpy as jnp

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.gpu_target import TARGET, Report, compile_for_gpu, table_rows
from benchmarks.models import small
from benchmarks.table import Table

WIDTHS = {"vocabulary": 30528, "hidden": 1024, "heads": 16, "mlp": 4096, "layers": 4}
ENCODER = small.language(small.Encoder(**WIDTHS), 32, 128)
SOFTMAX32 = ENCODER.module.clone(softmax32=True)


def wrapped(policy: str = "mixed_float16") -> Any:
    return jmpp.wrap(ENCODER.module, policy)


def reports(variants: dict[str, steps.Variant]) -> dict[str, Report]:
    return {name: compile_for_gpu(*steps.types(variant, ENCODER)) for name, variant in variants.items()}


def loss_scaling() -> list[dict[str, Any]]:
    """One row per variant; those with loss scaling are compared with the same step without it."""
    hand, softmax32 = (steps.ByHand(module, jnp.float16) for module in (ENCODER.module, SOFTMAX32))
    found = reports({
        "float32, no scaling": steps.plain(ENCODER.module),
        "by hand, no scaling": steps.plain(hand),
        "by hand, scaling by hand": steps.hand_scaled(hand),
        "by hand, loss_scaled": steps.scaled(hand),
        "by hand (float32 softmax), no scaling": steps.plain(softmax32),
        "wrapped, no scaling": steps.plain(wrapped()),
        "wrapped, NoOpLossScale": steps.scaled(wrapped(), jmpp.NoOpLossScale()),
        "wrapped, loss_scaled": steps.scaled(wrapped()),
    })  # fmt: skip
    bases = {name: f"{name.partition(',')[0]}, no scaling" for name in found if "no scaling" not in name}
    bases["wrapped, no scaling"] = "by hand (float32 softmax), no scaling"
    return table_rows(found, bases)


def under_autocast() -> list[dict[str, Any]]:
    """The step in float32, and four rows per half type."""
    variants, bases = {"float32": steps.plain(ENCODER.module)}, {}
    for dtype in ("float16", "bfloat16"):
        softmax32 = f"{dtype} by hand (float32 softmax)"
        variants |= {
            f"{dtype} by hand": steps.plain(steps.ByHand(ENCODER.module, jnp.dtype(dtype))),
            softmax32: steps.plain(steps.ByHand(SOFTMAX32, jnp.dtype(dtype))),
            f"{dtype} wrapped": steps.plain(wrapped(f"mixed_{dtype}")),
            f"{dtype} autocast": steps.autocast(ENCODER.module, dtype),
        }
        bases |= {f"{dtype} wrapped": softmax32, f"{dtype} autocast": softmax32}
    return table_rows(reports(variants), bases)


#: Without and with float32 weight gradients.
GRADS = {"grad=None": "mixed_float16", "grad=float32": "p=f32,c=f16,o=f32,g=f32"}


def float32_gradients() -> list[dict[str, Any]]:
    variants = {name: steps.plain(wrapped(policy)) for name, policy in GRADS.items()}
    return table_rows(reports(variants), {"grad=float32": "grad=None"})


ABOUT = {"target": TARGET, **WIDTHS}
TABLES = (
    Table("loss_scaling_cost", loss_scaling, about=ABOUT),
    Table("autocast_gpu_cost", under_autocast, about=ABOUT),
    Table("grad_dtype_gpu_cost", float32_gradients, about=ABOUT),
)
