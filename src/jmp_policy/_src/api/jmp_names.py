"""Implements the public names of DeepMind's `jmp`; `jmp_policy.compat.jmp` documents the differences."""

import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtype_words import DTYPE_WORDS
from jmp_policy._src.core.dtypes import cast_floating, cast_leaf, map_changed
from jmp_policy._src.core.pytree import pytree_dataclass, replace, set_fields, static
from jmp_policy._src.core.settings import number, positive_int
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import selection
from jmp_policy._src.loss_scaling.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, Scaling, scale_leaf, within
from jmp_policy._src.policy import rules
from jmp_policy._src.policy.policy import Policy

_HALVES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))


def half_dtype() -> Any:
    """Returns the half dtype of the default backend, as jmp does: bfloat16 on a TPU, float16 elsewhere.

    `jmp_policy.best_half_dtype` goes by the device: bfloat16 on newer GPUs, too.

    Returns:
      The scalar type, which makes scalars when called.

    Example:
      >>> bool(half_dtype()(3) == 3)
      True
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def cast_to_half(tree: PyTree) -> PyTree:
    """Casts floating leaves to `half_dtype()`, and returns all others as the same objects.

    Example:
      >>> cast_to_half(jnp.ones(2)).dtype.itemsize
      2
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: PyTree) -> PyTree:
    """Casts floating leaves to float32, and returns all others as the same objects.

    Example:
      >>> cast_to_full(jnp.ones(2, jnp.float16)).dtype
      dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def get_policy(policy_name: rules.PolicyLike) -> Policy:
    """Parses a policy from its text, in jmp's words or in those of `jmp_policy.get_policy`.

    Args:
      policy_name: a dtype for everything, such as "f16", "full" or "half", or assignments such as
        "params=float32,compute=half,output=f32". "half" is `half_dtype()`.

    Raises:
      ValueError: for an unknown word; the message lists the known ones.

    Example:
      >>> str(get_policy("c=f16"))
      'params=float32,compute=float16,output=float16'
      >>> get_policy("bf16") == Policy(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16)
      True
    """
    if isinstance(policy_name, str):
        text = re.sub(r"half\b", np.dtype(half_dtype()).name, policy_name, flags=re.IGNORECASE)
        word = text.strip().lower()
        return Policy(word, word, word) if word in DTYPE_WORDS else rules.get_policy(text)
    return rules.get_policy(policy_name)


def select_tree(pred: Any, a: PyTree, b: PyTree) -> PyTree:
    """Chooses one of two pytrees by a boolean scalar, leaf by leaf.

    Python numbers and NumPy arrays may be among the leaves: they become JAX arrays first, as in jmp.

    Example:
      >>> print(select_tree(jnp.array(False), {"step": 3}, {"step": 2})["step"])
      2
    """
    return selection.select_tree(pred, map_changed(_as_array, a), map_changed(_as_array, b))


def _as_array(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic) and x.dtype == jax.dtypes.float0:
        return x
    return jnp.asarray(x) if isinstance(x, int | float | complex | np.ndarray | np.generic) else x


@pytree_dataclass
class NoOpLossScale:
    """Loss scale that does nothing, and returns trees as the same objects.

    Example:
      >>> NoOpLossScale().unscale(jnp.ones(2, jnp.float16)).dtype
      dtype('float16')
    """

    @property
    def loss_scale(self) -> int:
        """Returns the integer 1."""
        return 1

    def scale(self, tree: PyTree) -> PyTree:
        """Returns the tree unchanged."""
        return tree

    def unscale(self, tree: PyTree) -> PyTree:
        """Returns the tree unchanged."""
        return tree

    def adjust(self, grads_finite: Any, grads: PyTree = None) -> "NoOpLossScale":
        """Returns the loss scale itself."""
        return self


class _PromotingScaling(Scaling):
    """Base class of loss scales whose results have the dtype that JAX's promotion gives `leaf * scale`."""

    #: Half dtypes that leaves keep; leaves of other half dtypes become float32.
    kept_dtypes: tuple[np.dtype, ...]

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating and complex leaves by the loss scale."""
        return self._with_kept_dtypes(tree, super().scale(tree))

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves by the loss scale."""
        return self._with_kept_dtypes(tree, super().unscale(tree))

    def _with_kept_dtypes(self, before: PyTree, after: PyTree) -> PyTree:
        def cast_back(x: Any, y: Any) -> Any:
            return cast_leaf(y, x.dtype) if getattr(x, "dtype", None) in self.kept_dtypes else y

        return jax.tree.map(cast_back, before, after)


@pytree_dataclass
class StaticLossScale(_PromotingScaling):
    """Loss scale that never changes.

    Half-precision leaves stay half when the scale is a Python number or of the same dtype, as in JAX's
    promotion; otherwise they become float32, which keeps small gradients.

    Args:
      loss_scale: positive, finite, normal as float32; a scalar.

    Example:
      >>> half = jnp.float16(0.5)
      >>> StaticLossScale(8).scale(half).dtype, StaticLossScale(jnp.float32(8)).scale(half).dtype
      (dtype('float16'), dtype('float32'))
    """

    loss_scale: Any
    kept_dtypes: tuple[np.dtype, ...] = static(init=False)

    def __init__(self, loss_scale: Any):
        kept_dtypes = _kept_dtypes(loss_scale, weak=_HALVES)
        set_fields(self, kept_dtypes=kept_dtypes, loss_scale=scale_leaf(loss_scale))

    def adjust(self, grads_finite: Any, grads: PyTree = None) -> "StaticLossScale":
        """Returns the loss scale itself."""
        return self


@pytree_dataclass
class DynamicLossScale(_PromotingScaling):
    """Loss scale that grows by `factor` after `period` finite steps in a row, and shrinks on an overflow.

    Half-precision leaves become float32, unless the scale was given in the same dtype.

    Args:
      loss_scale: the initial scale; a float32 leaf.
      counter: finite steps in a row so far; an int32 leaf.
      period: static.
      factor: static.
      min_loss_scale: an overflow does not lower the scale below this; static.

    Example:
      >>> scale = DynamicLossScale(half_dtype()(2 ** 15), period=2)
      >>> [float(s.loss_scale) for s in (scale.adjust(True).adjust(True), scale.adjust(False))]
      [65536.0, 16384.0]
    """

    loss_scale: Any
    counter: Any
    period: int = static()
    factor: float = static()
    min_loss_scale: float = static()
    kept_dtypes: tuple[np.dtype, ...] = static(init=False)

    def __init__(
        self,
        loss_scale: Any,
        counter: Any = 0,
        period: int = 2000,
        factor: float = 2,
        min_loss_scale: Any = 1.0,
    ):
        set_fields(
            self,
            period=positive_int(period, "period"),
            factor=number(factor, "factor", above=0.0),
            min_loss_scale=max(number(min_loss_scale, "min_loss_scale"), SMALLEST_SCALE),
            kept_dtypes=_kept_dtypes(loss_scale, weak=()),
            loss_scale=scale_leaf(loss_scale),
            counter=jnp.asarray(counter, jnp.int32),
        )

    def adjust(self, grads_finite: Any, grads: PyTree = None) -> "DynamicLossScale":
        """Returns the state after a step.

        Args:
          grads_finite: whether all gradients were finite; boolean scalar.
          grads: ignored.

        Returns:
          The next state, with leaves of the same types.
        """
        finite = jnp.asarray(grads_finite, jnp.bool_)
        counter = jnp.where(finite, self.counter + 1, 0)
        grow = counter >= self.period
        grown = jnp.minimum(self.loss_scale * self.factor, LARGEST_SCALE)
        lowered = jnp.maximum(self.loss_scale / self.factor, self.min_loss_scale)
        scale = jnp.where(finite, jnp.where(grow, grown, self.loss_scale), lowered)
        scale = within(scale, SMALLEST_SCALE, LARGEST_SCALE)
        return replace(self, loss_scale=scale, counter=jnp.where(grow, 0, counter))


def _kept_dtypes(scale: Any, weak: tuple[np.dtype, ...]) -> tuple[np.dtype, ...]:
    """Returns the half dtypes that a product with this scale keeps; `weak` for a weakly typed scale."""
    aval = jax.typeof(scale)
    return weak if aval.weak_type else tuple(half for half in _HALVES if half == aval.dtype)


#: Types of loss scales, for annotations.
LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale
