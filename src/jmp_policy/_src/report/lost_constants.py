"""Finds constants that half precision makes infinite, zero or one: `/ 100000`, `+ 1e-8`, `0.9999 *`."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_floating, is_half
from jmp_policy._src.core.report_base import Table, joined
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.source_lines import written_constants
from jmp_policy._src.jaxpr.walk import Placed, Site, ValueInfo, Visitor, walk


@dataclasses.dataclass(frozen=True)
class LostConstant(Placed):
    """Constant of a program that half precision makes infinite, zero or one.

    Args:
      operation: name of the primitive that reads it.
      path, line, backward: its place, as of a `Product`.
      dtype: half dtype that it was rounded to.
      written: what the source says ("/ 100000"), or the number that was cast; "" if unknown.
      becomes: "inf", "-inf", "0", or of a factor "1".
    """

    operation: str
    path: str
    line: str
    backward: bool
    dtype: str
    written: str
    becomes: str

    @property
    def text(self) -> str:
        """Describes it in one phrase: "'/ 100000' is inf in float16, in loss.py:12"."""
        what = repr(self.written) if self.written else f"a constant read by {self.operation}"
        return f"{what} is {self.becomes} in {self.dtype}, in {self.place}"


@contextlib.contextmanager
def without_overflow_warnings() -> Iterator[None]:
    """Silences NumPy's warning, without a place, of a constant that overflows while a program is traced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning)
        yield


def lost_in(jaxpr: Any) -> "LostConstants":
    """What is lost in a closed jaxpr."""
    found = LostConstants()
    walk(jaxpr, found)
    return found


def text(constants: Sequence[LostConstant]) -> str:
    """Describes lost constants in one phrase, for verdicts; "" without any."""
    return joined([constant.text for constant in constants])


def repair(constants: Sequence[LostConstant]) -> str:
    """Says what to do about lost constants, in one or two sentences."""
    becomes = {c.becomes for c in constants}
    said = [OF_MASK] if "-inf" in becomes else []
    if "1" in becomes:
        said.append("Keep in float32 what is multiplied by a decay that half precision makes 1.")
    if becomes - {"-inf", "1"}:
        said.append(
            "Write constants that half precision holds (in float16 from 6e-8 to 65504), or compute that part "
            "in float32: x.astype(jnp.float32) / 100000."
        )
    return " ".join(said)


#: What to do about a mask. Of the least number itself, float16 makes -inf when scores below -16 are added.
OF_MASK = (
    "Fill the mask with jnp.finfo(x.dtype).min / 2, x being what it masks: that stays finite when scores and "
    "other masks are added."
)


def table(constants: Sequence[LostConstant]) -> Table:
    """Makes the table of lost constants."""
    rows = [
        (
            c.written or "(unknown)",
            c.becomes,
            c.dtype,
            c.operation,
            c.path,
            c.line,
            "backward" if c.backward else "forward",
        )
        for c in constants
    ]
    columns = ("constant", "becomes", "in", "read by", "module", "line", "pass")
    return Table(columns, rows, "Constants that half precision makes infinite, zero or one")


class _Constant(NamedTuple):
    """A constant on its way to the operation that reads it.

    Args:
      written: the number as it was before a cast to half; "" where it was half in the program already.
      becomes: what it is in half.
    """

    written: str
    becomes: str


class LostConstants(Visitor):
    """Collects lost constants from the operations that a walk sees, in order.

    A cast of a wider constant shows what was lost. A constant that is half in the jaxpr already may have been
    meant: -inf fills masks, and sums begin with 0. Of these only such count as no program means (a product
    with infinity, a division by zero, a float16 zero added to what is then divided by), and those whose
    number stands in the source.

    Attributes:
      numbers: of constants that are half in the program and whose number stands in the source, that number;
        by the identity of the equation that reads it, and its place among the operands.
    """

    def __init__(self) -> None:
        self.numbers: dict[tuple[int, int], float] = {}
        self._found: dict[Any, LostConstant] = {}
        self._guards: dict[int, LostConstant] = {}
        self._constants: dict[int, _Constant] = {}
        self._wide: dict[int, Any] = {}
        self._not_negative: set[int] = set()

    def found(self) -> tuple[LostConstant, ...]:
        """What was found so far, each place once."""
        return tuple(self._found.values())

    def see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        """Takes note of an operation, as `Visitor.see`."""
        name = eqn.primitive.name
        constants = [self._constant(atom, info) for atom, info in zip(eqn.invars, operands, strict=True)]
        if name in _VIEWS and len(operands) == 1:
            self._pass_on(eqn, operands[0], constants[0], results[0])
            return
        if name == "select_n" and is_floating(ir.dtype_of(eqn.outvars[0])):
            # What a mask is filled with before it is cast.
            wide = [value for info in operands[1:] if (value := self._value(info)) is not None]
            if wide and not is_half(ir.dtype_of(eqn.outvars[0])):
                self._wide[results[0].key] = np.concatenate([np.ravel(value) for value in wide])
        for place, constant in enumerate(constants):
            if constant is not None:
                self._read(eqn, site, place, constant, operands, results)
        if name in _POLES and operands[-1].key in self._guards:
            self._keep(self._guards[operands[-1].key])
        if name in _NOT_NEGATIVE or (name in _KEEPS_SIGN and operands[0].key in self._not_negative):
            self._not_negative.update(info.key for info in results)

    def _pass_on(self, eqn: Any, operand: ValueInfo, constant: _Constant | None, result: ValueInfo) -> None:
        value = self._value(operand)
        before, after = ir.dtype_of(eqn.invars[0]), ir.dtype_of(eqn.outvars[0])
        if operand.key in self._not_negative:
            self._not_negative.add(result.key)
        if operand.key in self._guards:
            self._guards[result.key] = self._guards[operand.key]
        if constant is not None:
            self._constants[result.key] = constant
        elif value is not None and is_half(after) and not is_half(before):
            lost = _lost_in_cast(value, after)
            if lost is not None:
                self._constants[result.key] = lost
        elif value is not None:
            self._wide[result.key] = value

    def _value(self, info: ValueInfo) -> Any:
        """The constant that a value is, or those that it may hold; None for other values."""
        value = self._wide.get(info.key) if info.constant is None else info.constant
        return None if ir.is_traced(value) else value

    def _constant(self, atom: Any, info: ValueInfo) -> _Constant | None:
        dtype = ir.dtype_of(atom)
        if info.key in self._constants:
            return self._constants[info.key]
        if info.constant is None or not is_half(dtype) or np.ndim(info.constant) != 0:
            return None
        value = float(info.constant)
        return _Constant("", _text(value)) if value in (0, 1) or np.isinf(value) else None

    def _read(
        self,
        eqn: Any,
        site: Site,
        place: int,
        constant: _Constant,
        operands: Sequence[ValueInfo],
        results: Sequence[ValueInfo],
    ) -> None:
        name, dtype = eqn.primitive.name, ir.dtype_of(eqn.invars[place])
        written, becomes = constant.written, constant.becomes
        if name in (_BOUNDS if written and becomes != "0" else _COMPARISONS):
            return
        if becomes == "1" and name not in _SCALES:
            return
        is_guard = False
        if not written:
            numbers = written_constants(eqn)
            lost = [(n, text) for n, text in numbers if _is_lost(n, becomes, dtype)]
            if lost:
                number, written = lost[0]
                self.numbers[id(eqn), place] = number
            elif becomes == "1" or any(_becomes(n, dtype) == becomes for n, _ in numbers):
                return  # Unknown, or written so.
            elif becomes == "0" and name == "add":
                # On the right: Python's sum() begins with 0 on the left.
                is_guard = place == 1 and float(jnp.finfo(dtype).smallest_subnormal) > _LEAST_EPSILON
                if not is_guard:
                    return
            elif not self._is_meaningless(name, place, becomes, operands):
                return
        found = LostConstant(name, site.path, site.line, site.backward, str(dtype), written, becomes)
        if is_guard:
            self._guards[results[0].key] = found
        else:
            self._keep(found)

    def _keep(self, found: LostConstant) -> None:
        # The backward pass reads it again.
        key = (found.line, found.dtype, found.becomes, found.written or found.operation)
        self._found.setdefault(key, found)

    def _is_meaningless(self, name: str, place: int, becomes: str, operands: Sequence[ValueInfo]) -> bool:
        """Whether no program means an operation with such a constant."""
        if becomes != "0":
            return name in ("mul", "div") or (name in ("add", "sub") and becomes == "inf")
        if name == "max":
            return operands[1 - place].key in self._not_negative
        return name == "div" and place == 1


def _lost_in_cast(value: Any, dtype: Any) -> _Constant | None:
    """What a cast to half does to a constant: of arrays the first element that becomes infinite."""
    array = np.ravel(np.asarray(value))
    if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array) or not array.size:
        return None
    with np.errstate(over="ignore", under="ignore"):
        cast = array.astype(dtype).astype(np.float64)
    lost = np.isinf(cast) & np.isfinite(array)
    if array.size == 1:
        lost |= np.isin(cast, (0, 1)) & (cast != array)
    if not lost.any():
        return None
    first = int(np.argmax(lost))
    number = float(array[first])
    written = f"{number:g}"
    return _Constant(written if written != "1" else str(array[first]), _text(float(cast[first])))


def _becomes(number: float, dtype: Any) -> str:
    with np.errstate(over="ignore", under="ignore"):
        return _text(float(np.asarray(number).astype(dtype)))


def _is_lost(number: float, becomes: str, dtype: Any) -> bool:
    """Whether a number is another one in half precision, namely infinite, zero or one as said."""
    return np.isfinite(number) and number not in (0, 1) and _becomes(number, dtype) == becomes


def _text(number: float) -> str:
    return "0" if number == 0 else f"{number:g}"


_VIEWS, _COMPARISONS = HAVING[Trait.VIEW], HAVING[Trait.COMPARISON]
_BOUNDS = _COMPARISONS | HAVING[Trait.BOUNDED]
_POLES = HAVING[Trait.POLE]
_NOT_NEGATIVE, _KEEPS_SIGN = HAVING[Trait.NOT_NEGATIVE], HAVING[Trait.KEEPS_SIGN]

#: Operations in which a factor or base of 1 is no other one nearby: a decay of 0.9999 never decays.
_SCALES = frozenset({"mul", "pow"})

#: Nobody guards a division with less: a zero in bfloat16, which begins at 1e-40, was written as zero.
_LEAST_EPSILON = 1e-30
