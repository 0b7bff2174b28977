"""Evaluates branches on the values of both runs, and measures what is inside the one that is taken.

The index of the branch may be computed from values that differ. Then one more branch is there for the case
that both runs take different ones; it gives the results of both, and measures nothing::

    switch(index.half if index.half == index.exact else the last,
           first branch on twins, second branch on twins, ..., each run its own branch)

What is measured in a branch is zero where another one is taken.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.float32_replay import replay_equation
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.drift.recorder import Recorder, Stack
from jmp_policy._src.report.drift.twin import Run, Twin, as_written, held, nodes_of, packed, unpacked
from jmp_policy._src.report.drift.two_ways import result_of

_NOTE = "the two runs take different branches"


def is_opaque(eqn: Any) -> bool:
    """Returns whether branches can only be run as they are: those of other platforms, those that write."""
    return compat.platforms_of_branches(eqn) is not None or ir.has_references(eqn)


def cond(run: Run, recorder: Recorder, eqn: Any, twins: Sequence[Twin], site: Site) -> list[Twin]:
    """Returns the results of a cond or switch."""
    index, *operands = twins
    differs, numbers = nodes_of(operands)
    arrays = packed(operands, differs)
    branches = [_Branch(run, recorder, eqn, jaxpr, site) for jaxpr in eqn.params["branches"]]
    for branch in branches:
        branch.trace(arrays, lambda arrays: unpacked(arrays, differs, numbers))
    nothing = [branch.nothing for branch in branches]

    def taken(number: int) -> Callable[..., Any]:
        def function(arrays: Any) -> Any:
            pairs, stack = branches[number](arrays)
            return pairs, [*nothing[:number], stack, *nothing[number + 1 :]]

        return function

    def each_its_own(arrays: Any) -> Any:
        both = [index, *unpacked(arrays, differs, numbers)]
        exacts = replay_equation(eqn, [twin.exact for twin in both])
        halves = as_written(eqn, both)
        return _pairs(eqn, map(Twin, halves, exacts)), nothing

    functions, number, apart = [taken(i) for i in range(len(branches))], index.exact, None
    if index.node is not None:
        apart = index.half != index.exact
        number = jnp.where(apart, len(functions), number)
        functions.append(each_its_own)
    pairs, stacks = lax.switch(number, functions, arrays)
    for stack in stacks:
        recorder.measured.update(stack.measured())
    return [
        result_of(recorder, eqn, i, site, Twin(*pair), [b.nodes[i] for b in branches], apart, _NOTE)
        for i, pair in enumerate(pairs)
    ]


class _Branch:
    """One branch, as a function of arrays that were packed.

    Attributes:
      nodes: of its results.
      nothing: what is measured in it where another one is taken.
    """

    def __init__(self, run: Run, recorder: Recorder, eqn: Any, jaxpr: Any, site: Site):
        self._run, self._recorder, self._eqn, self._jaxpr, self._site = run, recorder, eqn, jaxpr, site
        self.nodes: list[int | None] = []

    def trace(self, arrays: Any, twins_of: Callable[[Any], list[Twin]]) -> None:
        """Evaluates it once: what is measured must be known before any branch is put together."""

        def on_arrays(arrays: Any) -> Any:
            with self._recorder.inside() as measured:
                results = self._run(self._jaxpr, twins_of(arrays), self._site)
            self.nodes = [twin.node for twin in results]
            return _pairs(self._eqn, results), Stack(measured)

        closed, types = jax.make_jaxpr(on_arrays, return_shape=True)(arrays)
        self._traced = jaxpr_as_fun(closed)
        self._structure = jax.tree.structure(types)
        self.nothing = jax.tree.map(ir.zeros, types[1])

    def __call__(self, arrays: Any) -> Any:
        return jax.tree.unflatten(self._structure, self._traced(*jax.tree.leaves(arrays)))


def _pairs(eqn: Any, twins: Any) -> list[tuple[Any, Any]]:
    """Returns results in both runs, in the same dtypes from every branch."""
    return [(held(twin.half, var), twin.exact) for twin, var in zip(twins, eqn.outvars, strict=True)]
