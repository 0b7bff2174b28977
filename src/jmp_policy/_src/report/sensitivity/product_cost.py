"""Estimates what the matrix products of a loss and its gradient cost on a card."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmp_policy._src.core.targets.target import Target
from jmp_policy._src.report.audit.audit import audit
from jmp_policy._src.report.audit.findings import Product
from jmp_policy._src.report.sensitivity.half_program import Loss


class Cost(NamedTuple):
    """Products under a policy.

    Args:
      half_share: share of the FLOPs whose operands are half; nan without products.
      speedup: time in float32 over that under the policy; nan without a card.
    """

    half_share: float
    speedup: float


def products(loss: Loss) -> Sequence[Product]:
    """Returns the products of a loss and its gradient, which is traced and not run."""
    return audit(*loss.gradient()).products


def compared(plain: Sequence[Product], under: Sequence[Product], card: Target | None) -> Cost:
    """Compares the products of float32 with those under a policy."""
    flops = sum(product.flops for product in under)
    share = sum(p.flops for p in under if p.is_half) / flops if flops else math.nan
    if card is None or not flops:
        return Cost(share, math.nan)
    return Cost(share, _seconds(plain, card) / _seconds(under, card))


def _seconds(products: Sequence[Product], card: Target) -> float:
    """Returns the time at the peak rate of the arithmetic or of the memory, whichever is slower."""
    total = 0.0
    for p in products:
        sizes = ((p.lhs, p.m * p.k), (p.rhs, p.k * p.n), (p.result, p.m * p.n))
        moved = p.times * p.batch * sum(np.dtype(dtype).itemsize * size for dtype, size in sizes)
        total += max(p.flops / card.rate(p.lhs if p.is_half else "float32"), moved / card.bandwidth)
    return total
