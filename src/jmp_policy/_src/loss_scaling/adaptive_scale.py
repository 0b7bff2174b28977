"""Adapts loss scales without a counter of clean steps: from gradient statistics, and by a PID controller.

Sources: the loss-scaling patent family of US 62/502,333 (scale from the largest gradient, minus a
margin) and the PID view dS = Kp e + Ki sum(e) + Kd (e_t - e_{t-1}). Ours always yields powers of two, so
that scaling never rounds, and stays within a floor and a ceiling.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jmp_policy._src.core.cast import is_floating_array
from jmp_policy._src.core.pytree import pytree_dataclass, replace, set_fields, static
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.loss_scale import Scaling, bounds, number, scale_leaf


@pytree_dataclass
class StatisticLossScale(Scaling):
    """Loss scale from the largest gradient x of the previous step: log2(scale) = 15 - log2(x) - margin.

    Use it when gradient magnitudes drift slowly: it needs no growth interval and never probes upwards
    into an overflow. It costs one reduction of every gradient per step.

    Args:
      loss_scale: the scale of the first step; leaf, float32 scalar.
      margin: exponents kept free above the largest gradient, a whole number >= 0; static. log2(x) is
        rounded up, so that scale * x <= 2**(15 - margin).
      backoff_factor: factor on the scale after an overflow, which hides the magnitude; static.
      min_loss_scale, max_loss_scale: bounds of the scale; static.

    Attributes:
      stuck: whether the last overflow happened at the floor already; leaf, boolean scalar.

    Example:
      >>> scale = StatisticLossScale(margin=1)
      >>> float(scale.adjust(True, grads=jnp.array([0.25, -0.5])).loss_scale)
      32768.0
    """

    #: `loss_scaled` passes the unscaled gradients to `adjust`.
    needs_grads: ClassVar[bool] = True

    loss_scale: Any
    stuck: Any
    margin: int = static()
    backoff_factor: float = static()
    min_loss_scale: float = static()
    max_loss_scale: float = static()

    def __init__(
        self,
        loss_scale: Any = 2.0**16,
        margin: int = 2,
        backoff_factor: float = 0.5,
        min_loss_scale: float = 2.0**-14,
        max_loss_scale: float = 2.0**24,
    ):
        if isinstance(margin, bool) or not isinstance(margin, int) or not 0 <= margin <= 64:
            raise ValueError(f"margin must be a whole number of exponents from 0 to 64, got {margin!r}.")
        config = {
            "margin": margin,
            "backoff_factor": number(backoff_factor, "backoff_factor", above=0.0, below=1.0),
            **bounds(min_loss_scale, max_loss_scale),
        }
        low, high = config["min_loss_scale"], config["max_loss_scale"]
        leaves = {
            "loss_scale": scale_leaf(loss_scale, "loss_scale", low, high),
            "stuck": jnp.zeros((), jnp.bool_),
        }
        set_fields(self, **leaves, **config)

    def adjust(self, grads_finite: Any, grads: PyTree = None) -> "StatisticLossScale":
        """Returns the state after a step.

        Args:
          grads_finite: boolean scalar.
          grads: the unscaled gradients. The scale stays the same where all are zero.

        Raises:
          ValueError: when `grads` is not given.
        """
        if grads is None:
            raise ValueError(
                "StatisticLossScale.adjust needs the unscaled gradients: adjust(grads_finite, grads=grads). "
                "jmp_policy.loss_scaled passes them."
            )
        finite = jnp.asarray(grads_finite, jnp.bool_)
        largest = _largest_magnitude(grads)
        # frexp, not log2: log2(8192.) is 12.999999 on a CPU. largest = m * 2**e with 0.5 <= m < 1; where
        # m is 0.5 the largest gradient is the power of two 2**(e - 1) itself.
        mantissa, exponent = jnp.frexp(largest)
        exponent = jnp.where(mantissa == 0.5, exponent - 1, exponent)
        ideal = _power_of_two(15 - self.margin - exponent)
        usable = finite & (largest > 0)
        backed_off = self.loss_scale * jnp.float32(self.backoff_factor)
        scale = jnp.where(usable, ideal, jnp.where(finite, self.loss_scale, backed_off))
        return replace(
            self,
            loss_scale=jnp.clip(scale, self.min_loss_scale, self.max_loss_scale),
            stuck=~finite & (self.loss_scale <= self.min_loss_scale),
        )


@pytree_dataclass
class PIDLossScale(Scaling):
    """Loss scale set by a PID controller on its log2, with the error e = +1 for a clean step.

    Each step: log2 S += kp * e + ki * sum(e) + kd * (e - previous e), where an overflow has the error
    e = -overflow_weight. The defaults double the scale over 2000 clean steps and halve it on an overflow,
    as `DynamicLossScale` does, but in many small steps. The loss is multiplied by the power of two below.

    Args:
      loss_scale: the initial scale; it becomes the leaf `log2_scale`, float32 scalar.
      kp, ki, kd: proportional, integral and derivative gain, in exponents; static.
      overflow_weight: the error of an overflow, relative to that of a clean step; static. Equilibrium is
        at one overflow in `overflow_weight` steps: 1 would mean that every second step is lost.
      integral_limit: bound of |sum(e)| against wind-up; static.
      min_loss_scale, max_loss_scale: bounds of the scale; static.

    Attributes:
      log2_scale, integral, previous_error: the controller's state; leaves, float32 scalars.
      stuck: whether the last overflow happened at the floor already; leaf, boolean scalar.

    Example:
      >>> scale = PIDLossScale(2.0**10)
      >>> float(scale.loss_scale), float(scale.adjust(False).loss_scale)
      (1024.0, 512.0)
    """

    log2_scale: Any
    integral: Any
    previous_error: Any
    stuck: Any
    kp: float = static()
    ki: float = static()
    kd: float = static()
    overflow_weight: float = static()
    integral_limit: float = static()
    min_loss_scale: float = static()
    max_loss_scale: float = static()

    def __init__(
        self,
        loss_scale: Any = 2.0**16,
        kp: float = 1 / 2000,
        ki: float = 0.0,
        kd: float = 0.0,
        overflow_weight: float = 2000.0,
        integral_limit: float = 2000.0,
        min_loss_scale: float = 2.0**-14,
        max_loss_scale: float = 2.0**24,
    ):
        config = {
            "kp": number(kp, "kp"),
            "ki": number(ki, "ki"),
            "kd": number(kd, "kd"),
            "overflow_weight": number(overflow_weight, "overflow_weight", above=0.0),
            "integral_limit": number(integral_limit, "integral_limit", above=0.0),
            **bounds(min_loss_scale, max_loss_scale),
        }
        low, high = config["min_loss_scale"], config["max_loss_scale"]
        leaves = {
            "log2_scale": _log2(scale_leaf(loss_scale, "loss_scale", low, high)),
            "integral": jnp.zeros((), jnp.float32),
            "previous_error": jnp.zeros((), jnp.float32),
            "stuck": jnp.zeros((), jnp.bool_),
        }
        set_fields(self, **leaves, **config)

    @property
    def loss_scale(self) -> jax.Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the power of two at or below 2**log2_scale; float32 scalar."""
        return _power_of_two(jnp.floor(self.log2_scale).astype(jnp.int32))

    def adjust(self, grads_finite: Any, grads: PyTree = None) -> "PIDLossScale":
        """Returns the state after a step.

        Args:
          grads_finite: boolean scalar.
          grads: ignored.
        """
        finite = jnp.asarray(grads_finite, jnp.bool_)
        error = jnp.where(finite, jnp.float32(1), jnp.float32(-self.overflow_weight))
        limit = jnp.float32(self.integral_limit)
        integral = jnp.clip(self.integral + error, -limit, limit)
        change = (
            jnp.float32(self.kp) * error
            + jnp.float32(self.ki) * integral
            + jnp.float32(self.kd) * (error - self.previous_error)
        )
        low = _log2(jnp.float32(self.min_loss_scale))
        high = _log2(jnp.float32(self.max_loss_scale))
        return replace(
            self,
            log2_scale=jnp.clip(self.log2_scale + change, low, high),
            integral=integral,
            previous_error=error,
            stuck=~finite & (self.log2_scale <= low),
        )


def _largest_magnitude(tree: PyTree) -> jax.Array:
    """Returns the largest |x| among floating and complex leaves, float32 scalar; 0 for a tree without any."""
    largest = [
        jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
        for x in jax.tree.leaves(tree)
        if is_floating_array(x) or (hasattr(x, "dtype") and jnp.iscomplexobj(x))
    ]
    return jnp.max(jnp.stack(largest)) if largest else jnp.zeros((), jnp.float32)


def _power_of_two(exponent: Any) -> jax.Array:
    """Returns 2**exponent, exactly, within the normal float32 numbers."""
    return jnp.ldexp(jnp.ones((), jnp.float32), jnp.clip(exponent, -126, 127))


def _log2(x: jax.Array) -> jax.Array:
    """Returns log2(x), exact for powers of two (jnp.log2(8192.) is not, on a CPU)."""
    mantissa, exponent = jnp.frexp(x)
    return jnp.log2(mantissa * 2) + (exponent - 1).astype(jnp.float32)
