"""What float8 recipes make of a training step on an H100: products, kernels, bytes, memory, compiled only.

The roofline is that of `lowering_report`: a lower bound by kernel, launches included.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_policy as jmpp
from benchmarks import _models, _record, _steps
from benchmarks.gpu_target import PluginMissingError, count, gpu_devices
from benchmarks.loss_scaling_cost import WIDTHS
from benchmarks.models import MODELS
from jmp_policy._src.core.targets import TARGETS
from jmp_policy._src.report.lowering.hlo import CONTAINERS, NO_KERNEL, arrays, parse
from jmp_policy._src.report.lowering.kernels import kernels_of
from jmp_policy._src.report.lowering.roofline import estimates

WIDE = {"vocabulary": 30528, "hidden": 4096, "heads": 32, "mlp": 16384}


class Sized(NamedTuple):
    """What is trained: a model, the types of a batch, the loss."""

    module: Any
    batch: Any
    loss: Any


def encoder(widths: dict[str, int], batch: int, length: int) -> Sized:
    """An encoder on so many sequences of so many tokens."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return Sized(_models.Encoder(**widths), (tokens, tokens), _steps.cross_entropy)


def of_zoo(name: str) -> Sized:
    """A model of the zoo at its published size."""
    model = MODELS[name]("full")
    return Sized(model.module, model.shapes(), model.loss)


SIZES: dict[str, Sized] = {
    "BERT width, 4 layers": encoder(WIDTHS, 32, 128),
    "GPT-2": of_zoo("GPT-2"),
    "4096 wide, 1 layer": encoder({**WIDE, "layers": 1}, 8, 512),
    "4096 wide, 4 layers, 4 times as many tokens": encoder({**WIDE, "layers": 4}, 32, 512),
}
POLICIES = {
    "bfloat16": "mixed_bfloat16",
    "fp8_current": "mixed_bfloat16, r=fp8_current",
    "fp8_rowwise": "mixed_bfloat16, r=fp8_rowwise",
}


def compiled(policy: str, sized: Sized) -> Any:
    """Compiles one AdamW step."""
    model, tx = jmpp.wrap(sized.module, policy), optax.adamw(1e-4)
    state = jax.eval_shape(lambda batch: _steps.init(model, tx, batch, ()), sized.batch)
    placed = NamedSharding(Mesh(gpu_devices(), "d"), PartitionSpec())
    arguments = (state, sized.batch)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments)
    step = jax.jit(_steps.plain_step(model, tx, loss=sized.loss), donate_argnums=0)
    lowered = step.trace(*types).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def for_scales(text: str) -> int:
    """Counts the kernels of a program that compute a scale, or largest values for it, and nothing else."""
    computations, entry = parse(text)
    kernels = (i for i in computations[entry] if i.opcode not in NO_KERNEL | CONTAINERS)
    return sum("float8_scale" in i.op_name and len(arrays(i.shape)) == 1 for i in kernels)


def rows() -> list[dict[str, Any]]:
    """One row per size and policy, with ratios to bfloat16."""
    found = []
    for size, sized in SIZES.items():
        base = None
        for name, policy in POLICIES.items():
            program = compiled(policy, sized)
            text = program.as_text()
            report = count(text, program.memory_analysis().temp_size_in_bytes)
            kernels = kernels_of(text, TARGETS["H100"])
            (estimate,) = estimates({"bfloat16": ("as given", kernels)}, TARGETS["H100"])
            base = base or (report, estimate.seconds)
            found.append(
                {
                    "size": size,
                    "policy": name,
                    "float8_products": sum(n for dots, n in report.dots.items() if "f8" in dots),
                    "other_products": sum(n for dots, n in report.dots.items() if "f8" not in dots),
                    "kernels": report.kernels,
                    "for_scales": for_scales(text),
                    "gigabytes": round(report.bytes / 1e9, 2),
                    "added_bytes": f"{report.bytes / base[0].bytes - 1:+.1%}",
                    "temp_gigabytes": round(report.temp_bytes / 1e9, 3),
                    "roofline_ms": round(estimate.seconds * 1e3, 3),
                    "of_bfloat16": round(estimate.seconds / base[1], 3),
                }
            )
            print(found[-1], flush=True)
    return found


def main() -> None:
    try:
        found = rows()
    except PluginMissingError as error:
        print(f"Skipped fp8_gpu. {error}")
        return
    _record.save("fp8_gpu", found, target="NVIDIA H100 80GB, compiled only")


if __name__ == "__main__":
    main()
