"""Defines the result of `sensitivity`: modules in the order of what half precision would do to them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.report_base import Report, Sum, Table, count_text, joined, row_of
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.policy.patterns import Pattern, matches, path_text, show_pattern, unused_error
from jmp_policy._src.report import progress
from jmp_policy._src.report.lost_constants import without_overflow_warnings
from jmp_policy._src.report.sensitivity import rounding_errors
from jmp_policy._src.report.sensitivity.rounding_errors import AppliedRounding, Effect, Effects
from jmp_policy._src.report.sensitivity.traced_loss import Loss, TracedLoss, is_below


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """What computing one module in half precision would do, with everything below it.

    Args:
      path: path of the module, or the pattern that was asked about; "" for the whole model.
      predicted: relative error of the gradient, |half - float32| / |float32| over all parameters; infinite
        where a value or a cotangent overflows.
      loss: relative error of the loss.
      overflow: number of values that would be infinite.
      underflow: number of values that would be zero, and are not.
      gradient_overflow, gradient_underflow: the same of cotangents, times the loss scale.
    """

    path: str
    predicted: float
    loss: float
    overflow: int = 0
    underflow: int = 0
    gradient_overflow: int = 0
    gradient_underflow: int = 0


@dataclasses.dataclass(frozen=True)
class Sensitivity(Report):
    """Modules in the order of what half precision would do to the gradient, the most sensitive first.

    Args:
      function: name of the loss function.
      dtype: "float16" or "bfloat16".
      loss_scale: power of two that the cotangents were multiplied by: the largest that leaves a factor of 4
        to overflow, at most 2**24. Sums over the trips of loops make it smaller than need be.
      rows: one per module or candidate.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import sensitivity
      >>> found = sensitivity(lambda w, x: ((x @ w) ** 2).sum(), jnp.ones((8, 2)) / 3, jnp.ones((1, 8)))
      >>> 0 < found.of("").predicted < 1e-3
      True
    """

    function: str
    dtype: str
    loss_scale: float
    rows: tuple[SensitivityRow, ...]

    _rows = "rows"

    def of(self, path: str) -> SensitivityRow:
        """The row of a path.

        Raises:
          KeyError: when there is none; the message lists the paths that there are.
        """
        return row_of(self.rows, path)

    @property
    def verdict(self) -> str:
        """Which parts matter most."""
        infinite = [row.path for row in self.rows if math.isinf(row.predicted)]
        # Not the modules above them.
        infinite = [p for p in infinite if not any(q != p and is_below(q, p) for q in infinite)]
        if infinite:
            return f"In {self.dtype} values overflow in {joined(infinite) or 'the whole model'}."
        first, worst = self.rows[0], next((row for row in self.rows if row.path), None)
        by = f"by {first.predicted:.2g} of its norm"
        if first.path or worst is None:
            return f"In {self.dtype}, {first.path or 'the whole model'} changes the gradient most: {by}."
        return (
            f"In {self.dtype}, the whole model changes the gradient {by}, and of its modules {worst.path} "
            f"changes it most: by {worst.predicted:.2g}."
        )

    def _tables(self) -> Sequence[Table]:
        columns = ("module", "gradient ", "loss ", "overflow ", "underflow ")
        columns += ("cotangents: overflow ", "underflow ")
        rows = []
        for row in self.rows:
            path, predicted, loss, *counts = dataclasses.astuple(row)
            rows.append(
                (path or "(all)", f"{predicted:.1e}", f"{loss:.1e}", *(Sum(n, count_text) for n in counts))
            )
        return [Table(columns, rows, f"Relative errors in {self.dtype}, one module at a time")]

    def _lines(self) -> Sequence[str]:
        return (f"{self.function}, loss scale {self.loss_scale:g}. {self.verdict}",)


def sensitivity(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    candidates: Sequence[Pattern] | None = None,
    dtype: DTypeLike = "float16",
    batches: Sequence[tuple[Any, ...]] = (),
    probes: int | None = None,
    measure: bool | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Sensitivity:
    """Predicts for each module what computing it in half precision would do to the loss and its gradient.

    Nothing is computed in half. The loss is traced as it would be under the policy `mixed_float16`, which
    says where it would round. Then the float32 program gives one gradient for each row, with the rounding of
    its modules done in float32. See docs/drift.md for how well that agrees with what half precision does.

    Args:
      loss_fn: the loss of the float32 model: `(params, *args) -> scalar`, of NNX modules
        `(model, *args) -> scalar`. Of a function without modules the named scopes count, under `autocast`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      candidates: patterns as those of a `PolicyMap`; a row for each, with everything below what it matches.
        Without any, a row for each module, with everything below it.
      dtype: "float16" or "bfloat16".
      batches: further values of `args`, of the same shapes; errors are the mean over all batches.
      probes, measure: without effect; every row is measured.
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A `Sensitivity`, the most sensitive first; `print` shows it.

    Raises:
      TypeError, ValueError: for a loss that is not a scalar, parameters without floating arrays, candidates
        that match nothing, batches of other shapes, losses of which nothing would be in half, and those
        that are not finite.

    Example:
      >>> import jax, flax.linen as nn, jax.numpy as jnp
      >>> model, x = nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(2)]), jnp.ones((2, 8)) / 3
      >>> params = model.init(jax.random.key(0), x)
      >>> found = sensitivity(lambda params: (model.apply(params, x) ** 2).mean(), params)
      >>> sorted(row.path for row in found.rows)
      ['', 'layers_0', 'layers_2']

    References:
      N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2 (the model of rounding).
    """
    if isinstance(candidates, str):
        raise TypeError(f"candidates is a list of patterns: candidates=[{candidates!r}].")
    loss = Loss(loss_fn, params, args, kwargs, has_aux, "sensitivity")
    with progress.showing("sensitivity"), without_overflow_warnings():
        traced = TracedLoss(loss, parse_dtype(dtype, "of sensitivity").name, batches)
        applied = AppliedRounding(traced)
        found = applied.effects
        if not applied.is_finite:
            raise rounding_errors.not_finite_error(found.name)
        # The name of each row, and the paths that it is about.
        if candidates:
            tops = [(p if isinstance(p, str) else show_pattern(p), _matched(found, p)) for p in candidates]
        else:
            tops = [(path, [path]) for path in _paths(found)]
        rows = list[SensitivityRow]()
        with progress.interruptible("modules from there on have no rows", known=rows):
            for name, paths in progress.steps("modules", tops):
                rows.append(_row(found, name, paths, applied))
        if not candidates:
            rows = [_with_inside(row, rows) for row in rows]
        rows.sort(key=lambda row: (-row.predicted, -row.overflow, row.path))
        return Sensitivity(found.name, found.dtype, found.loss_scale, tuple(rows))


def _paths(found: Effects) -> list[str]:
    """The modules in which something is rounded, and those above them."""
    above = {path_text(names[1:]) for names in found.modules}
    known = {path for path in above if any(is_below(group, path) for group in found.own)}
    return sorted(known | set(found.own))


def _matched(found: Effects, pattern: Pattern) -> list[str]:
    """The paths of the modules that a pattern matches."""
    modules = {path_text(names[1:]): module for names, module in found.modules.items()}
    paths = sorted({*modules, *found.own})
    hits = [path for path in paths if matches(pattern, path, modules.get(path))]
    if not hits:
        raise unused_error([pattern], found.name, paths)
    return hits


def _with_inside(row: SensitivityRow, rows: Sequence[SensitivityRow]) -> SensitivityRow:
    """A row that is no better than those of the modules inside: their errors may cancel in it, by chance."""
    inside = [other for other in rows if is_below(other.path, row.path)]
    predicted, loss = max(r.predicted for r in inside), max(r.loss for r in inside)
    return dataclasses.replace(row, predicted=predicted, loss=loss)


def _row(found: Effects, name: str, tops: Sequence[str], applied: AppliedRounding) -> SensitivityRow:
    """What modules and all below them do, when all other modules compute in float32."""
    groups = [group for group in found.own if any(is_below(group, top) for top in tops)]
    parts = [found.own[group] for group in groups] + [found.alone[top] for top in tops if top in found.alone]
    effect = sum(parts, Effect())
    gradient, loss = applied.of_modules(groups)
    effect = effect._replace(gradient=gradient, loss=loss)
    return SensitivityRow(name, effect.error, effect.loss**0.5, *effect[2:])
