"""Finds the first non-finite value of a loss and its gradients, or of any function, and says what to do."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import calls, control_flow
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.source_lines import is_called_by
from jmp_policy._src.loss_scaling.state import find_loss_scale
from jmp_policy._src.report import progress
from jmp_policy._src.report.diagnosis import Diagnosis, Operand, Zero, advice
from jmp_policy._src.report.eager_replay import VIEWS, EagerReplay, ReplayedEqn, on_devices, range_of
from jmp_policy._src.report.function import (
    Function,
    as_function,
    as_loss_scale,
    named_results,
    returns_scalar,
    trained_arguments,
    value_and_gradients,
)
from jmp_policy._src.report.lost_constants import OF_MASK, LostConstant, lost_in, without_overflow_warnings
from jmp_policy._src.report.pieces import Pieces
from jmp_policy._src.report.trials import Mending


def diagnose(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    scale: Any = 1.0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Diagnosis:
    """Finds the first non-finite value of a function, and whether float32 would have it too.

    Of a loss that is the first one of its forward and backward pass. Of any other function, such as a whole
    training step, it is the first one that reaches the result: `diagnose(train_step, state, batch)`. None
    may reach that of a step that skips bad updates: diagnose its loss.

    Where a result is not finite it runs operation by operation, which is slow, and holds every value: call it
    once training has failed, with the parameters and the batch of that step. Infinities that end as zeros,
    such as those of masks, are no fault.

    Args:
      loss_fn: a loss function `(params, *args) -> scalar`, of NNX modules `(model, *args) -> scalar`; or any
        function of pytrees that returns something else.
      params: a pytree of arrays, or an NNX model; of other functions than losses, the first argument.
      args, kwargs: the rest of its arguments.
      scale: what the loss is multiplied by: a number, a loss scale, or an optimizer state that holds one.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A `Diagnosis`; `print` shows it.

    Raises:
      TypeError: for a loss that is no scalar where `scale` or `has_aux` is given, and types in the place of
        arrays.
      ValueError: for parameters without floating arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(w, x):
      ...     return jnp.square(w.astype(jnp.float16) * x).astype(jnp.float32).sum()
      >>> found = diagnose(loss_fn, jnp.float32(300.0), jnp.float16(1.0))
      >>> found.kind, found.operation, found.largest_in_float32
      ('overflow', 'square', 90000.0)
    """
    function = as_function(loss_fn, (params, *args), kwargs, "diagnose")
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays):
        raise TypeError("diagnose runs the function: it needs arrays, not jax.ShapeDtypeStructs.")
    with without_overflow_warnings(), progress.showing("diagnose"):
        if has_aux or not _is_one(scale) or returns_scalar(function):
            return _of_loss(function, float(as_loss_scale(scale).loss_scale), has_aux)
        return _of_program(function, (params, args, kwargs))


def _of_loss(function: Function, loss_scale: float, has_aux: bool) -> Diagnosis:
    """Diagnoses a loss and its gradients."""
    trained = trained_arguments(function, "diagnose")
    jaxpr = jax.make_jaxpr(value_and_gradients(function, trained, loss_scale, has_aux))(function.arrays)
    results, replay = _run(jaxpr, function.arrays)
    loss = float(np.asarray(results[0]).astype(np.float64))
    found = Diagnosis(function.name, True, loss, loss_scale, constants=lost_in(jaxpr).found())
    if replay is None:
        return found
    names = ["the loss", "the scaled loss", *(function.arguments[i].path for i in trained)]
    mending = Mending(function, loss_scale, has_aux)
    return _diagnosed(found, replay, function, names, replay.results[:2], mending)


def _of_program(function: Function, given: Any) -> Diagnosis:
    """Diagnoses a function whose result is no loss, such as a whole training step."""
    program, names = named_results(function)
    jaxpr = jax.make_jaxpr(program)(function.arrays)
    try:
        loss_scale = float(find_loss_scale(given).loss_scale)
    except (TypeError, ValueError):  # None, or several.
        loss_scale = 1.0
    found = Diagnosis(function.name, True, math.nan, loss_scale, constants=lost_in(jaxpr).found())
    _, replay = _run(jaxpr, function.arrays)
    return found if replay is None else _diagnosed(found, replay, function, names, replay.results)


def _run(jaxpr: Any, arrays: Sequence[Any]) -> tuple[list[Any], EagerReplay | None]:
    """The results of a program and, unless all are known to be finite, what each operation made.

    One compiled program is sooner done than each operation on its own. A program with side effects is left to
    those, so that it runs once.
    """
    if not jaxpr.effects:
        results = Pieces(jaxpr, every_rounding=True)(arrays)
        if all(range_of(value).is_finite for value in results):
            return results, None
    replay = EagerReplay(jaxpr, arrays)
    return [replay.values[place] for place in replay.results], replay


def _is_one(scale: Any) -> bool:
    return isinstance(scale, int | float) and scale == 1


def _diagnosed(
    found: Diagnosis,
    replay: EagerReplay,
    function: Function,
    names: Sequence[str],
    forward: Sequence[int],
    mending: Mending | None = None,
) -> Diagnosis:
    """Adds to a diagnosis the first non-finite value, if a result is not finite.

    Args:
      found: what is known already.
      replay, function: what ran.
      names: of the results.
      forward: places of the results of the forward pass.
      mending: tries rules, of a loss.
    """
    pairs = list(zip(names, replay.results, strict=True))
    bad = tuple(name for name, place in pairs if not replay.ranges[place].is_finite)
    if not bad:
        return found
    found, first = dataclasses.replace(found, finite=False, bad_results=bad), replay.first_nonfinite_step()
    if first is None:
        place = next(p for p in replay.results if not replay.ranges[p].is_finite)
        return dataclasses.replace(
            found,
            kind="argument",
            path="a constant of the program",
            dtype=str(replay.values[place].dtype),
            shape=tuple(replay.values[place].shape),
            is_nan=replay.ranges[place].nan,
            advice="The program itself holds a constant that is not finite, and returns it.",
        )
    if first < -1:
        return _of_argument(found, replay, -2 - first, function)
    arguments = {place: function.arguments[i].path for place, i in replay.origins.items()}
    return of_step(found, Fault(replay, first, arguments, replay.feeding(forward), {}), mending)


def _of_argument(found: Diagnosis, replay: EagerReplay, index: int, function: Function) -> Diagnosis:
    argument, place = function.arguments[index], replay.arguments[index]
    value = replay.values[place]
    advice = "Clean the data: neither a loss scale nor a policy can help."
    if argument.position == 0:
        advice = (
            "An update that was not skipped made it: train with loss_scaled, from the last good checkpoint."
        )
    if is_half(value.dtype) and not replay.ranges[place].nan:
        advice += f" If it was finite before its cast to {value.dtype} (a mask of -1e9): {OF_MASK}"
    return dataclasses.replace(
        found,
        kind="argument",
        path=argument.path,
        dtype=str(value.dtype),
        shape=tuple(value.shape),
        is_nan=replay.ranges[place].nan,
        advice=advice,
    )


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
        """The step itself."""
        return self.replay.steps[self.at]


def of_step(found: Diagnosis, fault: Fault, mending: Mending | None = None) -> Diagnosis:
    """Says what happened at a step of a replay, or inside it, and what helps.

    Loops and shard_maps run as a whole at first. If the value was made in one, it runs again: a loop trip by
    trip, a shard_map with the devices as an axis. The operation inside takes its place.
    """
    while True:
        _note_largest(fault.replay, fault.at, fault.before)
        inside = _inside(fault)
        if inside is None:
            return _described(found, fault, mending)
        fault = inside


def _inside(fault: Fault) -> Fault | None:
    """The fault within a loop or shard_map; notes the largest magnitudes that are met in search of it.

    There is no such fault in other operations, nor where each trip of a loop is finite by itself.
    """
    replay, step, kind = fault.replay, fault.step, calls.kind_of(fault.step.eqn)
    if replay.is_stacked or kind not in (Kind.SHARD_MAP, Kind.SCAN, Kind.WHILE):
        return None
    if kind is Kind.SHARD_MAP:
        runs = iter([(fault.trip, on_devices(step, [replay.values[p] for p in step.reads]))])
    else:
        runs = enumerate(_trips(replay, step))
    for trip, inner in runs:
        first = inner.first_nonfinite_step()
        if first is not None and first >= 0:
            return Fault(inner, first, {}, _forward_inside(step, inner, fault.forward), fault.before, trip)
        if kind is not Kind.SHARD_MAP:
            _note_largest(inner, len(inner.steps), fault.before)
    return None


def _described(found: Diagnosis, fault: Fault, mending: Mending | None) -> Diagnosis:
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
    # A smaller loss scale is tried by the next step of training.
    is_for_policy = kind != "not finite" and not in_optimizer and not (scaled and found.loss_scale > 1)
    if mending is None or not is_for_policy:
        return dataclasses.replace(found, advice=advice(found, scaled, in_optimizer))
    mended = mending.best([found.path if found.zero is None else found.zero.path])
    found = dataclasses.replace(
        found,
        rule={} if mended is None else mended.rule,
        tried=tuple(mending.tried),
        error_after=math.nan if mended is None else mended.error,
    )
    return dataclasses.replace(found, advice=advice(found, scaled, in_optimizer, mended))


def _zero(replay: EagerReplay, step: ReplayedEqn | None) -> Zero | None:
    if step is None:
        return None
    site, dtype = step.site, replay.values[step.writes[0]].dtype
    return Zero(step.eqn.primitive.name, site.path, site.line, site.backward, str(dtype))


def _lost_constant(found: Diagnosis, step: ReplayedEqn, is_zero: bool) -> LostConstant | None:
    """The constant in the line of a step that half precision made zero, or infinite."""
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
    """The places of values in a trip of a loop, or a shard_map, that the loss is computed from."""
    first, carries = 0, 0
    if calls.kind_of(step.eqn) is not Kind.SHARD_MAP:
        loop = control_flow.loop(step.eqn, step.reads)
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
    """The shape of a value, on one device of a shard_map."""
    return tuple(replay.values[place].shape)[1 if replay.is_stacked else 0 :]


def _note_largest(replay: EagerReplay, index: int, before: dict[Any, tuple[float, str]]) -> None:
    """Notes by dtype the largest finite magnitude that the operations up to a step made, and where."""
    for step in replay.steps[:index]:
        for place in step.writes:
            largest, dtype = replay.ranges[place].largest, getattr(replay.values[place], "dtype", None)
            if largest > before.get(dtype, (0.0, ""))[0]:
                before[dtype] = (largest, f"{step.eqn.primitive.name} in {step.site.place}")


def _trips(replay: EagerReplay, step: ReplayedEqn) -> Iterator[EagerReplay]:
    """Yields the trips of a loop, each as a replay of its own."""
    loop = control_flow.loop(step.eqn, [replay.values[place] for place in step.reads])
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
    """The operation that made the zero at which another one is not finite.

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
    """The operation that reads the infinite half constant from which a step was computed, if any."""
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
    """Where a value is zero which in float32 is not."""
    value = replay.values[place]
    if not np.issubdtype(np.asarray(replay.in_float32(place)).dtype, np.floating):
        return np.zeros(np.shape(value), bool)
    return (np.asarray(value) == 0) & (np.asarray(replay.in_float32(place)) != 0)


def _first_lost(
    replay: EagerReplay, makers: dict[int, ReplayedEqn], place: int, lost: np.ndarray
) -> ReplayedEqn | None:
    """The operation that made zeros of operands that were not lost; None for an argument's zeros."""
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
    """The addition of a constant that is zero in half (an epsilon) that a zero is the result of."""
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
