"""`lax.dot_general` and `lax.conv_general_dilated`, with bfloat16 products that are fast on a CPU.

Flax's layers and `jnp.einsum` take such functions as arguments, so the policy hands them these.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.products.primitives import Bind, bind_suited, evaluated


@functools.wraps(lax.dot_general)
def dot_general(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `lax.dot_general`, with the same arguments."""
    return _suited(lax.dot_general, lhs, rhs, *args, **kwargs)


@functools.wraps(lax.conv_general_dilated)
def conv_general_dilated(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `lax.conv_general_dilated`, with the same arguments."""
    return _suited(lax.conv_general_dilated, lhs, rhs, *args, **kwargs)


def _suited(function: Callable[..., Any], lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    if not all(getattr(x, "dtype", None) == jnp.bfloat16 for x in (lhs, rhs)):
        return function(lhs, rhs, *args, **kwargs)
    return bound_by(bind_suited, function, lhs, rhs, *args, **kwargs)


def bound_by(bind: Bind, function: Callable[..., Any], lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """A product of `jax.lax`, with its operation bound by a function.

    Only JAX knows what its arguments come to (padding by name, the default precision); inside `shard_map` an
    operand may be marked as varying first.
    """
    types = jax.typeof(lhs), jax.typeof(rhs)
    jaxpr = jax.make_jaxpr(lambda lhs, rhs: function(lhs, rhs, *args, **kwargs))(*types)
    return evaluated(jaxpr, (lhs, rhs), bind)


def stand_in(function: Any, dtype: Any) -> Any:
    """Returns what a layer that computes in a dtype calls instead of a function of `jax.lax`.

    Any other function comes back as it is: a user's own wins. So does JAX's while another library has
    replaced it, as those that quantise do.
    """
    return _OURS[function] if is_jaxs_own(function) and are_chosen(dtype) else function


_OURS = {lax.dot_general: dot_general, lax.conv_general_dilated: conv_general_dilated}
_CODE = {function: function.__code__ for function in _OURS}


def is_jaxs_own(function: Any) -> bool:
    """Returns whether a function is one of JAX's products, and nobody has replaced it."""
    try:
        code = _CODE.get(function)
    except TypeError:  # One that cannot be hashed.
        return False
    return code is not None and function.__code__ is code and getattr(lax, function.__name__) is function


def are_chosen(dtype: Any) -> bool:
    """Returns whether code that computes in a dtype takes its products from here.

    Only bfloat16 does, where the default backend is a CPU: whoever traces for a GPU gets JAX's primitives.
    """
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
