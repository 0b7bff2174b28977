"""Draws the results for the pages of the documentation: `python -m benchmarks.plots`. Nothing is measured.

Each figure comes from one JSON file of `results/` alone. On the same versions the same file gives the same
bytes. All that stands for a number has an id in the SVG that names the number.
"""

import json
import math
import pathlib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks._record import RESULTS
from benchmarks._tables import ROOT, grouped, provenance

IMAGES = ROOT / "docs" / "images"

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
_GREEN, _RED = "#009E73", "#D55E00"
_CAPTION = "#555555"

#: Inches. As wide as a page on a telephone: the words are large enough to read there.
_WIDTH, _TOP, _BOTTOM, _LEFT, _RIGHT = 4.5, 1.05, 0.75, 1.8, 0.1
#: Between a panel and the one below: tick labels and a title.
_GAP = 0.5

Values = Sequence[float | None]


def steps(result: dict[str, Any]) -> Figure:
    """Bytes that a step moves by hand and wrapped, and what loss scaling adds to each."""
    models = grouped(list(map(_launched, result["rows"])), "model", "variant")
    scaled = {"by hand": "by hand, scaling by hand", "jmp_policy": "wrapped, loss_scaled"}
    colours = dict(zip(scaled, (_GREY, _BLUE), strict=True))
    panels = {
        "GB moved by a step": ("gigabytes", "{:.1f}"),
        "launches that scaling adds (%)": ("added_kernels", "{:+.1f}"),
        "bytes that scaling adds (%)": ("added_bytes", "{:+.2f}"),
    }
    figure, axes = _panels(list(models), len(scaled), len(panels))
    for axis, (title, (column, form)) in zip(axes, panels.items(), strict=True):
        values = {
            name: [_number(found.get(variant, {}).get(column)) for found in models.values()]
            for name, variant in scaled.items()
        }
        _bars(axis, column, list(models), values, colours, form)
        axis.set_title(title, fontsize=8.5)
    _legend(
        figure,
        axes[0],
        "By hand: dtype= in each layer, a select per parameter. jmp_policy: wrap, loss_scaled.",
    )
    card = result["target"].partition(",")[0]
    _caption(
        figure,
        f"{result['optimizer']} steps in float16 at published sizes, compiled for an {card}; not run. "
        + provenance(result),
    )
    return figure


def speedups(result: dict[str, Any]) -> Figure:
    """How much faster float16 is than float32 and TF32 on each card, by the roofline."""
    models = grouped([row for row in result["rows"] if row["precision"] == "float16"], "model", "card")
    colours = dict(zip(result["cards"], (_ORANGE, _SKY, _BLUE, _RED, _GREY), strict=False))
    panels = {"over_float32": ("over float32", "{:.1f}"), "over_tf32": ("over TF32", "{:.2f}")}
    figure, axes = _panels(list(models), len(colours), len(panels))
    for axis, (column, (title, form)) in zip(axes, panels.items(), strict=True):
        values = {
            card: [_number(found.get(card, {}).get(column)) for found in models.values()] for card in colours
        }
        _bars(axis, column, list(models), values, colours, form)
        axis.axvline(1, color="black", linewidth=0.8, linestyle="--", zorder=0.9)
        axis.set_title(f"estimated speed-up of float16 {title}", fontsize=8.5)
    _legend(figure, axes[0], "TF32 is how float32 programs run by default; cards without a bar have none.")
    _caption(
        figure,
        f"Roofline estimates of {result['optimizer']} steps at published sizes, compiled only; no "
        "measurements. " + provenance(result),
    )
    return figure


#: Verdict -> colour and marker.
_VERDICTS = {
    "parity": (_BLUE, "o"), "worse": (_RED, "s"), "better": (_GREEN, "D"), "unclear": (_ORANGE, "v"),
}  # fmt: skip
#: Differences beyond so many margins are written at the edge: the others would have no width.
_MOST_MARGINS = 8


def differences(result: dict[str, Any]) -> Figure:
    """By task and precision, the mean difference from float32 with its interval."""
    measures = {row["task"]: row["measure"] for row in reversed(result["rows"])}
    rows = [row for row in result["rows"] if row["measure"] == measures[row["task"]] and "interval" in row]
    tasks = grouped(rows, "task", "precision")
    names = list(dict.fromkeys(row["precision"] for row in rows))
    figure, panels = _stacked(len(tasks), 0.2 * len(names))
    for axes, (task, found) in zip(panels, tasks.items(), strict=True):
        _intervals(axes, names, found, f"{task}: {measures[task]}")
    handles = [
        axes.plot([], [], color=colour, marker=marker, label=verdict, markersize=5, linewidth=1.4)[0]
        for verdict, (colour, marker) in _VERDICTS.items()
        if any(row["verdict"] == verdict for row in rows)
    ]
    _place_legend(figure, handles)
    seeds = len(result["seeds"])
    words = f"Mean difference from float32 over {seeds} seeds, {100 * result['confidence']:g} % interval."
    _head(figure, words + " Grey: one standard deviation of float32.")
    small = math.log2(result["small_loss"])
    _caption(
        figure,
        f"Triangles: beyond the edge. Small loss: times 2^{small:g}, undone in the optimizer. "
        f"{provenance(result)}, {result['backend'].upper()}",
    )
    return figure


def _intervals(axes: Axes, names: list[str], found: dict[str, dict[str, Any]], title: str) -> None:
    margin = next(iter(found.values()))["margin"]
    ends = {name: (*row["interval"], row["difference"]) for name, row in found.items()}
    near = [abs(x) for some in ends.values() for x in some if max(map(abs, some)) <= _MOST_MARGINS * margin]
    limit = 1.15 * max([*near, margin])
    axes.axvspan(-margin, margin, color="#000000", alpha=0.08, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        if name not in found:
            continue
        row = found[name]
        colour, marker = _VERDICTS[row["verdict"]]
        low, high = row["interval"]
        gid = _gid("difference", title, name)
        if max(map(abs, ends[name])) <= limit:
            axes.plot([low, high], [place, place], color=colour, linewidth=1.6, gid=f"{gid}-interval")
            axes.plot(row["difference"], place, color=colour, marker=marker, markersize=5, gid=gid)
            continue
        side = 1 if row["difference"] > 0 else -1
        axes.plot(side * limit * 0.97, place, color=colour, marker=">" if side > 0 else "<", gid=gid)
        axes.annotate(
            _signed(f"{row['difference']:+.2f} [{low:.2f}, {high:.2f}]"), (side * limit * 0.97, place),
            (-7 * side, 0), textcoords="offset points", ha="right" if side > 0 else "left", va="center",
            fontsize=7,
        )  # fmt: skip
    axes.set(xlim=(-limit, limit), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_title(title, fontsize=8.5, loc="right")


def _panels(names: list[str], series: int, count: int) -> tuple[Figure, list[Axes]]:
    """Panels with one row per name."""
    figure, found = _stacked(count, len(names) * (0.16 * series + 0.14))
    for axes in found:
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
    return figure, found


def _stacked(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels one below the other; where they stand does not depend on any text."""
    figure = Figure(figsize=(_WIDTH, _TOP + count * (height + _GAP) - _GAP + _BOTTOM))
    bottoms = (_BOTTOM + (count - 1 - i) * (height + _GAP) for i in range(count))
    return figure, [_axes(figure, _LEFT, bottom, _WIDTH - _LEFT - _RIGHT, height) for bottom in bottoms]


def _bars(
    axes: Axes,
    column: str,
    names: list[str],
    series: dict[str, Values],
    colours: dict[str, str],
    form: str,
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


def _axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def _legend(figure: Figure, axes: Axes, words: str) -> None:
    handles, _ = axes.get_legend_handles_labels()
    _place_legend(figure, handles)
    _head(figure, words)


def _place_legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Puts the legend between the words at the top and the first panel."""
    place = (0.02, 1 - 0.42 / figure.get_figheight())
    figure.legend(handles=handles, loc="upper left", ncols=len(handles), frameon=False, bbox_to_anchor=place)


def _head(figure: Figure, words: str) -> None:
    lines = "\n".join(textwrap.wrap(words, 64))
    figure.text(0.035, 1 - 0.1 / figure.get_figheight(), lines, ha="left", va="top")


def _caption(figure: Figure, words: str) -> None:
    lines = "\n".join(textwrap.wrap(words, 74))
    figure.text(0.035, 0.08 / figure.get_figheight(), lines, fontsize=7, color=_CAPTION, va="bottom")


def _launched(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose kernels are those that a step launches: rows of programs with loops count both."""
    return {**row, "added_kernels": row.get("added_launches", row.get("added_kernels"))}


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
    "accuracy": ("accuracy", differences),
}


def save(name: str, result: dict[str, Any], images: pathlib.Path = IMAGES) -> pathlib.Path:
    """Draws a figure into `images`, without the date of the drawing."""
    path = images / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        FIGURES[name][1](result).savefig(path, metadata={"Date": None})
    return path


def main(results: pathlib.Path = RESULTS, images: pathlib.Path = IMAGES) -> None:
    for name, (source, _) in FIGURES.items():
        save(name, json.loads((results / f"{source}.json").read_text()), images)


if __name__ == "__main__":
    main()
