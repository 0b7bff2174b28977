"""What a training loop logs: whether the last step was taken, the loss scale, magnitudes of gradients."""

import collections
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.settings import positive_int
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.forgotten_scale import is_known
from jmp_policy._src.loss_scaling.gradients import is_inexact
from jmp_policy._src.loss_scaling.loss_scales import LossScales, pick
from jmp_policy._src.loss_scaling.protocol import LossScale
from jmp_policy._src.loss_scaling.state import LossScaledState, find_one, unwrapped

#: From a parameter's path ("encoder/layer_0/kernel") to its group; True for the first name of the path.
Groups: TypeAlias = bool | Callable[[str], str]

#: float16 rounds magnitudes up to this one to zero.
_BECOMES_ZERO = 2.0**-25


def grads_finite(opt_state: PyTree, loss: str | None = None) -> jax.Array:
    """Whether the last update was applied; boolean scalar.

    Use it to keep other state on a skipped step, since a forward pass that overflowed leaves NaN in batch
    statistics for good: `batch_stats = select_tree(grads_finite(opt_state), new, old)`.

    Args:
      opt_state: an optimizer state that holds a loss scale, or one for each of several losses.
      loss: of several losses, the one whose last gradients are asked about.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several; for an unknown name.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import StaticLossScale, loss_scaled
      >>> tx, params = loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)), jnp.ones(2)
      >>> _, opt_state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(params), params)
      >>> bool(grads_finite(opt_state))
      False
    """
    state = get_loss_scale_state(opt_state)
    if loss is None:
        return state.grads_finite
    pick(state.loss_scale, loss)  # Raises for a name that is not one of the losses.
    return state.loss_scale.grads_finite[loss]


def metrics_on_host(opt_state: PyTree, use: str) -> dict[str, np.ndarray]:
    """The metrics as arrays of NumPy; raises TypeError for a state that is being traced."""
    values = metrics(opt_state)
    if any(isinstance(value, jax.core.Tracer) for value in values.values()):
        raise TypeError(
            f"{use} runs on the host, on the state that a jitted step has returned; inside jax.jit use "
            "metrics(opt_state)."
        )
    return {name: np.asarray(value) for name, value in values.items()}


def metrics(opt_state: PyTree) -> dict[str, jax.Array]:
    """Flat dictionary of scalars for a logger; usable inside `jax.jit`.

    Returns:
      `loss_scale` (float32), `grads_finite` (bool), `skipped_steps`, `consecutive_skips`, `steps`
      (int32), and `stuck` (bool) where the loss scale has it. With `loss_scaled(..., monitor=True)` also
      `grad_max/G`, `grad_min/G` and `grad_underflow/G` (float32) for each group G of parameters: largest and
      smallest magnitude other than zero, and the share that float16 holds as zero at this scale.

      Of several losses `loss_scale/L`, `grads_finite/L`, `nonfinite_steps/L`, `consecutive_nonfinite/L`
      (int32: how often this loss's gradients were not finite) and `stuck/L` for each loss L, and
      `grad_max/L/G`; `grads_finite` is whether the last update was applied.

    Raises:
      ValueError: when `opt_state` holds no loss scale, or several without names.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale, loss_scaled
      >>> opt_state = loss_scaled(optax.sgd(0.1), DynamicLossScale(8.0)).init(jnp.ones(2))
      >>> found = metrics(opt_state)
      >>> list(found)
      ['loss_scale', 'grads_finite', 'skipped_steps', 'consecutive_skips', 'steps', 'stuck']
      >>> float(found["loss_scale"])
      8.0
    """
    state = get_loss_scale_state(opt_state)
    scale = state.loss_scale
    values = _of_losses(scale) if isinstance(scale, LossScales) else {"loss_scale": scale.loss_scale}
    values |= {
        "grads_finite": state.grads_finite,
        "skipped_steps": state.skipped,
        "consecutive_skips": state.consecutive_skips,
        "steps": state.steps,
    }
    stuck = getattr(scale, "stuck", None)
    if stuck is not None:
        values["stuck"] = stuck
    gradients = state.gradients if isinstance(state.gradients, Mapping) else {}
    for group, of_group in gradients.items():
        values.update({f"grad_{name}/{group}": value for name, value in of_group.items()})
    # The state may be donated to the next step.
    return {key: jnp.copy(value) if is_known(value) else value for key, value in values.items()}


def _of_losses(scales: LossScales) -> dict[str, Any]:
    values = {}
    for loss, scale in scales.scales.items():
        values |= {
            f"loss_scale/{loss}": scale.loss_scale,
            f"grads_finite/{loss}": scales.grads_finite[loss],
            f"nonfinite_steps/{loss}": scales.nonfinite_steps[loss],
            f"consecutive_nonfinite/{loss}": scales.consecutive_nonfinite[loss],
        }
        if hasattr(scale, "stuck"):
            values[f"stuck/{loss}"] = scale.stuck
    return values


def check_groups(groups: Any) -> Any:
    """Raises TypeError for something that does not say which parameter is in which group."""
    if callable(groups):
        return groups
    raise TypeError(
        "monitor is True (one group per part of the model) or a function from a parameter's path to the name "
        f"of its group; got {groups!r}."
    )


def magnitudes_by_loss(
    grads: Mapping[str, PyTree], scales: Mapping[str, LossScale], groups: Groups, axis_name: Any = None
) -> Any:
    """The magnitudes that the optimizer's state keeps, by loss (for the name "" without it) and group."""
    found = {
        f"{loss}/{group}" if loss else group: values
        for loss, tree in grads.items()
        for group, values in _magnitudes(tree, scales[loss].loss_scale, groups, axis_name).items()
    }
    # A leaf where there is no group: `optax.tree_map_params` calls `init` with a placeholder, and takes the
    # result for a prefix of the state.
    return found or jnp.zeros(())


def _magnitudes(
    grads: PyTree, loss_scale: Any, groups: Groups, axis_name: Any
) -> dict[str, dict[str, jax.Array]]:
    """Measures the largest, the smallest and the vanishing magnitudes per group of parameters.

    Args:
      grads: unscaled gradients.
      loss_scale: what they were multiplied by; float32 scalar.
      groups: which parameter is in which group.
      axis_name: mapped axis or axes over which gradients are split: magnitudes are those of all devices.

    Returns:
      By group: `max`, the largest magnitude; `min`, the smallest that is not zero (0 if all are);
      `underflow`, the share of values that are zero in float16 at this loss scale. float32 scalars.
    """
    leaves = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if is_inexact(leaf) and np.size(leaf)
    ]
    parts: dict[str, list[jax.Array]] = {}
    for text, leaf in leaves:
        # Linen's variables have the parts of the model below "params".
        name = groups(text) if callable(groups) else text.removeprefix("params/").split("/")[0] or "all"
        parts.setdefault(name, []).append(jnp.abs(leaf).astype(jnp.float32))
    limit = _BECOMES_ZERO / jnp.asarray(loss_scale, jnp.float32)
    return {name: _of_group(group, limit, axis_name) for name, group in parts.items()}


def _of_group(group: list[jax.Array], limit: Any, axis_name: Any) -> dict[str, jax.Array]:
    largest = jnp.stack([jnp.max(x) for x in group]).max()
    smallest = jnp.stack([jnp.min(jnp.where(x > 0, x, jnp.inf)) for x in group]).min()
    vanishing = jnp.stack([jnp.sum(x <= limit, dtype=jnp.float32) for x in group]).sum()
    share = vanishing / sum(x.size for x in group)
    if axis_name is not None:
        largest, smallest = lax.pmax(largest, axis_name), lax.pmin(smallest, axis_name)
        share = lax.pmean(share, axis_name)
    return {"max": largest, "min": jnp.where(jnp.isinf(smallest), 0.0, smallest), "underflow": share}


class MetricsLogger:
    """Writes `metrics(opt_state)` every so many steps, once the device has got there; never waits for it.

    Args:
      write: called as `write(step, scalars)` with numbers by name: the `write_scalars` of a `clu` writer, or
        `lambda step, scalars: [writer.add_scalar(k, v, step) for k, v in scalars.items()]` for TensorBoard's.
      every: write one step of so many.
      prefix: put before every name, as in "train/".

    Raises:
      TypeError, ValueError: when it is made, for what cannot be called and an `every` below 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import DynamicLossScale, loss_scaled
      >>> written = {}
      >>> log = MetricsLogger(written.__setitem__)
      >>> log(0, loss_scaled(optax.sgd(0.1), DynamicLossScale()).init(jnp.ones(3)), loss=0.5)
      >>> log.flush()
      >>> written[0]["loss_scale"], written[0]["loss"]
      (65536.0, 0.5)
    """

    def __init__(self, write: Callable[[int, dict[str, float]], Any], *, every: int = 1, prefix: str = ""):
        if not callable(write):
            raise TypeError(f"MetricsLogger needs a function write(step, scalars), got {write!r}.")
        self._write, self._every, self._prefix = write, positive_int(every, "every"), prefix
        self._waiting: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()

    def __call__(self, step: int, opt_state: PyTree, **scalars: Any) -> None:
        """Takes the metrics of a step, and writes those of earlier steps that the device has finished.

        Args:
          step: the step's number, on the host.
          opt_state: an optimizer state that holds a loss scale. It may be donated afterwards.
          scalars: more to write, such as `loss=loss`.

        Raises:
          TypeError: inside `jax.jit`.
          ValueError: for something that is not a scalar.
        """
        if step % self._every == 0:
            values = {k: _scalar(k, v) for k, v in {**metrics(opt_state), **scalars}.items()}
            for value in values.values():
                value.copy_to_host_async()
            self._waiting.append((int(step), values))
        while self._waiting and all(v.is_ready() for v in self._waiting[0][1].values()):
            self._write_first()

    def flush(self) -> None:
        """Writes all metrics taken and not yet written; waits for the device."""
        while self._waiting:
            self._write_first()

    def _write_first(self) -> None:
        step, values = self._waiting.popleft()
        scalars = {self._prefix + k: float(np.asarray(v)) for k, v in jax.device_get(values).items()}
        self._write(step, scalars)


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"MetricsLogger runs on the host; {name!r} is traced. Call it on what the step returned."
        )
    shape = value.shape if hasattr(value, "shape") else np.shape(value)  # np.shape would wait for it.
    if shape != ():
        raise ValueError(
            f"MetricsLogger writes scalars, and {name!r} has shape {shape}. Of a state that "
            "pmap or vmap has stacked give one: jax.tree.map(lambda x: x[0], opt_state)."
        )
    return jnp.copy(value)


def get_loss_scale_state(opt_state: PyTree) -> LossScaledState:
    """The one `LossScaledState` inside an optimizer state, however deeply nested.

    Args:
      opt_state: the state of `loss_scaled`, or of `optax.chain`, `multi_transform`, `masked`,
        `MultiSteps`, `inject_hyperparams` around it, or any pytree that holds one (`TrainState`,
        `nnx.Optimizer`, inside a transform too).

    Raises:
      ValueError: when there is none, or more than one; the message lists where they are.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_policy import StaticLossScale, loss_scaled
      >>> tx = optax.chain(optax.identity(), loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)))
      >>> float(get_loss_scale_state(tx.init(jnp.ones(2))).loss_scale.loss_scale)
      8.0
    """
    return unwrapped(find_one(opt_state)[1])


def static_scales(opt_state: PyTree) -> set[str]:
    """Whose loss scale never changes: "/name" of each such loss, or "" for the only one."""
    scale = get_loss_scale_state(opt_state).loss_scale
    several = isinstance(scale, LossScales)
    scales = {f"/{name}": one for name, one in scale.scales.items()} if several else {"": scale}
    return {name for name, one in scales.items() if getattr(one, "never_changes", False)}
