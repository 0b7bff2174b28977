"""Compares a traced program with its float32 replay, in one compiled function."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_policy._src.jaxpr.compat import open_jaxpr
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.drift.recorder import Node, Recorder, difference, squares
from jmp_policy._src.report.drift.twin_evaluation import Twin, TwinEvaluation, same


class Compared(NamedTuple):
    """One result of a program, in both runs; each of shape ().

    Args:
      error: sum of the squared errors.
      exact, half: sums of the squares of both.
      product: sum of their products.
      largest: largest absolute error.
      sum: sum of the float32 values; of a loss its value.
    """

    error: Any
    exact: Any
    half: Any
    product: Any
    largest: Any
    sum: Any


class Comparison:
    """The two runs of a program as a function of its arguments.

    Args:
      jaxpr: closed.
      detail: "operation" to measure everything at each operation, "module" where values leave modules,
        "result" for nothing but the results.

    Attributes:
      nodes: values at which the runs may differ.
      results: for each result of the program its node, or None where the runs cannot differ.
    """

    def __init__(self, jaxpr: Any, detail: str):
        self._jaxpr, self._every = jaxpr, detail == "operation"
        types = [var.aval for var in open_jaxpr(jaxpr).invars]
        self.nodes: list[Node] = []
        self.results: list[int | None] = []

        def trace(*arrays: Any) -> None:
            self._run(arrays, {})

        jax.eval_shape(trace, *types)
        self._wanted = {} if detail == "result" else _wanted(self.nodes, self.results, self._every)

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """Returns what was measured: for each result, and by node. Can be traced."""
        outs, measured = self._run(arrays, self._wanted)
        return list(map(_compared, outs)), measured

    def _run(self, arrays: Sequence[Any], wanted: dict[int, bool]) -> tuple[list[Twin], Any]:
        recorder = Recorder(wanted)
        outs = TwinEvaluation(recorder, self._every).run(
            self._jaxpr, [same(array) for array in arrays], Site()
        )
        self.nodes, self.results = recorder.nodes, [twin.node for twin in outs]
        return outs, recorder.measured


def _wanted(nodes: Sequence[Node], results: Sequence[int | None], every: bool) -> dict[int, bool]:
    """Returns which nodes are measured, and of which everything is."""
    used: set[int] = set()
    ahead = {number for number in results if number is not None}
    while ahead:
        used |= ahead
        ahead = {source for number in ahead for source in nodes[number].sources} - used
    wanted = {i: every for i in used if nodes[i].rounds or every}
    for node in map(nodes.__getitem__, sorted(used)):
        for source in node.sources:
            if len(node.sources) > 1:
                wanted.setdefault(source, False)
            if group_of(node) != group_of(nodes[source]):
                wanted[source] = True
    wanted.update({number: True for number in results if number is not None})
    return wanted


def group_of(node: Node) -> tuple[str, bool]:
    """Returns the module that a node is in, and whether it is in the backward pass."""
    return node.site.path, node.site.backward


def _compared(twin: Twin) -> Compared:
    error = difference(twin.half, twin.exact)
    half, exact = _finite(twin.half), _finite(twin.exact)
    largest = jnp.max(jnp.abs(error), initial=0.0)
    product = jnp.sum(jnp.real(half * jnp.conj(exact)))
    return Compared(squares(error), squares(exact), squares(half), product, largest, jnp.sum(jnp.real(exact)))


def _finite(x: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        return jnp.zeros((), jnp.float32)
    return jnp.where(jnp.isfinite(x), x, 0)
