"""Draws the diagrams of these pages: `python docs/diagrams.py` writes images/diagram_*.svg.

A diagram is a list of floors, from top to bottom, and a floor is a list of boxes. `rooms.py` draws with
the same boxes and arrows.
"""

import sys
import textwrap
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parent / "images"

# In the picture's own unit, of which it is 400 wide: on a screen of 400 pixels text is 10.5 pixels high.
WIDTH, MARGIN, PAD, _GAP, _ARROW = 400, 6, 6, 10, 24
TITLE, LINE, _TEXT = 13, 13, 10.5
#: Width of a character as a share of its height, in a wide font.
_CHARACTER = 0.53

# Boxes bring their own light ground, and the grey is seen on white and on black.
_STYLE = f"""
  text {{ font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1b1b1b; }}
  .name {{ font-size: {TITLE}px; font-weight: 600; }}
  .line {{ font-size: {_TEXT}px; }}
  .dtype {{ font-size: {_TEXT}px; text-anchor: end; fill: #4d4d4d; }}
  .float32 {{ fill: #dcebf7; stroke: #0072b2; }}
  .float16 {{ fill: #fdf0d5; stroke: #b26b00; }}
  .either {{ fill: #ededed; stroke: #7d7d7d; }}
  .arrow {{ fill: none; stroke: #7d7d7d; stroke-width: 1.6; }}
  .head {{ fill: #7d7d7d; }}
"""


class Box(NamedTuple):
    """What is computed, in which dtype ("either" where that does not matter), and a few words on it."""

    dtype: str
    name: str
    text: str = ""


#: Boxes beside each other; arrows lead to them from those above.
Floor = list[Box]

#: The network of policies.md under "mixed_float16".
POLICY = [
    [Box("float32", "parameters", "stored, updated and saved"), Box("float32", "inputs")],
    [Box("float16", "body: Dense", "parameters and inputs are cast where a layer reads them")],
    [Box("float32", "norm: LayerNorm", "a float32 island: computes in float32, returns float16")],
    [Box("float16", "head: Dense", "reads and computes in float16")],
    [Box("float32", "results", "cast where they leave the model")],
]

LOSS_SCALE = [
    [Box("float32", "loss, times S", "the forward pass does not change")],
    [Box("float16", "backward pass", "each gradient is S times larger: fewer become zero")],
    [Box("either", "is every gradient finite?")],
    [
        Box("float32", "yes: step", "divide by S, clip, update; after 2000 such steps S doubles"),
        Box("either", "no: skip", "parameters and moments keep every bit; S is halved"),
    ],
]

#: The loss of autocast.md, operation by operation.
AUTOCAST = [
    [Box("float16", 'x @ params["w"]', "lower: a product takes half operands")],
    [Box("float16", "+ b, tanh", "follow: the operands are half")],
    [
        Box(
            "float16",
            'h @ params["w"].T',
            "lower; not rounded at the end: only float32 operations use the result",
        )
    ],
    [Box("float32", "log_softmax", "full: an exponential, a sum, a logarithm")],
    [Box("float32", "loss", "the dtype that it has without autocast")],
]

INTERCEPTOR = [
    [Box("either", "Flax calls a module", "the interceptor takes the call")],
    [
        Box(
            "either",
            "which policy?",
            "the first rule that matches the path, else that of the module around it",
        )
    ],
    [
        Box("either", "dtype=", "set to the compute dtype for this call"),
        Box("either", "self.param", "float32 in the tree, half where it is read"),
        Box("either", "inputs", "cast where a product reads them"),
    ],
    [Box("float16", "the module's own code", "unchanged")],
    [Box("either", "result", "cast to the output dtype if the caller has another policy, or none")],
]

DIAGRAMS: dict[str, list[Floor]] = {
    "policy": POLICY,
    "loss_scale": LOSS_SCALE,
    "autocast": AUTOCAST,
    "interceptor": INTERCEPTOR,
}


def drawn_arrow(points: list[tuple[float, float]]) -> str:
    """An arrow through points, with its head at the last one."""
    (x, y), head = points[-1], 4.5
    line = " L ".join(f"{a:.1f} {b:.1f}" for a, b in [*points[:-1], (x, y - head)])
    triangle = f"M {x:.1f} {y:.1f} l {-head:.1f} {-1.6 * head:.1f} h {2 * head:.1f} z"
    return f'<path class="arrow" d="M {line}"/><path class="head" d="{triangle}"/>'


def wrapped(text: str, width: float) -> list[str]:
    """The lines of a text in a box of this width."""
    return textwrap.wrap(text, int((width - 2 * PAD) / (_CHARACTER * _TEXT)))


def height_of(texts: Iterable[list[str]]) -> float:
    """The height of boxes that stand beside each other."""
    return TITLE + LINE * max(map(len, texts)) + 2 * PAD


def drawn_box(
    kind: str, name: str, lines: list[str], x: float, y: float, width: float, height: float, aside: str = ""
) -> Iterator[str]:
    """A box, its name, what stands on the right of the name, and the lines below."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    yield f'<rect class="{kind}" rx="4" {size}/>'
    base = y + PAD + TITLE - 3
    yield f'<text class="name" x="{x + PAD:.1f}" y="{base:.1f}">{escape(name)}</text>'
    if aside:
        yield f'<text class="dtype" x="{x + width - PAD:.1f}" y="{base:.1f}">{aside}</text>'
    for number, line in enumerate(lines, 1):
        yield f'<text class="line" x="{x + PAD:.1f}" y="{base + LINE * number:.1f}">{escape(line)}</text>'


def picture(title: str, words: str, height: float, parts: Iterable[str]) -> str:
    """The SVG text of a picture; `words` are for who does not see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{1.25 * WIDTH:.0f}" height="{1.25 * height:.0f}">',
            f"<title>{title}</title><desc>{escape(words)}</desc>",
            f"<style>{_STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def drawn(name: str) -> str:
    """Returns a diagram as SVG text; blue is float32, orange half precision."""
    parts: list[str] = []
    y, above, words = float(MARGIN), [], []
    for boxes in DIAGRAMS[name]:
        if above:
            y += _ARROW
        width = min(250.0, (WIDTH - 2 * MARGIN - _GAP * (len(boxes) - 1)) / len(boxes))
        left = (WIDTH - width * len(boxes) - _GAP * (len(boxes) - 1)) / 2
        places = [left + number * (width + _GAP) for number in range(len(boxes))]
        texts = [wrapped(box.text, width) for box in boxes]
        height = height_of(texts)
        middles = [x + width / 2 for x in places]
        # One box to many or many to one: an arrow for each of the many.
        for number in range(max(len(above), len(boxes)) if above else 0):
            ends = (above[number % len(above)], y - _ARROW), (middles[number % len(boxes)], y)
            parts.append(drawn_arrow([*ends]))
        for box, lines, x in zip(boxes, texts, places, strict=True):
            aside = "" if box.dtype == "either" else box.dtype
            parts += drawn_box(box.dtype, box.name, lines, x, y, width, height, aside)
        words.append(", ".join(f"{box.name}: {box.text}" for box in boxes))
        y, above = y + height, middles
    return picture(name, "; ".join(words), y + MARGIN, parts)


def main() -> int:
    """Writes all diagrams."""
    for name in DIAGRAMS:
        (IMAGES / f"diagram_{name}.svg").write_text(drawn(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
