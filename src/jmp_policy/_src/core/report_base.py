"""Shows reports as tables, in a terminal or a notebook, and turns them into plain data for programs."""

import dataclasses
import html
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Columns of text that `str` uses where the output is no terminal.
_WIDTH = 120

#: Up to which length a name is not broken.
_WHOLE = 40


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under named columns, as a report shows them.

    Args:
      columns: names; those of numbers end in a space and are set to the right.
      rows: one value per column; numbers are shown without units, which belong into the columns' names.
      title: what the rows are, or "".
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = ""


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

    A report defines its tables (`_tables`) and the lines below them (`_lines`). Where the rows of one field
    make a table for `to_pandas`, `_rows` is the name of that field. `_computed` are the properties that
    `to_dict` has beside the fields.

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

    def __rich__(self) -> Any:
        from rich import box, console, table, text

        parts: list[Any] = []
        for shown in self._tables():
            grid = table.Table(title=shown.title or None, title_justify="left", box=box.SIMPLE_HEAD)
            for i, name in enumerate(shown.columns):
                # Names of operations, modules and files stay whole, where they are not very long.
                is_name = name in ("operation", "module", "path", "line")
                is_whole = is_name and all(len(str(row[i])) <= _WHOLE for row in shown.rows)
                side = "right" if name.endswith(" ") else "left"
                grid.add_column(name.strip(), justify=side, overflow="fold", no_wrap=is_whole)
            for row in shown.rows:
                grid.add_row(*(text.Text(str(cell)) for cell in row))
            parts.append(grid)
        return console.Group(*parts, *(text.Text(line) for line in self._lines()))

    def __str__(self) -> str:
        from rich import console

        out = console.Console(file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False)
        out.print(self.__rich__())
        lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in lines).strip("\n")

    def _repr_html_(self) -> str:
        parts = []
        for shown in self._tables():
            head = "".join(f"<th>{html.escape(name.strip())}</th>" for name in shown.columns)
            caption = f"<caption>{html.escape(shown.title)}</caption>" if shown.title else ""
            parts.append(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>")
            sides = ["right" if name.endswith(" ") else "left" for name in shown.columns]
            for row in shown.rows:
                cells = [html.escape(str(cell)) for cell in row]
                pairs = zip(sides, cells, strict=True)
                aligned = (f'<td style="text-align:{side}">{cell}</td>' for side, cell in pairs)
                parts.append(f"<tr>{''.join(aligned)}</tr>")
            parts.append("</tbody></table>")
        parts += [f"<p>{html.escape(line)}</p>" for line in self._lines()]
        return "\n".join(parts)


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
