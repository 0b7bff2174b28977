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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.device_dispatch import by_devices
from jmp_policy._src.policy.recipes import parts_of_nvfp4
from jmp_policy._src.products.functions import primitive_for

#: Types of values, with three binary digits after the point and a range of 2**17, and of gradients, with two
#: and 2**32.
VALUE, GRADIENT = "float8_e4m3fn", "float8_e5m2"


#: Type of 4-bit values: 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
FLOAT4 = "float4_e2m1fn"

#: The largest number of a tensor that is divided by its scale, by format. Those of 4 bits have scales of
#: blocks as well, up to 448.
_MAX = {VALUE: 448.0, GRADIENT: 57344.0, FLOAT4: 6 * 448.0}


def scale_of(
    x: Any, format: str, axes: Sequence[int] | None = None, *, per_device: bool = False
) -> jax.Array:
    """Computes the scale of an array from its largest absolute value; it has no gradient.

    Args:
      x: a floating array. Inside `shard_map` it is one device's part, and the largest value is that of the
        whole array.
      format: name of the float8 dtype.
      axes: axes that share a scale; None for all.
      per_device: whether, inside `shard_map`, a device's part has scales of its own, as its experts have.

    Returns:
      float32 powers of two, of the shape of `x` with 1 for `axes`, or a scalar. Infinity where a value is not
      finite, which makes all of the product NaN; where all are 0 it is the smallest, and the product is 0.
    """
    x = lax.stop_gradient(x)
    over = () if per_device else _split_over(x)
    scale = float8_scale(x, format, None if axes is None else tuple(axes), over)
    return checkpoint_name(scale, QUANTISED)


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
        scale = power_for(jnp.max(jnp.abs(x), axis=axes, keepdims=True), format)
    return lax.pmax(scale, over) if over else scale


def power_for(largest: jax.Array, format: str) -> jax.Array:
    """Returns the least powers of two by which largest values can be divided to fit a format."""
    # Half as much more, a little less for exact powers, rounds to the next power of two.
    more = largest.astype(jnp.float32) * np.float32(1.499 / _MAX[format])
    power = lax.reduce_precision(more, exponent_bits=8, mantissa_bits=0)
    return lax.max(power, np.finfo(np.float32).tiny)


def _at_once(format: str, x: jax.Array) -> list[jax.Array]:
    """Reduces a tensor, then computes the scale: several devices communicate one scalar."""
    return [power_for(jnp.max(jnp.abs(x)), format)]


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
    return [jnp.max(power_for(jnp.abs(x), format))]


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
    for format in _MAX
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


#: Name of rounded operands and their scales, for policies of `jax.checkpoint`.
QUANTISED = "jmp_policy_quantised"


def named_bits(x: Any, scale: Any, format: str, saturates: bool) -> jax.Array:
    """Rounds an operand to float8, and returns its bits in uint8 under a name; they have no gradient.

    Not as float8: what `jax.checkpoint` keeps goes through `lax.reduce_precision`, which makes the largest
    numbers of e4m3fn infinite (JAX 0.10.2 and 0.12.0). The type has no infinity, and uses their pattern.
    """
    return checkpoint_name(float8_bits(lax.stop_gradient(x), scale, format, saturates), QUANTISED)


@functools.partial(jax.jit, static_argnums=(2, 3))
def float8_bits(x: Any, scale: Any, format: str, saturates: bool) -> jax.Array:
    """Rounds an operand; a `jit`, so that jaxprs and profiles show one operation of this name."""
    return lax.bitcast_convert_type(quantised(x, scale, format, saturates=saturates), jnp.uint8)


@jax.custom_batching.custom_vmap
def largest_of(x: Any) -> jax.Array:
    """Computes the largest absolute value of an array: inside `shard_map` of the whole, in `vmap` of all."""
    largest, over = jnp.max(jnp.abs(x)).astype(jnp.float32), _split_over(x)
    return lax.pmax(largest, over) if over else largest


@largest_of.def_vmap
def _largest_of_batch(axis_size: int, in_batched: Sequence[bool], x: Any) -> tuple[jax.Array, bool]:
    return largest_of(x), False


def is_of_float8(eqn: Any) -> bool:
    """Returns whether an equation computes scales or rounded operands, for a product beside half ones."""
    return eqn.params.get("name") in ("float8_scale", "float8_bits", QUANTISED)


#: Terms that share a scale where hardware takes one; larger blocks repeat theirs.
TERMS = 32


#: Values of an operand that share a scale: so many rows (or columns), and so many terms of each sum. Of each
#: recipe with blocks, those of activations and gradients, and those of weights.
BLOCKS = {"fp8_block": ((1, 128), (128, 128)), "mxfp8": ((1, 32), (1, 32))}


def has_blocks(recipe: str | None) -> bool:
    """Whether the scales of a recipe of one pass are for blocks, so that the product itself computes them."""
    return recipe in BLOCKS or parts_of_nvfp4(recipe) is not None


class Scaled(NamedTuple):
    """An operand in few bits, as (batch, rows, terms).

    Args:
      values: its numbers, divided by their scales and rounded.
      scales: of `values`, but one for a number of terms in a row.
      terms: that number.
      whole: scale of the whole operand, of each of a batch, or of each of the terms where these are rows of
        experts; powers of two, None for one without.
    """

    values: Any
    scales: Any
    terms: int
    whole: Any = None

    @property
    def scale_of_each(self) -> Any:
        """The scale of each value, without that of the whole."""
        return repeated(self.scales, self.terms, self.values.shape[2])

    @property
    def in_bfloat16(self) -> Any:
        """The values times their scales, without that of the whole: bfloat16 holds them exactly."""
        return self.values.astype(jnp.bfloat16) * self.scale_of_each.astype(jnp.bfloat16)


def scaled_product(
    operands: Sequence[Any],
    rounded: Callable[[int, Any], Scaled],
    dtypes: tuple[Sequence[Any], Any],
    params: dict[str, Any],
    result: Any,
    scaled: bool,
) -> Any:
    """Computes a product of operands with scales for blocks, summed in float32.

    Args:
      operands: two half arrays.
      rounded: rounds an operand, given which one it is and its values as (batch, rows, terms).
      dtypes: of the two operands' values, and of scales, as the hardware takes them.
      params: of JAX's primitive.
      result: type of the result.
      scaled: whether to leave the scales to the compiler, where the sizes suit it.
    """
    contracted, batch = params["dimension_numbers"]
    axes = zip(contracted, batch, strict=True)
    matrices = [as_matrices(x, *own) for x, own in zip(operands, axes, strict=True)]
    numbers = (((2,), (2,)), ((0,), (0,)))
    lhs, rhs = each = [rounded(place, x) for place, x in enumerate(matrices)]
    terms = matrices[0].shape[2]
    # In bfloat16 at once, so that several devices add up 16 bits, as they do without a recipe.
    sums = result.dtype if result.dtype == jnp.bfloat16 else jnp.float32
    formats, format_of_scales = dtypes
    # XLA takes a single scale per row for one of the whole row.
    if scaled and terms % TERMS == 0 and terms > TERMS:
        out = lax.scaled_dot(
            *(x.values.astype(format) for x, format in zip(each, formats, strict=True)),
            lhs_scale=lhs.scales.astype(format_of_scales),
            rhs_scale=rhs.scales.astype(format_of_scales),
            dimension_numbers=numbers,
            preferred_element_type=sums,
        )
    else:
        values = [x.in_bfloat16 for x in each]
        new = params | {"dimension_numbers": numbers, "preferred_element_type": jnp.dtype(sums)}
        out = primitive_for(primitives.dot_general_p, values, new).bind(*values, **new)
    for x in each:
        out = out if x.whole is None else out * x.whole.astype(out.dtype)
    return out.reshape(result.shape).astype(result.dtype)


def rounded_by_blocks(x: Any, format: str, block: tuple[int, int]) -> Scaled:
    """Rounds (batch, rows, terms) to float8, with a scale for each block of so many rows and terms."""
    rows, terms = block
    scales = float8_scale(in_parts(x, TERMS), format, (3,), ())[..., 0]
    scales = shared(shared(scales, 2, terms // TERMS), 1, rows)
    return Scaled(quantised(x, repeated(scales, TERMS, x.shape[2]), format), scales, TERMS)


def in_parts(x: Any, terms: int) -> Any:
    """Returns (batch, rows, terms) as (batch, rows, parts, so many terms), padded with zeros."""
    return _padded(x, 2, terms).reshape(*x.shape[:2], -(-x.shape[2] // terms), terms)


def shared(scales: Any, axis: int, count: int) -> Any:
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


def repeated(scales: Any, terms: int, size: int) -> Any:
    """Returns the scale of each element of (batch, rows, size), given one for so many terms."""
    return lax.slice_in_dim(jnp.repeat(scales, terms, 2), 0, size, axis=2)


def as_matrices(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> Any:
    """Returns an operand as (batch, rows, terms)."""
    groups = (batch, free_axes(x, contracted, batch), contracted)
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in groups]
    return lax.transpose(x, [axis for axes in groups for axis in axes]).reshape(sizes)


def free_axes(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The axes of an operand that the result has too, batches aside."""
    return [axis for axis in range(x.ndim) if axis not in (*contracted, *batch)]


def like_result(scale: Any, place: int, rank: int, dimension_numbers: Any) -> Any:
    """Returns the scales of an operand's rows with the axes of the result: batches, left rows, right rows."""
    if scale.ndim == 0:
        return scale
    contracted, batch = (axes[place] for axes in dimension_numbers)
    free = free_axes(scale, contracted, batch)
    ordered = lax.transpose(scale, (*batch, *free, *contracted))
    ordered = lax.squeeze(ordered, range(len(batch) + len(free), scale.ndim))
    others = rank - ordered.ndim
    start = len(batch) if place == 1 else ordered.ndim
    return lax.expand_dims(ordered, range(start, start + others))
