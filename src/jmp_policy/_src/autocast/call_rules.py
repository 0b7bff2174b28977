"""The rules of operations that call a jaxpr once: jit, checkpoint, custom derivatives, shard_map."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_policy._src.autocast.operation_rules import as_traced
from jmp_policy._src.autocast.planner import (
    Demand,
    EqnPlan,
    Plan,
    Planner,
    Rule,
    Value,
    float32_reads,
    planned_dtypes,
)
from jmp_policy._src.autocast.runtime import as_function, rebound, run
from jmp_policy._src.autocast.values import CastCache, cast, computed
from jmp_policy._src.jaxpr import calls, compat, ir, rebuild_control_flow
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.regions import Region
from jmp_policy._src.products import binding


class _Call:
    """Base of the rules of calls. `parameter` names the jaxpr."""

    parameter = "jaxpr"

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        return planner.demands(eqn.params[self.parameter], outs, region).ins

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if not all(map(ir.is_plain_array, (*eqn.invars, *eqn.outvars))):
            return as_traced(self, eqn, "as traced: it takes references")
        inner = self._inner(planner, eqn, ins, outs, region)
        reads = planned_dtypes(inner.ins, eqn.invars)
        return EqnPlan(eqn, self, reads, inner.outs, "what is inside decides", (inner,))

    def _inner(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> Plan:
        return planner.plan(eqn.params[self.parameter], ins, outs, region)

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if not step.inner or step.is_unchanged:
            return rebound(step.eqn, float32_reads(step.eqn), caches)
        return self.call(step, step.inner[0], caches)

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        """Does it, when something inside changes."""
        raise NotImplementedError


def _read_all(step: EqnPlan, caches: Sequence[CastCache]) -> list[Any]:
    return [cache.read(dtype) for cache, dtype in zip(caches, step.reads, strict=True)]


class Jit(_Call):
    """jax.jit: inlined if small, else the same call of another jaxpr, traced once per way it is used."""

    def _inner(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> Plan:
        plan = super()._inner(planner, eqn, ins, outs, region)
        if region.half is None or calls.is_inlined(eqn):
            return plan
        # A weight that is only used in half is cast outside, once for all calls; not if it is donated.
        only_half, donated = frozenset([region.half]), eqn.params["donated_invars"]
        narrowed = [
            v._replace(dtype=region.half) if v.source == "leaf" and reads == only_half and not given else v
            for v, reads, given in zip(ins, plan.reads, donated, strict=True)
        ]
        return plan if narrowed == list(ins) else super()._inner(planner, eqn, narrowed, outs, region)

    def run(self, step: EqnPlan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        for cache, donated in zip(caches, step.eqn.params["donated_invars"], strict=True):
            if donated:
                cache.donate()
        return super().run(step, caches)

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        if calls.is_inlined(step.eqn):
            return run(plan, caches)
        arrays = _read_all(step, caches)
        jaxpr = _traced_again(plan, planned_dtypes(plan.outs, step.eqn.outvars), arrays)
        return [computed(out) for out in binding.bind(step.eqn, *arrays, jaxpr=jaxpr)]


def _traced_again(plan: Plan, dtypes: Sequence[np.dtype | None], arrays: Sequence[Any]) -> Any:
    """Returns the jaxpr of a plan; the same object for the same types, so that it is compiled once."""
    key = tuple(jax.typeof(array) for array in arrays)
    if key not in plan.traced:
        plan.traced[key] = jax.make_jaxpr(as_function(plan, dtypes))(*arrays)
    return plan.traced[key]


class Inlined(_Call):
    """A call that is only a call."""

    parameter = "call_jaxpr"

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        return run(plan, caches)


class Checkpoint(_Call):
    """jax.checkpoint: casts of weights are inside, so that no half copy is saved."""

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        function = as_function(plan, planned_dtypes(plan.outs, step.eqn.outvars))
        outs = rebuild_control_flow.checkpoint(step.eqn, function, _read_all(step, caches), binding.bind)
        return [computed(out) for out in outs]


class CustomJVP(_Call):
    """jax.custom_jvp: another one, whose rule is the user's, planned like everything else."""

    parameter = "call_jaxpr"

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        step = super().plan(planner, eqn, ins, outs, region)
        step.planner = planner
        return step

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        eqn = step.eqn
        dtypes = planned_dtypes(plan.outs, eqn.outvars)
        function = jax.custom_jvp(_named(as_function(plan, dtypes), eqn))
        _, user_rule = compat.subfunctions(eqn)

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            return _run_rule(step, user_rule, dtypes, primals, tangents)

        function.defjvp(rule, symbolic_zeros=eqn.params["symbolic_zeros"])
        return [computed(out) for out in function(*_read_all(step, caches))]


def _named(function: Callable[..., Any], eqn: Any) -> Callable[..., Any]:
    function.__name__ = compat.name_of(eqn).rsplit(".", 1)[-1]
    return function


def _run_rule(
    step: EqnPlan, rule: Any, dtypes: Sequence[Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """Runs the user's rule for tangents, traced in the dtypes it was written for, under a plan."""
    zero, atoms = jax.custom_derivatives.SymbolicZero, step.eqn.invars
    # Symbolic zeros and the tangents of integers are no arrays: the traced function closes over them.
    is_array = [not isinstance(t, zero) and t.dtype != jax.dtypes.float0 for t in tangents]
    kept = [
        zero(ir.retyped(t.aval, atom.aval.dtype)) if isinstance(t, zero) and ir.is_float32(atom) else t
        for t, atom in zip(tangents, atoms, strict=True)
    ]

    def flat(*arrays: Any) -> Sequence[Any]:
        given = iter(arrays[len(atoms) :])
        filled = [next(given) if array else t for t, array in zip(kept, is_array, strict=True)]
        return rule(*arrays[: len(atoms)], *filled)

    given = [*primals, *(t for t, array in zip(tangents, is_array, strict=True) if array)]
    types = [*atoms, *(atom for atom, array in zip(atoms, is_array, strict=True) if array)]
    outs, _ = _run_traced(step, flat, given, types, [*dtypes, *dtypes])
    outs = [
        zero(ir.retyped(out.aval, dtype)) if isinstance(out, zero) and dtype is not None else out
        for out, dtype in zip(outs, [*dtypes, *dtypes], strict=True)
    ]
    return outs[: len(dtypes)], outs[len(dtypes) :]


def _run_traced(
    step: EqnPlan,
    function: Callable[..., Sequence[Any]],
    arrays: Sequence[Any],
    types: Sequence[Any],
    dtypes: Sequence[np.dtype | None] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Runs a function that was written for float32 on arrays of which some are half.

    Args:
      step: the operation it belongs to.
      function: of flat arrays; its results may hold things that are no arrays.
      arrays: its arguments, as they are.
      types: an atom of the jaxpr for each argument: the dtype that the function was written for.
      dtypes: what is wanted of each result; None for results as they come.

    Returns:
      Its results, and the atom of the traced function for each of them.
    """
    others: dict[int, Any] = {}

    def traced(*arrays: Any) -> list[Any]:
        outs = list(function(*arrays))
        others.update((place, out) for place, out in enumerate(outs) if not ir.is_array(out))
        return [out for place, out in enumerate(outs) if place not in others]

    jaxpr = ir.trace_as(traced, arrays, [ir.dtype_of(atom) for atom in types])
    count = len(compat.open_jaxpr(jaxpr).outvars) + len(others)
    wanted = list(dtypes) if dtypes is not None else [None] * count
    demands = [dtypes is not None and dtype in (None, FLOAT32) for dtype in wanted]
    assert step.planner is not None
    plan = step.planner.plan(
        jaxpr,
        [Value(array.dtype) for array in arrays],
        [demand for place, demand in enumerate(demands) if place not in others],
        step.region,
    )
    made = iter(run(plan, [computed(array) for array in arrays]))
    atoms = iter(compat.open_jaxpr(jaxpr).outvars)
    places = range(count)
    return (
        [others[i] if i in others else next(made).read(wanted[i]) for i in places],
        [None if i in others else next(atoms) for i in places],
    )


class CustomVJP(_Call):
    """jax.custom_vjp: as traced, since its backward pass knows the dtypes of its forward pass.

    On the list of what is lowered, it is another custom_vjp, with both passes planned like everything else.
    """

    parameter = "call_jaxpr"

    def demand(self, planner: Planner, eqn: Any, outs: Sequence[Demand], region: Region) -> Sequence[Demand]:
        if self._is_opened(planner, eqn, region):
            return super().demand(planner, eqn, outs, region)
        return [True] * len(eqn.invars)

    def plan(
        self, planner: Planner, eqn: Any, ins: Sequence[Value], outs: Sequence[Demand], region: Region
    ) -> EqnPlan:
        if self._is_opened(planner, eqn, region):
            step = super().plan(planner, eqn, ins, outs, region)
            step.planner = planner
            return step
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

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        arrays = _read_all(step, caches)
        dtypes = planned_dtypes(plan.outs, step.eqn.outvars)
        function = jax.custom_vjp(as_function(plan, dtypes))
        passes = _PlannedPasses(step, dtypes, arrays)
        function.defvjp(passes.forward, passes.backward)
        return [computed(out) for out in function(*arrays)]


class _PlannedPasses:
    """The user's forward and backward pass of a custom_vjp, each planned when JAX asks for it.

    Both are functions that were written for float32. Each is traced so, and its trace is run under a plan, on
    arrays of which some are half. The residuals that the forward pass saves may be half then; what they were
    traced as has to be known when the backward pass is traced, and is kept in `_residual_types`.

    Args:
      step: the operation.
      dtypes: of its results; None for those that are left alone.
      arrays: its operands.
    """

    def __init__(self, step: EqnPlan, dtypes: Sequence[Any], arrays: Sequence[Any]):
        self._step, self._dtypes, self._arrays = step, dtypes, arrays
        _, self._user_forward, self._user_backward = compat.subfunctions(step.eqn)
        self._residual_types: list[Any] = []

    def forward(self, *arrays: Any) -> tuple[list[Any], list[Any]]:
        """Returns the results and the residuals."""

        def flat(*arrays: Any) -> Sequence[Any]:
            # With each argument: whether it is differentiated.
            return self._user_forward(*(part for array in arrays for part in (array, True)))

        eqn = self._step.eqn
        outs, atoms = _run_traced(self._step, flat, arrays, eqn.invars)
        places = compat.residual_places(eqn)  # Known once the forward pass was traced.
        self._residual_types = _chosen(atoms, eqn.invars, places)
        results = zip(outs[-len(self._dtypes) :], self._dtypes, strict=True)
        return [x if d is None else cast(x, d) for x, d in results], _chosen(outs, arrays, places)

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the cotangents of the operands, in the operands' dtypes; None for those without one."""

        def flat(*arrays: Any) -> Sequence[Any]:
            return compat.cotangents(self._user_backward(*arrays))

        types = [*self._residual_types, *self._step.eqn.outvars]
        outs, _ = _run_traced(self._step, flat, [*residuals, *cotangents], types)
        return tuple(
            cast(out, array.dtype) if ir.is_array(out) else None
            for out, array in zip(outs, self._arrays, strict=True)
        )


def _chosen(made: Sequence[Any], arguments: Sequence[Any], places: Sequence[int | None]) -> list[Any]:
    """Residuals: the next one that was made, or the argument in that place."""
    new = iter(made)
    return [next(new) if place is None else arguments[place] for place in places]


class ShardMap(_Call):
    """jax.shard_map: weights are cast inside, so that their gradients are summed over devices in float32."""

    def call(self, step: EqnPlan, plan: Plan, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        function = as_function(plan, planned_dtypes(plan.outs, step.eqn.outvars))
        return [
            computed(out)
            for out in rebuild_control_flow.shard_map(step.eqn, function, _read_all(step, caches))
        ]


RULES: Mapping[Kind, Rule] = {
    Kind.JIT: Jit(),
    Kind.CALL: Inlined(),
    Kind.CHECKPOINT: Checkpoint(),
    Kind.CUSTOM_JVP: CustomJVP(),
    Kind.CUSTOM_VJP: CustomVJP(),
    Kind.SHARD_MAP: ShardMap(),
}
