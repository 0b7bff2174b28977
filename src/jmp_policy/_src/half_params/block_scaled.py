"""Arrays of 8-bit numbers with a float32 scale for each 128 of them, in which `half_moments` keeps moments.

A second moment is kept as its square root, which has half the range: the squares of two gradients that differ
by 2**18, as far as float8 reaches below the largest number of a block, differ by 2**36. A square root that is
not zero does not become zero either, or the first moment would be divided by `eps` alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.half_params.rounding import rounded

#: Name by which a user asks for it, that of the float8 recipe.
FP8_BLOCK = "fp8_block"

#: Numbers of the last axis that share a scale, and their dtype. torchao's 8-bit AdamW has blocks of 256.
BLOCK, FORMAT = 128, jnp.float8_e4m3fn

#: The number after half of the largest.
_ABOVE_HALF = np.float32(240)
_MAX, _SMALLEST = (np.float32(getattr(jnp.finfo(FORMAT), name)) for name in ("max", "smallest_subnormal"))


class BlockScaled(NamedTuple):
    """A moment in 8 bits.

    Attributes:
      values: float8_e4m3fn of the moment's shape.
      scales: float32 powers of two, by which values are multiplied; of the moment's shape, but for the last
        axis, which has one for each 128 numbers.
    """

    values: Any
    scales: Any


def is_block_scaled(x: Any) -> bool:
    """Whether a node of a state is a moment in 8 bits."""
    return isinstance(x, BlockScaled)


def narrowed_by_blocks(x: jax.Array, bits: Any, *, is_square: bool) -> BlockScaled:
    """Rounds a moment to 8 bits.

    Args:
      x: float32 array of at least one axis.
      bits: uint32 of its shape to round at random, None to round to nearest.
      is_square: whether it is a second moment, which is kept as its square root.

    Returns:
      The moment; that of what `widened` gives is the same, bit for bit.
    """
    # With its sign, which what some optimizers call `nu` has.
    x = jnp.sign(x) * jnp.sqrt(jnp.abs(x)) if is_square else x
    scales, largest = _scales(x)
    new = rounded(x / _repeated(scales, x), FORMAT, bits)
    if is_square:
        new = jnp.where((x != 0) & (new == 0), jnp.sign(x) * _SMALLEST, new)
    # The largest of a block is above half of the range, and must not become half: it would get another scale.
    is_half = (jnp.abs(x) == _repeated(largest, x)) & (jnp.abs(new) == _MAX / 2)
    new = jnp.where(is_half, jnp.sign(x) * _ABOVE_HALF, new)
    return BlockScaled(new.astype(FORMAT), scales)


def widened(x: BlockScaled, *, is_square: bool) -> jax.Array:
    """The float32 moment that was rounded."""
    wide = x.values.astype(jnp.float32) * _repeated(x.scales, x.values)
    return wide * jnp.abs(wide) if is_square else wide


def _scales(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least powers of two by which blocks can be divided to fit the format, and their largest numbers.

    Of blocks of zeros the scale is 1; numbers that are not finite do not count.
    """
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    finite = jnp.where(jnp.isfinite(x), jnp.abs(x), 0)
    blocks = jnp.pad(finite, padding).reshape(*x.shape[:-1], -(-x.shape[-1] // BLOCK), BLOCK)
    largest = blocks.max(-1)
    fraction, exponent = jnp.frexp(largest / _MAX)
    exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
    return jnp.where(fraction > 0, jnp.ldexp(np.float32(1), jnp.maximum(exponent, -100)), 1), largest


def _repeated(values: jax.Array, x: Any) -> jax.Array:
    return jnp.repeat(values, BLOCK, axis=-1)[..., : x.shape[-1]]
