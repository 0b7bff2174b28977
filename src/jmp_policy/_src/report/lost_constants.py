"""Finds constants that half precision makes infinite, zero or one: `/ 100000`, `+ 1e-8`, `0.9999 *`."""

import contextlib
import dataclasses
import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_floating, is_half
from jmp_policy._src.core.report_base import Table, joined
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.jaxpr.op_table import HAVING, PYTHON_OPERATORS, Trait
from jmp_policy._src.jaxpr.source_lines import callers, is_in_file_of, is_written_in, written_constants
from jmp_policy._src.jaxpr.walk import Operation, PlacedOperation, Site, ValueInfo, Walk
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.policy.scope import TRIAL


@dataclasses.dataclass(frozen=True)
class LostConstant(PlacedOperation):
    """Constant of a program that half precision makes infinite, zero or one.

    Args:
      operation: name of the primitive that reads it.
      path, line, backward: its place, as of a `Product`.
      dtype: half dtype that it was rounded to.
      written: what the source says ("/ 100000"), or the number that was cast.
      becomes: "inf", "-inf", "0", or of a factor or bound "1"; of a divisor "inf" where its
        reciprocal is infinite.
      others: paths of further modules that run the same line, such as equal layers.
    """

    dtype: str
    written: str
    becomes: str
    others: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Describes it in one phrase: "'/ 100000' is inf in float16, in loss.py:12"."""
        return f"{self.written!r} is {self.becomes} in {self.dtype}, in {self.place}{self.and_others}"

    @property
    def and_others(self) -> str:
        """Says in how many further modules it is: " and 3 more modules"; "" without any."""
        count = len(self.others)
        return f" and {count} more module{'s' * (count > 1)}" * bool(count)


@contextlib.contextmanager
def without_overflow_warnings() -> Iterator[None]:
    """Silences NumPy's warning, without a place, of a constant that overflows while a program is traced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "overflow encountered in cast", RuntimeWarning)
        yield


class WideNumbers(NamedTuple):
    """Numbers of a program in float32.

    Args:
      read: by the identity of an equation of the program as it is, and the place among its operands.
      of_lines: those that operations of a line read, by file and line.
    """

    read: Mapping[tuple[int, int], float] = {}
    of_lines: Mapping[Any, Collection[float]] = {}


def wide_numbers(program: Any, in_float32: Any) -> WideNumbers:
    """The numbers of a program in float32, by the equations of it as it is: the n-th is the n-th there.

    Args:
      program, in_float32: its jaxprs.
    """
    read, of_lines, own = dict[tuple[int, int], float](), defaultdict[Any, set[float]](set), _numbers(program)
    for key, there in _numbers(in_float32).items():
        of_lines[key[1][:1]].update(number for _, numbers in there for number in numbers.values())
        here = own.get(key, ())
        for (eqn, _), (_, numbers) in zip(here, there, strict=True) if len(here) == len(there) else ():
            for place, number in numbers.items():
                # A jitted function that is called twice has one equation.
                is_one = read.setdefault((eqn, place), number) == number
                read[eqn, place] = number if is_one else np.nan
    return WideNumbers(read, of_lines)


def _numbers(jaxpr: Any) -> Mapping[Any, list[tuple[int, dict[int, float]]]]:
    """By operation and place in the source, for each equation: its identity, and numbers by operand."""
    found = defaultdict[Any, list[tuple[int, dict[int, float]]]](list)
    views = dict[int, Any]()
    for eqn, _, operands, results in Walk(jaxpr).operations:
        constants = [views.get(o.key) if o.constant is None else o.constant for o in operands]
        if eqn.primitive.name in _VIEWS and len(operands) == 1:
            views[results[0].key] = constants[0]
        if eqn.primitive.name in _NAMED:
            read = {
                place: float(constant)
                for place, (atom, constant) in enumerate(zip(eqn.invars, constants, strict=True))
                if constant is not None and not ir.is_traced(constant)
                if np.ndim(constant) == 0 and is_floating(ir.dtype_of(atom))
            }
            found[eqn.primitive.name, callers(eqn)].append((id(eqn), read))
    return found


def text(constants: Sequence[LostConstant]) -> str:
    """Describes lost constants in one phrase, for verdicts; "" without any."""
    return joined([constant.text for constant in constants])


def repair(constants: Sequence[LostConstant]) -> str:
    """Says what to do about lost constants, in one or two sentences."""
    becomes = {c.becomes for c in constants}
    said = [OF_MASK] if "-inf" in becomes else []
    if any(c.becomes == "1" and c.operation in _SCALES for c in constants):
        said.append("Keep in float32 what is multiplied by a decay that half precision makes 1.")
    if any(c.becomes == "1" and c.operation in _CLIPS for c in constants):
        said.append("Compute what is below such a bound in float32: x.astype(jnp.float32) before jnp.clip.")
    if becomes - {"-inf", "1"}:
        said.append(
            "Write constants that half precision holds (in float16 from 6e-8 to 65504; divisors from 1.6e-5 "
            "on, as XLA multiplies by 1 / c), or compute that part in float32: "
            "x.astype(jnp.float32) / 100000."
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
        (c.written, c.becomes, c.dtype, c.operation, f"{c.path}{c.and_others}", c.line, c.direction)
        for c in constants
    ]
    columns = ("constant", "becomes", "in", "read by", "module", "line", "pass")
    return Table(columns, rows, "Constants that half precision makes infinite, zero or one")


class _Constant(NamedTuple):
    """A constant on its way to the operation that reads it.

    Args:
      written: the number as it was before a cast to half; "" where it was half in the program already.
      becomes: what it is in half.
      dtype: that it was cast to, if it was.
    """

    written: str
    becomes: str
    dtype: str = ""


class _Known(NamedTuple):
    """What is known of a value; it stays with it through casts and reshapes.

    Args:
      constant: the half constant that it is.
      wide: the constant that it is otherwise, or those that it may hold.
    """

    constant: _Constant | None = None
    wide: Any = None


class LostConstants:
    """Collects lost constants from the operations of a program.

    A cast of a wider constant shows what was lost. A constant that is half in the jaxpr already may have been
    meant: -inf fills masks, and sums begin with 0. Of these only those count whose number stands in the
    source, or in the same program in float32.

    Args:
      operations: of the program, in order.
      in_float32: gives the numbers of the program in float32; called at most once, where it is needed.

    Attributes:
      numbers: of constants that are half in the program and whose number is known, that number; by the
        identity of the equation that reads it, and its place among the operands.
    """

    def __init__(self, operations: Sequence[Operation], in_float32: Callable[[], WideNumbers]) -> None:
        self._in_float32 = functools.cache(in_float32)
        self.numbers: dict[tuple[int, int], float] = {}
        self._found: dict[Any, LostConstant] = {}
        self._known: dict[int, _Known] = {}
        self._equalities: set[int] = set()
        self._ones: dict[Any, list[tuple[int, int, float]]] = defaultdict(list)
        for operation in operations:
            self._see(*operation)
        # JAX has ones of its own: a line's number is that of the only one that it reads.
        for (eqn, place, number), *others in self._ones.values():
            if not others and number != 1:
                self.numbers[eqn, place] = number

    def found(self) -> tuple[LostConstant, ...]:
        """What was found, each line once."""
        return tuple(self._found.values())

    def _see(self, eqn: Any, site: Site, operands: Sequence[ValueInfo], results: Sequence[ValueInfo]) -> None:
        name, dtype = eqn.primitive.name, ir.dtype_of(eqn.outvars[0]) if eqn.outvars else None
        known = [self._of(atom, info) for atom, info in zip(eqn.invars, operands, strict=True)]
        if name in _VIEWS and len(operands) == 1:
            (passed,) = known
            if passed.wide is not None and is_half(dtype) and not is_half(ir.dtype_of(eqn.invars[0])):
                passed = passed._replace(constant=_lost_in_cast(passed.wide, dtype), wide=None)
            self._known[results[0].key] = passed
            return
        wide = [one.wide for one in known[1:] if one.wide is not None]
        if name == "select_n" and wide and is_floating(dtype) and not is_half(dtype):
            # What a mask is filled with before it is cast.
            self._known[results[0].key] = _Known(wide=np.concatenate([np.ravel(value) for value in wide]))
        if name == "eq" and is_half(ir.dtype_of(eqn.invars[0])):
            self._equalities.add(results[0].key)
        are_known = all(one.constant is not None or one.wide is not None for one in known[1:])
        if name == "select_n" and are_known and operands[0].key in self._equalities:
            return  # JAX's own derivative of a maximum.
        if name == "div" and is_half(dtype):
            known[1] = self._as_divisor(known[1], eqn, dtype)
        for place, one in enumerate(known):
            if one.constant is not None:
                self._read(eqn, site, place, one.constant)

    def _of(self, atom: Any, info: ValueInfo) -> _Known:
        value, dtype = info.constant, ir.dtype_of(atom)
        if value is None or ir.is_traced(value):
            return self._known.get(info.key, _Known())
        if is_half(dtype) and np.ndim(value) == 0 and (float(value) in (0, 1) or np.isinf(float(value))):
            return _Known(_Constant("", _text(float(value))))
        return _Known(wide=value)

    def _as_divisor(self, known: _Known, eqn: Any, dtype: Any) -> _Known:
        """A divisor; XLA multiplies by the reciprocal of a constant, which may be infinite."""
        value = known.wide
        if value is None or np.ndim(value) or not 0 < abs(float(value)) < 1 / float(jnp.finfo(dtype).max):
            return known
        numbers = (n for n, _ in written_constants(eqn) if _becomes(n, dtype) == _text(float(value)))
        self.numbers[id(eqn), 1] = number = next(numbers, float(value))
        return _Known(_Constant(f"1 / {abs(number):.3g}", "inf"))

    def _read(self, eqn: Any, site: Site, place: int, constant: _Constant) -> None:
        """Takes note of an operation that reads a constant."""
        name, dtype = eqn.primitive.name, ir.dtype_of(eqn.invars[place])
        written, becomes, cast_to = constant
        if name in (_BOUNDED if written and becomes not in ("0", "1") else ()) or name in _COMPARISONS:
            return
        if becomes == "1" and name not in _SCALES | _CLIPS:
            # No decay that never decays, but the rounding of a number like any other.
            numbers = {} if written else dict(written_constants(eqn))
            lost = [n for n in numbers if _is_lost(n, becomes, dtype)]
            self._ones[callers(eqn)[:1]].append((id(eqn), place, 1 if site.backward else next(iter(lost), 1)))
            return
        found = LostConstant(
            name, site.path, site.line, site.backward, cast_to or str(dtype), written, becomes
        )
        if not written:
            numbers = written_constants(eqn)
            if name in _NAMED and not any(_is_lost(n, becomes, dtype) for n, _ in numbers):
                numbers += self._by_another_name(eqn, site, place, becomes)
            lost = [(n, text) for n, text in numbers if _is_lost(n, becomes, dtype)]
            if len(lost) > 1:  # On one line.
                number = self._in_float32().read.get((id(eqn), place))
                lost.sort(key=lambda one: np.float32(one[0]) != number)
            if not lost:
                return  # Unknown, or written so.
            self.numbers[id(eqn), place] = lost[0][0]
            found = dataclasses.replace(found, written=lost[0][1])
        self._keep(found)

    def _by_another_name(self, eqn: Any, site: Site, place: int, becomes: str) -> list[tuple[float, str]]:
        """The number that an operation reads in float32, with its text."""
        # JAX's own constants are no user's, such as the zeros of derivatives; of an optimizer's decay what it
        # returns shows the loss.
        is_jaxs = eqn.primitive.name in _CLIPS and is_in_file_of(eqn, jax.nn.relu)
        is_derivative = eqn.primitive.name == "select_n" and site.backward and becomes == "0"
        if is_jaxs or is_derivative or (becomes != "0" and is_written_in(eqn, "optax")):
            return []
        wide = self._in_float32()
        number = wide.read.get((id(eqn), place), np.nan)
        if becomes == "1" and site.times == 1 and site.counted and eqn.primitive.name in _SCALES:
            # A factor near 1 loses less than a rounding, unless it is one of many: a decay.
            line = wide.of_lines.get(callers(eqn)[:1], ())
            if not any(np.isclose(other, 1 - number, rtol=1e-2, atol=0) for other in line):
                if _is_lost(number, becomes, ir.dtype_of(eqn.invars[place])):
                    self.numbers[id(eqn), place] = number
                return []
        sign = PYTHON_OPERATORS.get(eqn.primitive.name, "") if place else ""
        return [(number, f"{sign} {number:.7g}".strip())]

    def _keep(self, found: LostConstant) -> None:
        # The backward pass reads it again; a cast of it has another spelling.
        what: Any = found.written
        with contextlib.suppress(ValueError):
            what = float(what)
        key = (found.line, found.dtype, found.becomes, what)
        known = self._found.setdefault(key, found)
        if not found.backward and found.path not in (known.path, *known.others):
            self._found[key] = dataclasses.replace(known, others=(*known.others, found.path))


def lost_constants_of(jaxpr: Any, program: Callable[..., Any], arrays: Sequence[Any]) -> LostConstants:
    """What is lost in a program.

    A trace in half precision shows what became of a number; one whose modules and half arguments are float32
    shows the number, whatever it was called.

    Args:
      jaxpr: of the program as it is.
      program, arrays: the program, and what it takes.
    """

    def in_float32() -> WideNumbers:
        # A program that cannot be traced so, such as one that asserts its dtypes, has none to show.
        with contextlib.suppress(Exception), without_overflow_warnings(), TRIAL(PolicyMap("float32")):
            types = list(map(_in_float32, arrays))
            return wide_numbers(jaxpr, jax.make_jaxpr(program)(types))
        return WideNumbers()

    return LostConstants(Walk(jaxpr).operations, in_float32)


def _in_float32(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, jnp.float32 if is_half(array.dtype) else array.dtype)


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
    return _Constant(written if written != "1" else str(array[first]), _text(float(cast[first])), str(dtype))


def _becomes(number: float, dtype: Any) -> str:
    with np.errstate(over="ignore", under="ignore"):
        return _text(float(np.asarray(number).astype(dtype)))


def _is_lost(number: float, becomes: str, dtype: Any) -> bool:
    """Whether a number is another one in half precision, namely infinite, zero or one as said."""
    return np.isfinite(number) and number not in (0, 1) and _becomes(number, dtype) == becomes


def _text(number: float) -> str:
    return "0" if number == 0 else f"{number:g}"


_VIEWS, _COMPARISONS = HAVING[Trait.VIEW], HAVING[Trait.COMPARISON]
_BOUNDED = HAVING[Trait.BOUNDED]

#: Operations by which values are kept between bounds: one of 1 - 1e-7 that is 1 lets log(1 - x) be infinite.
_CLIPS = HAVING[Trait.CLIPS]

#: Operations whose numbers may have any name in the source.
_NAMED = frozenset({*PYTHON_OPERATORS, *_CLIPS, "select_n"})

#: Operations in which a factor or base of 1 is no other one nearby: a decay of 0.9999 never decays.
_SCALES = frozenset({"mul", "pow"})
