"""What `loss_scaled` does with the gradients of one loss, and with those of several.

Both unscale, test, add up and adjust; `loss_scaled` is the same for both. Several losses with a scale each:
NVIDIA's apex has them as `num_losses` and `loss_id`.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.finiteness import all_finite
from jmp_policy._src.loss_scaling.loss_scale import LossScale, tree_to_float32
from jmp_policy._src.loss_scaling.loss_scales import LossScales, check_names, listed, start
from jmp_policy._src.loss_scaling.monitor import Groups, magnitudes


class OneLoss(NamedTuple):
    """One loss scale, whose gradients are those that the optimizer gets."""

    scale: LossScale
    axis_name: Any
    groups: Groups

    def start(self) -> LossScale:
        """The loss scale before the first step."""
        return jax.tree.map(jnp.array, self.scale)

    def unscale(self, scale: LossScale, grads: PyTree) -> PyTree:
        """The gradients divided by the scale that they were multiplied by."""
        return tree_to_float32(scale.unscale(grads))  # Other libraries' loss scales may leave them half.

    def test(self, grads: PyTree) -> jax.Array:
        """Whether they are finite."""
        return all_finite(grads, self.axis_name)

    def usable(self, finite: jax.Array) -> jax.Array:
        """Whether there is a step."""
        return finite

    def total(self, grads: PyTree, finite: jax.Array) -> PyTree:
        """What the optimizer gets."""
        return grads

    def adjust(self, scale: LossScale, grads: PyTree, finite: jax.Array, overflowed: Any) -> LossScale:
        """The loss scale of the next step."""
        clean = finite if overflowed is None else finite & ~anywhere(overflowed, self.axis_name)
        return _adjust(scale, clean, grads)

    def magnitudes(self, grads: PyTree, scale: LossScale) -> Any:
        """What is monitored."""
        return magnitudes(grads, scale.loss_scale, self.groups)

    def no_magnitudes(self, params: PyTree) -> Any:
        """What is monitored, before the first step."""
        return jax.tree.map(jnp.zeros_like, magnitudes(params, 1.0, self.groups))


class SeveralLosses(NamedTuple):
    """A scale for each loss, whose gradients the optimizer gets added up."""

    scales: dict[str, LossScale]
    axis_name: Any
    groups: Groups
    on_nonfinite: Literal["skip_step", "drop_loss"]

    def start(self) -> LossScales:
        """The loss scales before the first step."""
        return start(self.scales)

    def unscale(self, scales: LossScales, grads: Any) -> dict[str, PyTree]:
        """Each loss's gradients divided by its own scale."""
        names = grads.keys() if hasattr(grads, "keys") else ()  # A dictionary, or an nnx.State.
        if not set(names) & set(self.scales):
            raise TypeError(
                f"This optimizer has a loss scale for each of {listed(self.scales)}, and its update takes "
                f"gradients by loss: {{{next(iter(self.scales))!r}: grads, ...}}; got {type(grads).__name__}"
                f"{f' of {listed(names)}' if names else ''}."
            )
        if set(names) != set(self.scales):
            check_names(names, self.scales, "update")
            missing = [name for name in self.scales if name not in names]
            raise ValueError(
                f"update takes gradients of all of {listed(self.scales)}; {listed(missing)} is missing. For "
                "a step without a loss pass zeros: jax.tree.map(jnp.zeros_like, params)."
            )
        first, *others = self.scales
        for name in others:
            _check_same_structure(first, grads[first], name, grads[name])
        return {name: tree_to_float32(scales[name].unscale(grads[name])) for name in self.scales}

    def test(self, grads: dict[str, PyTree]) -> dict[str, jax.Array]:
        """Whether those of each loss are finite."""
        finite = {name: all_finite(tree) for name, tree in grads.items()}
        if self.axis_name is None:
            return finite
        # One all-reduce for all of them.
        agreed = lax.pmin(jnp.stack(list(finite.values())).astype(jnp.int32), self.axis_name) > 0
        return {name: agreed[i] for i, name in enumerate(finite)}

    def usable(self, finite: dict[str, jax.Array]) -> jax.Array:
        """Whether there is a step."""
        flags = jnp.stack(list(finite.values()))
        return flags.all() if self.on_nonfinite == "skip_step" else flags.any()

    def total(self, grads: dict[str, PyTree], finite: dict[str, jax.Array]) -> PyTree:
        """The sum, in the order of the names: of all losses, or of those that are finite."""
        trees = list(grads.values())
        if self.on_nonfinite == "drop_loss":
            trees = [jax.tree.map(lambda g, f=finite[n]: _zero_unless(f, g), t) for n, t in grads.items()]
        return jax.tree.map(lambda *leaves: reduce(_add, leaves), *trees)

    def adjust(
        self, scales: LossScales, grads: dict[str, PyTree], finite: dict[str, jax.Array], overflowed: Any
    ) -> LossScales:
        """The loss scales of the next step; each goes by its own loss."""
        left_out = self._left_out(overflowed)
        clean = {
            n: f & ~anywhere(left_out[n], self.axis_name) if n in left_out else f for n, f in finite.items()
        }
        return LossScales(
            scales={name: _adjust(scales[name], clean[name], grads[name]) for name in finite},
            grads_finite=finite,
            nonfinite_steps={n: count(~f, scales.nonfinite_steps[n]) for n, f in finite.items()},
            consecutive_nonfinite={
                n: count(~f, scales.consecutive_nonfinite[n], jnp.int32(0)) for n, f in finite.items()
            },
        )

    def _left_out(self, overflowed: Any) -> Mapping[str, Any]:
        if overflowed is None:
            return {}
        if not isinstance(overflowed, Mapping):
            return dict.fromkeys(self.scales, overflowed)
        check_names(overflowed, self.scales, "update(..., overflowed=)")
        return overflowed

    def magnitudes(self, grads: dict[str, PyTree], scales: LossScales) -> Any:
        """What is monitored."""
        return {
            f"{name}/{group}": values
            for name, tree in grads.items()
            for group, values in magnitudes(tree, scales[name].loss_scale, self.groups).items()
        }

    def no_magnitudes(self, params: PyTree) -> Any:
        """What is monitored, before the first step."""
        found = jax.tree.map(jnp.zeros_like, magnitudes(params, 1.0, self.groups))
        return {f"{name}/{group}": values for name in self.scales for group, values in found.items()}


def losses_of(loss_scale: Any, on_nonfinite: Any, axis_name: Any, groups: Groups) -> OneLoss | SeveralLosses:
    """How to treat the gradients, from what `loss_scaled` was given.

    Raises:
      TypeError: for what is no loss scale.
      ValueError: for names that are no text, no losses at all, and an unknown `on_nonfinite`.
    """
    if on_nonfinite not in ("skip_step", "drop_loss"):
        raise ValueError(f"on_nonfinite must be 'skip_step' or 'drop_loss', got {on_nonfinite!r}.")
    if not isinstance(loss_scale, Mapping):
        _check_loss_scale(loss_scale)
        if on_nonfinite == "drop_loss":
            raise ValueError(
                "on_nonfinite='drop_loss' leaves one of several losses out, and this optimizer has one loss "
                "scale for all. Give it a mapping from losses to loss scales."
            )
        return OneLoss(loss_scale, axis_name, groups)
    if not loss_scale:
        raise ValueError("loss_scaled got no loss scale: the mapping from losses to loss scales is empty.")
    for name, scale in loss_scale.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"Losses are named by text, as in {{'adversarial': scale}}; got {name!r}.")
        _check_loss_scale(scale, f" for the loss {name!r}")
    return SeveralLosses(dict(loss_scale), axis_name, groups, on_nonfinite)


def _check_loss_scale(loss_scale: Any, where: str = "") -> None:
    if isinstance(loss_scale, type) or not isinstance(loss_scale, LossScale):
        hint = ""
        if isinstance(loss_scale, type):
            hint = f" Did you mean {loss_scale.__name__}()?"
        elif isinstance(loss_scale, int | float):
            hint = f" Did you mean StaticLossScale({loss_scale})?"
        raise TypeError(
            f"loss_scaled needs a loss scale{where}, such as DynamicLossScale(), StaticLossScale(1024.0) or "
            f"NoOpLossScale(); got {loss_scale!r}.{hint}"
        )


def anywhere(overflowed: Any, axis_name: Any) -> jax.Array:
    """Whether `overflowed` holds on any device of the mapped axis."""
    if np.shape(overflowed) != () or jnp.asarray(overflowed).dtype != jnp.bool_:
        raise TypeError(
            "update(..., overflowed=) takes one boolean: whether gradients that were left out of this step "
            f"were not finite; got {overflowed!r}. From several, jnp.any makes one."
        )
    if axis_name is None:
        return jnp.asarray(overflowed)
    return lax.pmax(jnp.asarray(overflowed, jnp.int32), axis_name) > 0


def count(happened: jax.Array, so_far: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    """One more where it happened; otherwise as many as so far, or as given."""
    return jnp.where(happened, optax.safe_increment(so_far), so_far if otherwise is None else otherwise)


def _adjust(loss_scale: LossScale, finite: jax.Array, grads: PyTree) -> LossScale:
    if getattr(loss_scale, "needs_grads", False):
        return loss_scale.adjust(finite, grads=grads)
    return loss_scale.adjust(finite)


def _check_same_structure(first: str, a: PyTree, other: str, b: PyTree) -> None:
    advice = "Differentiate all losses with respect to the same parameters; unused ones get zeros."
    before, after = jax.tree.structure(a), jax.tree.structure(b)
    if before != after:
        raise ValueError(
            f"The gradients of {first!r} and {other!r} differ in structure, and cannot be added:\n"
            f"  {first}: {before}\n  {other}: {after}\n{advice}"
        )
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        if np.shape(x) != np.shape(y):
            raise ValueError(
                f"The gradients of {first!r} and {other!r} differ in shape at "
                f"{jax.tree_util.keystr(path) or '()'}: {np.shape(x)} and {np.shape(y)}. {advice}"
            )


def _is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == jax.dtypes.float0


def _zero_unless(finite: jax.Array, grad: Any) -> Any:
    if _is_float0(grad):
        return grad
    grad = jnp.asarray(grad)
    return lax.select(finite, grad, jnp.zeros_like(grad))


def _add(a: Any, b: Any) -> Any:
    return a if _is_float0(a) else a + b
