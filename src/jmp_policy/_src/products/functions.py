"""`lax.dot_general`, with bfloat16 products that are fast on a CPU.

Flax's layers and `jnp.einsum` take such a function as an argument, so the policy hands them this one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.products.primitives import Bind, bind_suited, evaluated

_JAXS, _CODE = lax.dot_general, lax.dot_general.__code__


@functools.wraps(lax.dot_general)
def dot_general(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `lax.dot_general`, with the same arguments."""
    if not all(getattr(x, "dtype", None) == jnp.bfloat16 for x in (lhs, rhs)):
        return lax.dot_general(lhs, rhs, *args, **kwargs)
    return dot_general_by(bind_suited, lhs, rhs, *args, **kwargs)


def dot_general_by(bind: Bind, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
    """`lax.dot_general` of two arrays, with its product bound by a function.

    Only JAX knows what its arguments come to (the default precision); inside `shard_map` an operand may be
    marked as varying first.
    """
    types = jax.typeof(lhs), jax.typeof(rhs)
    jaxpr = jax.make_jaxpr(lambda lhs, rhs: lax.dot_general(lhs, rhs, *args, **kwargs))(*types)
    return evaluated(jaxpr, (lhs, rhs), bind)


def stand_in(function: Any, dtype: Any) -> Any:
    """Returns what a layer that computes in a dtype calls instead of a function of `jax.lax`.

    Any other function comes back as it is: a user's own wins. So does JAX's while another library has
    replaced it, as those that quantise do.
    """
    return dot_general if is_jaxs_own(function) and are_chosen(dtype) else function


def is_jaxs_own(function: Any) -> bool:
    """Returns whether a function is JAX's product, and nobody has replaced it."""
    return function is _JAXS is lax.dot_general and _JAXS.__code__ is _CODE


def are_chosen(dtype: Any) -> bool:
    """Returns whether code that computes in a dtype takes its products from here.

    Only bfloat16 does, where the default backend is a CPU: whoever traces for a GPU gets JAX's primitives.
    """
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
