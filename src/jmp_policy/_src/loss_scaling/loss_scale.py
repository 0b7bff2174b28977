"""Defines the loss scales: pure pytrees that multiply the loss, divide the gradients, and adapt.

The state machine of `DynamicLossScale` is torch's `GradScaler`'s (growth after exactly `growth_interval`
clean steps) with Megatron's hysteresis, a floor and a ceiling. The functional shape is jmp's.
"""

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.dtypes import cast_leaf, is_floating_array, map_changed, promote_dtype
from jmp_policy._src.core.pytree import pytree_dataclass, replace, set_fields, static
from jmp_policy._src.core.types import ArrayLike, PyTree
from jmp_policy._src.loss_scaling.joined_division import divide
from jmp_policy._src.loss_scaling.overwritten import derivatives, map_derivatives
from jmp_policy._src.loss_scaling.scale_dict import FromDict
from jmp_policy._src.loss_scaling.scale_use import SCALE_USE

#: The scales that can be multiplied by and divided by: they and their reciprocals are normal float32
#: numbers. XLA turns the division by a scalar into a product with its reciprocal, and subnormals into 0.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@runtime_checkable
class LossScale(Protocol):
    """Protocol of a loss scale, as `scaled_value_and_grad` and `loss_scaled` use it.

    All methods are pure. An implementation is a pytree of strongly typed arrays.

    Example:
      >>> isinstance(DynamicLossScale(), LossScale)
      True
    """

    @property
    def loss_scale(self) -> jax.Array:
        """Returns the factor, a float32 scalar."""
        ...

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating leaves by the factor, in float32 or float64."""
        ...

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves by the factor, in float32 or float64."""
        ...

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "LossScale":
        """Returns the state for the next step.

        Args:
          grads_finite: boolean scalar.
          grads: the unscaled gradients, for scales that look at magnitudes. `loss_scaled` passes them where
            `adjust` has a parameter of this name; and `axis_name`, over which they may be split between
            devices, where it has one of that name.
        """
        ...


def tree_to_float32(tree: PyTree) -> PyTree:
    """Casts floating leaves of 16 bits or fewer to float32, and returns all others as the same objects."""
    return map_changed(_leaf_to_float32, tree)


class Scaling(FromDict):
    """Base class of loss scales that multiply and divide by `self.loss_scale`."""

    loss_scale: jax.Array

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating and complex leaves by the loss scale.

        Args:
          tree: the loss, or any pytree.

        Returns:
          The tree with float leaves of 16 bits or fewer cast to float32 before the product: a loss of
          3 * 2**15 times a float16 scale would be infinite. All other leaves are untouched.
        """
        SCALE_USE.note_product(self, tree)
        return map_derivatives(lambda x: _times(_leaf_to_float32(x), self.loss_scale), tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves by the loss scale.

        Returns:
          The tree with float leaves of 16 bits or fewer as float32; float64 and complex keep their
          type. Integers, keys, `float0` and everything else are untouched, and so is the state that Flax's
          float8 layers keep in gradients (`_overwrite_with_gradient`). Exact for powers of two.
        """
        numbers = list(filter(_is_number, jax.tree.leaves(derivatives(tree))))
        quotients = iter(divide(numbers, self.loss_scale))
        return map_derivatives(lambda x: next(quotients) if _is_number(x) else x, tree)


@pytree_dataclass
class NoOpLossScale(FromDict):
    """Loss scale that scales nothing, for float32 and bfloat16 with the same train step.

    `unscale` still returns float32, so that the optimizer never sees half-precision gradients.

    Example:
      >>> float(NoOpLossScale().loss_scale)
      1.0
    """

    _config_type = "none"

    @property
    def loss_scale(self) -> jax.Array:
        """Returns 1, a float32 scalar."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: PyTree) -> PyTree:
        """Returns the tree unchanged."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Casts half-precision leaves to float32."""
        return tree_to_float32(tree)

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "NoOpLossScale":
        """Returns the loss scale itself."""
        return self


@pytree_dataclass
class StaticLossScale(Scaling):
    """Loss scale that never changes.

    Use it where gradient magnitudes are known: NVIDIA's guide to mixed-precision training asks for
    max|gradient| * loss_scale < 65504, and 8 to 32768 served many networks. The scale is a leaf: another
    value does not compile again.

    Args:
      loss_scale: positive, finite, normal as float32; a scalar. A power of two scales without rounding.

    Raises:
      ValueError: for other values.

    Example:
      >>> scale = StaticLossScale(2.0**15)
      >>> float(scale.unscale(scale.scale(jnp.float32(3.0))))
      3.0
    """

    _config_type = "static"
    loss_scale: jax.Array

    def __init__(self, loss_scale: ArrayLike):
        set_fields(self, loss_scale=scale_leaf(loss_scale, "loss_scale"))

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "StaticLossScale":
        """Returns the loss scale itself."""
        return self


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
      min_loss_scale, max_loss_scale: bounds of the scale; static. The default floor 2**-14 is the smallest
        normal float16, the ceiling 2**24 is apex's. A ceiling above 2**126 acts as 2**126.
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
        config = {
            "growth_interval": positive_int(growth_interval, "growth_interval"),
            "growth_factor": number(growth_factor, "growth_factor", above=1.0),
            "backoff_factor": number(backoff_factor, "backoff_factor", above=0.0, below=1.0),
            "hysteresis": positive_int(hysteresis, "hysteresis"),
            **bounds(min_loss_scale, max_loss_scale),
        }
        leaves = {
            "loss_scale": scale_leaf(
                loss_scale,
                "loss_scale",
                config["min_loss_scale"],
                config["max_loss_scale"],
            ),
            "growth_tracker": jnp.zeros((), jnp.int32),
            "hysteresis_tracker": jnp.full((), config["hysteresis"], jnp.int32),
            "stuck": jnp.zeros((), jnp.bool_),
        }
        set_fields(self, **leaves, **config)

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "DynamicLossScale":
        """Returns the state after a step.

        Args:
          grads_finite: whether all gradients were finite; boolean scalar.
          grads: ignored.

        Returns:
          The next state, with leaves of the same types.
        """
        finite = jnp.asarray(grads_finite, jnp.bool_)
        clean = jnp.where(finite, self.growth_tracker + 1, 0)
        tolerated = jnp.where(finite, self.hysteresis_tracker, self.hysteresis_tracker - 1)
        grow = clean >= self.growth_interval
        back_off = ~finite & (tolerated <= 0)
        at_floor = self.loss_scale <= self.min_loss_scale
        scale = jnp.where(grow, times_factor(self.loss_scale, self.growth_factor), self.loss_scale)
        scale = jnp.where(back_off, times_factor(self.loss_scale, self.backoff_factor), scale)
        return replace(
            self,
            loss_scale=jnp.clip(scale, self.min_loss_scale, self.max_loss_scale),
            growth_tracker=jnp.where(grow, 0, clean),
            # Kept from falling below 0, where 2**31 overflows would wrap it.
            hysteresis_tracker=jnp.where(grow, self.hysteresis, jnp.maximum(tolerated, 0)),
            stuck=back_off & at_floor,
        )


def times_factor(scale: jax.Array, factor: float) -> jax.Array:
    """Multiplies a scale by a factor of double precision, and rounds the product once, as torch does.

    Factors such as 2, 0.5 and 1.5 are float32 numbers, for which one float32 product is enough. 0.8 is not:
    60 steps with 0.8 rounded to float32 drift away from torch's scale. So two errors are added back: that of
    rounding the factor, and that of the product (Dekker's method: both numbers are split into 12-bit halves,
    whose products are exact). One difference is left: products within 1e-9 of the middle between two float32
    numbers may be rounded to the other one, 3 % of those with 1.1.

    Args:
      scale: float32 scalar.
      factor: positive number.
    """
    if factor > _LARGEST_FLOAT32:
        return jnp.full_like(scale, jnp.inf)
    high = np.float32(factor)
    rest = np.float32(factor - float(high))
    if rest == 0 or high > 2.0**100:
        return scale * high
    # Dekker's halves of a number above 2**115 are infinite, and the error of a product below 2**-102 is 0.
    # So the scale is first brought between 2**-66 and 2**66, and the product back; neither step rounds.
    small = scale < 1
    near = scale * jnp.where(small, np.float32(2.0**60), np.float32(2.0**-60))
    product = near * high

    def halves(x: Any) -> tuple[Any, Any]:
        upper = x * np.float32(4097)
        upper = upper - (upper - x)
        return upper, x - upper

    (a, b), (c, d) = halves(near), halves(high)
    error = ((a * c - product) + a * d + b * c) + b * d
    corrected = jnp.where(jnp.isfinite(error), product + (error + near * rest), product)
    return corrected * jnp.where(small, np.float32(2.0**-60), np.float32(2.0**60))


def _leaf_to_float32(x: Any) -> Any:
    if isinstance(x, float):
        return jnp.asarray(x, jnp.float32)
    if is_floating_array(x):
        return cast_leaf(x, promote_dtype(x.dtype))
    return x


def _is_number(x: Any) -> bool:
    arrays = (jax.Array, np.ndarray, np.generic)
    is_array = isinstance(x, arrays)
    return isinstance(x, float | complex) or (is_array and bool(jnp.issubdtype(x.dtype, jnp.inexact)))


def _times(x: Any, scale: Any) -> Any:
    return lax.mul(jnp.asarray(x), _like(scale, x)) if _is_number(x) else x


def _like(scale: Any, x: Any) -> jax.Array:
    """Broadcasts the scale to the shape and dtype of x, so that float64 and complex x keep their dtype."""
    shape, dtype = np.shape(x), jnp.asarray(x).dtype
    return lax.broadcast(lax.convert_element_type(scale, dtype), shape)


def scale_leaf(value: Any, name: str, low: float = SMALLEST_SCALE, high: float = LARGEST_SCALE) -> Any:
    """Converts a loss scale to a strongly typed float32 scalar.

    Raises:
      ValueError: for a value that is not a scalar; for one known before tracing that is outside [low, high].
    """
    shape = np.shape(value)
    if shape != ():
        raise ValueError(
            f"{name} must be a scalar, got shape {shape}. Map over several scales with jax.vmap."
        )
    if not isinstance(value, jax.core.Tracer):
        concrete = number(value, name)
        if not low <= concrete <= high:
            raise ValueError(
                f"{name} is {concrete:g}, outside [{low:g}, {high:g}]. It must be a normal float32 "
                "number between min_loss_scale and max_loss_scale (set those to allow more), else gradients "
                "become 0 or inf."
            )
        # YAML reads 1e4 as a text.
        value = concrete if isinstance(value, str) else value
    return jnp.asarray(value, jnp.float32)


def bounds(low: Any, high: Any) -> dict[str, float]:
    """Checks floor and ceiling of a loss scale, and returns them as fields by name."""
    low, high = number(low, "min_loss_scale"), number(high, "max_loss_scale")
    for value, name in ((low, "min_loss_scale"), (high, "max_loss_scale")):
        if not SMALLEST_SCALE <= value <= float(jnp.finfo(jnp.float32).max):
            raise ValueError(
                f"{name} is {value:g}; it must be a positive, finite, normal float32 number, at least "
                f"{SMALLEST_SCALE:g}: a scale of 0 or inf makes every gradient NaN."
            )
    high = min(high, LARGEST_SCALE)
    if low > high:
        raise ValueError(f"min_loss_scale {low:g} is greater than max_loss_scale {high:g}.")
    return {"min_loss_scale": low, "max_loss_scale": high}


def positive_int(value: Any, name: str) -> int:
    """Checks a static count, and returns it as an int from 1 to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a whole number, got {value!r} of {type(value).__name__}.")
    if not 1 <= value < 2**31:
        raise ValueError(f"{name} must be between 1 and 2**31 - 1, got {value}.")
    return int(value)


def number(value: Any, name: str, above: float = -math.inf, below: float = math.inf) -> float:
    """Checks a static number, and returns it as a finite float strictly between two bounds."""
    try:
        result = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a number known before tracing, got {value!r} of {type(value).__name__}."
        ) from error
    if not math.isfinite(result) or not above < result < below:
        limits = [f"greater than {above:g}"] * (above > -math.inf)
        limits += [f"less than {below:g}"] * (below < math.inf)
        raise ValueError(f"{name} must be finite and {' and '.join(limits) or 'a number'}, got {result:g}.")
    return result
