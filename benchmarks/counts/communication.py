"""What devices send each other per step, counted in compiled programs.

`communication`: bytes of the results of collectives in the step of a Transformer encoder (AdamW) on 1, 2, 4
and 8 virtual CPU devices with a batch each (weak scaling): by hand with `dtype=float16`, unscaled; and
wrapped, with loss scaling, without and with float32 weight gradients. Data parallel: parameters replicated.
FSDP: parameters and optimizer state sharded. `grad_dtype_collectives`: what eight H100s send of a small
network's gradients, and in which dtype.
"""

from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.counts.encoder import GRADS
from benchmarks.models import small
from benchmarks.table import Table
from jmp_policy._src.report.lowering.hlo import executed, parse, shape_bytes

DEVICES = (1, 2, 4, 8)
LAYOUTS = ("data parallel", "FSDP")
WIDTHS = {"vocabulary": 1024, "hidden": 256, "heads": 4, "mlp": 1024, "layers": 2}
BATCH, LENGTH = 8, 64  # Per device.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def variants() -> dict[str, steps.Variant]:
    hand = small.Encoder(**WIDTHS, dtype=jnp.float16, softmax32=True)
    without, with_float32 = (jmpp.wrap(small.Encoder(**WIDTHS), policy) for policy in GRADS.values())
    return {
        "by hand, unscaled": steps.plain(hand),
        "wrapped, loss_scaled": steps.scaled(without),
        "wrapped, loss_scaled, grad=float32": steps.scaled(with_float32),
    }


def sharding(devices: int, *axes: str) -> NamedSharding:
    """Over the first dimension of an array, or whole on each device."""
    mesh = jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec(*axes))


def sent(variant: steps.Variant, devices: int, fsdp: bool) -> dict[str, int]:
    """Bytes per step and device, and the number of operations."""
    model, tx, make_step, _ = variant
    split, whole = sharding(devices, "data"), sharding(devices)
    batch = (jax.ShapeDtypeStruct((BATCH * devices, LENGTH), jnp.int32, sharding=split),) * 2
    state = jax.eval_shape(lambda batch: steps.init(model, tx, batch), batch)

    def place(x: Any) -> Any:
        is_split = fsdp and x.ndim and x.shape[0] % devices == 0
        return x.update(sharding=split if is_split else whole)

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


def rows(layout: str) -> list[dict[str, Any]]:
    found = []
    for devices in DEVICES:
        base = 0
        for name, variant in variants().items():
            row: dict[str, Any] = {"devices": devices, "variant": name}
            row |= sent(variant, devices, layout == "FSDP")
            base = base or row["bytes"]
            row["over_by_hand"] = round(row["bytes"] / base, 3) if base else None
            found.append(row)
    return found


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1024)(nn.relu(nn.Dense(4096)(x)))


def on_eight_gpus(layout: str) -> list[dict[str, Any]]:
    """Bytes that each of eight H100s hands to collectives per step, by operation and dtype."""
    split, whole = sharding(8, "data"), sharding(8)
    x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32, sharding=split)
    found = []
    for name, policy in GRADS.items():
        model, place = jmpp.wrap(Two(), policy), split if layout == "FSDP" else whole
        shapes = jax.eval_shape(model.init, jax.random.key(0), x)
        params = jax.tree.map(lambda s, place=place: s.update(sharding=place), shapes)

        def loss(params: Any, x: Any, model: Any = model) -> Any:
            return (model.apply(params, x) ** 2).mean()

        step = jax.jit(jax.grad(loss), out_shardings=jax.tree.map(lambda s: s.sharding, params))
        report = jmpp.lowering_report(step, params, x, target="H100")
        sent = Counter()
        for collective in report.collectives:
            sent[f"{collective.collective} {collective.operands}"] += collective.bytes_read
        found.append({"variant": name, **sent})
    return found


BY, ABOUT = {"layout": LAYOUTS}, {"batch_per_device": BATCH, "length": LENGTH, **WIDTHS}
EIGHT = {"target": "8 x NVIDIA H100 80GB, compiled only"}
TABLES = (
    Table("communication", rows, by=BY, about=ABOUT, cpus=max(DEVICES)),
    Table("grad_dtype_collectives", on_eight_gpus, by=BY, about=EIGHT, cpus=8),
)
