"""Defines the result of `sensitivity`: modules in the order of what half precision would do to them."""

import dataclasses
import math
from collections.abc import Sequence

from jmp_policy._src.core.report_base import Report, Table, count_text, joined, row_of
from jmp_policy._src.report.sensitivity.half_program import is_below


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """What computing one module in half precision would do, with everything below it.

    Args:
      path: path of the module, or the pattern that was asked about; "" for the whole model.
      predicted: relative error of the gradient, |half - float32| / |float32| over all parameters; infinite
        where a value or a cotangent overflows.
      loss: relative error of the loss.
      overflow: number of values that would be infinite.
      underflow: number of values that would be zero, and are not.
      gradient_overflow, gradient_underflow: the same of cotangents, times the loss scale.
    """

    path: str
    predicted: float
    loss: float
    overflow: int = 0
    underflow: int = 0
    gradient_overflow: int = 0
    gradient_underflow: int = 0


@dataclasses.dataclass(frozen=True)
class Sensitivity(Report):
    """Modules in the order of what half precision would do to the gradient, the most sensitive first.

    Args:
      function: name of the loss function.
      dtype: "float16" or "bfloat16".
      loss_scale: power of two that the cotangents were multiplied by: the largest that leaves a factor of 4
        to overflow, at most 2**24. Sums over the trips of loops make it smaller than need be.
      rows: one per module or candidate.
      measured: whether each row is the error of a gradient with the rounding of its module; else rows are
        first-order estimates.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import sensitivity
      >>> found = sensitivity(lambda w, x: ((x @ w) ** 2).sum(), jnp.ones((2, 2)) / 3, jnp.ones((1, 2)))
      >>> 0 < found.of("").predicted < 1e-3
      True
    """

    function: str
    dtype: str
    loss_scale: float
    rows: tuple[SensitivityRow, ...]
    measured: bool = False

    _rows = "rows"

    def of(self, path: str) -> SensitivityRow:
        """Returns the row of a path.

        Raises:
          KeyError: when there is none; the message lists the paths that there are.
        """
        return row_of(self.rows, path)

    @property
    def verdict(self) -> str:
        """Returns which parts matter most."""
        infinite = [row.path for row in self.rows if math.isinf(row.predicted)]
        # Not the modules above them.
        infinite = [p for p in infinite if not any(q != p and is_below(q, p) for q in infinite)]
        if infinite:
            return f"In {self.dtype} values overflow in {joined(infinite) or 'the whole model'}."
        if not self.rows:
            return "No rows."
        first = self.rows[0]
        where = first.path or "the whole model"
        return f"In {self.dtype}, {where} changes the gradient most: by {first.predicted:.2g} of its norm."

    def _tables(self) -> Sequence[Table]:
        columns = (
            "module",
            "gradient ",
            "loss ",
            "overflow ",
            "underflow ",
            "cotangents: overflow ",
            "underflow ",
        )
        rows = [
            (r.path or "(all)", f"{r.predicted:.1e}", f"{r.loss:.1e}", *map(count_text, (
                r.overflow, r.underflow, r.gradient_overflow, r.gradient_underflow)))
            for r in self.rows
        ]  # fmt: skip
        how = "with rounding applied" if self.measured else "to first order"
        return [Table(columns, rows, f"Relative errors in {self.dtype}, one module at a time, {how}")]

    def _lines(self) -> Sequence[str]:
        return (f"{self.function}, loss scale {self.loss_scale:g}. {self.verdict}",)
