"""What devices send each other per step, on 1, 2, 4 and 8 of them with a batch each (weak scaling).

Bytes of the results of collectives in the compiled step of a Transformer encoder (AdamW), as XLA makes it for
virtual CPU devices: by hand with `dtype=float16`, unscaled; and wrapped, with loss scaling, without and with
float32 weight gradients. Data parallel: parameters replicated. FSDP: parameters and optimizer state sharded.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_policy as jmpp
from benchmarks import _models, _record, _steps
from jmp_policy._src.report.lowering.hlo import executed, parse, shape_bytes

DEVICES = (1, 2, 4, 8)
WIDTHS = {"vocabulary": 1024, "hidden": 256, "heads": 4, "mlp": 1024, "layers": 2}
BATCH, LENGTH = 8, 64  # Per device.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def scaled() -> optax.GradientTransformation:
    return jmpp.loss_scaled(optax.adamw(1e-4), jmpp.DynamicLossScale())


#: Name -> (model, optimizer, step).
VARIANTS: dict[str, Any] = {
    "by hand, unscaled": (
        lambda: _models.Encoder(**WIDTHS, dtype=jnp.float16, softmax32=True),
        lambda: optax.adamw(1e-4),
        _steps.plain_step,
    ),
    "wrapped, loss_scaled": (
        lambda: jmpp.wrap(_models.Encoder(**WIDTHS), "mixed_float16"),
        scaled,
        _steps.library_step,
    ),
    "wrapped, loss_scaled, grad=float32": (
        lambda: jmpp.wrap(_models.Encoder(**WIDTHS), "p=f32,c=f16,o=f32,g=f32"),
        scaled,
        _steps.library_step,
    ),
}


def sent(variant: str, devices: int, fsdp: bool) -> dict[str, int]:
    """Bytes per step and device, by operation, with the number of operations."""
    make_model, make_tx, make_step = VARIANTS[variant]
    model, tx = make_model(), make_tx()
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    batch = (jax.ShapeDtypeStruct((BATCH * devices, LENGTH), jnp.int32, sharding=split),) * 2
    state = jax.eval_shape(lambda batch: _steps.init(model, tx, batch), batch)

    def place(x: Any) -> Any:
        is_split = fsdp and x.ndim and x.shape[0] % devices == 0
        return x.update(sharding=split if is_split else NamedSharding(mesh, PartitionSpec()))

    state = jax.tree.map(place, state)
    shardings = jax.tree.map(lambda x: x.sharding, state), None
    step = jax.jit(make_step(model, tx), donate_argnums=0, out_shardings=shardings)
    computations, entry = parse(step.lower(state, batch).compile().as_text())
    found: Counter[str] = Counter()
    for name, runs in executed(computations, entry).items():
        for instruction in computations[name]:
            if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                found["operations"] += 1
                found["bytes"] += shape_bytes(instruction.shape) * (runs.times or 1)
    return {"bytes": found["bytes"], "operations": found["operations"]}


def rows() -> list[dict[str, Any]]:
    """One row per layout, number of devices and variant, with the ratio to the step by hand."""
    found = []
    for layout, fsdp in (("data parallel", False), ("FSDP", True)):
        for devices in DEVICES:
            base = 0
            for variant in VARIANTS:
                row: dict[str, Any] = {"layout": layout, "devices": devices, "variant": variant}
                row |= sent(variant, devices, fsdp)
                base = base or row["bytes"]
                row["over_by_hand"] = round(row["bytes"] / base, 3) if base else None
                found.append(row)
    return found


def main() -> None:
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    _record.save("communication", rows(), batch_per_device=BATCH, length=LENGTH, **WIDTHS)


if __name__ == "__main__":
    main()
