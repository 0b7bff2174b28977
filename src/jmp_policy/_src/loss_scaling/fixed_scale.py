"""Loss scales that never change: of one value, and none."""

import jax
import jax.numpy as jnp

from jmp_policy._src.core.pytree import pytree_dataclass, set_fields
from jmp_policy._src.core.types import ArrayLike, PyTree
from jmp_policy._src.loss_scaling.loss_scale import Scaling, scale_leaf, tree_to_float32
from jmp_policy._src.loss_scaling.scale_dict import FromDict


@pytree_dataclass
class NoOpLossScale(FromDict):
    """Loss scale that scales nothing, for float32 and bfloat16 with the same train step.

    `unscale` still returns float32, so that the optimizer never sees half-precision gradients.

    Example:
      >>> float(NoOpLossScale().loss_scale)
      1.0
    """

    _config_type = "none"

    def __init__(self) -> None: ...

    @property
    def loss_scale(self) -> jax.Array:
        """1, a float32 scalar."""
        return jnp.ones((), jnp.float32)

    def scale(self, tree: PyTree) -> PyTree:
        """The tree, unchanged."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Casts half-precision leaves to float32."""
        return tree_to_float32(tree)

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "NoOpLossScale":
        """The loss scale itself."""
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
        """The loss scale itself."""
        return self
