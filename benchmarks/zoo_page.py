"""The page of real models: what `zoo_gpu`, `zoo_cost` and `accuracy` found, as Markdown."""

from typing import Any

from benchmarks._tables import load, median, paragraph, provenance, table

_GPU = ("by hand, no scaling", "by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")


def models() -> str:
    """All tables."""
    return "\n\n".join(["\n".join(part) for part in (_gpu(), _cpu())])


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


def _cpu() -> list[str]:
    result = load("zoo_cost")
    words = (
        f"The same models, smaller, on {result['machine']['cores']} cores of {result['machine']['cpu']} "
        f"({provenance(result)}). First the wrapped float16 step with `loss_scaled` over the same by hand:"
    )
    ours = [row for row in result["rows"] if row["comparison"].startswith("wrapped")]
    cells = (
        [row["model"], median(row["trace_lower"]), median(row["step"])]
        + [f"{row[count]:.2f}" for count in ("equations", "bytes", "temp")]
        for row in ours
    )
    header = " | trace + lower | step | equations | bytes | temporary memory"
    lines = [*paragraph(words), *table(header, cells), ""]
    lines += paragraph("Then the time of a bfloat16 step over that of float32, on a CPU with AVX512-BF16:")
    steps: dict[str, dict[str, str]] = {}
    for row in result["rows"]:
        steps.setdefault(row["model"], {})[row["comparison"].partition(" / ")[0]] = median(row["step"])
    names = ("mixed_bfloat16", "bfloat16, grad=float32")
    cells = ([model, *(found[name] for name in names)] for model, found in steps.items())
    return [*lines, *table(" | `mixed_bfloat16` | `p=f32,c=bf16,o=f32,g=f32`", cells)]
