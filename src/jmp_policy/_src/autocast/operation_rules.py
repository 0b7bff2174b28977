"""The rules of operations without a jaxpr inside, by list; and those of single operations.

In float16 `1 / h` is infinite below 1.6e-5, `h ** -2` below 3.9e-3, and the derivative of `g / h` has the
factor `h ** -2`. bfloat16 has float32's range, so that they follow their operands there. PyTorch keeps
reciprocals, powers (squares, too) and `1 / h` in float32 for either half dtype.

A cross-entropy takes the logit of its label: one element of each row. JAX's derivative of that is a scatter
into zeros. XLA fuses it with nothing: the gradient of float32 logits is written in float32, read and written
again by the scatter, and read once more to be cast for the products behind it. A selection by the index gives
the same numbers, and is fused with the derivative of the logarithm before it and with the cast after it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.autocast.list_rules import AS_TRACED, FOLLOW, Full, Lower, Promote, is_shared
from jmp_policy._src.autocast.planner import (
    Case,
    CastCache,
    Demand,
    EqnPlan,
    How,
    Rule,
    Run,
    Value,
    as_planned,
    traced,
)
from jmp_policy._src.jaxpr import compat, ir, op_table
from jmp_policy._src.jaxpr.device_dispatch import has_known_sizes
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.marked_regions import Region
from jmp_policy._src.products import binding


class DataMovement(Promote):
    """An operation that moves data: what it moves stays a parameter or a constant.

    A parameter that is only reordered (transposed, reshaped) is not cast here but where it is read, so that
    `w` and `w.T` share one cast. One that is copied is copied in float32, since the gradient of a copy is a
    sum: over a batch of 16384 in bfloat16 that has an error of 5e-3 instead of 7e-4.
    """

    def plan(self, case: Case) -> EqnPlan:
        eqn, ins = case.eqn, case.ins
        if not any(case.are_float32):
            step = AS_TRACED.plan(case)
            if ins[0].source == "constant" and len(eqn.outvars) == len(ins) == 1:
                # An integer that is to become a float (1 in `x + 1`).
                step.outs = (step.outs[0]._replace(source="constant", number=ins[0].number),)
            return step
        if len(ins) == 1 and ins[0].source != "computed" and len(eqn.outvars) == 1:
            return self._plan_parameter(eqn, ins[0])
        if len(ins) == 1:  # As it is, but copied in float32.
            read = FLOAT32 if is_summed(eqn) else ins[0].dtype
            return EqnPlan(eqn, (read,), (ins[0],) * len(eqn.outvars), "follow: moves data")
        if len(ins) != len(eqn.outvars):
            return super().plan(case)
        # Several arrays, each for itself (optimization_barrier).
        reads = tuple(v.dtype if f else None for v, f in zip(ins, case.are_float32, strict=True))
        kept = tuple(value._replace(source="computed") for value in ins)
        return EqnPlan(eqn, reads, kept, "follow: identity")

    def _plan_parameter(self, eqn: Any, value: Value) -> EqnPlan:
        """Plans a move of a parameter or a constant."""
        reorders = eqn.outvars[0].aval.size == eqn.invars[0].aval.size and not is_summed(eqn)
        if value.source == "constant" or reorders:
            return _moved(eqn, value.dtype, value, _run_at_use)
        # A slice is cast alone; a broadcast after it, or its gradient would be summed in half.
        shared = eqn.primitive.name == "broadcast_in_dim" and is_shared(eqn)
        out = value._replace(shared=value.shared or shared)
        return EqnPlan(eqn, (value.dtype,), (out,), "follow: a parameter, moved")


class Join(Promote):
    """Arrays that are put together: of parameters alone, or with numbers between them, one parameter."""

    def plan(self, case: Case) -> EqnPlan:
        step, sources = super().plan(case), {value.source for value in case.ins}
        fits = all(value.fits(case.region.half) for value in case.ins if value.source == "constant")
        if step.outs[0].dtype == FLOAT32 and "leaf" in sources and "computed" not in sources and fits:
            step.outs = (step.outs[0]._replace(source="leaf"),)
        return step


def _moved(eqn: Any, read: Any, value: Value, run: Run) -> EqnPlan:
    return EqnPlan(eqn, (read,), (value,), How.MOVED.value, run, how=How.MOVED)


def is_summed(eqn: Any) -> bool:
    """Returns whether the transpose of a move is a sum: over the copies of a broadcast, or over devices."""
    # Sizes may be symbolic, and a broadcast never shrinks.
    name, grows = eqn.primitive.name, eqn.outvars[0].aval.size != eqn.invars[0].aval.size
    return name in op_table.SUMMED and (grows or name not in ("broadcast_in_dim", "tile"))


def _run_at_use(step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
    """Moves a parameter when the result is read: the cast parameter."""
    (cache,), eqn, scopes = caches, step.eqn, compat.current_name_stack()

    def make(dtype: np.dtype) -> Any:
        with compat.eqn_context(eqn, scopes):
            return binding.bind(eqn, cache.read(dtype))[0]

    return [cache.view(step.outs[0].dtype, make)]


class Float32Internal(Promote):
    """An operation in float32 inside, so that its derivative is; what comes of half is returned in half."""

    def plan(self, case: Case) -> EqnPlan:
        step, eqn, half = super().plan(case), case.eqn, case.region.half
        if eqn.primitive.name == "pad" and case.ins[1].source == "constant":
            return step
        if ir.is_float32(eqn.invars[0]) and step.outs[0].dtype == half:
            return case.planned(FLOAT32, half, f"inside: {case.planner.table[eqn.primitive.name][1]}")
        return step


class Convert(Rule):
    """A cast of the user's, which is obeyed; one from float32 to float32 (of a Python number) is none."""

    def demand(self, case: Case) -> Sequence[Demand]:
        to = case.eqn.params["new_dtype"]
        return [case.outs[0] if to == FLOAT32 else to != case.region.half]

    def plan(self, case: Case) -> EqnPlan:
        eqn, ins = case.eqn, case.ins
        source, to = eqn.invars[0], eqn.params["new_dtype"]
        if eqn.params.get("sharding") is not None:
            return AS_TRACED.plan(case)
        if ir.is_float32(source):
            if to == FLOAT32:
                return _moved(eqn, ins[0].dtype, ins[0], lambda step, caches: caches)
            return EqnPlan(eqn, (ins[0].dtype,), (traced(eqn.outvars[0]),), "the user's cast")
        is_mask = ir.is_plain_array(source) and ir.dtype_of(source) == np.dtype(bool)
        if to == FLOAT32 and (is_mask or ins[0].source == "constant"):
            # 0 and 1 are exact in half: a mask takes no part in promotion.
            number = 1.0 if is_mask else ins[0].number
            return _moved(eqn, None, Value(FLOAT32, "constant", number), _run_convert_at_use)
        return AS_TRACED.plan(case)


def _run_convert_at_use(step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
    (cache,), eqn = caches, step.eqn
    return [cache.view(FLOAT32, lambda dtype: binding.bind(eqn, cache.read(None), new_dtype=dtype)[0])]


def _is_narrow(region: Region) -> bool:
    """Returns whether operations are to stay within float16's range by themselves."""
    return region.half == np.dtype(np.float16) and not region.lower


class Arithmetic(Promote):
    """A sum, product or quotient: of masks and numbers alone, as in dropout, it is a mask."""

    def plan(self, case: Case) -> EqnPlan:
        step, name = super().plan(case), case.eqn.primitive.name
        floats = list(itertools.compress(case.ins, case.are_float32))
        # Of a mask the number is its largest: a quotient by one may be anything.
        is_known = name not in ("div", "rem") or isinstance(case.eqn.invars[1], compat.Literal)
        if floats and is_known and all(v.source == "constant" and v.fits(case.region.half) for v in floats):
            sizes = [abs(value.number) for value in floats]
            size = math.prod(sizes) if name == "mul" else sum(sizes)
            size = sizes[0] / (sizes[1] or np.inf) if name == "div" else size
            step.outs = (step.outs[0]._replace(source="constant", number=size),)
        return step


class IntegerPower(Promote):
    """A power: in float16 only squares are computed in half."""

    def demand(self, case: Case) -> Sequence[Demand]:
        return [True] if self._is_full(case) else super().demand(case)

    @staticmethod
    def _is_full(case: Case) -> bool:
        return _is_narrow(case.region) and not 0 <= case.eqn.params["y"] <= 2

    def plan(self, case: Case) -> EqnPlan:
        if self._is_full(case):
            return case.as_traced("full: exceeds float16 easily")
        return super().plan(case)


class Quotient(Arithmetic):
    """A quotient or remainder: in float16 only one by a number is computed in half.

    Of a number, or of a parameter, it is float32. Of two half values it is computed in float32 and returned
    in half: the quotient is within range more often than the factors of its derivative.
    """

    def demand(self, case: Case) -> Sequence[Demand]:
        if _is_narrow(case.region) and isinstance(case.eqn.invars[0], compat.Literal):
            return [True, True]
        return super().demand(case)

    def plan(self, case: Case) -> EqnPlan:
        step, eqn, region = super().plan(case), case.eqn, case.region
        numerator, divisor = case.ins
        is_half = ir.is_float32(eqn.outvars[0]) and step.outs[0].dtype == region.half
        if not is_half or not _is_narrow(region) or divisor.source == "constant":
            return step
        if numerator.source != "computed":
            return case.as_traced("full: a quotient of a number exceeds float16 easily")
        return case.planned(FLOAT32, region.half, "inside: its derivative exceeds float16 easily")


class Gather(Float32Internal):
    """A gather: in float32 inside."""

    def plan(self, case: Case) -> EqnPlan:
        step, eqn = super().plan(case), case.eqn
        is_plain = ir.is_float32(eqn.invars[0]) and not ir.is_explicit(eqn.invars)
        if is_plain and chosen_axis(eqn) is not None:
            step.is_rewritten, step.run = True, _run_one_of_each_row
        return step


def _run_one_of_each_row(step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
    return as_planned(step, [one_of_each_row(step.eqn)(*step.operands(caches))])


def chosen_axis(eqn: Any) -> int | None:
    """Returns the axis along which a gather takes one element of each row; None if it takes others."""
    numbers, operand, indices = eqn.params["dimension_numbers"], *map(ir.shape_of, eqn.invars)
    if len(numbers.start_index_map) != 1 or not has_known_sizes((*operand, *indices)):
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


#: The rules of the lists.
LISTS: dict[str, Rule] = {"lower": Lower(), "full": Full(), "follow": FOLLOW, "inside": Float32Internal()}

#: The rules of primitives that are on no list, or on one with something of their own.
OWN: dict[str, Rule] = {
    "convert_element_type": Convert(),
    **dict.fromkeys(op_table.MOVES, DataMovement()),
    **dict.fromkeys(op_table.HAVING[op_table.Trait.JOINS], Join()),
    **{"integer_pow": IntegerPower(), "gather": Gather()},
    **dict.fromkeys((*op_table.HAVING[op_table.Trait.ADDITION], "mul"), Arithmetic()),
    **dict.fromkeys(("div", "rem"), Quotient()),
}
