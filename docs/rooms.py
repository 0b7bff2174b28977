"""Draws the rooms of the source and their imports: `python docs/rooms.py` writes images/rooms.svg.

A room is a folder of `src/jmp_policy/_src`. It stands one floor above the highest room that it imports.
Arrows point from a room to those that it imports; one that a path of other arrows implies is left out.
Everything is read from the imports, so that the picture is the source's: a test draws it again.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from diagrams import MARGIN, WIDTH, drawn_arrow, drawn_box, height_of, picture, wrapped

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "jmp_policy"
IMAGE = Path(__file__).parent / "images" / "rooms.svg"

#: The modules that users import; they are drawn as one box above all rooms.
PUBLIC = "public modules"

#: Room -> rooms that it imports.
Imports = Mapping[str, set[str]]

_GAP, _LANE = 26, 9


class Box(NamedTuple):
    """A room in the picture: its place, and the lines of its text."""

    name: str
    x: float
    y: float
    width: float
    height: float
    lines: list[str]


def imported(path: Path) -> Iterator[str]:
    """Yields the rooms that a file imports, by statement or by name (`import_module("...")`)."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        for name in names:
            if found := re.fullmatch(r"jmp_policy\._src\.(\w+)[\w.]*", name):
                yield found[1]


def read_imports(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Returns which rooms each room imports; those of all public modules together under `PUBLIC`."""
    found: dict[str, set[str]] = {PUBLIC: set()}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        if parts[0] != "_src":
            found[PUBLIC].update(imported(path))
        elif len(parts) > 2:
            found.setdefault(parts[1], set()).update(set(imported(path)) - {parts[1]})
    return found


def below(imports: Imports, room: str) -> set[str]:
    """Returns all rooms that a room stands on, directly or not."""
    direct = imports[room]
    return direct.union(*(below(imports, other) for other in direct))


def reduced(imports: Imports) -> dict[str, set[str]]:
    """Returns the imports without those that a longer path implies."""
    return {
        room: {a for a in direct if not any(a in below(imports, b) for b in direct)}
        for room, direct in imports.items()
    }


def floors(imports: Imports) -> list[list[str]]:
    """Returns the rooms by floor, highest first; on a floor each stands below those that import it."""
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max(map(height, imports[room]), default=0)
        return heights[room]

    direct, rows, places = reduced(imports), [], {}
    for floor in range(max(map(height, imports)), 0, -1):
        row = [room for room in imports if heights[room] == floor]
        row.sort(key=lambda room: (_middle(room, direct, places, heights), room))
        places.update({room: (index + 0.5) / len(row) for index, room in enumerate(row)})
        rows.append(row)
    return rows


def _middle(
    room: str, direct: Imports, places: Mapping[str, float], heights: Mapping[str, int]
) -> tuple[float, float]:
    """Returns where the arrows to a room come from, 0 on the left; those that pass a floor from the right."""
    above = [other for other in direct if room in direct[other]]
    sides = [places[other] if heights[other] == heights[room] + 1 else 1.0 for other in above]
    return (sum(sides) / len(sides) if sides else 0.5), -len(sides)


def description(room: str, package: Path = PACKAGE) -> str:
    """Returns the first line of a room's docstring; of the public modules their names."""
    if room != PUBLIC:
        text = ast.get_docstring(ast.parse((package / "_src" / room / "__init__.py").read_text())) or ""
        return text.split("\n")[0].rstrip(".").replace("`", "")
    paths = [p for p in package.rglob("*.py") if "_src" not in p.parts and not p.name.startswith("__")]
    return ", ".join(["jmp_policy", *sorted("." + ".".join(_module(p, package)) for p in paths)])


def _module(path: Path, package: Path) -> tuple[str, ...]:
    return path.relative_to(package).with_suffix("").parts


def _boxes(imports: Imports, lanes: int) -> dict[str, Box]:
    """Places the rooms, floor below floor, each floor as wide as the picture without its lanes."""
    boxes, y = {}, float(MARGIN)
    for rooms in floors(imports):
        width = (WIDTH - 2 * MARGIN - _LANE * lanes - _GAP / 2 * (len(rooms) - 1)) / len(rooms)
        texts = [wrapped(description(room), width) for room in rooms]
        height = height_of(texts)
        for place, (room, lines) in enumerate(zip(rooms, texts, strict=True)):
            x = MARGIN + place * (width + _GAP / 2)
            boxes[room] = Box(room, x, y, width, height, lines)
        y += height + _GAP
    return boxes


def _ports(boxes: Mapping[str, Box], arrows: list[tuple[str, str]], end: int) -> dict[tuple[str, str], float]:
    """Spreads the arrows of each room over its lower (`end` 0) or upper (1) edge."""
    ports = {}
    for room, box in boxes.items():
        here = [arrow for arrow in arrows if arrow[end] == room]
        # Those that go down a lane, on the right of the picture, leave and arrive on the right.
        here.sort(key=lambda arrow: (_is_long(boxes, arrow), boxes[arrow[1 - end]].x, arrow))
        for place, arrow in enumerate(here):
            ports[arrow] = box.x + box.width * (place + 1) / (len(here) + 1)
    return ports


def _is_long(boxes: Mapping[str, Box], arrow: tuple[str, str]) -> bool:
    """Whether an arrow passes another floor, so that it goes around by a lane."""
    upper, lower = (boxes[room].y for room in arrow)
    return len({box.y for box in boxes.values() if upper < box.y <= lower}) > 1


def _arrows(boxes: Mapping[str, Box], arrows: list[tuple[str, str]]) -> Iterator[str]:
    leaving, arriving = _ports(boxes, arrows, 0), _ports(boxes, arrows, 1)
    lane, aside = WIDTH - MARGIN - 2.0, 0.0
    for ends in arrows:
        upper, lower = (boxes[room] for room in ends)
        start, stop = (leaving[ends], upper.y + upper.height), (arriving[ends], lower.y)
        if not _is_long(boxes, ends):
            yield drawn_arrow([start, stop])
            continue
        high, low = start[1] + 4 + aside, stop[1] - 11 - aside
        yield drawn_arrow([start, (start[0], high), (lane, high), (lane, low), (stop[0], low), stop])
        lane, aside = lane - _LANE, 4 - aside  # Two that meet between floors run beside each other.


def drawn(imports: Imports) -> str:
    """Returns the picture as SVG text; the same imports and docstrings give the same bytes."""
    direct = reduced(imports)
    arrows = [(room, other) for row in floors(imports) for room in row for other in sorted(direct[room])]
    lanes = sum(_is_long(_boxes(imports, 0), arrow) for arrow in arrows)
    boxes = _boxes(imports, lanes)
    height = max(box.y + box.height for box in boxes.values()) + MARGIN
    words = "; ".join(f"{a} imports {', '.join(sorted(b))}" for a, b in direct.items() if b)
    rooms = (  # In the blue and the orange of the diagrams' dtypes.
        part
        for box in boxes.values()
        for part in drawn_box("float16" if box.name == PUBLIC else "float32", box.name, box.lines, *box[1:5])
    )
    title = "The rooms of jmp_policy and their imports"
    return picture(title, words, height, [*_arrows(boxes, arrows), *rooms])


def main() -> int:
    """Writes the picture, and says who imports whom."""
    imports = read_imports()
    IMAGE.write_text(drawn(imports))
    for row in floors(imports):
        for room in row:
            print(f"{room}: {', '.join(sorted(imports[room])) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
