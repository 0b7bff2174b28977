"""The page of real models: what `zoo_*` and `accuracy` found, as Markdown."""

from collections.abc import Callable
from typing import Any

from benchmarks._tables import grouped, launches, load, median, paragraph, provenance, table, titled
from benchmarks.loss_scaling_page import loss_scaling
from benchmarks.zoo_cards_page import cards
from benchmarks.zoo_peers_page import peers, torch
from benchmarks.zoo_tpus_page import tpus

_GPU = ("by hand, no scaling", "by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")
_PRECISIONS = ("bfloat16", "float16", "float16, small loss", "float16 unscaled, small loss")


def models() -> str:
    """All tables and figures."""
    parts = [
        "## On GPUs, compiled",
        *("\n".join(_gpu()), _figure("zoo_steps", "Bytes a step moves, and what loss scaling adds")),
        loss_scaling(),
        *(cards(), _figure("zoo_cards", "Estimated speed-ups of float16 on three cards")),
        "## On TPUs, compiled",
        tpus(),
        "## On a CPU",
        "\n".join(_cpu()),
        "## Beside other libraries",
        peers(),
        torch(),
        "## Accuracy",
        *("\n".join(_accuracy()), _figure("accuracy", "Differences from float32 with their intervals")),
    ]
    return "\n\n".join(parts)


def _figure(name: str, words: str) -> str:
    return f"![{words}](images/{name}.svg)"


def _gpu() -> list[str]:
    result = load("zoo_gpu")
    card = result["target"].partition(",")[0]
    words = (
        f"Whole {result['optimizer']} steps of models at their published sizes, in float16, compiled for "
        f"an {card} ({provenance(result)}). Each step is written in four ways: by hand with `dtype=float16` "
        "in every layer, without and with loss scaling written by hand; and wrapped, without and with "
        "`loss_scaled`."
    )
    found = grouped(result["rows"], "model", "variant")
    numbers: dict[str, Callable[[dict[str, Any]], str]] = {
        "Kernels launched": launches,
        "GB moved": lambda row: f"{row['gigabytes']:.2f}",
        "Temporary memory, GB": lambda row: f"{row['temp_gigabytes']:.2f}",
    }
    header = ("by hand", "by hand, scaled", "wrapped", "wrapped, `loss_scaled`")
    lines = paragraph(words)
    for title, number in numbers.items():
        rows = ([model, *(number(by[variant]) for variant in _GPU)] for model, by in found.items())
        lines += titled(title, header, rows)
    lines += paragraph(
        "What the wrapped step with `loss_scaled` computes on Tensor Cores, as a share of its FLOPs, and how "
        "many times faster than float32 and TF32 it should be. The speed-ups are estimates by the roofline, "
        "not measurements."
    )
    rows = [
        [model, f"{last['tensor_core_share']:.1%}"]
        + [f"{times[base] / times['float16']:.2f}" for base in ("float32", "tf32")]
        for model, by in found.items()
        for last in [by[_GPU[-1]]]
        for times in [last["estimated_ms"]]
    ]
    return [*lines, *table(" | on Tensor Cores | over float32 | over TF32", rows)]


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
    lines += _depths()
    lines += paragraph("Then a bfloat16 step over that of float32, on a CPU with AVX512-BF16:")
    rows = grouped(result["rows"], "model", lambda row: row["comparison"].partition(" / ")[0])
    names = ("mixed_bfloat16", "bfloat16, grad=float32")
    cells = (
        [model, *(f(found[name]) for name in names for f in (_step, _temporary))]
        for model, found in rows.items()
    )
    header = " | `mixed_bfloat16`: step | temporary memory | with `g=f32`: step | temporary memory"
    return [*lines, *table(header, cells)]


def _depths() -> list[str]:
    result = load("stack_depth")
    words = (
        "Where on the stack a trace begins changes its time, so each repetition begins elsewhere "
        f"([why](#how-numbers-are-made); {provenance(result)}). Over a whole chunk of the stack, the slowest "
        "trace by hand takes "
    )
    by_depth = grouped(result["rows"], "model", lambda row: (row["variant"], row["frames"]))
    parts = []
    for model, found in by_depth.items():
        hand, ours = (
            [row["seconds"] for (name, _), row in found.items() if name == n] for n in (_GPU[1], _GPU[3])
        )
        swing, mean = max(hand) / min(hand), sum(ours) / sum(hand)
        parts.append(
            f"{swing:.2f} of the quickest for {model}, and all wrapped ones {mean:.2f} of those by hand"
        )
    return paragraph(words + "; ".join(parts) + ".")


def _step(row: dict[str, Any]) -> str:
    return median(row["step"])


def _temporary(row: dict[str, Any]) -> str:
    return f"{row['temp']:.2f}"


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
    compared = [row for row in result["rows"] if row["measure"] == shown[row["task"]]]
    rows = [
        [f"{task}: {shown[task]}", f"{found['float32']['mean']:.3f} ± {found['float32']['deviation']:.3f}"]
        + [_difference(found[precision]) for precision in _PRECISIONS]
        for task, found in grouped(compared, "task", "precision").items()
    ]
    header = " | float32" + "".join(f" | {precision}" for precision in _PRECISIONS)
    return [*paragraph(words), *table(header, rows)]


def _difference(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['difference']:+.3f} [{low:.3f}, {high:.3f}]"
