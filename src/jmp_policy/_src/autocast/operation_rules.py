"""The rules of operations without a jaxpr inside, by list; and those of casts and of data that is moved."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jmp_policy._src.autocast.list_rules import (
    AS_TRACED,
    FOLLOW,
    Bound,
    Full,
    Lower,
    Promote,
    are_float32,
    demand_all,
    is_shared,
    reads_in,
    results_in,
)
from jmp_policy._src.autocast.planner import (
    Demand,
    EqnPlan,
    How,
    Planner,
    Rule,
    rebound,
    traced,
)
from jmp_policy._src.autocast.values import CastCache, Value, computed
from jmp_policy._src.jaxpr import compat, ir, op_table
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.marked_regions import Region
from jmp_policy._src.products import binding


class DataMovement(Promote):
    """An operation that moves data: what it moves stays a parameter or a constant.

    A parameter that is only reordered (transposed, reshaped) is not cast here but where it is read, so that
    `w` and `w.T` share one cast. One that is copied is copied in float32, since the gradient of a copy is a
    sum: over a batch of 16384 in bfloat16 that has an error of 5e-3 instead of 7e-4.
    """

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if region.half is None or not any(are_float32(eqn)):
            step = AS_TRACED.plan(planner, eqn, ins, outs, region)
            if region.half is not None and ins[0].source == "constant" and len(eqn.outvars) == len(ins) == 1:
                # An integer that is to become a float (1 in `x + 1`).
                step.outs = (step.outs[0]._replace(source="constant", number=ins[0].number),)
            return step
        if len(ins) == 1:
            is_kept = ins[0].source != "computed" and len(eqn.outvars) == 1
            return self._plan_parameter(eqn, ins[0]) if is_kept else self._plan_activation(eqn, ins[0])
        if len(ins) != len(eqn.outvars):
            return super().plan(planner, eqn, ins, outs, region)
        # Several arrays, each for itself (optimization_barrier).
        reads = tuple(v.dtype if f else None for v, f in zip(ins, are_float32(eqn), strict=True))
        kept = tuple(value._replace(source="computed") for value in ins)
        return EqnPlan(eqn, self, reads, kept, "follow: identity")

    def _plan_parameter(self, eqn: Any, value: Value) -> EqnPlan:
        """Plans a move of a parameter or a constant."""
        reorders = eqn.outvars[0].aval.size == eqn.invars[0].aval.size and not is_summed(eqn)
        if value.source == "constant" or reorders:
            return EqnPlan(eqn, self, (value.dtype,), (value,), How.MOVED.value, how=How.MOVED)
        # A slice is cast alone; a broadcast after it, or its gradient would be summed in half.
        shared = eqn.primitive.name == "broadcast_in_dim" and is_shared(eqn)
        out = value._replace(shared=value.shared or shared)
        return EqnPlan(eqn, self, (value.dtype,), (out,), "follow: a parameter, moved")

    def _plan_activation(self, eqn: Any, value: Value) -> EqnPlan:
        """Plans a move of what was computed: as it is, but copied in float32."""
        read = FLOAT32 if is_summed(eqn) else value.dtype
        return EqnPlan(eqn, self, (read,), (value,) * len(eqn.outvars), "follow: moves data")

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if step.how is How.MOVED:
            return _made_at_use(step, caches[0])
        return as_planned(step, rebound(step.eqn, step.reads, caches))


def is_summed(eqn: Any) -> bool:
    """Returns whether the transpose of a move is a sum: over the copies of a broadcast, or over devices."""
    # Sizes may be symbolic, and a broadcast never shrinks.
    name, grows = eqn.primitive.name, eqn.outvars[0].aval.size != eqn.invars[0].aval.size
    return name in op_table.SUMMED and (grows or name not in ("broadcast_in_dim", "tile"))


def _made_at_use(step: EqnPlan, cache: CastCache) -> Sequence[CastCache]:
    """Returns the result of a step that moves a parameter, made when it is read: from the cast parameter."""
    eqn, scopes = step.eqn, compat.current_name_stack()

    def make(dtype: np.dtype) -> Any:
        with compat.eqn_context(eqn, scopes):
            return binding.bind(eqn, cache.read(dtype))[0]

    return [cache.view(step.outs[0].dtype, make)]


def inside_float32(rule: Rule, eqn: Any, half: Any, reason: str) -> EqnPlan:
    """Returns the step of an operation in float32 whose results are handed on in half."""
    return EqnPlan(
        eqn, rule, reads_in(eqn, FLOAT32), results_in(eqn, half), f"inside: {reason}", how=How.INSIDE
    )


class Float32Internal(Promote):
    """An operation in float32 inside, so that its derivative is; what comes of half is returned in half."""

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        step = super().plan(planner, eqn, ins, outs, region)
        if eqn.primitive.name == "pad" and ins[1].source == "constant":
            return step
        if region.half is not None and ir.is_float32(eqn.invars[0]) and step.outs[0].dtype == region.half:
            return inside_float32(self, eqn, region.half, planner.table[eqn.primitive.name][1])
        return step

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        return as_planned(step, rebound(step.eqn, step.reads, caches))


def as_planned(step: EqnPlan, outs: Sequence[CastCache]) -> Sequence[CastCache]:
    """Returns results in the dtypes they were planned in."""
    results = zip(outs, step.outs, step.eqn.outvars, strict=True)
    return [computed(cache.read(v.dtype)) if ir.is_float32(var) else cache for cache, v, var in results]


class Convert(Bound):
    """A cast of the user's, which is obeyed; one from float32 to float32 (of a Python number) is none."""

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        to = eqn.params["new_dtype"]
        if region.half is not None and to == FLOAT32:
            return demand_all(eqn, outs[0])
        return demand_all(eqn, to != region.half)

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        source, to = eqn.invars[0], eqn.params["new_dtype"]
        if region.half is None or eqn.params.get("sharding") is not None:
            return AS_TRACED.plan(planner, eqn, ins, outs, region)
        if ir.is_float32(source):
            if to == FLOAT32:
                return EqnPlan(eqn, self, (ins[0].dtype,), (ins[0],), How.MOVED.value, how=How.MOVED)
            return EqnPlan(eqn, self, (ins[0].dtype,), (traced(eqn.outvars[0]),), "the user's cast")
        is_mask = ir.is_array_of(source, np.dtype(bool))
        if to == FLOAT32 and (is_mask or ins[0].source == "constant"):
            # 0 and 1 are exact in half: a mask takes no part in promotion.
            number = 1.0 if is_mask else ins[0].number
            value = Value(FLOAT32, "constant", number)
            return EqnPlan(eqn, self, (None,), (value,), How.MOVED.value, how=How.MOVED)
        return AS_TRACED.plan(planner, eqn, ins, outs, region)

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        (cache,), eqn = caches, step.eqn
        if step.how is not How.MOVED:
            return rebound(eqn, step.reads, caches)
        if step.reads[0] is not None:
            return [cache]

        return [cache.view(FLOAT32, lambda dtype: binding.bind(eqn, cache.read(None), new_dtype=dtype)[0])]


#: The rules of the lists.
LISTS: dict[str, Rule] = {"lower": Lower(), "full": Full(), "follow": FOLLOW, "inside": Float32Internal()}

#: The rules of primitives that are on no list, or on one with something of their own.
OWN: dict[str, Rule] = {
    "convert_element_type": Convert(),
    **{name: DataMovement() for name in op_table.MOVES},
}
