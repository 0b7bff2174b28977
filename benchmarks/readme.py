"""Writes the measured numbers into README and docs, between their two markers, from results/*.json.

`python -m benchmarks.readme` rewrites, and a test compares: the README cannot drift from what was measured.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import drift_page, fp8_page
from benchmarks._tables import ROOT, counts, grouped, load, median, paragraph, provenance, table
from benchmarks.zoo_page import models

BEGIN, END = "<!-- measured: written by benchmarks/readme.py -->", "<!-- end -->"


def overhead() -> str:
    """A wrapped model with `loss_scaled` against the step written by hand: ratios."""
    result = load("overhead")
    lines = [
        "Wrapped model and `loss_scaled` against the same step written by hand (`dtype=float16` in every",
        "layer, scaling and skipping included); ratios from one interleaved run on "
        f"{result['machine']['cores']} cores of {result['machine']['cpu']}",
        f"({provenance(result)}):",
        "",
        "| | trace + lower | compile | step | equations | bytes | temporary memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["comparison"] == "library / by hand":
            times = " | ".join(f"{row[k]['median']:.2f}" for k in ("trace_lower", "compile", "step"))
            counts = " | ".join(f"{row[k]:.2f}" for k in ("equations", "bytes", "temp"))
            lines.append(f"| {row['model']} | {times} | {counts} |")
    return "\n".join(lines)


def nnx() -> str:
    """Wrapped NNX models against `dtype=` in every layer."""
    result = load("nnx_cost")
    wrap = next(row for row in result["wrapping"] if row["what"] == "wrap")
    calls = {row["variant"]: row["ratio"]["median"] for row in result["calls"]}
    words = (
        f"NNX models, wrapped over `dtype=` in every layer, no scaling ({provenance(result)}). `wrap` takes "
        f"{wrap['relative_to_build']['median']:.2f} of the time to build {wrap['modules']} modules; a call "
        f"of their `nnx.jit` step takes {calls['wrapped']:.2f} of that by hand, where a second copy by hand "
        f"takes {calls['by hand again']:.2f}:"
    )
    first: dict[tuple[str, str], dict[str, Any]] = {}  # The first way of writing it by hand.
    for row in result["rows"]:
        first.setdefault((row["model"], row["dtype"]), row)
    cells = (
        [*about, median(row["trace_lower"]), median(row["step"]), *counts(row, "equations", "bytes", "temp")]
        for about, row in first.items()
    )
    header = " | | trace + lower | step | equations | bytes | temporary memory"
    return "\n".join([*paragraph(words), *table(header, cells)])


def gpu() -> str:
    """The train step of a BERT-width encoder, compiled for an H100."""
    result = load("loss_scaling_cost")
    shown = ("by hand, no scaling", "by hand, scaling by hand", "wrapped, no scaling", "wrapped, loss_scaled")
    rows = {row["variant"]: row for row in result["rows"]}
    lines = [
        f"AdamW step of a {result['layers']}-layer encoder of BERT's width, compiled (not run) for an "
        f"{result['target'].split(',')[0]}",
        f"({provenance(result)}); every one of its 83 products is float16 x float16:",
        "",
        "| | kernels | bytes moved | temporary memory |",
        "|---|---|---|---|",
    ]
    for name in shown:
        row = rows[name]
        lines.append(
            f"| {name} | {row['kernels']} | {row['gigabytes']:.2f} GB | {row['temp_gigabytes']:.2f} GB |"
        )
    return "\n".join(lines)


def autocast() -> str:
    """A loss under `autocast` against float32 and by hand."""
    result, gpu_rows = load("autocast_cost"), load("autocast_gpu_cost")["rows"]
    calls = {row["call"]: row["ratio"]["median"] for row in result["calls"]}
    words = (
        f"A loss under `autocast` over the same in float32, or with `dtype=` in every layer "
        f"({provenance(result)}). Residuals are the bytes kept for the backward pass. Calls are those of "
        "Python functions while tracing and lowering, which other programs do not disturb. A compiled call "
        f"takes {calls['jit(autocast(f))(x)']:.2f} of that by hand:"
    )
    rows = grouped(result["rows"], "model", lambda row: (row["dtype"], row["comparison"]))
    cells = (
        [model, dtype]
        + [median(by[dtype, f"autocast / {base}"]["trace_lower"]) for base in ("float32", "by hand")]
        + [f"{by[dtype, 'autocast / float32']['python_calls']:.2f}"]
        + [f"{by[dtype, f'autocast / {base}']['residuals']:.2f}" for base in ("float32", "by hand")]
        for model, by in rows.items()
        for dtype in ("float16", "bfloat16")
    )
    header = (
        " | | trace + lower, over float32 | over by hand | calls, over float32 "
        "| residuals, over float32 | over by hand"
    )
    lines = [*paragraph(words), *table(header, cells), ""]
    lines += ["A step of an encoder of BERT's width, compiled for an H100:", ""]
    cells = ([r["variant"], f"{r['gigabytes']:.1f}", f"{r['temp_gigabytes']:.2f}"] for r in gpu_rows)
    lines += [*table(" | GB moved | temporary memory, GB", cells), "", *autocast_zoo()]
    return "\n".join(lines)


def autocast_zoo() -> list[str]:
    """Real models under `autocast` on an H100, against by hand."""
    result = load("autocast_zoo")
    words = (
        "A step of real models at their published sizes with AdamW, under `autocast` and with `dtype=` in "
        f"every layer, compiled for an H100 ({provenance(result)}):"
    )
    cells = (
        [r["model"], r["variant"], f"{r['gigabytes']:.1f}", f"{r['temp_gigabytes']:.2f}"]
        for r in result["rows"]
    )
    return [*paragraph(words), *table(" | | GB moved | temporary memory, GB", cells)]


def reports() -> str:
    """Looking at every 100th step: ratios to the step without."""
    result = load("report_cost")
    words = (
        "What looking costs: ratios to the same float16 step without it, of the step that looks, and of 100 "
        f"steps of which one does ({provenance(result)}, {result['machine']['cores']} cores, "
        f"{result['backend']}). Not looking adds no equations:"
    )
    lines = [
        *paragraph(words),
        "| | | time | bytes | temporary memory | time, 1 of 100 | bytes, 1 of 100 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if row["looks at"] != "nothing":
            shares = [row.get(f"{what}, 1 of 100") for what in ("step", "bytes")]
            cells = [row["model"], row["looks at"], f"{row['step']['median']:.2f}"]
            cells += [f"{row['bytes']:.2f}", f"{row['temp']:.2f}"]
            cells += ["" if share is None else f"{share:.3f}" for share in shares]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scaling() -> str:
    """Float32 gradients, communication, accumulation."""
    grad, gpu, sent = (load(f"grad_dtype_{what}") for what in ("cost", "gpu_cost", "collectives"))
    without, with_float32 = gpu["rows"]
    words = (
        f"`grad=float32` over the same policy without, float16, no scaling ({provenance(grad)}, "
        f"{grad['machine']['cores']} cores). The {gpu['layers']}-layer BERT-width AdamW step compiled for "
        f"one H100: {without['kernels']} kernels become {with_float32['kernels']}, "
        f"{without['gigabytes']:.2f} GB moved become {with_float32['gigabytes']:.2f}, temporary memory stays "
        f"at {with_float32['temp_gigabytes']:.2f} GB, all {with_float32['dots']['f16xf16']} products are "
        "float16."
    )
    lines = paragraph(words)
    cells = (
        [r["model"], median(r["trace_lower"]), median(r["step"]), *counts(r, "equations", "bytes", "temp")]
        for r in grad["rows"]
    )
    lines += table(" | trace + lower | step | equations | bytes | temporary memory", cells)
    operations = [
        "all-reduce float16", "all-reduce float32", "reduce-scatter float16", "reduce-scatter float32",
        "all-gather float16",
    ]  # fmt: skip
    lines += [
        "",
        "What each of eight H100s hands to collectives in a step of a two-layer network, in MB:",
        "",
    ]
    megabytes = ([f"{r[op] / 1e6:.1f}" if op in r else "" for op in operations] for r in sent["rows"])
    names = ([r["layout"], r["variant"]] for r in sent["rows"])
    lines += table(" | " + "".join(f" | {op}" for op in operations), map(operator.add, names, megabytes))
    result = load("communication")
    words = (
        "Bytes that one device sends per step, and as many times what the step by hand sends without scaling "
        f"({result['layers']}-layer Transformer of width {result['hidden']}, {provenance(result)}; virtual "
        "devices, the compiled program):"
    )
    lines += ["", *paragraph(words)]
    cells = (
        [r["layout"], str(r["devices"]), r["variant"], f"{r['bytes']:,}", f"{r['over_by_hand']:.3f}"]
        for r in result["rows"]
        if r["devices"] > 1
    )
    lines += table(" | devices | | bytes | over by hand", cells)
    result = load("accumulation_cost")
    words = (
        f"`accumulate_gradients` ({provenance(result)}). A convolution inside a loop is slow in XLA on a "
        "CPU, by hand as well:"
    )
    lines += ["", *paragraph(words)]
    cells = (
        [f"{r['model']}, {r['comparison']}", median(r["trace_lower"]), median(r["step"]), *numbers]
        for r in result["rows"]
        for numbers in [counts(r, "equations", "bytes", "temp")]
    )
    lines += table(" | trace + lower | step | equations | bytes | temporary memory", cells)
    return "\n".join(lines)


def rounding() -> str:
    """Training half parameters: what is kept, moved and waited for."""
    result = load("rounding_cost")
    words = (
        f"What AdamW on half parameters costs, {result['layers']} layers of width {result['width']}, over "
        f"plain half parameters ({provenance(result)}, {result['machine']['cores']} cores). What is kept and "
        "what is temporary are bytes per parameter:"
    )
    lines = paragraph(words)
    cells = (
        [r["dtype"], r["variant"]]
        + [f"{r[f'{what}_bytes_per_parameter']:.1f}" for what in ("kept", "temp")]
        + [f"{r['bytes']:.2f}", median(r["step"])]
        for r in result["rows"]
    )
    return "\n".join(lines + table(" | | kept | temporary | bytes moved | step", cells))


def checkpoints() -> str:
    """How long a save holds up training."""
    result = load("checkpoint_pause")
    words = (
        f"A save by Orbax and how long training waits for it ({provenance(result)}, "
        f"{result['machine']['cores']} cores):"
    )
    lines = paragraph(words)
    cells = (
        [f"{r['MB']:.1f} MB", r["way"], *(f"{r[k]['median']:.0f} ms" for k in ("pause_ms", "save_ms"))]
        for r in result["rows"]
    )
    return "\n".join(lines + table(" | | training waits | the save takes", cells))


def section() -> str:
    """The README's numbers."""
    return "\n\n".join([overhead(), gpu()])


def performance() -> str:
    """Real models, and NNX."""
    return f"{models()}\n\n## NNX\n\n{nnx()}"


def ranking() -> str:
    """How well `sensitivity` ranks modules."""
    result = load("sensitivity")
    words = (
        "Ten real architectures at their smallest size and six more structures, mean squares over three "
        f"batches ({provenance(result)}). "
        "Spearman is the rank correlation of what was predicted and what was measured; 1 is the same order. "
        "The last columns are how many of the worst three modules were among the worst three predicted, and "
        "the median of what was measured over what was predicted."
    )
    cells = (
        [
            row["model"],
            str(row["modules"]),
            f"{row['spearman']:.2f}",
            str(row["of the top 3"]),
            f"{float(np.median(ratios)):.2f}",
        ]
        for row in result["rows"]
        for found in [result["measured"][row["model"]]]
        for ratios in [[m["measured"] / m["predicted"] for m in found if m["predicted"]]]
    )
    header = " | modules | Spearman | of the worst 3 | measured / predicted"
    return "\n".join([*paragraph(words), *table(header, cells)])


def recommended() -> str:
    """What `recommend` gives for the same models."""
    result = load("recommend_zoo")
    budget = {row["budget"] for row in result["rows"]}.pop()
    words = (
        f"What `recommend` gives for such models in float16, from one batch and with its budget of {budget} "
        f"({provenance(result)}). Errors are those of the gradient as this machine computes it: under the "
        "recommended policy, and with everything in half."
    )
    cells = (
        [
            row["model"],
            f"{row['error']:.1e}",
            f"{row['error with all in half']:.1e}",
            f"{row['share of FLOPs in half']:.0%}",
            str(len(row["rules"])),
        ]
        for row in result["rows"]
    )
    header = " | error | error with all in half | FLOPs in half | rules"
    return "\n".join([*paragraph(words), *table(header, cells)])


def advice() -> str:
    """How well modules are ranked, and policies chosen."""
    return f"{ranking()}\n\n{recommended()}"


def gains() -> str:
    """What half precision gains on published models, for the first page."""
    result = load("zoo_cards")
    models = grouped(result["rows"], "model", lambda row: (row["card"], row["precision"]))
    words = (
        "Training steps of published models with AdamW and loss scaling, float16 against float32, compiled "
        f"for an A100 ({provenance(result)}). The speed-ups are estimates from the operations and bytes of "
        "the compiled programs, not measured times; float32 products are computed in TF32, as JAX does on "
        "this card."
    )
    cells = (
        [model, f"{half['over_tf32']:.1f} times", f"{half['temp_gigabytes'] / whole['temp_gigabytes']:.0%}"]
        for model in ("ResNet-50", "BERT-Large", "GPT-2", "Transformer-XL", "WaveNet")
        for half, whole in [[models[model]["A100", precision] for precision in ("float16", "float32")]]
    )
    return "\n".join([*paragraph(words), *table(" | estimated speed-up | temporary memory", cells)])


Numbers = Callable[[], str]

#: Files with measured numbers between markers, and what writes them; several for several pairs of markers.
FILES: dict[str, Numbers | tuple[Numbers, ...]] = {
    "README.md": section,
    "docs/autocast.md": autocast,
    "docs/drift.md": (drift_page.shares, drift_page.cost),
    "docs/float8.md": (fp8_page.steps, fp8_page.blocks, fp8_page.chosen, fp8_page.training),
    "docs/index.md": gains,
    "docs/losses_and_parameters.md": rounding,
    "docs/performance.md": performance,
    "docs/recommend.md": advice,
    "docs/reliability.md": checkpoints,
    "docs/reports.md": reports,
    "docs/scaling_out.md": scaling,
}


def written(text: str, numbers: Numbers | tuple[Numbers, ...] = section) -> str:
    """A file's text with what is between the markers replaced."""
    done = ""
    for write in numbers if isinstance(numbers, tuple) else (numbers,):
        before, _, rest = text.partition(BEGIN)
        _, _, text = rest.partition(END)
        done += f"{before}{BEGIN}\n{write()}\n{END}"
    return done + text


def main() -> None:
    for name, numbers in FILES.items():
        path = ROOT / name
        path.write_text(written(path.read_text(), numbers))


if __name__ == "__main__":
    main()
