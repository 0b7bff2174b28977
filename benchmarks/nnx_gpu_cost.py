"""What wrapping and loss scaling add to an NNX encoder's step on an H100: compiled only, see `gpu_target`.

The twin of the model of `loss_scaling_cost`, in its widths. By hand means `dtype=` in every layer, around
Flax's own attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jmp_policy as jmpp
from benchmarks import _nnx_models, _nnx_steps, _record
from benchmarks.gpu_target import PluginMissingError, Report, compile_for_gpu, table_rows
from benchmarks.loss_scaling_cost import BATCH, LENGTH, WIDTHS

DTYPES = (jnp.float16, jnp.bfloat16)


def bare(dtype: Any = None) -> nnx.Module:
    return _nnx_models.Encoder(rngs=nnx.Rngs(0), length=LENGTH, dtype=dtype, **WIDTHS)


def report(dtype: Any, *, wrapped: bool, scaled: bool) -> Report:
    """Compiles one variant."""

    def make() -> tuple[nnx.Module, nnx.Optimizer]:
        model = jmpp.wrap(bare(), f"mixed_{jnp.dtype(dtype).name}") if wrapped else bare(dtype)
        tx = optax.adamw(1e-4)
        tx = jmpp.loss_scaled(tx, jmpp.DynamicLossScale()) if scaled else tx
        return model, _nnx_steps.optimizer(model, tx)

    kind = _nnx_steps.library_step if scaled else _nnx_steps.plain_step
    step, state = _nnx_steps.pure(kind, *nnx.eval_shape(make))
    batch = (jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),) * 2
    return compile_for_gpu(jax.jit(step, donate_argnums=0), (state, batch))


def rows() -> list[dict[str, Any]]:
    """Three rows per dtype: by hand, wrapped, and wrapped with loss scaling."""
    reports, bases = {}, {}
    for dtype in DTYPES:
        name = jnp.dtype(dtype).name
        hand, wrapped, scaled = f"{name} by hand", f"{name} wrapped", f"{name} wrapped, loss_scaled"
        reports[hand] = report(dtype, wrapped=False, scaled=False)
        reports[wrapped] = report(dtype, wrapped=True, scaled=False)
        reports[scaled] = report(dtype, wrapped=True, scaled=True)
        bases |= {wrapped: hand, scaled: wrapped}
    return table_rows(reports, bases)


def main() -> None:
    try:
        found = rows()
    except PluginMissingError as error:
        print(f"Skipped nnx_gpu_cost. {error}")
        return
    _record.save("nnx_gpu_cost", found, target="NVIDIA H100 80GB, compiled only", **WIDTHS)


if __name__ == "__main__":
    main()
