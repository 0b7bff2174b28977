"""Shows reports as tables, in a terminal or a notebook, and turns them into plain data for programs."""

import contextvars
import dataclasses
import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jmp_policy._src.core.tables import Folded, Sum, Table, folded, wrapped

__all__ = ["Report", "Sum", "Table"]

#: Columns of text of `str`.
_WIDTH = 100

#: Above more lines of tables than these the verdict stands, as it does below them.
_LONG = 16

#: What is missing from reports that are made from now on, in sentences: somebody has interrupted them.
MISSING: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("missing", default=())


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

    #: What is missing since somebody has interrupted the report; "" if nothing is.
    interrupted = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass makes its own where the class has none.
        cls.__repr__ = Report.__repr__

    def __post_init__(self) -> None:
        if missing := MISSING.get():
            object.__setattr__(self, "interrupted", " ".join(missing))

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
        """Every field, the verdict, and what is missing of an interrupted report, for `json.dumps`."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        names += [name for name in self._computed if name not in names and hasattr(self, name)]
        names += ["interrupted"] * bool(self.interrupted)
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
        return self._text(full, _WIDTH)

    def __str__(self) -> str:
        return self.table()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        yield Text(self._text(False, options.max_width))

    def _text(self, full: bool, width: int) -> str:
        tables = self._tables() if full else self._short_tables()
        lines = [line for table in tables for line in table.as_text(full, width)]
        first, last = (
            [part for line in ends for part in wrapped(line, width)]
            for ends in self._ends(len(lines) > _LONG)
        )
        return "\n".join([*first, *[""] * bool(first), *lines, *last]).strip("\n")

    def _ends(self, is_long: bool) -> tuple[list[str], list[str]]:
        """The lines before and after the tables. The verdict of a long report stands at both ends."""
        verdict = getattr(self, "verdict", "")
        interrupted = [self.interrupted] * bool(self.interrupted)
        return [*interrupted, *[verdict] * bool(verdict and is_long)], [*self._lines(), *interrupted]

    def _repr_html_(self) -> str:
        short, whole = list(self._short_tables()), list(self._tables())
        tables = [table.as_html() for table in short]
        if short != whole or any(table.is_cut for table in short):
            all_rows = "\n".join(table.as_html(full=True) for table in whole)
            tables.append(f"<details><summary>All rows</summary>{all_rows}</details>")
        is_long = sum(map(len, (table.rows for table in short))) > _LONG
        first, last = ([f"<p>{html.escape(line)}</p>" for line in ends] for ends in self._ends(is_long))
        return "\n".join([*first, *tables, *last])


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


def joined_places(places: Iterable[str]) -> str:
    """Joins places, those of equal layers as one: "layer_0 ... layer_7/mlp (8 x), head and 4 more"."""
    rows = folded(["place"], [[place] for place in dict.fromkeys(places)])
    more = sum(len(row.rows) if isinstance(row, Folded) else 1 for row in rows[3:])
    return ", ".join(row[0] for row in rows[:3]) + f" and {more} more" * bool(more)
