"""Finds the first non-finite value of a loss and its gradients, or of any function, and says what to do."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr.walk import walk
from jmp_policy._src.loss_scaling.state import find_loss_scale
from jmp_policy._src.report.diagnose.diagnosis import Diagnosis
from jmp_policy._src.report.diagnose.eager_replay import EagerReplay
from jmp_policy._src.report.diagnose.fault import Fault, of_step
from jmp_policy._src.report.function import (
    Function,
    as_function,
    as_loss_scale,
    named_results,
    returns_scalar,
    trained_arguments,
    value_and_gradients,
)
from jmp_policy._src.report.lost_constants import LostConstant, LostConstants, without_overflow_warnings


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

    Runs operation by operation, which is slow, and holds every value: call it once training has failed, with
    the parameters and the batch of that step. Infinities that end as zeros, such as those of masks, are no
    fault.

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
    with without_overflow_warnings():
        if has_aux or not _is_one(scale) or returns_scalar(function):
            return _of_loss(function, float(as_loss_scale(scale).loss_scale), has_aux)
        return _of_program(function, (params, args, kwargs))


def _of_loss(function: Function, loss_scale: float, has_aux: bool) -> Diagnosis:
    """Diagnoses a loss and its gradients."""
    trained = trained_arguments(function, "diagnose")
    jaxpr = jax.make_jaxpr(value_and_gradients(function, trained, loss_scale, has_aux))(function.arrays)
    replay = EagerReplay(jaxpr, function.arrays)
    loss = float(np.asarray(replay.values[replay.results[0]]).astype(np.float64))
    names = ["the loss", "the scaled loss", *(function.arguments[i].path for i in trained)]
    found = Diagnosis(function.name, True, loss, loss_scale, constants=_constants(jaxpr))
    return _diagnosed(found, replay, function, names, replay.results[:2])


def _of_program(function: Function, given: Any) -> Diagnosis:
    """Diagnoses a function whose result is no loss, such as a whole training step."""
    program, names = named_results(function)
    jaxpr = jax.make_jaxpr(program)(function.arrays)
    replay = EagerReplay(jaxpr, function.arrays)
    try:
        loss_scale = float(find_loss_scale(given).loss_scale)
    except (TypeError, ValueError):  # None, or several.
        loss_scale = 1.0
    found = Diagnosis(function.name, True, math.nan, loss_scale, constants=_constants(jaxpr))
    return _diagnosed(found, replay, function, names, replay.results)


def _is_one(scale: Any) -> bool:
    return isinstance(scale, int | float) and scale == 1


def _constants(jaxpr: Any) -> tuple[LostConstant, ...]:
    constants = LostConstants()
    walk(jaxpr, constants)
    return constants.found()


def _diagnosed(
    found: Diagnosis,
    replay: EagerReplay,
    function: Function,
    names: Sequence[str],
    forward: Sequence[int],
) -> Diagnosis:
    """Adds to a diagnosis the first non-finite value, if a result is not finite.

    Args:
      found: what is known already.
      replay, function: what ran.
      names: of the results.
      forward: places of the results of the forward pass.
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
    return of_step(found, Fault(replay, first, arguments, replay.feeding(forward), {}))


def _of_argument(found: Diagnosis, replay: EagerReplay, index: int, function: Function) -> Diagnosis:
    argument, place = function.arguments[index], replay.arguments[index]
    value = replay.values[place]
    advice = "Clean the data: neither a loss scale nor a policy can help."
    if argument.position == 0:
        advice = (
            "An update that was not skipped made it: train with loss_scaled, from the last good checkpoint."
        )
    if is_half(value.dtype) and not replay.ranges[place].nan:
        advice += (
            f" If it was finite before its cast to {value.dtype} (a mask of -1e9): cast "
            "jnp.finfo(dtype).min instead."
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
