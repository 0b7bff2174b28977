"""Predicts what computing one module in half precision would do to the loss and its gradient."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.policy.patterns import Pattern, matches, show_pattern, unused_error
from jmp_policy._src.policy.rules import path_text
from jmp_policy._src.report.sensitivity import rounding_taps
from jmp_policy._src.report.sensitivity.applied_rounding import AppliedRounding
from jmp_policy._src.report.sensitivity.half_program import Loss, is_below
from jmp_policy._src.report.sensitivity.probes import Effect, Effects, effects
from jmp_policy._src.report.sensitivity.ranking import Sensitivity, SensitivityRow
from jmp_policy._src.report.sensitivity.traced_loss import traced_loss


def sensitivity(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    candidates: Sequence[Pattern] | None = None,
    dtype: DTypeLike = "float16",
    batches: Sequence[tuple[Any, ...]] = (),
    probes: int = 4,
    measure: bool | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Sensitivity:
    """Predicts for each module what computing it in half precision would do to the loss and its gradient.

    Nothing is computed in half. The loss is traced as it would be under the policy `mixed_float16`, which
    says where it would round. Then the float32 program runs once forward and backward, and the product of
    its gradient with a random vector once backward, as often as there are probes. To first order that gives
    the mean square of the gradient's error, module by module, if rounding errors are independent of each
    other.

    First order does not see decisions that rounding turns: that of a relu whose input is nearly 0. Where the
    program makes any, each row is measured: the error of a gradient with the rounding of its module. See
    docs/recommend.md for how well both agree with what half precision does.

    Args:
      loss_fn: the loss of the float32 model: `(params, *args) -> scalar`, of NNX modules
        `(model, *args) -> scalar`. Of a function without modules the named scopes count, under `autocast`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      candidates: patterns as those of a `PolicyMap`; a row for each, with everything below what it matches.
        Left out, a row for each module, with everything below it.
      dtype: "float16" or "bfloat16".
      batches: further values of `args`, of the same shapes; errors are the mean over all batches.
      probes: number of random vectors per batch. With 4 the errors are right to 10 to 20 %.
      measure: whether each row is measured, by a gradient of its own, in place of first order. Left out: in
        programs that decide by half values (relu, maximum, sign).
      has_aux: whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A `Sensitivity`, the most sensitive first; `print` shows it.

    Raises:
      TypeError, ValueError: for a loss that is not a scalar, parameters without floating arrays, candidates
        that match nothing, batches of other shapes, and losses of which nothing would be in half.

    Example:
      >>> import jax, flax.linen as nn, jax.numpy as jnp
      >>> model, x = nn.Sequential([nn.Dense(4), nn.tanh, nn.Dense(2)]), jnp.linspace(-1, 1, 6).reshape(2, 3)
      >>> params = model.init(jax.random.key(0), x)
      >>> found = sensitivity(lambda params: (model.apply(params, x) ** 2).mean(), params)
      >>> sorted(row.path for row in found.rows)
      ['', 'layers_0', 'layers_2']

    References:
      N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 2.2 (the model of rounding).
      M. F. Hutchinson, A stochastic estimator of the trace of the influence matrix, 1990 (the probes).
    """
    loss = Loss(loss_fn, params, args, kwargs, has_aux, "sensitivity")
    traced = traced_loss(loss, np.dtype(dtype).name, batches, rounding_taps)
    found = effects(traced, probes)
    if candidates is None:
        parts = [_subtree(found, path) for path in _paths(found)]
    else:
        parts = [_of_pattern(found, pattern) for pattern in candidates]
    is_measured = traced.decides if measure is None else measure
    applied = AppliedRounding(traced, found.loss_scale) if is_measured else None
    rows = sorted(
        (_row(found, part, applied) for part in parts),
        key=lambda row: (-row.predicted, -row.overflow, row.path),
    )
    return Sensitivity(found.name, found.dtype, found.loss_scale, tuple(rows), is_measured)


class _Part(NamedTuple):
    """What a row is about.

    Args:
      name: as the row shows it.
      tops: paths of modules.
      groups: those that round, among these and below them.
    """

    name: str
    tops: Sequence[str]
    groups: Sequence[str]


def path_text_of(pattern: Pattern) -> str:
    """Returns a pattern as a row shows it."""
    return pattern if isinstance(pattern, str) else show_pattern(pattern)


def _paths(found: Effects) -> list[str]:
    """Returns the modules in which something is rounded, and those above them."""
    above = {path_text(names[1:]) for names in found.modules}
    known = {path for path in above if any(is_below(group, path) for group in found.own)}
    return sorted(known | set(found.own))


def _subtree(found: Effects, path: str) -> _Part:
    return _Part(path, [path], [group for group in found.own if is_below(group, path)])


def _of_pattern(found: Effects, pattern: Pattern) -> _Part:
    """Returns the modules that a pattern matches, with all below them."""
    modules = {path_text(names[1:]): module for names, module in found.modules.items()}
    paths = sorted({*modules, *found.own})
    hits = [path for path in paths if matches(pattern, path, modules.get(path))]
    if not hits:
        raise unused_error([pattern], found.name, paths)
    return _Part(path_text_of(pattern), hits, [g for g in found.own if any(is_below(g, hit) for hit in hits)])


def _row(found: Effects, part: _Part, applied: AppliedRounding | None) -> SensitivityRow:
    """Returns what modules do, when all other modules compute in float32."""
    parts = [found.own[group] for group in part.groups]
    effect = sum(parts, sum((found.alone[top] for top in part.tops if top in found.alone), Effect()))
    if applied is not None and math.isfinite(effect.error):
        gradient, loss = applied.of_modules(part.groups)
        effect = effect._replace(gradient=gradient, loss=loss)
    counts = dict(zip(Effect._fields[2:], effect[2:], strict=True))
    return SensitivityRow(part.name, effect.error, effect.loss**0.5, **counts)
