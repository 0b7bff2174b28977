"""Writes loss scales as plain dicts, which JSON and YAML hold, and makes them again."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core

from jmp_policy._src.core.suggest import check_keys, did_you_mean
from jmp_policy._src.loss_scaling.adaptive_scale import PIDLossScale, StatisticLossScale
from jmp_policy._src.loss_scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
)

KINDS: dict[str, Any] = {
    "none": NoOpLossScale,
    "static": StaticLossScale,
    "dynamic": DynamicLossScale,
    "statistic": StatisticLossScale,
    "pid": PIDLossScale,
}


def loss_scale_to_dict(loss_scale: LossScale) -> dict[str, Any]:
    """Returns a loss scale as `{"type": "dynamic", "loss_scale": 65536.0, ...}`: the arguments that make it.

    The scale is the current one. Counters are state, and belong into a checkpoint.

    Raises:
      TypeError: for a loss scale of the user's own class.
      ValueError: while tracing, where the scale is not known.
    """
    for kind, cls in KINDS.items():
        if type(loss_scale) is cls:
            values = {name: getattr(loss_scale, name) for name in _arguments(cls)}
            if isinstance(values.get("loss_scale"), jax.core.Tracer):
                raise ValueError("A loss scale can be written as a dict outside of jax.jit only.")
            return {"type": kind} | {n: v if isinstance(v, int) else float(v) for n, v in values.items()}
    raise TypeError(
        f"A loss scale of the class {type(loss_scale).__qualname__} has no name in a config. Known: "
        f"{', '.join(f'{cls.__name__} ({kind!r})' for kind, cls in KINDS.items())}."
    )


def loss_scale_from_dict(settings: Mapping[str, Any]) -> Callable[[], LossScale]:
    """Checks settings of a loss scale, and returns a function that makes it.

    Making one asks JAX for its devices, which must not happen before `jax.distributed.initialize`.

    Raises:
      ValueError: for an unknown type or argument, and for values that the class refuses.
    """
    kind = str(settings.get("type", "dynamic")).lower()
    if kind not in KINDS:
        raise ValueError(
            f"Unknown type {settings['type']!r} of a loss scale.{did_you_mean(kind, KINDS)} "
            f"Known: {', '.join(KINDS)}."
        )
    arguments = {name: value for name, value in settings.items() if name != "type"}
    check_keys(arguments, _arguments(KINDS[kind]), f"the loss scale {kind!r}")
    try:
        jax.eval_shape(lambda: KINDS[kind](**arguments))
    except TypeError as error:
        raise ValueError(f"The loss scale {dict(settings)!r} cannot be made: {error}.") from error
    return lambda: KINDS[kind](**arguments)


def _arguments(cls: type) -> list[str]:
    return list(inspect.signature(cls).parameters)
