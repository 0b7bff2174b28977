"""What `loss_scaled` does to arrays: tests whether they are finite, divides them, and selects between two.

On one GPU with few reductions, and with few kernels for all the small ones.
"""

import collections
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr.device_dispatch import by_devices, has_known_sizes
from jmp_policy._src.loss_scaling import one_gpu


def all_finite(tree: PyTree, axis_name: Any = None) -> jax.Array:
    """Tests whether every floating and complex number in a pytree is finite: neither infinite nor NaN.

    Args:
      tree: any pytree. Integers, booleans, PRNG keys, `float0` and non-arrays cannot be non-finite
        and are passed over.
      axis_name: the mapped axis or axes (`pmap`, `shard_map`, `vmap`) over which the answer must be
        the same. Under `jax.jit` with sharded arrays leave it None: the answer is global there.

    Returns:
      A boolean scalar. True for a tree without numbers.

    Example:
      >>> import jax.numpy as jnp
      >>> bool(all_finite({"w": jnp.ones(3), "n": 7}))
      True
      >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    found = [(path, jnp.asarray(x)) for path, x in jax.tree.leaves_with_path(tree) if is_inexact(x)]
    if not found:
        return jnp.ones((), jnp.bool_)
    known: dict[str, int] = {}
    layers = tuple(known.setdefault(_layer_of(path), len(known)) for path, _ in found)
    (finite,) = _all_finite(*(x for _, x in found), layers=layers)
    return finite if axis_name is None else everywhere(finite, axis_name)


def _layer_of(path: Sequence[Any]) -> str:
    """A path without its numbers but those of the last module, so that equal layers of a model have one."""
    # Flax keeps an array with the names of its axes in `.value`.
    keys = [key for key in path if key != jax.tree_util.GetAttrKey("value")]
    names = [jax.tree_util.keystr((key,), simple=True) for key in keys]
    return "/".join([*(re.sub(r"\d+", "#", name) for name in names[:-2]), *names[-2:]])


def everywhere(flags: jax.Array, axis_name: Any) -> jax.Array:
    """Whether booleans are true on all devices of a mapped axis; the same shape."""
    try:
        # A minimum over 0 and 1 is a scalar all-reduce on every backend; booleans are not.
        return lax.pmin(flags.astype(jnp.int32), axis_name) > 0
    except NameError as error:
        raise NameError(
            f"axis_name={axis_name!r} names no mapped axis here. It is for jax.pmap, jax.shard_map and "
            "jax.vmap(..., axis_name=), with the name given there; under jax.jit alone leave it out."
        ) from error


def is_inexact(x: Any) -> bool:
    """Whether a leaf is a floating or complex array or number, and so may be infinite or NaN."""
    if isinstance(x, jax.Array | np.ndarray | np.generic):
        return bool(jnp.issubdtype(x.dtype, jnp.inexact))
    return isinstance(x, float | complex)


def _by_layers(*arrays: jax.Array, layers: Sequence[int]) -> list[jax.Array]:
    """Reduces arrays of equal layers together, and each other array by itself.

    XLA makes a reduction, on a GPU a kernel, of each array that is reduced by itself. Equal layers are taken
    to be placed alike: then one boolean is sent between devices. Where they are not, the booleans of one are
    moved to where the other lies.
    """
    alike: dict[Any, jax.Array] = {}
    for x, layer in zip(arrays, layers, strict=True):
        finite = jnp.isfinite(x)
        key = layer, jax.typeof(finite)
        alike[key] = lax.bitwise_and(alike[key], finite) if key in alike else finite
    return [jnp.all(jnp.stack([jnp.all(finite) for finite in alike.values()]))]


def _jointly(
    rows: Callable[[jax.Array], jax.Array], *arrays: jax.Array, layers: Sequence[int]
) -> list[jax.Array]:
    """Joins matrices of one size by "and", reduces each size to rows, and all rows in one last reduction.

    Without this XLA makes a small reduction, on a GPU a kernel, of each array; without the barrier it turns
    the last one back into one for each part. An H100's program (jax 0.12.0.1) of the wrapped encoder of
    `python -m benchmarks loss_scaling_cost` then has 437 kernels instead of 350. To measure it again, leave
    `one_device` and `one_gpu` out below. Remove when XLA fuses reductions of arrays of several shapes.
    """
    del layers
    by_size = collections.defaultdict(list)
    for x in arrays:
        # Of more axes, as of convolutions, the order in memory may be another one: in another shape XLA would
        # copy them. They are joined by shape.
        by_size[x.size if x.ndim <= _MATRIX else x.shape].append(jnp.isfinite(x))
    reduced = [rows(functools.reduce(lax.bitwise_and, _of_one_shape(group))) for group in by_size.values()]
    return [jnp.all(lax.optimization_barrier(lax.concatenate(reduced, 0)))]


#: The most axes of arrays that XLA makes with these in order.
_MATRIX = 2


def _of_one_shape(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Arrays of one size in the shape of that with the shortest rows that are long."""
    shape = min((x.shape for x in arrays), key=lambda shape: (shape[-1:] < (one_gpu.LONG_ROW,), shape[-1:]))
    return [x.reshape(shape) for x in arrays]


def _rows(finite: jax.Array) -> jax.Array:
    """Reduces a boolean array to a short vector that is all True exactly where the array is."""
    if finite.size <= one_gpu.SMALL:
        return finite.ravel()
    if finite.shape[-1] < one_gpu.LONG_ROW:
        return jnp.all(finite).reshape(1)
    return jnp.all(finite, axis=-1).ravel()


_all_finite = by_devices(
    "all_finite",
    _by_layers,
    one_device=functools.partial(_jointly, _rows),
    one_gpu=functools.partial(_jointly, functools.partial(one_gpu.rows, _rows)),
    types=lambda *_, layers: [jax.ShapeDtypeStruct((), jnp.bool_)],
)


def is_small(x: Any) -> bool:
    """Whether starting a kernel for an array takes longer than its arithmetic."""
    return has_known_sizes(x.shape) and x.size <= one_gpu.SMALL


class Decision:
    """Boolean scalar that many selections depend on."""

    def __init__(self, flag: jax.Array):
        self.flag = flag

    @functools.cached_property
    def for_small(self) -> jax.Array:
        """The same boolean scalar, such that XLA fuses what reads it."""
        return _flag(self.flag)[0]

    def select(self, on_true: jax.Array, on_false: jax.Array) -> jax.Array:
        """The first array where the boolean holds, else the second; both of one shape and dtype."""
        # Large arrays are selected by the scalar: a kernel that reads and writes dozens of them saves
        # launches, but no time that anybody has measured.
        return lax.select(self.for_small if is_small(on_true) else self.flag, on_true, on_false)


_flag = by_devices(
    "shared_flag",
    lambda flag: [flag],
    one_gpu=one_gpu.flag_in_array,
    types=lambda flag: [jax.ShapeDtypeStruct((), jnp.bool_)],
)


def divide(numbers: Sequence[Any], divisor: jax.Array) -> list[jax.Array]:
    """Divides floating and complex arrays by a scalar, in float32 those that have fewer bits, and floats."""
    arrays = [jnp.asarray(x, jnp.float32 if isinstance(x, float) else None) for x in numbers]
    arrays = [one_gpu.as_made(x) if x.ndim == one_gpu.AXES and not is_small(x) else x for x in arrays]
    return _divide(jnp.asarray(divisor), *arrays) if arrays else []


def _quotients(divisor: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    types = [promote_dtype(x.dtype) for x in arrays]
    wide = [lax.convert_element_type(x, dtype) for x, dtype in zip(arrays, types, strict=True)]
    return [lax.div(x, lax.broadcast(lax.convert_element_type(divisor, x.dtype), x.shape)) for x in wide]


_divide = by_devices(
    "unscale",
    _quotients,
    one_gpu=functools.partial(one_gpu.jointly, _quotients),
    types=lambda _, *arrays: [jax.ShapeDtypeStruct(x.shape, promote_dtype(x.dtype)) for x in arrays],
    derivative="of anywhere",
)
