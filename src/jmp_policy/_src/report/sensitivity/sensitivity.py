"""Predicts what computing one module in half precision would do to the loss and its gradient."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.policy.rules import Pattern, matches, path_text, show_pattern, unused_error
from jmp_policy._src.report.sensitivity.half_program import Loss, is_below
from jmp_policy._src.report.sensitivity.probes import Effect, Effects, effects
from jmp_policy._src.report.sensitivity.ranking import Sensitivity, SensitivityRow


def sensitivity(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    candidates: Sequence[Pattern] | None = None,
    dtype: DTypeLike = "float16",
    batches: Sequence[tuple[Any, ...]] = (),
    probes: int = 4,
    has_aux: bool = False,
    **kwargs: Any,
) -> Sensitivity:
    """Predicts for each module what computing it in half precision would do to the loss and its gradient.

    Nothing is computed in half. The loss is traced as it would be under the policy `mixed_float16`, which
    says where it would round. Then the float32 program runs once forward and backward, and the product of
    its gradient with a random vector once backward, as often as there are probes. To first order that gives
    the mean square of the gradient's error, module by module, if rounding errors are independent of each
    other. See docs/recommend.md for how well it agrees with what half precision does.

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
    found = effects(loss, np.dtype(dtype).name, batches, probes)
    if candidates is None:
        rows = [_row(path, of_subtree(found, path)) for path in _paths(found)]
    else:
        rows = [_row(path_text_of(pattern), _of_pattern(found, pattern)) for pattern in candidates]
    return ranked(found, rows)


def ranked(found: Effects, rows: Iterable[SensitivityRow]) -> Sensitivity:
    """Returns the rows in order: what overflows first, then by the gradient's error."""
    ordered = sorted(rows, key=lambda row: (-row.predicted, -row.overflow, row.path))
    return Sensitivity(found.name, found.dtype, found.loss_scale, tuple(ordered))


def of_subtree(found: Effects, path: str) -> Effect:
    """Returns what a module and all below it do, when all other modules compute in float32."""
    inside = (effect for other, effect in found.own.items() if is_below(other, path))
    return sum(inside, found.alone.get(path, Effect()))


def path_text_of(pattern: Pattern) -> str:
    """Returns a pattern as a row shows it."""
    return pattern if isinstance(pattern, str) else show_pattern(pattern)


def _paths(found: Effects) -> list[str]:
    """Returns the modules in which something is rounded, and those above them."""
    above = {path_text(names[1:]) for names in found.modules}
    known = {path for path in above if any(is_below(group, path) for group in found.own)}
    return sorted(known | set(found.own))


def _of_pattern(found: Effects, pattern: Pattern) -> Effect:
    """Returns what the modules do that a pattern matches, with all below them."""
    modules = {path_text(names[1:]): module for names, module in found.modules.items()}
    paths = sorted({*modules, *found.own})
    hits = [path for path in paths if matches(pattern, path, modules.get(path))]
    if not hits:
        raise unused_error([pattern], found.name, paths)
    inside = (e for path, e in found.own.items() if any(is_below(path, hit) for hit in hits))
    return sum(inside, sum((found.alone.get(hit, Effect()) for hit in hits), Effect()))


def _row(path: str, effect: Effect) -> SensitivityRow:
    counts = dict(zip(Effect._fields[2:], effect[2:], strict=True))
    return SensitivityRow(path, effect.error, effect.loss**0.5, **counts)
