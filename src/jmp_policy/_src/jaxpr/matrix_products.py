"""Measures matrix products and convolutions of a jaxpr: sizes, FLOPs, and padding for Tensor Cores."""

import math
from typing import Any, NamedTuple

import numpy as np

from jmp_policy._src.jaxpr.ir import shape_of

#: Tensor Cores are efficient where rows are multiples of this many bytes.
_ALIGNMENT = 16


class Size(NamedTuple):
    """Size of a product, as `batch` matrix products of (m, k) and (k, n).

    For a convolution m is the number of output positions, n that of output channels, and k how many inputs
    each output is computed from.
    """

    batch: int
    m: int
    n: int
    k: int
    flops: int


def size_of(eqn: Any) -> Size:
    """The size of a product, with the FLOPs of one run; a multiply-add counts as two."""
    if eqn.primitive.name == "conv_general_dilated":
        return _of_convolution(eqn)
    lhs, rhs = map(shape_of, eqn.invars[:2])
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = eqn.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    # Each row is multiplied by the matrix of one group.
    groups = 1 if ragged is None else math.prod(rhs[i] for i in ragged.rhs_group_dimensions)
    (contract, _), (batch, _) = numbers
    batches, k = math.prod(lhs[i] for i in batch), math.prod(lhs[i] for i in contract)
    m = math.prod(lhs) // max(batches * k, 1)
    n = math.prod(rhs) // max(batches * k * groups, 1)
    return Size(batches, m, n, k, 2 * batches * m * n * k)


def _of_convolution(eqn: Any) -> Size:
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    lhs, kernel, out = map(shape_of, (*eqn.invars[:2], eqn.outvars[0]))
    k = math.prod(kernel) // max(kernel[numbers.rhs_spec[0]], 1)
    n = out[numbers.out_spec[1]]
    m = math.prod(out) // max(n, 1)
    batch_groups = eqn.params["batch_group_count"]
    # The zeros around inputs, as in a gradient without padding, and between them, as in one with strides, are
    # not computed with. Along an axis two of these meet at most once: an input, an element of the kernel, and
    # an output.
    axes = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    sizes = [(lhs[i], kernel[j], out[o]) for i, j, o in axes]
    products = math.prod(min(x * w, w * y, x * y) for x, w, y in sizes)
    flops = 2 * products * out[numbers.out_spec[0]] * n * kernel[numbers.rhs_spec[1]]
    return Size(groups * batch_groups, m, n // (groups * batch_groups), k, flops)


def padding(eqn: Any, size: Size) -> str:
    """Describes what to pad for rows of a multiple of 16 bytes: "n 1001 to 1008"; "" if nothing.

    A size of 1 is named alone, "m 1": padding it would only multiply zeros.
    """
    item = min(np.dtype(atom.aval.dtype).itemsize for atom in eqn.invars[:2])
    step = max(_ALIGNMENT // item, 1)
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel, out = shape_of(eqn.invars[1]), shape_of(eqn.outvars[0])
        # The gradient of a kernel swaps the batch and the channels: it sums over the batch.
        swapped = numbers.lhs_spec[0] > numbers.lhs_spec[1]
        inputs = out[numbers.out_spec[0]] if swapped else kernel[numbers.rhs_spec[1]]
        groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
        what = "channels per group" if groups > 1 else "channels"
        dims = {f"input {what}": inputs, f"output {what}": size.n}
    else:
        dims = {"m": size.m, "n": size.n, "k": size.k}
    return ", ".join(
        f"{name} 1" if length == 1 else f"{name} {length} to {-(-length // step) * step}"
        for name, length in dims.items()
        if length % step
    )
