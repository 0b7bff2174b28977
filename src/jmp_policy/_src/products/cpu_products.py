"""How a CPU with bfloat16 instructions computes a product or convolution.

XLA's library for CPUs wants a bfloat16 product with ordered operands and a float32 result. Convolutions are
computed as products: along each axis either the window has one element, so that positions are rows of the
product, or it covers all of the axis, so that the product sums over it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

_FLOAT32 = np.dtype(np.float32)


class _Operand(NamedTuple):
    """An operand of a product: its axes are batches, contracted, or free."""

    array: Any
    contracted: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.array.ndim) if i not in (*self.contracted, *self.batch))

    @property
    def is_rows(self) -> bool:
        return _are_ordered(self.batch, self.free, self.contracted)

    @property
    def is_columns(self) -> bool:
        return _are_ordered(self.batch, self.contracted, self.free)

    def placed(self, columns: bool = False) -> "_Operand":
        """Returns the operand with its axes in the order of rows (or, if they are, of columns).

        XLA looks at the order in memory before it has decided on any, and takes a transpose to have changed
        it: after one more axis it does not. The barrier keeps transposes out of the product, also the user's.
        """
        array, contracted = self.array, self.contracted
        if columns and self.is_columns:
            at = len(self.batch) + len(contracted)
        else:
            at = array.ndim - len(contracted)
            contracted = tuple(range(at + 1, array.ndim + 1))
            if not self.is_rows:
                array = lax.transpose(array, (*self.batch, *self.free, *self.contracted))
        array = lax.optimization_barrier(array)
        array = lax.reshape(array, (*array.shape[:at], 1, *array.shape[at:]))
        return _Operand(array, contracted, tuple(range(len(self.batch))))


def _are_ordered(*axes: tuple[int, ...]) -> bool:
    flat = list(itertools.chain(*axes))
    return flat == sorted(flat)


def product(lhs: Any, rhs: Any, *, dimension_numbers: Any, preferred_element_type: Any, **params: Any) -> Any:
    """Computes a product with a float32 result, of operands that lie as XLA's library wants them."""
    (left, right), (left_batch, right_batch) = dimension_numbers
    rows, columns = _Operand(lhs, left, left_batch), _Operand(rhs, right, right_batch)
    # Turned round, its transpose meets the one that JAX takes of a weight's gradient.
    is_turned = not rows.is_rows
    if is_turned:
        rows, columns = columns, rows
    outer = *rows.batch, *rows.free
    shape = *(rows.array.shape[i] for i in outer), *(columns.array.shape[i] for i in columns.free)
    batch, split = len(rows.batch), len(outer)
    rows, columns = rows.placed(), columns.placed(columns=True)
    out = primitives.dot_general_p.bind(
        rows.array,
        columns.array,
        dimension_numbers=((rows.contracted, columns.contracted), (rows.batch, columns.batch)),
        preferred_element_type=_FLOAT32,
        **params,
    )
    # Nor may a transpose of the result get into the product.
    out = lax.reshape(lax.optimization_barrier(out), shape)
    out = lax.convert_element_type(out, preferred_element_type or lhs.dtype)
    if is_turned:
        out = lax.transpose(out, (*range(batch), *range(split, out.ndim), *range(batch, split)))
    return out


#: Over fewer terms (the channels of a picture) XLA's convolution is quicker than its product.
_LEAST_SUM = 16


class _Axis(NamedTuple):
    """A spatial axis along which a convolution is a product, as `_axis` finds it."""

    is_contracted: bool
    part: tuple[int, int, int]  # What of the left operand gets into the product: start, limit, stride.
    padding: tuple[int, int, int]  # What its result gets around and between.


def _axis(
    left: int, right: int, out: int, stride: int, padding: tuple[int, int], spread: tuple[int, int]
) -> _Axis | None:
    """Returns how an axis of a convolution behaves in a product; None if it doesn't.

    Args:
      left: its size in the left operand.
      right: in the right one, the size of the window.
      out: in the result.
      stride: of the window.
      padding: of the left operand, at both ends; negative ones cut off.
      spread: how far apart the elements of either operand are taken to be.
    """
    start = -padding[0]
    if not isinstance(left, int) or not isinstance(out, int):
        return None  # Known only when an exported program is called.
    if right == 1 and stride == 1 and spread[0] > 1:
        # The gradient of the input of one with strides: zeros come between.
        return _Axis(False, (0, left, 1), (*padding, spread[0] - 1))
    if right != 1 and out != 1:
        return None
    step, count = (stride, out) if right == 1 else (spread[1], right)
    limit = start + (count - 1) * step + 1
    is_within = start >= 0 and limit <= left and spread[0] == 1 and count > 0
    return _Axis(right != 1, (start, limit, step), (0, 0, 0)) if is_within else None


def convolution(avals: Sequence[Any], out: Any, params: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns what computes a convolution as a product; None where it is none, or is quicker as it is.

    Both gradients of a convolution with windows of one element are such: that of the weights has windows that
    cover the image, that of the input has windows of one element.
    """
    lhs, rhs = (aval.shape for aval in avals)
    dims = params["dimension_numbers"]
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    axes = [
        _axis(lhs[left], rhs[right], out.shape[result], *about)
        for left, right, result, *about in zip(
            dims.lhs_spec[2:],
            dims.rhs_spec[2:],
            dims.out_spec[2:],
            params["window_strides"],
            params["padding"],
            zip(params["lhs_dilation"], params["rhs_dilation"], strict=True),
            strict=True,
        )
    ]
    known = [axis for axis in axes if axis is not None]
    if len(known) != len(axes):
        return None
    covered = (lhs[place] for place, axis in zip(dims.lhs_spec[2:], known, strict=True) if axis.is_contracted)
    summed = [lhs[dims.lhs_spec[1]], *covered]
    # Those not known before a call are sizes of batches or images.
    is_worth_it = not all(isinstance(n, int) for n in summed) or math.prod(summed) >= _LEAST_SUM
    return functools.partial(_convolution, known) if is_worth_it else None


def _convolution(
    along: Sequence[_Axis],
    lhs: Any,
    rhs: Any,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    **_: Any,
) -> Any:
    # Strides, padding and dilations, among the other parameters, are in `along`.
    specs = (dimension_numbers.lhs_spec, dimension_numbers.rhs_spec, dimension_numbers.out_spec)
    left, right, result = map(_named, specs, (("batch", "in"), ("out", "in"), ("batch", "out")))
    summed = ["in", *(i for i, axis in enumerate(along) if axis.is_contracted)]
    for axis, name in enumerate(left):
        if not isinstance(name, str) and along[name].part != (0, lhs.shape[axis], 1):
            lhs = lax.slice_in_dim(lhs, *along[name].part, axis=axis)
    rhs = lax.squeeze(rhs, [axis for axis, name in enumerate(right) if name not in ("out", *summed)])
    right = [name for name in right if name in ("out", *summed)]
    out = product(
        lhs,
        rhs,
        dimension_numbers=((tuple(map(left.index, summed)), tuple(map(right.index, summed))), ((), ())),
        precision=None,  # Products of bfloat16 are exact in float32.
        preferred_element_type=preferred_element_type,
        out_sharding=None,
    )
    # Where a window covers its whole axis, one position is left.
    found = [*(name for name in left if name not in summed), "out", *summed[1:]]
    out = lax.transpose(lax.expand_dims(out, range(out.ndim, lhs.ndim)), list(map(found.index, result)))
    padding = [(0, 0, 0) if isinstance(name, str) else along[name].padding for name in result]
    return lax.pad(out, jnp.zeros((), out.dtype), padding) if any(map(any, padding)) else out


def _named(spec: Sequence[int], names: tuple[str, str]) -> list[Any]:
    """Returns the name of each axis of a convolution's operand or result; spatial ones are numbers."""
    by_axis = dict(zip(spec, (*names, *range(len(spec) - 2)), strict=True))
    return [by_axis[axis] for axis in range(len(spec))]
