"""The loss scales beside `DynamicLossScale`, and what a config calls each.

Two never change. Two adapt without a counter of clean steps: from gradient statistics, and by a PID
controller. Sources are the loss-scaling patent family of US 62/502,333 (scale from the largest gradient,
minus a margin; overflows that widen it are ours) and the PID view dS = Kp e + Ki sum(e) + Kd (e_t - e_{t-1}).
Ours always yields powers of two, so that scaling never rounds, and stays within a floor and a ceiling.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import is_floating_array
from jmp_policy._src.core.pytree import made_from, pytree_dataclass, replace, set_fields, static
from jmp_policy._src.core.settings import number, positive_int, shown
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.types import ArrayLike, PyTree
from jmp_policy._src.loss_scaling.loss_scale import (
    DynamicLossScale,
    LossScale,
    Scaling,
    as_flag,
    bounded_scale,
    scale_leaf,
    tree_to_float32,
    within,
)
from jmp_policy._src.loss_scaling.protocol import FromDict

#: A scale above all others: the place of one that is not known yet.
_UNKNOWN = 2.0**127

#: Exponents by which an overflow widens the margin beyond what it showed to be necessary. With 0 or 1, models
#: whose parameters' gradients shrink faster than those of activations overflow again and again
#: (`tests/test_loss_scale.py`).
_MORE = 2


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
    never_changes = True
    loss_scale: jax.Array

    def __init__(self, loss_scale: ArrayLike):
        set_fields(self, loss_scale=scale_leaf(loss_scale))

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "StaticLossScale":
        """The loss scale itself."""
        return self


@pytree_dataclass
class StatisticLossScale(Scaling):
    """Loss scale from the largest gradient x of the previous step, which learns from overflows.

    Use it when gradient magnitudes change fast: it follows them within a step, up and down, and needs no
    growth interval. It costs one reduction of every gradient per step.

    The largest gradient of a *parameter* may be far below the largest gradient of an activation, which
    overflows first. So an overflow that the parameters' gradients do not explain widens the margin::

        if grads_finite:  every recovery_interval clean steps: widened = max(widened - 1, 0)
                          if it overflowed since the last clean step:
                              if that scale would be chosen again:
                                  widened = what would have led from it to this step's scale
                              widened = widened + 2
                          next = 2 ** (15 - log2(x) - margin - widened)
        else:             next = scale of the last clean step if that is smaller, else scale * backoff_factor

    Args:
      loss_scale: the scale of the first step; leaf, float32 scalar.
      margin: exponents kept free above the largest gradient, a whole number >= 0; static. log2(x) is
        rounded up, so that scale * x <= 2**(15 - margin).
      backoff_factor: factor on the scale after an overflow, which hides the magnitude; static.
      min_loss_scale, max_loss_scale: bounds of the scale; static.
      recovery_interval: clean steps until a widened margin narrows by one exponent; static. Where the margin
        is as wide as it must be, one step in so many is skipped, as with `DynamicLossScale`.

    Attributes:
      stuck: whether the last overflow happened at the floor already; leaf, boolean scalar.
      widened: exponents kept free beyond `margin`; leaf, int32 scalar.
      clean_scale: the scale of the last clean step; leaf, float32 scalar.
      failed_scale: the scale that overflowed since then; leaf, float32 scalar. 2**127 stands for none.
      clean_steps: clean steps since the margin changed last; leaf, int32 scalar.

    Example:
      >>> scale = StatisticLossScale(margin=1)
      >>> float(scale.adjust(True, grads=jnp.array([0.25, -0.5])).loss_scale)
      32768.0
    """

    _config_type = "statistic"
    loss_scale: jax.Array
    stuck: jax.Array
    widened: jax.Array
    clean_scale: jax.Array
    failed_scale: jax.Array
    clean_steps: jax.Array
    margin: int = static()
    backoff_factor: float = static()
    min_loss_scale: float = static()
    max_loss_scale: float = static()
    recovery_interval: int = static()

    def __init__(
        self,
        loss_scale: ArrayLike = 2.0**16,
        margin: int = 2,
        backoff_factor: float = 0.5,
        min_loss_scale: float = 2.0**-14,
        max_loss_scale: float = 2.0**24,
        recovery_interval: int = 2000,
    ):
        if isinstance(margin, bool) or not isinstance(margin, int) or not 0 <= margin <= 64:
            raise ValueError(f"margin must be a whole number of exponents from 0 to 64, got {margin!r}.")
        set_fields(
            self,
            **bounded_scale(loss_scale, min_loss_scale, max_loss_scale),
            margin=margin,
            backoff_factor=number(backoff_factor, "backoff_factor", above=0.0, below=1.0),
            recovery_interval=positive_int(recovery_interval, "recovery_interval"),
            stuck=jnp.zeros((), jnp.bool_),
            widened=jnp.zeros((), jnp.int32),
            clean_scale=jnp.full((), _UNKNOWN, jnp.float32),
            failed_scale=jnp.full((), _UNKNOWN, jnp.float32),
            clean_steps=jnp.zeros((), jnp.int32),
        )

    def adjust(
        self, grads_finite: ArrayLike, grads: PyTree = None, *, axis_name: Any = None
    ) -> "StatisticLossScale":
        """The loss scale, adjusted after a step.

        Args:
          grads_finite: boolean scalar.
          grads: the unscaled gradients. The scale stays the same where all are zero. They may be left out
            where `grads_finite` is False, known before tracing.
          axis_name: mapped axis or axes over which gradients are split: the largest is that of all devices.

        Raises:
          ValueError: when `grads` is not given.
        """
        if grads is None and (isinstance(grads_finite, jax.core.Tracer) or bool(grads_finite)):
            raise ValueError(
                "StatisticLossScale.adjust needs the unscaled gradients: adjust(grads_finite, grads=grads). "
                "jmp_policy.loss_scaled passes them."
            )
        finite = as_flag(grads_finite)
        largest = _largest_magnitude(grads, axis_name)
        usable = finite & (largest > 0)
        clean = jnp.where(finite, jnp.where(usable, self.clean_steps + 1, self.clean_steps), 0)
        narrow = clean >= self.recovery_interval
        widened = jnp.where(narrow, jnp.maximum(self.widened - 1, 0), self.widened)

        # Beyond float32 (float64 gradients) no magnitude is known but that it is too large.
        exponent = jnp.where(jnp.isinf(largest), 1000, _exponent_above(largest))
        ideal = _power_of_two(15 - self.margin - exponent)
        ideal = jnp.clip(ideal, self.min_loss_scale, self.max_loss_scale)
        failed = usable & (self.failed_scale < _UNKNOWN)
        again = failed & (ideal * _power_of_two(-widened) >= self.failed_scale)
        # It suited the largest gradient before it. The first scale suited none.
        suited = self.failed_scale * _power_of_two(self.widened)
        suited = jnp.where(self.clean_scale < _UNKNOWN, jnp.minimum(ideal, suited), ideal)
        needed = _exponent_above(suited) - (jnp.frexp(self.loss_scale)[1] - 1)
        widened = jnp.where(again, jnp.maximum(widened, needed), widened)
        # While the first scale is still too large, nothing is wrong with the margin.
        widened = jnp.where(again | failed & (self.clean_scale < _UNKNOWN), widened + _MORE, widened)
        chosen = ideal * _power_of_two(-widened)

        is_larger = self.loss_scale > self.clean_scale
        lower = jnp.where(is_larger, self.clean_scale, self.loss_scale * jnp.float32(self.backoff_factor))
        scale = jnp.where(usable, chosen, jnp.where(finite, self.loss_scale, lower))
        forgotten = jnp.where(usable, jnp.float32(_UNKNOWN), self.failed_scale)
        return replace(
            self,
            loss_scale=within(scale, self.min_loss_scale, self.max_loss_scale),
            stuck=~finite & (self.loss_scale == self.min_loss_scale),
            widened=widened,
            clean_scale=jnp.where(usable, self.loss_scale, self.clean_scale),
            failed_scale=jnp.where(finite, forgotten, self.loss_scale),
            clean_steps=jnp.where(narrow | failed, 0, clean),
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

    _config_type = "pid"
    log2_scale: jax.Array = made_from("loss_scale")
    integral: jax.Array
    previous_error: jax.Array
    stuck: jax.Array
    kp: float = static()
    ki: float = static()
    kd: float = static()
    overflow_weight: float = static()
    integral_limit: float = static()
    min_loss_scale: float = static()
    max_loss_scale: float = static()

    def __init__(
        self,
        loss_scale: ArrayLike = 2.0**16,
        kp: float = 1 / 2000,
        ki: float = 0.0,
        kd: float = 0.0,
        overflow_weight: float = 2000.0,
        integral_limit: float = 2000.0,
        min_loss_scale: float = 2.0**-14,
        max_loss_scale: float = 2.0**24,
    ):
        bounded = bounded_scale(loss_scale, min_loss_scale, max_loss_scale)
        set_fields(
            self,
            log2_scale=_log2(bounded.pop("loss_scale")),
            **bounded,
            kp=number(kp, "kp"),
            ki=number(ki, "ki"),
            kd=number(kd, "kd"),
            overflow_weight=number(overflow_weight, "overflow_weight", above=0.0),
            integral_limit=number(integral_limit, "integral_limit", above=0.0),
            integral=jnp.zeros((), jnp.float32),
            previous_error=jnp.zeros((), jnp.float32),
            stuck=jnp.zeros((), jnp.bool_),
        )

    @property
    def loss_scale(self) -> jax.Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The power of two at or below 2**log2_scale; float32 scalar."""
        return _power_of_two(jnp.floor(self.log2_scale).astype(jnp.int32))

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make this loss scale; `loss_scale` is 2**log2_scale, not rounded down.

        Raises:
          TypeError, ValueError: as those of other loss scales.
        """
        settings = super().to_dict()
        exact = 2.0 ** float(self.log2_scale)
        # The shortest number that makes the same leaf: 1000.0, not 999.9998.
        for digits in range(2, 17):
            shorter = settings | {"loss_scale": float(f"{exact:.{digits}g}")}
            if PIDLossScale.from_dict(shorter).log2_scale == self.log2_scale:
                return shorter
        return settings | {"loss_scale": exact}

    def adjust(self, grads_finite: ArrayLike, grads: PyTree = None) -> "PIDLossScale":
        """The loss scale, adjusted after a step.

        Args:
          grads_finite: boolean scalar.
          grads: ignored.
        """
        finite = as_flag(grads_finite)
        error = jnp.where(finite, jnp.float32(1), jnp.float32(-self.overflow_weight))
        limit = jnp.float32(self.integral_limit)
        integral = within(self.integral + error, -limit, limit)
        change = (
            jnp.float32(self.kp) * error
            + jnp.float32(self.ki) * integral
            + jnp.float32(self.kd) * (error - self.previous_error)
        )
        low = _log2(jnp.float32(self.min_loss_scale))
        high = _log2(jnp.float32(self.max_loss_scale))
        return replace(
            self,
            log2_scale=within(self.log2_scale + change, low, high),
            integral=integral,
            previous_error=error,
            stuck=~finite & (self.log2_scale == low),
        )


def _largest_magnitude(tree: PyTree, axis_name: Any) -> jax.Array:
    """The largest |x| of floating and complex leaves, on all devices; 0 where there is none."""
    largest = [
        jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
        for x in jax.tree.leaves(tree)
        if is_floating_array(x) or (hasattr(x, "dtype") and jnp.iscomplexobj(x))
    ]
    if not largest:
        return jnp.zeros((), jnp.float32)
    found = jnp.max(jnp.stack(largest))
    return found if axis_name is None else lax.pmax(found, axis_name)


def _exponent_above(x: jax.Array) -> jax.Array:
    """The smallest e with x <= 2**e; int32.

    By frexp, not log2: log2(8192.) is 12.999999 on a CPU. x = m * 2**e with 0.5 <= m < 1, and m is 0.5 where
    x is a power of two.
    """
    mantissa, exponent = jnp.frexp(x)
    return jnp.where(mantissa == 0.5, exponent - 1, exponent)


def _power_of_two(exponent: Any) -> jax.Array:
    """2**exponent, exactly, within the normal float32 numbers."""
    return jnp.ldexp(jnp.ones((), jnp.float32), jnp.clip(exponent, -126, 127))


def _log2(x: jax.Array) -> jax.Array:
    """log2(x), exact for powers of two (jnp.log2(8192.) is not, on a CPU)."""
    mantissa, exponent = jnp.frexp(x)
    return jnp.log2(mantissa * 2) + (exponent - 1).astype(jnp.float32)


TYPES: dict[str, Any] = {
    "none": NoOpLossScale,
    "static": StaticLossScale,
    "dynamic": DynamicLossScale,
    "statistic": StatisticLossScale,
    "pid": PIDLossScale,
}


def loss_scale_to_dict(loss_scale: LossScale) -> dict[str, Any]:
    """Writes a loss scale as `{"type": "dynamic", "loss_scale": 65536.0, ...}`: the arguments that make it.

    Raises:
      TypeError: for a loss scale of the user's own class.
      ValueError: where the scale is not a known number.
    """
    if type(loss_scale) not in TYPES.values():
        raise TypeError(
            f"A loss scale of the class {type(loss_scale).__qualname__} has no name in a config. Known: "
            f"{', '.join(f'{cls.__name__} ({kind!r})' for kind, cls in TYPES.items())}."
        )
    return loss_scale.to_dict()  # type: ignore[attr-defined]


def loss_scale_from_dict(settings: Mapping[str, Any]) -> Callable[[], LossScale]:
    """Checks settings of a loss scale of any type, and returns a function that makes it.

    Making one asks JAX for its devices, which must not happen before `jax.distributed.initialize`.

    Raises:
      ValueError: for an unknown type or argument, and for values that the class refuses.
    """
    given = settings.get("type", "dynamic")
    kind = given.lower() if isinstance(given, str) else shown(given)
    if kind not in TYPES or not isinstance(given, str):
        raise ValueError(
            f"Unknown type {shown(given)} of a loss scale.{did_you_mean(kind, TYPES)} "
            f"Known: {', '.join(TYPES)}."
        )
    values = {**settings, "type": kind}
    jax.eval_shape(lambda: TYPES[kind].from_dict(values))
    return lambda: TYPES[kind].from_dict(values)
