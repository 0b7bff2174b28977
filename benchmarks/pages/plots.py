"""Draws the results for the pages of the documentation: `python -m benchmarks plots`. Nothing is measured.

Each figure comes from one JSON file of `results/` alone. On the same versions the same file gives the same
bytes. All that stands for a number has an id in the SVG that names the number.
"""

import pathlib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.pages.markdown import grouped, provenance, under
from benchmarks.table import load

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"

#: As in docs/figures.py; white, also where the page is dark. The font is matplotlib's own.
STYLE = {
    "svg.hashsalt": "jmp_policy",
    "savefig.facecolor": "white",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

#: Okabe and Ito's colours, told apart by people who see red and green alike.
_GREY, _BLUE, _SKY, _ORANGE = "#999999", "#0072B2", "#56B4E9", "#E69F00"
_CAPTION = "#555555"

#: Inches. As wide as a page on a telephone: the words are large enough to read there.
_WIDTH, _TOP, _BOTTOM, _LEFT, _RIGHT = 4.5, 1.05, 0.75, 1.8, 0.1
#: Between a panel and the one below: tick labels and a title.
_GAP = 0.5

Values = Sequence[float | None]


def steps(result: dict[str, Any]) -> Figure:
    """What loss scaling adds to a step by hand and wrapped."""
    result = under("0.10", result)
    panels = {
        "launches that scaling adds (%)": ("added_launches", "{:+.1f}"),
        "bytes that scaling adds (%)": ("added_bytes", "{:+.2f}"),
    }
    series = {"by hand": "by hand, scaling by hand", "jmp_policy": "wrapped, loss_scaled"}
    figure = _bar_panels(grouped(result["rows"], "model", "variant"), series, (_GREY, _BLUE), panels)
    card = result["target"].partition(",")[0]
    _around(
        figure,
        "By hand: dtype= in each layer, a select per parameter. jmp_policy: wrap, loss_scaled.",
        f"{result['optimizer']} steps in float16 at published sizes, compiled for an {card}; not run. "
        + provenance(result),
    )
    return figure


def speedups(result: dict[str, Any]) -> Figure:
    """How much faster float16 is than float32 and TF32 on each card, by the roofline."""
    models = grouped([row for row in result["rows"] if row["precision"] == "float16"], "model", "card")
    title = "estimated speed-up of float16"
    panels = {
        f"{title} over float32": ("over_float32", "{:.1f}"),
        f"{title} over TF32": ("over_tf32", "{:.2f}"),
    }
    cards = {card: card for card in result["cards"]}
    figure = _bar_panels(models, cards, (_ORANGE, _SKY, _BLUE), panels)
    for axis in figure.axes:
        axis.axvline(1, color="black", linewidth=0.8, linestyle="--", zorder=0.9)
    _around(
        figure,
        "TF32 is how float32 programs run by default; cards without a bar have none.",
        f"Roofline estimates of {result['optimizer']} steps at published sizes, compiled only; no "
        "measurements. " + provenance(result),
    )
    return figure


def _bar_panels(
    models: dict[str, Any], series: dict[str, str], colours: Sequence[str], panels: dict[str, tuple[str, str]]
) -> Figure:
    """Panels with a row per model, and a bar for each of a series.

    Args:
      models: name -> key -> row.
      series: label -> key.
      colours: of the series.
      panels: title -> name of the number and how it is written.
    """
    # Where panels stand does not depend on any text.
    height = len(models) * (0.16 * len(series) + 0.14)
    up = _TOP + len(panels) * (height + _GAP) - _GAP + _BOTTOM
    figure = Figure(figsize=(_WIDTH, up))
    of_label = dict(zip(series, colours, strict=False))
    for number, (title, (column, form)) in enumerate(panels.items()):
        bottom = _BOTTOM + (len(panels) - 1 - number) * (height + _GAP)
        width = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        axes = figure.add_axes((_LEFT / _WIDTH, bottom / up, width, height / up))
        values = {
            label: [_number(rows.get(key, {}).get(column)) for rows in models.values()]
            for label, key in series.items()
        }
        _bars(axes, column, list(models), values, of_label, form)
        axes.set_title(title, fontsize=8.5)
        axes.set_yticks(range(len(models)), list(models))
        axes.set_ylim(len(models) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
    return figure


def _bars(
    axes: Axes, column: str, names: list[str], series: dict[str, Values], colours: dict[str, str], form: str
) -> None:
    """Bars with their numbers; those that go left of zero have theirs on the right of it."""
    thickness = 0.8 / len(series)
    known = [value for values in series.values() for value in values if value is not None]
    most, least = max([0, *known]), min([0, *known])
    for number, (label, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * thickness
        for place, (name, value) in enumerate(zip(names, values, strict=True)):
            if value is None:
                continue
            (bar,) = axes.barh(place + shift, value, 0.9 * thickness, color=colours[label])
            bar.set_gid(_gid(column, name, label))
            axes.annotate(
                _signed(form.format(value)), (max(value, 0), place + shift), (2, 0),
                textcoords="offset points", va="center", fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
            )  # fmt: skip
        axes.barh(np.nan, np.nan, color=colours[label], label=label)
    axes.set_xlim(1.05 * least, most + 0.2 * (most - least) or 1)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.locator_params(axis="x", nbins=5)
    axes.spines["left"].set_visible(False)


def _around(figure: Figure, head: str, caption: str) -> None:
    """Words and the legend above the panels, a caption below."""
    up, handles = figure.get_figheight(), figure.axes[0].get_legend_handles_labels()[0]
    figure.legend(
        handles=handles, loc="upper left", ncols=len(handles), frameon=False,
        bbox_to_anchor=(0.02, 1 - 0.42 / up),
    )  # fmt: skip
    head, caption = ("\n".join(textwrap.wrap(*words)) for words in ((head, 64), (caption, 74)))
    figure.text(0.035, 1 - 0.1 / up, head, ha="left", va="top")
    figure.text(0.035, 0.08 / up, caption, fontsize=7, color=_CAPTION, va="bottom")


def _number(value: float | str | None) -> float | None:
    """A number as it stands in the results: 51.2, or "+0.14%"."""
    return float(value.rstrip("%")) if isinstance(value, str) else value


def _gid(*names: str) -> str:
    return re.sub(r"\W+", "-", "-".join(names))


def _signed(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}")


#: Name of the image -> name of the results, and what draws them.
FIGURES: dict[str, tuple[str, Callable[[dict[str, Any]], Figure]]] = {
    "zoo_steps": ("zoo_gpu", steps),
    "zoo_cards": ("zoo_cards", speedups),
}


def save(name: str, result: dict[str, Any], images: pathlib.Path = IMAGES) -> pathlib.Path:
    """Draws a figure into `images`, without the date of the drawing."""
    path = images / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        FIGURES[name][1](result).savefig(path, metadata={"Date": None})
    return path


def main(images: pathlib.Path = IMAGES) -> None:
    for name, (source, _) in FIGURES.items():
        save(name, load(source), images)
