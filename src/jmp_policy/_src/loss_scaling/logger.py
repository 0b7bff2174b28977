"""Writes the metrics of a training loop to a logger without waiting for the device."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.metrics import metrics


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
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(
                f"MetricsLogger writes one step of `every`, a whole number from 1 on; got {every!r}."
            )
        self._write, self._every, self._prefix = write, every, prefix
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
            # Copies: the state's own arrays may be donated to the next step.
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
