"""Follows values of a program that is still being traced back to what they were computed from."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import calls, compat
from jmp_policy._src.jaxpr.calls import Kind


class Ancestors(NamedTuple):
    """What traced values were computed from, within the trace that they are in.

    Args:
      nodes: tracers and equations by their `id`, the values themselves among them.
      equations: the equations of these.
      inputs: inputs and constants of the trace.
    """

    nodes: dict[int, Any]
    equations: list[Any]
    inputs: list[Any]

    def meet(self, other: "Ancestors") -> bool:
        """Whether something that the ones were computed from is among the other's ancestors too.

        An equation counts: what else it gives was computed from the same operands.
        """
        return not self.nodes.keys().isdisjoint(other.nodes)

    def share_trace(self, other: "Ancestors") -> bool:
        """Whether some of both are in one trace: what a branch closes over is in the one around it."""
        own, others = ({compat.trace_of(x) for x in each.nodes.values()} - {None} for each in (self, other))
        return not own.isdisjoint(others)


def ancestors(values: PyTree, stop: Callable[[Any], bool] = lambda eqn: False) -> Ancestors:
    """What values were computed from, as far as the running trace knows; nothing where none is traced.

    Args:
      values: arrays or tracers; those that are not of a program being traced are passed over.
      stop: equations whose operands are not to be followed.
    """
    found = Ancestors({}, [], [])
    waiting = jax.tree.leaves(values)
    while waiting:
        traced = compat.traced_by(waiting.pop())
        if traced is None or id(traced[0]) in found.nodes:
            continue
        tracer, eqn, operands = traced
        found.nodes[id(tracer)] = tracer
        if eqn is None:
            found.inputs.append(tracer)
        elif id(eqn) not in found.nodes:
            found.nodes[id(eqn)] = eqn
            found.equations.append(eqn)
            waiting.extend(() if stop(eqn) else _used(eqn, operands))
    return found


def computed_from(values: PyTree, sources: Ancestors) -> set[int]:
    """The `id`s of the tracers behind values that were computed from one of some others, and of these."""
    readers = collections.defaultdict[int, list[int]](list)
    for tracer, eqn, operands in filter(None, map(compat.traced_by, ancestors(values).nodes.values())):
        for traced in map(compat.traced_by, () if eqn is None else _used(eqn, operands)):
            if traced is not None:
                readers[id(traced[0])].append(id(tracer))
    found, waiting = set[int](), list(sources.nodes)
    while waiting:
        if (key := waiting.pop()) not in found:
            found.add(key)
            waiting.extend(readers[key])
    return found


def _used(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands that an equation does something with: a jitted function may ignore arguments."""
    if calls.kind_of(eqn) is not Kind.JIT:
        return list(operands)
    jaxpr = compat.open_jaxpr(eqn.params["jaxpr"])
    used = {id(atom) for inner in jaxpr.eqns for atom in inner.invars} | set(map(id, jaxpr.outvars))
    return [x for x, var in zip(operands, jaxpr.invars, strict=True) if id(var) in used]


def transposes(eqn: Any) -> bool:
    """Whether an equation is of a backward pass, or has one inside."""
    inside = (inner for jaxpr in calls.inner_jaxprs(eqn) for inner in compat.open_jaxpr(jaxpr).eqns)
    return compat.is_transposed(eqn) or any(map(transposes, inside))


def ends_backward_pass(eqn: Any) -> bool:
    """Whether an equation is of a backward pass, or calls a function that has one inside."""
    return compat.is_transposed(eqn) or (calls.called(eqn) is not None and transposes(eqn))
