"""What `zoo_peers` and `zoo_torch` found, as Markdown."""

from typing import Any

from benchmarks._tables import counts, grouped, launches, load, median, paragraph, provenance, table, titled
from benchmarks.zoo_peers import COUNTED_BY_ZOO_GPU

LIBRARIES = ("by hand", "jmp_policy", "jmp", "mpx", "flax DynamicScale")
#: What a table is of -> name of its number, and how it is written.
_TABLES = {
    "GB moved": ("gigabytes", ".2f"),
    "Temporary memory, GB": ("temp_gigabytes", ".2f"),
    "Share of FLOPs with both operands in half precision": ("half_share", ".0%"),
}
_KERAS = ("keras, no scaling", "keras LossScaleOptimizer")


def peers(result: dict[str, Any] | None = None, ours: dict[str, Any] | None = None) -> str:
    """The tables of the real models with each library, and what Keras's loss scaling adds.

    Args:
      result: of `zoo_peers`; loaded when it is not given.
      ours: of `zoo_gpu`, for the counts by hand and here.
    """
    result, ours = result or load("zoo_peers"), ours or load("zoo_gpu")
    parts = [_gpu(result, ours), _cpu(result), _keras(result, ours)]
    return "\n\n".join("\n".join(part).rstrip() for part in parts if part)


def torch(result: dict[str, Any] | None = None) -> str:
    """PyTorch's own mixed precision: one row per device, size, model and variant."""
    result = result or load("zoo_torch")
    words = (
        f"PyTorch {result['torch']} with `torch.autocast` and, in float16, `GradScaler`; AdamW, sizes and "
        f"numbers of parameters as in the zoo ({result['date']}): items per second, the time of a step over "
        "that in float32, and memory, which a CPU does not tell."
    )
    rows = []
    for row in result["rows"]:
        memory = [
            f"{row[name]:.2f}" if row["peak_gigabytes"] else ""
            for name in ("temp_gigabytes", "peak_gigabytes")
        ]
        items, ratio = row["items_per_second"], row["step_over_float32"]
        about = [row["device"], f"{row['model']}, {row['size']}", row["variant"]]
        rows.append([*about, f"{items['median']:.4g}", _spread(ratio), *memory])
    header = " | model | variant | items/s | step over float32 | temporary GB | peak GB"
    return "\n".join([*paragraph(words), *table(header, rows)])


def _by_model(result: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    return grouped([row for row in result["rows"] if row["where"] == where], "model", "library")


def _gpu(result: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    found, counted = _by_model(result, "H100"), grouped(ours["rows"], "model", "variant")
    if not found:
        return []
    for model, by in found.items():
        for library, variant in COUNTED_BY_ZOO_GPU.items():
            by[library] = counted[model][variant] | by[library]
    versions = ", ".join(f"{name} {version}" for name, version in result["peers"].items())
    words = (
        f"Whole float16 {result['optimizer']} steps with dynamic loss scaling of models at their published "
        f"sizes, compiled for an {result['target'].partition(',')[0]} ({provenance(result)}, {versions}; by "
        f"hand and with jmp_policy {provenance(ours)}). "
        "jmp and mpx cast parameters and inputs in front of the model. A float32 array that the model makes "
        "itself (a carry, a one-hot vector, an encoding of distances) takes what follows back to float32, "
        "which is what the last of these tables shows."
    )
    header = [name.replace("flax DynamicScale", "`DynamicScale`") for name in LIBRARIES]
    lines = paragraph(words)
    rows = ([model, *(launches(by[lib]) for lib in LIBRARIES)] for model, by in found.items())
    lines += titled("Kernels launched", header, rows)
    for title, (quantity, form) in _TABLES.items():
        rows = (
            [model, *(format(by[lib][quantity], form) if quantity in by[lib] else "-" for lib in LIBRARIES)]
            for model, by in found.items()
        )
        lines += titled(title, header, rows)
    return [*lines, *_failures(found)]


def _cpu(result: dict[str, Any]) -> list[str]:
    found = _by_model(result, "CPU")
    if not found:
        return []
    words = (
        "The same steps of smaller models on a CPU, relative to the step by hand: time to trace and "
        f"lower, time of a step, medians of {result['repeats']} paired ratios with their quartiles; bytes "
        "and temporary memory as XLA counts them."
    )
    rows = [
        [
            model,
            library,
            *(_spread(by[library][quantity]) for quantity in ("trace_lower", "step")),
            *counts(by[library], "bytes", "temp"),
        ]
        for model, by in found.items()
        for library in LIBRARIES[1:]
        if "error" not in by[library]
    ]
    header = " | library | trace and lower | step | bytes | temporary"
    return [*paragraph(words), *table(header, rows), "", *_failures(found)]


def _keras(result: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    (by,) = _by_model(result, "H100, Keras").values() or ({},)
    if not by:
        return []
    plain, scaled = (by[name] for name in _KERAS)
    name = plain["model"]
    rows = {row["variant"]: row for row in ours["rows"] if row["model"] == name}
    before, after = rows["wrapped, no scaling"], rows["wrapped, loss_scaled"]
    words = (
        f"What loss scaling adds to a compiled step of {name}: in Keras, to its own model, "
        f"`LossScaleOptimizer` {_added(plain, scaled)}; here `loss_scaled` {_added(before, after)}. Keras "
        "skips by a conditional, of which both branches are counted."
    )
    return paragraph(words)


def _added(before: dict[str, Any], after: dict[str, Any]) -> str:
    kernels, temp = (after[key] - before[key] for key in ("kernels", "temp_gigabytes"))
    share = kernels / before["kernels"]
    return (
        f"{kernels:+d} kernels ({share:+.1%}), {after['gigabytes'] - before['gigabytes']:+.2f} GB moved "
        f"({after['added_bytes']}) and {temp:+.2f} GB of temporary memory"
    )


def _failures(found: dict[str, dict[str, Any]]) -> list[str]:
    """A sentence for each library that failed on a model."""
    errors = [
        f"{library} fails on {model}: `{row['error']}`."
        for model, by in found.items()
        for library, row in by.items()
        if "error" in row
    ]
    return [line for error in errors for line in paragraph(error)]


def _spread(value: dict[str, float]) -> str:
    return f"{median(value)} ({value['low']:.2f} to {value['high']:.2f})"
