"""What a gradient spectrum holds: magnitudes of tensors, and what half precision makes of them."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jmp_policy._src.core.report_base import Report, Table, count_text, joined, percent, plotting
from jmp_policy._src.report.spectrum import spectrum_plot
from jmp_policy._src.report.spectrum.histogram import LOWEST, Counts
from jmp_policy._src.report.spectrum.spectrum_plot import KINDS

#: Powers of two whose effect a report shows; 3 and 15 are those of NVIDIA's figure.
_SHIFTS = (3, 7, 11, 15, 20, 24)

#: log2 of the smallest numbers of float16: half the least subnormal (rounded to zero up to here), least
#: normal, and the exponent from which on a number may be infinite.
_FLOAT16 = {"zero": -25, "subnormal": -14, "infinite": 16}

_BARS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass(frozen=True)
class Share:
    """Shares of all values that a half type would not hold as they are, times the loss scale.

    Args:
      zero: become zero without being so.
      subnormal: become subnormal: fewer digits.
      infinite: become infinite, those that are already included.
    """

    zero: float
    subnormal: float
    infinite: float


@dataclasses.dataclass(frozen=True)
class Magnitudes:
    """The magnitudes in one tensor, or in several together.

    Args:
      path: the parameter's or the module's; "" for all together.
      kind: weight gradient, activation gradient or activation.
      size: number of values counted, over all steps, calls and trips of loops.
      zeros, infinite, nan: how many are so.
      exponents: exponent e -> number of values with 2**e <= |x| < 2**(e + 1), loss scale taken off.
      largest: largest finite |x|, loss scale taken off. Of activations and their gradients an upper bound,
        less than twice as large.
      float16, bfloat16: what these types would lose of the values times the loss scale.
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
        """Share that 2**shift saves of the values that float16 makes zero without a scale; nan if none."""
        lost = sum(n for e, n in self.exponents.items() if e < _FLOAT16["zero"])
        still = sum(n for e, n in self.exponents.items() if e + shift < _FLOAT16["zero"])
        return 1 - still / lost if lost else math.nan

    def bars(self, low: int = -40, high: int = 16) -> str:
        """The histogram as text, one sign per two exponents; square roots, so that tails show."""
        counts = [sum(self.exponents.get(e + i, 0) for i in (0, 1)) for e in range(low, high, 2)]
        counts[0] += sum(n for e, n in self.exponents.items() if e < low)
        most = max(counts) or 1
        return "".join(_BARS[math.ceil(8 * math.sqrt(n / most))] for n in counts)


def magnitudes(path: str, kind: str, counts: Counts, largest: float | None) -> Magnitudes:
    """Makes counts readable.

    Args:
      path, kind: of the tensor.
      counts: what was counted.
      largest: largest finite magnitude, if it was measured.
    """
    exponents = {LOWEST + int(i): round(counts.exponents[i]) for i in np.flatnonzero(counts.exponents)}
    if largest is None:
        # An activation is counted as it is.
        largest = 2.0 ** (max(exponents) + 1) if exponents else 0.0
    size = counts.size or 1

    def share(lost: Any) -> Share:
        return Share(lost.zero / size, lost.subnormal / size, (lost.infinite + counts.infinite) / size)

    return Magnitudes(
        path=path,
        kind=kind,
        size=round(counts.size),
        zeros=round(counts.zeros),
        infinite=round(counts.infinite),
        nan=round(counts.nan),
        exponents=exponents,
        largest=float(largest),
        float16=share(counts.float16),
        bfloat16=share(counts.bfloat16),
    )


def together(rows: Sequence[Magnitudes], kind: str) -> Magnitudes:
    """All tensors of a kind as one."""
    rows = [row for row in rows if row.kind == kind]
    size = sum(row.size for row in rows)
    exponents: dict[int, int] = {}
    for row in rows:
        for e, n in row.exponents.items():
            exponents[e] = exponents.get(e, 0) + n

    def share(name: str) -> Share:
        parts = [(row.size, getattr(row, name)) for row in rows]
        return Share(
            *(sum(n * getattr(s, f.name) for n, s in parts) / (size or 1) for f in dataclasses.fields(Share))
        )

    return Magnitudes(
        path="",
        kind=kind,
        size=size,
        zeros=sum(row.zeros for row in rows),
        infinite=sum(row.infinite for row in rows),
        nan=sum(row.nan for row in rows),
        exponents=dict(sorted(exponents.items())),
        largest=max((row.largest for row in rows), default=0.0),
        float16=share("float16"),
        bfloat16=share("bfloat16"),
    )


@dataclasses.dataclass(frozen=True)
class GradientSpectrum(Report):
    """Magnitudes of gradients and activations against the ranges of float16 and bfloat16.

    Args:
      function: the loss function's name.
      loss_scale: what the loss was multiplied by.
      tensors: one row per parameter, and per module's result, forward and backward.
      steps: how many steps were counted.
      margin: exponents below the limit of overflow at which `safe_scale` stays.
    """

    function: str
    loss_scale: float
    tensors: tuple[Magnitudes, ...]
    steps: int = 1
    margin: int = 2

    _rows = "tensors"

    def overall(self, kind: str = "weight gradient") -> Magnitudes:
        """All tensors of a kind together."""
        return together(self.tensors, kind)

    def of(self, path: str, kind: str = "weight gradient") -> Magnitudes:
        """One tensor by its path, or the end of it.

        Raises:
          KeyError: when there is none; the message lists what there is.
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
        """The largest power of two S <= 2**126 with max|g| * S < 65504; nan when all gradients are zero.

        Half of that where an activation gradient is the largest: of those an upper bound is known.
        """
        rows = [row.largest for row in self.tensors if row.kind != "activation"]
        most = max(rows, default=0.0)
        if not most:
            return math.nan
        exponent = math.frexp(65504.0 / most)[1] - 1
        exponent -= most * 2.0**exponent >= 65504
        # Beyond, 1 / S is no normal float32.
        return 2.0 ** min(exponent, 126)

    @property
    def safe_scale(self) -> float:
        """`recommended_scale`, lowered by `margin` exponents: gradients of other batches are larger."""
        return self.recommended_scale / 2.0**self.margin

    @property
    def recovered(self) -> dict[int, float]:
        """By shift k: of the gradients that float16 makes zero, the share that a scale of 2**k saves."""
        rows = [self.overall(kind) for kind in KINDS[:2]]
        every = dataclasses.replace(rows[0], exponents=_added(row.exponents for row in rows))
        return {shift: every.recovered(shift) for shift in _SHIFTS}

    @property
    def verdict(self) -> str:
        """What float16 would lose at this scale, and which constant scale the recipe recommends."""
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

    def _tables(self) -> Sequence[Table]:
        columns = (
            "tensor",
            "values ",
            "zero ",
            "largest ",
            "-> 0 ",
            "subnormal ",
            "inf ",
            "log2|x| -40 to 15",
        )
        tables = []
        for kind in KINDS:
            rows = [row for row in self.tensors if row.kind == kind]
            if rows:
                shown = [*rows, dataclasses.replace(self.overall(kind), path="all")]
                tables.append(Table(columns, [_cells(row) for row in shown], f"{kind}s; as float16"))
        return tables

    def _lines(self) -> Sequence[str]:
        saved = {k: share for k, share in self.recovered.items() if not math.isnan(share)}
        lines = []
        if saved:
            text = ", ".join(f"2^{k} {percent(share)}" for k, share in saved.items())
            lines.append(f"Of the gradients that float16 makes zero, a scale saves: {text}.")
        if unseen := [row.path for row in self.tensors if row.kind == "activation" and not row.size]:
            lines.append(f"Not counted, since no gradient flows through it: {joined(unseen)}.")
        return [*lines, self.verdict]

    def plot(self) -> Any:
        """The histogram of log2|x| with float16's ranges, and the same per tensor; a matplotlib figure."""
        return spectrum_plot.plot(self, plotting("plot"))


def _added(histograms: Iterable[dict[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for histogram in histograms:
        for e, n in histogram.items():
            total[e] = total.get(e, 0) + n
    return total


def _cells(row: Magnitudes) -> tuple[Any, ...]:
    size = row.size or 1
    lost = row.float16
    return (
        *(row.path, count_text(row.size), percent(row.zeros / size), f"{row.largest:.3g}"),
        *(percent(lost.zero), percent(lost.subnormal), percent(lost.infinite), row.bars()),
    )
