"""The rules of scan, while and cond: dtypes of carries and of branches are found before any tracing."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.autocast.operation_rules import AS_TRACED, as_traced
from jmp_policy._src.autocast.planner import Demand, EqnPlan, Planner, Rule, float32_reads, planned_dtypes
from jmp_policy._src.autocast.runtime import as_function, rebound
from jmp_policy._src.autocast.values import CastCache, Value, computed
from jmp_policy._src.jaxpr import binding, compat, ir, rebuild_control_flow
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.regions import Region


def _joined(carry: Value, out: Value, atom: Any) -> Value:
    wide = ir.is_float32(atom) and carry.dtype != out.dtype
    return Value(FLOAT32) if wide else carry


def _both(one: Demand, other: Demand) -> Demand:
    """What is wanted of a value with two users."""
    if one is None or other is None:
        return one if other is None else other
    return one and other


class _Loop:
    """Base of the rules of control flow."""

    def run(self, step: EqnPlan, cells: Sequence[CastCache]) -> Sequence[CastCache]:
        if not step.inner or step.is_unchanged:
            return rebound(step.eqn, float32_reads(step.eqn), cells)
        arrays = [cell.read(dtype) for cell, dtype in zip(cells, step.reads, strict=True)]
        return [computed(out) for out in self.call(step, arrays)]

    def call(self, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        """Does it, when something inside changes."""
        raise NotImplementedError


def _has_references(eqn: Any) -> bool:
    return not all(map(ir.is_plain_array, (*eqn.invars, *eqn.outvars)))


class Scan(_Loop):
    """lax.scan: carries have the least dtypes that the body gives back; constants are cast in the body.

    Carries that start as zeros or as a parameter are float32: they often are sums. Constants that were cast
    outside would have their gradients summed over the steps in half.
    """

    def wish(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        ins, _ = self._wishes(planner, eqn, outs, region)
        return ins

    def _wishes(
        self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region
    ) -> tuple[Sequence[Demand], Sequence[Demand]]:
        consts, carries = compat.scan_sizes(eqn.params)
        wanted = list(outs)
        while True:
            ins = planner.wishes(eqn.params["jaxpr"], wanted, region).ins
            inside = ins[consts : consts + carries]
            new = [*(_both(w, i) for w, i in zip(wanted[:carries], inside, strict=True)), *wanted[carries:]]
            if new == wanted:
                return ins, wanted
            wanted = new

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if _has_references(eqn) or len(compat.open_jaxpr(eqn.params["jaxpr"]).outvars) != len(eqn.outvars):
            return as_traced(self, eqn, "as traced: it takes references")
        _, wanted = self._wishes(planner, eqn, outs, region)
        consts, carries = compat.scan_sizes(eqn.params)
        stop = consts + carries
        carry = [Value(value.dtype) for value in ins[consts:stop]]
        while True:
            body = planner.plan(eqn.params["jaxpr"], [*ins[:consts], *carry, *ins[stop:]], wanted, region)
            new = [_joined(*three) for three in zip(carry, body.outs, eqn.outvars, strict=False)]
            if new == carry:
                break
            carry = new
        results = (*carry, *(v._replace(source="computed") for v in body.outs[carries:]))
        return EqnPlan(
            eqn, self, planned_dtypes(body.ins, eqn.invars), results, "what is inside decides", (body,)
        )

    def call(self, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
        function = as_function(step.inner[0], planned_dtypes(step.outs, step.eqn.outvars))
        return rebuild_control_flow.scan(step.eqn, function, arrays)


class While(_Loop):
    """lax.while_loop: as scan."""

    def wish(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        params = eqn.params
        conds, bodies = params["cond_nconsts"], params["body_nconsts"]
        ins, _ = self._wishes(planner, eqn, outs, region)
        test = planner.wishes(params["cond_jaxpr"], [True], region).ins
        carry = [_both(a, b) for a, b in zip(ins[bodies:], test[conds:], strict=True)]
        return [*test[:conds], *ins[:bodies], *carry]

    def _wishes(
        self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region
    ) -> tuple[Sequence[Demand], Sequence[Demand]]:
        bodies, wanted = eqn.params["body_nconsts"], list(outs)
        while True:
            ins = planner.wishes(eqn.params["body_jaxpr"], wanted, region).ins
            new = [_both(w, i) for w, i in zip(wanted, ins[bodies:], strict=True)]
            if new == wanted:
                return ins, wanted
            wanted = new

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if _has_references(eqn):
            return as_traced(self, eqn, "as traced: it takes references")
        params = eqn.params
        _, wanted = self._wishes(planner, eqn, outs, region)
        conds, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = [Value(value.dtype) for value in ins[stop:]]
        while True:
            body = planner.plan(params["body_jaxpr"], [*ins[conds:stop], *carry], wanted, region)
            new = [_joined(*three) for three in zip(carry, body.outs, eqn.outvars, strict=True)]
            if new == carry:
                break
            carry = new
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

    def wish(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if self._is_opaque(eqn):
            return AS_TRACED.wish(planner, eqn, outs, region)
        branches = [planner.wishes(branch, outs, region).ins for branch in eqn.params["branches"]]
        wishes = list(branches[0])
        for branch in branches[1:]:
            wishes = [_both(a, b) for a, b in zip(wishes, branch, strict=True)]
        return [True, *wishes]

    @staticmethod
    def _is_opaque(eqn: Any) -> bool:
        # Branches by platform: a kernel per platform, written for its dtypes.
        return eqn.params.get("branches_platforms") is not None or _has_references(eqn)

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


RULES: dict[str, Rule] = {"scan": Scan(), "while": While(), "cond": Cond()}
