"""The table of real models on three cards: what `zoo_cards` found, as Markdown."""

from typing import Any

from benchmarks._tables import grouped, load, paragraph, provenance, table

#: Header of a column -> precision and name of its number, and how it is written.
_COLUMNS = {
    "share": ("float16", "tensor_core_share", "{:.1%}"),
    "over float32": ("float16", "over_float32", "{:.2f}"),
    "over TF32": ("float16", "over_tf32", "{:.2f}"),
    "bfloat16 over float32": ("bfloat16", "over_float32", "{:.2f}"),
    "bfloat16 over TF32": ("bfloat16", "over_tf32", "{:.2f}"),
    "temporary GB": ("float16", "temp_gigabytes", "{:.1f}"),
    "in float32": ("float32", "temp_gigabytes", "{:.1f}"),
}


def cards(result: dict[str, Any] | None = None) -> str:
    """The table, and below it what did not compile."""
    result = result or load("zoo_cards")
    names = result["cards"]
    models = grouped(result["rows"], "model", lambda row: (row["card"], row["precision"]))
    words = (
        f"The same steps compiled for {', '.join(names[:-1])} and {names[-1]} ({provenance(result)}), which "
        f"is the order in each cell: {' / '.join(names)}. The share is that of float16's FLOPs on Tensor "
        "Cores. Speed-ups, of float16 with loss scaling and then of bfloat16 without, are estimates by the "
        "roofline, no measurements. A dash: the card has no such arithmetic, as the V100, which has neither "
        "TF32 nor bfloat16."
    )
    rows = [
        [model, *(" / ".join(_cell(found, card, *column) for card in names) for column in _COLUMNS.values())]
        for model, found in models.items()
    ]
    lines = [*paragraph(words), *table(" | " + " | ".join(_COLUMNS), rows)]
    failed = [row for row in result["rows"] if "error" in row]
    if failed:
        lines.append("")
    for row in failed:
        text = row["error"].replace("`", "'")
        lines.append(f"- {row['model']} in {row['precision']} does not compile for {row['card']}: `{text}`")
    return "\n".join(lines)


def _cell(
    found: dict[tuple[str, str], dict[str, Any]], card: str, precision: str, column: str, form: str
) -> str:
    row = found.get((card, precision), {})
    if "error" in row:
        return "failed"
    return form.format(row[column]) if column in row else "-"
