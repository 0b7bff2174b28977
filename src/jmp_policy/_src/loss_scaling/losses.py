"""Unscales, tests and adds up the gradients of one loss or of several, for `loss_scaled`.

`OneLoss` and `SeveralLosses` have the same methods, so that `loss_scaled` is the same for both. NVIDIA's apex
has several losses with a scale each as `num_losses` and `loss_id`.
"""

import inspect
from collections.abc import Mapping
from functools import reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.decision import Decision, shared
from jmp_policy._src.loss_scaling.finiteness import gradients_finite
from jmp_policy._src.loss_scaling.forgotten_scale import Division
from jmp_policy._src.loss_scaling.loss_scale import LossScale, tree_to_float32
from jmp_policy._src.loss_scaling.loss_scales import LossScales, check_names, listed, start
from jmp_policy._src.loss_scaling.monitor import Groups, magnitudes
from jmp_policy._src.loss_scaling.overwritten import derivatives, map_derivatives


class OneLoss(NamedTuple):
    """One loss scale, for gradients that the optimizer gets unscaled."""

    scale: LossScale
    axis_name: Any
    groups: Groups

    def start(self) -> LossScale:
        """Copies the loss scale for the state before the first step."""
        return jax.tree.map(jnp.array, self.scale)

    def unscale(self, scale: LossScale, grads: PyTree) -> PyTree:
        """Divides the gradients by the scale that they were multiplied by, and returns them as float32."""
        return tree_to_float32(scale.unscale(grads))  # Loss scales of other libraries may leave them half.

    def divisions(self, scale: LossScale, grads: PyTree, params: PyTree) -> dict[str, Division]:
        """Returns what `unscale` divides by what."""
        return {"": Division(grads, scale, self.scale, params)}

    def test(self, grads: PyTree) -> jax.Array:
        """Returns whether all gradients are finite; boolean scalar."""
        return gradients_finite(derivatives(grads), self.axis_name)

    def takes_step(self, finite: jax.Array) -> jax.Array:
        """Returns whether the step is taken; boolean scalar."""
        return finite

    def total(self, grads: PyTree, finite: jax.Array) -> PyTree:
        """Returns the gradients that the optimizer gets."""
        return grads

    def for_small(self, finite: jax.Array, step: Decision) -> jax.Array:
        """Returns whether all gradients are finite, for arithmetic on scalars."""
        return step.for_small

    def adjust(self, scale: LossScale, grads: PyTree, finite: jax.Array, overflowed: Any) -> LossScale:
        """Returns the loss scale of the next step."""
        clean = finite if overflowed is None else finite & ~on_any_device(overflowed, self.axis_name)
        return _adjust(scale, clean, grads, self.axis_name)

    def magnitudes(self, grads: PyTree, scale: LossScale) -> Any:
        """Measures the magnitudes that the state keeps, by group of parameters."""
        return magnitudes(derivatives(grads), scale.loss_scale, self.groups, self.axis_name)

    def no_magnitudes(self, params: PyTree) -> Any:
        """Returns zeros in the place of magnitudes, for the state before the first step."""
        return jax.tree.map(jnp.zeros_like, magnitudes(derivatives(params), 1.0, self.groups))


class SeveralLosses(NamedTuple):
    """Loss scales by loss; the optimizer gets the sum of the unscaled gradients."""

    scales: dict[str, LossScale]
    axis_name: Any
    groups: Groups
    on_nonfinite: Literal["skip_step", "drop_loss"]

    def start(self) -> LossScales:
        """Copies the loss scales for the state before the first step."""
        return start(self.scales)

    def unscale(self, scales: LossScales, grads: Any) -> dict[str, PyTree]:
        """Divides the gradients of each loss by the scale of that loss, and returns them as float32."""
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

    def divisions(self, scales: LossScales, grads: Any, params: PyTree) -> dict[str, Division]:
        """Returns what `unscale` divides by what, by loss."""
        return {name: Division(grads[name], scales[name], self.scales[name], params) for name in self.scales}

    def test(self, grads: dict[str, PyTree]) -> dict[str, jax.Array]:
        """Returns, for each loss, whether its gradients are finite; boolean scalars."""
        finite = {name: gradients_finite(derivatives(tree)) for name, tree in grads.items()}
        if self.axis_name is None:
            return finite
        # One all-reduce for all losses.
        agreed = lax.pmin(jnp.stack(list(finite.values())).astype(jnp.int32), self.axis_name) > 0
        return {name: agreed[i] for i, name in enumerate(finite)}

    def takes_step(self, finite: dict[str, jax.Array]) -> jax.Array:
        """Returns whether the step is taken; boolean scalar."""
        flags = jnp.stack(list(finite.values()))
        return flags.all() if self.on_nonfinite == "skip_step" else flags.any()

    def total(self, grads: dict[str, PyTree], finite: dict[str, jax.Array]) -> PyTree:
        """Adds up the gradients of all losses, or of those that are finite, in the order of the names.

        Of the state of float8 layers it takes the maximum, as Flax does where a layer is used twice.
        """
        trees = list(grads.values())
        if self.on_nonfinite == "drop_loss":
            trees = [jax.tree.map(lambda g, f=finite[n]: _zero_unless(f, g), t) for n, t in grads.items()]
        first, *rest = trees
        return map_derivatives(
            lambda *leaves: reduce(_add, leaves), first, lambda *leaves: reduce(jnp.maximum, leaves), rest
        )

    def for_small(self, finite: dict[str, jax.Array], step: Decision) -> dict[str, jax.Array]:
        """Returns, for each loss, whether its gradients are finite, for arithmetic on scalars."""
        return {name: shared(flag) for name, flag in finite.items()}

    def adjust(
        self, scales: LossScales, grads: dict[str, PyTree], finite: dict[str, jax.Array], overflowed: Any
    ) -> LossScales:
        """Returns the loss scales of the next step, each adjusted by the gradients of its loss."""
        left_out = self._left_out(overflowed)
        clean = {
            n: f & ~on_any_device(left_out[n], self.axis_name) if n in left_out else f
            for n, f in finite.items()
        }
        return LossScales(
            scales={name: _adjust(scales[name], clean[name], grads[name], self.axis_name) for name in finite},
            grads_finite=finite,
            nonfinite_steps={n: count_if(~f, scales.nonfinite_steps[n]) for n, f in finite.items()},
            consecutive_nonfinite={
                n: count_if(~f, scales.consecutive_nonfinite[n], jnp.int32(0)) for n, f in finite.items()
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
        """Measures the magnitudes that the state keeps, by loss and group of parameters."""
        return {
            f"{name}/{group}": values
            for name, tree in grads.items()
            for group, values in magnitudes(
                derivatives(tree), scales[name].loss_scale, self.groups, self.axis_name
            ).items()
        }

    def no_magnitudes(self, params: PyTree) -> Any:
        """Returns zeros in the place of magnitudes, for the state before the first step."""
        found = jax.tree.map(jnp.zeros_like, magnitudes(derivatives(params), 1.0, self.groups))
        return {f"{name}/{group}": values for name in self.scales for group, values in found.items()}


def losses_of(loss_scale: Any, on_nonfinite: Any, axis_name: Any, groups: Groups) -> OneLoss | SeveralLosses:
    """Makes `OneLoss` or `SeveralLosses` from the arguments of `loss_scaled`.

    Raises:
      TypeError: for something that is not a loss scale.
      ValueError: for names that are not text, an empty mapping, and an unknown `on_nonfinite`.
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


def on_any_device(overflowed: Any, axis_name: Any) -> jax.Array:
    """Returns whether `overflowed` holds on any device of the mapped axis; boolean scalar."""
    if np.shape(overflowed) != () or jnp.asarray(overflowed).dtype != jnp.bool_:
        raise TypeError(
            "update(..., overflowed=) takes one boolean: whether gradients that were left out of this step "
            f"were not finite; got {overflowed!r}. From several, jnp.any makes one."
        )
    if axis_name is None:
        return jnp.asarray(overflowed)
    return lax.pmax(jnp.asarray(overflowed, jnp.int32), axis_name) > 0


def count_if(happened: jax.Array, so_far: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    """Adds one to a count where something happened, and elsewhere returns it unchanged, or `otherwise`."""
    return jnp.where(happened, optax.safe_increment(so_far), so_far if otherwise is None else otherwise)


def _adjust(loss_scale: LossScale, finite: jax.Array, grads: PyTree, axis_name: Any) -> LossScale:
    """Adjusts a loss scale, with the gradients and the axis name if its `adjust` takes them."""
    offered = {"grads": derivatives(grads), "axis_name": axis_name}
    try:
        parameters = inspect.signature(loss_scale.adjust).parameters.values()
    except (TypeError, ValueError):  # Not written in Python.
        return loss_scale.adjust(finite)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return loss_scale.adjust(finite, **{n: v for n, v in offered.items() if takes_all or n in named})


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
