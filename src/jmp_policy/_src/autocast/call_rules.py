"""The rules of operations with a jaxpr inside: calls, custom derivatives, loops and branches."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jmp_policy._src.autocast.list_rules import AS_TRACED, as_traced
from jmp_policy._src.autocast.planner import (
    Case,
    Demand,
    EqnPlan,
    Plan,
    Planner,
    Rule,
    Value,
    as_function,
    float32_reads,
    planned_dtypes,
    rebound,
    run,
)
from jmp_policy._src.autocast.values import CastCache, computed
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.marked_regions import Region
from jmp_policy._src.products import binding


class _Call(Rule):
    """Base of the rules of calls, loops and branches. `parameter` names the jaxpr of a call."""

    parameter = "jaxpr"

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        return planner.demands(eqn.params[self.parameter], outs, region).ins

    def plan(self, case: Case) -> EqnPlan:
        eqn = case.eqn
        if not all(map(ir.is_plain_array, (*eqn.invars, *eqn.outvars))):
            return as_traced(self, eqn, "as traced: it takes references")
        inner = case.planner.plan(eqn.params[self.parameter], case.ins, case.outs, case.region)
        reads = planned_dtypes(inner.ins, eqn.invars)
        return EqnPlan(eqn, self, reads, inner.outs, "what is inside decides", (inner,), planner=case.planner)

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if not step.inner or step.is_unchanged:
            return rebound(step, float32_reads(step.eqn), caches)
        if calls.is_inlined(step.eqn):
            return run(step.inner[0], caches)
        arrays = [cache.read(dtype) for cache, dtype in zip(caches, step.reads, strict=True)]
        function = as_function(step.inner[0], _dtypes(step))
        return list(map(computed, self.call(step, function, arrays)))

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        """Does it, when something inside changes; `function` is what the first plan inside does."""
        raise NotImplementedError


def _dtypes(step: EqnPlan) -> tuple[Any, ...]:
    return planned_dtypes(step.outs, step.eqn.outvars)


class Jit(_Call):
    """jax.jit: inlined if small, else the same call of another jaxpr, traced once per way it is used."""

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        # The same object for the same types, so that it is compiled once.
        key, traced = (_dtypes(step), *map(jax.typeof, arrays)), step.inner[0].traced
        if key not in traced:
            traced[key] = jax.make_jaxpr(function)(*arrays)
        return binding.bind(step.eqn, *arrays, jaxpr=traced[key])


class Inlined(_Call):
    """A call that is only a call."""

    parameter = "call_jaxpr"


class Checkpoint(_Call):
    """jax.checkpoint: casts of weights are inside, so that no half copy is saved."""

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        return control_flow.checkpoint(step.eqn, function, arrays, binding.bind)


class CustomJVP(_Call):
    """jax.custom_jvp: another one, whose rule is the user's, planned like everything else."""

    parameter = "call_jaxpr"

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        return control_flow.custom_jvp(step.eqn, function, arrays, _planned_when_run(step), _dtypes(step))


def _planned_when_run(step: EqnPlan) -> control_flow.Run:
    """Returns what plans and runs a rule of a derivative, which was written for float32."""

    def run_planned(jaxpr: Any, arrays: Sequence[Any], dtypes: Sequence[Any] | None) -> list[Any]:
        wanted = dtypes or [None] * len(compat.open_jaxpr(jaxpr).outvars)
        demands = [dtypes is not None and dtype in (None, FLOAT32) for dtype in wanted]
        assert step.planner is not None
        plan = step.planner.plan(jaxpr, [Value(array.dtype) for array in arrays], demands, step.region)
        outs = run(plan, list(map(computed, arrays)))
        return [cache.read(dtype) for cache, dtype in zip(outs, wanted, strict=True)]

    return run_planned


class CustomVJP(_Call):
    """jax.custom_vjp: as traced, since its backward pass knows the dtypes of its forward pass.

    On the list of what is lowered, it is another custom_vjp, with both passes planned like everything else.
    """

    parameter = "call_jaxpr"

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if self._is_opened(planner, eqn, region):
            return super().demand(planner, eqn, outs, region)
        return [True] * len(eqn.invars)

    def plan(self, case: Case) -> EqnPlan:
        planner, eqn, _, _, region = case
        if self._is_opened(planner, eqn, region):
            return super().plan(case)
        note, names = "", ir.primitives(eqn.params[self.parameter])
        if region.half is not None and any(planner.table.get(n, ("",))[0] == "lower" for n in names):
            note = (
                "a custom_vjp holds matrix products, which stay in float32: its backward pass was written "
                "for the dtypes of its forward pass. autocast(..., lower={'custom_vjp_call'}) lowers both"
            )
        return as_traced(self, eqn, "custom_vjp: as traced", note)

    @staticmethod
    def _is_opened(planner: Planner, eqn: Any, region: Region) -> bool:
        asked = planner.table.get(eqn.primitive.name, ("",))[0] == "lower"
        return asked and region.half is not None and not eqn.params["symbolic_zeros"]

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        return control_flow.custom_vjp(step.eqn, function, arrays, _planned_when_run(step), _dtypes(step))


class ShardMap(_Call):
    """jax.shard_map: weights are cast inside, so that their gradients are summed over devices in float32."""

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        return control_flow.shard_map(step.eqn, function, arrays)


def _both(one: Demand, other: Demand) -> Demand:
    """What is wanted of a value with two users."""
    if one is None or other is None:
        return one if other is None else other
    return one and other


class Loop(_Call):
    """lax.scan, lax.while_loop: carries have the least dtypes that the body gives back.

    Both passes go over the body until its carries end in what they began as. Carries that start as zeros or
    as a parameter are float32: they often are sums. Constants are cast in the body: cast outside, their
    gradients would be summed over the trips in half.
    """

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        loop = control_flow.loop(eqn, eqn.invars)
        ins = planner.demands(loop.body, self._wanted(planner, loop, outs, region), region).ins
        if loop.test is None:
            return ins
        test = planner.demands(loop.test, [True], region).ins
        tested, fixed = len(loop.tested), len(loop.fixed)
        carry = [_both(a, b) for a, b in zip(ins[fixed:], test[tested:], strict=True)]
        return [*test[:tested], *ins[:fixed], *carry]

    @staticmethod
    def _wanted(
        planner: Planner, loop: control_flow.Loop, outs: Sequence[Demand], region: Region
    ) -> list[Demand]:
        """What is wanted of the body's results: of carries also what the next trip wants of them."""
        first, carries = len(loop.fixed), len(loop.start)

        def after(wanted: list[Demand]) -> list[Demand]:
            inside = planner.demands(loop.body, wanted, region).ins[first : first + carries]
            return [*map(_both, wanted[:carries], inside), *wanted[carries:]]

        return ir.fixed_point(list(outs), after)

    def plan(self, case: Case) -> EqnPlan:
        planner, eqn, ins, outs, region = case
        loop = control_flow.loop(eqn, ins)
        if ir.has_references(eqn) or len(compat.open_jaxpr(loop.body).outvars) != len(eqn.outvars):
            return as_traced(self, eqn, "as traced: it takes references")
        wanted, atoms = self._wanted(planner, loop, outs, region), eqn.outvars[: len(loop.start)]

        def planned(carry: Sequence[Value]) -> Plan:
            return planner.plan(loop.body, [*loop.fixed, *carry, *loop.xs], wanted, region)

        def after(carry: list[Value]) -> list[Value]:
            return [
                Value(FLOAT32) if ir.is_float32(atom) and value.dtype != end.dtype else value
                for value, end, atom in zip(carry, planned(carry).outs, atoms, strict=False)
            ]

        carry = ir.fixed_point([Value(value.dtype) for value in loop.start], after)
        plans = (planned(carry),)
        if loop.test is not None:
            plans += (planner.plan(loop.test, [*loop.tested, *carry], [True], region),)
        reads = planned_dtypes([*loop.tested, *loop.fixed, *carry, *loop.xs], eqn.invars)
        results = (*carry, *(v._replace(source="computed") for v in plans[0].outs[len(carry) :]))
        return EqnPlan(eqn, self, reads, results, "what is inside decides", plans)

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        if len(step.inner) == 1:
            return control_flow.scan_over_arrays(step.eqn, function, arrays)
        test = as_function(step.inner[1], [None])
        return control_flow.while_over_arrays(step.eqn, test, function, arrays, binding.bind)


class Cond(_Call):
    """lax.cond and lax.switch: a result has the widest dtype that a branch gives it."""

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if self._is_opaque(eqn):
            return AS_TRACED.demand(planner, eqn, outs, region)
        branches = [planner.demands(branch, outs, region).ins for branch in control_flow.branches(eqn)]
        demands = list(branches[0])
        for branch in branches[1:]:
            demands = [_both(a, b) for a, b in zip(demands, branch, strict=True)]
        return [True, *demands]

    @staticmethod
    def _is_opaque(eqn: Any) -> bool:
        # Branches by platform: a kernel per platform, written for its dtypes.
        return compat.platforms_of_branches(eqn) is not None or ir.has_references(eqn)

    def plan(self, case: Case) -> EqnPlan:
        planner, eqn, ins, outs, region = case
        if self._is_opaque(eqn):
            step = AS_TRACED.plan(case)
            return as_traced(self, eqn, step.why, step.note)
        plans = [planner.plan(branch, ins[1:], outs, region) for branch in control_flow.branches(eqn)]
        results = []
        for var, *values in zip(eqn.outvars, *(plan.outs for plan in plans), strict=True):
            dtypes = {value.dtype for value in values}
            results.append(Value(FLOAT32 if len(dtypes) > 1 and ir.is_float32(var) else values[0].dtype))
        reads = planned_dtypes(ins, eqn.invars)
        return EqnPlan(eqn, self, reads, tuple(results), "what is inside decides", tuple(plans))

    def call(self, step: EqnPlan, function: control_flow.Function, arrays: Sequence[Any]) -> Sequence[Any]:
        return control_flow.cond([as_function(plan, _dtypes(step)) for plan in step.inner], arrays)


RULES: Mapping[Kind, Rule] = {
    Kind.JIT: Jit(),
    Kind.CALL: Inlined(),
    Kind.CHECKPOINT: Checkpoint(),
    Kind.CUSTOM_JVP: CustomJVP(),
    Kind.CUSTOM_VJP: CustomVJP(),
    Kind.SHARD_MAP: ShardMap(),
    Kind.SCAN: Loop(),
    Kind.WHILE: Loop(),
    Kind.COND: Cond(),
}
