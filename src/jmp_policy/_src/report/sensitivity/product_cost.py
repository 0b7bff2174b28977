"""Estimates what the matrix products of a loss and its gradient cost on a card."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_policy._src.core.targets import Target
from jmp_policy._src.report.audit.audit import audit
from jmp_policy._src.report.audit.findings import Product
from jmp_policy._src.report.memory.analytic_model import analytic_memory_model
from jmp_policy._src.report.sensitivity.half_program import Loss


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
    """Returns the products of a loss and its gradient, which is traced and not run."""
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
    """Returns the time at the peak rate of the arithmetic or of the memory, whichever is slower."""
    total = 0.0
    for p in products:
        sizes = ((p.lhs, p.m * p.k), (p.rhs, p.k * p.n), (p.result, p.m * p.n))
        moved = p.times * p.batch * sum(np.dtype(dtype).itemsize * size for dtype, size in sizes)
        arithmetic = "float8" if p.scales else p.lhs if p.is_half else "float32"
        total += max(p.flops / card.rate(arithmetic), moved / card.bandwidth)
    return total


def memory_of(loss: Loss) -> int:
    """Returns bytes of parameters, half copies, gradients and activations; nothing is run or compiled."""
    gradient, params, arrays = loss.gradient()

    def of_params(params: Any) -> Any:
        return gradient(params, arrays)

    jaxpr = jax.make_jaxpr(of_params)(params)
    alone = [1] * len(params)
    return analytic_memory_model(jaxpr, ["parameters"] * len(params), (), alone).total()
