"""Paragraphs and tables of measured numbers, as Markdown."""

import json
import pathlib
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def provenance(result: dict[str, Any]) -> str:
    """Versions and date; of JAX and of the date the first and the last, where rows were measured at times."""
    versions, date = result["versions"], result["date"]
    rows = [row for row in result.get("rows", ()) if isinstance(row, dict)] or [{}]
    jaxs = _first_to_last({row.get("jax", versions["jax"]) for row in rows})
    dates = _first_to_last({row.get("date", date) for row in rows})
    return (
        f"jax {jaxs}, flax {versions['flax']}, optax {versions['optax']}, "
        f"Python {versions['python']}, {dates}"
    )


def _first_to_last(texts: set[str]) -> str:
    return " to ".join(dict.fromkeys((min(texts), max(texts))))


def table(header: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table; columns of the header are parted by bars."""
    columns = header.count("|") + 1
    return [f"|{header} |", "|---" * columns + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def titled(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Lines of a table below a line that says what its numbers are, and an empty one."""
    return [f"**{title}**", "", *table("".join(f" | {name}" for name in header), rows), ""]


def grouped(
    rows: Iterable[dict[str, Any]], outer: str, inner: str | Callable[[dict[str, Any]], Any]
) -> dict[str, dict[Any, Any]]:
    """Rows by a column's value; in each group by another column, or by what a function makes of a row."""
    found: dict[str, dict[Any, Any]] = {}
    for row in rows:
        found.setdefault(row[outer], {})[inner(row) if callable(inner) else row[inner]] = row
    return found


def median(value: dict[str, float]) -> str:
    return f"{value['median']:.2f}"


def counts(row: dict[str, Any], *names: str) -> list[str]:
    """Cells of what is counted; empty where it was not."""
    return [f"{row[name]:.2f}" if row.get(name) is not None else "" for name in names]


def launches(row: dict[str, Any]) -> str:
    """Kernels that a step launches; where nothing loops, they are those of the program."""
    return str(row.get("launches", row.get("kernels", "-")))


def paragraph(words: str) -> list[str]:
    """Lines of a paragraph, and an empty one."""
    return [*textwrap.wrap(words, 110, break_on_hyphens=False), ""]
