"""Sizes of a convolution of HLO as the product of matrices that it amounts to.

XLA's TPU compiler writes every product as a convolution: `dim_labels=bf_io->bf` is one of two matrices. A
batch of products is a convolution over a dilated axis, in which each position meets one element of the
kernel.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from jmp_policy._src.report.lowering.hlo import Instruction

_LABELS = re.compile(r"\bdim_labels=(\w+?)_(\w+)->(\w+)")


class _Axis(NamedTuple):
    """One spatial axis of a convolution."""

    size: int = 1
    stride: int = 1
    low: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def product_sizes(
    convolution: Instruction, shapes: Sequence[tuple[int, ...]], result: Sequence[int]
) -> tuple[int, int, int, int]:
    """Returns the sizes batch, m, n and k of the product that a convolution amounts to.

    Positions of the window that lie in padding or between elements of a dilated input are not counted.

    Args:
      convolution: an instruction `convolution`.
      shapes: those of its operands.
      result: shape of its result.
    """
    match = _LABELS.search(convolution.line)
    inputs, kernels, outputs = match.groups() if match else ("bf", "io", "bf")
    features = shapes[1][kernels.index("i")]
    batch = positions = 1
    met = 1
    for i, axis in enumerate(_axes(convolution, len(inputs) - 2)):
        sizes = (shapes[0][inputs.index(str(i))], result[outputs.index(str(i))])
        pairs = _pairs(axis, *sizes)
        if pairs == axis.size == sizes[0] == sizes[1]:
            batch *= pairs
        else:
            positions *= sizes[1]
            met *= pairs
    m = result[outputs.index("b")] * positions
    return batch, m, result[outputs.index("f")], features * met // max(positions, 1) or 1


def _axes(convolution: Instruction, count: int) -> list[_Axis]:
    window = convolution.attribute("window")
    values = {key: text.split("x") for key, text in re.findall(r"(\w+)=([\dx_\-]+)", window)}
    axes = []
    for i in range(count):
        fields = {key: int(values[key][i]) for key in _Axis._fields if key in values}
        low = values["pad"][i].partition("_")[0] if "pad" in values else "0"
        axes.append(_Axis(**fields)._replace(low=int(low)))
    return axes


def _pairs(axis: _Axis, size: int, result: int) -> int:
    """Returns how many elements of the input all positions of the window on one axis meet."""
    last = (size - 1) * axis.lhs_dilate
    found = 0
    for position in range(axis.size):
        # Result o meets place o * stride + start, which is an element at multiples of lhs_dilate.
        start = position * axis.rhs_dilate - axis.low
        divisor = math.gcd(axis.stride, axis.lhs_dilate)
        if start % divisor:
            continue
        period = axis.lhs_dilate // divisor
        first = next(o for o in range(period) if (o * axis.stride + start) % axis.lhs_dilate == 0)
        low = max(math.ceil(-start / axis.stride), 0)
        low += (first - low) % period
        high = min((last - start) // axis.stride, result - 1)
        found += max((high - low) // period + 1, 0)
    return found
