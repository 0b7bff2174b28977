"""Plots a gradient spectrum."""

import math
from typing import Any

import numpy as np

#: Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
COLOURS = {"weight gradient": "#0072B2", "activation gradient": "#D55E00", "activation": "#009E73"}
KINDS = tuple(COLOURS)
#: The least share that is drawn, in per cent.
_LEAST = 0.005
_ZERO, _SUBNORMAL, _NORMAL, _INFINITE = "#999999", "#F0E442", "#56B4E9", "#CC79A7"


def plot(spectrum: Any, pyplot: Any) -> Any:
    """Draws histograms of log2|x| over float16's ranges at the loss scale, and one line per tensor below."""
    rows = [row for row in spectrum.tensors if row.kind != "activation" and row.exponents]
    shift = math.log2(spectrum.loss_scale)
    # The loss scale does not move activations.
    kinds = [kind for kind in (KINDS[:2] if shift else KINDS) if spectrum.overall(kind).size]
    low, high = _limits(spectrum, shift)
    height = 3.6 + 0.22 * max(len(rows), 2)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(9, height), height_ratios=[3.2, 0.22 * max(len(rows), 2) + 0.6], layout="constrained"
    )
    _shade(top, low, high, shift)
    for kind in kinds:
        _histogram(top, spectrum.overall(kind), low, high)
    scale = f", times 2^{shift:g}" if shift else ""
    top.set_title(f"{spectrum.function}: magnitudes, zeros apart, and float16's ranges{scale}", fontsize=10)
    top.set_xlabel("log2 |x|, divided by the loss scale")
    top.set_ylabel("share of values (%)")
    # Logarithmic: beside the zeros, which may be most values, nothing else would have a height.
    top.set(yscale="log", ylim=(_LEAST, 130))
    top.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    top.set_xlim(low - 3.5, high)
    ticks = [tick for tick in range(-80, 140, 10) if low <= tick < high]
    top.set_xticks([low - 2.2, *ticks], ["zero", *map(str, ticks)])
    figure.legend(*top.get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4)
    _tensors(figure, bottom, rows, low, high, shift)
    return figure


def _limits(spectrum: Any, shift: float) -> tuple[int, int]:
    found = [e for row in spectrum.tensors for e in row.exponents] or [0]
    return max(min(*found, -28 - round(shift)), -70), max(*found, 17) + 1


def _shade(axes: Any, low: int, high: int, shift: float) -> None:
    edges = [low, -25 - shift, -14 - shift, 16 - shift, high]
    names = ("becomes zero", "subnormal", "normal", "infinite")
    colours = (_ZERO, _SUBNORMAL, _NORMAL, _INFINITE)
    for name, colour, start, end in zip(names, colours, edges, edges[1:], strict=False):
        start, end = max(start, low), min(end, high)
        if start < end:
            axes.axvspan(start, end, color=colour, alpha=0.18, label=f"float16: {name}", linewidth=0)


def _histogram(axes: Any, row: Any, low: int, high: int) -> None:
    exponents = np.arange(low, high)
    shares = np.array([100 * row.exponents.get(int(e), 0) / row.size for e in exponents])
    shares[0] += sum(100 * n / row.size for e, n in row.exponents.items() if e < low)
    colour = COLOURS[row.kind]
    zeros = 100 * row.zeros / row.size
    # A logarithmic axis needs something positive, also where every share is 0.
    axes.stairs(
        np.maximum(shares, _LEAST), [*exponents, high], baseline=_LEAST, color=colour, linewidth=1.6,
        label=f"{row.kind}s ({zeros:.3g} % are 0)",
    )  # fmt: skip
    offset = list(COLOURS).index(row.kind)
    axes.bar(low - 3 + 0.8 * offset, zeros, width=0.7, color=colour)


def _tensors(figure: Any, axes: Any, rows: list[Any], low: int, high: int, shift: float) -> None:
    exponents = range(low, high)
    picture = np.array([[row.exponents.get(e, 0) / row.size for e in exponents] for row in rows] or [[0.0]])
    most = picture.max(axis=1, keepdims=True)
    shown = np.ma.masked_equal(picture / np.where(most == 0, 1, most), 0)
    extent = (low, high, len(rows) or 1, 0)
    image = axes.imshow(shown, aspect="auto", cmap="cividis", extent=extent, vmin=0, vmax=1)
    for edge in (-25 - shift, -14 - shift, 16 - shift):
        if low < edge < high:
            axes.axvline(edge, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks([i + 0.5 for i in range(len(rows))])
    names = [f"{row.path}{' (activation)' if row.kind == 'activation gradient' else ''}" for row in rows]
    axes.set_yticklabels(names, fontsize=7)
    axes.set_xlim(low - 3.5, high)
    axes.set_xlabel("log2 |gradient| per tensor; dashed: limits of float16")
    figure.colorbar(image, ax=axes, label="share of the fullest bin", pad=0.01)
