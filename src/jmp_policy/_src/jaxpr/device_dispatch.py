"""Chooses between ways to compute the same values by the devices that a program is for.

What is best on one device can move whole arrays between several, and what saves kernels on a GPU takes memory
on a CPU. Which devices a program is for is known when it is lowered, not when it is traced, so the choice is
a primitive's lowering rule.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.core
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmp_policy._src.jaxpr import compat

Arrays = Sequence[jax.Array]
#: Primitives that stand for a whole function, and the same in NumPy, of those that are soon done there.
FUNCTIONS: dict[Primitive, Callable[..., Sequence[Any]] | None] = {}

#: JAX's names of the platforms whose devices are GPUs.
GPUS = ("cuda", "rocm")


def by_devices(
    name: str,
    anywhere: Callable[..., Arrays],
    one_device: Callable[..., Arrays] | None = None,
    one_gpu: Callable[..., Arrays] | None = None,
    on_host: Callable[..., Sequence[Any]] | None = None,
    *,
    types: Callable[..., Sequence[jax.ShapeDtypeStruct]],
    derivative: Literal["zero", "of anywhere"] = "zero",
) -> Callable[..., list[jax.Array]]:
    """A function of arrays that is computed in one way or another, by the devices it is compiled for.

    All ways give the same results, bit for bit, but where the caller says otherwise. Keyword arguments,
    hashable ones, are given to all of them. One that is left out is as the one before.

    Args:
      name: name of the primitive, as a jaxpr shows it.
      anywhere: the way on several devices, inside `shard_map`, in explicit sharding mode, with symbolic
        dimensions, under `vmap`, and when operations run one by one.
      one_device, one_gpu: the ways in a program for one device, and for one GPU.
      on_host: the same in NumPy, for a program that runs in pieces on a CPU.
      types: shapes and dtypes of the results, from those of the operands.
      derivative: "zero", or that of `anywhere`, which has one of every order.
    """
    primitive = Primitive(name)
    FUNCTIONS[primitive] = on_host
    primitive.multiple_results = True
    primitive.def_impl(anywhere)
    primitive.def_abstract_eval(
        lambda *avals, **options: [jax.core.ShapedArray(t.shape, t.dtype) for t in types(*avals, **options)]
    )

    def differentiate(primals: Arrays, tangents: Sequence[Any], **options: Any) -> Any:
        if derivative == "of anywhere":
            function = functools.partial(anywhere, **options)
            return jax.jvp(function, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))
        outs = primitive.bind(*primals, **options)
        return outs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]

    def batch(arrays: Arrays, axes: Sequence[Any], **options: Any) -> tuple[Arrays, Sequence[int]]:
        outs = jax.vmap(functools.partial(anywhere, **options), tuple(axes))(*arrays)
        return outs, [0] * len(outs)

    def lower(on_one_device: Callable[..., Arrays], ctx: Any, *operands: Any, **options: Any) -> Any:
        function = on_one_device if compat.is_for_one_device(ctx) else anywhere
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, **options)

    ad.primitive_jvps[primitive] = differentiate
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, functools.partial(lower, one_device or anywhere))
    for platform in GPUS:
        on_gpu = functools.partial(lower, one_gpu or one_device or anywhere)
        mlir.register_lowering(primitive, on_gpu, platform=platform)

    def choose(*arrays: jax.Array, **options: Any) -> list[jax.Array]:
        if any(_is_placed(x) or not has_known_sizes(x.shape) for x in arrays):
            # Inside shard_map, and in explicit sharding mode, an array's placement is part of its type.
            return list(anywhere(*arrays, **options))
        return primitive.bind(*arrays, **options)

    return choose


def has_known_sizes(shape: Sequence[Any]) -> bool:
    """Whether all sizes are integers; symbolic ones of an exported program cannot be compared."""
    return set(map(type, shape)) <= {int}


def _is_placed(x: jax.Array) -> bool:
    aval = jax.typeof(x)
    spec = getattr(getattr(aval, "sharding", None), "spec", ())
    return bool(compat.varying(aval)) or any(part is not None for part in spec)
