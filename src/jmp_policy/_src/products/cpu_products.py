"""How a CPU with bfloat16 instructions computes a matrix product.

XLA's library for CPUs wants a bfloat16 product with ordered operands and a float32 result.
"""

import itertools
from typing import Any, NamedTuple

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
