"""Splits a batch into micro-batches, runs a loss function over them, and averages losses and gradients.

`accumulate` is called where the axes over which rows are split are mapped already (inside `shard_map`), or
where there are none.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.dtypes import array_type_text, is_floating, promote_dtype
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.loss_scaling.float8_state import derivatives, map_derivatives
from jmp_policy._src.loss_scaling.gradients import all_finite, is_inexact
from jmp_policy._src.loss_scaling.loss_scale import LossScale
from jmp_policy._src.loss_scaling.selection import select_tree


@dataclasses.dataclass(frozen=True)
class Window:
    """Settings of an accumulation: how a batch is split into micro-batches, and how gradients are added up.

    Args:
      n: micro-batches (of each device).
      dtype: dtype of the accumulator.
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
    """Result of one micro-batch, or of all: loss, auxiliary output, gradients, state for the next one."""

    loss: Any
    aux: Any
    grads: PyTree
    state: PyTree


#: One micro-batch: `(scale, params, state, args, kwargs)`.
StepFunction = Callable[[LossScale, PyTree, Any, tuple[Any, ...], dict[str, Any]], MicrobatchResult]


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


class Batch(NamedTuple):
    """Arguments of a loss function that are to be split, leaf by leaf.

    Args:
      leaves: leaves of the arguments.
      treedef: tree structure of the arguments.
      names: names of the leaves, for messages.
      axis: axis along which arrays are split.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    names: tuple[str, ...]
    axis: int

    @classmethod
    def of(cls, arguments: tuple[tuple[Any, ...], dict[str, Any]], axis: int) -> "Batch":
        """Makes the batch of the arguments `(args, kwargs)`, to be split along an axis."""
        found = []
        for group, name in zip(arguments, ("batch", "kwargs"), strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(group):
                found.append((name + jax.tree_util.keystr(path), leaf))
        names, leaves = zip(*found, strict=True) if found else ((), ())
        return cls(leaves, jax.tree.structure(arguments), names, axis)

    def is_split(self, leaf: Any) -> bool:
        """Whether a leaf is an array with rows, which is split."""
        return isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0

    @property
    def rows(self) -> list[Any]:
        """The arrays that are split."""
        return [x for x in self.leaves if self.is_split(x)]

    @property
    def others(self) -> list[Any]:
        """The arrays without axes, PRNG keys among them."""
        return [x for x in self.leaves if isinstance(x, jax.Array) and not self.is_split(x)]

    def with_arrays(self, rows: list[Any], others: list[Any]) -> "Batch":
        """The same arguments with other arrays."""
        split, whole = iter(rows), iter(others)

        def new(leaf: Any) -> Any:
            if self.is_split(leaf):
                return next(split)
            return next(whole) if isinstance(leaf, jax.Array) else leaf

        return self._replace(leaves=tuple(map(new, self.leaves)))

    def check(self, parts: int, meant: str) -> None:
        """Raises ValueError unless all arrays have the same number of rows, a multiple of `parts`."""
        named = [(name, x) for name, x in zip(self.names, self.leaves, strict=True) if self.is_split(x)]
        shapes = ", ".join(f"{name}: {array_type_text(x)}" for name, x in named)
        if not named and parts > 1 and not any(map(is_key, self.leaves)):
            raise ValueError(
                f"There is no array to split into {meant}: pass the batch as an argument, "
                "accumulate_gradients(loss_fn, n)(opt_state, params, batch), instead of closing over it."
            )
        if any(x.ndim <= self.axis for _, x in named):
            raise ValueError(f"batch_axis={self.axis} is beyond the last axis of an array in {shapes}.")
        sizes = {x.shape[self.axis] for _, x in named}
        if len(sizes) > 1:
            raise ValueError(
                f"All arrays after the parameters are split along axis {self.axis}, and these differ in "
                f"length there: {shapes}. Close over what is not to be split; make PRNG keys with "
                "jax.random.key."
            )
        if sizes and min(sizes) % parts:
            raise ValueError(
                f"A batch of {min(sizes)} along axis {self.axis} cannot be split into {meant} of equal size: "
                f"{shapes}."
            )

    def microbatches(self, n: int, *, is_only: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        """A function that gives the arguments `(args, kwargs)` of a micro-batch.

        The function takes the micro-batch's index and its number among those of all devices. Rows of a
        micro-batch lie n apart: as runs of neighbouring rows, each micro-batch would lie on few devices.
        """
        axis, is_split = self.axis, [self.is_split(x) for x in self.leaves]
        leaves = self.leaves
        if n > 1:
            leaves = [_parts(x, n, axis) if split else x for x, split in zip(leaves, is_split, strict=True)]

        def microbatch(i: Any, number: Any) -> tuple[Any, Any]:
            def of(leaf: Any, split: bool) -> Any:
                if split:
                    return lax.dynamic_index_in_dim(leaf, i, axis + 1, keepdims=False) if n > 1 else leaf
                return jax.random.fold_in(leaf, number) if is_key(leaf) and not is_only else leaf

            return jax.tree.unflatten(self.treedef, map(of, leaves, is_split))

        return microbatch


def _parts(x: Any, n: int, axis: int) -> jax.Array:
    rows = x.shape[axis] // n
    return jnp.reshape(x, (*x.shape[:axis], rows, n, *x.shape[axis + 1 :]))


def accumulate(
    window: Window, step: StepFunction, scale: LossScale, params: PyTree, state: PyTree, batch: Batch
) -> tuple[MicrobatchResult, jax.Array]:
    """The mean over the micro-batches of all devices, and how many of them were dropped.

    Each device adds up the gradients of its n micro-batches in a loop; only then one all-reduce adds up the
    sums of all devices, and the total is divided by the number of micro-batches kept::

        for i in range(n):                               # _loop, on each device
            loss, grads = step(params, microbatch i)     # at the same loss scale
            if drops and not finite: loss, grads = 0, 0; kept = 0        # _dropped_unless_finite
            total = total + grads                                    # float8 layers' state: the maximum
        total, count = psum over devices                 # _sum_over_devices
        return total / count

    So that the all-reduce is the only one, parameters are typed as varying over devices (`_pvary`). For
    parameters that are the same on all devices, `shard_map` would add up the gradients of every micro-batch.
    """
    n, axes = window.n, window.axes
    devices = lax.axis_size(axes) if axes else 1
    first = lax.axis_index(axes) * n if axes else 0
    batch.check(n, f"{n} micro-batches" + (" on each device" if axes else ""))
    microbatch = batch.microbatches(n, is_only=n * devices == 1)
    params = _pvary(params, axes)
    start = _fold_keys(_pvary(state, axes), first) if axes else state

    def run_one(state: PyTree, i: Any) -> tuple[MicrobatchResult, Any]:
        result = step(scale, params, state, *microbatch(i, first + i))
        _check_loss_varies(result.loss, params, axes)
        result = result._replace(
            loss=jnp.asarray(result.loss), grads=jax.tree.map(_none_unless_inexact, result.grads)
        )
        result, kept = _dropped_unless_finite(result, state, axes) if window.drops else (result, None)
        return result._replace(grads=_to_accumulation_dtype(result.grads, window.dtype)), kept

    sums, kept = _loop(run_one, n, params, start, window.dtype)
    loss_dtype = sums.loss.dtype
    sums = sums._replace(loss=jnp.sum(sums.loss, dtype=promote_dtype(loss_dtype)))
    # The number of those kept is float32 to go with the gradients in one all-reduce.
    count = n * devices if kept is None else jnp.sum(kept, dtype=jnp.float32)
    if axes:
        sums, count = _sum_over_devices(sums, count, state, axes)
    grads = map_derivatives(
        lambda p, total: _mean(p, total, count),
        params,
        lambda p, largest: largest if kept is None else jnp.where(count > 0, largest, p),
        [sums.grads],
    )
    dropped = jnp.asarray(n * devices - count, jnp.int32)
    return sums._replace(loss=(sums.loss / count).astype(loss_dtype), grads=grads), dropped


def _loop(
    run_one: Callable[[PyTree, Any], tuple[MicrobatchResult, Any]],
    n: int,
    params: PyTree,
    state: PyTree,
    dtype: np.dtype,
) -> tuple[MicrobatchResult, Any]:
    """Runs the micro-batches of this device one after the other.

    Returns:
      The sum of their gradients, the last state, and their losses and auxiliary outputs, stacked along a new
      first axis; and which of them were kept, stacked too (None where none can be dropped).
    """
    if n == 1:  # Without the 0 + g, which makes a 0 of -0.
        result, kept = run_one(state, 0)
        loss, aux, kept = jax.tree.map(lambda x: jnp.asarray(x)[None], (result.loss, result.aux, kept))
        return result._replace(loss=loss, aux=aux), kept

    def add(carry: tuple[PyTree, PyTree], i: jax.Array) -> Any:
        total, state = carry
        result, kept = run_one(state, i)
        total = map_derivatives(jnp.add, total, jnp.maximum, [result.grads])
        return (total, result.state), (result.loss, result.aux, kept)

    zeros = map_derivatives(lambda p: _zeros(p, dtype), params, jnp.zeros_like)
    (total, state), (losses, aux, kept) = lax.scan(add, (zeros, state), jnp.arange(n, dtype=jnp.int32))
    return MicrobatchResult(losses, aux, total, state), kept


def _dropped_unless_finite(
    result: MicrobatchResult, before: PyTree, axes: tuple[Any, ...]
) -> tuple[MicrobatchResult, jax.Array]:
    """A micro-batch's result (zeros, and the state before, if not finite), and whether it is kept."""
    kept = _agree(all_finite((derivatives(result.grads), result.loss)), axes)
    numbers = (result.grads, result.loss)
    grads, loss = select_tree(kept, numbers, jax.tree.map(jnp.zeros_like, numbers))
    return result._replace(loss=loss, grads=grads, state=select_tree(kept, result.state, before)), kept


def _sum_over_devices(
    sums: MicrobatchResult, count: Any, before: PyTree, axes: tuple[Any, ...]
) -> tuple[MicrobatchResult, Any]:
    """Adds up losses, gradients and numbers of kept micro-batches of all devices, and averages their states.

    All in one all-reduce. `before` is the state before the first micro-batch; PRNG keys are taken from it.
    """
    devices = lax.axis_size(axes)
    local_count = None if isinstance(count, int) else count
    (total, loss, summed_count), floats = lax.psum(
        ((derivatives(sums.grads), sums.loss, local_count), _floats(sums.state)), axes
    )
    total = map_derivatives(
        lambda _, summed: summed, sums.grads, lambda local, _: lax.pmax(local, axes), [total]
    )
    state = jax.tree.map(
        lambda old, new, summed: _mean_over_devices(old, new, summed, devices), before, sums.state, floats
    )
    count = count if summed_count is None else summed_count
    return sums._replace(loss=loss, grads=total, state=state), count


def _none_unless_inexact(gradient: Any) -> Any:
    """A gradient, or None for that of an integer (float0), which no loop can carry."""
    return gradient if is_inexact(gradient) else None


def _accumulation_dtype(dtype: Any, accumulator: np.dtype) -> np.dtype:
    is_accumulated = is_floating(dtype) and jnp.finfo(dtype).bits <= 32  # Not float64, nor complex.
    return accumulator if is_accumulated else np.dtype(dtype)


def _to_accumulation_dtype(grads: PyTree, accumulator: np.dtype) -> PyTree:
    return map_derivatives(lambda g: g.astype(_accumulation_dtype(g.dtype, accumulator)), grads)


def _zeros(param: Any, accumulator: np.dtype) -> Any:
    if not is_inexact(param):
        return None
    return jnp.zeros_like(param, dtype=_accumulation_dtype(jnp.result_type(param), accumulator))


def _mean(param: Any, total: Any, count: Any) -> Any:
    if total is None:
        return np.zeros(jnp.shape(param), jax.dtypes.float0)
    return total / (count if isinstance(count, int) else count.astype(total.dtype))


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


def _agree(finite: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Makes devices that hold parts of the same parameters or rows agree whether a micro-batch is finite."""
    others = tuple(sorted(varying(jax.typeof(finite)) - set(axes)))
    return lax.pmin(finite.astype(jnp.int32), others) > 0 if others else finite


def _fold_keys(state: PyTree, number: Any) -> PyTree:
    """Folds the device's number into the PRNG keys of a state, so that no two devices draw the same mask."""
    return jax.tree.map(lambda x: jax.random.fold_in(x, number) if is_key(x) else x, state)


def _floats(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.astype(promote_dtype(x.dtype)) if is_inexact(x) else None, state)


def _mean_over_devices(before: Any, after: Any, summed: Any, devices: int) -> Any:
    if is_key(before):
        return before
    return after if summed is None else (summed / devices).astype(after.dtype)
