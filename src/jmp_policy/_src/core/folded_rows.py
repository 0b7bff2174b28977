"""Folds rows of a table that are about equal layers into one: "layer_0 ... layer_15, 16 x".

Rows are of equal layers where their names differ in one number, and all other text is the same. Numbers may
differ: the folded row has the smallest and the largest.
"""

import re
from collections.abc import Sequence
from typing import Any

#: Columns of names that lead to a module. Elsewhere text must be the same.
_NAMES = ("module", "path", "value", "where", "reaches", "result", "parameter", "scope")

#: Fewer rows are left as they are.
_FEW = 3

#: A number, with the text before and behind it that is not a slash: "layer_7".
_NUMBER = re.compile(r"([^/\s,(]*?)(\d+)(?=[/\s,.)\]]|$)")

#: A figure with its unit: "4.16 k", "< 0.1 %", "1.2e-05".
_FIGURE = re.compile(r"^(?:[<>] )?(-?[\d.,]+(?:e[-+]?\d+)?|inf)\s*([kMGTP]?)(.*)$")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def folded(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The rows with those of equal layers as one, in the place of the first.

    Args:
      columns: names; those of figures end in a space.
      rows: one value per column.
    """
    names = [i for i, name in enumerate(columns) if name.strip() in _NAMES]
    figures = {i for i, name in enumerate(columns) if name.endswith(" ")}
    # The first number of a name is that of the outermost layers.
    for place in range(3):
        rows = _folded_at(rows, names, figures, place)
    return list(rows)


def _folded_at(
    rows: Sequence[Sequence[Any]], names: Sequence[int], figures: set[int], place: int
) -> list[Sequence[Any]]:
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        key = _key(row, names, figures, place)
        # A name without such a number is a row of its own, as is one that was folded before.
        groups.setdefault(index if key is None else key, []).append(index)
    shown: dict[int, Sequence[Any]] = dict(enumerate(rows))
    for group in groups.values():
        if len(group) < _FEW:
            continue
        if len({str(rows[i][names[0]]) for i in group}) >= _FEW:
            shown[group[0]] = _as_one([rows[i] for i in group], names, figures, place)
            for i in group[1:]:
                del shown[i]
    return list(shown.values())


def _key(row: Sequence[Any], names: Sequence[int], figures: set[int], place: int) -> Any:
    cells = [str(cell) for cell in row]
    if any(" x)" in cells[i] for i in names):
        return None
    if not names or place >= len(_NUMBER.findall(cells[names[0]])):
        return None
    return tuple(
        _without(cell, place) if i in names else "" if i in figures else cell for i, cell in enumerate(cells)
    )


def _without(text: str, place: int) -> str:
    """A name with one of its numbers left open, wherever that stands."""
    found = list(_NUMBER.finditer(text))
    if place >= len(found):
        return text
    return re.sub(rf"{re.escape(found[place][1])}{found[place][2]}(?!\d)", f"{found[place][1]}#", text)


def _as_one(group: list[Sequence[Any]], names: Sequence[int], figures: set[int], place: int) -> Sequence[Any]:
    numbers = sorted({int(_NUMBER.findall(str(row[names[0]]))[place][1]) for row in group})
    cells = []
    for i in range(len(group[0])):
        column = [str(row[i]) for row in group]
        if i == names[0]:
            found = list(_NUMBER.finditer(column[0]))[place]
            before, behind = column[0][: found.start()], column[0][found.end() :]
            layers = f"{found[1]}{numbers[0]} ... {found[1]}{numbers[-1]}"
            cells.append(f"{before}{layers}{behind} ({len(group)} x)")
        else:
            cells.append(_range(column) if i in figures else column[0])
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
