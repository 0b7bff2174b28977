"""The rule of gathers, of which those that take one element of each row have a selection as derivative.

A cross-entropy takes the logit of its label: one element of each row. JAX's derivative of that is a scatter
into zeros. XLA fuses it with nothing: the gradient of float32 logits is written in float32, read and written
again by the scatter, and read once more to be cast for the products behind it. A selection by the index gives
the same numbers, and is fused with the derivative of the logarithm before it and with the cast after it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.autocast.operation_rules import Float32Internal, as_planned
from jmp_policy._src.autocast.planner import Demand, EqnPlan, Planner, Rule, Value
from jmp_policy._src.autocast.values import CastCache, computed
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.policy.regions import Region
from jmp_policy._src.products import binding


class Gather(Float32Internal):
    """A gather: in float32 inside."""

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        step = super().plan(planner, eqn, ins, outs, region)
        is_float = region.half is not None and ir.is_float32(eqn.invars[0])
        step.is_rewritten = is_float and not ir.is_explicit(eqn.invars) and chosen_axis(eqn) is not None
        return step

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if not step.is_rewritten:
            return super().run(step, caches)
        operand, indices = (cache.read(dtype) for cache, dtype in zip(caches, step.reads, strict=True))
        return as_planned(step, [computed(one_of_each_row(step.eqn)(operand, indices))])


def chosen_axis(eqn: Any) -> int | None:
    """Returns the axis along which a gather takes one element of each row; None if it takes others."""
    numbers, operand, indices = eqn.params["dimension_numbers"], *map(ir.shape_of, eqn.invars)
    if len(numbers.start_index_map) != 1 or not all(isinstance(n, int) for n in (*operand, *indices)):
        return None
    (axis,) = numbers.start_index_map
    rows = [i for i in range(len(operand)) if i != axis]
    places = list(numbers.start_indices_batching_dims)
    takes_one = (
        numbers.collapsed_slice_dims == (axis,)
        and list(numbers.operand_batching_dims) == rows
        and places == sorted(places)
        and math.prod(indices) == math.prod(operand[i] for i in rows)
    )
    return axis if takes_one else None


def one_of_each_row(eqn: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a gather, of an operand at indices, with a selection as its derivative."""
    axis, out = chosen_axis(eqn), ir.shape_of(eqn.outvars[0])
    is_clipped = eqn.params["mode"] == lax.GatherScatterMode.CLIP
    assert axis is not None
    function = jax.custom_jvp(lambda operand, indices: binding.bind(eqn, operand, indices)[0])

    def tangent(indices: jax.Array, t: jax.Array) -> jax.Array:
        shape = [1 if i == axis else size for i, size in enumerate(t.shape)]
        places = indices.reshape(shape).astype(jnp.promote_types(indices.dtype, jnp.int32))
        if is_clipped:
            places = places.clip(0, t.shape[axis] - 1)
        chosen = lax.broadcasted_iota(places.dtype, t.shape, axis) == places
        return jnp.sum(jnp.where(chosen, t, 0), axis).reshape(out)

    def rule(primals: Any, tangents: Any) -> Any:
        operand, indices = primals
        picked = function(operand, indices)
        if isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
            return picked, jnp.zeros_like(picked)
        # Under checkpoint, so that the indices are kept and not where each row has its own.
        return picked, jax.checkpoint(tangent, prevent_cse=False)(indices, tangents[0])

    function.defjvp(rule, symbolic_zeros=True)
    return function


#: By primitive's name.
RULES: dict[str, Rule] = {"gather": Gather()}
