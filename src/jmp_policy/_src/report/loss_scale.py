"""What a report is told about the loss scale: a number will do."""

from typing import Any

import numpy as np

from jmp_policy._src.loss_scaling.loss_scale import LossScale, StaticLossScale
from jmp_policy._src.loss_scaling.state import find_loss_scale


def as_loss_scale(scale: Any) -> LossScale:
    """A loss scale, given one, a number, or an optimizer state that holds one.

    Raises:
      ValueError: when an optimizer state holds none, or several.
    """
    is_number = isinstance(scale, int | float | np.number) or getattr(scale, "ndim", None) == 0
    return StaticLossScale(scale) if is_number else find_loss_scale(scale)
