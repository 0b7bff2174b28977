"""The tables of real models on TPUs: what `zoo_tpu` found, as Markdown."""

import textwrap
from collections.abc import Callable
from typing import Any

from benchmarks._tables import grouped, load, paragraph, provenance, titled
from benchmarks.models import MODELS

_VARIANTS = ("float32", "by hand", "wrapped", "autocast")
#: What a table is of -> the text of a cell.
_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "GB moved": lambda row: f"{row['gigabytes']:.1f}",
    "Peak memory, GB": lambda row: f"{row['peak_gigabytes']:.1f}",
    "Products of two bfloat16 operands": lambda row: (
        f"{row['products'].get('bfloat16', 0)} of {sum(row['products'].values())}"
    ),
}


def tpus(result: dict[str, Any] | None = None) -> str:
    """The tables of each TPU, and below them the models that were not compiled, or do not compile."""
    result = result or load("zoo_tpu")
    words = (
        f"Whole {result['optimizer']} steps in bfloat16 on one TPU, compiled on a machine without any "
        f"({provenance(result)}). There is no loss scaling. Memory is the most that is in use at a time."
    )
    lines = paragraph(words)
    for target, rows in grouped(result["rows"], "target", lambda row: (row["model"], row["variant"])).items():
        models = list(dict.fromkeys(model for model, _ in rows))
        for title, text in _TABLES.items():
            cells = ([model, *(_cell(rows.get((model, v)), text) for v in _VARIANTS)] for model in models)
            lines += titled(f"{title}, {target}", _VARIANTS, cells)
        missing = [model for model in MODELS if model not in models]
        if missing:
            lines += paragraph(f"Not compiled for {target} so far: {', '.join(missing)}.")
        failed: dict[tuple[str, str], list[str]] = {}
        for (model, variant), row in rows.items():
            if "error" in row:
                # What follows are addresses in memory.
                error = textwrap.shorten(row["error"].replace("`", "'"), 160, placeholder=" ...")
                failed.setdefault((model, error), []).append(variant)
        for (model, error), variants in failed.items():
            lines += paragraph(f"{model} ({', '.join(variants)}) does not compile for {target}: `{error}`.")
    return "\n".join(lines).rstrip("\n")


def _cell(row: dict[str, Any] | None, text: Callable[[dict[str, Any]], str]) -> str:
    if row is None:
        return "-"
    return "failed" if "error" in row else text(row)
