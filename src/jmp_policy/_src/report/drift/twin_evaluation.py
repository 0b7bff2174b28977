"""Evaluates a program twice at once: as it was written, and in float32.

Every value is a twin: what the program computes in half precision, and what it would be if every operation
were float32. An operation in half is done in float32 for the operands of either run, and of the first the
result is rounded::

    wide  = op(x.half, y.half)           # float32
    half  = narrowed(wide)               # what the operation introduces is half - wide
    exact = op(x.exact, y.exact)         # what it inherits is wide - exact

So the two parts add up to the whole error, element by element. Rounding once is what hardware does: products
accumulate in float32, and elementwise operations are computed there. Sums in half, which round each partial
sum, run as they were traced. Where nothing was rounded yet both runs are one.

What one line of the source does with few operations that are cheap is a region, measured as one: inside it
`wide` goes on from `wide`, not from `half`. A softmax or a layer's product with its bias is one such region.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.rounding import narrowed
from jmp_policy._src.jaxpr import calls, compat, ir, rebuild_control_flow, walk
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.jaxpr.evaluator import evaluate, last_uses
from jmp_policy._src.jaxpr.float32_replay import has_half, is_foreign, replay_equation
from jmp_policy._src.jaxpr.op_table import Trait, having
from jmp_policy._src.products.fp8.eligibility import formats_of
from jmp_policy._src.products.fp8.lost import lost_in_float8
from jmp_policy._src.products.fp8.scales import is_float8_scale
from jmp_policy._src.report.drift import branches, loops
from jmp_policy._src.report.drift.recorder import Node, Recorder, over_devices
from jmp_policy._src.report.drift.twin import Twin, as_written, held, nodes_of, packed, same, unpacked


class TwinEvaluation:
    """Evaluates jaxprs on twins.

    Args:
      recorder: takes note of the values that differ.
      every_operation: whether every operation is measured for itself, and there are no regions.
    """

    def __init__(self, recorder: Recorder, every_operation: bool):
        self._recorder = recorder
        self._every_operation = every_operation

    def run(self, jaxpr: Any, arguments: Sequence[Twin], outer: walk.Site) -> list[Twin]:
        """Returns the results of a jaxpr, closed or not, that is called at a site."""
        return evaluate(
            jaxpr,
            list(arguments),
            lambda eqn, twins: self._equation(eqn, twins, walk.site_of(eqn, outer)),
            constant=lambda _, value: same(value),
            literal=lambda atom: same(jnp.asarray(atom.val, ir.dtype_of(atom))),
            last_uses=last_uses(jaxpr),
        )

    def _equation(self, eqn: Any, twins: list[Twin], site: walk.Site) -> list[Twin]:
        if is_float8_scale(eqn):
            # The float32 run has no use for it: what it makes of the operands is the product's error.
            return list(map(same, as_written(eqn, twins)))
        if all(twin.node is None for twin in twins) and not _involves_half(eqn):
            return list(map(same, replay_equation(eqn, [twin.exact for twin in twins])))
        kind, called = calls.kind_of(eqn), calls.called(eqn)
        if kind is Kind.SCAN:
            return loops.scan(self.run, self._recorder, eqn, twins, site)
        if kind is Kind.WHILE and loops.has_one_end(eqn):
            return loops.while_loop(self.run, self._recorder, eqn, twins, site)
        if kind is Kind.COND and not branches.is_opaque(eqn):
            return branches.cond(self.run, self._recorder, eqn, twins, site)
        if kind is Kind.SHARD_MAP:
            return self._shard_map(eqn, twins, site)
        if called is not None:
            if kind is Kind.CHECKPOINT:
                twins = _kept_apart(twins)
            return self.run(called.jaxpr, twins[called.skipped :], site)
        return self._operation(eqn, twins, site)

    def _operation(self, eqn: Any, twins: list[Twin], site: walk.Site) -> list[Twin]:
        exact = replay_equation(eqn, [twin.exact for twin in twins])
        differs = any(twin.node is not None for twin in twins)
        computed = replay_equation(eqn, [twin.half for twin in twins]) if differs else exact
        if _runs_as_traced(eqn):
            half, rounds = as_written(eqn, twins), [True] * len(computed)
        else:
            dtypes = map(ir.dtype_of, eqn.outvars)
            rounds = [is_half(dtype) and not _is_exact(eqn, dtype) for dtype in dtypes]
            half = [
                narrowed(value, ir.dtype_of(var)) if rounding else value
                for value, var, rounding in zip(computed, eqn.outvars, rounds, strict=True)
            ]
        if not differs and not any(rounds):
            return list(map(same, exact))
        region = None if self._every_operation else (site.path, site.line, site.backward)
        within = [t.region is not None and t.region == region for t in twins]
        wide = computed
        if eqn.primitive.name in _COSTLY:
            within = [False] * len(twins)
        if any(within):
            values = [t.wide if inside else t.half for t, inside in zip(twins, within, strict=True)]
            wide = replay_equation(eqn, values)
        half = [held(value, var) for value, var in zip(half, eqn.outvars, strict=True)]
        lost = _lost(eqn, twins, within)
        if eqn.primitive.name in _ELEMENTWISE:
            half[0], exact[0] = self._recorder.after_measuring(half[0], exact[0])
        made = [Twin(half[i], exact[i], None, wide[i], region, lost) for i in range(len(rounds))]
        return [self._result(eqn, site, twins, within, i, made[i], one) for i, one in enumerate(rounds)]

    def _result(
        self, eqn: Any, site: walk.Site, twins: Sequence[Twin], within: Sequence[bool], i: int, made: Twin,
        rounds: bool,
    ) -> Twin:  # fmt: skip
        """Returns one result of an operation with its node; `made` is what it has become."""
        passed = _passed_on(eqn, twins, i)
        if passed is not None and not rounds:
            # A view of what is in another region begins none: its node has the sources of that one.
            return made._replace(node=passed) if any(within) else Twin(made.half, made.exact, passed)
        nodes, sources = self._recorder.nodes, dict[int, None]()
        operands = [(t.node, inside) for t, inside in zip(twins, within, strict=True) if t.node is not None]
        for number, inside in operands:
            sources.update(dict.fromkeys(nodes[number].sources if inside else (number,)))
        before = [nodes[number] for number, inside in operands if inside]
        var = eqn.outvars[i]
        name, dtype = eqn.primitive.name, _computed_in(eqn, var)
        terms = walk.size(eqn.invars[0]) // max(walk.size(var), 1) if name in _SUMS and is_half(dtype) else 1
        # A region is called by what rounds most in it.
        named = max(before, key=_weight, default=None)
        if named is not None and (not rounds or _weight(named) > (terms, name in _PRODUCTS)):
            name, dtype, terms = named.operation, named.dtype, named.terms
        rounds = rounds or any(node.rounds for node in before)
        adds = eqn.primitive.name in _ADDS and all(node.adds for node in before)
        note = _NOT_INSIDE.get(calls.kind_of(eqn), "")
        node = Node(site, name, dtype, terms, tuple(sources), rounds, adds, note)
        number = self._recorder.add(node)
        self._recorder.measure(number, made.half, made.wide, made.exact, made.lost)
        return made._replace(node=number)

    def _shard_map(self, eqn: Any, twins: list[Twin], site: walk.Site) -> list[Twin]:
        params, begin, results = eqn.params, len(self._recorder.nodes), []
        differs, numbers = nodes_of(twins)

        def on_device(*arrays: Any) -> list[Any]:
            del self._recorder.nodes[begin:]
            with self._recorder.inside() as measured:
                results[:] = self.run(params["jaxpr"], unpacked(arrays, differs, numbers), site)
            whole = over_devices(measured, tuple(compat.manual_axes(params)), params["check_vma"])
            return [*packed(results, [True] * len(results)), whole]

        out_specs = (*params["out_specs"], jax.P())
        *pairs, measured = rebuild_control_flow.shard_map(eqn, on_device, packed(twins, differs), out_specs)
        self._recorder.measured.update(measured)
        if not params["check_vma"]:
            self._recorder.counted_often.update(measured)
        return [
            same(exact) if twin.node is None else Twin(half, exact, twin.node)
            for (half, exact), twin in zip(pairs, results, strict=True)
        ]


def _weight(node: Node) -> tuple[int, bool]:
    return node.terms if node.rounds else 0, node.operation in _PRODUCTS


def _involves_half(eqn: Any) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    return any(is_half(ir.dtype_of(atom)) for atom in atoms) or any(map(has_half, ir.subjaxprs(eqn)))


def _runs_as_traced(eqn: Any) -> bool:
    """Returns whether only the operation itself knows how it rounds."""
    name = eqn.primitive.name
    if name in _SUMS_IN_STEPS:
        return any(is_half(ir.dtype_of(var)) for var in eqn.outvars)
    is_opaque = is_foreign(name) or bool(calls.inner_jaxprs(eqn))
    is_scaled = formats_of(eqn) is not None
    return name == "reduce_precision" or is_scaled or (is_opaque and _involves_half(eqn))


def _computed_in(eqn: Any, out: Any) -> Any:
    """Returns the dtype that decides how exact an operation is: of a float8 product the coarser operand's."""
    formats = formats_of(eqn)
    return (
        ir.dtype_of(out) if formats is None else max(map(jnp.dtype, formats), key=lambda d: jnp.finfo(d).eps)
    )


def _lost(eqn: Any, twins: Sequence[Twin], within: Sequence[bool]) -> Any:
    """Returns what rounding to float8 lost in the region of an operation so far; None without float8."""
    found = [twin.lost for twin, inside in zip(twins, within, strict=True) if inside]
    found = [lost for lost in found if lost is not None]
    if formats_of(eqn) is not None:
        found.append(lost_in_float8(eqn, [twin.half for twin in twins]))
    return sum(found) if found else None


def _is_exact(eqn: Any, dtype: Any) -> bool:
    """Returns whether an operation gives numbers that its half operands already were."""
    if eqn.primitive.name == "convert_element_type":
        return ir.dtype_of(eqn.invars[0]) == dtype
    if eqn.primitive.name not in _EXACT:
        return False
    floating = [d for d in map(ir.dtype_of, eqn.invars) if d is not None and jnp.issubdtype(d, jnp.floating)]
    return all(d == dtype for d in floating)


def _passed_on(eqn: Any, twins: Sequence[Twin], i: int) -> int | None:
    """Returns the node of the operand that a result is, its shape aside."""
    if eqn.primitive.name not in _VIEWS:
        return None
    place = i if len(eqn.invars) == len(eqn.outvars) else 0
    var, out = eqn.invars[place], eqn.outvars[i]
    is_number = all(jnp.issubdtype(ir.dtype_of(v), jnp.inexact) for v in (var, out))
    return twins[place].node if is_number and walk.size(var) == walk.size(out) else None


def _kept_apart(twins: list[Twin]) -> list[Twin]:
    """Keeps the compiler from merging what a jax.checkpoint computes again with the first time."""
    arrays = [(t.half, t.exact) if t.node is not None else (t.exact,) for t in twins]
    apart = lax.optimization_barrier(arrays)
    return [Twin(pair[0], pair[-1], twin.node) for pair, twin in zip(apart, twins, strict=True)]


#: Of loops and branches that are done as one operation, why their row is of the whole.
_NOT_INSIDE: Mapping[Kind | None, str] = {
    Kind.WHILE: "what is inside is not looked at, since under vmap each example has its own end",
    Kind.COND: "what is inside is not looked at, since it is for other platforms or writes to references",
}

#: Of operands in one half dtype, their results are exact in it.
_EXACT = (
    having(Trait.MOVES) | having(Trait.KEEPS_WEIGHT) | having(Trait.VIEW)
    | {
        "neg", "sign", "abs", "max", "min", "clamp", "floor", "ceil", "round", "select_n", "cummax", "cummin",
        "reduce_max", "reduce_min", "reduce_window_max", "reduce_window_min", "concatenate", "stack",
        "dynamic_update_slice", "sort", "top_k", "pad", "scatter", "all_to_all", "ppermute", "pmax",
    }
) - {"reduce_precision"}  # fmt: skip

_PRODUCTS = having(Trait.PRODUCT)

_VIEWS = having(Trait.VIEW) - {"reduce_precision"}

#: Round after each of many steps, in an order that only the compiler knows.
_SUMS_IN_STEPS = frozenset({
    "reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum", "reduce_window",
    "reduce", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul", "select_and_scatter_add", "psum",
    "psum_invariant", "reduce_scatter", "unreduced_psum",
})  # fmt: skip

_SUMS = frozenset({"reduce_sum", "reduce", "reduce_window_sum"})

#: Not done again for the sake of a region.
_COSTLY = having(Trait.COSTLY) | _PRODUCTS | having(Trait.KERNEL) | _SUMS_IN_STEPS

#: Done together with what comes before and after, so that one more elementwise operation takes no time.
_ELEMENTWISE = frozenset({"add", "add_any", "sub", "mul", "max"})

#: Linear in each operand: absolute errors add up.
_ADDS = frozenset({
    "add", "sub", "add_any", "select_n", "concatenate", "stack", "dynamic_update_slice", "max", "min",
    "clamp", "pad", "scatter", "scatter-add", "scatter_add", "carry",
})  # fmt: skip
