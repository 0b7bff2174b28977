"""Chooses between two ways to compute the same values by the number of devices that a program is for.

What is best on one device can move whole arrays between several. How many devices a program is for is known
when it is lowered, not when it is traced, so the choice is a primitive's lowering rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmp_policy._src.jaxpr import compat


def by_devices(
    name: str,
    single_device: Callable[..., jax.Array],
    sharded: Callable[..., jax.Array],
    shape: tuple[int, ...],
    dtype: Any,
) -> Callable[..., jax.Array]:
    """Returns a function of arrays that is computed in one way on one device, and in another on several.

    Args:
      name: name of the primitive, as a jaxpr shows it.
      single_device: the function to compute in a program for one device.
      sharded: the function to compute everywhere else: on several devices, inside `shard_map`, in explicit
        sharding mode, with symbolic dimensions, under `vmap`, and when operations run one by one. It gives
        the same result, bit for bit.
      shape, dtype: shape and dtype of the result, whose derivative is zero.
    """
    primitive = Primitive(name)
    primitive.def_impl(sharded)
    primitive.def_abstract_eval(lambda *_: jax.core.ShapedArray(shape, jnp.dtype(dtype)))

    def differentiate(primals: Sequence[jax.Array], _: Any) -> tuple[jax.Array, Any]:
        is_number = jnp.issubdtype(dtype, jnp.inexact)
        tangent = jax.core.ShapedArray(shape, jnp.dtype(dtype) if is_number else jax.dtypes.float0)
        return primitive.bind(*primals), ad.Zero(tangent)

    def batch(arrays: Sequence[jax.Array], axes: Sequence[Any]) -> tuple[jax.Array, int]:
        return jax.vmap(sharded, tuple(axes))(*arrays), 0

    def lower(ctx: Any, *operands: Any) -> Any:
        function = single_device if compat.is_for_one_device(ctx) else sharded
        return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)

    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower)

    def choose(*arrays: jax.Array) -> jax.Array:
        if any(_is_placed(x) or not _has_known_shape(x) for x in arrays):
            # Inside shard_map, and in explicit sharding mode, an array's placement is part of its type.
            return sharded(*arrays)
        return primitive.bind(*arrays)

    return choose


def _is_placed(x: jax.Array) -> bool:
    aval = jax.typeof(x)
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return compat.varies_over_devices(aval) or any(part is not None for part in spec)


def _has_known_shape(x: jax.Array) -> bool:
    """Returns whether all sizes are integers; they are not while a program is exported with symbolic ones."""
    return all(isinstance(size, int) for size in x.shape)
