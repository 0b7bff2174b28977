"""The rules of operations with a jaxpr inside: calls, custom derivatives, loops and branches."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jmp_policy._src.autocast.list_rules import AS_TRACED
from jmp_policy._src.autocast.planner import (
    Case,
    CastCache,
    Demand,
    EqnPlan,
    Plan,
    Planner,
    Rule,
    Value,
    planned_dtypes,
    rebound,
)
from jmp_policy._src.jaxpr import calls, compat, control_flow, ir
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.products import binding

#: Does an operation on arrays, when something inside changes.
_Do: TypeAlias = Callable[[Planner, EqnPlan, Sequence[Any]], Sequence[Any]]


def _with_inside(do: _Do | None, case: Case, ins: Any, outs: Any, *plans: Plan) -> EqnPlan:
    """Returns the step of an operation, for what its operands are read in and its results will be."""
    eqn = case.eqn

    def run_with_inside(step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if step.is_unchanged:
            return rebound(step, caches)
        if do is None or control_flow.is_inlined(eqn):
            return plans[0].run(caches)
        return list(map(CastCache, do(case.planner, step, step.operands(caches))))

    reads = planned_dtypes(ins, eqn.invars)
    return EqnPlan(eqn, reads, tuple(outs), "what is inside decides", run_with_inside, plans)


class Call(Rule):
    """A call of a jaxpr, which `do` does around another function; None for one that is inlined."""

    def __init__(self, do: _Do | None):
        self._do = do

    def demand(self, case: Case) -> Sequence[Demand]:
        return case.planner.demands(_jaxpr(case.eqn), case.outs, case.region).ins

    def plan(self, case: Case) -> EqnPlan:
        if ir.has_references(case.eqn):
            return AS_TRACED.plan(case)
        inner = case.planner.plan(_jaxpr(case.eqn), case.ins, case.outs, case.region)
        return _with_inside(self._do, case, inner.ins, inner.outs, inner)


def _jaxpr(eqn: Any) -> Any:
    called = calls.called(eqn)
    assert called is not None
    return called.jaxpr


def _function(step: EqnPlan) -> control_flow.Function:
    """What the plan inside does, with results as those of the operation."""
    return step.inner[0].as_function(step.dtypes)


def _retraced(_: Planner, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
    """The same operation with other jaxprs inside; small calls are inlined."""
    jaxprs = [plan.traced_as(step.dtypes) for plan in step.inner]
    return control_flow.with_jaxprs(step.eqn, jaxprs, arrays, binding.bind)


def _checkpoint(_: Planner, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
    """Casts of weights are inside, so that no half copy is saved."""
    return control_flow.checkpoint(step.eqn, _function(step), arrays, binding.bind)


def _shard_map(_: Planner, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
    """Weights are cast inside, so that their gradients are summed over devices in float32."""
    return control_flow.shard_map(step.eqn, _function(step), arrays)


def _custom_jvp(planner: Planner, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
    """Another function with the user's rules of its derivative, which are planned when they run."""

    def run_planned(jaxpr: Any, arrays: Sequence[Any], dtypes: Sequence[Any] | None) -> list[Any]:
        wanted = dtypes or [None] * len(compat.open_jaxpr(jaxpr).outvars)
        demands = [dtypes is not None and dtype in (None, FLOAT32) for dtype in wanted]
        plan = planner.plan(jaxpr, [Value(array.dtype) for array in arrays], demands, step.region)
        return plan.results(arrays, wanted)

    return control_flow.custom_jvp(step.eqn, _function(step), arrays, run_planned, step.dtypes)


def _both(one: Demand, other: Demand) -> Demand:
    """What is wanted of a value with two users."""
    if one is None or other is None:
        return one if other is None else other
    return one and other


class Loop(Rule):
    """lax.scan, lax.while_loop: carries have the least dtypes that the body gives back.

    Both passes go over the body until its carries end in what they began as. Carries that start as zeros or
    as a parameter are float32: they often are sums. Constants are cast in the body: cast outside, their
    gradients would be summed over the trips in half.
    """

    def demand(self, case: Case) -> Sequence[Demand]:
        planner, eqn, _, _, region = case
        loop = control_flow.loop(eqn, eqn.invars)
        ins = planner.demands(loop.body, self._wanted(case, loop), region).ins
        if loop.test is None:
            return ins
        test = planner.demands(loop.test, [True], region).ins
        tested, fixed = len(loop.tested), len(loop.fixed)
        carry = [_both(a, b) for a, b in zip(ins[fixed:], test[tested:], strict=True)]
        return [*test[:tested], *ins[:fixed], *carry]

    @staticmethod
    def _wanted(case: Case, loop: control_flow.Loop) -> list[Demand]:
        """What is wanted of the body's results: of carries also what the next trip wants of them."""
        first, carries = len(loop.fixed), len(loop.start)

        def after(wanted: list[Demand]) -> list[Demand]:
            inside = case.planner.demands(loop.body, wanted, case.region).ins[first : first + carries]
            return [*map(_both, wanted[:carries], inside), *wanted[carries:]]

        return ir.fixed_point(list(case.outs), after)

    def plan(self, case: Case) -> EqnPlan:
        planner, eqn, ins, _, region = case
        loop = control_flow.loop(eqn, ins)
        if ir.has_references(eqn) or len(compat.open_jaxpr(loop.body).outvars) != len(eqn.outvars):
            return AS_TRACED.plan(case)
        wanted, atoms = self._wanted(case, loop), eqn.outvars[: len(loop.start)]

        def planned(carry: Sequence[Value]) -> Plan:
            return planner.plan(loop.body, [*loop.fixed, *carry, *loop.xs], wanted, region)

        def after(carry: list[Value]) -> list[Value]:
            return [
                Value(FLOAT32) if ir.is_float32(atom) and value.dtype != end.dtype else value
                for value, end, atom in zip(carry, planned(carry).outs, atoms, strict=False)
            ]

        carry = ir.fixed_point([Value(value.dtype) for value in loop.start], after)
        body, operands = planned(carry), [*loop.tested, *loop.fixed, *carry, *loop.xs]
        outs = (*carry, *(value._replace(source="computed") for value in body.outs[len(carry) :]))
        if loop.test is None:
            return _with_inside(_retraced, case, operands, outs, body)
        test = planner.plan(loop.test, [*loop.tested, *carry], [True], region)
        return _with_inside(_while, case, operands, outs, body, test)


def _while(_: Planner, step: EqnPlan, arrays: Sequence[Any]) -> Sequence[Any]:
    body, test = step.inner
    jaxprs = [body.traced_as(step.dtypes), test.traced_as((None,))]
    return control_flow.with_jaxprs(step.eqn, jaxprs, arrays, binding.bind)


class Cond(Rule):
    """lax.cond and lax.switch: a result has the widest dtype that a branch gives it."""

    def demand(self, case: Case) -> Sequence[Demand]:
        planner, eqn, _, outs, region = case
        if self._is_opaque(eqn):
            return AS_TRACED.demand(case)
        branches = [planner.demands(branch, outs, region).ins for branch in control_flow.branches(eqn)]
        return [True, *(functools.reduce(_both, demands) for demands in zip(*branches, strict=True))]

    @staticmethod
    def _is_opaque(eqn: Any) -> bool:
        # Branches by platform: a kernel per platform, written for its dtypes.
        return compat.platforms_of_branches(eqn) is not None or ir.has_references(eqn)

    def plan(self, case: Case) -> EqnPlan:
        planner, eqn, ins, outs, region = case
        if self._is_opaque(eqn):
            return AS_TRACED.plan(case)
        plans = [planner.plan(branch, ins[1:], outs, region) for branch in control_flow.branches(eqn)]
        results = []
        for var, *values in zip(eqn.outvars, *(plan.outs for plan in plans), strict=True):
            dtypes = {value.dtype for value in values}
            results.append(Value(FLOAT32 if len(dtypes) > 1 and ir.is_float32(var) else values[0].dtype))
        return _with_inside(_retraced, case, ins, results, *plans)


RULES: Mapping[Kind, Rule] = {
    Kind.JIT: Call(_retraced),
    Kind.CALL: Call(None),
    Kind.CHECKPOINT: Call(_checkpoint),
    Kind.CUSTOM_JVP: Call(_custom_jvp),
    Kind.CUSTOM_VJP: AS_TRACED,  # Its backward pass knows the dtypes of its forward pass.
    Kind.SHARD_MAP: Call(_shard_map),
    Kind.SCAN: Loop(),
    Kind.WHILE: Loop(),
    Kind.COND: Cond(),
}
