"""What a diagnosis says: the first non-finite value, and what to do about it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jmp_policy._src.core.report_base import Report, Table, joined
from jmp_policy._src.jaxpr.op_table import HAVING, NOT_FINITE, Trait
from jmp_policy._src.jaxpr.walk import Placed, PlacedOperation
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report import lost_constants, trials


@dataclasses.dataclass(frozen=True)
class Operand:
    """What the operation that failed was given.

    Args:
      name: the argument that it is ("params/head/kernel"), or "".
      dtype, shape: of the array.
      largest: its largest finite magnitude.
      infinite: whether any number of it is infinite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    largest: float
    infinite: bool = False


@dataclasses.dataclass(frozen=True)
class Zero(PlacedOperation):
    """Operation whose result became zero in half precision, or lost its digits, at which another one failed.

    Args:
      operation: name of the primitive.
      path, line, backward: its place, as of a `Product`.
      dtype: dtype of its result.
    """

    dtype: str


@dataclasses.dataclass(frozen=True)
class Diagnosis(Report, Placed):
    """The first non-finite value of a loss and its gradients; `str` says what happened and what to do.

    Args:
      function: name of the function.
      finite: whether loss and gradients, or all results, are finite; the fields below then are empty, but for
        `constants`.
      loss: the loss, scale taken off; nan for a function that is no loss.
      loss_scale: what the loss was multiplied by.
      bad_results: names of what is not finite in the end: "the loss", gradients by their path.
      kind: "overflow" (finite in float32), "underflow" (finite in float32: a divisor, or the argument of a
        logarithm, became zero), "rounding" (finite in float32: the operation is not defined for what
        rounding made of an operand, as sqrt for less than 0), "not finite" (nor is it in float32) or
        "argument" (it was so to begin with) or "compiled" (only in the compiled program).
        A constant that is infinite in half only is an overflow too, and one that is zero an underflow.
      path: names of the scopes around it, joined by slashes; the name of an argument.
      line: where the user wrote it.
      backward: whether it is in the backward pass.
      operation: name of the primitive that made it; "shard_map" for all that is inside of one.
      trip: which trip of a loop, counted from 0; None outside of loops.
      dtype, shape: of the array.
      is_nan: whether it holds NaNs; infinities otherwise.
      operands: what the operation was given.
      largest_before: largest finite magnitude in the same dtype among all values before.
      largest_before_place: where that was.
      largest_in_float32: largest finite magnitude of the same value in float32; nan where it is not finite.
      advice: what to do.
      zero: of an underflow, the operation whose result became zero; else None, also where `constant` is the
        divisor.
      lost_digits: where float32 has a value far inside the range, or no zero, and no operation near made it
        so: the earlier one whose rounding did; else None.
      constant: the constant that half precision made infinite or zero, if it is the cause; else None.
      constants: all constants of the program that half precision makes infinite, zero or one.
      rule: overrides for the `PolicyMap` of the model that were tried and mend it, or of a finite result keep
        all constants; empty without such, and where another policy as a whole mends.
      policy: the whole policy with that rule, or in place of the model's own; None without one.
      tried: every change of the policy that was tried, with the error of the gradient under it.
      error_after: that error under the policy that is advised; nan without one.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import diagnose
      >>> found = diagnose(lambda x: jnp.log(x), jnp.float32(-1.0))
      >>> found.finite, found.kind, found.operation
      (False, 'not finite', 'log')
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
    zero: Zero | None = None
    lost_digits: Zero | None = None
    constant: lost_constants.LostConstant | None = None
    constants: tuple[lost_constants.LostConstant, ...] = ()
    rule: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    policy: PolicyMap | None = None
    tried: tuple[trials.Tried, ...] = ()
    error_after: float = math.nan

    _rows = "operands"

    @property
    def verdict(self) -> str:
        """What happened, in one sentence."""
        if self.finite:
            lost = f"; but {lost_constants.text(self.constants)}" * bool(self.constants)
            if not math.isnan(self.loss):
                return f"{self.function}: the loss ({self.loss:.6g}) and all gradients are finite{lost}."
            more = "If it is a loss that returns more than one number, has_aux=True looks at its gradient."
            return f"{self.function}: all results are finite{lost}. {more}"
        if self.kind == "compiled":
            which = f"{joined(self.bad_results, 3)} {'is' if len(self.bad_results) == 1 else 'are'}"
            return f"{self.function}: {which} not finite where XLA joins operations, and finite one by one."
        what = "NaN" if self.is_nan else "infinite"
        if self.kind == "argument":
            return f"{self.path} is not finite to begin with ({what}, {self.dtype}{list(self.shape)})."
        where = f"{'backward' if self.backward else 'forward'}, in {self.place}"
        trip = "" if self.trip is None else f", trip {self.trip}"
        return (
            f"The first non-finite value is {what}: the result of {self.operation} "
            f"({self.dtype}{list(self.shape)}), {where}{trip}; {self._cause()}."
        )

    def _cause(self) -> str:
        """Describes what half precision has to do with it."""
        if self.constant is not None:
            kind = self.kind if self.kind == "not finite" else f"an {self.kind}"
            return f"{kind}: {self.constant.text}"
        if self.kind == "rounding":
            what = f"{self.operation} is not defined for one of the numbers it was given"
            what = "an index is outside of its array" if self.operation == "gather" else what
            return f"a rounding error: {what}; in float32 it is finite, at most {self.largest_in_float32:.4g}"
        if self.kind == "overflow" and self.operation == "shard_map":
            return f"in float32 it is finite, at most {self.largest_in_float32:.4g}"
        if self.kind == "overflow":
            fits = self.operation in _ACCUMULATES and self.largest_in_float32 <= float(
                jnp.finfo(self.dtype).max
            )
            what = "an overflow of its partial sums" if fits else "an overflow"
            return f"{what}: in float32 it is finite, at most {self.largest_in_float32:.4g}"
        if self.zero is not None:
            return (
                "an underflow: in float32 it is finite, but something became zero in half precision, the "
                f"result of {self.zero.operation} ({self.zero.dtype}) in {self.zero.place}"
            )
        return "not finite in float32 either"

    def _tables(self) -> Sequence[Table]:
        lost = [lost_constants.table(self.constants)] if self.constants else []
        if not self.operands:
            return lost
        rows = [
            (o.name or "(computed)", o.dtype, list(o.shape), f"{o.largest:.4g}{' and inf' * o.infinite}")
            for o in self.operands
        ]
        return [
            Table(("operand", "dtype", "shape", "largest "), rows, f"What {self.operation} was given"),
            *lost,
        ]

    def _lines(self) -> Sequence[str]:
        if self.finite:
            return [self.verdict, *filter(None, [lost_constants.repair(self.constants), self.advice])]
        lines = [self.verdict]
        if self.largest_before_place:
            lines.append(
                f"Largest {self.dtype} value before: {self.largest_before:.4g}, {self.largest_before_place}."
            )
        lines.append(f"Not finite in the end: {joined(self.bad_results, 6)}.")
        return [*lines, *filter(None, [trials.tried_text(self.tried)]), self.advice]


def advice(
    found: Diagnosis, scaled: bool, in_optimizer: bool, is_mask: bool, mended: trials.Tried | None = None
) -> str:
    """What to do.

    Args:
      found: what happened, with what was tried.
      scaled: whether the value has the loss scale in it.
      in_optimizer: whether an optimizer computed it.
      is_mask: whether it may be a mask: -inf, and nothing else that is not finite.
      mended: what was tried and helps.
    """
    is_cast = found.kind == "overflow" and found.operation == "convert_element_type"
    mask = f" If it is a mask: {lost_constants.OF_MASK}" if is_cast and is_mask else ""
    if in_optimizer and found.kind in ("underflow", "overflow", "rounding"):
        return _OF_OPTIMIZER.format(dtype=found.zero.dtype if found.zero else found.dtype)
    limit = _limit(found, scaled)
    if mended is not None:
        whole = mended.text[0].upper() + mended.text[1:]
        off = f"off by {trials.error_text(mended.error)}{mended.price}"
        rule = f"{whole} mends it: the gradient is finite, and {off}."
        return f"{limit} {rule}{mask}{_logarithm(found.zero)}"
    if found.operation == "shard_map":
        return limit
    tried = f"{_UNMENDED}. " if found.tried else ""
    if found.zero is not None:
        part = _part(found.zero.path, found.zero.line)
        repair = _digits(found.lost_digits) or (
            f"Compute {part} and what reads it in float32, by rules of a PolicyMap or under region('off'), "
            f"or enlarge the epsilon that guards it to 1e-4 or more.{_logarithm(found.zero)}"
        )
        return f"{limit} {tried}{repair}"
    if found.constant is not None:
        return f"{found.constant.text}. {lost_constants.repair([found.constant])}"
    part = _part(found.path, found.line)
    if found.operation == "gather" and found.kind == "rounding":
        return f"{limit} {tried}Compute what the index is made of in float32, and clip it."
    if found.kind == "overflow" and scaled and not found.tried:
        return (
            f"The scaled gradient exceeds {found.dtype} at a loss scale of {found.loss_scale:g}. "
            "DynamicLossScale lowers it by itself; a constant scale must be smaller (gradient_spectrum says "
            f"which). At a scale of 1 already: compute {part} in float32."
        )
    finite = next((t for t in found.tried if t.is_own and math.isfinite(t.error)), None)
    if found.lost_digits is None and finite is not None and not finite.is_mended:
        off = f"finite at one of {finite.loss_scale:g}, and off by {trials.error_text(finite.error)}"
        return f"{limit} It is {off}: drift(..., scale={finite.loss_scale:g}) finds what makes that error."
    if found.kind in ("overflow", "rounding"):
        repair = _digits(found.lost_digits) or (
            f"Compute {part} and what reads it in float32, by rules of a PolicyMap or under region('off'), "
            "or make what it is given smaller: normalise before it."
        )
        return f"{limit} {tried}{repair}{mask}"
    known = NOT_FINITE.get(
        found.operation, "In float32 it is not finite either: look for what feeds this operation."
    )
    if found.dtype == "float16" and found.operation in NOT_FINITE:
        known += (
            " If an epsilon guards it already: one up to 2**-25 (3e-8) is zero in float16 before the program "
            "begins, which no replay in float32 can tell from a zero that was meant."
        )
    return known


def _limit(found: Diagnosis, scaled: bool) -> str:
    """What was exceeded, or became zero; where to look for it in a shard_map."""
    if found.operation == "shard_map":
        return f"In shard_map, {found.place}: diagnose the function inside on one device's arrays."
    if found.zero is not None:
        zero = found.zero
        return f"The result of {zero.operation} in {zero.place} became zero in {zero.dtype}."
    if found.constant is not None:
        return f"{found.constant.text}."
    if found.kind == "rounding" and found.operation == "gather":
        return "Rounding made an index another one (bfloat16 has whole numbers up to 256, float16 to 2048)."
    if found.kind == "rounding":
        return f"Rounding gave {found.operation} a number for which it is not defined."
    limit = "65504" if found.dtype == "float16" else f"the range of {found.dtype}"
    if found.backward and not scaled:
        return f"A derivative exceeds {limit}, whatever the loss scale."
    if found.backward:
        is_alone = math.isfinite(found.loss) and limit == "65504" and found.loss_scale == 1
        is_known = any(tried.is_own and math.isinf(tried.error) for tried in found.tried)
        below = "; DynamicLossScale goes below it" * (is_alone and not is_known)
        return f"The gradient exceeds {limit} at a loss scale of {found.loss_scale:g}{below}."
    if found.operation == "convert_element_type" and found.operands[0].name:
        return f"The argument {found.operands[0].name!r} exceeds {limit} where it is cast to {found.dtype}."
    is_harmless = any(tried.is_own and tried.is_mended for tried in found.tried)
    return f"The activation exceeds {limit}{'' if is_harmless else '; no loss scale can help'}."


def _digits(lost: Zero | None) -> str:
    """What to do about digits that were lost before; "" if none were."""
    if lost is None:
        return ""
    return (
        f"Its digits were lost before, when the result of {lost.operation} in {lost.place} was rounded to "
        f"{lost.dtype}. Compute that and what reads it in float32, or do without the large part of it."
    )


def _part(path: str, line: str) -> str:
    return f"{path!r}" if path else f"the function at {line}"


def _logarithm(zero: Zero | None) -> str:
    is_of_softmax = zero is not None and zero.operation in ("exp", "div")
    return " Of a softmax take log_softmax in its place." * is_of_softmax


_ACCUMULATES = HAVING[Trait.ACCUMULATES]

#: What to do where single operations are finite.
OF_COMPILER = (
    "XLA may join constants, so that 1 - q + 1e-8 is (1 + 1e-8) - q, where float32 loses the epsilon, or add "
    "up in another order. Clamp what a logarithm or division is given (jnp.maximum(1 - q, 1e-7))."
)

_UNMENDED = "No change of the policy that was tried mends it"

_OF_OPTIMIZER = (
    "The optimizer computes in {dtype}, the dtype of its parameters or gradients, which its epsilon and its "
    "squares are too small or too large for: give it float32 ones with master_weights(optimizer), or float32 "
    "parameters under a policy that computes in half; or enlarge its eps to 1e-4 or more."
)
