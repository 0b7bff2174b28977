"""Describes the operation that made the first non-finite value, be it inside a loop or a shard_map."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import calls
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.source_lines import is_called_by
from jmp_policy._src.report.diagnose.diagnosis import Diagnosis, Operand, Zero, advice
from jmp_policy._src.report.diagnose.eager_replay import VIEWS, EagerReplay, ReplayedEqn, on_devices, range_of
from jmp_policy._src.report.lost_constants import LostConstant


class Fault(NamedTuple):
    """The first step that made a non-finite value, and what is known around it.

    Args:
      replay, at: the step, by its place in the replay.
      names: of places that are arguments.
      forward: places of values that the loss is computed from.
      before: by dtype, the largest magnitude before the step, and where.
      trip: of a loop, in which it happened; None outside of loops.
    """

    replay: EagerReplay
    at: int
    names: dict[int, str]
    forward: set[int]
    before: dict[Any, tuple[float, str]]
    trip: int | None = None

    @property
    def step(self) -> ReplayedEqn:
        """Returns the step itself."""
        return self.replay.steps[self.at]


def of_step(found: Diagnosis, fault: Fault) -> Diagnosis:
    """Says what happened at a step of a replay, or inside it.

    Loops and shard_maps run as a whole at first. If the value was made in one, it runs again: a loop trip by
    trip, a shard_map with the devices as an axis. The operation inside takes its place.
    """
    fault = fault._replace(before=_largest(fault.replay, fault.at, fault.before))
    while True:
        inside, before = _inside(fault)
        if inside is None:
            return _described(found, fault._replace(before=before))
        fault = inside._replace(before=_largest(inside.replay, inside.at, inside.before))


def _inside(fault: Fault) -> tuple[Fault | None, dict[Any, tuple[float, str]]]:
    """Returns the fault within a loop or shard_map, and the largest magnitudes that were met in search of it.

    There is no such fault in other operations, nor where each trip of a loop is finite by itself.
    """
    replay, step, kind = fault.replay, fault.step, calls.kind_of(fault.step.eqn)
    before = fault.before
    if replay.is_stacked or kind not in (Kind.SHARD_MAP, Kind.SCAN, Kind.WHILE):
        return None, before
    if kind is Kind.SHARD_MAP:
        runs = iter([(fault.trip, on_devices(step, [replay.values[p] for p in step.reads]))])
    else:
        runs = enumerate(_trips(replay, step))
    for trip, inner in runs:
        first = inner.first_nonfinite_step()
        if first is not None and first >= 0:
            return Fault(inner, first, {}, _forward_inside(step, inner, fault.forward), before, trip), before
        if kind is not Kind.SHARD_MAP:
            before = _largest(inner, len(inner.steps), before)
    return None, before


def _described(found: Diagnosis, fault: Fault) -> Diagnosis:
    """Adds to a diagnosis what a step did to its operands, and what to do about it."""
    replay, step = fault.replay, fault.step
    place = next(p for p in step.writes if not replay.ranges[p].is_finite)
    value = replay.values[place]
    in_float32 = range_of(replay.in_float32(place))
    largest, where = fault.before.get(value.dtype, (0.0, ""))
    zero = underflow_before(replay, step, in_float32.is_finite)
    infinite = infinite_constant(replay, step)
    kind = "underflow" if zero is not None else "overflow" if in_float32.is_finite else "not finite"
    constant = _lost_constant(found, zero or infinite or step, is_zero=zero is not None)
    if (
        kind == "not finite"
        and infinite is not None
        and (constant or step.eqn.primitive.name in ("mul", "div"))
    ):
        kind = "overflow"
    found = dataclasses.replace(
        found,
        kind=kind,
        path=step.site.path,
        line=step.site.line,
        # Derivatives such as sqrt's 1 / (2 sqrt(x)) are computed before the transpose begins.
        backward=step.site.backward or place not in fault.forward,
        operation=step.eqn.primitive.name,
        dtype=str(value.dtype),
        shape=_shape(replay, place),
        is_nan=replay.ranges[place].nan,
        operands=tuple(_operand(replay, p, fault.names.get(p, "")) for p in step.reads),
        largest_before=largest,
        largest_before_place=where,
        largest_in_float32=in_float32.largest if in_float32.is_finite else math.nan,
        trip=fault.trip,
        zero=_zero(replay, zero),
        constant=constant,
        has_infinite_constant=infinite is not None,
    )
    scaled, in_optimizer = step.site.backward, is_called_by(step.eqn, "optax")
    return dataclasses.replace(found, advice=advice(found, scaled, in_optimizer))


def _zero(replay: EagerReplay, step: ReplayedEqn | None) -> Zero | None:
    if step is None:
        return None
    site, dtype = step.site, replay.values[step.writes[0]].dtype
    return Zero(step.eqn.primitive.name, site.path, site.line, site.backward, str(dtype))


def _lost_constant(found: Diagnosis, step: ReplayedEqn, is_zero: bool) -> LostConstant | None:
    """Returns the constant in the line of a step that half precision made zero, or infinite."""
    name = step.eqn.primitive.name
    for constant in found.constants:
        is_kind = (constant.becomes == "0") == is_zero
        # What is cast before another operation reads it has the cast's line.
        if (
            is_kind
            and constant.line == step.site.line
            and name in (constant.operation, "convert_element_type")
        ):
            return constant
    return None


def _forward_inside(step: ReplayedEqn, inner: EagerReplay, forward: set[int]) -> set[int]:
    """Returns the places of values in a trip of a loop, or a shard_map, that the loss is computed from."""
    first, carries = 0, 0
    if calls.kind_of(step.eqn) is not Kind.SHARD_MAP:
        loop = calls.loop(step.eqn, step.reads)
        first, carries = len(loop.fixed), len(loop.start)
    wanted = {result for result, write in zip(inner.results, step.writes, strict=True) if write in forward}
    starts = inner.arguments[first : first + carries]
    while True:
        needed = inner.feeding(list(wanted))
        # What a trip passes to the next one.
        more = {r for start, r in zip(starts, inner.results, strict=False) if start in needed} - wanted
        if not more:
            return needed
        wanted |= more


def _operand(replay: EagerReplay, place: int, name: str) -> Operand:
    value = replay.values[place]
    return Operand(name, str(value.dtype), _shape(replay, place), replay.ranges[place].largest)


def _shape(replay: EagerReplay, place: int) -> tuple[int, ...]:
    """Returns the shape of a value, on one device of a shard_map."""
    return tuple(replay.values[place].shape)[1 if replay.is_stacked else 0 :]


def _largest(
    replay: EagerReplay, index: int, before: dict[Any, tuple[float, str]]
) -> dict[Any, tuple[float, str]]:
    """Returns, by dtype, the largest finite magnitude that the operations up to a step made, and where."""
    found = dict(before)
    for step in replay.steps[:index]:
        for place in step.writes:
            largest, dtype = replay.ranges[place].largest, getattr(replay.values[place], "dtype", None)
            if largest > found.get(dtype, (0.0, ""))[0]:
                found[dtype] = (largest, f"{step.eqn.primitive.name} in {step.site.place}")
    return found


def _trips(replay: EagerReplay, step: ReplayedEqn) -> Iterator[EagerReplay]:
    """Yields the trips of a loop, each as a replay of its own."""
    loop = calls.loop(step.eqn, [replay.values[place] for place in step.reads])
    trips: Iterable[int] = itertools.count() if loop.trips is None else range(loop.trips)
    if loop.trips is not None and step.eqn.params["reverse"]:
        trips = range(loop.trips - 1, -1, -1)
    carry = loop.start
    for i in trips:
        if loop.test is not None:
            test = EagerReplay(loop.test, [*loop.tested, *carry], step.site)
            if not bool(test.values[test.results[0]]):
                return
        inner = EagerReplay(loop.body, [*loop.fixed, *carry, *(x[i] for x in loop.xs)], step.site)
        yield inner
        carry = [inner.values[place] for place in inner.results[: len(carry)]]


def underflow_before(replay: EagerReplay, step: ReplayedEqn, finite_in_float32: bool) -> ReplayedEqn | None:
    """Returns the operation that made the zero at which another one is not finite.

    Args:
      replay: what ran.
      step: the operation that made the first non-finite value.
      finite_in_float32: whether float32 would give a finite value there.

    Returns:
      The operation whose result is zero in half precision and not in float32, or the addition of a constant
      that is zero in half; None where no zero was made so. An argument that is zero is its reader's.
    """
    name = step.eqn.primitive.name
    if name not in _POLES:
        return None
    reads = step.reads[1:] if name in _DIVISIONS else step.reads
    makers = {write: made for made in replay.steps for write in made.writes}
    if finite_in_float32:
        for place in reads:
            lost = _lost(replay, place)
            if lost.any():
                return _first_lost(replay, makers, place, lost) or step
        return None
    epsilons = (_epsilon(replay, makers, place) for place in reads)
    return next((made for made in epsilons if made is not None), None)


def infinite_constant(replay: EagerReplay, step: ReplayedEqn) -> ReplayedEqn | None:
    """Returns the operation that reads the infinite half constant from which a step was computed, if any."""
    makers = {write: made for made in replay.steps for write in made.writes}
    steps, seen = [step], set()
    while steps:
        step = steps.pop()
        for place in step.reads:
            if replay.ranges[place].is_finite or place in seen:
                continue
            seen.add(place)
            is_half_constant = replay.is_constant(place) and is_half(replay.values[place].dtype)
            # A largest value is searched for from -inf on.
            if is_half_constant and step.eqn.primitive.name not in ("max", "min"):
                return step
            if place in makers:
                steps.append(makers[place])
    return None


def _lost(replay: EagerReplay, place: int) -> np.ndarray:
    """Returns where a value is zero which in float32 is not."""
    value = replay.values[place]
    if not np.issubdtype(np.asarray(replay.in_float32(place)).dtype, np.floating):
        return np.zeros(np.shape(value), bool)
    return (np.asarray(value) == 0) & (np.asarray(replay.in_float32(place)) != 0)


def _first_lost(
    replay: EagerReplay, makers: dict[int, ReplayedEqn], place: int, lost: np.ndarray
) -> ReplayedEqn | None:
    """Returns the operation that made zeros of operands that were not lost; None for an argument's zeros."""
    made = None
    while place in makers:
        made = makers[place]
        for read in made.reads:
            before = _lost(replay, read)
            # The same elements, where the operation goes element by element.
            before = before & lost if before.shape == lost.shape else before
            if before.any():
                place, lost = read, before
                break
        else:
            return made
    return made


def _epsilon(replay: EagerReplay, makers: dict[int, ReplayedEqn], place: int) -> ReplayedEqn | None:
    """Returns the addition of a constant that is zero in half (an epsilon) that a zero is the result of."""
    while place in makers:
        step = makers[place]
        if step.eqn.primitive.name == "add":
            # On the right: Python's sum() begins with 0 on the left.
            constant = step.reads[1]
            zero = not np.asarray(replay.values[constant]).any()
            is_epsilon = replay.is_constant(constant) and zero and is_half(replay.values[constant].dtype)
            return step if is_epsilon else None
        if step.eqn.primitive.name not in _KEEPS_ZERO or len(step.reads) > 1:
            return None
        place = step.reads[0]
    return None


#: Operations for which an operand that was lost to zero is the end; of these, those that divide.
_POLES = HAVING[Trait.POLE]
_DIVISIONS = frozenset({"div", "rem"})

#: Operations that may stand between an epsilon and what it guards.
_KEEPS_ZERO = VIEWS | {"sqrt"}
