"""Recommends a policy by measurement: in half what fits a budget, in float32 what must be, with reasons."""

import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.report_base import Report, Table, percent, plain
from jmp_policy._src.core.targets import Target, find_target
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.loss_scaling.float16_loss import first_cotangent
from jmp_policy._src.loss_scaling.loss_scale import DynamicLossScale, LossScale
from jmp_policy._src.loss_scaling.scale_types import NoOpLossScale
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report import progress
from jmp_policy._src.report.audit_findings import Product
from jmp_policy._src.report.function import replaced
from jmp_policy._src.report.lost_constants import without_overflow_warnings
from jmp_policy._src.report.lowering.memory_estimate import analytic_memory_model
from jmp_policy._src.report.pieces import Pieces
from jmp_policy._src.report.sensitivity import chosen_modules as chosen
from jmp_policy._src.report.sensitivity import rounding_errors
from jmp_policy._src.report.sensitivity.chosen_modules import Choice, RecommendationRow
from jmp_policy._src.report.sensitivity.traced_loss import Loss, TracedLoss
from jmp_policy._src.report.trials import grad_in_float32, product_layers, products_alone


@dataclasses.dataclass(frozen=True)
class Recommendation(Report):
    """A policy chosen by measurement; `policy` and `loss_scale` are ready to use.

    Args:
      function: name of the loss function.
      dtype: "float16" or "bfloat16", of what is in half.
      policy: the rules.
      loss_scale: the loss scale to start with; none is needed for bfloat16.
      rows: the default and every rule, with the reason.
      budget: relative error of the gradient that was allowed.
      predicted: that of the policy, as `sensitivity` predicts it; nan where no modules were chosen by that.
      measured: that of the policy, as one run of it on this machine gave it; infinite where it overflows.
      half_share: share of the FLOPs of matrix products whose operands have 16 bits or fewer; nan without
        products.
      target: name of the card whose speed was asked for, or "".
      speedup: time of the products in float32 over that under the policy, on that card, each at its peak
        rate or memory bandwidth; nan without a card.
      memory: estimated bytes of parameters, half copies, gradients and activations, over those in float32;
        nan without a card.
      recipe: the float8 recipe that was asked for, or "".
      float8_share: share of the FLOPs of matrix products whose operands have 8 bits; nan without products.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import recommend
      >>> found = recommend(lambda w, x: ((x @ w) ** 2).sum(), jnp.ones((8, 2)) / 3, jnp.ones((1, 8)))
      >>> found.policy, found.fits, found.half_share
      (PolicyMap('params=float32,compute=float16,output=float32'), True, 1.0)
    """

    function: str
    dtype: str
    policy: PolicyMap
    loss_scale: LossScale
    rows: tuple[RecommendationRow, ...]
    budget: float
    predicted: float
    measured: float
    half_share: float
    target: str = ""
    speedup: float = math.nan
    memory: float = math.nan
    recipe: str = ""
    float8_share: float = math.nan

    _rows = "rows"

    @property
    def fits(self) -> bool:
        """Whether the measured error is within the budget."""
        return self.measured <= self.budget

    @property
    def verdict(self) -> str:
        """Whether the policy fits the budget, and what it computes in half."""
        word = "within" if self.fits else "MORE THAN"
        predicted = "" if math.isnan(self.predicted) else f" (predicted {percent(self.predicted)})"
        errors = f"{percent(self.measured)}{predicted}"
        parts = [f"The gradient is off by {errors}, {word} the budget of {100 * self.budget:.3g} %."]
        if not math.isnan(self.half_share):
            float8 = f", {percent(self.float8_share)} in float8 by {self.recipe}" if self.recipe else ""
            parts.append(f"{percent(self.half_share)} of the FLOPs are in half{float8}.")
        if self.half_share == 0:
            parts.append("That gains nothing: stay in float32.")
        if not math.isnan(self.speedup):
            parts.append(f"{self.target}: products {self.speedup:.2g} times as fast.")
        if not math.isnan(self.memory):
            parts.append(f"Memory: {percent(self.memory)} of float32's.")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the verdict, as plain data; `policy` as `PolicyMap.from_dict` reads it."""
        scale = float(self.loss_scale.loss_scale)
        return {**super().to_dict(), "policy": plain(self.policy.to_dict()), "loss_scale": scale}

    def _tables(self) -> Sequence[Table]:
        errors = [f"{row.predicted:.1e}" if row.predicted else "" for row in self.rows]
        rows = [
            (row.pattern or "(default)", row.policy, error, row.reason)
            for row, error in zip(self.rows, errors, strict=True)
        ]
        return [Table(("module", "policy", "error in half ", "reason"), rows)]

    def _lines(self) -> Sequence[str]:
        scale = float(self.loss_scale.loss_scale)
        return (f"{self.function}: {self.policy!r}, loss scale {scale:g}", self.verdict)


#: The relative error of the gradient that is allowed where no other batch says how much it varies anyway:
#: two to ten times what a Transformer or a convolutional network has in float16 (docs/drift.md).
BUDGET = 0.01

#: Share of the gradient's distance between batches that rounding may add to it.
_OF_NOISE = 0.1

#: Where less of the FLOPs would be in half, layers that are one product are tried in half, with all else in
#: float32.
_MOSTLY = 0.9

#: How often modules are added because the measured error is above the budget.
_ROUNDS = 4


def recommend(
    loss_fn: Any,
    params: PyTree,
    *args: Any,
    budget: float | None = None,
    target: str | None = None,
    dtype: DTypeLike | None = None,
    batches: Sequence[tuple[Any, ...]] = (),
    probes: int | None = None,
    has_aux: bool = False,
    recipe: str | None = None,
    **kwargs: Any,
) -> Recommendation:
    """Recommends a `PolicyMap` for a model, a loss scale, and says why.

    Everything is in half that leaves the gradient within a budget of error. First all is run in half, and
    the gradient compared with that of float32. If it is off by more, modules in which values or cotangents
    overflow compute in float32. If that is not enough, weight gradients do too (`grad=float32`), or else the
    modules that bring most of the error, as `sensitivity` predicts it, until what is left fits when it runs.
    Where that leaves less than 90 % of the FLOPs in half, float32 for all but the layers that are one product
    is tried.

    Args:
      loss_fn: the loss of the float32 model, as `sensitivity` takes it. Or a model: a Linen module, whose
        variables `params` are, or an NNX module, with its inputs after it; the loss is then half of the mean
        square of its outputs.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      budget: relative error of the gradient that is allowed, |half - float32| / |float32|. Left out, a tenth
        of the relative distance of the batches' gradients from their mean, or 0.01 where there is one batch.
      target: name of a card ("H100"), for the predicted speed and memory there.
      dtype: "float16" or "bfloat16". Left out, float16, unless more can be in half in bfloat16.
      batches: further values of `args`, of the same shapes.
      probes: without effect.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      recipe: a float8 recipe, "fp8_current" say. Products that suit it follow it where the budget allows,
        and with `target=` only where that gains there; all else is as without it.

    Returns:
      A `Recommendation`; `print` shows it, and `.policy` is what `wrap` takes.

    Raises:
      TypeError, ValueError: as `sensitivity`; for a budget that is no number between 0 and 1, an unknown card
        or recipe, a recipe that keeps state, and, with a recipe, a card without float8 arithmetic.

    Example:
      >>> import jax, flax.linen as nn, jax.numpy as jnp
      >>> model, x = nn.Dense(2), jnp.linspace(-1, 1, 16).reshape(2, 8)
      >>> variables = model.init(jax.random.key(0), x)
      >>> recommend(model, variables, x).policy
      PolicyMap('params=float32,compute=float16,output=float32')
    """
    if budget is not None and not (isinstance(budget, (numbers.Real, jax.Array)) and 0 < budget < 1):
        raise ValueError(
            f"The budget is a relative error of the gradient, such as 0.01 for 1 %; got {budget!r}."
        )
    card = None if target is None else find_target(target)
    recipe = recipe and chosen.usable_recipe(recipe, target)
    loss = _as_loss(loss_fn, params, args, kwargs, has_aux)
    others = list(map(loss.with_batch, batches))
    dtypes = ["float16", "bfloat16"] if dtype is None else [parse_dtype(dtype, "of recommend").name]
    found: list[Recommendation] = []
    with progress.showing("recommend"), without_overflow_warnings():
        first = TracedLoss(loss, dtypes[0], batches)  # Refuses models that are wrapped.
        exact = [_gradient(each, 1.0) for each in (loss, *others)]
        if not all(np.isfinite(gradient).all() for gradient in exact):
            raise rounding_errors.not_finite_error(loss.function.name)
        allowed = _budget(exact) if budget is None else float(budget)
        with progress.interruptible("bfloat16 was not tried", known=found):
            for name in dtypes:
                traced = TracedLoss(loss, name, batches) if found else first
                last = _in(loss, traced, allowed, exact[0], card)
                found.append(last)
                if last.fits and len(last.rows) == 1 and is_half(last.policy.default.compute_dtype):
                    break
        best = max(found, key=_merit)
        return best if recipe is None else _with_recipe(loss, best, recipe, exact[0], card)


def _with_recipe(
    loss: Loss, found: Recommendation, recipe: str, exact: np.ndarray, card: Target | None
) -> Recommendation:
    """A recommendation with products in float8 where the budget allows."""

    def error(rules: PolicyMap) -> float:
        return _error(loss, rules, float(found.loss_scale.loss_scale), exact)

    choice, measured = chosen.in_float8(loss, found.policy, recipe, found.measured, found.budget, error)
    rules = choice.rules()
    return dataclasses.replace(
        found,
        policy=rules,
        rows=tuple(choice.rows(found.rows)),
        predicted=math.hypot(found.predicted, math.sqrt(choice.total)),
        measured=measured,
        recipe=recipe,
        **_gains(loss, rules, card),
    )


def _merit(found: Recommendation) -> Any:
    """What to choose by: the budget, then what is in half, then the error."""
    share = 0.0 if math.isnan(found.half_share) else round(found.half_share, 1)
    return found.fits, share, -found.measured


def _in(
    loss: Loss, traced: TracedLoss, budget: float, exact: np.ndarray, card: Target | None
) -> Recommendation:
    """What to recommend in one dtype."""
    applied, dtype = rounding_errors.AppliedRounding(traced), traced.dtype
    seen = applied.effects
    scale, is_known = seen.loss_scale if dtype == "float16" else 1.0, False

    def run(choice: Choice) -> tuple[Choice, PolicyMap, float]:
        progress.step(f"gradient under {len(choice.reasons) or 'no'} rules in {dtype}")
        rules = chosen.rules_of(choice)
        return choice, rules, _error(loss, rules, scale, exact)

    least, kinds = chosen.needing_float32(seen, traced.in_float32), product_layers(traced.modules.values())
    # What overflows may do no harm: cotangents that a relu multiplies by 0.
    choice, rules, measured = run(chosen.without_half(seen, traced.in_float32))
    if least != choice and measured > budget:
        choice, rules, measured = run(least)
    if kinds and measured > budget:
        with progress.interruptible("float32 for weight gradients alone was not tried"):
            # Where sums over many examples are what is wrong, as of a bias, no layer has to be float32.
            sums = grad_in_float32(chosen.rules_of(least))
            error = _error(loss, sums, scale, exact)
            if error <= budget:
                choice, rules, measured = least, sums, error
    with progress.interruptible("rules with less error were not tried"):
        if measured > budget:
            wanted = chosen.needing_float32(applied.own(), traced.in_float32)
            choice, rules, measured = run(
                chosen.within(wanted, budget, lambda c: math.sqrt(applied.of_modules(c.half)[0]))
            )
            is_known = True
        for _ in range(_ROUNDS):
            path = choice.next()
            if measured <= budget or path is None:
                break
            # What is run may be off by more than was predicted: by as much the prediction is to be less.
            less = choice.predicted * max(budget / measured, 0.5)
            choice, rules, measured = run(chosen.within(chosen.widened(choice, path), less))

    if dtype == "float16" and choice.reasons:
        # Cotangents in modules that are float32 now bind no scale.
        wider = rounding_errors.loss_scale_for(seen.largest[path] for path in choice.half)
        if wider > scale and (error := _error(loss, rules, wider, exact)) <= max(measured, budget):
            scale, measured = wider, error
    rows, predicted = chosen.rows_of(choice, rules), choice.predicted if is_known else math.nan
    share = _gains(loss, rules, None)["half_share"]
    if kinds and choice.reasons and not (measured <= budget and share >= _MOSTLY):
        with progress.interruptible("rules with products alone in half were not tried"):
            # Errors that no rounding makes, as of a constant that overflows, are not found module by module.
            alone = products_alone(PolicyMap(f"mixed_{dtype}"), kinds)
            more = _gains(loss, alone, None)["half_share"]
            for changed in (alone, grad_in_float32(alone)) if measured > budget or more > share else ():
                error = _error(loss, changed, scale, exact)
                if error <= budget:
                    rules, measured, predicted = changed, error, math.nan
                    rows = chosen.rows_of(choice, rules)
                    break
    if not is_known and is_half(rules.default.compute_dtype):
        rows[0] = dataclasses.replace(rows[0], predicted=measured)
    return Recommendation(
        function=seen.name,
        dtype=dtype,
        policy=rules,
        loss_scale=DynamicLossScale(scale) if dtype == "float16" else NoOpLossScale(),
        rows=tuple(rows),
        budget=budget,
        predicted=predicted,
        measured=measured,
        target="" if card is None else card.name,
        **_gains(loss, rules, card),
    )


def _gains(loss: Loss, rules: PolicyMap, card: Target | None) -> dict[str, Any]:
    """What rules make of products and memory, as fields of a `Recommendation`."""
    under = loss.under(rules)
    memory = math.nan if card is None else memory_of(under) / memory_of(loss)
    return {**compared(loss.products, under.products, card), "memory": memory}


def _error(loss: Loss, rules: PolicyMap, scale: float, exact: np.ndarray) -> float:
    """The relative error of the gradient under rules, as one run on this machine gives it."""
    # Of weights that `grad=float32` does not reach: then it does not help.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return _distance(_gradient(loss.under(rules), scale), exact)


@without_overflow_warnings()
def _gradient(loss: Loss, scale: float) -> np.ndarray:
    """The gradient of a loss as one vector, without the scale; NaN if the loss is not finite."""
    scale = float(first_cotangent(loss.jaxpr.out_avals[0].dtype, scale))
    *grads, value = Pieces(loss.gradient)([*loss.function.arrays, np.float32(scale)])
    found = np.concatenate([np.asarray(grad, np.float64).ravel() / scale for grad in grads])
    return found if np.isfinite(value) else np.full_like(found, np.nan)


def _distance(found: np.ndarray, exact: np.ndarray) -> float:
    norm = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(found - exact)) / norm if norm else 0.0
    return error if math.isfinite(error) else math.inf


def _budget(gradients: Sequence[np.ndarray]) -> float:
    mean = np.mean(gradients, axis=0)
    noise = float(np.mean([_distance(gradient, mean) for gradient in gradients]))
    return _OF_NOISE * noise if noise else BUDGET


def _as_loss(loss_fn: Any, params: Any, args: Any, kwargs: Any, has_aux: bool) -> Loss:
    framework = framework_of(loss_fn)
    if framework is None:
        return Loss(loss_fn, params, args, kwargs, has_aux, "recommend")
    if framework.holds_arrays:
        call = _of_outputs(lambda model, *a, **k: model(*a, **k))
        return Loss(call, loss_fn, (params, *args), kwargs, False, "recommend")
    if not isinstance(params, Mapping) or "params" not in params:
        raise TypeError(
            "recommend of a Linen module takes all of its variables, as `init` returns them: "
            "recommend(model, {'params': params}, *inputs)."
        )
    rest = {kind: value for kind, value in params.items() if kind != "params"}

    def apply(params: Any, *args: Any, **kwargs: Any) -> Any:
        return loss_fn.apply({**rest, "params": params}, *args, **kwargs, mutable=list(rest))[0]

    return Loss(_of_outputs(apply), params["params"], args, kwargs, False, "recommend")


def _of_outputs(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def half_mean_square(*args: Any, **kwargs: Any) -> Any:
        outs = [x for x in jax.tree.leaves(call(*args, **kwargs)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.mean(jnp.square(x.astype(jnp.float32))) for x in outs) / 2

    return half_mean_square


def compared(plain: Sequence[Product], under: Sequence[Product], card: Target | None) -> dict[str, float]:
    """Compares the products of float32 with those under a policy, as fields of a `Recommendation`."""
    flops = sum(product.flops for product in under)
    if not flops:
        return dict.fromkeys(("half_share", "float8_share", "speedup"), math.nan)
    return {
        "half_share": sum(p.flops for p in under if p.is_half) / flops,
        "float8_share": sum(p.flops for p in under if p.scales) / flops,
        "speedup": math.nan if card is None else _seconds(plain, card) / _seconds(under, card),
    }


def _seconds(products: Sequence[Product], card: Target) -> float:
    """The time at the peak rate of the arithmetic or of the memory, whichever is slower."""
    total = 0.0
    for p in products:
        sizes = ((p.lhs, p.m * p.k), (p.rhs, p.k * p.n), (p.result, p.m * p.n))
        moved = p.times * p.batch * sum(np.dtype(dtype).itemsize * size for dtype, size in sizes)
        arithmetic = "float8" if p.scales else p.lhs if p.is_half else "float32"
        total += max(p.flops / card.rate(arithmetic), moved / card.bandwidth)
    return total


def memory_of(loss: Loss) -> int:
    """Bytes of parameters, half copies, gradients and activations; nothing is run or compiled."""
    gradient, arrays = jaxpr_as_fun(loss.gradient), loss.function.arrays
    params = [arrays[i] for i in loss.trained]
    jaxpr = jax.make_jaxpr(lambda params: gradient(*replaced(arrays, loss.trained, params), 1.0))(params)
    return analytic_memory_model(jaxpr, ["parameters"] * len(params)).total()
