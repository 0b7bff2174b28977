"""Rounds operands to 4 bits as NVIDIA and TransformerEngine train with them: the recipe "nvfp4".

Each 16 consecutive terms of a sum share a scale in e4m3, and the tensor has one in float32: here a power of
two, so that multiplying the result with it is exact. Three things keep training stable (NVIDIA, "Pretraining
Large Language Models with NVFP4", 2025), and each can be left out: "nvfp4-2d-sr-rht" has none of them.

- `2d`: a weight has one scale per 16 x 16 values, so that forward and backward pass see the same weight.
- `sr`: gradients are rounded at random, to be right on average. Rounded to nearest, they are biased.
- `rht`: before the product that is a weight gradient, both operands are multiplied by a random Hadamard
  matrix over each 16 terms, which spreads outliers. It is orthogonal, so that their product stays the same.
  Its signs are drawn once and for all, as there.

A value of e2m1 times a scale of e4m3 is a number of bfloat16. So wherever the hardware has no such product,
one in bfloat16 is the same.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.narrowing import rounded as to_nearest
from jmp_policy._src.policy.recipes import parts_of_nvfp4
from jmp_policy._src.products.fp8.scales import FLOAT4, Scaled, in_parts, repeated, scale_of, shared
from jmp_policy._src.products.functions import dot_general

#: Terms of a sum that share a scale, and rows of a weight; type of scales.
TERMS, SCALE = 16, "float8_e4m3fn"

_LARGEST, _LARGEST_SCALE = np.float32(6), np.float32(448)

#: A Hadamard matrix, and signs of its rows, drawn once.
_HADAMARD = np.array([[(-1) ** (i & j).bit_count() for j in range(TERMS)] for i in range(TERMS)], np.float32)
_SIGNS = np.array([1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, 1, 1, -1], np.float32)


def rounder(
    recipe: str, weight: int | None, gradient: int | None, key: Any, has_own: Sequence[bool]
) -> Callable[[int, Any], Scaled]:
    """Returns what rounds an operand of a product, given which one it is and its (batch, rows, terms).

    Args:
      recipe: "nvfp4", with or without some of its parts.
      weight: the operand that is a weight, if one is.
      gradient: the operand that is a gradient, if one is. Without a weight the product is that of a weight.
      key: uint32 array of shape (2,), from which the bits for rounding gradients are drawn.
      has_own: whether each of an operand's batch has a scale of its own, as experts have.
    """
    parts, transforms = parts_of_nvfp4(recipe) or (), is_transformed(recipe, weight, gradient)

    def rounded(place: int, x: Any) -> Scaled:
        x = transformed(x) if transforms else x
        rows = TERMS if place == weight and "2d" in parts else 1
        bits = None
        if place == gradient and "sr" in parts:
            # The gradient is rounded twice, in rows and in columns.
            at = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), weight is None)
            bits = jax.random.bits(at, x.shape, jnp.uint16)
        return _rounded(x, rows, bits, has_own[place])

    return rounded


def is_transformed(recipe: str, weight: int | None, gradient: int | None) -> bool:
    """Whether the operands of a product, described as for `rounder`, are transformed before that."""
    return gradient is not None and weight is None and "rht" in (parts_of_nvfp4(recipe) or ())


def transformed(x: Any) -> Any:
    """Multiplies each 16 terms of (batch, rows, terms) by an orthogonal matrix; padded with zeros before."""
    matrix = _SIGNS[:, None] * _HADAMARD / 4
    numbers = (((3,), (0,)), ((), ()))
    parts = dot_general(
        in_parts(x, TERMS), matrix.astype(x.dtype), numbers, preferred_element_type=jnp.float32
    )
    return parts.reshape(*x.shape[:2], -1)


def _rounded(x: Any, rows: int, bits: Any, has_own: bool) -> Scaled:
    """Rounds (batch, rows, terms), with a scale for 16 terms of so many rows: 0 where a value is not finite.

    The scale of the whole is infinite then, which makes the result of the product NaN.
    """
    whole = scale_of(x, FLOAT4, (1, 2) if has_own else None, per_device=has_own)
    x = lax.stop_gradient(x).astype(jnp.float32) / whole
    largest = shared(jnp.max(jnp.abs(in_parts(x, TERMS)), 3), 1, rows)
    # At random no number may be beyond the range of its scale, which is rounded itself.
    wanted = largest / _LARGEST if bits is None else largest / _LARGEST * np.float32(17 / 16)
    scales = to_nearest(jnp.minimum(wanted, _LARGEST_SCALE), SCALE)
    divided = x / repeated(jnp.where(scales > 0, scales, jnp.inf), TERMS, x.shape[2])
    return Scaled(_to_float4(divided, bits), scales, TERMS, whole)


def _to_float4(x: Any, bits: Any) -> Any:
    """Rounds float32 numbers to those of e2m1: to nearest, or at random by bits of uint16."""
    size = jnp.minimum(jnp.abs(x), _LARGEST)
    step = jnp.where(size < 2, np.float32(0.5), jnp.where(size < 4, np.float32(1), np.float32(2)))
    if bits is None:
        count = lax.round(size / step, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        count = jnp.floor(size / step + bits.astype(jnp.float32) * np.float32(2.0**-16))
    return (jnp.sign(x) * count * step).astype(jnp.bfloat16)


#: The stream of Flax's random numbers that is used; TransformerEngine's name.
STREAM = "sr_rng"


class _Keys:
    """A key, and how many keys were made of it. Equal to nothing else, for the caches of `jax.jit`."""

    def __init__(self, key: Any):
        self.key, self.count = key, 0

    def next(self) -> Any:
        self.count += 1
        return jax.random.fold_in(self.key, self.count)


#: The keys of this thread, or None.
_KEYS = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def rounding_key(key: Any) -> Iterator[None]:
    """Gives the recipe "nvfp4" a key, in a with-block, to round gradients at random.

    It has to be around the forward pass, inside of what is differentiated and compiled. Each product draws
    its own bits; what is traced once and runs often, as the body of a loop or a `jax.jit` inside, draws the
    same each time, unless it opens a block of its own, with `jax.random.fold_in(key, i)`. Linen modules may
    get `rngs={"sr_rng": key}` in its place, which goes first.

    Args:
      key: one of `jax.random.key`, another one in each step: a scalar.

    Raises:
      TypeError: for what is no key.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_policy as jmpp
      >>> def loss(w, x, key):
      ...     with jmpp.rounding_key(key):
      ...         return (jmpp.autocast(lambda w, x: jnp.tanh(x @ w) @ w, lower="nvfp4")(w, x) ** 2).mean()
      >>> jax.grad(loss)(jnp.ones((64, 64)), jnp.ones((32, 64)), jax.random.key(0)).dtype
      dtype('float32')
    """
    if not is_key(key):
        raise TypeError(
            f"rounding_key takes one key, as jax.random.key(0) makes it, of shape (), got {key!r}."
        )
    with _KEYS(_Keys(as_key(key))):
        yield


def is_key(key: Any) -> bool:
    """Whether a value is one random key, of either kind."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return shape == ()
    return dtype == jnp.uint32 and len(shape or ()) == 1


def as_key(key: Any) -> Any:
    """A key as one with a dtype of its own."""
    is_typed = jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if is_typed else jax.random.wrap_key_data(key)


def next_key() -> Any:
    """Data of a key for one product, uint32 of shape (2,); a number where there is no key."""
    keys = _KEYS.value
    return np.float32(1) if keys is None else data_of(keys.next())


def data_of(key: Any) -> Any:
    """The first two words of a key's data: a threefry key of its own, whatever the kind of the key."""
    return jax.random.key_data(key)[:2]


def check_key(data: Any) -> None:
    """Raises ValueError where a gradient is to be rounded at random, and the forward pass had no key."""
    if jnp.result_type(data) != jnp.uint32:
        raise ValueError(
            "The recipe nvfp4 rounds gradients at random, and the forward pass was given no key. Give it one "
            f"in each step: model.apply(params, x, rngs={{{STREAM!r}: key}}) for a Linen module (and "
            f"split_rngs={{{STREAM!r}: True}} in nn.scan), `with jmp_policy.rounding_key(key):` around the "
            "forward pass of anything else; or round to nearest: the recipe 'nvfp4-sr'."
        )
