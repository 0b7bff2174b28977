"""Reports the number formats of mixed precision, and what a number becomes in each."""

import dataclasses
from collections.abc import Sequence
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.report_base import Report, Table

#: From most bits to fewest. TensorFloat-32 exists in Tensor Cores only: float32's exponent, float16's
#: significand.
_FORMATS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Format:
    """Floating-point format.

    Args:
      name: name of the dtype; "tf32" is not a dtype, but what Tensor Cores round float32 to.
      bits: bits of storage.
      exponent_bits, significand_bits: bits of each; the significand with the leading bit, which is not
        stored.
      largest: largest finite number.
      smallest_normal, smallest_subnormal: smallest numbers above zero.
      epsilon: distance from 1 to the next larger number.
      becomes: per number that was asked about, its value in this format; text.
    """

    name: str
    bits: int
    exponent_bits: int
    significand_bits: int
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    becomes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Formats(Report):
    """Formats from most bits to fewest; `str` is a table.

    Args:
      formats: one row each.
      numbers: the numbers that were asked about.
    """

    formats: tuple[Format, ...]
    numbers: tuple[float, ...] = ()

    _rows = "formats"

    def _tables(self) -> Sequence[Table]:
        columns = ("format", "bits ", "exponent ", "significand ", "largest ", "normal from ", "zero up to ")
        rows = [
            (
                *(f.name, f.bits, f.exponent_bits, f.significand_bits, f"{f.largest:.5g}"),
                *(f"{f.smallest_normal:.3g}", _half_of(f.smallest_subnormal), f"{f.epsilon:.3g}"),
            )
            for f in self.formats
        ]
        heads = ["format", *(f"{number!r} " for number in self.numbers)]
        becomes = Table(heads, [(f.name, *f.becomes) for f in self.formats], "becomes")
        return [Table((*columns, "epsilon "), rows), *[becomes] * bool(self.numbers)]


def _half_of(number: float) -> str:
    """Formats the half of a number; that of the smallest float64 is no float64.

    Up to half of its smallest number a format rounds to zero: a tie goes to the even one of the two.
    """
    return f"{number / 2:.3g}" if number / 2 else f"{Decimal(number) / 2:.3g}".lower()


def formats(*numbers: float) -> Formats:
    """Lists the formats that training uses, and what numbers become in each.

    Numbers are rounded to nearest, ties to even: what is at most half of the smallest number becomes zero, in
    float16 up to 2**-25, about 3e-8.

    Args:
      numbers: any finite or infinite numbers.

    Returns:
      `Formats`; `print` shows it.

    Raises:
      TypeError: for something that is not a number.

    Example:
      >>> {f.name: f.becomes[0] for f in formats(70000.0).formats if f.bits == 16}
      {'bfloat16': '70144', 'float16': 'inf'}
    """
    values = tuple(float(number) for number in numbers)
    return Formats(tuple(_format(name, values) for name in _FORMATS), values)


def _format(name: str, numbers: Sequence[float]) -> Format:
    # TensorFloat-32 is stored in 32 bits; its significand is float16's.
    is_tf32 = name == "tf32"
    info, exponent = jnp.finfo("float16" if is_tf32 else name), jnp.finfo("float32" if is_tf32 else name)
    normal, epsilon = float(exponent.smallest_normal), float(info.eps)
    with np.errstate(over="ignore", under="ignore"):
        if is_tf32:
            rounded = jax.lax.reduce_precision(np.array(numbers, np.float32), 8, info.nmant)
        else:
            rounded = np.asarray(numbers, np.float64).astype(jnp.dtype(name))
    return Format(
        name=name,
        bits=int(exponent.bits),
        exponent_bits=int(exponent.nexp),
        significand_bits=int(info.nmant) + 1,
        largest=2.0**127 * (2 - epsilon) if is_tf32 else float(info.max),
        smallest_normal=normal,
        smallest_subnormal=normal * epsilon,
        epsilon=epsilon,
        becomes=tuple(f"{float(number):.9g}" for number in rounded),
    )
