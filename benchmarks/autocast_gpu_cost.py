"""Kernels, bytes and products of an AdamW step under `autocast` on an H100: compiled only, see `gpu_target`.

The model of `loss_scaling_cost`, in both half types, without loss scaling: in float32, with `dtype=` in every
layer, wrapped, and its loss under `autocast`. The last two keep the softmax in float32, so they are compared
with the model by hand that does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _models, _record, _steps
from benchmarks.gpu_target import PluginMissingError, Report, compile_for_gpu, table_rows
from benchmarks.loss_scaling_cost import BATCH, LENGTH, WIDTHS

DTYPES = ("float16", "bfloat16")
FLOAT32 = "float32"


def report(model: Any, autocast: str | None = None) -> Report:
    """Compiles the train step of one variant."""
    tx = optax.adamw(1e-4)
    batch = (jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),) * 2
    state = jax.eval_shape(lambda batch: _steps.init(model, tx, batch), batch)
    step = _steps.plain_step(model, tx, autocast)
    return compile_for_gpu(jax.jit(step, donate_argnums=0), (state, batch))


def rows() -> list[dict[str, Any]]:
    """The step in float32, and four rows per half type."""
    bare = _models.Encoder(**WIDTHS)
    reports, bases = {FLOAT32: report(bare)}, {}
    for dtype in DTYPES:
        hand = {"dtype": jnp.dtype(dtype), **WIDTHS}
        softmax32 = f"{dtype} by hand (float32 softmax)"
        reports |= {
            f"{dtype} by hand": report(_models.Encoder(**hand)),
            softmax32: report(_models.Encoder(softmax32=True, **hand)),
            f"{dtype} wrapped": report(jmpp.wrap(bare, f"mixed_{dtype}")),
            f"{dtype} autocast": report(bare, autocast=dtype),
        }
        bases |= {f"{dtype} wrapped": softmax32, f"{dtype} autocast": softmax32}
    return table_rows(reports, bases)


def main() -> None:
    try:
        found = rows()
    except PluginMissingError as error:
        print(f"Skipped autocast_gpu_cost. {error}")
        return
    _record.save("autocast_gpu_cost", found, target="NVIDIA H100 80GB, compiled only", **WIDTHS)


if __name__ == "__main__":
    main()
