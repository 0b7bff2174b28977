"""Defines the result of `recommend`, a policy with the reason for each rule, and what it would cost."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_policy._src.core.report_base import Report, Table, percent, plain
from jmp_policy._src.core.targets import Target
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.audit import audit
from jmp_policy._src.report.audit_findings import Product
from jmp_policy._src.report.lowering.memory_estimate import analytic_memory_model
from jmp_policy._src.report.sensitivity.traced_loss import Loss


@dataclasses.dataclass(frozen=True)
class RecommendationRow:
    """One rule of a recommended policy.

    Args:
      pattern: path or glob; "" for the default.
      policy: text of the policy.
      reason: why.
      predicted: relative error of the gradient that the modules it is about would bring in half; infinite
        where a value overflows.
    """

    pattern: str
    policy: str
    reason: str
    predicted: float


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
      predicted: that of the policy, to first order; nan where a recipe fits everywhere, and nobody had to
        know of each module.
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
      >>> found = recommend(lambda w, x: ((x @ w) ** 2).sum(), jnp.ones((2, 2)) / 3, jnp.ones((1, 2)))
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
        share = (
            "" if math.isnan(self.half_share) else f" {percent(self.half_share)} of the FLOPs are in half."
        )
        if self.recipe and share:
            share = f"{share[:-1]}, {percent(self.float8_share)} in float8 by {self.recipe}."
        speed = (
            "" if math.isnan(self.speedup) else f" {self.target}: products {self.speedup:.2g} times as fast."
        )
        memory = "" if math.isnan(self.memory) else f" Memory: {percent(self.memory)} of float32's."
        word = "within" if self.fits else "MORE THAN"
        predicted = "" if math.isnan(self.predicted) else f" (predicted {percent(self.predicted)})"
        errors = f"{percent(self.measured)}{predicted}"
        fits = f"The gradient is off by {errors}, {word} the budget of {percent(self.budget)}."
        return f"{fits}{share}{speed}{memory}"

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the verdict, as plain data; `policy` as `PolicyMap.from_dict` reads it."""
        fields = {
            **vars(self),
            "policy": self.policy.to_dict(),
            "loss_scale": float(self.loss_scale.loss_scale),
        }
        return {**{name: plain(value) for name, value in fields.items()}, "verdict": self.verdict}

    def _tables(self) -> Sequence[Table]:
        rows = [(r.pattern or "(default)", r.policy, f"{r.predicted:.1e}", r.reason) for r in self.rows]
        return [Table(("module", "policy", "error in half ", "reason"), rows)]

    def _lines(self) -> Sequence[str]:
        scale = float(self.loss_scale.loss_scale)
        return (f"{self.function}: {self.policy!r}, loss scale {scale:g}", self.verdict)


class Cost(NamedTuple):
    """Products under a policy.

    Args:
      half_share: share of the FLOPs whose operands have 16 bits or fewer; nan without products.
      float8_share: share of those whose operands have 8.
      speedup: time in float32 over that under the policy; nan without a card.
    """

    half_share: float
    float8_share: float
    speedup: float


def products(loss: Loss) -> Sequence[Product]:
    """The products of a loss and its gradient, which is traced and not run."""
    return audit(*loss.gradient()).products


def compared(plain: Sequence[Product], under: Sequence[Product], card: Target | None) -> Cost:
    """Compares the products of float32 with those under a policy."""
    flops = sum(product.flops for product in under)
    half, float8 = (
        sum(p.flops for p in under if is_counted(p)) / flops if flops else math.nan
        for is_counted in (lambda p: p.is_half, lambda p: p.scales)
    )
    if card is None or not flops:
        return Cost(half, float8, math.nan)
    return Cost(half, float8, _seconds(plain, card) / _seconds(under, card))


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
    gradient, params, arrays = loss.gradient()

    def of_params(params: Any) -> Any:
        return gradient(params, arrays)

    jaxpr = jax.make_jaxpr(of_params)(params)
    alone = [1] * len(params)
    return analytic_memory_model(jaxpr, ["parameters"] * len(params), (), alone).total()
