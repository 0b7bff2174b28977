"""Paragraphs and tables of measured numbers, as Markdown: results in the words of `sections.md`."""

import pathlib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.table import load

Row = Mapping[str, Any]


def provenance(result: Row) -> str:
    """Versions and date; of JAX and of the date the first and the last, where rows were measured at times."""
    versions, date = result["versions"], result["date"]
    rows = [row for row in result.get("rows", ()) if isinstance(row, dict)] or [{}]
    jaxs, dates = (
        " to ".join(dict.fromkeys((min(texts), max(texts))))
        for texts in (
            [row.get("jax", versions["jax"]) for row in rows],
            [row.get("date", date) for row in rows],
        )
    )
    others = f"flax {versions['flax']}, optax {versions['optax']}, Python {versions['python']}"
    return f"jax {jaxs}, {others}, {dates}"


def paragraph(words: str) -> list[str]:
    """Lines of a paragraph, and an empty one."""
    return [*textwrap.wrap(words, 110, break_on_hyphens=False), ""]


class Shown(dict):
    """Values by name for a template: a measured one is its median, and nothing one that is not there."""

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        if isinstance(value, dict):
            return Shown(value)
        return _Nothing() if value is None else value

    def __format__(self, form: str) -> str:
        return format(self["median"], form or ".2f")


class _Nothing:
    def __getitem__(self, name: str) -> Any:
        return self

    def __format__(self, form: str) -> str:
        return ""


def table(header: str, template: str, rows: Iterable[Row]) -> list[str]:
    """Lines of a table."""
    return [header, "|---" * (header.count("|") - 1) + "|", *(template.format_map(Shown(r)) for r in rows)]


def section(name: str, rows: Iterable[Row] | None = None, result: Row | None = None, **more: Any) -> str:
    """A section of `sections.md`: a paragraph, and a table if there is one, folded if it has a title.

    Of the saved result and its rows, unless they are given; `more` is what the words have beside it.
    """
    source, text = SECTIONS[name]
    result = result or load(source)
    words, _, rest = text.partition("\n\n")
    title, _, columns = rest.rpartition("\n\n")
    words = " ".join(words.split("\n")).format_map(
        Shown({**result, "provenance": provenance(result), **more})
    )
    lines = paragraph(words)
    if columns:
        shown = table(*columns.split("\n"), result["rows"] if rows is None else rows)
        lines += [folded(title.removeprefix("### "), shown)] if title else shown
    return "\n".join(lines).rstrip("\n")


def _sections() -> dict[str, tuple[str, str]]:
    """Name -> result and text."""
    _, *texts = (pathlib.Path(__file__).parent / "sections.md").read_text().split("\n## ")
    parts = (text.partition("\n\n") for text in texts)
    return {head.rpartition(" of ")[0]: (head.rpartition(" of ")[2], body.strip()) for head, _, body in parts}


SECTIONS = _sections()


def crossed(
    names: Mapping[str, Any], groups: Mapping[str, Any], template: str, failed: str = "failed"
) -> list[str]:
    """Lines of a table of one number: a row per group and a column per name.

    Args:
      names: of the columns -> the keys of their rows in each group.
      groups: name -> key -> row.
      template: of the number. Where there is none stands a dash.
      failed: what stands for rows with an error.
    """

    def cell(row: Row) -> str:
        return (failed if "error" in row else template.format_map(Shown(row))) or "-"

    rows = ([name, *(cell(found.get(key, {})) for key in names.values())] for name, found in groups.items())
    return [*table(f"| | {' | '.join(names)} |", "", ()), *(f"| {' | '.join(row)} |" for row in rows)]


def folded(title: str, lines: Iterable[str]) -> str:
    """Markdown that a page shows when a reader opens its title."""
    return "\n".join(['<details markdown="1">', f"<summary>{title}</summary>", "", *lines, "", "</details>"])


def grouped(rows: Iterable[Row], outer: str, inner: str | Callable[[Row], Any]) -> dict[str, dict[Any, Any]]:
    """Rows by a column's value; in each group by another column, or by what a function makes of a row."""
    found: dict[str, dict[Any, Any]] = {}
    for row in rows:
        found.setdefault(row[outer], {})[inner(row) if callable(inner) else row[inner]] = row
    return found


def under(version: str, result: Row) -> dict[str, Any]:
    """A result with the rows of one version of JAX; the file says which exactly."""
    rows = [
        {key: value for key, value in row.items() if key != "jax"}
        for row in result["rows"]
        if row["jax"] == version
    ]
    return {**result, "rows": rows}
