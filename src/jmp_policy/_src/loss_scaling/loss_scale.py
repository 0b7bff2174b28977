"""The loss scale: a pure pytree that multiplies the loss, divides the gradients, and adapts.

The state machine of `DynamicLossScale` is torch's `GradScaler`'s (growth after exactly `growth_interval`
clean steps) with Megatron's hysteresis, a floor and a ceiling. The functional shape is jmp's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_policy._src.core.dtypes import cast_leaf, is_floating_array, map_changed, promote_dtype
from jmp_policy._src.core.narrowing import round_once
from jmp_policy._src.core.pytree import pytree_dataclass, replace, set_fields, static
from jmp_policy._src.core.settings import number, positive_int, shown
from jmp_policy._src.core.types import ArrayLike, PyTree
from jmp_policy._src.loss_scaling import float16_loss, scale_mistakes
from jmp_policy._src.loss_scaling.float8_state import COLLECTION, derivatives, map_derivatives
from jmp_policy._src.loss_scaling.forgotten_scale import SCALE_USE
from jmp_policy._src.loss_scaling.gradients import divide, is_inexact
from jmp_policy._src.loss_scaling.protocol import FromDict, LossScale

#: The scales that can be multiplied by and divided by: they and their reciprocals are normal float32
#: numbers. XLA turns the division by a scalar into a product with its reciprocal, and subnormals into 0.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126


def is_loss_scale(x: Any) -> bool:
    """Whether a value is a loss scale, of this library or another."""
    return isinstance(x, LossScale) and not isinstance(x, type)


def check_loss_scale(loss_scale: Any, where: str = "") -> LossScale:
    """Raises TypeError for an argument of `loss_scaled` that is no loss scale."""
    if is_loss_scale(loss_scale):
        return loss_scale
    raise scale_mistakes.no_loss_scale(loss_scale, where)


def count_if(happened: jax.Array, so_far: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    """Adds one to a count where something happened; elsewhere the count is unchanged, or `otherwise`."""
    return jnp.where(happened, optax.safe_increment(so_far), so_far if otherwise is None else otherwise)


def tree_to_float32(tree: PyTree) -> PyTree:
    """Casts floating leaves of 16 bits or fewer to float32; all others are the same objects."""
    return map_changed(_leaf_to_float32, tree)


def holds_float8_state(tree: PyTree) -> bool:
    """Whether gradients hold the state of float8 layers, which is none; see `float8_state.py`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return COLLECTION in [getattr(key, "key", None) for path, _ in flat for key in path]


def map_gradients(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Maps a function over gradients, and not over the state of float8 layers among them."""
    return (map_derivatives if holds_float8_state(tree) else map_changed)(function, tree)


class Scaling(FromDict):
    """Base class of loss scales that multiply and divide by `self.loss_scale`."""

    loss_scale: jax.Array

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating and complex leaves of a pytree by the loss scale, half ones as float32."""
        SCALE_USE.note_product(self, tree)
        return map_gradients(lambda x: _times(_leaf_to_float32(x), self.loss_scale), tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves, without the state of float8 layers, half ones as float32."""
        gradients = derivatives(tree) if holds_float8_state(tree) else tree
        quotients = iter(divide(list(filter(is_inexact, jax.tree.leaves(gradients))), self.loss_scale))
        return map_gradients(lambda x: next(quotients) if is_inexact(x) else x, tree)


@pytree_dataclass
class DynamicLossScale(Scaling):
    """Loss scale that grows while gradients are finite and backs off when they overflow.

    Use it for float16. Each step::

        if grads_finite:  clean = clean + 1;  stuck = False
                          if clean == growth_interval:
                              scale = min(scale * growth_factor, max_loss_scale)
                              clean = 0;  tolerated = hysteresis
        else:             clean = 0;  tolerated = tolerated - 1
                          if tolerated <= 0:
                              stuck = scale is min_loss_scale already
                              scale = max(scale * backoff_factor, min_loss_scale)

    Args:
      loss_scale: the initial scale; leaf, float32 scalar.
      growth_interval: clean steps in a row before the scale grows; static.
      growth_factor: greater than 1; static.
      backoff_factor: between 0 and 1; static.
      min_loss_scale, max_loss_scale: bounds of the scale; static. 2**-14 is the smallest normal float16,
        2**24 apex's ceiling. A ceiling above 2**126 acts as 2**126.
      hysteresis: overflows tolerated (each is skipped) until the scale backs off; then every further
        overflow lowers it, until the next growth. static.

    Attributes:
      growth_tracker: clean steps in a row; leaf, int32 scalar.
      hysteresis_tracker: overflows that will still be tolerated; leaf, int32 scalar.
      stuck: whether the last overflow happened at the floor already; leaf, boolean scalar.

    Raises:
      ValueError: for factors, intervals and bounds that cannot work, naming the value.

    Example:
      >>> scale = DynamicLossScale(1024.0, growth_interval=2)
      >>> [float(s.loss_scale) for s in (scale.adjust(True).adjust(True), scale.adjust(False))]
      [2048.0, 512.0]

    References:
      NVIDIA, "Training With Mixed Precision", SDK guide, section 3.2.3 (automatic scaling).
    """

    _config_type = "dynamic"
    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    stuck: jax.Array
    growth_interval: int = static()
    growth_factor: float = static()
    backoff_factor: float = static()
    min_loss_scale: float = static()
    max_loss_scale: float = static()
    hysteresis: int = static()

    def __init__(
        self,
        loss_scale: ArrayLike = 2.0**16,
        growth_interval: int = 2000,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        min_loss_scale: float = 2.0**-14,
        max_loss_scale: float = 2.0**24,
        hysteresis: int = 1,
    ):
        hysteresis = positive_int(hysteresis, "hysteresis")
        set_fields(
            self,
            **bounded_scale(loss_scale, min_loss_scale, max_loss_scale),
            growth_interval=positive_int(growth_interval, "growth_interval"),
            growth_factor=number(growth_factor, "growth_factor", above=1.0),
            backoff_factor=number(backoff_factor, "backoff_factor", above=0.0, below=1.0),
            hysteresis=hysteresis,
            growth_tracker=jnp.zeros((), jnp.int32),
            hysteresis_tracker=jnp.full((), hysteresis, jnp.int32),
            stuck=jnp.zeros((), jnp.bool_),
        )

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "DynamicLossScale":
        """The scale, grown or backed off, and its counters; leaves keep their types. `grads` are ignored."""
        finite = as_flag(grads_finite)
        clean = jnp.where(finite, self.growth_tracker + 1, 0)
        tolerated = jnp.where(finite, self.hysteresis_tracker, self.hysteresis_tracker - 1)
        grow = clean >= self.growth_interval
        back_off = ~finite & (tolerated <= 0)
        at_floor = self.loss_scale == self.min_loss_scale
        scale = jnp.where(grow, _times_factor(self.loss_scale, self.growth_factor), self.loss_scale)
        scale = jnp.where(back_off, _times_factor(self.loss_scale, self.backoff_factor), scale)
        return replace(
            self,
            loss_scale=within(scale, self.min_loss_scale, self.max_loss_scale),
            growth_tracker=jnp.where(grow, 0, clean),
            # Kept from falling below 0, where 2**31 overflows would wrap it.
            hysteresis_tracker=jnp.where(grow, self.hysteresis, jnp.maximum(tolerated, 0)),
            stuck=back_off & at_floor,
        )


def within(scale: Any, low: Any, high: Any) -> jax.Array:
    """A scale, or the nearest bound; the upper one for NaN, as a few overflows lead down from there."""
    return jnp.where(scale <= high, jnp.maximum(scale, low), high)


def _times_factor(scale: jax.Array, factor: float) -> jax.Array:
    """Multiplies a scale by a factor of double precision, and rounds the product once, as torch does."""
    if factor <= 2.0**100 and float(np.float32(factor)) == factor:  # As 2, 0.5, 1.5: a float32 product does.
        return scale * np.float32(factor)
    return round_once(scale, factor)


def _leaf_to_float32(x: Any) -> Any:
    if isinstance(x, jax.Array) and x.dtype == np.float32:  # The common case, and quick.
        return x
    if isinstance(x, float):
        return jnp.asarray(x, jnp.float32)
    return cast_leaf(x, promote_dtype(x.dtype)) if is_floating_array(x) else x


def _times(x: Any, scale: Any) -> Any:
    if not is_inexact(x):
        return x
    x = jnp.asarray(x)
    # The scale in the dtype of x, so that float64 and complex x keep theirs.
    return lax.mul(x, lax.broadcast(lax.convert_element_type(scale, x.dtype), x.shape))


def scale_leaf(value: Any, low: float = SMALLEST_SCALE, high: float = LARGEST_SCALE) -> Any:
    """A loss scale as a strongly typed float32 scalar, checked if it is known before tracing."""
    if np.shape(value) != ():
        raise ValueError(
            f"loss_scale must be a scalar, got shape {np.shape(value)}. Map over several scales with "
            "jax.vmap."
        )
    if not isinstance(value, jax.core.Tracer):
        concrete = number(value, "loss_scale")
        if not low <= concrete <= high:
            raise scale_mistakes.outside(concrete, low, high)
        # YAML reads 1e4 as a text.
        value = concrete if isinstance(value, str) else value
    return jnp.asarray(value, jnp.float32)


def bounded_scale(loss_scale: Any, low: Any, high: Any) -> dict[str, Any]:
    """Checks a scale with its floor and ceiling, and returns the three as fields by name."""
    low, high = number(low, "min_loss_scale"), number(high, "max_loss_scale")
    for value, name in ((low, "min_loss_scale"), (high, "max_loss_scale")):
        if not SMALLEST_SCALE <= value <= float(jnp.finfo(jnp.float32).max):
            raise scale_mistakes.no_bound(name, value, SMALLEST_SCALE)
    high = min(high, LARGEST_SCALE)
    if low > high:
        raise ValueError(f"min_loss_scale {low:g} is greater than max_loss_scale {high:g}.")
    return {"loss_scale": scale_leaf(loss_scale, low, high), "min_loss_scale": low, "max_loss_scale": high}


def as_flag(grads_finite: Any) -> jax.Array:
    """Checks what `adjust` is given: of gradients, or of NaN, it would say that they are finite."""
    dtype = getattr(grads_finite, "dtype", type(grads_finite))
    if np.shape(grads_finite) or not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer)):
        raise TypeError(
            "adjust takes whether the gradients are finite, a boolean scalar such as all_finite(grads); got "
            f"{shown(grads_finite)}."
        )
    return jnp.asarray(grads_finite, jnp.bool_)


def split_loss(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Splits what a loss function returned into the loss and the auxiliary output."""
    if has_aux and isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    if has_aux or jax.tree.structure(out) != jax.tree.structure(0):
        raise scale_mistakes.no_loss(out, has_aux)
    return out, None


def scale_loss(scale: LossScale, loss: Any) -> Any:
    """Multiplies the loss by its scale in float32; gradients of a loss that is not finite become NaN."""
    dtype = getattr(loss, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return scale.scale(loss)  # A Python number, or what jax.value_and_grad will refuse.
    # A NaN loss with finite gradients is a bad step too (Flax's DynamicScale counts it as good). A NaN factor
    # makes all gradients NaN for the price of one scalar: x - x is 0 for finite numbers, and NaN for others.
    promoted = loss.astype(promote_dtype(dtype))
    one_if_finite = lax.stop_gradient(promoted - promoted) + 1
    if dtype == jnp.float16:
        return promoted * (float16_loss.checked_cotangent(scale) * one_if_finite)
    return scale.scale(loss) * one_if_finite


def restore_scale(scale: LossScale, loss: Any, grads: PyTree) -> PyTree:
    """Multiplies gradients of a float16 loss by the part of the scale that its cotangent could not hold."""
    return float16_loss.restore(scale, grads) if getattr(loss, "dtype", None) == jnp.float16 else grads
