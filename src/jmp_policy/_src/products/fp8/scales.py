"""Scales by which operands are divided before they are rounded to float8, and products of scaled blocks.

A scale is a power of two, so that dividing by it and multiplying the product with it are exact.
TransformerEngine divides by the largest value itself by default, and rounds twice; a power of two costs at
most one binary digit of range, of the 17 to 32 that float8 has.

Scales for blocks of consecutive terms of the sum cannot be multiplied onto its result: they belong to the
product itself. Blackwell's Tensor Cores take them, one for 32 terms. Everywhere else operands are rounded,
multiplied by their scales again and then multiplied in bfloat16. That is the same number: a value of e4m3
times a power of two is one of bfloat16. XLA knows such a product as `jax.lax.scaled_dot`, and makes one
kernel of it on a GPU. It does not compile where a program runs on several devices (JAX 0.10.2 and 0.12.0:
"Unable to convert MHLO to StableHLO"), and `jax.nn.scaled_matmul`, which does, cannot be chosen by platform.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.device_dispatch import by_devices
from jmp_policy._src.products.primitives import primitive_for

#: Types of values, with three binary digits after the point and a range of 2**17, and of gradients, with two
#: and 2**32.
VALUE, GRADIENT = "float8_e4m3fn", "float8_e5m2"


def scale_of(x: Any, format: str, axes: Sequence[int] | None = None) -> jax.Array:
    """Computes the scale of an array from its largest absolute value; it has no gradient.

    Args:
      x: a floating array. Inside `shard_map` it is one device's part, and the largest value is that of the
        whole array.
      format: name of the float8 dtype.
      axes: axes that share a scale; None for all.

    Returns:
      float32 powers of two, of the shape of `x` with 1 for `axes`, or a scalar. Infinity where a value is not
      finite, which makes all of the product NaN; where all are 0 it is the smallest, and the product is 0.
    """
    x = lax.stop_gradient(x)
    return float8_scale(x, format, None if axes is None else tuple(axes), _split_over(x))


def _split_over(x: Any) -> tuple[str, ...]:
    """Returns the axes of the mesh over which the parts of an array may differ, inside `shard_map`.

    Without `check_vma` JAX does not know them: then it is all axes. The maximum over equal parts is theirs.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return ()
    varying = compat.varying(jax.typeof(x))
    is_known = compat.varying(jax.eval_shape(lambda: lax.axis_index(manual[0])))
    return tuple(axis for axis in manual if axis in varying or not is_known)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def float8_scale(x: Any, format: str, axes: tuple[int, ...] | None, over: tuple[str, ...]) -> jax.Array:
    """Computes a scale; a `jit`, so that jaxprs and profiles show one operation of this name."""
    is_empty = any(isinstance(size, int) and size == 0 for size in x.shape)  # Sizes may be symbolic.
    x = jnp.zeros((1,) * x.ndim, x.dtype) if is_empty else x
    if axes is None:
        (scale,) = _OF_TENSOR[format](x)
    else:
        scale = _power_for(jnp.max(jnp.abs(x), axis=axes, keepdims=True), format)
    return lax.pmax(scale, over) if over else scale


def _power_for(largest: jax.Array, format: str) -> jax.Array:
    """Returns the least powers of two by which largest values can be divided to fit a format."""
    # Half as much more, a little less for exact powers, rounds to the next power of two.
    more = largest.astype(jnp.float32) * np.float32(1.499 / float(jnp.finfo(format).max))
    power = lax.reduce_precision(more, exponent_bits=8, mantissa_bits=0)
    return lax.max(power, np.finfo(np.float32).tiny)


def _at_once(format: str, x: jax.Array) -> list[jax.Array]:
    """Reduces a tensor, then computes the scale: several devices communicate one scalar."""
    return [_power_for(jnp.max(jnp.abs(x)), format)]


def _in_two_kernels(format: str, x: jax.Array) -> list[jax.Array]:
    """Computes the scale of each element, or of each row of a matrix, then the largest of them.

    XLA reduces a large tensor in two kernels either way. Computed from the one result, the scale is often a
    third kernel, as all that use it would have to compute it again. XLA itself divides a tensor best, as it
    knows the order in memory; but a matrix, such as a weight, it would first copy transposed for its product.
    """
    if x.ndim == 2:
        if x.shape[0] > _ROWS or x.shape[1] > _ROW_SIZE:
            return _at_once(format, x)
        x = jnp.max(jnp.abs(x), axis=1)
    return [jnp.max(_power_for(jnp.abs(x), format))]


#: What XLA reduces in one kernel: so many rows of so many elements to one value each, and their results to
#: one. A longer row takes two kernels, and so does the second step for more rows.
_ROWS, _ROW_SIZE = 2**13, 2**14

#: How the scale of a whole tensor is computed, by format.
_OF_TENSOR = {
    format: by_devices(
        "float8_scale",
        functools.partial(_at_once, format),
        one_gpu=functools.partial(_in_two_kernels, format),
        types=lambda _: [jax.ShapeDtypeStruct((), jnp.float32)],
    )
    for format in (VALUE, GRADIENT)
}


def quantised(x: Any, scale: Any, format: str, *, saturates: bool = False) -> jax.Array:
    """Returns an array, divided by its scale, in float8: 0 or NaN where the scale is infinite.

    Args:
      x: a half array.
      scale: its scale.
      format: name of the float8 dtype.
      saturates: whether values beyond the range become the largest. What is not finite is NaN then.
    """
    divided = x.astype(jnp.float32) / scale
    if saturates:
        largest = float(jnp.finfo(format).max)
        divided = jnp.where(jnp.isfinite(divided), jnp.clip(divided, -largest, largest), jnp.nan)
    return divided.astype(format)


@jax.custom_batching.custom_vmap
def largest_of(x: Any) -> jax.Array:
    """Computes the largest absolute value of an array: inside `shard_map` of the whole, in `vmap` of all."""
    largest, over = jnp.max(jnp.abs(x)).astype(jnp.float32), _split_over(x)
    return lax.pmax(largest, over) if over else largest


@largest_of.def_vmap
def _largest_of_batch(axis_size: int, in_batched: Sequence[bool], x: Any) -> tuple[jax.Array, bool]:
    return largest_of(x), False


def is_float8_scale(eqn: Any) -> bool:
    """Returns whether an equation computes scales: the call of `float8_scale` as jaxprs show it."""
    return eqn.params.get("name") == "float8_scale"


#: Terms that share a scale where hardware takes one; larger blocks repeat theirs.
TERMS = 32


class Block(NamedTuple):
    """Values of an operand that share a scale: so many rows (or columns), and so many terms of each sum."""

    rows: int
    terms: int


#: Of each recipe with blocks, those of activations and gradients, and those of weights.
BLOCKS = {
    "fp8_block": (Block(1, 128), Block(128, 128)),
    "mxfp8": (Block(1, 32), Block(1, 32)),
}


def block_product(
    operands: Sequence[Any],
    formats: Sequence[str],
    blocks: Sequence[Block],
    params: dict[str, Any],
    *,
    result: Any,
    scaled: bool,
) -> Any:
    """Computes a product, summed in float32.

    Args:
      operands: two half arrays.
      formats: float8 dtype of each.
      blocks: of each.
      params: of JAX's primitive.
      result: dtype of the result.
      scaled: whether to leave the scales to the compiler, where the sizes suit it.
    """
    contracted, batch = params["dimension_numbers"]
    matrices = [
        _as_matrices(x, *axes) for x, axes in zip(operands, zip(contracted, batch, strict=True), strict=True)
    ]
    numbers = (((2,), (2,)), ((0,), (0,)))
    each = list(zip(matrices, map(block_scales, matrices, formats, blocks), formats, strict=True))
    terms = matrices[0].shape[2]
    # In bfloat16 at once, so that several devices add up 16 bits, as they do without a recipe.
    sums = result if result == jnp.bfloat16 else jnp.float32
    # XLA takes a single scale per row for one of the whole row.
    if scaled and terms % TERMS == 0 and terms > TERMS:
        (lhs, rhs), scales = zip(*((quantised(x, _repeated(s, x), f), s) for x, s, f in each), strict=True)
        lhs_scale, rhs_scale = (scale.astype(jnp.float8_e8m0fnu) for scale in scales)
        out = lax.scaled_dot(
            lhs,
            rhs,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
            dimension_numbers=numbers,
            preferred_element_type=sums,
        )
    else:
        rounded = [_rounded(x, _repeated(scale, x), format) for x, scale, format in each]
        new = params | {"dimension_numbers": numbers, "preferred_element_type": jnp.dtype(sums)}
        out = primitive_for(primitives.dot_general_p, rounded, new).bind(*rounded, **new)
    return out.reshape(_result_shape(operands, contracted, batch)).astype(result)


def block_scales(x: Any, format: str, block: Block) -> Any:
    """Returns the scales of (batch, rows, terms), one for each row and 32 terms."""
    size = -(-x.shape[2] // TERMS)
    parts = _padded(x, 2, TERMS).reshape(*x.shape[:2], size, TERMS)
    scales = float8_scale(parts, format, (3,), ())[..., 0]
    return _shared(_shared(scales, 2, block.terms // TERMS), 1, block.rows)


def _shared(scales: Any, axis: int, count: int) -> Any:
    """Returns scales of which `count` in a row are equal: their maximum."""
    if count == 1:
        return scales
    size, shape = scales.shape[axis], list(scales.shape)
    shape[axis : axis + 1] = [-(-size // count), count]
    largest = jnp.max(_padded(scales, axis, count).reshape(shape), axis + 1)
    return lax.slice_in_dim(jnp.repeat(largest, count, axis), 0, size, axis=axis)


def _padded(x: Any, axis: int, multiple: int) -> Any:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def _repeated(scales: Any, x: Any) -> Any:
    return lax.slice_in_dim(jnp.repeat(scales, TERMS, 2), 0, x.shape[2], axis=2)


def _rounded(x: Any, scale: Any, format: str) -> Any:
    return quantised(x, scale, format).astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


def _as_matrices(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> Any:
    """Returns an operand as (batch, rows, terms)."""
    groups = (batch, _free(x, contracted, batch), contracted)
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in groups]
    return lax.transpose(x, [axis for axes in groups for axis in axes]).reshape(sizes)


def _free(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    return [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]


def _result_shape(operands: Sequence[Any], contracted: Any, batch: Any) -> list[int]:
    shape = [operands[0].shape[axis] for axis in batch[0]]
    for x, *axes in zip(operands, contracted, batch, strict=True):
        shape += [x.shape[axis] for axis in _free(x, *axes)]
    return shape


def with_scales(x: Any, format: str, block: Block, contracted: Sequence[int], batch: Sequence[int]) -> Any:
    """Returns an operand as (batch, rows, terms), and the scale of each element."""
    matrices = _as_matrices(x, contracted, batch)
    return matrices, _repeated(block_scales(matrices, format, block), matrices)
