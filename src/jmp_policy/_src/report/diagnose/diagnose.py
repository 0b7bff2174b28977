"""The first non-finite value of a loss and its gradients, and what to do about it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import calls, compat
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.op_table import Trait, having
from jmp_policy._src.loss_scaling.value_and_grad import split_loss
from jmp_policy._src.report.diagnose.diagnosis import Diagnosis, Operand, advice
from jmp_policy._src.report.diagnose.eager_replay import VIEWS, EagerReplay, ReplayedEqn, on_devices, range_of
from jmp_policy._src.report.function import Function, as_function
from jmp_policy._src.report.loss_scale import as_loss_scale


def diagnose(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    scale: Any = 1.0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Diagnosis:
    """Finds the first non-finite value of a loss and its gradients, and whether float32 would have it too.

    Runs the forward and the backward pass operation by operation, which is slow, and holds every value: call
    it once training has failed, with the parameters and the batch of that step. Infinities that end as
    zeros, such as those of masks, are no fault.

    Args:
      loss_fn: a loss function `(params, *args) -> scalar`; of NNX modules `(model, *args) -> scalar`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      scale: what the loss is multiplied by: a number, a loss scale, or an optimizer state that holds one.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A `Diagnosis`; `print` shows it.

    Raises:
      TypeError: for a loss that is no scalar, and types in the place of arrays.
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
    loss_scale = float(as_loss_scale(scale).loss_scale)
    trained = [i for i, a in enumerate(function.arguments) if a.position == 0 and a.trainable]
    if not trained:
        raise ValueError(f"diagnose found no floating arrays in the parameters of {function.name}.")
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays):
        raise TypeError("diagnose runs the function: it needs arrays, not jax.ShapeDtypeStructs.")
    jaxpr = jax.make_jaxpr(_value_and_gradients(function, trained, loss_scale, has_aux))(function.arrays)
    replay = EagerReplay(jaxpr, function.arrays)
    loss = float(np.asarray(replay.values[replay.results[0]]).astype(np.float64))
    names = ["the loss", "the scaled loss", *(function.arguments[i].path for i in trained)]
    bad = tuple(n for n, p in zip(names, replay.results, strict=True) if not replay.ranges[p].is_finite)
    found = Diagnosis(function.name, not bad, loss, loss_scale, bad)
    first = replay.first_nonfinite_step()
    if not bad:
        return found
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
    names = {place: function.arguments[i].path for place, i in replay.origins.items()}
    return _of_step(found, _Fault(replay, first, names, replay.feeding(replay.results[:2]), {}))


def _value_and_gradients(
    function: Function, trained: Sequence[int], loss_scale: float, has_aux: bool
) -> Callable[..., Any]:
    """Returns the loss, the loss times its scale, and the gradients of the latter."""

    def program(arrays: Sequence[Any]) -> Any:
        def scaled(params: Sequence[Any]) -> Any:
            whole = list(arrays)
            for i, param in zip(trained, params, strict=True):
                whole[i] = param
            loss, _ = split_loss(function.result(whole), has_aux)
            loss = jnp.asarray(loss)
            # As in training: float16 holds no larger seed.
            factor = min(loss_scale, 2.0**15) if loss.dtype == jnp.float16 else loss_scale
            product = loss.astype(promote_dtype(loss.dtype)) * jnp.float32(factor)
            return product, loss

        (product, loss), grads = jax.value_and_grad(scaled, has_aux=True)([arrays[i] for i in trained])
        return [loss, product, *grads]

    return program


def _of_argument(found: Diagnosis, replay: EagerReplay, index: int, function: Function) -> Diagnosis:
    argument, place = function.arguments[index], replay.arguments[index]
    value = replay.values[place]
    advice = "Clean the data: neither a loss scale nor a policy can help."
    if argument.position == 0:
        advice = (
            "An update that was not skipped made it: train with loss_scaled, from the last good checkpoint."
        )
    return dataclasses.replace(
        found,
        kind="argument",
        path=argument.path,
        dtype=str(value.dtype),
        shape=tuple(value.shape),
        is_nan=replay.ranges[place].nan,
        advice=advice,
    )


class _Fault(NamedTuple):
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


def _of_step(found: Diagnosis, fault: _Fault) -> Diagnosis:
    """Says what happened at a step of a replay, or inside it.

    Loops and shard_maps run as a whole at first. If one is to blame, it runs again: a loop trip by trip, a
    shard_map with the devices as an axis. What is at fault inside takes its place.
    """
    fault = fault._replace(before=_largest(fault.replay, fault.at, fault.before))
    while True:
        inside, before = _inside(fault)
        if inside is None:
            return _described(found, fault._replace(before=before))
        fault = inside._replace(before=_largest(inside.replay, inside.at, inside.before))


def _inside(fault: _Fault) -> tuple[_Fault | None, dict[Any, tuple[float, str]]]:
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
            return _Fault(inner, first, {}, _forward_inside(step, inner, fault.forward), before, trip), before
        if kind is not Kind.SHARD_MAP:
            before = _largest(inner, len(inner.steps), before)
    return None, before


def _described(found: Diagnosis, fault: _Fault) -> Diagnosis:
    """Adds to a diagnosis what a step did to its operands, and what to do about it."""
    replay, step = fault.replay, fault.step
    place = next(p for p in step.writes if not replay.ranges[p].is_finite)
    value = replay.values[place]
    in_float32 = range_of(replay.in_float32(place))
    largest, where = fault.before.get(value.dtype, (0.0, ""))
    found = dataclasses.replace(
        found,
        kind=_kind(replay, step, in_float32.is_finite),
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
    )
    return dataclasses.replace(found, advice=advice(found, scaled=step.site.backward))


def _kind(replay: EagerReplay, step: ReplayedEqn, finite_in_float32: bool) -> str:
    """Returns "underflow", "overflow" or "not finite"."""
    if finite_in_float32:
        return "underflow" if _divides_by_lost(replay, step) else "overflow"
    lost = step.eqn.primitive.name in _POLES and any(_lost_its_epsilon(replay, p) for p in step.reads)
    return "underflow" if lost else "not finite"


def _forward_inside(step: ReplayedEqn, inner: EagerReplay, forward: set[int]) -> set[int]:
    """Returns the places of values in a trip of a loop, or a shard_map, that the loss is computed from."""
    params = step.eqn.params
    if calls.kind_of(step.eqn) is Kind.SCAN:
        first, carries = compat.scan_sizes(params)
    elif calls.kind_of(step.eqn) is Kind.SHARD_MAP:
        first, carries = 0, 0
    else:
        first, carries = params["body_nconsts"], len(inner.results)
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


#: Operations for which an operand that was lost to zero is the end.
_POLES = having(Trait.POLE)


def _divides_by_lost(replay: EagerReplay, step: ReplayedEqn) -> bool:
    """Returns whether an operand holds zeros that float32 would not have."""
    if step.eqn.primitive.name not in _POLES:
        return False
    for place in step.reads:
        zero = np.asarray(replay.values[place]) == 0
        if zero.any() and (np.asarray(replay.in_float32(place))[zero] != 0).any():
            return True
    return False


def _lost_its_epsilon(replay: EagerReplay, place: int) -> bool:
    """Returns whether a zero is a sum with a constant of zero: an epsilon that was rounded to half."""
    makers = {write: step for step in replay.steps for write in step.writes}
    while place in makers:
        step = makers[place]
        if step.eqn.primitive.name == "add":
            # On the right: Python's sum() begins with 0 on the left.
            constant = step.reads[1]
            zero = not np.asarray(replay.values[constant]).any()
            return replay.is_constant(constant) and zero and is_half(replay.values[constant].dtype)
        if step.eqn.primitive.name not in _KEEPS_ZERO or len(step.reads) > 1:
            return False
        place = step.reads[0]
    return False


#: Operations that may stand between an epsilon and what it guards.
_KEEPS_ZERO = VIEWS | {"sqrt"}


def _trips(replay: EagerReplay, step: ReplayedEqn) -> Iterator[EagerReplay]:
    """Yields the trips of a loop, each as a replay of its own."""
    params, values = step.eqn.params, [replay.values[place] for place in step.reads]
    if calls.kind_of(step.eqn) is Kind.SCAN:
        consts, carries = compat.scan_sizes(params)
        fixed, carry, xs = values[:consts], values[consts : consts + carries], values[consts + carries :]
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            inner = EagerReplay(params["jaxpr"], [*fixed, *carry, *(x[i] for x in xs)], step.site)
            yield inner
            carry = [inner.values[place] for place in inner.results[:carries]]
        return
    first, second = params["cond_nconsts"], params["body_nconsts"]
    tested, fixed, carry = values[:first], values[first : first + second], values[first + second :]
    while True:
        test = EagerReplay(params["cond_jaxpr"], [*tested, *carry], step.site)
        if not bool(test.values[test.results[0]]):
            return
        inner = EagerReplay(params["body_jaxpr"], [*fixed, *carry], step.site)
        yield inner
        carry = [inner.values[place] for place in inner.results]
