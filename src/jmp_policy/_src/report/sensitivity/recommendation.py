"""Defines the result of `recommend`: a policy per module, with the reason for each rule."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jmp_policy._src.core.report_base import Report, Table, percent, plain
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.policy.rules import PolicyMap


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
        """Returns whether the measured error is within the budget."""
        return self.measured <= self.budget

    @property
    def verdict(self) -> str:
        """Returns whether the policy fits the budget, and what it computes in half."""
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
        """Returns every field, and the verdict, as plain data; `policy` as `PolicyMap.from_dict` reads it."""
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
