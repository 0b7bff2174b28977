"""Converts the argument `scale=` of reports, which may be a number, to a loss scale."""

from typing import Any

import numpy as np

from jmp_policy._src.loss_scaling.fixed_scale import StaticLossScale
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.state import find_loss_scale


def as_loss_scale(scale: Any) -> LossScale:
    """Converts a number to a loss scale, and finds the loss scale in an optimizer state.

    Args:
      scale: a loss scale, a number, or an optimizer state that holds a loss scale.

    Raises:
      ValueError: when an optimizer state holds none, or several.
    """
    is_number = isinstance(scale, int | float | np.number) or getattr(scale, "ndim", None) == 0
    return StaticLossScale(scale) if is_number else find_loss_scale(scale)
