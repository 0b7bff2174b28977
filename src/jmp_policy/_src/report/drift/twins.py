"""A value in two runs of a program, as it was written and in float32, and the loops and branches between.

Loops and branches are where the two runs may go different ways.
A scan has as many trips in both runs, and what is measured in it is known for each trip. The trips of a while
loop may be counted by values that differ. Both runs go on together while both of them go on, and what is
measured is added up. What is left to the one that has more trips it does alone.

The index of a branch may differ, too. Then one more branch is there for the case that both runs take
different ones; it gives the results of both, and measures nothing::

    switch(index.half if index.half == index.exact else the last,
           first branch on twins, second branch on twins, ..., each run its own branch)

Where the two runs went different ways, their whole difference is introduced by the loop or branch itself.
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
from jmp_policy._src.report.drift.recorder import Node, Recorder, Stack


class Twin(NamedTuple):
    """A value in both runs. As a pytree: `half` and `exact` where they may differ, else one of them.

    Args:
      half: as the program computes it, in the dtype that it was traced in; float32 where both are one.
      exact: in float32; the very same object where the two cannot differ.
      node: number of the node that it is; None where the two cannot differ.
      wide: what float32 gives for the half values that enter its region; None where it is in none.
      region: module, line and direction of the operations that are measured as one.
      lost: what rounding to float8 lost in its region, as `lost_in_float8` counts it; None without float8.
    """

    half: Any
    exact: Any
    node: int | None = None
    wide: Any = None
    region: Any = None
    lost: Any = None


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


def result_of(
    recorder: Recorder, eqn: Any, site: Site, i: int, twin: Twin, sources: Sequence[int | None],
    apart: Any, note: str,
) -> Twin:  # fmt: skip
    """A result of a branch or loop as a node, if the two runs may differ in it.

    It inherits what was computed inside where both runs went the same way. Where they did not, their whole
    difference is introduced here: what is inside cannot be compared.

    Args:
      recorder, eqn, site: where to note it, and which operation it is.
      i: which of its results.
      twin: its values in both runs.
      sources: the nodes that it may be; None for values that cannot differ.
      apart: whether the two runs went different ways; None if they cannot.
      note: what to say then.
    """
    inside = tuple(dict.fromkeys(node for node in sources if node is not None))
    if not inside and apart is None:
        return same(twin.exact)
    var = eqn.outvars[i]
    half = held(twin.half, var)
    node = Node(site, eqn.primitive.name, ir.dtype_of(var), 1, inside, apart is not None, True, note)
    number = recorder.add(node)
    wide = half if apart is None else jnp.where(apart, twin.exact, to_float32(half))
    recorder.measure(number, half, wide, twin.exact)
    return Twin(half, twin.exact, number)


class TwinCarries(Carries):
    """The carries of a loop. At the start of a trip each that may differ is a node of its own.

    Args:
      evaluation: the `comparison.TwinEvaluation` that evaluates the body.
      eqn, site: its equation, and where it is.
      loop: its operands.

    Attributes:
      differs: for each carry, whether the two runs may differ in it.
      carried: for each carry, its node at the start of a trip.
      results: the carries at the end of a trip.
    """

    def __init__(self, evaluation: Any, eqn: Any, loop: control_flow.Loop, site: Site):
        super().__init__(loop.start)
        self._evaluation, self._recorder, self._eqn, self._loop = evaluation, evaluation.recorder, eqn, loop
        self._outside, self._site = site, evaluation.in_loop(eqn, site)
        self._is_scan = loop.test is None
        self.differs = [twin.node is not None for twin in self.start]
        self.carried: list[int | None] = []
        self.results: list[Twin] = []
        self._begin = len(self._recorder.nodes)

    def settle(self, trial: Callable[[], Any]) -> None:
        """Sets `differs`: what differs after a trip differs at its start."""

        def after(differs: list[bool]) -> list[bool]:
            self.differs = differs
            with self._recorder.forgetting():
                # A new function each time: JAX would not trace the same one again.
                jax.eval_shape(lambda: trial())
            return [a or b.node is not None for a, b in zip(differs, self.results, strict=True)]

        ir.fixed_point(self.differs, after)

    def first(self) -> list[Twin]:
        """The first carries, as two arrays each where the runs may differ."""
        return self._alike(self.start)

    def begin(self, carry: list[Twin]) -> list[Twin]:
        """The carries as nodes of the trip."""
        # A loop may trace its body more than once; what was recorded before is void.
        del self._recorder.nodes[self._begin :]
        carried = self.as_nodes(carry)
        self.carried = [twin.node for twin in carried]
        return carried

    def as_nodes(self, carry: list[Twin]) -> list[Twin]:
        """The carries at the start of a trip, each a node of its own if it may differ."""
        return [self._as_node(i, t) if t.node is not None else t for i, t in enumerate(carry)]

    def _as_node(self, i: int, twin: Twin) -> Twin:
        node = Node(self._site, "carry", ir.dtype_of(self._eqn.outvars[i]), 1, (), rounds=False, adds=True)
        number = self._recorder.add(node)
        self._recorder.measure(number, twin.half, twin.exact, twin.exact)
        return Twin(twin.half, twin.exact, number)

    def end(self, results: list[Twin]) -> list[Twin]:
        """The carries after a trip, as two arrays each where the runs may differ."""
        self.results = results
        return self._alike(results)

    def last(self, carry: list[Twin]) -> list[Twin]:
        """The results of the loop."""
        self._connect()
        if not self._is_scan:
            return self._last_of_while(carry)
        return [Twin(*pair[:2], made.node) for pair, made in zip(carry, self.results, strict=True)]

    def _connect(self) -> None:
        """Gives the nodes of carries their sources: the first carry, and what a trip makes of it."""
        nodes = self._recorder.nodes
        for number, begun, result in zip(self.carried, self.start, self.results, strict=True):
            if number is not None:
                # Its place is that of what makes it in every trip, so that it is in the same module.
                made = nodes[number if result.node is None else result.node]
                sources = tuple(n for n in (begun.node, result.node) if n is not None)
                nodes[number] = dataclasses.replace(nodes[number], site=made.site, sources=sources)

    def goes_on(self, carry: list[Twin]) -> Twin:
        """Whether a while loop has another trip, in both runs."""
        with self._recorder.forgetting():
            operands = [*self._loop.tested, *self.as_nodes(carry)]
            (found,) = self._evaluation.run(self._loop.test, operands, self._site)
        return found

    def _last_of_while(self, carry: list[Twin]) -> list[Twin]:
        """The results of a while loop, after each run has done the trips that it has more of."""
        loop, goes_on, apart = self._loop, self.goes_on(carry), None
        final = [Twin(twin.half, twin.exact) for twin in carry]
        if goes_on.node is not None:
            apart = goes_on.half | goes_on.exact
            rest = [*loop.tested, *loop.fixed, *final]
            exacts = replay_equation(self._eqn, [twin.exact for twin in rest])
            final = list(map(Twin, as_written(self._eqn, rest), exacts))
        note = "one of the two runs takes more trips"
        where = self._recorder, self._eqn, self._outside
        return [
            result_of(*where, i, twin, (begun.node, made.node), apart, note)
            for i, (twin, begun, made) in enumerate(zip(final, self.start, self.results, strict=True))
        ]

    def _alike(self, carries: Sequence[Twin]) -> list[Twin]:
        """Carries, before or after a trip, in the same structure and dtypes."""
        return [
            Twin(held(twin.half, var), twin.exact, _A_NODE) if two else same(twin.exact)
            for twin, var, two in zip(carries, self._eqn.outvars, self.differs, strict=False)
        ]


#: Stands for the node of a carry, which is another one in each trip.
_A_NODE = -1


def cond(evaluation: Any, eqn: Any, twins: Sequence[Twin], site: Site) -> list[Twin]:
    """The results of a cond or switch."""
    index, *operands = twins
    branches = [_Branch(evaluation, eqn, jaxpr, site, operands) for jaxpr in control_flow.branches(eqn)]
    nothing = [branch.nothing for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def function(operands: list[Twin]) -> Any:
            pairs, measured = branches[number].run(operands)
            return pairs, [*nothing[:number], measured, *nothing[number + 1 :]]

        return function

    def each_its_own(operands: list[Twin]) -> Any:
        both = [index, *operands]
        exacts = replay_equation(eqn, [twin.exact for twin in both])
        return _pairs(eqn, map(Twin, as_written(eqn, both), exacts)), nothing

    functions, number, apart = [taken(i) for i in range(len(branches))], index.exact, None
    if index.node is not None:
        apart = index.half != index.exact
        number = jnp.where(apart, len(functions), number)
        functions.append(each_its_own)
    pairs, found = lax.switch(number, functions, operands)
    for stack in found:
        evaluation.recorder.measured.update(stack.measured())
    where, note = (evaluation.recorder, eqn, site), "the two runs take different branches"
    return [
        result_of(*where, i, Twin(*pair), [branch.nodes[i] for branch in branches], apart, note)
        for i, pair in enumerate(pairs)
    ]


class _Branch:
    """One branch, traced: what is measured must be known before any branch is put together.

    Attributes:
      run: function of the operands to the results in both runs, and what was measured.
      nodes: of its results.
      nothing: what is measured in it where another one is taken.
    """

    def __init__(self, evaluation: Any, eqn: Any, jaxpr: Any, site: Site, operands: list[Twin]):
        self.nodes: list[int | None] = []

        def branch(operands: list[Twin]) -> Any:
            results, measured = evaluation.inside(jaxpr, lambda: operands, site)
            self.nodes = [twin.node for twin in results]
            return _pairs(eqn, results), Stack(measured)

        self.run, types = control_flow.traced_once(branch, operands)
        self.nothing = jax.tree.map(ir.zeros, types[1])


def _pairs(eqn: Any, twins: Any) -> list[tuple[Any, Any]]:
    """Results in both runs, in the same dtypes from every branch."""
    return [(held(twin.half, var), twin.exact) for twin, var in zip(twins, eqn.outvars, strict=True)]
