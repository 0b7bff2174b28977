"""Holds a loss scale for each of several losses, by name, and adds up the gradients of the losses.

NVIDIA's apex has several losses with a scale each as `num_losses` and `loss_id`.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.core.pytree import pytree_dataclass
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.float8_state import map_derivatives
from jmp_policy._src.loss_scaling.gradients import all_finite, everywhere
from jmp_policy._src.loss_scaling.loss_scale import LossScale, check_loss_scale, count_if, is_loss_scale
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
      >>> from jmp_policy import DynamicLossScale, StaticLossScale
      >>> from jmp_policy.optim import get_loss_scale_state, loss_scaled
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
        """The settings of each loss's scale by the name of the loss; `from_config` reads them.

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


def check(scales: Mapping[Any, Any]) -> dict[str, LossScale]:
    """Checks the mapping from losses to loss scales that `loss_scaled` was given."""
    for name, scale in check_losses(scales).items():
        check_loss_scale(scale, f" for the loss {name!r}")
    return dict(scales)


def check_losses(settings: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Checks the names in a mapping from losses to loss scales, or to their settings."""
    if not settings:
        raise ValueError("There is no loss scale: the mapping from losses to loss scales is empty.")
    for name in settings:
        if not isinstance(name, str) or not name:
            raise ValueError(f"Losses are named by text, as in {{'adversarial': loss_scale}}; got {name!r}.")
    return settings


def start(scales: Mapping[str, LossScale]) -> LossScales:
    """Copies the given loss scales into the state before the first step."""
    return LossScales(
        scales={name: jax.tree.map(jnp.array, scale) for name, scale in scales.items()},
        grads_finite={name: jnp.ones((), jnp.bool_) for name in scales},
        nonfinite_steps={name: jnp.zeros((), jnp.int32) for name in scales},
        consecutive_nonfinite={name: jnp.zeros((), jnp.int32) for name in scales},
    )


def after(before: LossScales, scales: dict[str, LossScale], finite: dict[str, jax.Array]) -> LossScales:
    """The adjusted loss scales, with the counts after a step.

    Args:
      before: as of the step before.
      scales: the adjusted loss scale of each loss.
      finite: whether the gradients of each loss were finite; boolean scalars.
    """
    in_a_row = before.consecutive_nonfinite
    return LossScales(
        scales=scales,
        grads_finite=finite,
        nonfinite_steps={n: count_if(~f, before.nonfinite_steps[n]) for n, f in finite.items()},
        consecutive_nonfinite={n: count_if(~f, in_a_row[n], jnp.int32(0)) for n, f in finite.items()},
    )


def are_several(x: Any) -> bool:
    """Whether a value is a mapping from names to loss scales."""
    if isinstance(x, LossScales):
        return True
    return isinstance(x, Mapping) and bool(x) and all(map(is_loss_scale, x.values()))


def pick(scale: Any, loss: str | None) -> Any:
    """The loss scale of a loss, from one for all (`loss` is None then) or from several by name.

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
            f"jmp_policy.optim.get_loss_scale_state(opt_state).loss_scale[{next(iter(scale))!r}]."
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


def check_gradients(grads: Any, known: Mapping[str, LossScale]) -> dict[str, PyTree]:
    """Checks that there are gradients of each loss, and orders them as the scales."""
    names = grads.keys() if hasattr(grads, "keys") else ()  # A dictionary, or an nnx.State.
    if not set(names) & set(known):
        raise TypeError(
            f"This optimizer has a loss scale for each of {listed(known)}, and its update takes "
            f"gradients by loss: {{{next(iter(known))!r}: grads, ...}}; got {type(grads).__name__}"
            f"{f' of {listed(names)}' if names else ''}."
        )
    if set(names) != set(known):
        check_names(names, known, "update")
        missing = [name for name in known if name not in names]
        raise ValueError(
            f"update takes gradients of all of {listed(known)}; {listed(missing)} is missing. For "
            "a step without a loss pass zeros: jax.tree.map(jnp.zeros_like, params)."
        )
    return {name: grads[name] for name in known}


def each_finite(grads: Mapping[str, PyTree], axis_name: Any) -> dict[str, jax.Array]:
    """Whether the gradients of each loss are finite; boolean scalars, the same on all devices."""
    finite = {name: all_finite(tree) for name, tree in grads.items()}
    if axis_name is None:
        return finite
    agreed = everywhere(jnp.stack(list(finite.values())), axis_name)  # One all-reduce for all losses.
    return {name: agreed[i] for i, name in enumerate(finite)}


def total(grads: Mapping[str, PyTree]) -> PyTree:
    """Adds up the gradients of all losses, in the order of the names.

    Of the state of float8 layers it takes the maximum, as Flax for a layer that is used twice.
    """
    return reduce(lambda a, b: map_derivatives(_plus, a, jnp.maximum, [b]), grads.values())


def _plus(a: Any, b: Any) -> Any:
    return a if getattr(a, "dtype", None) == jax.dtypes.float0 else a + b
