"""A value in two runs of a program, as it was written and in float32, and the scans and branches between.

A scan has as many trips in both runs, and what is measured in it is known for each trip. A while loop may
have more in one of them, and is one operation.

The index of a branch may differ. Then one more branch is there for the case that both runs take different
ones; it gives the results of both, and measures nothing::

    switch(index.half if index.half == index.exact else the last,
           first branch on twins, second branch on twins, ..., each run its own branch)

Where the two runs went different ways, their whole difference is introduced by the branch itself.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat, control_flow, ir
from jmp_policy._src.jaxpr.float32_replay import as_traced, replay_equation, to_float32
from jmp_policy._src.jaxpr.interpreter import Carries
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.drift.recorder import Measured, Node, Recorder


class Twin(NamedTuple):
    """A value in both runs. As a pytree: `half` and `exact` where they may differ, else one of them.

    Args:
      half: as the program computes it, in the dtype that it was traced in; float32 where both are one.
      exact: in float32; the very same object where the two cannot differ.
      node: number of the node that it is; None where the two cannot differ.
    """

    half: Any
    exact: Any
    node: int | None = None


def _flatten(twin: Twin) -> tuple[tuple[Any, ...], int | None]:
    return ((twin.exact,) if twin.node is None else (twin.half, twin.exact)), twin.node


jax.tree_util.register_pytree_node(Twin, _flatten, lambda node, arrays: Twin(arrays[0], arrays[-1], node))


def same(value: Any) -> Twin:
    """The twin of a value that both runs share; float32 where it is half."""
    value = to_float32(value)
    return Twin(value, value)


def held(value: Any, var: Any) -> Any:
    """A value in the half dtype that its variable was traced in: it has no more digits."""
    dtype = ir.dtype_of(var)
    return lax.convert_element_type(value, dtype) if is_half(dtype) else value


def as_written(eqn: Any, twins: Sequence[Twin]) -> list[Any]:
    """What an equation gives in the run as the program is written; float32 where it is half."""
    with compat.eqn_context(eqn):
        return as_traced(eqn, [twin.half for twin in twins])


class TwinCarries(Carries):
    """The carries of a scan. At the start of a trip each that may differ is a node of its own.

    Args:
      recorder: takes note of them.
      eqn, site: the scan, and where it is.
      start: the first carries.

    Attributes:
      differs: whether each may differ between the runs.
      carried: the node of each at the start of a trip; None where it cannot differ.
      results: of a trip, those that are carried on.
    """

    def __init__(self, recorder: Recorder, eqn: Any, start: Sequence[Twin], site: Site):
        super().__init__(start)
        self._recorder, self._eqn, self._site = recorder, eqn, site
        self.differs = [twin.node is not None for twin in start]
        self.carried: list[int | None] = []
        self.results: list[Twin] = []
        self._begin = len(recorder.nodes)

    def settle(self, trial: Callable[[], Any]) -> None:
        """Sets `differs`: what differs after a trip differs at its start."""

        def after(differs: list[bool]) -> list[bool]:
            self.differs = differs
            # A new function each time: JAX would not trace the same one again.
            jax.eval_shape(lambda: trial())
            return [a or b.node is not None for a, b in zip(differs, self.results, strict=True)]

        # Nothing is measured, since the numbers of nodes may be others in the end.
        measures, self._recorder.measures = self._recorder.measures, False
        ir.fixed_point(self.differs, after)
        self._recorder.measures = measures

    def first(self) -> list[Twin]:
        """The first carries, as two arrays each where the runs may differ."""
        return self._alike(self.start)

    def begin(self, carry: list[Twin]) -> list[Twin]:
        """The carries at the start of a trip, each a node of its own if it may differ."""
        # A loop may trace its body more than once; what was recorded before is void.
        del self._recorder.nodes[self._begin :]
        carried = [t if t.node is None else self._as_node(i, t) for i, t in enumerate(carry)]
        self.carried = [twin.node for twin in carried]
        return carried

    def _as_node(self, i: int, twin: Twin) -> Twin:
        node = Node(self._site, "carry", ir.dtype_of(self._eqn.outvars[i]), 1, (), rounds=False, adds=True)
        return twin._replace(node=self._recorder.add(node, twin.half, twin.exact, twin.exact))

    def end(self, results: list[Twin]) -> list[Twin]:
        """The carries after a trip, as two arrays each where the runs may differ."""
        self.results = results
        return self._alike(results)

    def last(self, carry: list[Twin]) -> list[Twin]:
        """The results of the scan; gives the nodes of carries their sources."""
        nodes = self._recorder.nodes
        for number, begun, result in zip(self.carried, self.start, self.results, strict=True):
            if number is not None:
                # Its place is that of what makes it in every trip, so that it is in the same module.
                made = nodes[number if result.node is None else result.node]
                sources = tuple(n for n in (begun.node, result.node) if n is not None)
                nodes[number] = dataclasses.replace(nodes[number], site=made.site, sources=sources)
        return [Twin(*pair[:2], made.node) for pair, made in zip(carry, self.results, strict=True)]

    def _alike(self, carries: Sequence[Twin]) -> list[Twin]:
        """Carries, before or after a trip, in the same structure and dtypes."""
        return [
            Twin(held(twin.half, var), twin.exact, _A_NODE) if two else same(twin.exact)
            for twin, var, two in zip(carries, self._eqn.outvars, self.differs, strict=False)
        ]


#: Stands for the node of a carry, which is another one in each trip.
_A_NODE = -1


def cond(evaluation: Any, eqn: Any, twins: Sequence[Twin], site: Site) -> list[Twin]:
    """The results of a cond or switch.

    They inherit what was computed inside where both runs took the same branch. Where they did not, their
    whole difference is introduced here: what is inside cannot be compared.
    """
    index, *operands = twins
    runs, nodes, nothing, recorder = [], [], dict[int, Measured](), evaluation.recorder
    # What is measured must be known before any branch is put together.
    for jaxpr in control_flow.branches(eqn):

        def branch(operands: list[Twin], jaxpr: Any = jaxpr) -> Any:
            results, measured = evaluation.inside(jaxpr, lambda: operands, site)
            nodes.append([twin.node for twin in results])
            return _pairs(eqn, results), measured

        run, (_, measured) = control_flow.traced_once(branch, operands)
        runs.append(run)
        nothing |= jax.tree.map(ir.zeros, measured)

    def taken(run: Callable[..., Any]) -> Callable[..., Any]:
        def function(operands: list[Twin]) -> Any:
            pairs, measured = run(operands)
            return pairs, nothing | measured

        return function

    def each_its_own(operands: list[Twin]) -> Any:
        both = [index, *operands]
        exacts = replay_equation(eqn, [twin.exact for twin in both])
        return _pairs(eqn, map(Twin, as_written(eqn, both), exacts)), nothing

    functions, number, apart = list(map(taken, runs)), index.exact, None
    if index.node is not None:
        apart = index.half != index.exact
        number = jnp.where(apart, len(functions), number)
        functions.append(each_its_own)
    pairs, found = lax.switch(number, functions, operands)
    recorder.measured.update(found)

    def joined(half: Any, exact: Any, var: Any, sources: Sequence[int | None]) -> Twin:
        inside = tuple(dict.fromkeys(node for node in sources if node is not None))
        if not inside and apart is None:
            return same(exact)
        wide = half if apart is None else jnp.where(apart, exact, to_float32(half))
        note, dtype = "the two runs take different branches", ir.dtype_of(var)
        node = Node(site, eqn.primitive.name, dtype, 1, inside, apart is not None, True, note)
        return Twin(half, exact, recorder.add(node, half, wide, exact))

    rows = zip(pairs, eqn.outvars, zip(*nodes, strict=True), strict=True)
    return [joined(half, exact, var, sources) for (half, exact), var, sources in rows]


def _pairs(eqn: Any, twins: Any) -> list[tuple[Any, Any]]:
    """Results in both runs, in the same dtypes from every branch."""
    return [(held(twin.half, var), twin.exact) for twin, var in zip(twins, eqn.outvars, strict=True)]
