"""Plots the error of a program along its depth."""

from typing import Any

import numpy as np

#: Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
_TOTAL, _INTRODUCED, _SHARE = "#0072B2", "#D55E00", "#999999"
#: Errors below this are drawn here: a logarithmic axis has no zero.
_LEAST = 1e-9


def plot(found: Any, pyplot: Any) -> Any:
    """Draws one panel per direction: total and introduced error per row, and its share of the final error."""
    directions = list(dict.fromkeys(row.direction for row in found.rows))
    if not directions:
        figure, axes = pyplot.subplots(figsize=(8, 2), layout="constrained")
        axes.set_title(found.verdict, fontsize=9)
        axes.set_axis_off()
        return figure
    most = max(sum(row.direction == d for row in found.rows) for d in directions)
    size = (max(8.0, 0.24 * most), 2.6 * len(directions) + 1.6)
    figure, panels = pyplot.subplots(len(directions), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, direction in zip(panels[:, 0], directions, strict=True):
        _panel(axes, direction, [row for row in found.rows if row.direction == direction])
    panels[-1, 0].set_xlabel("place in the program")
    figure.suptitle(f"{found.function}: error against float32, in order of the program", fontsize=10)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=3)
    return figure


def _panel(axes: Any, direction: str, rows: list[Any]) -> None:
    places = np.arange(len(rows))
    total, introduced = (
        np.clip([getattr(row, field) for row in rows], _LEAST, 1e9) for field in ("total", "introduced")
    )
    share = axes.twinx()
    bars = share.bar(places, [100 * row.share for row in rows], color=_SHARE, alpha=0.35, width=0.8)
    share.set(ylim=(0, 100), ylabel="share of the error (%)")
    bars.set_label("")
    # Markers differ too, for print without colours.
    axes.plot(places, total, "o-", color=_TOTAL, markersize=4, label="total error")
    axes.plot(places, introduced, "^--", color=_INTRODUCED, markersize=4, label="introduced here")
    axes.bar(0, 0, color=_SHARE, alpha=0.35, label="share of the final error")
    axes.set(yscale="log", ylabel="relative L2 error")
    axes.set_title(direction, fontsize=9)
    axes.set_xticks(places, [row.module or row.place for row in rows], rotation=60, ha="right", fontsize=6)
    axes.set_zorder(share.get_zorder() + 1)
    axes.patch.set_visible(False)
