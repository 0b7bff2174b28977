"""What a drift report says: how far half precision is from float32, and where that comes from."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jmp_policy._src.core.report_base import Report, Sum, Table, joined, percent, plotting
from jmp_policy._src.jaxpr.op_table import DESCRIPTIONS, HAVING, Trait
from jmp_policy._src.jaxpr.walk import Placed
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report import lost_constants, trials

#: Parts of a program that a row is about.
DIRECTIONS = ("outputs", "activation gradients", "parameter gradients")
OUTPUTS, ACTIVATION_GRADIENTS, PARAMETER_GRADIENTS = DIRECTIONS

#: The same in tables of all.
_SHORT_NAMES = {OUTPUTS: "outputs", ACTIVATION_GRADIENTS: "cotangents", PARAMETER_GRADIENTS: "gradients"}

#: Random errors of one rounding each are normal up to so many standard deviations.
NORMAL = 2.0

#: From this error on a verdict says that it is large, also where it is normal.
_LARGE = 0.1

#: Said of a value that is not finite: a compiler may keep float32 between operations that it joins.
_ROUNDED = " with each operation rounded (`diagnose` looks at the compiled program)"

#: From this share of the error on a verdict tells of decisions.
_DECIDING = 0.3

#: From this error on it is worth a rule where one line has most of it, also where it is normal.
WORTH_A_RULE = 0.02

#: Up to so many rows are shown in the order of the program; of more the largest, in so many lines.
_SHORT, _LINES = 10, 13

#: Shares below this are not named in a verdict.
NAMED = 0.05


#: The note of a row with numbers that are finite in float32, and infinite here.
OVERFLOWS = "which overflows"


@dataclasses.dataclass(frozen=True)
class DriftRow(Placed):
    """Error of what a module, or one operation, computes.

    Errors are relative: the root of the sum of the squared errors, divided by that of the squared float32
    values. `introduced` and `inherited` are parts of the same sum.

    Args:
      module: names of the scopes around it, joined by slashes.
      operation: name of the primitive; of a module, of the one that introduces most, of gradient and loss.
      line: where the user wrote that.
      direction: "outputs", "activation gradients" or "parameter gradients".
      introduced: what half precision here adds, for the values that arrive here.
      inherited: what came with those, passed on in float32.
      total: error of the values themselves.
      largest: largest absolute error of one element.
      share: part of the error of the gradient, or of all results, that is introduced here.
      loss_share: part of the error of the loss that is introduced here.
      dtype: half dtype of the operation.
      terms: how many terms a sum in half has; 1 for other operations.
      others: whether other operations of the row have most of its share.
      trips: of a row inside `lax.scan`, `total` in each trip.
      note: what else there is to know: that values become infinite here, that the two runs take different
        branches, or that a loop has more trips in one of them.
      argument: path of the argument that a cast rounds; "" for casts of other values.
      flushed: of float8 products, which share of the elements of the left and of the right operand becomes
        zero in 8 bits; in the backward pass the left one is the cotangent.
      saturated: the same of elements beyond the range that their scale gives, as a sudden increase makes them
        under `fp8_delayed`.
    """

    module: str
    operation: str
    line: str
    direction: str
    introduced: float
    inherited: float
    total: float
    largest: float
    share: float
    loss_share: float
    dtype: str
    terms: int = 1
    others: bool = False
    trips: tuple[float, ...] = ()
    note: str = ""
    argument: str = ""
    flushed: tuple[float, float] = (0.0, 0.0)
    saturated: tuple[float, float] = (0.0, 0.0)

    @property
    def path(self) -> str:  # type: ignore[override]
        """The module, by the name that other reports have for it."""
        return self.module

    @property
    def description(self) -> str:
        """Describes the operation: "a sum of 50,257 float16 terms"."""
        more = f", {OVERFLOWS}" * (self.note == OVERFLOWS)
        return f"{self._operation(more)}{', and others' * self.others}"

    def _operation(self, more: str) -> str:
        if self.terms > 1:
            return f"a sum of {self.terms:,} {self.dtype} terms{more}"
        if self.argument:
            return f"a cast of the argument {self.argument!r} to {self.dtype}"
        if self.operation in ("cond", "while") and self.note and not more:
            return f"a {self.operation}: {self.note}"
        return f"{DESCRIPTIONS.get(self.operation, f'{self.operation} in')} {self.dtype}{self._lost()}{more}"

    def _lost(self) -> str:
        """Describes what 8 bits lose of an operand, if that is much."""
        found = [
            f"{percent(share)} of the elements of its {operand} operand {what} in 8 bits"
            for shares, what in ((self.flushed, "become zero"), (self.saturated, "are beyond the range"))
            for share, operand in zip(shares, ("left", "right"), strict=True)
            if share >= NAMED
        ]
        return f" ({joined(found)})" if found else ""


#: The smallest number of float16 with all its digits.
_NORMAL_IN_FLOAT16 = 2.0**-14

#: A gradient of a smaller share of the whole one's norm is what rounding in float32 leaves of zero; another
#: result is if it is so far off besides. What is zero in float32 may be as large as the last number in half.
_ROUNDING, _FAR_OFF, _ROUNDING_OF_HALF = 2.0**-20, 100.0, 2.0**-10


@dataclasses.dataclass(frozen=True)
class ResultDrift:
    """Error of one result: the loss, the gradient of one parameter, or part of a new state.

    Args:
      name: "the loss", the path of a parameter, or that of a result.
      error: relative L2 error; 1 for what is zero in float32 alone.
      largest: largest absolute error of one element.
      norm: L2 norm in float32.
      cosine: of the angle between both runs; nan for zeros, and for errors that are not finite.
      change_error: of an argument that is returned with something added to it in half precision, such as new
        parameters, the error relative to what was added; nan for other results.
    """

    name: str
    error: float
    largest: float
    norm: float
    cosine: float
    change_error: float = math.nan


@dataclasses.dataclass(frozen=True)
class Drift(Report):
    """Error of a half-precision program against its float32 replay; `str` shows where it is introduced.

    Args:
      function: name of the function.
      rows: one per module (outside of modules: line) and direction, or per operation, in order of the
        program.
      results: of each result: the loss, the gradients; or the parts of what a function returns.
      loss: the loss in float32; nan for a function that is no loss.
      loss_error: its relative error.
      gradient_error: relative L2 error of the whole gradient.
      cosine: of the angle between both gradients.
      gradient_norm: norm of the float32 gradient, scale taken off.
      error: what `share` in rows refers to: `gradient_error`; of a function that is no loss the root of the
        mean of the squared relative errors of its results.
      expected: what `error` would be if every operation in half precision rounded once, at random, and the
        result of a while loop were off by up to 1 %.
      turned: the part of `error`'s square that comes through decisions that rounding turns, as of a relu.
      loss_scale: what the loss was multiplied by.
      constants: constants that half precision makes infinite, zero or one; float32 computes with those whose
        number is known.
      rule: overrides for the `PolicyMap` of the model that were tried and at least halve the error, or keep
        all constants; empty without such, and where another policy as a whole mends.
      policy: the whole policy with that rule, or in place of the model's own; None without one.
      advice: the rule, policy or loss scale to write, in words; "" if none was found.
      tried: every change of the policy that was tried, with the error of the gradient under it.
      error_after: that error under what is advised; nan without, and for a rule that keeps constants.
      cause: of a gradient that is not finite, what `diagnose` says of the first such value, and of what to do
        where no other line says that.
    """

    function: str
    rows: tuple[DriftRow, ...]
    results: tuple[ResultDrift, ...]
    loss: float
    loss_error: float
    gradient_error: float
    cosine: float
    gradient_norm: float
    error: float
    expected: float
    turned: float = 0.0
    loss_scale: float = 1.0
    constants: tuple[lost_constants.LostConstant, ...] = ()
    rule: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    policy: PolicyMap | None = None
    advice: str = ""
    tried: tuple[trials.Tried, ...] = ()
    error_after: float = math.nan
    cause: str = ""

    _rows = "rows"
    _computed = ("verdict", "is_normal")

    @property
    def is_loss(self) -> bool:
        """Whether the function is a loss, whose gradient was looked at."""
        return not math.isnan(self.gradient_error)

    @property
    def is_normal(self) -> bool:
        """Whether the error is what one random rounding per operation explains, and the loss finite.

        An error as large as what it is an error of is not, however ill-conditioned the program may be.
        """
        is_finite = not math.isinf(self.loss_error) and not self._not_finite
        return self._is_rounding and self.error < 1 and is_finite and not self._vanished

    @property
    def _not_finite(self) -> str:
        """Says that the loss is not finite in float32 either; "" if it is finite."""
        if not self.is_loss or math.isfinite(self.loss):
            return ""
        return f"the loss is {self.loss} in both: `diagnose` finds the first such value"

    @property
    def _is_rounding(self) -> bool:
        overflows = any(row.note == OVERFLOWS and row.share >= NAMED for row in self.rows)
        return self.error <= NORMAL * self.expected and not overflows

    @property
    def is_worth_a_rule(self) -> bool:
        """Whether a gradient is so far off that rules are tried: not normally, or much, or by one line."""
        if not self.is_loss or not self.error:
            return False
        most = max((row.share for row in self.rows), default=0)
        # Shares are rough where rounding turns decisions: then no line is known to be the one.
        by_one_line = self.error >= WORTH_A_RULE and most > 0.5 and self.turned < _DECIDING
        return not self._is_rounding or self.error >= _LARGE or by_one_line

    @property
    def is_of_sums(self) -> bool:
        """Whether most of the error is from sums in half precision of the backward pass."""
        sums = (row for row in self.rows if row.terms > 1 or row.operation in HAVING[Trait.SCATTER_SUM])
        return sum(row.share for row in sums if row.direction != OUTPUTS) > 0.5

    @property
    def contributions(self) -> tuple[DriftRow, ...]:
        """The rows that introduce an error, largest share first."""
        return tuple(sorted((row for row in self.rows if row.share > 0), key=lambda row: -row.share))

    @property
    def verdict(self) -> str:
        """How large the error is, whether that is normal, and where it is introduced."""
        if not any(result.error for result in self.results):
            text = f"{self.function}: no difference from float32"
            if self._not_finite:
                text += f", but {self._not_finite}"
            return ". ".join([text, *self._losses()]) + "."
        what = "the gradient is" if self.is_loss else "the results are"
        more = f" (cosine {self.cosine:.6g})" if math.isfinite(self.cosine) else self._most_off()
        off = f"off by {trials.error_text(self.error)}" if math.isfinite(self.error) else "not finite"
        parts = [f"{self.function}: {what} {off}{more}{self._compared()}"]
        if self.cause:
            loss = "the loss is not finite, " * (math.isfinite(self.error) and math.isinf(self.loss_error))
            parts = [f"{self.function}: {loss}{what} {off}", self.cause.removesuffix("."), *self._losses()]
            return ". ".join([*parts, *filter(None, [self._mended()])]) + "."
        named = [row for row in self.contributions if row.share >= NAMED][:3]
        if named:
            first, *rest = named
            text = f"{percent(first.share)} of that error is introduced in {first.place}, {first.description}"
            parts.append(text + "".join(f"; {percent(r.share)} in {r.place}, {r.description}" for r in rest))
        if self.turned >= _DECIDING:
            turns = "comes through decisions that rounding turns (relu, max): there shares are rough"
            parts.append(f"{percent(self.turned)} of it {turns}")
        if self.is_loss:
            parts.append(self._of_loss())
        return ". ".join([*parts, *self._losses(), *filter(None, [self._mended()])]) + "."

    @property
    def _errors(self) -> dict[str, float]:
        of_zero = zero_but_for_rounding(self.results)
        return {r.name: r.error for r in self.results if r not in of_zero}

    def _most_off(self) -> str:
        """Names the result of several that has most of the error, or those not finite; "" without one."""
        errors = self._errors
        if self.is_loss or len(errors) < 2:
            return ""
        if infinite := [name for name, error in errors.items() if not math.isfinite(error)]:
            return f" ({joined(infinite, 2)})"
        worst = max(errors, key=errors.__getitem__)
        if 2 * errors[worst] ** 2 < math.hypot(*errors.values()) ** 2:
            return ""
        return f" on average ({worst} by {trials.error_text(errors[worst])})"

    def _mended(self) -> str:
        """Describes what the advised rule was seen to do."""
        if not self.advice:
            return ""
        whole = self.advice[0].upper() + self.advice[1:]
        if math.isnan(self.error_after):
            return f"{whole} keeps these constants as they are written"
        before, after = trials.error_text(self.error), trials.error_text(self.error_after)
        price = next((tried.price for tried in self.tried if tried.policy is self.policy), "")
        if math.isinf(self.loss_error):
            return f"{whole} mends it: the loss is finite, and the gradient off by {after}{price}"
        return f"{whole} mends it: the gradient is off by {after} instead of {before}{price}"

    def _losses(self) -> list[str]:
        """Describes lost constants, and updates that half precision does not hold."""
        constants = [constant for constant in self.constants if constant.text not in self.cause]
        found = [self._vanished, lost_constants.text(constants), _updates_text(self.results)]
        return list(filter(None, found))

    @property
    def _vanished(self) -> str:
        """Says which gradients are zero in half alone; "" if none is."""
        of_zero = zero_but_for_rounding(self.results)
        small = (r for r in self.results if r.norm and r.largest * self.loss_scale < _NORMAL_IN_FLOAT16)
        gone = [r.name for r in small if r.error == 1 and r.name != "the loss" and r not in of_zero]
        is_float16 = any(row.dtype == "float16" for row in self.rows)
        if not gone or not self.is_loss or not is_float16 or not self._is_rounding:
            return ""  # What is wrong may have made them so.
        at = f"at a loss scale of {self.loss_scale:g}"
        return f"The gradient of {joined(gone, 2)} is all zero {at}: give that of training (scale=)"

    def _compared(self) -> str:
        if not math.isfinite(self.error):
            return _ROUNDED
        # The parts of a state have units of their own: a moment of zero gradients is noise in any dtype.
        errors = [error for error in self._errors.values() if error]
        most = self.error if self.is_loss or not errors else statistics.median(errors)
        if self._is_rounding and most < _LARGE:
            return ", which is normal rounding error"
        if self._is_rounding:
            how = "rounding alone explains" if most >= 1 else "is normal rounding error, but large"
            return f", which {how}: what is rounded needs a wider dtype"
        times = self.expected and self.error / self.expected
        return f", {times:.3g} times what rounding each operation once would give" if times else ""

    def _of_loss(self) -> str:
        if self._not_finite:
            return self._not_finite[0].upper() + self._not_finite[1:]
        text = f"The loss is off by {trials.error_text(self.loss_error)}"
        if not math.isfinite(self.loss_error):
            text = "The loss is not finite" + _ROUNDED * math.isfinite(self.error)
        row = max(self.rows, key=lambda row: row.loss_share, default=None)
        if row is None or row.loss_share < NAMED or not self.loss_error:
            return text
        return f"{text}, {percent(row.loss_share)} of it introduced in {row.place}, {row.description}"

    def _short_tables(self) -> Sequence[Table]:
        if len(self.rows) <= _SHORT:
            return self._tables()
        columns = ("place", "of", "operation", "introduced ", "total ", "share ", "of the loss ")
        cells = []
        for row in sorted(self.rows, key=lambda row: -max(row.share, row.loss_share)):
            _, _, operation, introduced, _, total, *_ = _cells(row)
            shares = Sum(row.share, percent), Sum(row.loss_share, percent)
            cells.append((row.place, _SHORT_NAMES[row.direction], operation, introduced, total, *shares))
        title = f"{self.function}: where most of the error is from"
        return [Table(columns, cells, title, most=_LINES, largest_first=True), *self._furthest(3)]

    def _tables(self) -> Sequence[Table]:
        columns = ["module", "line", "operation", "introduced ", "inherited ", "total ", "largest ", "share "]
        is_float8 = any(map(_lost_cell, self.rows))
        columns += ["lost in 8 bits, left / right "] * is_float8
        tables = []
        for direction in DIRECTIONS:
            rows = [row for row in self.rows if row.direction == direction]
            if rows:
                cells = [(*_cells(row), *[_lost_cell(row)] * is_float8) for row in rows]
                tables.append(Table(columns, cells, f"{self.function}: {direction}"))
        return [*tables, *self._furthest(6)]

    def _furthest(self, most: int) -> Sequence[Table]:
        of_zero = zero_but_for_rounding(self.results)
        worst = sorted((r for r in self.results if r.error and r not in of_zero), key=lambda r: -r.error)
        cells = [(r.name, f"{r.error:.2g}", f"{r.largest:.2g}", f"{r.norm:.3g}") for r in worst]
        names = ["result", "error ", "largest ", "norm "]
        return [Table(names, cells, "results that are furthest off", most=most)] if worst else []

    def _lines(self) -> Sequence[str]:
        noted = (row for row in self.rows if row.note not in ("", OVERFLOWS))
        notes = dict.fromkeys(f"{row.place}: {row.note}." for row in noted)
        repair, tried = lost_constants.repair(self.constants), trials.tried_text(self.tried)
        return (*notes, *filter(None, [repair, tried]), self.verdict)

    def plot(self) -> Any:
        """Draws the error along the depth of the program, forward and backward; returns the figure.

        Raises:
          ImportError: when matplotlib is not installed.
        """
        pyplot = plotting("Drift.plot")
        directions = list(dict.fromkeys(row.direction for row in self.rows))
        if not directions:
            figure, axes = pyplot.subplots(figsize=(8, 2), layout="constrained")
            axes.set_title(self.verdict, fontsize=9)
            axes.set_axis_off()
            return figure
        rows = [[row for row in self.rows if row.direction == direction] for direction in directions]
        size = (max(8.0, 0.24 * max(map(len, rows))), 2.6 * len(directions) + 1.6)
        figure, panels = pyplot.subplots(len(rows), 1, figsize=size, layout="constrained", squeeze=False)
        for axes, direction, drawn in zip(panels[:, 0], directions, rows, strict=True):
            _panel(axes, direction, drawn)
        panels[-1, 0].set_xlabel("place in the program")
        figure.suptitle(f"{self.function}: error against float32, in order of the program", fontsize=10)
        legend = panels[0, 0].get_legend_handles_labels()
        figure.legend(*legend, fontsize=8, loc="outside lower center", ncols=3)
        return figure


def zero_but_for_rounding(results: Sequence[ResultDrift]) -> list[ResultDrift]:
    """The results that say nothing, as the gradients of a bias before a BatchNorm and of attention's keys."""
    norms = {r.name: r.norm for r in results if math.isfinite(r.norm)}
    # The parts of a state have units of their own: a small one may be right.
    is_loss = norms.pop("the loss", None) is not None
    enough, whole = 0.0 if is_loss else _FAR_OFF, math.hypot(*norms.values())

    def says_nothing(result: ResultDrift) -> bool:
        if not result.norm:
            return is_loss and 0 < result.largest < _ROUNDING_OF_HALF * whole
        return result.norm < _ROUNDING * whole and enough < result.error < math.inf

    return list(filter(says_nothing, results))


def loses_unseen(found: Drift) -> bool:
    """Whether constants or updates are lost, which one call may not show."""
    constants = any(c.becomes == "1" or not c.written for c in found.constants)
    return constants or bool(_updates_text(found.results))


#: An argument is returned without what was added to it where so much of that is wrong.
_LOST_UPDATE = 0.5


def _updates_text(results: Sequence[ResultDrift]) -> str:
    lost = [f"{r.name} ({percent(r.change_error)})" for r in results if r.change_error > _LOST_UPDATE]
    if not lost:
        return ""
    return (
        f"What is added to an argument is below half of its last digit, and lost, in {joined(lost)}: keep it "
        "in float32, as master_weights does for parameters"
    )


def _cells(row: DriftRow) -> Sequence[str]:
    numbers = (f"{value:.2g}" for value in (row.introduced, row.inherited, row.total, row.largest))
    return row.module, row.line.partition(" ")[0], row.operation, *numbers, percent(row.share)


def _lost_cell(row: DriftRow) -> str:
    lost = [a + b for a, b in zip(row.flushed, row.saturated, strict=True)]
    return " / ".join(map(percent, lost)) if any(lost) else ""


#: Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
_TOTAL, _INTRODUCED, _SHARE = "#0072B2", "#D55E00", "#999999"
#: Errors below this are drawn here: a logarithmic axis has no zero.
_LEAST = 1e-9


def _panel(axes: Any, direction: str, rows: list[Any]) -> None:
    places = np.arange(len(rows))
    total, introduced = (
        np.clip([getattr(row, field) for row in rows], _LEAST, 1e9) for field in ("total", "introduced")
    )
    share = axes.twinx()
    share.bar(places, [100 * row.share for row in rows], color=_SHARE, alpha=0.35, width=0.8)
    share.set(ylim=(0, 100), ylabel="share of the error (%)")
    # Markers differ too, for print without colours.
    axes.plot(places, total, "o-", color=_TOTAL, markersize=4, label="total error")
    axes.plot(places, introduced, "^--", color=_INTRODUCED, markersize=4, label="introduced here")
    axes.bar(0, 0, color=_SHARE, alpha=0.35, label="share of the final error")
    axes.set(yscale="log", ylabel="relative L2 error")
    axes.set_title(direction, fontsize=9)
    axes.set_xticks(places, [row.module or row.place for row in rows], rotation=60, ha="right", fontsize=6)
    axes.set_zorder(share.get_zorder() + 1)
    axes.patch.set_visible(False)
