"""Holds several loss scales at once: one for each loss, by its name."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.core.pytree import pytree_dataclass
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.scale_types import loss_scale_from_dict, loss_scale_to_dict


@pytree_dataclass
class LossScales:
    """Loss scales of several losses by name, with counts of each loss's non-finite gradients.

    Made by `loss_scaled(inner, {"name": loss_scale, ...})`; `get_loss_scale_state(opt_state).loss_scale` is
    one, and `.loss_scale["name"]` the loss scale of that loss. Iterating gives the names.

    Attributes:
      scales: the loss scale by loss.
      grads_finite: by loss, whether its last gradients were finite; boolean scalars, True at first.
      nonfinite_steps: by loss, how many of its gradients so far were not; int32 scalars, saturating.
      consecutive_nonfinite: by loss, how many since the last finite ones; int32 scalars, saturating.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale, StaticLossScale, get_loss_scale_state, loss_scaled
      >>> tx = loss_scaled(optax.sgd(0.1), {"a": DynamicLossScale(), "b": StaticLossScale(8.0)})
      >>> scales = get_loss_scale_state(tx.init(jnp.ones(3))).loss_scale
      >>> list(scales), float(scales["b"].loss_scale)
      (['a', 'b'], 8.0)
    """

    scales: dict[str, Any]
    grads_finite: dict[str, jax.Array]
    nonfinite_steps: dict[str, jax.Array]
    consecutive_nonfinite: dict[str, jax.Array]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the settings of each loss's scale by the name of the loss; `from_config` reads them.

        Raises:
          TypeError: for a loss scale of the user's own class.
          ValueError: while tracing.
        """
        return {name: loss_scale_to_dict(scale) for name, scale in self.scales.items()}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Mapping[str, Any]]) -> "LossScales":
        """Makes loss scales from what `to_dict` returns, with all counts at zero.

        Raises:
          ValueError: for an unknown type, key or value.
        """
        return start({name: loss_scale_from_dict(dict(one.items()))() for name, one in settings.items()})

    def __getitem__(self, loss: str) -> Any:
        if loss not in self.scales:
            raise KeyError(f"{loss!r} is none of the losses: {listed(self.scales)}.")
        return self.scales[loss]

    def __iter__(self) -> Iterator[str]:
        return iter(self.scales)

    def __len__(self) -> int:
        return len(self.scales)


def start(scales: Mapping[str, LossScale]) -> LossScales:
    """Copies the given loss scales into the state before the first step."""
    return LossScales(
        scales={name: jax.tree.map(jnp.array, scale) for name, scale in scales.items()},
        grads_finite={name: jnp.ones((), jnp.bool_) for name in scales},
        nonfinite_steps={name: jnp.zeros((), jnp.int32) for name in scales},
        consecutive_nonfinite={name: jnp.zeros((), jnp.int32) for name in scales},
    )


def is_one(x: Any) -> bool:
    """Returns whether a value is a loss scale."""
    return isinstance(x, LossScale) and not isinstance(x, type)


def are_several(x: Any) -> bool:
    """Returns whether a value is a mapping from names to loss scales."""
    return isinstance(x, LossScales) or (isinstance(x, Mapping) and bool(x) and all(map(is_one, x.values())))


def pick(scale: Any, loss: str | None) -> Any:
    """Returns the loss scale of a loss from one for all (`loss` is None then) or from several by name.

    Raises:
      ValueError: for a name that is missing, unknown, or given where there is one loss scale for all.
    """
    if not are_several(scale):
        if loss is None:
            return scale
        raise ValueError(
            f"loss={loss!r} chooses among several loss scales, and here is only one. Leave it out, or give "
            f"each loss its own: loss_scaled(optimizer, {{{loss!r}: DynamicLossScale(), ...}})."
        )
    if loss is None:
        raise ValueError(
            f"There is a loss scale for each of the losses {listed(scale)}. Say whose is meant, as in "
            f"scaled_value_and_grad(loss_fn, loss={next(iter(scale))!r}), or pass "
            f"get_loss_scale_state(opt_state).loss_scale[{next(iter(scale))!r}]."
        )
    check_names([loss], scale, "loss=")
    return scale[loss]


def check_names(given: Any, known: Any, what: str) -> None:
    """Raises ValueError for names that are not losses; the message suggests the nearest one."""
    for name in given:
        if name not in set(known):
            hint = did_you_mean(str(name), known)
            raise ValueError(f"{what} names {name!r}, which is none of the losses: {listed(known)}.{hint}")


def listed(names: Any) -> str:
    """Formats names for a message."""
    return ", ".join(map(repr, names))
