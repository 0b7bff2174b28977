"""The tables of what loss scaling adds on three cards: what `loss_scaling_zoo` found, as Markdown."""

from typing import Any

from benchmarks._tables import grouped, load, paragraph, provenance, titled

_WITHOUT, _WITH = "no scaling", "loss_scaled"


def loss_scaling(result: dict[str, Any] | None = None) -> str:
    """The tables; cells of what was not compiled are dashes."""
    result = result or load("loss_scaling_zoo")
    cards = result["cards"]
    models = grouped(result["rows"], "model", "card")
    words = (
        f"What loss scaling adds to the wrapped step on three cards ({provenance(result)}). The last model "
        "is no published one: a small network of 1x1 and 3x3 convolutions with batch normalisation. A dash: "
        "not compiled for this card."
    )
    lines = paragraph(words)
    for title, what in {"Kernels launched": "launches", "GB moved": "gigabytes"}.items():
        rows = ([name, *(_cell(found.get(card), what) for card in cards)] for name, found in models.items())
        lines += titled(f"{title}, added by loss scaling", cards, rows)
    return "\n".join(lines[:-1])


def _cell(row: dict[str, Any] | None, what: str) -> str:
    if row is None:
        return "-"
    numbers = dict(zip(row["variants"], row[what], strict=True))
    without, with_scaling = numbers[_WITHOUT], numbers[_WITH]
    return f"{with_scaling / without - 1:+.1%}"
