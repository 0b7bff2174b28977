"""Says, from what a run has logged, what of its precision no longer fits, and what to change.

It reads numbers that training has anyway, on the host, and runs nothing. Whoever changes the policy of a run
wraps the model anew and goes on with the state it has; `restore_state(fresh_state, state)` adds the variables
of `fp8_delayed`, or leaves them out.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_policy._src.core.report_base import Report, Table
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.metrics import get_loss_scale_state, metrics_on_host, static_scales
from jmp_policy._src.report.spectrum.magnitudes import GradientSpectrum
from jmp_policy._src.report.spectrum.spectrum import SpectrumState

#: Skipped steps in a row that no growth of a loss scale explains, and steps that are enough for a share.
_IN_A_ROW, _ENOUGH = 10, 100

#: Shares of skipped steps and of gradients that are lost, the error of a gradient, and how much larger than
#: usual a value in a history is, from which on something is said.
_SKIPPED, _LOST, _ERROR, _SPIKE = 0.05, 0.05, 0.1, 64

_LARGEST_FLOAT16 = 65504.0


@dataclasses.dataclass(frozen=True)
class Change:
    """Something to change.

    Args:
      path: of the module, or the group of parameters; "" for the whole model.
      finding: what was found, with its numbers.
      change: what to do.
      rule: policy for that path, as a rule has it; "" where the policy stays.
    """

    path: str
    finding: str
    change: str
    rule: str = ""


@dataclasses.dataclass(frozen=True)
class Advice(Report):
    """What to change in a run, the most urgent first; empty if nothing.

    Args:
      changes: one row each.
    """

    changes: tuple[Change, ...]

    _rows = "changes"

    @property
    def rules(self) -> dict[str, str]:
        """Policies by path, for `PolicyMap(policy, rules)`; that of the whole model is under ""."""
        return {change.path: change.rule for change in reversed(self.changes) if change.rule}

    @property
    def verdict(self) -> str:
        """The first change, in a sentence."""
        if not self.changes:
            return "Nothing to change."
        first = self.changes[0]
        where = f"{first.path}: " if first.path else ""
        return f"{where}{first.finding}. {first.change}."

    def _tables(self) -> Sequence[Table]:
        rows = [(c.path or "the model", c.finding, c.change, c.rule) for c in self.changes]
        return [Table(("where", "found", "change", "rule"), rows)] if rows else []

    def _lines(self) -> Sequence[str]:
        return [self.verdict]


def advise(
    opt_state: PyTree,
    scalars: Mapping[str, Any] | None = None,
    *,
    spectrum: GradientSpectrum | SpectrumState | None = None,
) -> Advice:
    """Says what of a run's precision to change: the loss scale, a module's policy, a recipe.

    Call it on the host, every thousand steps or when the loss looks odd. It reads how often steps were
    skipped, the magnitudes of `loss_scaled(..., monitor=True)`, errors by `drift_metrics`, counts of
    `spectrum_value_and_grad` and histories of `fp8_delayed`, as far as they are there.

    Args:
      opt_state: the optimizer's state, or a `TrainState` that holds it.
      scalars: what else was logged: `drift_metrics` under its names.
      spectrum: counts of gradients' magnitudes.

    Returns:
      `Advice`: `changes`, `rules` for a `PolicyMap`, and a `verdict`.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several without names, and for stacked states.
      TypeError: for scalars that are no numbers, and a spectrum that is none.

    Example:
      >>> import jax.numpy as jnp, optax, jmp_policy as jmpp
      >>> tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(2.0, min_loss_scale=1.0))
      >>> params = jnp.ones(2)
      >>> state = tx.init(params)
      >>> for _ in range(12):
      ...     _, state = tx.update(jnp.full(2, jnp.nan), state, params)
      >>> jmpp.advise(state).rules
      {'': 'mixed_bfloat16'}
    """
    for name, value in (scalars or {}).items():
        if np.shape(value) or np.asarray(value).dtype.kind not in "biufV":  # bfloat16 is a V.
            raise TypeError(f"advise takes numbers; {name!r} is {value!r}.")
    seen = metrics_on_host(opt_state, "advise") | dict(scalars or {})
    if stacked := [name for name, value in seen.items() if np.shape(value)]:
        raise ValueError(
            f"advise takes one state; {stacked[0]!r} has shape {np.shape(seen[stacked[0]])}. Of those that "
            "pmap or vmap has stacked give one: jax.tree.map(lambda x: x[0], opt_state)."
        )
    values = {name: float(np.asarray(value)) for name, value in seen.items()}
    if isinstance(spectrum, SpectrumState):
        spectrum = spectrum.report()
    if not isinstance(spectrum, GradientSpectrum | None):
        raise TypeError(f"spectrum is a GradientSpectrum or SpectrumState, got {type(spectrum).__name__}.")
    scale = get_loss_scale_state(opt_state).loss_scale
    found = [
        *_of_skips(values, static_scales(opt_state), getattr(scale, "growth_interval", None)),
        *_of_histories(opt_state),
        *_of_groups(values),
        *(_of_spectrum(spectrum, values) if spectrum is not None else ()),
        *_of_errors(values),
    ]
    return Advice(tuple(found))


def _of_skips(values: Mapping[str, float], static: set[str], interval: Any) -> Iterator[Change]:
    steps, skipped = values["steps"], values["skipped_steps"]
    losses = [name.partition("/")[2] for name in values if name.startswith("loss_scale/")]
    # Of several losses each has its own; a step is skipped if the gradients of one are not finite.
    each = [(f"/{n}", f" for gradients of loss {n!r}", values[f"consecutive_nonfinite/{n}"]) for n in losses]
    stuck = False
    for name, whose, in_a_row in each or [("", "", values["consecutive_skips"])]:
        if values.get(f"stuck{name}") or in_a_row >= _IN_A_ROW:
            many = f"{in_a_row:.0f} steps in a row were skipped"
            what = many if in_a_row >= _IN_A_ROW else "overflows go on"
            finding = f"{what}{whose} at a loss scale of {values[f'loss_scale{name}']:g}"
            stuck = True
            if name in static and values[f"loss_scale{name}"] > 1:
                change = "Use DynamicLossScale(), which finds a smaller one; if none helps, call diagnose"
                yield Change("", finding, change)
                continue
            change = "Call diagnose to find the value, or compute in bfloat16, which has float32's range"
            yield Change("", finding, change, "mixed_bfloat16")
    if stuck:
        return
    if steps >= _ENOUGH and skipped / steps > _SKIPPED:
        finding = f"{skipped / steps:.0%} of {steps:.0f} steps were skipped"
        if isinstance(interval, int) and 1 / (interval + 1) > _SKIPPED / 2:
            yield Change("", finding, f"Let the scale grow less often: growth_interval=2000, not {interval}")
        else:
            change = "More than the growth of the scale explains: call diagnose, or compute in bfloat16"
            yield Change("", finding, change, "mixed_bfloat16")


def _of_groups(values: Mapping[str, float]) -> Iterator[Change]:
    """By magnitudes of the optimizer's state: "grad_max/encoder", "grad_underflow/encoder"."""
    for name, share in values.items():
        kind, _, group = name.partition("/")
        if kind != "grad_underflow" or share <= _LOST:
            continue
        loss = group.partition("/")[0]
        scale = values.get("loss_scale") or values.get(f"loss_scale/{loss}", 1.0)
        # Zeros that are none of float16's: rows of a table that no token asked for.
        if values[f"grad_min/{group}"] > 4 * 2.0**-25 / scale:
            continue
        largest = max(value for key, value in values.items() if key.startswith("grad_max/"))
        finding = f"{share:.0%} of the gradients are 0 in float16 at a loss scale of {scale:g}"
        room = _LARGEST_FLOAT16 / max(largest * scale, 2.0**-100)
        if not largest:
            yield Change(group, finding, "Start with a larger one, which falls: DynamicLossScale(2.0**24)")
        elif room > 2.0**8:
            times = 2.0 ** int(np.log2(room) - 4)
            yield Change(group, finding, f"The loss scale can be {times:g} times as large")
        else:
            yield Change(group, finding, "Other gradients use the rest of the range", "mixed_bfloat16")


def _of_spectrum(spectrum: GradientSpectrum, values: Mapping[str, float]) -> Iterator[Change]:
    scale, safe = values.get("loss_scale"), spectrum.safe_scale
    if scale is not None and np.isfinite(safe) and scale > 4 * spectrum.recommended_scale:
        finding = f"the loss scale is {scale:g}, and gradients overflow above {spectrum.recommended_scale:g}"
        yield Change("", finding, f"Set it to {safe:g}")


def _of_errors(values: Mapping[str, float]) -> Iterator[Change]:
    for name, error in values.items():
        if name.rpartition("/")[2] == "gradient_error" and not error <= _ERROR:
            change = "Call drift for the place, or recommend(loss_fn, params, batch) for a policy"
            off = f"{error:.0%} off float32's" if np.isfinite(error) else "not finite"
            yield Change("", f"the gradient is {off} ({name})", change)


def _of_histories(state: PyTree) -> Iterator[Change]:
    """By the largest values of the steps before, which `fp8_delayed` takes its scales from."""
    for path, history in jax.tree_util.tree_leaves_with_path(state):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        layer, _, name = text.rpartition("/")
        if not name.endswith("_amax_history"):
            continue
        largest = np.asarray(history, np.float64).reshape(-1, np.shape(history)[-1]).max(0)
        # The newest is the first, the one before it the last (`flax.linen.fp8_ops`).
        seen = np.roll(largest, -1)
        seen = seen[seen > 0]
        if len(seen) <= _ENOUGH:
            continue
        times = seen.max() / np.median(seen[-_ENOUGH:])
        if times > _SPIKE:
            inside = layer.rpartition("_overwrite_with_gradient/")[2].rpartition("/")[0]
            what = name.removesuffix("_amax_history")
            usual = f"those of the last {_ENOUGH} steps"
            finding = f"the scale of {what} is that of a value {times:.0f} times as large as {usual}"
            yield Change(inside, finding, "Take scales from each step", "mixed_bfloat16, r=fp8_current")
