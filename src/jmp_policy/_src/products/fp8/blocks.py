"""Multiplies operands that have a scale for each block of consecutive terms of the sum.

Such scales differ within one sum, so that they cannot be multiplied onto its result: they belong to the
product itself. Blackwell's Tensor Cores take them, one for 32 terms. Everywhere else operands are rounded,
multiplied by their scales again and then multiplied in bfloat16. That is the same number: a value of e4m3
times a power of two is one of bfloat16. XLA knows such a product as `jax.lax.scaled_dot`, and makes one
kernel of it on a GPU. It does not compile where a program runs on several devices (JAX 0.10.2 and 0.12.0:
"Unable to convert MHLO to StableHLO"), and `jax.nn.scaled_matmul`, which does, cannot be chosen by platform.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

from jmp_policy._src.products.fp8.scales import float8_scale, quantised
from jmp_policy._src.products.primitives import primitive_for

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
