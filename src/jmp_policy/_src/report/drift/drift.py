"""Compares a half-precision function with its float32 replay, and says where the difference is introduced."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.report import progress
from jmp_policy._src.report.drift.comparison import Compared, Comparison
from jmp_policy._src.report.drift.findings import NAMED, NORMAL, Drift, ResultDrift, exceeding_text, lost_text
from jmp_policy._src.report.drift.rows import Rows
from jmp_policy._src.report.function import (
    Function,
    as_function,
    as_loss_scale,
    named_results,
    returns_scalar,
    trained_arguments,
    value_and_gradients,
)
from jmp_policy._src.report.lost_constants import without_overflow_warnings
from jmp_policy._src.report.pieces import compiled_quickly
from jmp_policy._src.report.trials import Mending

_DETAILS = ("module", "operation")

#: Keywords of `drift` itself; all others are those of the function.
_OPTIONS = ("grad", "detail", "scale", "has_aux")

#: Name of the first result of a loss.
_LOSS = "the loss"


def drift(
    fn: Callable[..., Any],
    *args: PyTree,
    grad: bool = True,
    detail: str = "module",
    scale: Any = 1.0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Drift:
    """Measures how far a half-precision function is from float32, and where the difference is introduced.

    Computes the function, and the gradients of a loss, twice: as it is written, each operation rounding its
    result, and with every half value replaced by a float32 one. Arguments and random numbers are the same in
    both. Use it where half precision gives worse results, but no NaN.

    Args:
      fn: a loss function `(params, *args) -> scalar`, of NNX modules `(model, *args) -> scalar`; or any
        function of pytrees, such as a training step.
      args, kwargs: its arguments; a loss is differentiated with respect to the first.
      grad: whether to look at the gradients of a loss too. Of a function that returns no scalar the results
        are compared, as with False.
      detail: "module" for one row per module, "operation" for one per operation and line.
      scale: what the loss is multiplied by: a number, a loss scale, or an optimizer state that holds one.
        With 1, float16 gradients may vanish that in training do not.
      has_aux: whether `fn` returns `(loss, aux)`.

    Returns:
      A `Drift`; `print` shows it.

    Raises:
      TypeError: for something that is no function, and types in the place of arrays.
      ValueError: for an unknown `detail`, and parameters without floating arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(w, x):
      ...     return jnp.square(w.astype(jnp.float16) * x).astype(jnp.float32).sum()
      >>> found = drift(loss_fn, jnp.float32([0.1, 0.2]), jnp.float16(1.0))
      >>> 0 < found.gradient_error < 2**-10, found.is_normal
      (True, True)

    References:
      Joint Committee for Guides in Metrology, "Guide to the Expression of Uncertainty in Measurement", 2008,
      5.1.2, for the shares; Higham, "Accuracy and Stability of Numerical Algorithms", 2002, 2.2, for the
      model of rounding.
    """
    with progress.showing("drift"):
        return _with_advice(has_aux, *_measured(fn, args, kwargs, grad, detail, scale, has_aux))


def _with_advice(has_aux: bool, found: Drift, function: Function, loss_scale: float) -> Drift:
    """The report with what rules do, where that is worth a try."""
    if not found.is_worth_a_rule:
        return found
    mending = Mending(function, loss_scale, has_aux)
    named = [row.module for row in found.contributions if row.share >= NAMED][:3]
    mended = mending.best(named, limit=max(NORMAL * found.expected, 1e-3))
    found = dataclasses.replace(found, tried=tuple(mending.tried))
    if mended is None or not mended.error < found.error / 2:
        return found
    return dataclasses.replace(found, rule=mended.rule, advice=mended.text, error_after=mended.error)


def _measured(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    grad: bool = True,
    detail: str = "module",
    scale: Any = 1.0,
    has_aux: bool = False,
) -> tuple[Drift, Function, float]:
    """The report before any rule was tried, the function, and what its loss was multiplied by."""
    if detail not in _DETAILS:
        raise ValueError(f"drift has rows per 'module' or per 'operation'; got detail={detail!r}.")
    function = as_function(fn, args, kwargs, "drift")
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in function.arrays):
        raise TypeError("drift runs the function: it needs arrays, not jax.ShapeDtypeStructs.")
    given_scale = loss_scale = float(as_loss_scale(scale).loss_scale)
    progress.step("tracing")
    with without_overflow_warnings():
        jaxpr, names, is_loss = _traced(function, grad, loss_scale, has_aux)
    for quick in (True, False):
        comparison = Comparison(jaxpr, detail, quick=quick)
        progress.step("compiling and running both precisions")
        compared, measured, first, changes = jax.device_get(compiled_quickly(comparison)(function.arrays))
        if quick and comparison.is_reliable(compared, measured):
            break
    if is_loss:
        loss_scale = float(first_cotangent(jaxpr.out_avals[0].dtype, loss_scale))
    found = _report(
        function,
        comparison,
        names,
        compared,
        measured,
        {} if is_loss else changes,
        float(first) if is_loss else math.nan,
        loss_scale,
        detail,
    )
    return found, function, given_scale


def assert_drift(fn: Callable[..., Any], *args: PyTree, rtol: float, **kwargs: Any) -> None:
    """Asserts that a function's results are near those of float32; for test suites.

    Args:
      fn, args, kwargs: as for `drift`.
      rtol: largest relative L2 error that the loss and the whole gradient may have; of a function that is no
        loss, each result.

    Raises:
      AssertionError: when the error is larger, or not finite; the message says where it is introduced. Also
        when the loss is not finite in float32 either, when a constant is lost whose effect one call does not
        show, and when an argument is returned without half of what was added to it.

    Example:
      >>> import jax.numpy as jnp
      >>> assert_drift(lambda w: jnp.square(w.astype(jnp.bfloat16)).sum(), jnp.ones(3), rtol=1e-2)
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    found, *_ = _measured(fn, args, kwargs, **options)
    if found.is_loss and not math.isfinite(found.loss):
        raise AssertionError(f"The loss is {found.loss}, which says nothing of an error. {found.verdict}")
    if wrong := exceeding_text(found, rtol):
        raise AssertionError(f"{wrong}. {found.verdict}")
    if lost_text(found):
        raise AssertionError(found.verdict)


def drift_metrics(
    fn: Callable[..., Any],
    *args: PyTree,
    grad: bool = True,
    scale: Any = 1.0,
    has_aux: bool = False,
    prefix: str = "drift/",
    **kwargs: Any,
) -> dict[str, jax.Array]:
    """Computes how far a function is from float32, as scalars for a logger.

    Use it while training, every so many steps, in a jitted function of its own: it has no callbacks and
    compiles once. It costs about one step in half precision and one in float32.

    Args:
      fn, args, kwargs, grad, has_aux: as for `drift`.
      scale: what the loss is multiplied by; may be traced, as that of an optimizer state.
      prefix: put before every name.

    Returns:
      float32 scalars by name: "loss_error", "gradient_error" and "gradient_cosine"; of a function that is no
      loss "error", the largest relative error of a result.

    Raises:
      TypeError, ValueError: as `drift`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale, MetricsLogger, loss_scaled
      >>> def loss_fn(w):
      ...     return jnp.square(w.astype(jnp.bfloat16)).sum().astype(jnp.float32)
      >>> probe = jax.jit(lambda w: drift_metrics(loss_fn, w))
      >>> written, w = {}, jnp.float32([0.1, 0.2])
      >>> log = MetricsLogger(written.__setitem__)
      >>> log(0, loss_scaled(optax.sgd(0.1), DynamicLossScale()).init(w), **probe(w))
      >>> log.flush()
      >>> 0 < written[0]["drift/gradient_error"] < 2**-7
      True
    """
    function = as_function(fn, args, kwargs, "drift_metrics")
    jaxpr, _, is_loss = _traced(function, grad, as_loss_scale(scale).loss_scale, has_aux)
    compared, *_ = Comparison(jaxpr, "result")(function.arrays)
    if not is_loss:
        errors = [_relative(c.error, c.exact) for c in compared]
        return {f"{prefix}error": jnp.max(jnp.stack([jnp.float32(0), *errors]))}
    whole = Compared(*(sum(part) for part in zip(*compared[2:], strict=True)))
    return {
        f"{prefix}loss_error": _relative(compared[0].error, compared[0].exact),
        f"{prefix}gradient_error": _relative(whole.error, whole.exact),
        f"{prefix}gradient_cosine": jnp.asarray(whole.cosine, jnp.float32),
    }


def _relative(error: Any, exact: Any) -> jax.Array:
    """A relative L2 error; 0 where nothing is off, infinite where the float32 values are zero."""
    return jnp.where(error == 0, 0, jnp.sqrt(error / exact)).astype(jnp.float32)


def _traced(function: Function, grad: bool, loss_scale: Any, has_aux: bool) -> tuple[Any, list[str], bool]:
    """The jaxpr of what is compared, names of its results, and whether those are of a loss."""
    # TF32 would be an error of its own.
    with jax.default_matmul_precision("highest"):
        is_loss = grad and (has_aux or returns_scalar(function))
        program, names = _of_loss(function, loss_scale, has_aux) if is_loss else named_results(function)
        return jax.make_jaxpr(program)(function.arrays), names, is_loss


def _of_loss(function: Function, loss_scale: Any, has_aux: bool) -> tuple[Callable[..., Any], list[str]]:
    trained = trained_arguments(function, "drift")
    names = [_LOSS, "the scaled loss", *(function.arguments[i].path for i in trained)]
    return value_and_gradients(function, trained, loss_scale, has_aux), names


def _report(
    function: Function,
    comparison: Comparison,
    names: Sequence[str],
    compared: Sequence[Compared],
    measured: Any,
    changes: Mapping[int, Any],
    loss: float,
    loss_scale: float,
    detail: str,
) -> Drift:
    """Makes the report; the loss is nan for a function that is none."""
    is_loss = names[:1] == [_LOSS]
    scales = [1.0, loss_scale, *[loss_scale] * (len(names) - 2)] if is_loss else [1.0] * len(names)
    compared = [_host(c) for c in compared]
    results = [
        _result(name, c, s, changes.get(i))
        for i, (name, c, s) in enumerate(zip(names, compared, scales, strict=True))
    ]
    gradient_error = cosine = norm = loss_error = math.nan
    loss_weights: dict[int, float] = {}
    kept = [i for i in range(len(names)) if not (is_loss and i < 2)]
    if is_loss:
        whole = Compared(*(float(sum(part)) for part in zip(*(compared[i] for i in kept), strict=True)))
        gradient = _result("the gradient", whole, loss_scale)
        error, cosine, norm = gradient.error, gradient.cosine, gradient.norm
        gradient_error, loss_error = error, results[0].error
        squares = [compared[i].error for i in kept]
        loss_weights = _weights(comparison, [0], [1.0])
    else:
        squares = [results[i].error ** 2 for i in kept]
        error = math.sqrt(sum(squares) / max(sum(c.exact > 0 for c in compared), 1))
    gradients = [n for i in kept if is_loss and (n := comparison.results[i]) is not None]
    rows = Rows(comparison, measured, gradients, _weights(comparison, kept, squares), loss_weights)
    return Drift(
        function=function.name,
        rows=rows.of_operations() if detail == "operation" else rows.of_modules(),
        results=tuple(r for i, r in enumerate(results) if not (is_loss and i == 1)),
        loss=loss,
        loss_error=loss_error,
        gradient_error=gradient_error,
        cosine=cosine,
        gradient_norm=norm,
        error=error,
        expected=rows.expected(error),
        loss_scale=loss_scale if is_loss else 1.0,
        constants=comparison.constants,
    )


def _host(compared: Compared) -> Compared:
    numbers = (float(np.nan_to_num(np.float64(part), nan=np.inf, posinf=np.inf)) for part in compared)
    return Compared(*numbers)


def _result(name: str, compared: Compared, scale: float, change: Any = None) -> ResultDrift:
    error, exact, half, largest = compared
    relative = math.sqrt(error / exact) if exact else (math.inf if error else 0.0)
    cosine = float(compared.cosine) if exact and half and math.isfinite(error) else math.nan
    of_change = math.sqrt(error / change) if change and math.isfinite(error) else math.nan
    return ResultDrift(name, relative, largest / scale, math.sqrt(exact) / scale, cosine, of_change)


def _weights(comparison: Comparison, places: Sequence[int], squares: Sequence[float]) -> dict[int, float]:
    """Returns, by node, the part that results have in the sum of their squared errors."""
    found: dict[int, float] = {}
    if any(map(math.isinf, squares)):
        squares = [float(math.isinf(square)) for square in squares]
    whole = sum(squares)
    for place, square in zip(places, squares, strict=True):
        number = comparison.results[place]
        if number is not None and whole:
            found[number] = found.get(number, 0.0) + square / whole
    return found
