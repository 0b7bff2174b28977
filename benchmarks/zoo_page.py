"""The page of real models: what `zoo_gpu` and `accuracy` found, as Markdown."""

from typing import Any

from benchmarks._tables import load, paragraph, provenance, table

_GPU = ("by hand, no scaling", "by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")
_PRECISIONS = ("bfloat16", "float16", "float16, small loss", "float16 unscaled, small loss")


def models() -> str:
    """All tables."""
    return "\n\n".join(["\n".join(part) for part in (_gpu(), _accuracy())])


def _gpu() -> list[str]:
    result = load("zoo_gpu")
    by_model: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        by_model.setdefault(row["model"], {})[row["variant"]] = row
    card = result["target"].partition(",")[0]
    words = (
        f"Whole {result['optimizer']} steps of models at their published sizes, in float16, compiled for "
        f"an {card} ({provenance(result)}). Kernels, bytes and memory: by hand / by hand with scaling by "
        "hand / wrapped / wrapped with `loss_scaled`. The share is that of FLOPs on Tensor Cores; the "
        "speed-ups over float32 and TF32 are estimates by the roofline, no measurements."
    )
    rows = []
    for model, found in by_model.items():
        parts = [found[variant] for variant in _GPU]
        last = parts[-1]
        times = last["estimated_ms"]
        rows.append(
            [
                model,
                " / ".join(str(part["kernels"]) for part in parts),
                " / ".join(f"{part['gigabytes']:.2f}" for part in parts),
                " / ".join(f"{part['temp_gigabytes']:.2f}" for part in parts),
                f"{last['tensor_core_share']:.1%}",
                *(f"{times[base] / times['float16']:.2f}" for base in ("float32", "tf32")),
            ]
        )
    header = " | kernels | GB moved | temporary GB | share | over float32 | over TF32"
    return [*paragraph(words), *table(header, rows)]


def _accuracy() -> list[str]:
    result = load("accuracy")
    seeds = len(result["seeds"])
    words = (
        f"Accuracy over {seeds} seeds, on data that comes with packages ({provenance(result)}, CPU): "
        "mean and standard deviation in float32, then the mean difference from it, seed by seed, with "
        'its 95 % interval. "Small loss" is the loss times 2^-24, undone in the optimizer: what loss '
        "scaling is for. With the loss as it is, float16 reaches parity on these tasks unscaled, too."
    )
    shown = {row["task"]: row["measure"] for row in reversed(result["rows"])}
    by_task: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        if row["measure"] == shown[row["task"]]:
            by_task.setdefault(row["task"], {})[row["precision"]] = row
    rows = [
        [f"{task}: {shown[task]}", f"{found['float32']['mean']:.3f} ± {found['float32']['deviation']:.3f}"]
        + [_difference(found[precision]) for precision in _PRECISIONS]
        for task, found in by_task.items()
    ]
    header = " | float32" + "".join(f" | {precision}" for precision in _PRECISIONS)
    return [*paragraph(words), *table(header, rows)]


def _difference(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['difference']:+.3f} [{low:.3f}, {high:.3f}]"
