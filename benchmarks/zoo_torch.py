"""GPT-2 and ResNet-50 with PyTorch's automatic mixed precision: items per second and memory, as `zoo_device`.

`python -m benchmarks.zoo_torch` runs them at their published sizes and wants a GPU; with `tiny` or `small` it
runs on a CPU, in float32 and bfloat16. Run `zoo_device` on the same card, and the two can be compared.
"""

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch

from benchmarks import _measure, _record
from benchmarks.models import SIZES
from benchmarks.models_torch import MODELS, TorchModel, cross_entropy

REPEATS = 15


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a step is run.

    Args:
      dtype: that `torch.autocast` computes in, if it does; float16 comes with a `GradScaler`.
      tf32: whether float32 products may round their operands.
      compiled: by `torch.compile`.
    """

    dtype: torch.dtype | None = None
    tf32: bool = False
    compiled: bool = False


BASE = "float32, highest"
#: By name, which are those of `zoo_device` where it has the same.
VARIANTS = {
    BASE: Variant(),
    "float32, TF32 where there is": Variant(tf32=True),
    "float16": Variant(torch.float16),
    "bfloat16": Variant(torch.bfloat16),
    "float16, torch.compile": Variant(torch.float16, compiled=True),
    "bfloat16, torch.compile": Variant(torch.bfloat16, compiled=True),
}
#: What a CPU is asked for.
ON_CPU = (BASE, "bfloat16")


def train_step(model: TorchModel, variant: Variant, device: torch.device) -> Callable[[], torch.Tensor]:
    """A call is one step on one batch, and gives the loss."""
    module = model.module.to(device).train()
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-4, weight_decay=1e-4, fused=device.type == "cuda"
    )
    scaler = torch.amp.GradScaler(device.type, enabled=variant.dtype == torch.float16)
    inputs, labels = model.draw(device)
    forward = torch.compile(module) if variant.compiled else module

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, variant.dtype, enabled=variant.dtype is not None):
            loss = cross_entropy(forward(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    def precise() -> torch.Tensor:
        with _tf32(variant.tf32):
            return step()

    return precise


@contextlib.contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 products and convolutions on a GPU may round their operands."""
    # Not by `fp32_precision`, the newer way: reading one after writing the other is an error in PyTorch, and
    # `torch.compile` reads both.
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [kind.allow_tf32 for kind in kinds]
    try:
        for kind in kinds:
            kind.allow_tf32 = allowed
        yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            kind.allow_tf32 = old


def rows(name: str, size: str = "full", repeats: int = REPEATS, device: Any = None) -> list[dict[str, Any]]:
    """One row per variant: items per second with their spread, over float32, and memory."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = VARIANTS if device.type == "cuda" else {variant: VARIANTS[variant] for variant in ON_CPU}
    steps, temp = {}, {}
    for variant, how in chosen.items():
        torch.manual_seed(0)
        steps[variant] = train_step(MODELS[name](size), how, device)
        temp[variant] = _temporary(steps[variant], device)
    items = MODELS[name](size).draw(device)[1].shape[0]
    times = _measure.interleaved({v: _timed(step, device) for v, step in steps.items()}, repeats)
    base = times[BASE]
    return [
        {
            "device": _device_name(device),
            "size": size,
            "model": name,
            "variant": variant,
            "items_per_second": _measure.spread([items / s for s in seconds]),
            "over_float32": round(statistics.median(base) / statistics.median(seconds), 3),
            "step_over_float32": _measure.ratio(seconds, base),
            "temp_gigabytes": round(temp[variant] / 1e9, 3),
            "peak_gigabytes": round(_peak(device) / 1e9, 3),
        }
        for variant, seconds in times.items()
    ]


def _temporary(step: Callable[[], torch.Tensor], device: torch.device) -> int:
    """The most memory that a step takes on top of what it starts with; 0 where the device does not say.

    Two steps go before it: the first makes the state of the optimizer, and `torch.compile` compiles.
    """
    step()
    step()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _timed(step: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], float]:
    """A call is one step, and gives its seconds."""

    def run() -> float:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return run


def _peak(device: torch.device) -> int:
    """The most memory in use so far, all variants together; 0 where the device does not say."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main(arguments: list[str] | None = None) -> None:
    arguments = list(arguments or [])
    size = arguments.pop(0) if arguments and arguments[0] in SIZES else "full"
    if size == "full" and not torch.cuda.is_available():
        print("Skipped zoo_torch: it wants a GPU; `python -m benchmarks.zoo_torch small` runs anywhere.")
        return
    jax.config.update("jax_platforms", "cpu")  # JAX tells the sizes, and leaves the GPU's memory alone.
    found = [row for name in arguments or MODELS for row in rows(name, size)]
    if size == "tiny":
        _record.show(f"zoo_torch, {size}", found)
    else:
        old = _record.kept("zoo_torch", "device", "size", "model", new=found)
        _record.save("zoo_torch", [*old, *found], torch=torch.__version__, repeats=REPEATS)


if __name__ == "__main__":
    main(sys.argv[1:])
