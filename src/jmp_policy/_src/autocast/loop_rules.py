"""The rules of scan, while and cond: dtypes of carries and of branches are found before any tracing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.autocast.operation_rules import AS_TRACED, as_traced
from jmp_policy._src.autocast.planner import (
    Demand,
    EqnPlan,
    Plan,
    Planner,
    Rule,
    float32_reads,
    planned_dtypes,
)
from jmp_policy._src.autocast.runtime import as_function, rebound
from jmp_policy._src.autocast.values import CastCache, Value, computed
from jmp_policy._src.jaxpr import compat, ir, rebuild_control_flow
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.regions import Region
from jmp_policy._src.products import binding


def _joined(carry: Value, out: Value, atom: Any) -> Value:
    differs = ir.is_float32(atom) and carry.dtype != out.dtype
    return Value(FLOAT32) if differs else carry


def _both(one: Demand, other: Demand) -> Demand:
    """Returns what is wanted of a value with two users."""
    if one is None or other is None:
        return one if other is None else other
    return one and other


def _settled_demands(
    demands_of: Callable[[Sequence[Demand]], Sequence[Demand]],
    outs: Sequence[Demand],
    first: int,
    carries: int,
) -> tuple[Sequence[Demand], Sequence[Demand]]:
    """Looks ahead in the body of a loop until what is wanted of its carries is wanted at its end as well.

    Args:
      demands_of: what the body wants of its arguments, given what is wanted of its results.
      outs: what is wanted of the loop's results, the carries first.
      first, carries: place of the first carry among the arguments, and their number.

    Returns:
      What is wanted of the body's arguments, and of its results.
    """
    wanted = list(outs)
    while True:
        ins = demands_of(wanted)
        inside = ins[first : first + carries]
        new = [*(_both(w, i) for w, i in zip(wanted[:carries], inside, strict=True)), *wanted[carries:]]
        if new == wanted:
            return ins, wanted
        wanted = new


def _settled_carry(
    plan_body: Callable[[list[Value]], Plan], start: Sequence[Value], eqn: Any
) -> tuple[Plan, list[Value]]:
    """Plans the body of a loop until it returns its carries in the dtypes that it takes them in."""
    carry = [Value(value.dtype) for value in start]
    while True:
        body = plan_body(carry)
        ends = zip(carry, body.outs[: len(carry)], eqn.outvars[: len(carry)], strict=True)
        new = [_joined(*end) for end in ends]
        if new == carry:
            return body, carry
        carry = new


class _Loop:
    """Base of the rules of control flow."""

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if not step.inner or step.is_unchanged:
            return rebound(step.eqn, float32_reads(step.eqn), caches)
        arrays = [cache.read(dtype) for cache, dtype in zip(caches, step.reads, strict=True)]
        return [computed(out) for out in self.call(step, arrays)]

    def call(self, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        """Does it, when something inside changes."""
        raise NotImplementedError


class Scan(_Loop):
    """lax.scan: carries have the least dtypes that the body gives back; constants are cast in the body.

    Carries that start as zeros or as a parameter are float32: they often are sums. Constants that were cast
    outside would have their gradients summed over the steps in half.
    """

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        ins, _ = self._demands(planner, eqn, outs, region)
        return ins

    def _demands(
        self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region
    ) -> tuple[Sequence[Demand], Sequence[Demand]]:
        consts, carries = compat.scan_sizes(eqn.params)
        return _settled_demands(
            lambda wanted: planner.demands(eqn.params["jaxpr"], wanted, region).ins, outs, consts, carries
        )

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if ir.has_references(eqn) or len(compat.open_jaxpr(eqn.params["jaxpr"]).outvars) != len(eqn.outvars):
            return as_traced(self, eqn, "as traced: it takes references")
        _, wanted = self._demands(planner, eqn, outs, region)
        consts, carries = compat.scan_sizes(eqn.params)
        stop = consts + carries

        def plan_body(carry: list[Value]) -> Plan:
            return planner.plan(eqn.params["jaxpr"], [*ins[:consts], *carry, *ins[stop:]], wanted, region)

        body, carry = _settled_carry(plan_body, ins[consts:stop], eqn)
        results = (*carry, *(v._replace(source="computed") for v in body.outs[carries:]))
        return EqnPlan(
            eqn, self, planned_dtypes(body.ins, eqn.invars), results, "what is inside decides", (body,)
        )

    def call(self, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        function = as_function(step.inner[0], planned_dtypes(step.outs, step.eqn.outvars))
        return rebuild_control_flow.scan(step.eqn, function, arrays)


class While(_Loop):
    """lax.while_loop: as scan."""

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        params = eqn.params
        conds, bodies = params["cond_nconsts"], params["body_nconsts"]
        ins, _ = self._demands(planner, eqn, outs, region)
        test = planner.demands(params["cond_jaxpr"], [True], region).ins
        carry = [_both(a, b) for a, b in zip(ins[bodies:], test[conds:], strict=True)]
        return [*test[:conds], *ins[:bodies], *carry]

    def _demands(
        self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region
    ) -> tuple[Sequence[Demand], Sequence[Demand]]:
        first, carries = eqn.params["body_nconsts"], len(outs)
        return _settled_demands(
            lambda wanted: planner.demands(eqn.params["body_jaxpr"], wanted, region).ins, outs, first, carries
        )

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if ir.has_references(eqn):
            return as_traced(self, eqn, "as traced: it takes references")
        params = eqn.params
        _, wanted = self._demands(planner, eqn, outs, region)
        conds, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def plan_body(carry: list[Value]) -> Plan:
            return planner.plan(params["body_jaxpr"], [*ins[conds:stop], *carry], wanted, region)

        body, carry = _settled_carry(plan_body, ins[stop:], eqn)
        test = planner.plan(params["cond_jaxpr"], [*ins[:conds], *carry], [True], region)
        reads = planned_dtypes([*ins[:stop], *carry], eqn.invars)
        return EqnPlan(eqn, self, reads, tuple(carry), "what is inside decides", (body, test))

    def call(self, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        params, (body, test) = step.eqn.params, step.inner
        conds, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        function = as_function(body, planned_dtypes(step.outs, step.eqn.outvars))
        go_on = as_function(test, [None])
        if ir.shape_of(compat.open_jaxpr(params["cond_jaxpr"]).outvars[0]):
            # Of a vmap: each example has its own end, which the public function doesn't take.
            start = arrays[stop:]
            jaxprs = {
                "cond_jaxpr": jax.make_jaxpr(go_on)(*arrays[:conds], *start),
                "body_jaxpr": jax.make_jaxpr(function)(*arrays[conds:stop], *start),
            }
            return binding.bind(step.eqn, *arrays, **jaxprs)
        return lax.while_loop(
            lambda carry: go_on(*arrays[:conds], *carry)[0],
            lambda carry: function(*arrays[conds:stop], *carry),
            list(arrays[stop:]),
        )


class Cond(_Loop):
    """lax.cond and lax.switch: a result has the widest dtype that a branch gives it."""

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if self._is_opaque(eqn):
            return AS_TRACED.demand(planner, eqn, outs, region)
        branches = [planner.demands(branch, outs, region).ins for branch in eqn.params["branches"]]
        demands = list(branches[0])
        for branch in branches[1:]:
            demands = [_both(a, b) for a, b in zip(demands, branch, strict=True)]
        return [True, *demands]

    @staticmethod
    def _is_opaque(eqn: Any) -> bool:
        # Branches by platform: a kernel per platform, written for its dtypes.
        return compat.platforms_of_branches(eqn) is not None or ir.has_references(eqn)

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if self._is_opaque(eqn):
            step = AS_TRACED.plan(planner, eqn, ins, outs, region)
            return as_traced(self, eqn, step.why, step.note)
        plans = [planner.plan(branch, ins[1:], outs, region) for branch in eqn.params["branches"]]
        results = []
        for var, *values in zip(eqn.outvars, *(plan.outs for plan in plans), strict=True):
            dtypes = {value.dtype for value in values}
            results.append(Value(FLOAT32 if len(dtypes) > 1 and ir.is_float32(var) else values[0].dtype))
        reads = planned_dtypes(ins, eqn.invars)
        return EqnPlan(eqn, self, reads, tuple(results), "what is inside decides", tuple(plans))

    def call(self, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        dtypes = planned_dtypes(step.outs, step.eqn.outvars)
        return rebuild_control_flow.cond([as_function(plan, dtypes) for plan in step.inner], arrays)


RULES: Mapping[Kind, Rule] = {Kind.SCAN: Scan(), Kind.WHILE: While(), Kind.COND: Cond()}
