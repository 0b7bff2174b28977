"""What loss scaling costs on an H100: kernels, bytes and memory of a BERT-width AdamW step, compiled only.

Scaling may add at most 3 % of kernels and 1.5 % of bytes to the same step without it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _models, _record, _steps
from benchmarks.gpu_target import PluginMissingError, Report, compile_for_gpu, table_rows

WIDTHS = {"vocabulary": 30528, "hidden": 1024, "heads": 16, "mlp": 4096, "layers": 4}
BATCH, LENGTH = 32, 128

hand = functools.partial(_models.Encoder, **WIDTHS, dtype=jnp.float16)
bare = functools.partial(_models.Encoder, **WIDTHS)


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


def scaled() -> optax.GradientTransformation:
    return jmpp.loss_scaled(optimizer(), jmpp.DynamicLossScale())


def unscaled() -> optax.GradientTransformation:
    return jmpp.loss_scaled(optimizer(), jmpp.NoOpLossScale())


def wrapped() -> Any:
    return jmpp.wrap(bare(), "mixed_float16")


#: Name -> (model, optimizer, step, loss scale held outside the optimizer).
VARIANTS: dict[str, tuple[Any, Any, Any, Any]] = {
    "float32, no scaling": (bare, optimizer, _steps.plain_step, tuple),
    "by hand, no scaling": (hand, optimizer, _steps.plain_step, tuple),
    "by hand, scaling by hand": (hand, optimizer, _steps.hand_scaled_step, _steps.hand_scale),
    "by hand, loss_scaled": (hand, scaled, _steps.library_step, tuple),
    "by hand (float32 softmax), no scaling": (
        lambda: hand(softmax32=True),
        optimizer,
        _steps.plain_step,
        tuple,
    ),
    "wrapped, no scaling": (wrapped, optimizer, _steps.plain_step, tuple),
    "wrapped, NoOpLossScale": (wrapped, unscaled, _steps.library_step, tuple),
    "wrapped, loss_scaled": (wrapped, scaled, _steps.library_step, tuple),
}
#: What each scaled variant is compared with.
BASES = {
    "by hand, scaling by hand": "by hand, no scaling",
    "by hand, loss_scaled": "by hand, no scaling",
    "wrapped, no scaling": "by hand (float32 softmax), no scaling",
    "wrapped, NoOpLossScale": "wrapped, no scaling",
    "wrapped, loss_scaled": "wrapped, no scaling",
}


def report(name: str) -> Report:
    """Compiles one variant."""
    make_model, make_tx, make_step, make_scale = VARIANTS[name]
    model, tx = make_model(), make_tx()
    batch = (jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32),) * 2
    state = jax.eval_shape(lambda batch: _steps.init(model, tx, batch, make_scale()), batch)
    step = jax.jit(make_step(model, tx), donate_argnums=0)
    return compile_for_gpu(step, (state, batch))


def rows() -> list[dict[str, Any]]:
    """One row per variant, with its ratios to the variant without scaling."""
    reports = {name: report(name) for name in VARIANTS}
    return table_rows(reports, BASES)


def main() -> None:
    try:
        found = rows()
    except PluginMissingError as error:
        print(f"Skipped loss_scaling_cost. {error}")
        return
    _record.save("loss_scaling_cost", found, target="NVIDIA H100 80GB, compiled only", **WIDTHS)


if __name__ == "__main__":
    main()
