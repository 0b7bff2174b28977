"""Real models at their published sizes, compiled for TPUs in bfloat16: bytes, memory, products.

`python -m benchmarks.zoo_tpu` compiles all of them, which takes hours on two cores; with names, such as
`python -m benchmarks.zoo_tpu GPT-2`, these ones, and keeps the other rows as they were. Every model is saved
when it is done. Bytes are those between a chip and its memory, loops counted as often as they run; memory is
the most in use at a time, because a TPU's compiler often reports no temporary memory.
"""

import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _record, _steps
from benchmarks.by_hand import ByHand
from benchmarks.models import MODELS, Model
from jmp_policy._src.core.targets import find_target
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.lowering.compiler import compiled, exported
from jmp_policy._src.report.lowering.kernels import kernels_of

SLICES = ("v5e", "v6e")


def steps(model: Model) -> dict[str, tuple[Any, Any]]:
    """Whole AdamW steps by variant: the step, and the module that makes its state."""
    tx = optax.adamw(1e-4)
    hand, wrapped = ByHand(model.module, jnp.bfloat16), jmpp.wrap(model.module, "mixed_bfloat16")
    modules = {"float32": model.module, "by hand": hand, "wrapped": wrapped, "autocast": model.module}
    return {
        name: (
            _steps.plain_step(module, tx, "bfloat16" if name == "autocast" else None, loss=model.loss),
            jax.eval_shape(lambda batch, m=module: _steps.init(m, tx, batch), model.shapes()),
        )
        for name, module in modules.items()
    }


def row(step: Any, state: Any, batch: Any, slice_: str) -> dict[str, Any]:
    """What one step is on one TPU, or why it does not compile."""
    function = as_function(step, (state, batch), {}, "zoo_tpu")
    donated = range(len(jax.tree.leaves(state)))
    target = find_target(slice_)
    (answer,) = compiled([exported(function.call, function.arrays, donated, "tpu")], target)
    if answer.error:
        return {"error": answer.error.splitlines()[-1][:300]}
    kernels = kernels_of(answer.text, target)
    products = [kernel for kernel in kernels if kernel.flops]
    operands = Counter(" x ".join(dict.fromkeys(kernel.operands.split(" x "))) for kernel in products)
    return {
        "gigabytes": round(sum(kernel.times * kernel.bytes for kernel in kernels) / 1e9, 2),
        "peak_gigabytes": round(answer.peak_bytes / 1e9, 3),
        "products": dict(operands),
    }


def main(names: list[str] | None = None, size: str = "full") -> None:
    for name in names or MODELS:
        model = MODELS[name](size)
        for slice_ in SLICES:
            new = []
            for variant, (step, state) in steps(model).items():
                try:
                    found = row(step, state, model.shapes(), slice_)
                except jmpp.LoweringUnavailableError as error:
                    print(f"Skipped zoo_tpu. {error}")
                    return
                new.append({"model": name, "target": slice_, "variant": variant, **found})
            order = {"model": list(MODELS), "target": SLICES}
            _record.update("zoo_tpu", new, order, size=size, optimizer="AdamW", slices=SLICES)


if __name__ == "__main__":
    main(sys.argv[1:])
