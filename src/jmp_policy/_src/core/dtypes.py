"""Tells floating, half and other dtypes apart."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
def is_complex(dtype: Any) -> bool:
    """Whether a dtype is one of complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


@functools.lru_cache(maxsize=256)
def is_complex_or_integer(dtype: Any) -> bool:
    """Whether a dtype is one of numbers that no policy casts."""
    kinds = jnp.complexfloating, jnp.integer
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


@functools.lru_cache(maxsize=256)
def is_half(dtype: Any) -> bool:
    """Whether a dtype is floating with 16 bits or fewer."""
    return is_floating(dtype) and jnp.finfo(dtype).bits <= 16


@functools.lru_cache(maxsize=256)
def promote_dtype(dtype: Any) -> np.dtype:
    """Float32 for a floating dtype of fewer bits; any other dtype as it is."""
    has_fewer_bits = is_floating(dtype) and jnp.finfo(dtype).bits < 32
    return np.dtype(np.float32) if has_fewer_bits else np.dtype(dtype)


def array_type_text(x: Any) -> str:
    """Formats dtype and shape of an array as messages show them: "float32[2,3]"."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


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
