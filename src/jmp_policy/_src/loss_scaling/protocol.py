"""Says what a loss scale is: the protocol, and its form as a plain dict, which JSON and YAML hold."""

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, Self, runtime_checkable

import jax
import jax.core
import numpy as np

from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.suggest import check_keys, did_you_mean
from jmp_policy._src.core.types import ArrayLike, PyTree


@runtime_checkable
class LossScale(Protocol):
    """Protocol of a loss scale, as `scaled_value_and_grad` and `loss_scaled` use it.

    All methods are pure. An implementation is a pytree of strongly typed arrays.

    Example:
      >>> from jmp_policy import DynamicLossScale
      >>> isinstance(DynamicLossScale(), LossScale)
      True
    """

    @property
    def loss_scale(self) -> jax.Array:
        """The factor, a float32 scalar."""
        ...

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating leaves by the factor, in float32 or float64."""

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves by the factor, in float32 or float64."""

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "LossScale":
        """The state for the next step.

        Args:
          grads_finite: boolean scalar.
          grads: the unscaled gradients, for scales that look at magnitudes. `loss_scaled` passes them where
            `adjust` has a parameter of this name; and `axis_name`, over which they may be split between
            devices, where it has one of that name.
        """
        ...


#: What torch, DeepSpeed, apex, Keras, TensorFlow, Flax and jmp call arguments.
SPELLINGS = {
    **dict.fromkeys(("init_scale", "initial_scale", "initial_loss_scale", "scale"), "loss_scale"),
    **dict.fromkeys(("initial_scale_power", "init_loss_scale", "initial"), "loss_scale"),
    **dict.fromkeys(("period", "scale_window", "loss_scale_window", "growth_steps"), "growth_interval"),
    **dict.fromkeys(("dynamic_growth_steps", "increment_period", "scale_seq_len"), "growth_interval"),
    **dict.fromkeys(("factor", "scale_factor", "multiplier", "growth"), "growth_factor"),
    "backoff": "backoff_factor",
    **dict.fromkeys(("min", "min_scale", "minimum_scale", "min_loss_scale_value"), "min_loss_scale"),
    **dict.fromkeys(("max", "max_scale", "maximum_scale"), "max_loss_scale"),
    "delayed_shift": "hysteresis",
}


class FromDict:
    """Base class of loss scales with `to_dict` and `from_dict`.

    `_config_type` is the class's name in configs. A subclass that a user makes has none: read back, it would
    be another class.
    """

    _config_type: str
    #: Whether `adjust` gives the same scale always.
    never_changes = False

    @classmethod
    def refuse_argument(cls, name: str) -> NoReturn:
        """Raises TypeError for an argument that the constructor does not take."""
        arguments = cls._arguments()
        hint = did_you_mean(name, arguments, SPELLINGS)
        raise TypeError(f"{cls.__name__} has no argument {name!r}.{hint} It takes {', '.join(arguments)}.")

    @classmethod
    def _arguments(cls) -> list[str]:
        """The names of what the constructor takes, which are the keys of the dict."""
        return list(inspect.signature(cls).parameters)

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make this loss scale, and its type, as texts and numbers.

        The scale is the current one. Counters are state: they belong into a checkpoint.

        Raises:
          TypeError: for a subclass of the user's own, which has no name in a config.
          ValueError: while tracing, or for an abstract or batched loss scale, which has no single number.

        Example:
          >>> from jmp_policy import StaticLossScale
          >>> StaticLossScale(1024.0).to_dict()
          {'type': 'static', 'loss_scale': 1024.0}
        """
        settings: dict[str, Any] = {"type": _type_in_configs(type(self))}
        for leaf in jax.tree.leaves(self):
            known = isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int)
            if isinstance(leaf, jax.core.Tracer) or not known or np.shape(leaf) != ():
                raise ValueError(
                    f"to_dict writes numbers that are known, and {self!r} has a leaf that is none. Call it "
                    "outside of jax.jit and jax.vmap, for one loss scale at a time."
                )
        for name in self._arguments():
            value = getattr(self, name)
            settings[name] = value if isinstance(value, int) else float(value)
        return settings

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Makes a loss scale from what `to_dict` returns; keys that are left out have their defaults.

        Args:
          settings: a mapping from arguments of the class to numbers; `"type"`, where it is there, must be
            this class's. `jmp_policy.from_config` reads all types.

        Raises:
          ValueError: for another type, an unknown key, or a value that the class refuses.

        Example:
          >>> from jmp_policy import DynamicLossScale
          >>> scale = DynamicLossScale.from_dict({"loss_scale": 1024, "growth_interval": 500})
          >>> float(scale.loss_scale), scale.growth_interval
          (1024.0, 500)
        """
        own, values = _type_in_configs(cls), dict(settings.items())
        kind = values.pop("type", own)
        if kind != own:
            raise ValueError(
                f"{cls.__name__}.from_dict reads settings of the type {own!r}, and these are of the type "
                f"{kind!r}. jmp_policy.from_config({{'loss_scale': ...}}).loss_scale reads all types."
            )
        check_keys(values, ["type", *cls._arguments()], f"the loss scale {own!r}", SPELLINGS)
        try:
            return cls(**values)
        except TypeError as error:
            given = shown(dict(settings.items()))
            raise ValueError(f"The loss scale {given} cannot be made: {error}.") from error


def _type_in_configs(cls: type) -> str:
    if "_config_type" not in vars(cls):
        raise TypeError(
            f"A loss scale of the class {cls.__qualname__} has no name in a config: read back, it would be "
            "of another class. Write down the arguments that you make it with."
        )
    return cls._config_type  # type: ignore[attr-defined]
