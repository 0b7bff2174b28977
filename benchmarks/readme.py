"""Writes the measured numbers into the README, between its two markers, from results/*.json.

`python -m benchmarks.readme` rewrites, and a test compares: the README cannot drift from what was measured.
"""

import json
import pathlib
import textwrap
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
BEGIN, END = "<!-- measured: written by benchmarks/readme.py -->", "<!-- end -->"


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def provenance(result: dict[str, Any]) -> str:
    versions = result["versions"]
    return (
        f"jax {versions['jax']}, flax {versions['flax']}, optax {versions['optax']}, Python "
        f"{versions['python']}, {result['date']}"
    )


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
    """Wrapped NNX models against `dtype=` in every layer; both half types in one cell."""
    result = load("nnx_cost")
    wrap = next(row for row in result["wrapping"] if row["what"] == "wrap")
    calls = {row["variant"]: row["ratio"]["median"] for row in result["calls"]}
    words = (
        "NNX models, wrapped over `dtype=` in every layer, float16 / bfloat16, no scaling "
        f"({provenance(result)}). `wrap` takes {wrap['relative_to_build']['median']:.2f} of the time to "
        f"build {wrap['modules']} modules; a call of their `nnx.jit` step takes {calls['wrapped']:.2f} of "
        f"that by hand, where a second copy by hand takes {calls['by hand again']:.2f}:"
    )
    lines = [
        textwrap.fill(words, 110, break_on_hyphens=False),
        "",
        "| | trace + lower | step | equations | bytes | temporary memory |",
        "|---|---|---|---|---|---|",
    ]
    first: dict[str, dict[str, Any]] = {}  # Model -> dtype -> the first way of writing it by hand.
    for row in result["rows"]:
        first.setdefault(row["model"], {}).setdefault(row["dtype"], row)
    for model, rows in first.items():
        both = [rows[dtype] for dtype in ("float16", "bfloat16")]
        times = [" / ".join(f"{row[k]['median']:.2f}" for row in both) for k in ("trace_lower", "step")]
        counts = [" / ".join(f"{row[k]:.2f}" for row in both) for k in ("equations", "bytes", "temp")]
        lines.append(f"| {' | '.join([model, *times, *counts])} |")
    return "\n".join(lines)


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


def section() -> str:
    return "\n\n".join([overhead(), nnx(), gpu()])


def written(text: str) -> str:
    """The README with the section between the markers replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text()))


if __name__ == "__main__":
    main()
