"""Finds the first non-finite value of a loss and its gradients, or of any function, and says what to do."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import calls, control_flow
from jmp_policy._src.jaxpr.float32_replay import replay_equation
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.source_lines import is_written_in
from jmp_policy._src.loss_scaling.state import find_loss_scale
from jmp_policy._src.report import progress
from jmp_policy._src.report.diagnosis import OF_COMPILER, Diagnosis, Operand, Zero, advice
from jmp_policy._src.report.eager_replay import (
    LOOPS,
    EagerReplay,
    ReplayedEqn,
    is_mask,
    range_of,
)
from jmp_policy._src.report.function import Function, as_loss_scale, to_run
from jmp_policy._src.report.lost_constants import (
    OF_MASK,
    LostConstant,
    lost_constants_of,
    without_overflow_warnings,
)
from jmp_policy._src.report.lost_operands import underflow_before
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
    function = to_run(loss_fn, (params, *args), kwargs, "diagnose")
    with without_overflow_warnings(), progress.showing("diagnose"):
        is_one = isinstance(scale, int | float) and scale == 1
        if has_aux or not is_one or function.returns_scalar():
            loss_scale = float(as_loss_scale(scale).loss_scale)
            return of_loss(function, loss_scale, has_aux)
        try:
            loss_scale = float(find_loss_scale((params, args, kwargs)).loss_scale)
        except (TypeError, ValueError):  # None, or several.
            loss_scale = 1.0
        return _diagnosed(function, *function.named_results(), loss_scale)


def of_loss(function: Function, loss_scale: float, has_aux: bool) -> Diagnosis:
    """The diagnosis of a loss and its gradients."""
    program, names = function.value_and_gradients("diagnose", loss_scale, has_aux)
    return _diagnosed(function, program, names, loss_scale, Mending(function, loss_scale, has_aux))


def _diagnosed(
    function: Function,
    program: Callable[..., Any],
    names: Sequence[str],
    loss_scale: float,
    mending: Mending | None = None,
) -> Diagnosis:
    """Diagnoses a program, a loss with its gradients or any other.

    Args:
      function: what is diagnosed.
      program, names: to its results, and what these are called.
      loss_scale: what a loss is multiplied by.
      mending: tries rules; None where the program is no loss.
    """
    jaxpr = jax.make_jaxpr(program)(function.arrays)
    names = list(names)  # Of this trace.
    lost = lost_constants_of(jaxpr, program, function.arrays)
    results, replay = _run(jaxpr, function.arrays, lost.numbers)
    loss = math.nan if mending is None else float(np.asarray(results[0]).astype(np.float64))
    found = Diagnosis(function.name, True, loss, loss_scale, constants=lost.found())
    if replay is None:
        return _with_constants_kept(found, mending)
    is_lost = loss_scale > 1 and not math.isfinite(loss)
    if mending is not None and is_lost and replay.ranges[replay.results[0]].is_finite:
        # What single operations show first may be gradients that are large for their scale, and no cause.
        return of_loss(function, 1.0, mending.has_aux)
    pairs = zip(names, replay.results, strict=True)
    bad = [(name, place) for name, place in pairs if not replay.ranges[place].is_finite]
    if not bad:
        joined = tuple(n for n, value in zip(names, results, strict=True) if not range_of(value).is_finite)
        if not joined:
            return _with_constants_kept(found, mending)
        found = dataclasses.replace(found, finite=False, bad_results=joined)
        return dataclasses.replace(found, kind="compiled", advice=OF_COMPILER)
    found = dataclasses.replace(found, finite=False, bad_results=tuple(name for name, _ in bad))
    # A loop that reads a mask may make its own infinite values, or those of the mask.
    for through_loops in (False, True):
        first = replay.first_nonfinite_step(through_loops)
        if first is None or first < 0:
            break
        arguments = {place: function.arguments[i].path for place, i in replay.origins.items()}
        # The loss and the scaled loss are of the forward pass; of other programs everything is.
        forward = replay.feeding(replay.results if mending is None else replay.results[:2])
        fault = Fault(replay, first, arguments, forward, {})
        # Loops ran as a whole. If the value was made in one, it runs again.
        while (inside := _inside(fault)) is not None:
            fault = inside
        is_loop = calls.kind_of(fault.replay.steps[fault.at].eqn) in LOOPS
        if through_loops or not is_loop:
            return _described(found, fault, mending)
    if first is None:
        place, path = bad[0][1], "a constant of the program"
        advised = "The program itself holds a constant that is not finite, and returns it."
    else:
        place, argument = replay.arguments[-2 - first], function.arguments[-2 - first]
        path, advised = argument.path, "Clean the data: neither a loss scale nor a policy can help."
        if argument.position == 0:
            advised = (
                "An update that was not skipped made it: train with loss_scaled, from the last good "
                "checkpoint."
            )
        dtype = replay.values[place].dtype
        if is_half(dtype) and is_mask(replay.values[place]):
            advised += f" If it was finite before its cast to {dtype} (a mask of -1e9): {OF_MASK}"
    return dataclasses.replace(found, kind="argument", path=path, advice=advised, **_array(replay, place))


def _with_constants_kept(found: Diagnosis, mending: Mending | None) -> Diagnosis:
    """Adds the rule that keeps what half precision makes of constants, if there is one."""
    kept = None if mending is None else mending.keeping(found.constants)
    if kept is None:
        return found
    text = f"{kept.text[0].upper()}{kept.text[1:]} keeps these constants as they are written."
    return dataclasses.replace(found, rule=kept.rule, policy=kept.policy, advice=text)


def _run(
    jaxpr: Any, arrays: Sequence[Any], numbers: Mapping[tuple[int, int], float]
) -> tuple[list[Any], EagerReplay | None]:
    """The results of a program and, unless all are known to be finite, what each operation made.

    One compiled program is sooner done than each operation on its own. A program with side effects is left to
    those, so that it runs once.
    """
    if not jaxpr.effects:
        results = Pieces(jaxpr, every_rounding=True)(arrays)
        if all(range_of(value).is_finite for value in results):
            return results, None
        return results, EagerReplay(jaxpr, arrays, numbers)
    replay = EagerReplay(jaxpr, arrays, numbers)
    return [replay.values[place] for place in replay.results], replay


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


def _inside(fault: Fault) -> Fault | None:
    """The fault within a loop, run trip by trip.

    There is none in other operations, nor where each trip of a loop is finite by itself. Notes the largest
    magnitudes that are met in search of it.
    """
    replay, step, before = fault.replay, fault.replay.steps[fault.at], fault.before
    _note_largest(replay, fault.at, before)
    if calls.kind_of(step.eqn) not in LOOPS:
        return None
    for trip, inner in enumerate(_runs_inside(replay, step)):
        for through_loops in (False, True):
            first = inner.first_nonfinite_step(through_loops)
            if first is None or first < 0:
                break
            found = Fault(inner, first, {}, _forward_inside(step, inner, fault.forward), before, trip)
            is_loop = calls.kind_of(inner.steps[first].eqn) in LOOPS
            if through_loops or not is_loop or _inside(found) is not None:
                return found
        _note_largest(inner, len(inner.steps), before)
    return None


def _described(found: Diagnosis, fault: Fault, mending: Mending | None) -> Diagnosis:
    """Adds to a diagnosis what a step did to its operands, and what to do about it."""
    replay, step = fault.replay, fault.replay.steps[fault.at]
    place = next(p for p in step.writes if not replay.ranges[p].is_finite)
    in_float32 = range_of(replay.in_float32(place))
    largest, where = fault.before.get(replay.values[place].dtype, (0.0, ""))
    zero = underflow_before(replay, step) if in_float32.is_finite else None
    infinite = _infinite_constant(found, replay, zero)
    zero = zero if infinite is None else None
    lost, wrong = None, zero or step
    is_inside = in_float32.is_finite and in_float32.largest < _FAR_INSIDE
    is_early = is_inside if zero is None else not is_half(replay.values[wrong.writes[0]].dtype)
    if is_early and infinite is None:
        lost = _where_digits_are_lost(replay, wrong)
    in_half = "rounding" if _is_undefined(replay, step) else "overflow"
    kind = "underflow" if zero is not None else in_half if in_float32.is_finite else "not finite"
    constant = infinite or _lost_constant(found, wrong, is_zero=zero is not None)
    found = dataclasses.replace(
        found,
        kind=kind,
        path=step.site.path,
        line=step.site.line,
        # Derivatives such as sqrt's 1 / (2 sqrt(x)) are computed before the transpose begins.
        backward=step.site.backward or place not in fault.forward,
        operation=step.eqn.primitive.name,
        operands=tuple(_operand(replay, p, fault.names.get(p, "")) for p in step.reads),
        largest_before=largest,
        largest_before_place=where,
        largest_in_float32=in_float32.largest if in_float32.is_finite else math.nan,
        trip=fault.trip,
        zero=_as_zero(replay, None if zero is step else zero),
        lost_digits=_as_zero(replay, lost),
        constant=constant,
        **_array(replay, place),
    )
    scaled, in_optimizer, mended = step.site.backward, is_written_in(step.eqn, "optax"), None
    if mending is not None and kind != "not finite" and not in_optimizer:
        places = [place.path for place in (found.zero, found.lost_digits) if place is not None]
        named = places if found.zero is not None else [*places, found.path]
        # What overflows on the way to a finite loss may do no harm, and the loss scale may be too large.
        mended = mending.best(named, in_scale=kind == "overflow" and math.isfinite(found.loss))
        found = dataclasses.replace(found, tried=tuple(mending.tried))
    if mended is not None:
        changed = {"rule": mended.rule, "policy": mended.policy, "error_after": mended.error}
        found = dataclasses.replace(found, **changed)
    hides = is_mask(replay.values[place])
    return dataclasses.replace(found, advice=advice(found, scaled, in_optimizer, hides, mended))


def _is_undefined(replay: EagerReplay, step: ReplayedEqn) -> bool:
    """Whether a function of one number, a power or a look-up is NaN though what it was given is finite."""
    name = step.eqn.primitive.name
    is_function = name in ("pow", "gather") or (len(step.reads) == 1 and name in _ELEMENTWISE)
    is_finite = all(replay.ranges[place].is_finite for place in step.reads)
    return is_function and is_finite and replay.ranges[step.writes[0]].nan


def _as_zero(replay: EagerReplay, step: ReplayedEqn | None) -> Zero | None:
    """What is said of the operation that lost a value."""
    if step is None:
        return None
    dtype, site = replay.values[step.writes[0]].dtype, step.site
    return Zero(step.eqn.primitive.name, site.path, site.line, site.backward, str(dtype))


def _where_digits_are_lost(replay: EagerReplay, step: ReplayedEqn) -> ReplayedEqn | None:
    """The operation whose rounding made an operand of a step another number; None where an argument is it.

    From operand to operand, along the largest error: an absolute one where operands are added up, else a
    relative one.
    """
    while True:
        adds = step.eqn.primitive.name in _ADDS
        errors = {place: _error(replay, place, relative=not adds) for place in step.reads}
        place = max(errors, key=errors.__getitem__, default=-1)
        if place not in replay.makers or not errors[place]:
            return None
        step = replay.makers[place]
        wide = replay_equation(step.eqn, [replay.values[read] for read in step.reads])
        introduced = _distance(replay.values[place], wide[step.writes.index(place)])
        if introduced > _error(replay, place, relative=False) / 2:
            return step


def _error(replay: EagerReplay, place: int, *, relative: bool) -> float:
    """The L2 error of a value against float32."""
    exact = replay.in_float32(place)
    error = _distance(replay.values[place], exact)
    return error / (_distance(exact, np.zeros(())) or 1.0) if relative else error


def _distance(one: Any, other: Any) -> float:
    """The L2 norm of a difference; 0 for what is no numbers."""
    if not jax.numpy.issubdtype(one.dtype, jax.numpy.floating):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.asarray(one, np.float64) - np.asarray(other, np.float64)
        return float(np.sqrt(np.square(np.nan_to_num(difference)).sum()))


def _lost_constant(found: Diagnosis, step: ReplayedEqn, is_zero: bool) -> LostConstant | None:
    """The constant in the line of a step that half precision made zero, or infinite."""
    # What is cast before another operation reads it has the cast's line.
    name, is_cast = step.eqn.primitive.name, step.eqn.primitive.name == "convert_element_type"
    for constant in found.constants:
        is_there = constant.line == step.site.line and (is_cast or name == constant.operation)
        if is_there and (constant.becomes == "0") == is_zero:
            return constant
    return None


def _infinite_constant(
    found: Diagnosis, replay: EagerReplay, zero: ReplayedEqn | None
) -> LostConstant | None:
    """The constant that half precision made infinite, where a zero was made of an infinity: exp(-inf)."""
    infinite = [constant for constant in found.constants if "inf" in constant.becomes]
    for place in zero.reads if zero is not None and infinite else ():
        if not replay.ranges[place].is_finite and range_of(replay.in_float32(place)).is_finite:
            return infinite[0]
    return None


def _forward_inside(step: ReplayedEqn, inner: EagerReplay, forward: set[int]) -> set[int]:
    """The places of values in a trip of a loop that the loss is computed from."""
    if forward.isdisjoint(step.writes):
        return set()
    # What a trip passes to the next one is of the same pass.
    carries = len(control_flow.loop(step.eqn, step.reads).start)
    made = zip(inner.results[carries:], step.writes[carries:], strict=True)
    return inner.feeding([*inner.results[:carries], *(result for result, write in made if write in forward)])


def _operand(replay: EagerReplay, place: int, name: str) -> Operand:
    array, held = _array(replay, place), replay.ranges[place]
    return Operand(name, array["dtype"], array["shape"], held.largest, held.infinite)


def _array(replay: EagerReplay, place: int) -> dict[str, Any]:
    """What a diagnosis says of an array."""
    value = replay.values[place]
    return {"dtype": str(value.dtype), "shape": tuple(value.shape), "is_nan": replay.ranges[place].nan}


def _note_largest(replay: EagerReplay, index: int, before: dict[Any, tuple[float, str]]) -> None:
    """Notes by dtype the largest finite magnitude that the operations up to a step made, and where."""
    for step in replay.steps[:index]:
        for place in step.writes:
            largest, dtype = replay.ranges[place].largest, getattr(replay.values[place], "dtype", None)
            if largest > before.get(dtype, (0.0, ""))[0]:
                before[dtype] = (largest, f"{step.eqn.primitive.name} in {step.site.place}")


def _runs_inside(replay: EagerReplay, step: ReplayedEqn) -> Iterator[EagerReplay]:
    """Yields the trips of a loop, each as a replay of its own."""
    loop = control_flow.loop(step.eqn, [replay.values[place] for place in step.reads])
    order = -1 if step.eqn.params.get("reverse") else 1
    carry = loop.start
    for i in itertools.count() if loop.trips is None else range(loop.trips)[::order]:
        if loop.test is not None:
            test = EagerReplay(loop.test, [*loop.tested, *carry], replay.numbers, step.site)
            if not bool(test.values[test.results[0]]):
                return
        given = [*loop.fixed, *carry, *(x[i] for x in loop.xs)]
        inner = EagerReplay(loop.body, given, replay.numbers, step.site)
        yield inner
        carry = [inner.values[place] for place in inner.results[: len(carry)]]


#: Functions of one number; and operations that add up their operands' errors as they are.
_ELEMENTWISE, _ADDS = HAVING[Trait.ELEMENTWISE], HAVING[Trait.ADDS]

#: A value that is smaller in float32 is far inside the range of float16.
_FAR_INSIDE = 65504 / 16
