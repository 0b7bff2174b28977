"""What a diagnosis says: the first non-finite value, and what to do about it."""

import dataclasses
import math
from collections.abc import Sequence

from jmp_policy._src.core.report_base import Report, Table, joined
from jmp_policy._src.jaxpr.walk import Site


@dataclasses.dataclass(frozen=True)
class Operand:
    """What the operation that failed was given.

    Args:
      name: the argument that it is ("params/head/kernel"), or "".
      dtype, shape: of the array.
      largest: its largest finite magnitude.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    largest: float


@dataclasses.dataclass(frozen=True)
class Diagnosis(Report):
    """The first non-finite value of a loss and its gradients; `str` says what happened and what to do.

    Args:
      function: name of the loss function.
      finite: whether loss and gradients are all finite; the fields below then are empty.
      loss: the loss, scale taken off.
      loss_scale: what the loss was multiplied by.
      bad_results: names of what is not finite in the end: "the loss", gradients by their path.
      kind: "overflow" (finite in float32), "underflow" (finite in float32: a divisor, or the argument of a
        logarithm, became zero), "not finite" (nor is it in float32) or "argument" (it was so to begin with).
      path: names of the scopes around it, joined by slashes; the name of an argument.
      line: where the user wrote it.
      backward: whether it is in the backward pass.
      operation: name of the primitive that made it.
      trip: which trip of a loop, counted from 0; None outside of loops.
      dtype, shape: of the array.
      is_nan: whether it holds NaNs; infinities otherwise.
      operands: what the operation was given.
      largest_before: largest finite magnitude in the same dtype among all values before.
      largest_before_place: where that was.
      largest_in_float32: largest finite magnitude of the same value in float32; nan where it is not finite.
      advice: what to do.
    """

    function: str
    finite: bool
    loss: float
    loss_scale: float
    bad_results: tuple[str, ...] = ()
    kind: str = ""
    path: str = ""
    line: str = ""
    backward: bool = False
    operation: str = ""
    trip: int | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    is_nan: bool = False
    operands: tuple[Operand, ...] = ()
    largest_before: float = 0.0
    largest_before_place: str = ""
    largest_in_float32: float = math.nan
    advice: str = ""

    _rows = "operands"

    @property
    def place(self) -> str:
        """Returns the path, and the file and line: "Net/head (mlp.py:41)"."""
        return Site(path=self.path, line=self.line).place

    @property
    def verdict(self) -> str:
        """Returns what happened, in one sentence."""
        if self.finite:
            return f"{self.function}: the loss ({self.loss:.6g}) and all gradients are finite."
        what = "NaN" if self.is_nan else "infinite"
        if self.kind == "argument":
            return f"{self.path} is not finite to begin with ({what}, {self.dtype}{list(self.shape)})."
        where = f"{'backward' if self.backward else 'forward'}, in {self.place}"
        trip = "" if self.trip is None else f", trip {self.trip}"
        ends = {
            "overflow": f"an overflow: in float32 it is finite, at most {self.largest_in_float32:.4g}",
            "underflow": "an underflow: in float32 it is finite, but something became zero in half precision",
            "not finite": "not finite in float32 either",
        }
        return (
            f"The first non-finite value is {what}: the result of {self.operation} "
            f"({self.dtype}{list(self.shape)}), {where}{trip}; {ends[self.kind]}."
        )

    def _tables(self) -> Sequence[Table]:
        if not self.operands:
            return ()
        rows = [(o.name or "(computed)", o.dtype, list(o.shape), f"{o.largest:.4g}") for o in self.operands]
        return [Table(("operand", "dtype", "shape", "largest "), rows, f"What {self.operation} was given")]

    def _lines(self) -> Sequence[str]:
        if self.finite:
            return [self.verdict]
        lines = [self.verdict]
        if self.largest_before_place:
            lines.append(
                f"Largest {self.dtype} value before: {self.largest_before:.4g}, {self.largest_before_place}."
            )
        lines.append(f"Not finite in the end: {joined(self.bad_results, 6)}.")
        return [*lines, self.advice]


def advice(found: Diagnosis, scaled: bool) -> str:
    """Returns what to do; `scaled` says whether the value has the loss scale in it."""
    part = f"{found.path!r}" if found.path else f"the function at {found.line}"
    if found.kind == "underflow":
        return (
            f"Something became zero in {found.dtype} (the smallest number of float16 is 6e-8): enlarge the "
            f"epsilon that guards it to 1e-4 or more, or compute {part} in float32: by a rule of a "
            "PolicyMap, or with full_precision around it."
        )
    if found.kind == "overflow" and scaled:
        return (
            f"The scaled gradient exceeds {found.dtype} at a loss scale of {found.loss_scale:g}. "
            "DynamicLossScale lowers it by itself; a constant scale must be smaller (gradient_spectrum says "
            f"which). At a scale of 1 already: compute {part} in float32 or bfloat16."
        )
    if found.kind == "overflow":
        limit = "65504" if found.dtype == "float16" else f"the range of {found.dtype}"
        return (
            f"The activation exceeds {limit}; no loss scale can help. Compute {part} in float32, or in "
            "bfloat16, which has float32's range: by a rule of a PolicyMap or with full_precision around it. "
            "Or make what it is given smaller: normalise before it."
        )
    known = _ADVICE.get(
        found.operation,
        "In float32 it is not finite either: look for what feeds this operation.",
    )
    if found.dtype == "float16" and found.operation in _ADVICE:
        known += (
            " If an epsilon guards it already: one below 6e-8 is zero in float16 before the program begins, "
            "which no replay in float32 can tell from a zero that was meant."
        )
    return known


#: By operation, what makes it non-finite in any precision.
_ADVICE = {
    "div": "A division by zero, in any precision. Guard the divisor itself (jnp.where(x == 0, 1, x) before "
    "dividing): a where after the division stops the value, but its gradient is 0 * inf = NaN.",
    "log": "A logarithm of zero or of a negative number, in any precision. Clamp its argument, or use "
    "log_softmax, log1p, xlogy or logsumexp.",
    "sqrt": "A square root of a negative number, in any precision. Clamp its argument.",
    "rsqrt": "A reciprocal square root of zero or of a negative number, in any precision. Add an epsilon.",
    "sub": "inf - inf: most often a row of a mask that is all -inf. Use jnp.finfo(dtype).min, or leave one "
    "entry unmasked.",
    "mul": "0 * inf, or a product beyond float32. In a backward pass it is most often the gradient of a "
    "where whose other branch is infinite: guard the argument before the operation, not the result after it.",
    "exp": "An exponential beyond float32. Subtract the maximum first (logsumexp, softmax).",
    "pow": "A power of zero or of a negative number, in any precision. Clamp its base.",
}
