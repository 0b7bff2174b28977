"""Accumulates gradients: those of a large batch from micro-batches that fit into memory.

Different from optax's MultiSteps: one call takes the whole batch and runs a loop over its micro-batches in
the compiled step, the accumulator is float32 whatever the dtype of the gradients, the whole window (the
micro-batches of one call) has one loss scale, and devices are synchronised once per window instead of once
per micro-batch.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jmp_policy._src.core.classes import check_no_nnx_module
from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.dtypes import strip_weak_type
from jmp_policy._src.core.settings import positive_int
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.microbatch_loop import (
    Batch,
    MicrobatchResult,
    StepFunction,
    Window,
    accumulate,
)
from jmp_policy._src.loss_scaling.state import find_loss_scale
from jmp_policy._src.loss_scaling.value_and_grad import scaled_value_and_grad

OnNonfinite = Literal["drop_window", "drop_microbatch"]


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    n: int,
    *,
    has_aux: bool = False,
    allow_int: bool = False,
    loss: str | None = None,
    accumulator_dtype: DTypeLike = jnp.float32,
    on_nonfinite: OnNonfinite = "drop_window",
    axis_name: Any = None,
    mesh: Any = None,
    batch_axis: int = 0,
) -> Callable[..., tuple[Any, PyTree]]:
    """Computes value and scaled gradient of a large batch from n micro-batches, in the memory of one.

    The mean over micro-batches is that of the batch where the loss is a mean over rows of equal weight; up to
    rounding, as the same numbers are added in another order. Statistics within a micro-batch (batch
    statistics, a mean over the tokens that are not padding) are those of that micro-batch.

    Args:
      loss_fn: the loss function `(params, *batch, **kwargs)`, returning a real scalar, or `(loss, aux)` with
        `has_aux`. It is differentiated by its first argument. The batch must come as arguments.
      n: micro-batches per window. Micro-batch i has the rows i, i + n, i + 2n, ..., so that a batch sharded
        over its rows is split without moving data.
      has_aux, allow_int: as for `jax.value_and_grad`.
      loss: of several losses with a loss scale each, the name of this one.
      accumulator_dtype: floating dtype of the sum and of the gradients returned; float64 and complex
        gradients keep theirs.
      on_nonfinite: "drop_window": one micro-batch with an infinity or NaN makes the whole gradient
        non-finite, and `loss_scaled` skips the step. "drop_microbatch": micro-batches that are not finite
        contribute nothing, and the mean is that of the rest; NaN where nothing is left.
      axis_name: mesh axis or axes over which the rows of the batch are split, with the same parameters on
        all devices. The devices then add up their gradients once, after the last micro-batch, instead of in
        each. Inside `shard_map` (or `pmap`) over that axis, nothing more is needed: `loss_fn` sees the
        device's rows, must not average over devices itself, and value and gradients are those of all
        devices. Elsewhere, as in `jit` with shardings, the axis is looked up in `mesh`, and `loss_fn` runs
        inside a `shard_map` over it; other axes of the mesh are left alone.
      mesh: the mesh with `axis_name`; that of `jax.set_mesh` by default.
      batch_axis: the axis along which arrays are split.

    Returns:
      A function `(scale_or_opt_state, params, *batch, **kwargs) -> (value, grads)`, to be used as that of
      `scaled_value_and_grad`: `value` is the mean loss, `(loss, aux)` with `has_aux`; `grads` are
      the mean gradients, still multiplied by the one loss scale of the state.

      Every array after `params` is split, keyword arguments too; Python numbers and arrays without axes
      are passed to each micro-batch unchanged, and so is everything that `loss_fn` closes over. A PRNG key
      (`jax.random.key`) is folded with the number of the micro-batch, counted over all devices, unless there
      is only one. `aux` has a new first axis: one entry per micro-batch (of each device, where a `shard_map`
      is entered here), dropped ones included; numbers become arrays.

      With "drop_microbatch" it returns `((value, grads), dropped)`, `dropped` being an int32 scalar: how many
      micro-batches (of single devices, with `axis_name`) were dropped. Pass on that there were any, so that
      the loss scale falls: `tx.update(grads, opt_state, params, overflowed=dropped > 0)`.

    Raises:
      TypeError, ValueError: for bad arguments; when the function is called, for arrays that cannot be split
        into n equal parts, for a batch without arrays, for an axis that does not exist, for `aux` that is
        not an array.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import StaticLossScale
      >>> def loss_fn(w, x):
      ...     return jnp.mean((w * x) ** 2)
      >>> x = jnp.arange(4.0)
      >>> loss, grad = accumulate_gradients(loss_fn, 2)(StaticLossScale(8.0), jnp.float32(1.0), x)
      >>> float(loss), float(grad)
      (3.5, 56.0)
    """
    if not callable(loss_fn):
        raise TypeError(f"accumulate_gradients needs a loss function, got {loss_fn!r}.")
    window = make_window(n, accumulator_dtype, on_nonfinite, axis_name, mesh, batch_axis)
    gradient = scaled_value_and_grad(loss_fn, has_aux=has_aux, allow_int=allow_int)

    def step(scale: LossScale, params: PyTree, state: None, args: Any, kwargs: Any) -> MicrobatchResult:
        value, grads = gradient(scale, params, *args, **kwargs)
        unscaled, aux = value if has_aux else (value, None)
        return MicrobatchResult(unscaled, as_arrays(aux), grads, state)

    def value_and_scaled_grad(scale_or_opt_state: Any, params: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        check_no_nnx_module("accumulate_gradients", params)
        scale = find_loss_scale(scale_or_opt_state, loss)
        mean, dropped = run_window(window, step, scale, params, None, (args, kwargs))
        result = ((mean.loss, mean.aux) if has_aux else mean.loss, mean.grads)
        return (result, dropped) if window.drops else result

    return value_and_scaled_grad


def make_window(
    n: int, accumulator_dtype: Any, on_nonfinite: str, axis_name: Any, mesh: Any, batch_axis: int
) -> Window:
    """Checks the arguments of `accumulate_gradients` that do not depend on a batch."""
    positive_int(n, "n")
    if on_nonfinite not in ("drop_window", "drop_microbatch"):
        raise ValueError(f"on_nonfinite must be 'drop_window' or 'drop_microbatch', got {on_nonfinite!r}.")
    dtype = parse_dtype(accumulator_dtype, "of the accumulator")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"accumulator_dtype={dtype.name} needs 64-bit mode: jax.config.update('jax_enable_x64', True)."
        )
    if isinstance(batch_axis, bool) or not isinstance(batch_axis, int) or batch_axis < 0:
        raise ValueError(f"batch_axis must be an axis counted from the front, 0 or more, got {batch_axis!r}.")
    if axis_name is None and mesh is not None:
        raise ValueError("mesh= needs axis_name=, the axis of the mesh that the batch is split over.")
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    axes = () if axis_name is None else axes
    return Window(n, dtype, on_nonfinite == "drop_microbatch", axes, mesh, batch_axis)


def run_window(
    window: Window,
    step: StepFunction,
    scale: LossScale,
    params: PyTree,
    state: PyTree,
    batch: tuple[tuple[Any, ...], dict[str, Any]],
) -> tuple[MicrobatchResult, jax.Array]:
    """The mean over all micro-batches, and how many were dropped (int32 scalar).

    Enters a `shard_map` over the window's axes where the caller is not inside of one.
    """
    split = Batch.of(batch, window.batch_axis)
    if not window.axes or _are_mapped(window.axes):
        return accumulate(window, step, scale, params, state, split)

    mesh = _mesh(window)
    devices = math.prod(mesh.shape[axis] for axis in window.axes)
    split.check(window.n * devices, f"{window.n} micro-batches on each of {devices} devices")
    whole, stacked = PartitionSpec(), PartitionSpec(window.axes)
    rows = PartitionSpec(*[None] * window.batch_axis, window.axes)

    def local(scale: LossScale, params: PyTree, state: PyTree, rows: Any, others: Any) -> Any:
        return accumulate(window, step, scale, params, state, split.with_arrays(rows, others))

    # check_vma=False: the check refuses loss functions that were written without devices in mind, such as
    # those with a scan whose carry starts as zeros.
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, whole, whole, rows, whole),
        out_specs=(MicrobatchResult(whole, stacked, whole, whole), whole),
        axis_names=set(window.axes),
        check_vma=False,
    )
    return jax.jit(mapped)(scale, params, state, split.rows, split.others)


def as_arrays(aux: PyTree) -> PyTree:
    """Converts the auxiliary output of a loss function to arrays, which a loop can stack."""

    def array(path: Any, x: Any) -> jax.Array:
        try:
            return strip_weak_type(jnp.asarray(x))
        except TypeError as error:
            raise TypeError(
                f"The loss function returns {x!r:.100} in aux{jax.tree_util.keystr(path)}, and a loop over "
                "micro-batches can only return arrays and numbers."
            ) from error

    return jax.tree_util.tree_map_with_path(array, aux)


def _are_mapped(axes: tuple[Any, ...]) -> bool:
    """Whether the caller is inside a `shard_map`, `pmap` or `vmap` over these axes."""
    try:
        lax.axis_size(axes)
    except NameError:
        return False
    return True


def _mesh(window: Window) -> Any:
    mesh = jax.sharding.get_abstract_mesh() if window.mesh is None else window.mesh
    missing = [axis for axis in window.axes if axis not in mesh.axis_names]
    if missing:
        given = "there is no mesh" if mesh.empty else f"the mesh has the axes {mesh.axis_names}"
        raise ValueError(
            f"axis_name: {missing[0]!r} is no mapped axis here, and {given}. Call this inside a shard_map "
            "over that axis, pass mesh= with it (or use jax.set_mesh), or leave axis_name out."
        )
    return mesh
