"""Scales of products of ragged groups: of the rows of each expert with the weight of that expert.

`jax.lax.ragged_dot(x, w, sizes)` multiplies the first `sizes[0]` rows of `x` by `w[0]`, the next `sizes[1]`
by `w[1]`, and so on. Each expert's weight has scales of its own, by which the result's rows are multiplied.

The gradient of the weights sums over the rows of each group. Blocks of rows reach into the next group there,
so rows are divided by the largest value of their group first. A Hadamard transform of rows is left out, since
it would mix those of two experts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.jaxpr import ir
from jmp_policy._src.policy.recipes import NVFP4
from jmp_policy._src.products.fp8.scales import VALUE, Scaled, as_matrices, free_axes, like_result, power_for

#: JAX's products of matrices, without and with groups.
MATRIX_PRODUCTS = ("dot_general", "ragged_dot_general")

_NUMBERS = "ragged_dot_dimension_numbers"


def axes_of(params: dict[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The axes of both operands that are summed over, and those along which there are matrices of their own.

    Args:
      params: of a product, ragged or not.
    """
    numbers = params.get(_NUMBERS)
    if numbers is None:
        return params["dimension_numbers"]
    contracted, (left, right) = numbers.dot_dimension_numbers
    return contracted, (left, (*right, *numbers.rhs_group_dimensions))


def ragged_stays_because(eqn: Any) -> str:
    """Why a ragged product is not computed in few bits; "" for one that is, or that has no groups."""
    numbers = eqn.params.get(_NUMBERS)
    if numbers is None:
        return ""
    (summed, _), _ = numbers.dot_dimension_numbers
    if not numbers.rhs_group_dimensions or set(numbers.lhs_ragged_dimensions) & set(summed):
        return "its groups are not those of rows"
    # JAX has no gradient of either.
    given = [name for name in ("group_offset", "out_sharding") if eqn.params[name] is not None]
    return f"its {given[0]} is given" if given else ""


def matrices(eqn: Any) -> int:
    """How many matrices the rows of a product are multiplied with: more than one in a ragged product."""
    numbers = eqn.params.get(_NUMBERS)
    groups = () if numbers is None else numbers.rhs_group_dimensions
    return math.prod(ir.shape_of(eqn.invars[1])[axis] for axis in groups)


def without_transform(recipe: str) -> str:
    """A recipe of 4 bits without its Hadamard transform, any other as it is."""
    passes = (f"{name}-rht" if NVFP4 in name and "-rht" not in name else name for name in recipe.split("+"))
    return "+".join(passes)


def scales_like_result(
    operands: Sequence[Any], scales: Sequence[Any], sizes: Any, params: dict[str, Any]
) -> list[Any]:
    """The scales of both operands with the axes of the result.

    Args:
      operands: two arrays.
      scales: theirs; of shape (), or of the operand's shape with 1 for axes that share one.
      sizes: of the groups.
      params: of the primitive.
    """
    numbers = params[_NUMBERS]
    (left, _), (batch, _) = dots = numbers.dot_dimension_numbers
    if not numbers.rhs_group_dimensions:  # The result has the groups first.
        rank = sum(x.ndim for x in operands) - 2 * len(left) - len(batch)
        return [like_result(scale, place, rank, dots)[None] for place, scale in enumerate(scales)]
    lhs, of_rhs = operands[0], scales[1]
    ones = jnp.ones([1 if axis in left else size for axis, size in enumerate(lhs.shape)], jnp.float32)
    # The same product takes the scale of its group to each row, exactly: all other terms are 0.
    of_rows = lax.ragged_dot_general(ones, of_rhs, sizes, numbers, preferred_element_type=jnp.float32)
    return [like_result(scales[0], 0, of_rows.ndim, dots), of_rows]


def masked(operands: Sequence[Any], sizes: Any, params: dict[str, Any]) -> list[Any]:
    """Operands with 0 in rows of no group, which may hold anything, so that no scale comes from them.

    Args:
      operands: two arrays.
      sizes: of the groups.
      params: of the product.
    """
    numbers = params[_NUMBERS]
    (row,), ((left, right), batch) = numbers.lhs_ragged_dimensions, numbers.dot_dimension_numbers
    rows, found = [row, right[left.index(row)] if row in left else None], []
    for x, axis, summed, own in zip(operands, rows, (left, right), batch, strict=True):
        if axis is not None:
            # Sizes may be those of each of the axes before the rows.
            before = [i for i in (summed if axis in summed else free_axes(x, summed, own)) if i < axis]
            ends = lax.broadcast_in_dim(jnp.sum(sizes, -1), x.shape, [*own, *before][: sizes.ndim - 1])
            x = jnp.where(lax.broadcasted_iota(ends.dtype, x.shape, axis) < ends, x, 0)
        found.append(x)
    return found


def rounded_in_place(
    operands: Sequence[Any], rounded: Callable[[int, Any], Scaled], params: dict[str, Any]
) -> list[Any]:
    """Operands whose blocks are rounded, in bfloat16, which holds the rounded values times their scales.

    Args:
      operands: two half arrays.
      rounded: rounds an operand, given which one it is and its values as (batch, rows, terms).
      params: of the product.
    """
    found = []
    for place, (x, summed, own) in enumerate(zip(operands, *axes_of(params), strict=True)):
        scaled = rounded(place, as_matrices(x, summed, own))
        order = [*own, *free_axes(x, summed, own), *summed]
        whole = 1 if scaled.whole is None else scaled.whole.astype(jnp.bfloat16)
        there = (scaled.in_bfloat16 * whole).reshape([x.shape[axis] for axis in order])
        found.append(lax.transpose(there, np.argsort(order)))
    return found


def rounded_rows(
    rounded: Callable[[int, Any], Scaled], sizes: Any, params: dict[str, Any], place: int, x: Any
) -> Scaled:
    """Rounds (batch, rows, terms); where terms are rows of groups, `whole` has a scale for each of them."""
    if params[_NUMBERS].rhs_group_dimensions:
        return rounded(place, x)
    of_rows = _scales_of_rows(x, sizes)
    scaled = rounded(place, x.astype(jnp.float32) / of_rows)
    return scaled._replace(whole=of_rows if scaled.whole is None else of_rows * scaled.whole)


def _scales_of_rows(x: Any, sizes: Any) -> Any:
    """For each of (batch, features, rows) the scale of its group, (batch, 1, rows); 1 for rows of none."""
    ends = jnp.cumsum(jnp.broadcast_to(sizes, (x.shape[0], sizes.shape[-1])), 1)[:, None]
    rows = jnp.arange(x.shape[2])[:, None]
    is_in = (rows < ends) & (rows >= ends - sizes.reshape(-1, 1, sizes.shape[-1]))
    largest = jnp.max(jnp.abs(x), 1)[..., None].astype(jnp.float32)
    of_groups = power_for(jnp.max(jnp.where(is_in, largest, 0), 1, keepdims=True), VALUE)
    of_rows = jnp.max(jnp.where(is_in, of_groups, 0), 2)
    return jnp.where(of_rows > 0, of_rows, 1)[:, None]
