"""Compares a traced program with its float32 replay, in one compiled function."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.jaxpr.compat import open_jaxpr
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.drift.recorder import LEAST, Errors, Measured, Node, Recorder, squares
from jmp_policy._src.report.drift.twin import Twin, same
from jmp_policy._src.report.drift.twin_evaluation import TwinEvaluation


class Compared(NamedTuple):
    """One result of a program, in both runs; each of shape ().

    Args:
      error: sum of the squared errors.
      exact, half: sums of the squares of both.
      largest: largest absolute error.
    """

    error: Any
    exact: Any
    half: Any
    largest: Any

    @property
    def cosine(self) -> Any:
        """Returns the cosine of the angle between both runs, since |a - b|^2 is |a|^2 + |b|^2 - 2 ab."""
        return (self.exact + self.half - self.error) / (2 * (self.exact * self.half) ** 0.5)


class Comparison:
    """The two runs of a program as a function of its arguments.

    Args:
      jaxpr: closed.
      detail: "operation" to measure everything at each operation, "module" where values leave modules,
        "result" for nothing but the results.
      quick: whether to measure in less time. Then `is_reliable` says whether it has to be done again without.

    Attributes:
      nodes: values at which the runs may differ.
      results: for each result of the program its node, or None where the runs cannot differ.
    """

    def __init__(self, jaxpr: Any, detail: str, *, quick: bool = False):
        self._jaxpr, self._every = jaxpr, detail == "operation"
        self._errors = Errors(quick)
        types = [var.aval for var in open_jaxpr(jaxpr).invars]
        self.nodes: list[Node] = []
        self.results: list[int | None] = []

        def trace(*arrays: Any) -> None:
            self._run(arrays, {})

        jax.eval_shape(trace, *types)
        wanted = {"operation": _of_operations, "module": _of_modules}.get(detail)
        self._wanted = wanted(self.nodes, self.results) if wanted else {}

    def __call__(self, arrays: Sequence[Any]) -> Any:
        """Returns what was measured, for each result and by node, and the first result in float32."""
        outs, recorder = self._run(arrays, self._wanted)
        measured = recorder.measured
        known = {number: measured[number] for number in measured.keys() - recorder.counted_often}
        return [self._compared(twin, known) for twin in outs], measured, outs[0].exact if outs else None

    def is_reliable(self, compared: Sequence[Compared], measured: Mapping[int, Measured]) -> bool:
        """Returns whether quick measurements, on the host, are those that slow ones would be."""
        finite = all(np.isfinite(found).all() for found in jax.tree.leaves((compared, measured)))
        exact = [np.asarray(at.exact) for at in (*measured.values(), *compared) if at.exact is not None]
        return finite and not any(((x > 0) & (x < LEAST)).any() for x in exact)

    def unit_of(self, number: int) -> float:
        """Returns what the errors of a node are multiplied by when they are measured."""
        return self._errors.unit(self.nodes[number].site.backward)

    def _compared(self, twin: Twin, measured: Mapping[int, Measured]) -> Compared:
        if not jnp.issubdtype(jnp.result_type(twin.exact), jnp.inexact):
            zero = jnp.zeros((), jnp.float32)
            error = self._errors.difference(twin.half, twin.exact)
            return Compared(squares(error), zero, zero, jnp.max(jnp.abs(error), initial=0.0))
        half = squares(self._errors.finite(twin.half))
        node = twin.node
        at = None if node is None else measured.get(node)
        is_whole = at is not None and None not in (at.total, at.exact, at.largest)
        if node is not None and at is not None and is_whole and jnp.shape(at.total) == ():
            # The gradient of a matrix is often a transpose of what was measured: slow to add up once more.
            unit = self.unit_of(node)
            return Compared(at.total / unit**2, at.exact / unit**2, half, at.largest / unit)
        error, exact = self._errors.difference(twin.half, twin.exact), self._errors.finite(twin.exact)
        return Compared(squares(error), squares(exact), half, jnp.max(jnp.abs(error), initial=0.0))

    def _run(self, arrays: Sequence[Any], wanted: Mapping[int, set[str]]) -> tuple[list[Twin], Recorder]:
        recorder = Recorder(wanted, self._errors)
        outs = TwinEvaluation(recorder, self._every).run(
            self._jaxpr, [same(array) for array in arrays], Site()
        )
        self.nodes, self.results = recorder.nodes, [twin.node for twin in outs]
        return outs, recorder


def _of_operations(nodes: Sequence[Node], results: Sequence[int | None]) -> dict[int, set[str]]:
    """Returns what is measured of which nodes: everything of all that results depend on."""
    return {number: set(_EVERYTHING) for number in _used(nodes, results)}


def _of_modules(nodes: Sequence[Node], results: Sequence[int | None]) -> dict[int, set[str]]:
    """Returns what is measured of which nodes: what shares take, and everything of what leaves modules."""
    used = _used(nodes, results)
    wanted: dict[int, set[str]] = defaultdict(set)
    for number in used:
        node = nodes[number]
        if node.rounds:
            wanted[number] |= {"introduced", "inherited", "exact"}
        if len(node.sources) > 1:
            for source in node.sources:
                is_mask = node.adds and not is_floating(nodes[source])
                wanted[source] |= _error_of(nodes[source]) | (set() if is_mask else {"exact"})
    for number in _leaving(nodes, results) & used:
        wanted[number] |= _EVERYTHING
    for number in used:
        # What a carry is at the start of a trip was measured at the end of the one before.
        if nodes[number].operation == "carry" and number in wanted:
            for source in nodes[number].sources:
                if source > number:
                    wanted[source] |= (wanted[number] - {"total"}) | _error_of(nodes[source])
    return dict(wanted)


_EVERYTHING = frozenset(Measured._fields)


def _error_of(node: Node) -> set[str]:
    """Returns which fields tell the error of a node."""
    return {"introduced", "inherited"} if node.rounds else {"total"}


def _used(nodes: Sequence[Node], results: Sequence[int | None]) -> set[int]:
    """Returns the nodes that results depend on."""
    used: set[int] = set()
    ahead = {number for number in results if number is not None}
    while ahead:
        used |= ahead
        ahead = {source for number in ahead for source in nodes[number].sources} - used
    return used


def _leaving(nodes: Sequence[Node], results: Sequence[int | None]) -> set[int]:
    """Returns the results, and the values that another module reads, or the other pass.

    A forward value that only the backward pass reads is left out where its module has others.
    """
    found = {number for number in results if number is not None}
    only_backward: set[int] = set()
    for node in nodes:
        for source in node.sources:
            if group_of(node) != group_of(nodes[source]):
                is_other_pass = node.site.backward and not nodes[source].site.backward
                (only_backward if is_other_pass else found).add(source)
    with_others = {group_of(nodes[number]) for number in found if is_floating(nodes[number])}
    return found | {n for n in only_backward if group_of(nodes[n]) not in with_others}


def is_floating(node: Node) -> bool:
    """Returns whether the errors of a node are those of numbers: comparisons are right or wrong."""
    return jnp.issubdtype(node.dtype, jnp.inexact)


def group_of(node: Node) -> tuple[str, bool]:
    """Returns the module that a node is in, and whether it is in the backward pass."""
    return node.site.path, node.site.backward
