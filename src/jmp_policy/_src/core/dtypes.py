"""Tells floating, half and other dtypes apart, and casts the floating leaves of a pytree."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.types import DTypeLike, PyTree


# Asked thousands of times while a model is traced, of a handful of dtypes.
@functools.lru_cache(maxsize=256)
def is_floating(dtype: Any) -> bool:
    """Whether a dtype is real floating (float8 and bfloat16 are; PRNG keys and float0 are not)."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


@functools.lru_cache(maxsize=256)
def is_number(dtype: Any) -> bool:
    """Whether a dtype is one of numbers: no booleans, keys or float0."""
    return is_floating(dtype) or bool(jax.dtypes.issubdtype(dtype, np.number))


@functools.lru_cache(maxsize=256)
def is_complex_or_integer(dtype: Any) -> bool:
    """Whether a dtype is one of numbers that no policy casts."""
    kinds = jnp.complexfloating, jnp.integer
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


@functools.lru_cache(maxsize=256)
def is_half(dtype: Any) -> bool:
    """Whether a dtype is floating with 16 bits or fewer."""
    return is_floating(dtype) and jnp.finfo(dtype).bits <= 16


def is_wide(dtype: Any) -> bool:
    """Whether a dtype is floating with more than 16 bits."""
    return is_floating(dtype) and not is_half(dtype)


@functools.lru_cache(maxsize=256)
def promote_dtype(dtype: Any) -> np.dtype:
    """Float32 for a floating dtype of fewer bits; any other dtype as it is."""
    has_fewer_bits = is_floating(dtype) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if has_fewer_bits else np.dtype(dtype)


def is_dtype_or_none(value: Any) -> bool:
    """Whether the value of a field called `dtype` is one that a policy may replace."""
    if value is None:
        return True
    if isinstance(value, str) and value not in ("float16", "bfloat16", "float32", "float64"):
        return False  # A field that happens to be called dtype.
    try:
        return bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))
    except TypeError:
        return False


#: What counts as an array among the leaves of a pytree.
ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_floating_array(x: Any) -> bool:
    """Whether a leaf is an array, or a `jax.ShapeDtypeStruct`, of a floating dtype."""
    return isinstance(x, ARRAYS) and is_floating(x.dtype)


def has_complex(tree: PyTree) -> bool:
    """Whether an array among the leaves of a pytree is complex."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, ARRAYS))
    return any(jnp.issubdtype(x.dtype, jnp.complexfloating) for x in arrays)


def map_changed(
    function: Callable[[Any], Any], tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> PyTree:
    """Maps a function over the leaves as `jax.tree.map` does; the same tree where no leaf changed.

    None stays None. A tree that comes back as the same object costs nothing later: containers are not
    rebuilt and custom nodes are not unflattened.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf)
    new = list(map(function, leaves))
    return tree if all(map(operator.is_, leaves, new)) else jax.tree.unflatten(treedef, new)


def strip_weak_type(x: Any) -> Any:
    """A weakly typed JAX array with a strong type; anything else as the same object."""
    if isinstance(x, jax.Array) and getattr(jax.typeof(x), "weak_type", False):
        return lax.convert_element_type(x, x.dtype)
    return x


def cast_leaf(x: Any, dtype: np.dtype) -> Any:
    """Casts one floating array to `dtype`, and returns anything else as the same object."""
    if not is_floating_array(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    if isinstance(x, jax.Array):
        return lax.convert_element_type(x, dtype)  # Half the tracing time of x.astype.
    return x.astype(dtype)


def in_dtype_of(like: Any, x: Any) -> Any:
    """A floating array in the dtype of another one; anything else as it is."""
    return cast_leaf(x, like.dtype) if is_floating_array(like) else x


def cast_floating(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Casts the floating arrays of a pytree.

    Args:
      tree: any pytree. Arrays may be JAX arrays, tracers, NumPy arrays and scalars, or
        `jax.ShapeDtypeStruct`s; boxed Flax metadata is looked into.
      dtype: a floating dtype.

    Returns:
      The tree with every float, bfloat16 and float8 array in `dtype`. All else (complex numbers, PRNG keys,
      Python scalars) is the same object as before, and so is the whole tree where nothing changed.
    """
    dtype = np.dtype(dtype)
    return map_changed(functools.partial(cast_leaf, dtype=dtype), tree)
