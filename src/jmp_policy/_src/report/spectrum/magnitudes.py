"""Defines a gradient spectrum: the magnitudes of tensors, and what half precision would lose of them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.report_base import Report, Sum, Table, count_text, joined, percent, plotting
from jmp_policy._src.report.spectrum.histogram import LOWEST, take_apart

#: Powers of two whose effect a report shows; 3 and 15 are those of NVIDIA's figure.
_SHIFTS = (3, 7, 11, 15, 20, 24)

#: log2 of the smallest numbers of float16: half the least subnormal (rounded to zero up to here), least
#: normal, and the exponent from which on a number may be infinite.
_FLOAT16 = {"zero": -25, "subnormal": -14, "infinite": 16}

#: The float8 dtypes of operands of products under a recipe.
_FLOAT8 = {"activation": "float8_e4m3fn", "activation gradient": "float8_e5m2"}

#: Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
_COLOURS = {"weight gradient": "#0072B2", "activation gradient": "#D55E00", "activation": "#009E73"}
KINDS = tuple(_COLOURS)

_BARS = " ▁▂▃▄▅▆▇█"

_COLUMNS = (
    "tensor", "values ", "zero ", "largest ", "-> 0 ", "subnormal ", "inf ", "8 bits -> 0 ",
    "log2|x| -40 to 15",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Share:
    """Shares of all values, times the loss scale, that a half dtype cannot represent.

    Args:
      zero: share that becomes zero, without those that are zero.
      subnormal: share that becomes subnormal, with fewer digits.
      infinite: share that becomes infinite, with those that are infinite already.
    """

    zero: float
    subnormal: float
    infinite: float


@dataclasses.dataclass(frozen=True)
class Magnitudes:
    """Magnitudes in one tensor, or in several together.

    Args:
      path: path of the parameter or module; "" for all together.
      kind: weight gradient, activation gradient or activation.
      size: number of values counted, over all steps, calls and trips of loops.
      zeros, infinite, nan: number of values that are zero, infinite, NaN.
      exponents: exponent e -> number of values with 2**e <= |x| < 2**(e + 1), without the loss scale.
      largest: largest finite |x|, without the loss scale. For activations and their gradients an upper bound,
        less than twice as large.
      float16, bfloat16: shares of the values, times the loss scale, that these dtypes would lose.
    """

    path: str
    kind: str
    size: int
    zeros: int
    infinite: int
    nan: int
    exponents: dict[int, int]
    largest: float
    float16: Share
    bfloat16: Share

    def recovered(self, shift: int) -> float:
        """The share that 2**shift saves of the values that are zero in float16; nan if none."""
        lost = sum(n for e, n in self.exponents.items() if e < _FLOAT16["zero"])
        still = sum(n for e, n in self.exponents.items() if e + shift < _FLOAT16["zero"])
        return 1 - still / lost if lost else math.nan

    def in_float8(self, dtype: str, scale: float | None = None) -> Share:
        """The shares of the values that a float8 dtype cannot represent, divided by a scale.

        Args:
          dtype: "float8_e4m3fn", in which recipes have values, or "float8_e5m2", theirs for gradients.
          scale: what all are divided by. None for the power of two that the recipe `fp8_current` takes: the
            least with which the largest value fits.

        Returns:
          Shares that become zero and subnormal, and in `infinite` those that are beyond the largest number,
          up to a factor of 2, as exponents are what is counted.
        """
        info = jnp.finfo(dtype)
        if scale is None:
            mantissa, shift = math.frexp(self.largest / float(info.max))
            shift -= mantissa == 0.5
        else:
            shift = math.frexp(scale)[1] - 1
        # Up to half of the smallest number becomes zero.
        zero = shift + math.frexp(float(info.smallest_subnormal))[1] - 2
        normal = shift + math.frexp(float(info.smallest_normal))[1] - 1
        beyond = shift + math.frexp(float(info.max))[1]
        size = self.size or 1
        small = sum(n for e, n in self.exponents.items() if e < zero)
        subnormal = sum(n for e, n in self.exponents.items() if zero <= e < normal)
        large = sum(n for e, n in self.exponents.items() if e >= beyond)
        return Share(small / size, subnormal / size, (large + self.infinite) / size)

    def bars(self, low: int = -40, high: int = 16) -> str:
        """Draws the histogram as text: one character per two exponents, square roots, so that tails show."""
        counts = [sum(self.exponents.get(e + i, 0) for i in (0, 1)) for e in range(low, high, 2)]
        counts[0] += sum(n for e, n in self.exponents.items() if e < low)
        most = max(counts) or 1
        return "".join(_BARS[math.ceil(8 * math.sqrt(n / most))] for n in counts)


def magnitudes(path: str, kind: str, vector: np.ndarray, largest: float | None) -> Magnitudes:
    """Makes the row of a tensor from its counts.

    Args:
      path, kind: path and kind of the tensor.
      vector: its counts, as `histogram.count` makes them.
      largest: largest finite magnitude, if it was measured.
    """
    zeros, by_exponent, infinite, nan, float16, bfloat16 = take_apart(vector)
    exponents = {LOWEST + int(i): round(by_exponent[i]) for i in np.flatnonzero(by_exponent)}
    if largest is None:
        # Activations have no loss scale: the upper end of their largest exponent is a bound.
        largest = 2.0 ** (max(exponents) + 1) if exponents else 0.0
    size = zeros + float(by_exponent.sum()) + infinite + nan

    def share(lost: np.ndarray) -> Share:
        return Share(*((lost + np.array([0.0, 0.0, infinite])) / (size or 1)).tolist())

    counts = round(size), round(zeros), round(infinite), round(nan)
    return Magnitudes(path, kind, *counts, exponents, float(largest), share(float16), share(bfloat16))


def add_up(rows: Sequence[Magnitudes], kind: str = "") -> Magnitudes:
    """Adds up the counts of tensors of a kind."""
    sizes = np.array([row.size for row in rows])
    largest = max((row.largest for row in rows), default=0.0)

    def total(name: str) -> int:
        return sum(getattr(row, name) for row in rows)

    def share(name: str) -> Share:
        shares = np.reshape([dataclasses.astuple(getattr(row, name)) for row in rows], (-1, 3))
        return Share(*(sizes @ shares / (total("size") or 1)).tolist())

    counts = total("size"), total("zeros"), total("infinite"), total("nan")
    return Magnitudes("", kind, *counts, _added(rows), largest, share("float16"), share("bfloat16"))


@dataclasses.dataclass(frozen=True)
class GradientSpectrum(Report):
    """Magnitudes of gradients and activations against the ranges of float16 and bfloat16.

    Args:
      function: name of the loss function.
      loss_scale: factor on the loss.
      tensors: one row per parameter, and per output of a module, forward and backward.
      steps: number of steps counted.
      margin: exponents by which `safe_scale` stays below overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import gradient_spectrum
      >>> spectrum = gradient_spectrum(lambda w: (w * 2.0**-30).sum(), jnp.ones(4), scale=2.0**15)
      >>> spectrum.overall().float16.zero
      0.0
    """

    function: str
    loss_scale: float
    tensors: tuple[Magnitudes, ...]
    steps: int = 1
    margin: int = 2

    _rows = "tensors"

    def overall(self, kind: str = "weight gradient") -> Magnitudes:
        """The magnitudes of all tensors of a kind together."""
        return add_up([row for row in self.tensors if row.kind == kind], kind)

    def of(self, path: str, kind: str = "weight gradient") -> Magnitudes:
        """The row of one tensor by its path, or the end of it.

        Raises:
          KeyError: when there is none; the message lists the paths that there are.
        """
        known = [row for row in self.tensors if row.kind == kind]
        for row in known:
            if row.path == path or row.path.endswith("/" + path):
                return row
        raise KeyError(f"There is no {kind} {path!r}; there are {joined([row.path for row in known], 20)}.")

    @property
    def largest(self) -> Magnitudes:
        """The gradient that overflows first: the tensor with the largest magnitude.

        Raises:
          ValueError: when no gradient was counted.
        """
        return max((row for row in self.tensors if row.kind != "activation"), key=lambda row: row.largest)

    @property
    def recommended_scale(self) -> float:
        """The largest power of two S <= 2**126 with max|g| * S < 65504; nan if all are zero.

        It may be half of that where an activation gradient is the largest: only a bound of it is known.
        """
        rows = [row.largest for row in self.tensors if row.kind != "activation"]
        most = max(rows, default=0.0)
        if not most:
            return math.nan
        exponent = math.frexp(65504.0 / most)[1] - 1
        exponent -= most * 2.0**exponent >= 65504
        # Beyond 2**126, 1 / S is not a normal float32 number.
        return 2.0 ** min(exponent, 126)

    @property
    def safe_scale(self) -> float:
        """Returns `recommended_scale` lowered by `margin` exponents, for batches with larger gradients."""
        return self.recommended_scale / 2.0**self.margin

    @property
    def recovered(self) -> dict[int, float]:
        """Returns, by k, the share that a scale of 2**k saves of the gradients that are zero in float16."""
        rows = [self.overall(kind) for kind in KINDS[:2]]
        every = dataclasses.replace(rows[0], exponents=_added(rows))
        return {shift: every.recovered(shift) for shift in _SHIFTS}

    @property
    def verdict(self) -> str:
        """What float16 would lose at this scale, and the constant scale by NVIDIA's guide."""
        rows = [self.overall(kind) for kind in KINDS[:2]]
        parts = [
            f"{percent(row.float16.zero)} of {row.kind}s become zero in float16, "
            f"{percent(row.float16.infinite)} infinite"
            for row in rows
            if row.size
        ]
        if not parts:
            return "No gradient was counted."
        text = f"At a loss scale of {self.loss_scale:g}: " + "; ".join(parts) + "."
        if bad := [row.path for row in self.tensors if row.infinite or row.nan]:
            text += f" Not finite already: {joined(bad)}."
        if not math.isnan(self.recommended_scale):
            text += (
                f" Constant scale: {self.recommended_scale:g} at most, {self.safe_scale:g} with a margin of "
                f"{self.margin} exponents ({self.largest.path} is the largest, {self.largest.largest:.3g})."
            )
        return text

    def _short_tables(self) -> Sequence[Table]:
        if len(self.tensors) <= _SHORT * len(KINDS):
            return self._tables()
        worst = sorted(self.tensors, key=lambda row: -(row.float16.zero + row.float16.infinite))
        tables = dataclasses.replace(self, tensors=tuple(worst))._tables()
        return [dataclasses.replace(table, most=_SHORT - 1) for table in tables]

    def _tables(self) -> Sequence[Table]:
        tables = []
        for kind in KINDS:
            rows = [row for row in self.tensors if row.kind == kind]
            if not rows:
                continue
            dtype = _FLOAT8.get(kind)
            # All together have no scale.
            cells = [_cells(dataclasses.replace(self.overall(kind), path="all"))]
            cells += [_cells(row, dtype) for row in rows]
            title = f"{kind}s; as float16" + (f", and {dtype} with a scale for each" if dtype else "")
            tables.append(Table(_COLUMNS, cells, title))
        return tables

    def _lines(self) -> Sequence[str]:
        saved = [f"2^{k} {percent(share)}" for k, share in self.recovered.items() if share >= 0]
        lines = []
        if saved:
            # Larger scales save all, too.
            last = next((i for i, text in enumerate(saved) if text.endswith(" 100 %")), len(saved))
            shares = ", ".join(saved[: last + 1])
            lines.append(f"Of gradients that become zero, a scale saves: {shares}.")
        if unseen := [row.path for row in self.tensors if row.kind == "activation" and not row.size]:
            lines.append(f"Not counted, since no gradient flows through it: {joined(unseen)}.")
        return [*lines, self.verdict]

    def plot(self) -> Any:
        """Plots the histogram of log2|x| with float16's ranges, and per tensor; a matplotlib figure."""
        pyplot = plotting("plot")
        rows = [row for row in self.tensors if row.kind != "activation" and row.exponents]
        shift = math.log2(self.loss_scale)
        found = [e for row in self.tensors for e in row.exponents] or [0]
        low, high = max(min(*found, -28 - round(shift)), -70), max(*found, 17) + 1
        limits = [exponent - shift for exponent in _FLOAT16.values()]
        below = 0.22 * max(len(rows), 2)
        figure, (top, bottom) = pyplot.subplots(
            2, 1, figsize=(9, 3.6 + below), height_ratios=[3.2, below + 0.6], layout="constrained"
        )
        edges = np.clip([low, *limits, high], low, high)
        for (name, colour), start, end in zip(_RANGES.items(), edges, edges[1:], strict=False):
            if start < end:
                top.axvspan(start, end, color=colour, alpha=0.18, label=f"float16: {name}", linewidth=0)
        # The loss scale does not move activations.
        for offset, kind in enumerate(KINDS[:2] if shift else KINDS):
            if (row := self.overall(kind)).size:
                _histogram(top, row, low, high, offset)
        scale = f", times 2^{shift:g}" if shift else ""
        top.set_title(f"{self.function}: magnitudes, zeros apart, and float16's ranges{scale}", fontsize=10)
        top.set_xlabel("log2 |x|, divided by the loss scale")
        top.set_ylabel("share of values (%)")
        # Logarithmic: beside the zeros, which may be most values, nothing else would have a height.
        top.set(yscale="log", ylim=(_LEAST, 130), xlim=(low - 3.5, high))
        top.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
        ticks = [tick for tick in range(-80, 140, 10) if low <= tick < high]
        top.set_xticks([low - 2.2, *ticks], ["zero", *map(str, ticks)])
        figure.legend(*top.get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4)
        image = _tensors(bottom, rows, low, high)
        for edge in limits:
            if low < edge < high:
                bottom.axvline(edge, color="black", linewidth=0.8, linestyle="--")
        figure.colorbar(image, ax=bottom, label="share of the fullest bin", pad=0.01)
        return figure


#: Of more tensors than these of each kind, those are shown that lose most, in one line less.
_SHORT = 5


def _added(rows: Sequence[Magnitudes]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for row in rows:
        total.update(row.exponents)
    return dict(sorted(total.items()))


def _cells(row: Magnitudes, float8: str | None = None) -> list[Any]:
    return [
        row.path,
        *(Sum(row, show, add_up, _weight) for show in _SHOWN),
        "" if float8 is None else percent(row.in_float8(float8).zero),
        Sum(row, lambda row: row.bars().rstrip().replace(" ", "\N{NO-BREAK SPACE}"), add_up, _weight),
    ]


def _weight(row: Magnitudes) -> float:
    """The number of values that are lost; 0 for a few."""
    lost = row.float16.zero + row.float16.infinite
    return lost * row.size if lost > 0.01 else 0.0


#: What is shown of a tensor, or of those of equal layers together.
_SHOWN: tuple[Callable[[Magnitudes], str], ...] = (
    lambda row: count_text(row.size),
    lambda row: percent(row.zeros / (row.size or 1)),
    lambda row: f"{row.largest:.3g}",
    lambda row: percent(row.float16.zero),
    lambda row: percent(row.float16.subnormal),
    lambda row: percent(row.float16.infinite) if row.float16.infinite else "",
)


#: The least share that is drawn, in per cent.
_LEAST = 0.005

#: The ranges of float16, and their colours.
_RANGES = {"becomes zero": "#999999", "subnormal": "#F0E442", "normal": "#56B4E9", "infinite": "#CC79A7"}


def _histogram(axes: Any, row: Magnitudes, low: int, high: int, offset: int) -> None:
    shares = np.array([row.exponents.get(e, 0) for e in range(low, high)]) * 100 / row.size
    shares[0] += sum(100 * n / row.size for e, n in row.exponents.items() if e < low)
    zeros = 100 * row.zeros / row.size
    label = f"{row.kind}s ({zeros:.3g} % are 0)"
    # A logarithmic axis needs something positive, also where every share is 0.
    shown, edges = np.maximum(shares, _LEAST), range(low, high + 1)
    axes.stairs(shown, edges, baseline=_LEAST, color=_COLOURS[row.kind], linewidth=1.6, label=label)
    axes.bar(low - 3 + 0.8 * offset, zeros, width=0.7, color=_COLOURS[row.kind])


def _tensors(axes: Any, rows: Sequence[Magnitudes], low: int, high: int) -> Any:
    """Draws a line per tensor; returns the image."""
    counts = np.array([[row.exponents.get(e, 0) for e in range(low, high)] for row in rows] or [[0.0]])
    shown = np.ma.masked_equal(counts / np.maximum(counts.max(axis=1, keepdims=True), 1), 0)
    extent = (low, high, len(rows) or 1, 0)
    image = axes.imshow(shown, aspect="auto", cmap="cividis", extent=extent, vmin=0, vmax=1)
    names = [f"{row.path}{' (activation)' if row.kind == 'activation gradient' else ''}" for row in rows]
    axes.set_yticks([i + 0.5 for i in range(len(rows))], names, fontsize=7)
    axes.set(xlim=(low - 3.5, high), xlabel="log2 |gradient| per tensor; dashed: limits of float16")
    return image
