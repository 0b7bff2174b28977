"""Counts numbers by their exponent, inside `jax.jit`, for histograms of log2|x|.

One vector of counts per tensor holds everything, so that those of several steps, devices and trips of a loop
add up.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.jaxpr.device_dispatch import by_devices

#: Exponents that are counted separately: those of float32, subnormal numbers included.
LOWEST, HIGHEST = -149, 127
_EXPONENTS = HIGHEST - LOWEST + 1
_LARGEST = np.finfo(np.float32).max

#: Magnitudes that become zero (up to the first), subnormal (below the second) and infinite (from the third
#: on) in float16 and bfloat16, when rounded to nearest, ties to even.
_LIMITS = {
    "float16": (2.0**-25, 2.0**-14 * (1 - 2.0**-11), 65520.0),
    "bfloat16": (2.0**-134, 2.0**-126 * (1 - 2.0**-8), 2.0**128 * (1 - 2.0**-9)),
}

#: Length of a vector of counts: zero, one for each exponent, infinite, NaN, and three for each half type.
SIZE = 1 + _EXPONENTS + 2 + 3 * len(_LIMITS)

#: How many values are counted at a time.
_CHUNK = 2**16


def count(x: jax.Array, inverse_scale: jax.Array | float = 1.0) -> jax.Array:
    """Counts the values of an array by exponent.

    Args:
      x: an array of any floating dtype, any shape, whose values are multiplied by the loss scale.
      inverse_scale: 1 / loss scale; exponents are those of `x * inverse_scale`.

    Returns:
      float32 vector of `SIZE` counts, exact up to 2**24 of a kind.
    """
    (counts,) = _choose(x, jnp.asarray(inverse_scale, jnp.float32))
    return counts


def _in_chunks(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Counts one chunk after the other; the last is filled up with zeros, which are taken off again.

    All at once, the indices of all values take 16 times the bytes of a float16 array, and counting takes four
    times as long.
    """
    chunks = -(-x.size // _CHUNK)
    if chunks < 2:
        return _at_once(x, factor)
    missing = chunks * _CHUNK - x.size
    rows = jnp.pad(x.ravel(), (0, missing)).reshape(chunks, _CHUNK)

    def add(counts: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return counts + _at_once(row, factor), None

    counts, _ = lax.scan(add, jnp.zeros(SIZE, jnp.float32), rows)
    return counts.at[0].add(-missing)


def _at_once(x: jax.Array, factor: jax.Array) -> jax.Array:
    scaled = _magnitudes(_unsharded(x)).ravel()
    index = _index(scaled, factor)
    by_exponent = jnp.zeros(1 + _EXPONENTS + 2, jnp.int32).at[index].add(1, mode="promise_in_bounds")
    # Compares bits: backends flush subnormal operands of comparisons to zero.
    bits = lax.bitcast_convert_type(scaled, jnp.int32)
    lost = ((bits[None] >= _LOST[:, :1]) & (bits[None] < _LOST[:, 1:])).sum(1, dtype=jnp.int32)
    return jnp.concatenate([by_exponent, lost]).astype(jnp.float32)


def _unsharded(x: jax.Array) -> jax.Array:
    """Removes the explicit sharding of an array: the indices of its values in the counts cannot have one."""
    spec = getattr(jax.typeof(x).sharding, "spec", ())
    if all(part is None for part in spec):
        return x
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(jax.typeof(x).sharding.mesh, jax.P()))


def _magnitudes(x: jax.Array) -> jax.Array:
    """Returns |x| as float32; numbers beyond its range become the nearest one, not zero or infinite."""
    magnitude = jnp.abs(x)
    single = magnitude.astype(jnp.float32)
    if x.dtype != jnp.float64:
        return single
    least = lax.bitcast_convert_type(jnp.int32(1), jnp.float32)
    single = jnp.where((magnitude > 0) & (magnitude < 2.0**-149), least, single)
    return jnp.where(jnp.isfinite(magnitude) & jnp.isinf(single), _LARGEST, single)


def _on_host(x: jax.Array, factor: jax.Array) -> list[np.ndarray]:
    """The same counts in NumPy, which a report need not compile for each shape."""
    flat, counts = np.asarray(x).ravel(), np.zeros(SIZE)
    for start in range(0, flat.size, _CHUNK):
        with np.errstate(invalid="ignore"):  # Some bits of NaN.
            magnitude = np.abs(flat[start : start + _CHUNK].astype(np.float64))
        is_number = np.isfinite(magnitude) & (magnitude > 0)
        magnitude = np.where(is_number, np.clip(magnitude, 2.0**LOWEST, _LARGEST), magnitude)
        index = np.clip(np.frexp(magnitude * float(factor))[1] - 1, LOWEST, HIGHEST) - LOWEST + 1
        index = np.where(np.isfinite(magnitude), index, 1 + _EXPONENTS + np.isnan(magnitude))
        by_exponent = np.bincount(np.where(magnitude == 0, 0, index), minlength=1 + _EXPONENTS + 2)
        lost = [np.sum((low <= magnitude) & (magnitude < high)) for low, high in _LOST.view(np.float32)]
        counts += np.concatenate([by_exponent, lost])
    return [counts.astype(np.float32)]


#: On several devices all at once: slices of sharded arrays would be gathered from their devices.
_choose = by_devices(
    "count_exponents",
    lambda *operands: [_at_once(*operands)],
    lambda *operands: [_in_chunks(*operands)],
    on_host=_on_host,
    types=lambda *_: [jax.ShapeDtypeStruct((SIZE,), jnp.float32)],
)


def take_apart(vector: np.ndarray) -> tuple[float, np.ndarray, float, float, np.ndarray, np.ndarray]:
    """Splits a vector made by `count`, or a sum of such vectors.

    Returns:
      Numbers of values that are zero; with floor(log2|x|) = LOWEST + index; infinite; NaN; and that become
      zero (and are not), subnormal and infinite in float16, times the loss scale; the same for bfloat16.
    """
    zeros, exponents, rest = np.split(np.asarray(vector, np.float64), (1, 1 + _EXPONENTS))
    infinite, nan, *lost = rest.tolist()
    return float(zeros[0]), exponents, infinite, nan, np.array(lost[:3]), np.array(lost[3:])


def _index(magnitude: jax.Array, factor: jax.Array) -> jax.Array:
    """The indices in a vector of counts, for non-negative float32 numbers times a normal one.

    Their exponents are added and their mantissas multiplied, since backends flush subnormal operands and
    products to zero. Values beyond float32's exponents are counted with the nearest of them.
    """
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    # A subnormal number is a whole multiple of the smallest.
    is_subnormal = bits < _bits(2.0**-126)
    exponent, mantissa = _parts(jnp.where(is_subnormal, bits.astype(jnp.float32), magnitude))
    shift, part = _parts(factor)
    exponent += shift + _parts(mantissa * part)[0] + jnp.where(is_subnormal, LOWEST, 0)
    index = jnp.clip(exponent, LOWEST, HIGHEST) - LOWEST + 1
    infinite = 1 + _EXPONENTS
    index = jnp.where(bits == _bits(jnp.inf), infinite, index)
    index = jnp.where(bits > _bits(jnp.inf), infinite + 1, index)
    return jnp.where(bits == 0, 0, index)


def _parts(number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits positive normal numbers into exponent, and mantissa in [1, 2)."""
    bits = lax.bitcast_convert_type(number, jnp.int32)
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | _bits(1.0), jnp.float32)
    return (bits >> 23) - 127, mantissa


def _bits(number: float) -> np.int32:
    return np.float32(number).view(np.int32)


#: The bits of magnitudes that become zero, subnormal and infinite, in each half type: from, and below.
_LOST = np.array(
    [
        limits
        for zero, subnormal, infinite in (map(_bits, known) for known in _LIMITS.values())
        for limits in ((1, zero + 1), (zero + 1, subnormal), (infinite, _bits(np.inf)))
    ],
    np.int32,
)
