"""Accumulates gradients: those of a large batch from micro-batches that fit into memory.

Different from optax's MultiSteps: one call takes the whole batch and runs a loop over its micro-batches in
the compiled step, the accumulator is float32 whatever the dtype of the gradients, the whole window (the
micro-batches of one call) has one loss scale, and devices are synchronised once per window instead of once
per micro-batch.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jmp_policy._src.core.classes import check_no_nnx_module
from jmp_policy._src.core.dtype_words import array_type_text, parse_dtype
from jmp_policy._src.core.dtypes import is_floating, promote_dtype, strip_weak_type
from jmp_policy._src.core.settings import positive_int
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.loss_scaling.float8_state import derivatives, map_derivatives
from jmp_policy._src.loss_scaling.gradients import is_inexact
from jmp_policy._src.loss_scaling.protocol import LossScale
from jmp_policy._src.loss_scaling.state import find_loss_scale
from jmp_policy._src.loss_scaling.value_and_grad import scaled_value_and_grad


@dataclasses.dataclass(frozen=True)
class Window:
    """Settings of an accumulation: how a batch is split into micro-batches, and how gradients are added up.

    Args:
      n: micro-batches (of each device).
      dtype: dtype of the accumulator.
      axes: mapped axes over which rows are split; may be none.
      mesh: the mesh of the axes, if it was given.
      has_aux: whether the loss function returns an auxiliary output too.
    """

    n: int
    dtype: np.dtype
    axes: tuple[Any, ...]
    mesh: Any
    has_aux: bool


class MicrobatchResult(NamedTuple):
    """Result of one micro-batch, or of all: loss, auxiliary output, gradients, state for the next one."""

    loss: Any
    aux: Any
    grads: PyTree
    state: PyTree


#: Arguments of a loss function behind the parameters: `(args, kwargs)`.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

#: One micro-batch: `(scale, params, state, args, kwargs) -> (value, grads, state)`.
StepFunction = Callable[[LossScale, PyTree, Any, tuple[Any, ...], dict[str, Any]], tuple[Any, PyTree, Any]]


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    n: int,
    *,
    has_aux: bool = False,
    allow_int: bool = False,
    loss: str | None = None,
    accumulator_dtype: DTypeLike = jnp.float32,
    axis_name: Any = None,
    mesh: Any = None,
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
      axis_name: mesh axis or axes over which the rows of the batch are split, with the same parameters on
        all devices. The devices then add up their gradients once, after the last micro-batch, instead of in
        each. Inside `shard_map` (or `pmap`) over that axis, nothing more is needed: `loss_fn` sees the
        device's rows, must not average over devices itself, and value and gradients are those of all
        devices. Elsewhere, as in `jit` with shardings, the axis is looked up in `mesh`, and `loss_fn` runs
        inside a `shard_map` over it; other axes of the mesh are left alone.
      mesh: the mesh with `axis_name`; that of `jax.set_mesh` by default.

    Returns:
      A function `(scale_or_opt_state, params, *batch, **kwargs) -> (value, grads)`, to be used as that of
      `scaled_value_and_grad`: `value` is the mean loss, `(loss, aux)` with `has_aux`; `grads` are
      the mean gradients, still multiplied by the one loss scale of the state: not finite if those of one
      micro-batch are not, so that `loss_scaled` skips the step.

      Every array after `params` is split along its first axis, keyword arguments too; Python numbers and
      arrays without axes are passed to each micro-batch unchanged, and so is everything that `loss_fn` closes
      over. A PRNG key (`jax.random.key`) is folded with the number of the micro-batch, counted over all
      devices, unless there is only one. `aux` has a new first axis: one entry per micro-batch (of each
      device, where a `shard_map` is entered here); numbers become arrays.

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
    window = make_window(n, accumulator_dtype, axis_name, mesh, has_aux)
    gradient = scaled_value_and_grad(loss_fn, has_aux=has_aux, allow_int=allow_int)

    def step(scale: LossScale, params: PyTree, state: None, args: Any, kwargs: Any) -> Any:
        return *gradient(scale, params, *args, **kwargs), None

    def value_and_scaled_grad(scale_or_opt_state: Any, params: PyTree, /, *args: Any, **kwargs: Any) -> Any:
        check_no_nnx_module("accumulate_gradients", params)
        scale = find_loss_scale(scale_or_opt_state, loss)
        return run_window(window, step, scale, params, None, (args, kwargs))[0]

    return value_and_scaled_grad


def make_window(
    n: int,
    accumulator_dtype: Any,
    axis_name: Any,
    mesh: Any,
    has_aux: bool,
) -> Window:
    """Checks the arguments of `accumulate_gradients` that do not depend on a batch."""
    positive_int(n, "n")
    dtype = parse_dtype(accumulator_dtype, "of the accumulator")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"accumulator_dtype={dtype.name} needs 64-bit mode: jax.config.update('jax_enable_x64', True)."
        )
    if axis_name is None and mesh is not None:
        raise ValueError("mesh= needs axis_name=, the axis of the mesh that the batch is split over.")
    axes = axis_name if isinstance(axis_name, tuple | list) else () if axis_name is None else (axis_name,)
    return Window(n, dtype, tuple(axes), mesh, has_aux)


def run_window(
    window: Window, step: StepFunction, scale: LossScale, params: PyTree, state: PyTree, batch: Arguments
) -> tuple[Any, PyTree]:
    """What `accumulate_gradients` returns, and the state after the last micro-batch.

    Enters a `shard_map` over the window's axes where the caller is not inside of one.
    """
    is_inside = not window.axes or _are_mapped(window.axes)
    run = _accumulate if is_inside else _accumulate_in_shard_map
    mean = run(window, step, scale, params, state, batch)
    return ((mean.loss, mean.aux) if window.has_aux else mean.loss, mean.grads), mean.state


def _accumulate_in_shard_map(
    window: Window, step: StepFunction, scale: LossScale, params: PyTree, state: PyTree, batch: Arguments
) -> MicrobatchResult:
    mesh = _mesh(window)
    devices = math.prod(mesh.shape[axis] for axis in window.axes)
    meant = f"{window.n} micro-batches on each of {devices} devices"
    check_rows(batch, window.n * devices, meant)
    leaves, treedef = jax.tree.flatten(batch)
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.Array) or is_split(x)}
    whole, rows = PartitionSpec(), PartitionSpec(window.axes)
    specs = {i: rows if is_split(x) else whole for i, x in arrays.items()}

    def local(scale: LossScale, params: PyTree, state: PyTree, arrays: dict[int, Any]) -> Any:
        part = jax.tree.unflatten(treedef, [arrays.get(i, x) for i, x in enumerate(leaves)])
        return _accumulate(window, step, scale, params, state, part)

    # check_vma=False: the check refuses loss functions that were written without devices in mind, such as
    # those with a scan whose carry starts as zeros.
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(whole, whole, whole, specs),
        out_specs=MicrobatchResult(whole, rows, whole, whole),
        axis_names=set(window.axes),
        check_vma=False,
    )
    return jax.jit(mapped)(scale, params, state, arrays)


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


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def is_split(x: Any) -> bool:
    """Whether an argument of a loss function is an array with rows, which is split."""
    return isinstance(x, jax.Array | np.ndarray) and x.ndim > 0


def check_rows(batch: Arguments, parts: int, meant: str) -> None:
    """Raises ValueError unless all arrays have the same number of rows, a multiple of `parts`."""
    leaves = jax.tree.leaves_with_path(dict(zip(("batch", "kwargs"), batch, strict=True)))
    rows = [(f"{path[0].key}{jax.tree_util.keystr(path[1:])}", x) for path, x in leaves if is_split(x)]
    shapes = ", ".join(f"{name}: {array_type_text(x)}" for name, x in rows)
    if not rows and parts > 1 and not any(is_key(x) for _, x in leaves):
        raise ValueError(
            f"There is no array to split into {meant}: pass the batch as an argument, "
            "accumulate_gradients(loss_fn, n)(opt_state, params, batch), instead of closing over it."
        )
    sizes = {x.shape[0] for _, x in rows}
    if len(sizes) > 1:
        raise ValueError(
            f"All arrays after the parameters are split along their first axis, and these differ in length "
            f"there: {shapes}. Close over what is not to be split; make PRNG keys with jax.random.key."
        )
    if sizes and min(sizes) % parts:
        raise ValueError(
            f"A batch of {min(sizes)} rows cannot be split into {meant} of equal size: {shapes}."
        )


def _accumulate(
    window: Window, step: StepFunction, scale: LossScale, params: PyTree, state: PyTree, batch: Arguments
) -> MicrobatchResult:
    """The mean over the micro-batches of all devices, where the axes are mapped.

    Each device adds up the gradients of its n micro-batches in a loop; only then one all-reduce adds up the
    sums of all devices, and the total is divided by the number of micro-batches::

        for i in range(n):                               # _loop, on each device
            loss, grads = step(params, microbatch i)     # at the same loss scale
            total = total + grads                                    # float8 layers' state: the maximum
        total = psum over devices                        # _sum_over_devices
        return total / (n * devices)

    So that the all-reduce is the only one, parameters are typed as varying over devices (`_pvary`). For
    parameters that are the same on all devices, `shard_map` would add up the gradients of every micro-batch.
    """
    n, axes = window.n, window.axes
    devices = lax.axis_size(axes) if axes else 1
    first = lax.axis_index(axes) * n if axes else 0
    check_rows(batch, n, f"{n} micro-batches" + (" on each device" if axes else ""))
    batch = jax.tree.map(lambda x: _in_parts(x, n) if is_split(x) else x, batch)
    params, start = _pvary(params, axes), state
    if axes:  # No two devices draw the same mask.
        start = jax.tree.map(lambda x: jax.random.fold_in(x, first) if is_key(x) else x, _pvary(state, axes))

    def microbatch(x: Any, i: Any) -> Any:
        """Part of an argument; a key is folded with the number of the micro-batch among all devices'."""
        if is_split(x):
            return lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)
        return jax.random.fold_in(x, first + i) if is_key(x) and n * devices > 1 else x

    def run_one(state: PyTree, i: Any) -> MicrobatchResult:
        args, kwargs = jax.tree.map(lambda x: microbatch(x, i), batch)
        value, grads, after = step(scale, params, state, args, kwargs)
        loss, aux = value if window.has_aux else (value, None)
        _check_loss_varies(loss, params, axes)
        # No loop can carry the gradient of an integer, which is float0.
        grads = jax.tree.map(lambda g: g if is_inexact(g) else None, grads)
        aux = jax.tree.map(lambda x: strip_weak_type(jnp.asarray(x)), aux)
        grads = map_derivatives(lambda g: g.astype(_accumulation_dtype(g.dtype, window.dtype)), grads)
        return MicrobatchResult(jnp.asarray(loss), aux, grads, after)

    sums = _loop(run_one, n, params, start, window.dtype)
    loss_dtype = sums.loss.dtype
    sums = sums._replace(loss=jnp.sum(sums.loss, dtype=promote_dtype(loss_dtype)))
    if axes:
        sums = _sum_over_devices(sums, state, axes)
    count = n * devices
    grads = map_derivatives(lambda p, total: _mean(p, total, count), params, lambda p, x: x, [sums.grads])
    return sums._replace(loss=(sums.loss / count).astype(loss_dtype), grads=grads)


def _in_parts(x: Any, n: int) -> jax.Array:
    """An array with its rows as (rows of a micro-batch, n).

    Rows of a micro-batch lie n apart: as runs of neighbouring rows, each would lie on few devices.
    """
    return jnp.reshape(x, (x.shape[0] // n, n, *x.shape[1:]))


def _loop(
    run_one: Callable[[PyTree, Any], MicrobatchResult],
    n: int,
    params: PyTree,
    state: PyTree,
    dtype: np.dtype,
) -> MicrobatchResult:
    """Runs the micro-batches of this device one after the other.

    Returns:
      The sum of their gradients, the last state, and their losses and auxiliary outputs, stacked along a new
      first axis.
    """

    def add(carry: tuple[PyTree, PyTree], i: jax.Array) -> Any:
        total, state = carry
        result = run_one(state, i)
        total = map_derivatives(jnp.add, total, jnp.maximum, [result.grads])
        return (total, result.state), (result.loss, result.aux)

    def zeros(param: Any) -> Any:
        if not is_inexact(param):
            return None
        return jnp.zeros_like(param, dtype=_accumulation_dtype(jnp.result_type(param), dtype))

    start = map_derivatives(zeros, params, jnp.zeros_like), state
    (total, state), (losses, aux) = lax.scan(add, start, jnp.arange(n, dtype=jnp.int32))
    return MicrobatchResult(losses, aux, total, state)


def _sum_over_devices(sums: MicrobatchResult, before: PyTree, axes: tuple[Any, ...]) -> MicrobatchResult:
    """Adds up losses and gradients of all devices, and averages their states.

    All in one all-reduce. `before` is the state before the first micro-batch; PRNG keys are taken from it.
    """
    floats = jax.tree.map(lambda x: x.astype(promote_dtype(x.dtype)) if is_inexact(x) else None, sums.state)
    (total, loss), floats = lax.psum(((derivatives(sums.grads), sums.loss), floats), axes)
    total = map_derivatives(
        lambda _, summed: summed, sums.grads, lambda local, _: lax.pmax(local, axes), [total]
    )

    def mean(old: Any, new: Any, summed: Any) -> Any:
        if is_key(old):
            return old
        return new if summed is None else (summed / lax.axis_size(axes)).astype(new.dtype)

    state = jax.tree.map(mean, before, sums.state, floats)
    return sums._replace(loss=loss, grads=total, state=state)


def _accumulation_dtype(dtype: Any, accumulator: np.dtype) -> np.dtype:
    is_accumulated = is_floating(dtype) and jnp.finfo(dtype).bits <= 32  # Not float64, nor complex.
    return accumulator if is_accumulated else np.dtype(dtype)


def _mean(param: Any, total: Any, count: Any) -> Any:
    if total is None:
        return np.zeros(jnp.shape(param), jax.dtypes.float0)
    return total / count


def _pvary(tree: PyTree, axes: tuple[Any, ...]) -> PyTree:
    """Types floating arrays as varying over the axes, as `jax.lax.pvary` does.

    Differentiated by parameters that are typed as the same on all devices, a loss is summed over the devices
    by `shard_map` itself: once in every micro-batch.
    """
    manual = [a for a in axes if a in jax.sharding.get_abstract_mesh().manual_axes]

    def pvary(x: Any) -> Any:
        if not is_inexact(x):
            return x
        common = tuple(a for a in manual if a not in varying(jax.typeof(x)))
        return lax.pcast(jnp.asarray(x), common, to="varying") if common else x

    return jax.tree.map(pvary, tree)


def _check_loss_varies(loss: Any, params: PyTree, axes: tuple[Any, ...]) -> None:
    """Raises where types show that the loss is the same on all devices: it was averaged over them already."""
    if not axes:
        return
    typed = set().union(*(varying(jax.typeof(p)) for p in jax.tree.leaves(params))) & set(axes)
    if missing := typed - varying(jax.typeof(loss)):
        raise ValueError(
            f"accumulate_gradients(axis_name={axes}) averages over devices itself, and the loss is the same "
            f"on all devices of {', '.join(map(repr, sorted(missing)))}: return the mean over the device's "
            "own rows, without pmean or psum."
        )
