"""GPT-2 and ResNet-50 with PyTorch's automatic mixed precision: items per second and memory, as `zoo_device`.

At their published sizes they want a GPU; small ones run on a CPU, in float32 and bfloat16. Run `zoo_device`
on the same card, and the two can be compared.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import measure
from benchmarks.models_torch import MODELS, TorchModel, cross_entropy
from benchmarks.table import Table

REPEATS = 15


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a step is run: the dtype of `torch.autocast`, TF32 allowed or not, by `torch.compile` or not."""

    dtype: torch.dtype | None = None  # Float16 comes with a `GradScaler`.
    tf32: bool = False
    compiled: bool = False


BASE = "float32, highest"
#: As in `zoo_device` where it has the same.
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

    @_tf32(variant.tf32)
    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, variant.dtype, enabled=variant.dtype is not None):
            loss = cross_entropy(forward(inputs), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


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


def rows(size: str, name: str, repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row per variant: items per second with their spread, over float32, and memory."""
    device = torch.device("cuda" if size == "full" else "cpu")
    if size == "full" and not torch.cuda.is_available():
        print(f"Skipped {name}: at its published size it wants a GPU.")
        return []
    chosen = VARIANTS if device.type == "cuda" else {variant: VARIANTS[variant] for variant in ON_CPU}
    steps, temp = {}, {}
    for variant, how in chosen.items():
        torch.manual_seed(0)
        steps[variant] = train_step(MODELS[name](size), how, device)
        temp[variant] = _temporary(steps[variant], device)
    items = MODELS[name](size).draw(device)[1].shape[0]
    times = measure.interleaved(
        {v: functools.partial(_seconds, step, device) for v, step in steps.items()}, repeats
    )
    base, on_gpu = times[BASE], device.type == "cuda"
    # The most that was in use so far, all variants together; 0 where the device does not say.
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return [
        {
            "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
            "variant": variant,
            "items_per_second": measure.spread([items / s for s in seconds]),
            "over_float32": round(statistics.median(base) / statistics.median(seconds), 3),
            "step_over_float32": measure.ratio(seconds, base),
            "temp_gigabytes": round(temp[variant] / 1e9, 3),
            "peak_gigabytes": round(peak / 1e9, 3),
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


def _seconds(step: Callable[[], torch.Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


ABOUT = {"torch": torch.__version__, "repeats": REPEATS}
TABLES = (Table("zoo_torch", rows, by={"size": ("full", "small"), "model": MODELS}, about=ABOUT),)
