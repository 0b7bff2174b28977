"""The tables of real models on three cards: what `zoo_cards` found, as Markdown."""

from typing import Any

from benchmarks._tables import grouped, load, paragraph, provenance, titled

#: What a table is of -> precision and name of its number, and how it is written.
_TABLES = {
    "Estimated speed-up of float16 with loss scaling over float32": ("float16", "over_float32", "{:.2f}"),
    "Estimated speed-up of float16 with loss scaling over TF32": ("float16", "over_tf32", "{:.2f}"),
    "Estimated speed-up of bfloat16 over float32": ("bfloat16", "over_float32", "{:.2f}"),
    "Estimated speed-up of bfloat16 over TF32": ("bfloat16", "over_tf32", "{:.2f}"),
    "Share of float16's FLOPs on Tensor Cores": ("float16", "tensor_core_share", "{:.1%}"),
    "Temporary memory in float16, GB": ("float16", "temp_gigabytes", "{:.1f}"),
    "Temporary memory in float32, GB": ("float32", "temp_gigabytes", "{:.1f}"),
}


def cards(result: dict[str, Any] | None = None) -> str:
    """The tables, and below them what did not compile."""
    result = result or load("zoo_cards")
    names = result["cards"]
    models = grouped(result["rows"], "model", lambda row: (row["card"], row["precision"]))
    words = (
        f"The same steps compiled for {', '.join(names[:-1])} and {names[-1]} ({provenance(result)}). "
        "Speed-ups are estimates by the roofline, not measurements. A dash: the card has no such arithmetic, "
        "as the V100, which has neither TF32 nor bfloat16."
    )
    lines = paragraph(words)
    for title, column in _TABLES.items():
        rows = ([model, *(_cell(found, card, *column) for card in names)] for model, found in models.items())
        lines += titled(title, names, rows)
    lines.pop()
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
