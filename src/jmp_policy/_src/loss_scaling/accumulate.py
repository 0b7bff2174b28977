"""Gradient accumulation: the gradients of a large batch from micro-batches that fit into memory.

Different from optax's MultiSteps: one call takes the whole batch and runs a loop over its micro-batches in
the compiled step, the accumulator is float32 whatever the gradients are, one loss scale holds for the whole
window, and devices are synchronised once per window instead of once per micro-batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jmp_policy._src.core.cast import strip_weak_type
from jmp_policy._src.core.dtypes import is_floating, parse_dtype, promote_dtype
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.loss_scaling.finiteness import all_finite, select_tree
from jmp_policy._src.loss_scaling.loss_scale import LossScale, positive_int
from jmp_policy._src.loss_scaling.microbatches import Batch, is_key
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
) -> Callable[..., Any]:
    """`scaled_value_and_grad` over n micro-batches in turn: the memory of one, the gradient of all.

    The mean over micro-batches is that of the batch where the loss is a mean over rows that weigh the same;
    up to rounding, as the same numbers are added in another order. What a micro-batch normalises by itself
    (batch statistics, a mean over the tokens that are not padding) is of that micro-batch.

    Args:
      loss_fn: the loss function `(params, *batch, **kwargs)`, returning a real scalar, or `(loss, aux)` with
        `has_aux`. The gradient is by its first argument. The batch must come as arguments.
      n: micro-batches per window. Micro-batch i is rows i, i + n, i + 2n, ...: a batch sharded over its rows
        is split where it lies.
      has_aux, allow_int: as for `jax.value_and_grad`.
      loss: of several losses with a loss scale each, the name of this one.
      accumulator_dtype: floating dtype of the sum and of the gradients returned; float64 and complex
        gradients keep theirs.
      on_nonfinite: "drop_window": one micro-batch with an infinity or NaN makes the whole gradient
        non-finite, and `loss_scaled` skips the step. "drop_microbatch": what is not finite contributes
        nothing, and the mean is that of the rest; NaN where nothing is left.
      axis_name: mesh axis or axes over which the rows of the batch are split, parameters being the same on
        all. The devices then add up their gradients once, after the last micro-batch, and not in each.
        Inside `shard_map` (or `pmap`) over that axis, give nothing more: `loss_fn` sees the device's rows,
        must not average over devices itself, and value and gradients are those of all devices. Elsewhere, as
        in `jit` with shardings, the axis is looked for in `mesh`, and `loss_fn` runs inside a
        `shard_map` over it; other axes of the mesh stay as they were.
      mesh: the mesh with `axis_name`; that of `jax.set_mesh` by default.
      batch_axis: the axis along which arrays are split.

    Returns:
      A function `(scale_or_opt_state, params, *batch, **kwargs) -> (value, grads)`, to be used as that of
      `scaled_value_and_grad`: `value` is the mean loss, `(loss, aux)` with `has_aux`; `grads` are
      the mean gradients, still multiplied by the one loss scale of the state.

      Every array after `params` is split, keyword arguments too; Python numbers and arrays without axes
      are handed to each micro-batch as they are, and so is what `loss_fn` closes over. A PRNG key
      (`jax.random.key`) is folded with the number of the micro-batch, counted over all devices, unless there
      is only one. `aux` has a new first axis: one entry per micro-batch (of each device, where a `shard_map`
      is entered here), dropped ones included; numbers become arrays.

      With "drop_microbatch" it returns `((value, grads), dropped)`, `dropped` being an int32 scalar: how many
      micro-batches (of single devices, with `axis_name`) were dropped. Pass on that there were any, so that
      the loss scale falls: `tx.update(grads, opt_state, params, overflowed=dropped > 0)`.

    Raises:
      TypeError, ValueError: for bad arguments; when the function is called, for arrays that cannot be split
        into n equal parts, for a batch without arrays, for an axis that does not exist, for `aux` that is no
        array.

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
        scale = find_loss_scale(scale_or_opt_state, loss)
        mean, dropped = run_window(window, step, scale, params, None, (args, kwargs))
        result = ((mean.loss, mean.aux) if has_aux else mean.loss, mean.grads)
        return (result, dropped) if window.drops else result

    return value_and_scaled_grad


@dataclasses.dataclass(frozen=True)
class Window:
    """How a batch is split into micro-batches, and how their gradients are put together.

    Args:
      n: micro-batches (of each device).
      dtype: of the accumulator.
      drops: whether single micro-batches are dropped.
      axes: mapped axes over which rows are split; may be none.
      mesh: the mesh of the axes, if it was given.
      batch_axis: the axis along which arrays are split.
    """

    n: int
    dtype: np.dtype
    drops: bool
    axes: tuple[Any, ...]
    mesh: Any
    batch_axis: int


class MicrobatchResult(NamedTuple):
    """What one micro-batch gives, or all together: loss, what comes beside it, gradients, state to carry."""

    loss: Any
    aux: Any
    grads: PyTree
    state: PyTree


#: One micro-batch: `(scale, params, state, args, kwargs)`.
StepFunction = Callable[[LossScale, PyTree, Any, tuple[Any, ...], dict[str, Any]], MicrobatchResult]


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
    """The mean of all micro-batches, and how many were dropped; int32 scalar."""
    split = Batch.of(batch, window.batch_axis)
    if not window.axes or _are_mapped(window.axes):
        return _run(window, step, scale, params, state, split)

    mesh = _mesh(window)
    devices = math.prod(mesh.shape[axis] for axis in window.axes)
    split.check(window.n * devices, f"{window.n} micro-batches on each of {devices} devices")
    whole, stacked = PartitionSpec(), PartitionSpec(window.axes)
    rows = PartitionSpec(*[None] * window.batch_axis, window.axes)

    def local(scale: LossScale, params: PyTree, state: PyTree, rows: Any, others: Any) -> Any:
        return _run(window, step, scale, params, state, split.with_arrays(rows, others))

    # Without the check of types: it refuses what loss functions that know of no devices do, such as a
    # scan whose carry starts as zeros.
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
    """What a loss function returns beside the loss, as a loop can stack it."""

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
    """Whether we are inside a `shard_map`, `pmap` or `vmap` over these axes."""
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


def _run(
    window: Window, step: StepFunction, scale: LossScale, params: PyTree, state: PyTree, batch: Batch
) -> tuple[MicrobatchResult, jax.Array]:
    """All micro-batches of this device, and the mean over devices."""
    n, axes = window.n, window.axes
    devices = lax.axis_size(axes) if axes else 1
    first = lax.axis_index(axes) * n if axes else 0
    batch.check(n, f"{n} micro-batches" + (" on each device" if axes else ""))
    microbatch = batch.microbatches(n, is_only=n * devices == 1)
    params = _own(params, axes)
    start = _with_own_keys(_own(state, axes), first) if axes else state

    def one(state: PyTree, i: Any) -> tuple[PyTree, PyTree, tuple[Any, Any, Any]]:
        """Micro-batch i: what it adds to the sum, the state after it; its loss, aux, whether it counts."""
        loss, aux, grads, after = step(scale, params, state, *microbatch(i, first + i))
        _check_is_own(loss, params, axes)
        grads, loss, kept = jax.tree.map(_none_unless_inexact, grads), jnp.asarray(loss), None
        if window.drops:
            kept = _agreed(all_finite((grads, loss)), axes)
            grads, loss = select_tree(kept, (grads, loss), jax.tree.map(jnp.zeros_like, (grads, loss)))
            after = select_tree(kept, after, state)
        return jax.tree.map(lambda g: g.astype(_wide(g.dtype, window.dtype)), grads), after, (loss, aux, kept)

    def add(carry: tuple[PyTree, PyTree], i: jax.Array) -> Any:
        total, state = carry
        part, state, beside = one(state, i)
        return (jax.tree.map(jnp.add, total, part), state), beside

    if n == 1:  # Without the 0 + g, which makes a 0 of -0.
        total, state_after, beside = one(start, 0)
        beside = jax.tree.map(lambda x: jnp.asarray(x)[None], beside)
    else:
        zeros = jax.tree.map(lambda p: _zeros(p, window.dtype), params)
        (total, state_after), beside = lax.scan(add, (zeros, start), jnp.arange(n, dtype=jnp.int32))

    losses, aux, kept = beside
    loss = jnp.sum(losses, dtype=promote_dtype(losses.dtype))
    # The number of those kept is float32 to go with the gradients in one all-reduce.
    count = n * devices if kept is None else jnp.sum(kept, dtype=jnp.float32)
    if axes:
        own = None if kept is None else count
        (total, loss, own), floats = lax.psum(((total, loss, own), _floats(state_after)), axes)
        count = count if own is None else own
        state_after = jax.tree.map(
            lambda old, new, summed: _over_devices(old, new, summed, devices), state, state_after, floats
        )
    grads = jax.tree.map(lambda p, t: _mean(p, t, count), params, total)
    dropped = jnp.asarray(n * devices - count, jnp.int32)
    return MicrobatchResult((loss / count).astype(losses.dtype), aux, grads, state_after), dropped


def _is_inexact(x: Any) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _none_unless_inexact(gradient: Any) -> Any:
    """None for the gradient of an integer, which no loop can carry."""
    return gradient if _is_inexact(gradient) else None


def _wide(dtype: Any, accumulator: np.dtype) -> np.dtype:
    is_narrow = is_floating(dtype) and jnp.finfo(dtype).bits <= 32
    return accumulator if is_narrow else np.dtype(dtype)


def _zeros(param: Any, accumulator: np.dtype) -> Any:
    if not _is_inexact(param):
        return None
    return jnp.zeros_like(param, dtype=_wide(jnp.result_type(param), accumulator))


def _mean(param: Any, total: Any, count: Any) -> Any:
    if total is None:
        return np.zeros(jnp.shape(param), jax.dtypes.float0)
    return total / (count if isinstance(count, int) else count.astype(total.dtype))


def _own(tree: PyTree, axes: tuple[Any, ...]) -> PyTree:
    """The floating arrays as every device's own.

    Differentiated by parameters that are typed as the same on all devices, a loss is summed over the devices
    by `shard_map` itself: once in every micro-batch.
    """
    manual = [a for a in axes if a in jax.sharding.get_abstract_mesh().manual_axes]

    def own(x: Any) -> Any:
        if not _is_inexact(x):
            return x
        common = tuple(a for a in manual if a not in varying(jax.typeof(x)))
        return lax.pcast(jnp.asarray(x), common, to="varying") if common else x

    return jax.tree.map(own, tree)


def _check_is_own(loss: Any, params: PyTree, axes: tuple[Any, ...]) -> None:
    """Where types tell, a loss that is the same on all devices was averaged over them already."""
    if not axes:
        return
    typed = set().union(*(varying(jax.typeof(p)) for p in jax.tree.leaves(params))) & set(axes)
    if missing := typed - varying(jax.typeof(loss)):
        raise ValueError(
            f"accumulate_gradients(axis_name={axes}) averages over devices itself, and the loss is the same "
            f"on all devices of {', '.join(map(repr, sorted(missing)))}: return the mean over the device's "
            "own rows, without pmean or psum."
        )


def _agreed(finite: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """One answer for all devices that hold parts of the same parameters or rows."""
    others = tuple(sorted(varying(jax.typeof(finite)) - set(axes)))
    return lax.pmin(finite.astype(jnp.int32), others) > 0 if others else finite


def _with_own_keys(state: PyTree, number: Any) -> PyTree:
    """PRNG keys of the state folded with a number that is the device's own: no two draw the same mask."""
    return jax.tree.map(lambda x: jax.random.fold_in(x, number) if is_key(x) else x, state)


def _floats(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(promote_dtype(x.dtype)) if _is_inexact(x) else None, state)


def _over_devices(before: Any, after: Any, summed: Any, devices: int) -> Any:
    if is_key(before):
        return before
    return after if summed is None else (summed / devices).astype(after.dtype)
