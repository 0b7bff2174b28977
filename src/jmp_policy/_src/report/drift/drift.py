"""Compares a half-precision function with its float32 replay, and says where the difference is introduced."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.report_base import joined
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.report import diagnose, progress
from jmp_policy._src.report.diagnosis import Diagnosis
from jmp_policy._src.report.drift import findings
from jmp_policy._src.report.drift.comparison import Compared, Comparison
from jmp_policy._src.report.drift.findings import Drift, ResultDrift
from jmp_policy._src.report.drift.rows import Rows
from jmp_policy._src.report.function import Function, as_function, as_loss_scale, to_run
from jmp_policy._src.report.lost_constants import (
    LostConstants,
    lost_constants_of,
    without_overflow_warnings,
)
from jmp_policy._src.report.pieces import compiled_quickly
from jmp_policy._src.report.trials import Mending, Tried


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
    both. Use it where half precision gives worse results, but no NaN: of a gradient that is not finite it has
    the cause and the rule that `diagnose` finds.

    Args:
      fn: a loss function `(params, *args) -> scalar`, of NNX modules `(model, *args) -> scalar`; or any
        function of pytrees, such as a training step.
      args, kwargs: its arguments; a loss is differentiated with respect to the first.
      grad: whether to look at the gradients of a loss too. Of a function that returns no scalar the results
        are compared, as with False.
      detail: "module" for one row per module, and per line outside of modules; "operation" for one per
        operation and line.
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
        found, function = _measured(fn, args, grad, detail, scale, has_aux, **kwargs)
        if not found.is_loss:
            return found
        loss_scale = float(as_loss_scale(scale).loss_scale)
        if not math.isfinite(found.error) or math.isinf(found.loss_error):
            seen = None
            with without_overflow_warnings(), progress.interruptible("the cause was not looked for"):
                seen = diagnose.of_loss(function, loss_scale, has_aux)
            if seen is not None and not seen.finite:
                best = next((tried for tried in seen.tried if tried.policy is seen.policy), None)
                if best is None:
                    seen, best = _at_smaller_scale(seen, function, detail, loss_scale, has_aux)
                is_told = best is not None or seen.constant is not None  # What to do, elsewhere.
                cause = seen.verdict if is_told else f"{seen.verdict} {seen.advice}"
                found = dataclasses.replace(found, cause=cause, tried=seen.tried)
                return found if best is None else _mended(found, best)
        mending = Mending(function, loss_scale, has_aux)
        if not found.is_worth_a_rule:
            kept = mending.keeping(found.constants)
            return found if kept is None else _mended(found, kept)
        named = _modules(found)
        # An ill-conditioned model may be expected to be far off: a rule that helps a little is no end there.
        limit = max(min(findings.NORMAL * found.expected, found.error / 10), 1e-3)
        exponent = _missing_scale(found, loss_scale)
        if exponent:
            scaled = found
            with progress.interruptible("a loss scale was not tried"):
                scaled = _drift_of(function, True, detail, 2.0**exponent, has_aux)
            if scaled.error <= min(limit, found.error / 2) and math.isfinite(scaled.loss_error):
                text = f"a loss scale of 2**{exponent} (`DynamicLossScale`)"
                return dataclasses.replace(found, advice=text, error_after=scaled.error)
        mended = mending.best(named, limit=limit, before=found.error, in_sums=found.is_of_sums)
        found = dataclasses.replace(found, tried=tuple(mending.tried))
        return found if mended is None else _mended(found, mended)


def _at_smaller_scale(
    seen: Diagnosis, function: Function, detail: str, loss_scale: float, has_aux: bool
) -> tuple[Diagnosis, Tried | None]:
    """Tries rules for what is off where a smaller loss scale keeps the gradient finite, and mends nothing."""
    scales = (t.loss_scale for t in seen.tried if t.is_own and math.isfinite(t.error))
    smaller = next(scales, loss_scale)
    if smaller == loss_scale:
        return seen, None
    mending = Mending(function, loss_scale, has_aux)
    with progress.interruptible("other rules were not tried"):
        finite = _drift_of(function, True, detail, smaller, has_aux)
        best = mending.best(_modules(finite))
        tried = {one.text: one for one in (*seen.tried, *mending.tried)}
        return dataclasses.replace(seen, tried=tuple(tried.values())), best
    return seen, None


def _modules(found: Drift) -> list[str]:
    """The modules that the error is introduced in, most important first."""
    return list(dict.fromkeys(row.module for row in found.contributions if row.share >= findings.NAMED))


def _mended(found: Drift, mended: Tried) -> Drift:
    fields = {"rule": mended.rule, "policy": mended.policy, "advice": mended.text}
    return dataclasses.replace(found, **fields, error_after=mended.error)


def _missing_scale(found: Drift, scale: float) -> int:
    """The exponent of a loss scale to try where none was given, and gradients are small; else 0."""
    if scale != 1 or not (math.isfinite(found.error) and 0 < found.gradient_norm < math.inf):
        return 0
    return min(max(math.floor(_LARGE_EXPONENT - math.log2(found.gradient_norm)), 0), _MOST_EXPONENT)


#: The exponent of the norm to which a loss scale is to bring the gradient, and the largest scale's.
_LARGE_EXPONENT, _MOST_EXPONENT = 8, 24


def _measured(
    fn: Callable[..., Any],
    args: Sequence[Any],
    /,
    grad: bool = True,
    detail: str = "module",
    scale: Any = 1.0,
    has_aux: bool = False,
    **kwargs: Any,
) -> tuple[Drift, Function]:
    """The report before any rule was tried, and the function."""
    if detail not in ("module", "operation"):
        raise ValueError(f"drift has rows per 'module' or per 'operation'; got detail={detail!r}.")
    function = to_run(fn, args, kwargs, "drift")
    return _drift_of(function, grad, detail, float(as_loss_scale(scale).loss_scale), has_aux), function


def _drift_of(function: Function, grad: bool, detail: str, loss_scale: float, has_aux: bool) -> Drift:
    progress.step("tracing")
    with without_overflow_warnings():
        jaxpr, lost, names, is_loss = _traced(function, grad, loss_scale, has_aux)
        cotangent = float(first_cotangent(jaxpr.out_avals[0].dtype, loss_scale)) if is_loss else 1.0
        return _report(function, lost, names, is_loss, cotangent, detail, *_run(jaxpr, lost, function.arrays))


def _run(jaxpr: Any, lost: LostConstants, arrays: Sequence[Any]) -> tuple[Comparison, Any]:
    """A comparison, and what it gave on the host."""
    known: list[Any] = []
    with progress.interruptible("small errors may be wrong", known):
        for quick in (True, False):
            comparison = Comparison(jaxpr, True, lost.numbers, quick=quick)
            progress.step("comparing both precisions once more" if known else "comparing both precisions")
            known.append((comparison, jax.device_get(compiled_quickly(comparison)(arrays))))
            if quick and comparison.is_reliable(*known[-1][1][:2]):
                break
    return known[-1]


def _report(
    function: Function,
    lost: LostConstants,
    names: Sequence[str],
    is_loss: bool,
    loss_scale: float,
    detail: str,
    comparison: Comparison,
    outcome: Any,
) -> Drift:
    """The report on what a comparison gave."""
    compared, measured, first, changes = outcome
    compared = [Compared(*map(_on_host, result)) for result in compared]
    scales = [1.0] * len(names)
    if is_loss:
        changes, scales[1:] = {}, [loss_scale] * len(names[1:])
    named = zip(names, compared, scales, strict=True)
    results = [_result(name, c, unit, changes.get(i)) for i, (name, c, unit) in enumerate(named)]
    if is_loss:
        gradient = _result("the gradient", _added(compared[2:]), loss_scale)
        error, squares = gradient.error, [0.0, 0.0, *(c.error for c in compared[2:])]
    else:
        gradient, of_zero = ResultDrift("", *[math.nan] * 4), findings.zero_but_for_rounding(results)
        squares = [0.0 if result in of_zero else result.error**2 for result in results]
        counted = sum((r.norm > 0 or r.error > 0) and r not in of_zero for r in results)
        error = math.sqrt(sum(squares) / max(counted, 1))
    of_loss = [float(is_loss and i == 0) for i in range(len(names))]
    paths = [argument.path for argument in function.arguments]
    rows = Rows(comparison, measured, comparison.results[2:] if is_loss else [], squares, of_loss, paths)
    return Drift(
        function=function.name,
        rows=rows.rows(by_operation=detail == "operation"),
        results=tuple([results[0], *results[2:]] if is_loss else results),
        loss=float(first) if is_loss else math.nan,
        loss_error=results[0].error if is_loss else math.nan,
        gradient_error=gradient.error,
        cosine=gradient.cosine,
        gradient_norm=gradient.norm,
        error=error,
        expected=rows.expected(error),
        turned=rows.turned,
        loss_scale=loss_scale,
        constants=lost.found(),
    )


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
    found, _ = _measured(fn, args, **kwargs)
    if found.is_loss and not math.isfinite(found.loss):
        raise AssertionError(f"The loss is {found.loss}, which says nothing of an error. {found.verdict}")
    if wrong := _exceeding_text(found, rtol):
        raise AssertionError(f"{wrong}. {found.verdict}")
    if findings.loses_unseen(found):
        raise AssertionError(found.verdict)


def _exceeding_text(found: Drift, rtol: float) -> str:
    """Describes what is further off than a bound; "" if nothing is."""
    of_zero = findings.zero_but_for_rounding(found.results)
    errors = [(result.name, result.error) for result in found.results if result not in of_zero]
    if found.is_loss:
        errors = [("the gradient", found.gradient_error), ("the loss", found.loss_error)]
    wrong = [f"{name} is off by {error:.3g}" for name, error in errors if not error <= rtol]
    text = "; ".join(wrong) if found.is_loss else joined(wrong)
    return f"{text}, and may be by {rtol:.3g}" if wrong else ""


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
    jaxpr, lost, _, is_loss = _traced(function, grad, as_loss_scale(scale).loss_scale, has_aux)
    compared, *_ = Comparison(jaxpr, False, lost.numbers)(function.arrays)
    if not is_loss:
        errors = [_relative(c.error, c.exact) for c in compared]
        return {f"{prefix}error": jnp.max(jnp.stack([jnp.float32(0), *errors]))}
    whole = _added(compared[2:])
    return {
        f"{prefix}loss_error": _relative(compared[0].error, compared[0].exact),
        f"{prefix}gradient_error": _relative(whole.error, whole.exact),
        f"{prefix}gradient_cosine": jnp.asarray(whole.cosine, jnp.float32),
    }


def _relative(error: Any, exact: Any) -> jax.Array:
    """A relative L2 error; 1 for what is zero in float32 alone."""
    return jnp.where(exact > 0, jnp.sqrt(error / exact), error > 0).astype(jnp.float32)


def _traced(
    function: Function, grad: bool, loss_scale: Any, has_aux: bool
) -> tuple[Any, LostConstants, list[str], bool]:
    """The jaxpr of what is compared, its lost constants, names of its results, whether it is of a loss."""
    is_loss = grad and (has_aux or function.returns_scalar())
    if is_loss:
        program, names = function.value_and_gradients("drift", loss_scale, has_aux)
    else:
        program, names = function.named_results()
    jaxpr = jax.make_jaxpr(program)(function.arrays)
    names = list(names)  # Of this trace.
    return jaxpr, lost_constants_of(jaxpr, program, function.arrays), names, is_loss


def _on_host(number: Any) -> float:
    return float(np.nan_to_num(np.float64(number), nan=np.inf, posinf=np.inf))


def _added(compared: Sequence[Compared]) -> Compared:
    """Several results as one."""
    return Compared(*(sum(part) for part in zip(*compared, strict=True)))


def _result(name: str, compared: Compared, scale: float, change: Any = None) -> ResultDrift:
    error, exact, half, largest = compared
    relative = math.sqrt(error / exact) if exact else (1.0 if 0 < error < math.inf else error)
    cosine = float(compared.cosine) if exact and half and math.isfinite(error) else math.nan
    of_change = math.sqrt(error / change) if change and math.isfinite(error) else math.nan
    return ResultDrift(name, relative, largest / scale, math.sqrt(exact) / scale, cosine, of_change)
