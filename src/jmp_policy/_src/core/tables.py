"""Lays out tables of a report as text and HTML, in which equal layers of a model are one row."""

import bisect
import dataclasses
import itertools
import operator
import re
import textwrap
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

#: Columns of names that lead to a module. Elsewhere text must be the same.
_NAMES = ("module", "path", "place", "tensor", "value", "where", "reaches", "result", "parameter", "scope")

#: Fewer rows are left as they are.
_FEW = 3

#: A number, with the text before it: "layer_7", but not the line of a file.
_NUMBER = re.compile(r"(?<![^/\s,(])([^/\s,(:]*?)(\d+)(?=[/\s,.)\]]|$)")

#: The number of a figure: of "1.2e-05", "< 0.1 %", "0.86x".
_FIGURE = re.compile(r"-?[\d.]+(?:e[-+]?\d+)?|inf")

#: Where text may be broken, and where a figure. "layer_0", "a.py:3" and "(16 x)" stay whole.
_BREAKS = re.compile(
    r"(?<=[/,])(?=[^/, ])|(?<= )(?=[^ .])(?!x\))|(?<=_)(?=[a-zA-Z])|(?<=[a-z]\.)(?=[a-zA-Z])(?!py\b)"
)
_BREAKS_OF_FIGURES = re.compile(r"(?<=\.\.\. )")

#: The words of a long name of a class: the first ones, the last, and what is left out between them.
_LONG_NAME = re.compile(
    r"\b(?=\w{20})((?:[A-Z][a-z0-9]+){1,2})(?:[A-Z][a-z0-9]+)+([A-Z][a-z0-9]+)(?![a-zA-Z])"
)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A figure that equal layers have together, where their rows are one.

    Args:
      value: what is added up.
      show: how it is written.
      add: adds up the values of several rows.
      weight: how much a value is. A layer that has most of it in all is a row of its own.
    """

    value: Any
    show: Callable[[Any], str] = str
    add: Callable[[Sequence[Any]], Any] = sum
    weight: Callable[[Any], float] = float

    def __str__(self) -> str:
        return self.show(self.value)


class Folded(list[Any]):
    """The cells of a row that stands for those of equal layers, `rows`."""

    def __init__(self, cells: Sequence[Any], rows: Sequence[Sequence[Any]]):
        super().__init__(cells)
        self.rows = rows


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under named columns, as a report shows them.

    Args:
      columns: names; those of figures end in a space and are set to the right.
      rows: one value per column; figures are shown without units, which belong into the columns' names.
      title: what the rows are, or "".
      most: how many lines are shown at most, rows of equal layers as one; the other rows are counted.
      largest_first: whether those with the largest `Sum` are shown.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    most: int = 24
    largest_first: bool = False

    def as_text(self, full: bool, width: int) -> list[str]:
        """The table as lines of text.

        Args:
          full: whether to show every row.
          width: columns of text.
        """
        rows = self.rows if full else self._shown()
        columns = [[self.columns[i], *(str(row[i]) for row in rows)] for i in _used(self.columns, rows)]
        shorter = [[_LONG_NAME.sub(r"\1…\2", cell) for cell in cells] for cells in columns]

        def cost(layout: list[list[str]]) -> tuple[bool, int]:
            # Whoever asks for everything gets whole names, if there is room for them.
            is_wide = any(len(line) > width for row in layout for line in row)
            return is_wide, 0 if full else sum(map(len, layout))

        head, *lines = min((_laid_out(each, width) for each in (columns, shorter)), key=cost)
        if not full:
            heights = list(itertools.accumulate(map(len, lines)))
            count = max(1, bisect.bisect(heights, self.most + (not self.is_cut)))
            rows, lines = rows[:count], lines[:count]
        shown = [line for row in lines for line in row]
        rule = " " + "─" * (max(map(len, [*head, *shown])) - 1)
        note = f"{note}: print(report.table(full=True))" if (note := self._note(rows)) else ""
        below = [f"  {line}" for line in wrapped(note, width - 2)]
        return [*wrapped(self.title, width), *head, rule, *shown, *below, ""]

    def as_html(self, full: bool = False) -> str:
        """The table in HTML, in which rows that stand for several open."""
        rows = self.rows if full else self._shown()
        note = self._note(rows)
        return _html(self.columns, rows, self.title) + (f"<p>{escape(note)}</p>" if note else "")

    @property
    def is_cut(self) -> bool:
        """Whether rows are left out, other than those of equal layers."""
        return "more row" in self._note(self._shown())

    def _note(self, rows: Sequence[Sequence[Any]]) -> str:
        """Says which of the rows that are shown stand for several, and how many are left out."""
        equal = [row for row in rows if isinstance(row, Folded)]
        sums = {name.strip(): cell for row in equal[:1] for name, cell in zip(self.columns, row, strict=True)}
        sums = {name: cell for name, cell in sums.items() if isinstance(cell, Sum)}
        added = (
            f"{' and '.join(sums)} added up"
            if all(c.add is sum for c in sums.values())
            else "counted together"
        )
        left = len(self.rows) - sum(len(row.rows) if isinstance(row, Folded) else 1 for row in rows)
        more = f"{'' if sums else '... and '}{left} more row{'s' * (left > 1)}"
        return "; ".join([*[f"(n x): equal layers, {added}"] * bool(sums), *[more] * bool(left)])

    def _shown(self) -> Sequence[Sequence[Any]]:
        """The rows that are shown where each takes a line."""
        rows = folded(self.columns, self.rows)
        if self.largest_first:
            rows.sort(key=lambda row: -max(cell.weight(cell.value) for cell in row if isinstance(cell, Sum)))
        # What says that one is left out takes its place.
        return rows[: self.most + (len(rows) == self.most + 1)]


def _used(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[int]:
    """The columns that have something in them: others take the place of those with much."""
    return [i for i in range(len(columns)) if not rows or any(str(row[i]) for row in rows)]


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, broken at spaces."""
    return [
        part
        for line in text.split("\n")
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    ]


def _laid_out(columns: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The lines of each row of columns, the columns' names first: as few as there is room for."""
    figures = [name.endswith(" ") for name, *_ in columns]
    pieces = []
    for cells, is_figure in zip(columns, figures, strict=True):
        head, *others = cells
        breaks = _BREAKS_OF_FIGURES if is_figure else _BREAKS
        pieces.append([_BREAKS.split(head.strip()), *map(breaks.split, others)])
    room, lines = width - 2 * len(columns), 1
    most = max((len(cell) for cells in pieces for cell in cells), default=1)
    while sum(widths := [_narrowest(cells, lines) for cells in pieces]) > room and lines < most:
        lines += 1
    # What room is left goes where it saves a line.
    heights = [lines] * len(columns)
    while more := [(_narrowest(pieces[i], n - 1) - widths[i], i) for i, n in enumerate(heights) if n > 1]:
        cost, i = min(more)
        if cost > room - sum(widths):
            break
        widths[i] += cost
        heights[i] -= 1
    grid = []
    for row in zip(*pieces, strict=True):
        filled = [_filled(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        rows = itertools.zip_longest(*filled, fillvalue="")
        grid.append([
            "".join(
                f"  {part:>{wide}}" if is_figure else f"  {part:<{wide}}"
                for part, wide, is_figure in zip(parts, widths, figures, strict=True)
            ).rstrip()
            for parts in rows
        ])  # fmt: skip
    return grid


def _filled(pieces: Sequence[str], width: int) -> list[str]:
    """The lines that pieces of text fill; a longer piece has a line of its own."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len((lines[-1] + piece).rstrip(" ")) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip(" ") for line in lines]


def _narrowest(cells: Sequence[Sequence[str]], lines: int) -> int:
    """The least width at which all cells of a column take so many lines, or have a line for each piece."""
    width = max(len(piece.rstrip(" ")) for cell in cells for piece in cell)
    for cell in cells:
        widths = range(width, len("".join(cell)) + 1)
        if widths and len(cell) > 1:
            width += bisect.bisect_left(widths, True, key=lambda w, c=cell: len(_filled(c, w)) <= lines)
    return width


def _html(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> str:
    used = _used(columns, rows)
    head = "".join(f"<th>{escape(columns[i].strip())}</th>" for i in used)
    caption = f"<caption>{escape(title)}</caption>" if title else ""
    parts = [f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>"]
    sides = ["right" if name.endswith(" ") else "left" for name in columns]
    for row in rows:
        cells = [escape(str(cell)) for cell in row]
        if isinstance(row, Folded):
            # What is the same in all rows stands in the one that opens.
            own = [i for i in used if len({str(inner[i]) for inner in row.rows}) > 1]
            inside = _html([columns[i] for i in own], [[inner[i] for i in own] for inner in row.rows])
            cells[own[0]] = f"<details><summary>{cells[own[0]]}</summary>{inside}</details>"
        shown = "".join(f'<td style="text-align:{sides[i]}">{cells[i]}</td>' for i in used)
        parts.append(f"<tr>{shown}</tr>")
    return "\n".join([*parts, "</tbody></table>"])


def folded(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The rows with those of equal layers as one, in the place of the first: "layer_0 ... layer_15 (16 x)".

    Rows are of equal layers where their names differ in one number, and all other text is the same. Figures
    may differ: the folded row has what is added up, else the smallest and the largest. A layer that has most
    of a `Sum` is a row of its own.

    Args:
      columns: names; those of figures end in a space.
      rows: one value per column.
    """
    names = [i for i, name in enumerate(columns) if name.strip() in _NAMES]
    figures = {i for i, name in enumerate(columns) if name.endswith(" ")}
    # The first number of a name is that of the outermost layers.
    for place in range(3 if names else 0):
        # A name without such a number is a row of its own, as is one that was folded before.
        keys = [_key(row, names, figures, place) or index for index, row in enumerate(rows)]
        groups: dict[Any, list[Sequence[Any]]] = {}
        for key, row in zip(keys, rows, strict=True):
            groups.setdefault(key, []).append(row)
        groups = {key: _without_most(group) for key, group in groups.items() if not isinstance(key, int)}
        groups = {
            k: group for k, group in groups.items() if len({str(row[names[0]]) for row in group}) >= _FEW
        }
        first = {id(group[0]): _as_one(group, names[0], figures, place) for group in groups.values()}
        others = {id(row) for group in groups.values() for row in group[1:]}
        rows = [first.get(id(row), row) for row in rows if id(row) not in others]
    return list(rows)


def _without_most(group: list[Sequence[Any]]) -> list[Sequence[Any]]:
    """The rows of a group but one that has most of a sum."""
    weights = [[cell.weight(cell.value) for cell in row if isinstance(cell, Sum)] for row in group]
    halves = [sum(column) / 2 for column in zip(*weights, strict=True)]
    return [row for row, own in zip(group, weights, strict=True) if all(map(operator.le, own, halves))]


def _key(row: Sequence[Any], names: Sequence[int], figures: set[int], place: int) -> Any:
    if isinstance(row, Folded) or place >= len(_NUMBER.findall(str(row[names[0]]))):
        return None
    return tuple(
        _without(str(cell), place)
        if i in names
        else ""
        if i in figures or isinstance(cell, Sum)
        else str(cell)
        for i, cell in enumerate(row)
    )


def _without(text: str, place: int) -> str:
    """A name with one of its numbers left open, wherever that stands."""
    found = _NUMBER.findall(text)
    if place >= len(found):
        return text
    before, number = found[place]
    return re.sub(rf"(?<![^/\s,(]){re.escape(before)}{number}(?!\d)", f"{before}#", text)


def without_numbers(text: str) -> str:
    """A text with the numbers of layers left open, but not those of lines: equal for equal layers."""
    return _NUMBER.sub(r"\1#", text)


def _as_one(group: Sequence[Sequence[Any]], name: int, figures: set[int], place: int) -> Folded:
    cells = list(group[0])
    for i, cell in enumerate(cells):
        if isinstance(cell, Sum):
            cells[i] = dataclasses.replace(cell, value=cell.add([row[i].value for row in group]))
        elif i in figures:
            cells[i] = _range([str(row[i]) for row in group])
    numbers = sorted((_NUMBER.findall(str(row[name]))[place][1] for row in group), key=int)
    found = list(_NUMBER.finditer(str(group[0][name])))[place]
    layers = f"{found[1]}{numbers[0]} ... {found[1]}{numbers[-1]}"
    before, behind = found.string[: found.start()], found.string[found.end() :]
    cells[name] = f"{before}{layers}{behind} ({len(group)} x)"
    return Folded(cells, group)


def _range(column: Sequence[str]) -> str:
    """The smallest and the largest of figures; the one that they all are."""
    if len(set(column)) == 1:
        return column[0]
    *_, largest = ordered = sorted(column, key=_size)
    smallest = ordered[0].removesuffix(" %") if largest.endswith(" %") else ordered[0]
    return f"{smallest} ... {largest}"


def _size(figure: str) -> float:
    found = _FIGURE.search(figure)
    return float(found[0]) if found else -1.0
