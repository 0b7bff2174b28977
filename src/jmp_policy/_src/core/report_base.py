"""Shows reports as tables, in a terminal or a notebook, and turns them into plain data for programs."""

import dataclasses
import html
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Columns of text that `str` uses where the output is no terminal.
_WIDTH = 120

#: Above more rows than these the verdict stands, as it does below them.
_LONG = 12

#: Up to which length a name is not broken.
_WHOLE = 40

#: Columns of names that lead to a module. Elsewhere text must be the same.
_NAMES = ("module", "path", "value", "where", "reaches", "result", "parameter", "scope")

#: Fewer rows are left as they are.
_FEW = 3

#: A number, with the text before and behind it that is not a slash: "layer_7".
_NUMBER = re.compile(r"([^/\s,(]*?)(\d+)(?=[/\s,.)\]]|$)")

#: A figure with its unit: "4.16 k", "< 0.1 %", "1.2e-05".
_FIGURE = re.compile(r"^(?:[<>] )?(-?[\d.,]+(?:e[-+]?\d+)?|inf)\s*([kMGTP]?)(.*)$")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under named columns, as a report shows them.

    Args:
      columns: names; those of numbers end in a space and are set to the right.
      rows: one value per column; numbers are shown without units, which belong into the columns' names.
      title: what the rows are, or "".
      most: how many rows are shown at most, those of equal layers as one; the others are counted.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    most: int = 24

    def shown(self, full: bool) -> tuple[Sequence[Sequence[Any]], str]:
        """The rows to show, and how many more there are, in words."""
        if full:
            return self.rows, ""
        rows = folded(self.columns, self.rows)
        left = len(rows) - self.most
        if left <= 1:  # What says that one is left out takes its place.
            return rows, ""
        return rows[: self.most], f"... and {left} more rows: print(report.table(full=True))"


def row_of(rows: Sequence[Any], path: str, noun: str = "row") -> Any:
    """The row of a path.

    Raises:
      KeyError: when there is none; the message lists the paths that there are.
    """
    for row in rows:
        if row.path == path:
            return row
    raise KeyError(f"There is no {noun} {path!r}; there are {joined([row.path for row in rows], 20, repr)}.")


class Report:
    """Base class of the reports, which are frozen dataclasses of plain fields.

    A report defines its tables (`_tables`), those that fit a screen if they are others (`_short_tables`), and
    the lines below them (`_lines`). Where the rows of one field make a table for `to_pandas`, `_rows` is the
    name of that field. `_computed` are the properties that `to_dict` has beside the fields.

    `repr` is short, so that a line of a REPL stays one; `str` is the whole report.
    """

    _rows: str = ""
    _computed: tuple[str, ...] = ("verdict",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass makes its own where the class has none.
        cls.__repr__ = Report.__repr__

    def __repr__(self) -> str:
        verdict = getattr(self, "verdict", "")
        return f"<{type(self).__name__}: {verdict or 'print it to see its rows'}>"

    def _tables(self) -> Sequence[Table]:
        raise NotImplementedError

    def _short_tables(self) -> Sequence[Table]:
        return self._tables()

    def _lines(self) -> Sequence[str]:
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the verdict, as dictionaries, lists, numbers and text for `json.dumps`."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        names += [name for name in self._computed if name not in names and hasattr(self, name)]
        return {name: plain(getattr(self, name)) for name in names}

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
          ImportError: when pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: pip install pandas.") from error
        return pandas.DataFrame(plain(getattr(self, self._rows)))

    def table(self, full: bool = False) -> str:
        """The report as text, as `str` gives it.

        Args:
          full: whether to show every row; else rows of equal layers are one, and long tables are cut.
        """
        from rich import console

        out = console.Console(file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False)
        with out.capture() as captured:
            out.print(self._as_rich(full, _widths))
        return "\n".join(map(str.rstrip, captured.get().splitlines())).strip("\n")

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> Any:
        return self._as_rich(full=False, widths=lambda columns: [None] * len(columns))

    def _shown(self, full: bool) -> tuple[list[str], list[tuple[Table, Sequence[Sequence[Any]], str]]]:
        """The verdict, which of a long report stands at both ends; each table, its rows, what is left out."""
        tables = self._tables() if full else self._short_tables()
        shown = [(table, *table.shown(full)) for table in tables]
        verdict = getattr(self, "verdict", "")
        is_long = sum(len(rows) for _, rows, _ in shown) > _LONG
        return [verdict] if verdict and is_long else [], shown

    def _as_rich(self, full: bool, widths: Callable[[Any], Sequence[int | None]]) -> Any:
        from rich import box, console, table, text

        first, tables = self._shown(full)
        parts: list[Any] = [text.Text(f"{line}\n") for line in first]
        for shown, rows, more in tables:
            grid = table.Table(title=shown.title or None, title_justify="left", box=box.SIMPLE_HEAD)
            columns = [(name, [str(row[i]) for row in rows]) for i, name in enumerate(shown.columns)]
            # A column without anything in it takes the place of those with much.
            columns = [(name, cells) for name, cells in columns if any(cells) or not rows]
            for (name, _), width in zip(columns, widths(columns), strict=True):
                side = "right" if name.endswith(" ") else "left"
                grid.add_column(name.strip(), justify=side, overflow="fold", width=width)
            for row in zip(*(cells for _, cells in columns), strict=True):
                grid.add_row(*map(text.Text, row))
            parts += [grid, *([text.Text(f"  {more}\n")] if more else [])]
        return console.Group(*parts, *(text.Text(line) for line in self._lines()))

    def _repr_html_(self) -> str:
        first, tables = self._shown(full=False)
        short, whole = (_html_of(shown) for shown in (tables, self._shown(full=True)[1]))
        if whole != short:
            short += f"<details><summary>All rows</summary>{whole}</details>"
        first, last = ([f"<p>{html.escape(line)}</p>" for line in lines] for lines in (first, self._lines()))
        return "\n".join([*first, short, *last])


def _html_of(tables: Sequence[tuple[Table, Sequence[Sequence[Any]], str]]) -> str:
    parts = []
    for table, rows, _ in tables:
        head = "".join(f"<th>{html.escape(name.strip())}</th>" for name in table.columns)
        caption = f"<caption>{html.escape(table.title)}</caption>" if table.title else ""
        parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>")
        starts = [f'<td style="text-align:{"right" if n.endswith(" ") else "left"}">' for n in table.columns]
        for row in rows:
            cells = (f"{start}{html.escape(str(cell))}</td>" for start, cell in zip(starts, row, strict=True))
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</tbody></table>")
    return "\n".join(parts)


def _widths(columns: Sequence[tuple[str, Sequence[str]]]) -> list[int]:
    """Widths of columns at which names stay whole, and no other word is broken if there is room for it."""
    room = _WIDTH - 3 * len(columns) - 1
    wanted = [max(map(len, [name.strip(), *cells])) for name, cells in columns]
    for longest in (_WHOLE, 24, 16, 11, 1):
        widths = []
        for (name, cells), width in zip(columns, wanted, strict=True):
            words = [name.strip(), *(word for cell in cells for word in cell.split())]
            is_name = name in ("operation", "module", "path", "line") or name.endswith(" ")
            widths.append(width if is_name and width <= _WHOLE else min(longest, max(map(len, words))))
        if sum(widths) <= room:
            break
    # What is left goes to those that want it, evenly.
    while sum(widths) < room and widths != wanted:
        narrow = [i for i, width in enumerate(widths) if width < wanted[i]]
        widths[min(narrow, key=widths.__getitem__)] += 1
    return widths


def plain(value: Any) -> Any:
    """Converts dataclasses and NumPy values into dictionaries, lists, numbers and text, for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if hasattr(value, "tolist"):
        return np.asarray(value).tolist()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def plotting(use: str) -> Any:
    """Imports matplotlib's pyplot.

    Args:
      use: what needs it, for the error message.

    Raises:
      ImportError: when matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{use} needs matplotlib: pip install 'jmp_policy[plot]'.") from error
    return pyplot


def bytes_text(count: float) -> str:
    """Formats a number of bytes, in powers of 1000: "1.5 MB"."""
    return count_text(count, "B")


def count_text(count: float, unit: str = "") -> str:
    """Formats a count, in powers of 1000: "1.5 M"."""
    size, prefix = float(count), ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(size) < 999.5 or prefix == "P":
            break
        size /= 1000.0
    digits = f"{size:.0f}" if not prefix or abs(size) >= 99.95 else f"{size:.3g}"
    return f"{digits} {prefix}{unit}".strip()


def percent(share: float) -> str:
    """Formats a fraction as a percentage: "0", "< 0.1 %", "12.5 %", "100 %"."""
    if share == 0:
        return "0"
    if share < 0.001:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.3g} %"


def joined(names: Sequence[str], most: int = 3, show: Callable[[str], str] = str) -> str:
    """Joins the first names, and says how many more there are: "a, b, c and 4 more"."""
    shown = ", ".join(show(name) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def folded(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The rows with those of equal layers as one, in the place of the first: "layer_0 ... layer_15 (16 x)".

    Rows are of equal layers where their names differ in one number, and all other text is the same. Figures
    may differ: the folded row has the smallest and the largest.

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
        equal = {key for key, group in groups.items() if len({str(row[names[0]]) for row in group}) >= _FEW}
        shown = []
        for key, row in zip(keys, rows, strict=True):
            if key not in equal:
                shown.append(row)
            elif group := groups.pop(key, []):
                shown.append(_as_one(group, names[0], figures, place))
        rows = shown
    return list(rows)


def _key(row: Sequence[Any], names: Sequence[int], figures: set[int], place: int) -> Any:
    cells = [str(cell) for cell in row]
    is_folded = any(" x)" in cells[i] for i in names)
    if is_folded or place >= len(_NUMBER.findall(cells[names[0]])):
        return None
    return tuple(
        _without(cell, place) if i in names else "" if i in figures else cell for i, cell in enumerate(cells)
    )


def _without(text: str, place: int) -> str:
    """A name with one of its numbers left open, wherever that stands."""
    found = _NUMBER.findall(text)
    if place >= len(found):
        return text
    before, number = found[place]
    return re.sub(rf"{re.escape(before)}{number}(?!\d)", f"{before}#", text)


def _as_one(group: Sequence[Sequence[Any]], name: int, figures: set[int], place: int) -> list[str]:
    columns = zip(*(map(str, row) for row in group), strict=True)
    cells = [_range(column) if i in figures else column[0] for i, column in enumerate(columns)]
    numbers = sorted(int(_NUMBER.findall(str(row[name]))[place][1]) for row in group)
    found = list(_NUMBER.finditer(str(group[0][name])))[place]
    layers = f"{found[1]}{numbers[0]} ... {found[1]}{numbers[-1]}"
    before, behind = found.string[: found.start()], found.string[found.end() :]
    cells[name] = f"{before}{layers}{behind} ({len(group)} x)"
    return cells


def _range(column: Sequence[str]) -> str:
    """The smallest and the largest of figures; the one that they all are."""
    if len(set(column)) == 1:
        return column[0]
    ordered = sorted(column, key=_size)
    return f"{ordered[0]} ... {ordered[-1]}"


def _size(figure: str) -> float:
    found = _FIGURE.match(figure)
    if found is None:
        return -1.0
    number = float(found[1].replace(",", ""))
    # "< 0.1 %" is below "0.1 %".
    return number * _FACTORS[found[2]] - (1e-9 if figure.startswith("<") else 0)
