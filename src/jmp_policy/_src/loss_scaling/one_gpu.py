"""What programs for one GPU compute in another way, so that XLA starts fewer kernels and copies less.

`by_devices` takes these functions as its `one_gpu`. The results are those of the plain ways, bit for bit.
Each says what XLA does without it, as jax 0.12.0.1 compiles for an H100. To measure it again, leave the
function out where it is given to `by_devices`, and run the command.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import is_half, promote_dtype
from jmp_policy._src.jaxpr import compat

#: Arrays of at most this many elements are small: starting a kernel takes longer than their arithmetic.
SMALL = 2**13

#: From this many elements per row on, the results of the rows are small beside the array.
LONG_ROW = 32

#: Axes of the kernels whose gradients XLA transposes badly (heads of attention).
AXES = 3


def flag_in_array(flag: jax.Array) -> list[jax.Array]:
    """A boolean as an element of an array of two, behind a barrier.

    XLA merges operations of one shape that read the same array, and counts no scalar as one. Without this
    each counter, mean and variance is selected in a kernel of its own: 348 kernels instead of 328 in
    `python -m benchmarks zoo_gpu "Small BatchNorm net"`.
    Remove when XLA merges what reads the same scalar.
    """
    return [lax.optimization_barrier(lax.broadcast(flag, (2,)))[0]]


def jointly(
    quotients: Callable[..., list[jax.Array]], divisor: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
    """Divides small arrays as one vector per dtype, and gives their readers slices of it.

    Without this, and without the barrier, each kernel that reads a small array divides it again, that of the
    finite test and those of the optimizer: 334 kernels instead of 328 in
    `python -m benchmarks zoo_gpu "Small BatchNorm net"`.
    Remove when XLA divides each small array once.
    """
    by_dtype = collections.defaultdict(list)
    for i, x in enumerate(arrays):
        if 0 < x.size <= SMALL:
            by_dtype[x.dtype].append(i)
    parts = {}
    for group in by_dtype.values():
        (vector,) = quotients(divisor, lax.concatenate([arrays[i].ravel() for i in group], 0))
        slices = lax.split(lax.optimization_barrier(vector), [arrays[i].size for i in group])
        parts |= {i: part.reshape(arrays[i].shape) for i, part in zip(group, slices, strict=True)}
    return [
        parts[i] if i in parts else quotients(divisor, transposed_once(x))[0] for i, x in enumerate(arrays)
    ]


def transposed_once(x: jax.Array) -> jax.Array:
    """Puts a barrier before the half gradient of a kernel with three axes, which is made as a matrix.

    With the attention of Flax's own layers XLA makes it transposed, transposes it in the kernel of each
    reader, and then cannot write the optimizer's results in place: it copies them. Without this BERT-Large
    moves 3.4 % more bytes and DiT-B/4 3.0 %, as they do by hand; so do encoders of 512 to 4096 features with
    heads of 64 or 128. The gradient of a narrow kernel, as of the keys of grouped queries (Llama), is made in
    parts that its readers add up: there the barrier would make a kernel of that sum.
    `python -m benchmarks zoo_gpu BERT-Large DiT-B/4 ViT-B/16 Llama`. Remove when XLA writes in place.
    """
    if x.ndim != AXES or not is_half(x.dtype):
        return x
    is_narrow = x.size < max(x.shape[0], x.shape[-1]) ** 2
    return x if is_narrow else lax.optimization_barrier(x)


def as_made(x: jax.Array) -> jax.Array:
    """The half array that one was cast from, so that the barrier above is put before the cast; or itself."""
    source = _before_cast(x)
    return source if is_half(source.dtype) and x.dtype == promote_dtype(source.dtype) else x


def _before_cast(x: Any) -> Any:
    """What an array was cast from, where the running trace shows a cast; else the array itself."""
    traced = compat.traced_by(x)
    # A tracer of a derivative or of vmap is more than the value inside that was cast.
    if traced is None or traced[0] is not x or traced[1] is None:
        return x
    _, eqn, operands = traced
    if eqn.primitive.name != "convert_element_type":
        return x
    # A cast that is the derivative of another one has a sharding; one without axes says nothing.
    spec = getattr(eqn.params.get("sharding"), "spec", ())
    return x if any(part is not None for part in spec) else operands[0]


def rows(plain_rows: Callable[[jax.Array], jax.Array], finite: jax.Array) -> jax.Array:
    """Reduces a boolean array to rows as `plain_rows`, but a convolution's kernel to one per output channel.

    cuDNN gives its gradient with the output channel as the slowest axis. Along any other axis XLA takes more
    kernels: 335 instead of 328 in `python -m benchmarks zoo_gpu "Small BatchNorm net"`.
    Remove when XLA reduces along any axis in as few.
    """
    if finite.size > SMALL and finite.ndim >= 4 and finite.shape[-1] >= LONG_ROW:
        return jnp.all(finite, axis=tuple(range(finite.ndim - 1)))
    return plain_rows(finite)
