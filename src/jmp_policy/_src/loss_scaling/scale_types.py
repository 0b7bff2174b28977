"""Knows the types of loss scales that a config can name."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.loss_scaling.adaptive_scale import PIDLossScale, StatisticLossScale
from jmp_policy._src.loss_scaling.fixed_scale import NoOpLossScale, StaticLossScale
from jmp_policy._src.loss_scaling.loss_scale import DynamicLossScale, LossScale

TYPES: dict[str, Any] = {
    "none": NoOpLossScale,
    "static": StaticLossScale,
    "dynamic": DynamicLossScale,
    "statistic": StatisticLossScale,
    "pid": PIDLossScale,
}


def loss_scale_to_dict(loss_scale: LossScale) -> dict[str, Any]:
    """Writes a loss scale as `{"type": "dynamic", "loss_scale": 65536.0, ...}`: the arguments that make it.

    Raises:
      TypeError: for a loss scale of the user's own class.
      ValueError: where the scale is not a known number.
    """
    if type(loss_scale) not in TYPES.values():
        raise TypeError(
            f"A loss scale of the class {type(loss_scale).__qualname__} has no name in a config. Known: "
            f"{', '.join(f'{cls.__name__} ({kind!r})' for kind, cls in TYPES.items())}."
        )
    return loss_scale.to_dict()  # type: ignore[attr-defined]


def loss_scale_from_dict(settings: Mapping[str, Any]) -> Callable[[], LossScale]:
    """Checks settings of a loss scale of any type, and returns a function that makes it.

    Making one asks JAX for its devices, which must not happen before `jax.distributed.initialize`.

    Raises:
      ValueError: for an unknown type or argument, and for values that the class refuses.
    """
    given = settings.get("type", "dynamic")
    kind = given.lower() if isinstance(given, str) else shown(given)
    if kind not in TYPES or not isinstance(given, str):
        raise ValueError(
            f"Unknown type {shown(given)} of a loss scale.{did_you_mean(kind, TYPES)} "
            f"Known: {', '.join(TYPES)}."
        )
    values = {**settings, "type": kind}
    jax.eval_shape(lambda: TYPES[kind].from_dict(values))
    return lambda: TYPES[kind].from_dict(values)
