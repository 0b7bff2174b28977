"""What eight H100s send of a small network's gradients, and in which dtype, counted in compiled programs.

Data parallel: parameters replicated. FSDP: parameters sharded. Without and with float32 weight gradients.
"""

from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_policy as jmpp
from benchmarks.counts.encoder import GRADS
from benchmarks.table import Table

LAYOUTS = ("data parallel", "FSDP")


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1024)(nn.relu(nn.Dense(4096)(x)))


def on_eight_gpus(layout: str) -> list[dict[str, Any]]:
    """Bytes that each of eight H100s hands to collectives per step, by operation and dtype."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
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


ABOUT = {"target": "8 x NVIDIA H100 80GB, compiled only"}
TABLES = (Table("grad_dtype_collectives", on_eight_gpus, by={"layout": LAYOUTS}, about=ABOUT, cpus=8),)
