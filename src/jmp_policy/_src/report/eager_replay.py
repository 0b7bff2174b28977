"""Running a traced program operation by operation, to find the first one that made infinities or NaNs.

A non-finite value is no fault by itself: masks are filled with -inf, and a softmax makes zeros of them. So
the search starts from results that are not finite, and leaves constants of the program alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_number
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir, walk
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.float32_replay import replay_equation, to_float32
from jmp_policy._src.jaxpr.interpreter import Interpreter
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.report import progress

#: Stands for where a non-finite constant of the program comes from.
_CONSTANT = -1


@dataclasses.dataclass(frozen=True)
class Range:
    """What is in an array: whether it holds NaNs or infinities, and its largest finite magnitude."""

    nan: bool
    infinite: bool
    largest: float

    @property
    def is_finite(self) -> bool:
        """Whether every number is finite; so for arrays without numbers."""
        return not (self.nan or self.infinite)


class ReplayedEqn(NamedTuple):
    """One operation that ran.

    Args:
      eqn: its equation.
      site: where it is.
      reads, writes: places of its operands and results in the replay's values.
    """

    eqn: Any
    site: walk.Site
    reads: list[int]
    writes: list[int]


class EagerReplay(Interpreter):
    """The values of a program that ran operation by operation.

    Args:
      jaxpr: a closed jaxpr; calls and branches are followed, loops and shard_maps run as a whole.
      arguments: its arguments.
      numbers: of half constants that are other numbers in the source, those numbers, as of `LostConstants`;
        float32 computes with them.
      site: where the program is called.

    Attributes:
      values: every value, in the order of creation; the arguments first.
      steps: every operation, in order.
      results: places of the program's results.
      makers: by place, the step that made a value.
      constants: places of constants of the program.
      origins: by place, the index of the argument that a value is, casts and reshapes aside.
    """

    def __init__(
        self,
        jaxpr: Any,
        arguments: Sequence[Any],
        numbers: Mapping[tuple[int, int], float],
        site: walk.Site | None = None,
    ):
        self.numbers = numbers
        self.values: list[Any] = []
        self.steps: list[ReplayedEqn] = []
        self.makers: dict[int, ReplayedEqn] = {}
        self.constants: set[int] = set()
        self._float32_values: dict[int, Any] = {}
        self._are_masks: dict[int, bool] = {}
        self.arguments = [self._add(value) for value in arguments]
        self.origins = {place: i for i, place in enumerate(self.arguments)}
        self.results = self.run(jaxpr, self.arguments, site or walk.Site())

    @functools.cached_property
    def ranges(self) -> list[Range]:
        """What is in each value."""
        return list(map(range_of, self.values))

    def _add(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def constant(self, atom: Any, value: Any) -> int:
        """The place of a constant."""
        if isinstance(atom, compat.Literal):
            value = np.asarray(value, ir.dtype_of(atom))
        place = self._add(value)
        self.constants.add(place)
        return place

    def at(self, eqn: Any, around: walk.Site) -> walk.Site:
        """The site of an operation."""
        return walk.site_of(eqn, around)

    def enters(self, eqn: Any, kind: Kind, values: list[int]) -> bool:
        """Whether it is followed: calls and branches are."""
        return kind not in _WHOLE

    def call(self, eqn: Any, values: list[int], where: walk.Site) -> Sequence[int]:
        """Runs what is called; of branches by platform the one that is taken."""
        is_branch = calls.kind_of(eqn) is Kind.PLATFORM
        return self.cond(eqn, values, where) if is_branch else super().call(eqn, values, where)

    checkpoint = Interpreter.call

    def cond(self, eqn: Any, values: list[int], where: walk.Site) -> Sequence[int]:
        """Runs the branch that is taken."""
        branches = control_flow.branches(eqn)
        index = min(max(int(self.values[values[0]]), 0), len(branches) - 1)
        return self.run(branches[index], values[1:], where)

    def operation(self, eqn: Any, values: list[int], where: walk.Site) -> list[int]:
        """Does an operation, and keeps what it gives."""
        run = _as_a_whole(eqn, functools.partial(self.bind, eqn))
        writes = [self._add(out) for out in run(*(self.values[place] for place in values))]
        self.steps.append(step := ReplayedEqn(eqn, where, values, writes))
        self.makers.update(dict.fromkeys(writes, step))
        progress.step(f"operation {len(self.steps)}")
        if eqn.primitive.name in _VIEWS and len(values) == 1 and values[0] in self.origins:
            self.origins[writes[0]] = self.origins[values[0]]
        return writes

    def first_nonfinite_step(self, through_loops: bool = False) -> int | None:
        """The first step that made a non-finite value which reached a non-finite result.

        Masks are it only where nothing else is: those of -1e9 are infinite in float16, and do no harm.
        Results that are arguments, passed on, count only if all are: a step may return the best loss so far,
        which is infinite at first.

        Args:
          through_loops: whether a mask may be what made the results of a loop infinite, or the loop is.

        Returns:
          Its index; of an argument that was not finite to begin with, `-2 - index`; None when all results are
          finite, or non-finite constants were returned unchanged.
        """
        # By place of a non-finite value: the step or argument that it comes from.
        sources = {place: _CONSTANT for place, found in enumerate(self.ranges) if not found.is_finite}
        sources.update((p, -2 - index) for index, p in enumerate(self.arguments) if p in sources)
        for index, step in enumerate(self.steps):
            # An infinite constant that was written as another number is made where it is read.
            reads = [p for i, p in enumerate(step.reads) if (id(step.eqn), i) not in self.numbers]
            bad = [place for place in reads if place in sources]
            known = [sources[place] for place in bad if sources[place] != _CONSTANT]
            source = min(known, key=self._rank, default=_CONSTANT)
            is_whole = calls.kind_of(step.eqn) in _WHOLE
            may_be_inside = not through_loops and is_whole and self._rank(source)[0]
            for place in step.writes:
                if place not in sources:
                    continue
                new_nan = self.ranges[place].nan and not any(self.ranges[b].nan for b in bad)
                if known and not may_be_inside:
                    sources[place] = source
                elif not bad or new_nan or may_be_inside:
                    sources[place] = index
        computed = [place for place in self.results if place not in self.origins]
        for places in (computed, self.results):
            found = [sources[p] for p in places if sources.get(p, _CONSTANT) != _CONSTANT]
            if found:
                return min(found, key=self._rank)
        return None

    def _rank(self, source: int) -> tuple[bool, int]:
        """The order of what non-finite values come from: first what is no mask."""
        if source < 0:
            return source != _CONSTANT and is_mask(self.values[self.arguments[-2 - source]]), source
        if source not in self._are_masks:
            places = self.steps[source].writes
            self._are_masks[source] = all(self._is_filled(p) and is_mask(self.values[p]) for p in places)
        return self._are_masks[source], source

    def _is_filled(self, place: int) -> bool:
        """Whether a value has a large negative number of the program, or of an argument, as it is."""
        if (step := self.makers.get(place)) is not None:
            return step.eqn.primitive.name in _OF_MASKS and any(map(self._is_filled, step.reads))
        array = np.asarray(_read(self.values[place]))
        return bool(jax.numpy.issubdtype(array.dtype, np.floating) and (array <= -_LARGE).any())

    def feeding(self, results: Sequence[int]) -> set[int]:
        """The places of the values that some results are computed from, those included."""
        needed = set(results)
        for step in reversed(self.steps):
            if not needed.isdisjoint(step.writes):
                needed.update(step.reads)
        return needed

    def in_float32(self, place: int) -> Any:
        """A value as the program would have it if it computed in float32 throughout."""
        if not self._float32_values:
            given = [*self.arguments, *self.constants]
            self._float32_values = {p: to_float32(self.values[p]) for p in given}
            for step in self.steps:
                run = _as_a_whole(step.eqn, functools.partial(replay_equation, step.eqn))
                outs = run([self.read_in_float32(step, i) for i in range(len(step.reads))])
                self._float32_values.update(zip(step.writes, outs, strict=True))
        return self._float32_values[place]

    def read_in_float32(self, step: ReplayedEqn, i: int) -> Any:
        """An operand of a step in float32; a constant as it is written."""
        value, number = self.in_float32(step.reads[i]), self.numbers.get((id(step.eqn), i))
        return value if number is None else jax.numpy.full_like(value, number)


def _as_a_whole(eqn: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """What does an operation; JAX would compile each one inside a shard_map for itself."""
    return jax.jit(run) if calls.kind_of(eqn) is Kind.SHARD_MAP else run


def is_mask(value: Any) -> bool:
    """Whether what is not finite in an array is -inf, as in a mask."""
    array = np.asarray(_read(value))
    return bool((array[~np.isfinite(array)] == -np.inf).all())


def _read(value: Any) -> Any:
    return value[...] if isinstance(value, jax.Ref) else value


def range_of(value: Any) -> Range:
    """What is in an array; nothing in one that holds no numbers."""
    value = _read(value)
    dtype = getattr(value, "dtype", None)
    if dtype is None or not is_number(dtype):
        return Range(nan=False, infinite=False, largest=0.0)
    array = np.asarray(value)
    if not jax.numpy.issubdtype(dtype, jax.numpy.complexfloating):
        array = array.astype(np.float64)
    magnitude = np.abs(array)
    largest = magnitude.max(initial=0.0, where=np.isfinite(magnitude))
    return Range(bool(np.isnan(magnitude).any()), bool(np.isinf(magnitude).any()), float(largest))


#: What runs as a whole; trip by trip in a replay of its own where it is at fault.
LOOPS = (Kind.SCAN, Kind.WHILE)
_WHOLE = (*LOOPS, Kind.SHARD_MAP)

#: Operations after which a parameter is still recognised.
_VIEWS = HAVING[Trait.VIEW]

#: A mask is filled with a number below this times -1, which float16 does not hold.
_LARGE = 65504

#: What a mask is made by.
_OF_MASKS = HAVING[Trait.EXACT] | {"convert_element_type"}
