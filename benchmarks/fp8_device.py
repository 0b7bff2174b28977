"""Float8 recipes on the GPU of this machine: time of a training step beside bfloat16's, timed in turn.

`python -m benchmarks.fp8_device` runs the steps of `fp8_gpu` and wants a GPU with float8 arithmetic; with
`tiny` it runs anywhere. The step with the most to gain comes first, each is saved when it is done, and none
begins that would not be done within `SECONDS`.
"""

import statistics
import sys
from typing import Any

import jax
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _record, _steps
from benchmarks.fp8_gpu import SIZES, Sized, encoder
from jmp_policy._src.core.targets import target_of_device
from jmp_policy._src.report.lowering.kernels import kernels_of

REPEATS = 15
SECONDS = 540.0
BASE = "bfloat16"
POLICIES = {
    BASE: "mixed_bfloat16",
    **{
        recipe: f"mixed_bfloat16, r={recipe}"
        for recipe in ("fp8_current", "fp8_rowwise", "fwd:fp8_current", "fp8_block", "mxfp8")
    },
}
#: Most to gain first.
ORDER = ("4096 wide, 1 layer", "BERT width, 4 layers", "GPT-2", "4096 wide, 4 layers, 4 times as many tokens")
TINY = encoder({"vocabulary": 64, "hidden": 32, "heads": 2, "mlp": 64, "layers": 1}, 2, 32)


def batch_of(sized: Sized) -> Any:
    """Tokens below 64, which every model here has."""
    leaves, structure = jax.tree.flatten(sized.batch)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.randint(k, x.shape, 0, 64, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def rows(name: str, sized: Sized, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per policy: seconds of a step, over bfloat16's, and which products its program has."""
    batch, tx = batch_of(sized), optax.adamw(1e-4)
    tokens = jax.tree.leaves(batch)[0].size
    compiled, runs = {}, {}
    for policy, text in POLICIES.items():
        model = jmpp.wrap(sized.module, text)
        state = jax.jit(lambda b, model=model: _steps.init(model, tx, b, ()))(batch)
        step = jax.jit(_steps.plain_step(model, tx, loss=sized.loss), donate_argnums=0)
        compiled[policy] = step.lower(state, batch).compile()
        runs[policy] = _measure.timed_step(compiled[policy], state, batch)
        runs[policy]()  # The first run is no measurement.
    times = _measure.interleaved(runs, repeats)
    target = target_of_device(jax.devices()[0].device_kind)
    found = []
    for policy, seconds in times.items():
        products = [k for k in kernels_of(compiled[policy].as_text(), target) if k.flops] if target else []
        found.append(
            {
                "size": name,
                "policy": policy,
                "milliseconds": round(statistics.median(seconds) * 1e3, 3),
                "tokens_per_second": round(tokens / statistics.median(seconds)),
                "of_bfloat16": _measure.ratio(seconds, times[BASE]),
                "float8_products": sum("float8" in k.operands for k in products),
                "other_products": sum("float8" not in k.operands for k in products),
                "temp_gigabytes": round(compiled[policy].memory_analysis().temp_size_in_bytes / 1e9, 3),
            }
        )
    return found


def main(arguments: list[str] | None = None) -> None:
    arguments = list(arguments or [])
    device = jax.devices()[0].device_kind
    if arguments == ["tiny"]:
        _record.show(f"fp8_device, tiny, {device}", rows("tiny", TINY, repeats=2))
        return
    if jax.default_backend() == "cpu":
        print("Skipped fp8_device: it wants a GPU; `python -m benchmarks.fp8_device tiny` runs anywhere.")
        return
    names = arguments or list(ORDER)
    for name, new in _measure.on_borrowed_device(names, lambda name: rows(name, SIZES[name]), SECONDS):
        found = [{"size": name, "error": new}] if isinstance(new, str) else new
        _record.update("fp8_device", found, {"size": ORDER}, device=device, repeats=REPEATS)


if __name__ == "__main__":
    main(sys.argv[1:])
