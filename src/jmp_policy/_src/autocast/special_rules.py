"""The rules of single operations: quotients and integer powers in float16, and gathers.

In float16 `1 / h` is infinite below 1.6e-5, `h ** -2` below 3.9e-3, and the derivative of `g / h` has the
factor `h ** -2`. bfloat16 has float32's range, so that they follow their operands there. PyTorch keeps
reciprocals, powers (squares, too) and `1 / h` in float32 for either half dtype.

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

from jmp_policy._src.autocast.list_rules import Promote, as_traced
from jmp_policy._src.autocast.operation_rules import Float32Internal, as_planned, inside_float32
from jmp_policy._src.autocast.planner import Demand, EqnPlan, How, Planner, Rule, rebound
from jmp_policy._src.autocast.values import CastCache, Value, computed
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.policy.marked_regions import Region
from jmp_policy._src.products import binding


def _is_narrow(region: Region) -> bool:
    """Returns whether operations are to stay within float16's range by themselves."""
    return region.half is not None and region.half.name == "float16" and not region.lower


class IntegerPower(Promote):
    """A power: in float16 only squares are computed in half."""

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        return [True] if self._is_full(eqn, region) else super().demand(planner, eqn, outs, region)

    @staticmethod
    def _is_full(eqn: Any, region: Region) -> bool:
        return _is_narrow(region) and not 0 <= eqn.params["y"] <= 2

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if self._is_full(eqn, region):
            return as_traced(self, eqn, "full: exceeds float16 easily")
        return super().plan(planner, eqn, ins, outs, region)


class Quotient(Promote):
    """A quotient or remainder: in float16 only one by a number is computed in half.

    Of a number, or of a parameter, it is float32. Of two half values it is computed in float32 and returned
    in half: the quotient is within range more often than the factors of its derivative.
    """

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if _is_narrow(region) and isinstance(eqn.invars[0], compat.Literal):
            return [True, True]
        return super().demand(planner, eqn, outs, region)

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        step = super().plan(planner, eqn, ins, outs, region)
        numerator, divisor = ins
        is_half = ir.is_float32(eqn.outvars[0]) and step.outs[0].dtype == region.half
        if not is_half or not _is_narrow(region) or divisor.source == "constant":
            return step
        if numerator.source != "computed":
            return as_traced(self, eqn, "full: a quotient of a number exceeds float16 easily")
        return inside_float32(self, eqn, region.half, "its derivative exceeds float16 easily")

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if step.how is not How.INSIDE:
            return super().run(step, caches)
        return as_planned(step, rebound(step.eqn, step.reads, caches))


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
RULES: dict[str, Rule] = {
    **{"integer_pow": IntegerPower(), "gather": Gather()},
    **dict.fromkeys(("div", "rem"), Quotient()),
}
