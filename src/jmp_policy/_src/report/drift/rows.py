"""Makes rows of a report from what was measured at the nodes of a program."""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.report.drift.comparison import Comparison, carried_on, group_of, is_floating
from jmp_policy._src.report.drift.findings import (
    ACTIVATION_GRADIENTS,
    OUTPUTS,
    OVERFLOWS,
    PARAMETER_GRADIENTS,
    DriftRow,
)
from jmp_policy._src.report.drift.recorder import Measured, Node, on_host, over_all_trips, whole_error

#: Of what goes round in a loop, this is lost in each trip, so that the sum over all trips is finite.
_LOST = 1e-13

#: The part of a value's error from which on infinite values that make some of it 0 are a cause.
_OF_VANISHED = 0.1

#: The relative error up to which a loop is as it should be, though it is not that of independent roundings.
_OF_LOOP = 0.01


class ErrorBudget:
    """Says how much of the error of a result was introduced where.

    The errors that operations introduce are taken for independent, so that their squares add up, and small,
    so that each operation passes its operands' errors on in proportion. Then the square of an error flows
    back from a result to where it was made. At each operation the part that it introduced stays, in the
    proportion that was measured; the rest goes on to its operands::

        y = op(a, b)       stays:     introduced(y)^2 / (introduced(y)^2 + inherited(y)^2)
                           to a:      the rest times error(a)^2 / (error(a)^2 + error(b)^2)

    Errors are absolute where the operation adds its operands, and relative to the operand where it multiplies
    them. That is the law of propagation of uncertainty (Guide to the Expression of Uncertainty in
    Measurement, 5.1.2), with the sensitivities measured. All shares together are 1. Errors of one cause that
    arrive by two ways, and cancel or reinforce one another, are what it does not see.

    Args:
      nodes: of a program.
      measured: of those at which errors are introduced or meet.
      is_finite: whether the errors of all results are finite: then one that is infinite where errors add up,
        as that of a mask of -1e9, which becomes -inf, came through beside others only if it makes something
        0 that is not: as `rsqrt` of an infinite variance does. Otherwise the error was introduced where the
        first value became infinite, or NaN, also if that is for what it was given.
    """

    def __init__(self, nodes: Sequence[Node], measured: Mapping[int, Measured], is_finite: bool):
        self._nodes, self._measured, self._is_finite = nodes, measured, is_finite
        self.is_infinite_cause, self._vanishing = self._infinite_causes()
        self._begins = self._beginning_in_loops()
        self._introduced = np.array([self._introduced_part(i) for i in range(len(nodes))])
        self._edges = [
            (number, source, (1 - here) * part)
            for number, here in enumerate(self._introduced)
            if nodes[number].sources and here != 1
            for source, part in self._split(number).items()
            if part
        ]

    def _at(self, number: int) -> Measured:
        return self._measured.get(number, _NOTHING)

    def _infinite_causes(self) -> tuple[list[bool], set[int]]:
        """Whether each node's error is infinite and matters; and the nodes that it makes zero."""
        causes, vanishing = [not self._is_finite] * len(self._nodes), set[int]()
        worst = [self._vanished_part(number) for number in range(len(causes))]  # Here, or behind it.
        for number in reversed(range(len(causes))):
            at, sources = self._at(number), self._nodes[number].sources
            for source in sources:
                if self._at(source).vanished and not self._nodes[number].adds:
                    worst[source] = max(worst[source], worst[number])
            infinite = [s for s in sources if np.isinf(self._at(s).total)]
            if infinite and (causes[number] if np.isinf(at.total) else worst[number] > _OF_VANISHED):
                if self._is_finite and not np.isinf(at.total):
                    vanishing.add(number)
                for source in infinite:
                    causes[source] = True
        return causes, vanishing

    def _beginning_in_loops(self) -> set[int]:
        """Operations whose results are the first infinite ones of a loop, though later trips read them."""
        from scipy import sparse

        infinite = {number for number, at in self._measured.items() if np.isinf(at.total)}
        edges = [(s, number) for number in infinite for s in self._nodes[number].sources if s in infinite]
        if not edges:
            return set()
        ends, size = np.transpose(edges), len(self._nodes)
        graph = sparse.csr_matrix((np.ones(len(edges)), ends), shape=(size, size))
        _, loop_of = sparse.csgraph.connected_components(graph, connection="strong")
        entered = {loop_of[number] for source, number in edges if loop_of[source] != loop_of[number]}
        inside = {number for source, number in edges if loop_of[source] == loop_of[number]}
        return {n for n in inside if np.isinf(self._at(n).introduced) and loop_of[n] not in entered}

    def _vanished_part(self, number: int) -> float:
        """Which part of a node's error is of elements that are 0 in the half run only."""
        at = self._at(number)
        return min(at.vanished / at.total, 1.0) if at.vanished and 0 < at.total < math.inf else 0.0

    def shares(self, results: Sequence[int | None], squares: Sequence[float]) -> np.ndarray:
        """How much of the error of all results was introduced at each node.

        Args:
          results: their nodes; None for those without an error.
          squares: the square of each one's error, as it counts in the whole.

        Returns:
          An array with one share per node. They add up to 1, but for nodes whose errors were too small to
          measure.
        """
        start = self._leaving(results, squares)
        found = self._solve(start, self._edges, backward=True) * self._introduced
        if found.sum() < start.sum() / 2:
            # Of an error that grows fast in a loop, next to nothing is there in the first trips.
            parts = Counter(number for number, *_ in self._edges)
            edges = [
                (number, source, 1 / parts[number] if self._nodes[number].operation == "carry" else part)
                for number, source, part in self._edges
            ]
            found = self._solve(start, edges, backward=True) * self._introduced
        return found

    def turned(self, results: Sequence[int | None], squares: Sequence[float]) -> float:
        """How much of the error of all results comes through decisions that rounding turns.

        Where its operand has another sign, the derivative of a relu is wrong by its own size, whatever the
        error of that operand. So is what a maximum, or the index of one, picks.
        """
        if not self._is_finite:
            return 0.0
        passing = self._solve(self._leaving(results, squares), self._edges, backward=True)
        decisions = (passing[number] * part for number, by, part in self._edges if self._decides(by, number))
        return min(float(sum(decisions)), 1.0)

    def _decides(self, source: int, number: int) -> bool:
        """Whether a value decides what another one is, and is no part of it."""
        node, by = self._nodes[number], self._nodes[source]
        if not is_floating(node) or not is_floating(by):
            return is_floating(node)
        return node.operation in _JUMPS or (node.operation == _POOLING and not by.site.backward)

    def _leaving(self, results: Sequence[int | None], squares: Sequence[float]) -> np.ndarray:
        """The part of the whole error that each node has as a result."""
        found = np.zeros(len(self._nodes))
        if any(map(math.isinf, squares)):
            squares = [float(math.isinf(square)) for square in squares]
        whole = sum(squares)
        for number, square in zip(results, squares, strict=True):
            if number is not None and whole:
                found[number] += square / whole
        return found

    def introduced_within(self, group: Sequence[object]) -> np.ndarray:
        """For each node which part of its error was introduced in the node's own group.

        Args:
          group: of each node.
        """
        edges = [edge for edge in self._edges if group[edge[0]] == group[edge[1]]]
        return self._solve(self._introduced, edges, backward=False)

    def _solve(
        self, start: np.ndarray, edges: Sequence[tuple[int, int, float]], *, backward: bool
    ) -> np.ndarray:
        """Solves x = start + A x, in which A has what each node inherits from each of its sources."""
        from scipy import sparse
        from scipy.sparse import linalg

        size = len(start)
        if not edges:
            return start
        rows, columns, values = (np.array(part) for part in zip(*edges, strict=True))
        places = (columns, rows) if backward else (rows, columns)
        matrix = sparse.csc_matrix((values * (1 - _LOST), places), shape=(size, size))
        return np.asarray(linalg.spsolve(sparse.identity(size, format="csc") - matrix, start))

    def _introduced_part(self, number: int) -> float:
        here, before = self._at(number).introduced, self._at(number).inherited
        if np.isinf(before):
            sources = [whole_error(self._at(source)) for source in self._nodes[number].sources]
            is_first = number in self._begins or not any(map(np.isinf, sources))
            return float(self.is_infinite_cause[number] and is_first)
        if not self._nodes[number].rounds or not here:
            return 0.0
        return 1.0 if np.isinf(here) else here / (here + before)

    def _split(self, number: int) -> dict[int, float]:
        """How what a node inherits is split among its sources."""
        node, sources = self._nodes[number], self._nodes[number].sources
        errors, at = self._absolute_errors(sources), self._at(number)
        is_finite = all(map(math.isfinite, (at.total, at.turned, *errors)))
        if node.operation == "select_n" and self._decides(sources[0], number) and is_finite:
            whole = sum(errors[1:]) or 1.0
            errors = [at.turned, *(max(at.total - at.turned, 0.0) * error / whole for error in errors[1:])]
        if not node.adds:
            errors = [self._relative(source, self._at(source).total) for source in sources]
            if node.operation == _POOLING and len(sources) == 2:
                # What is more than the cotangent's error is of other elements than float32 picks.
                errors[1] = max(self._relative(number, self.inherited(number)) - errors[0], 0.0)
            zero, part = [source in self._vanishing for source in sources], self._vanished_part(number)
            if any(zero) and part:
                finite = [e if np.isfinite(e) else 0.0 for e in errors]
                rest, each = (1 - part) / (sum(finite) or 1.0), part / sum(zero)
                errors = [rest * e + each * is_zero for e, is_zero in zip(finite, zero, strict=True)]
        if len(errors) == 1 or not any(errors):
            errors = [1.0] * len(errors)
        if any(map(np.isinf, errors)):
            others = [0.0 if np.isinf(e) else e for e in errors]
            came_through = any(
                self.is_infinite_cause[s] for s, e in zip(sources, errors, strict=True) if np.isinf(e)
            )
            if not node.adds or came_through or not any(others):
                others = [float(np.isinf(e)) for e in errors]
            errors = others
        return {source: error / sum(errors) for source, error in zip(sources, errors, strict=True)}

    def _absolute_errors(self, operands: Sequence[int]) -> list[float]:
        """The errors of operands; where one decides wrongly, what is taken is off by its own size."""
        values = sum(self._at(number).exact for number in operands if is_floating(self._nodes[number]))
        errors = []
        for number in operands:
            error = self._at(number).total
            if values and not is_floating(self._nodes[number]):
                wrong = self._relative(number, error)
                error = wrong * values if wrong else 0.0  # The square of a mask of -1e30 is infinite.
            errors.append(error)
        return errors

    def inherited(self, number: int) -> float:
        """The sum of the squared errors that a node inherits; all where nothing is rounded."""
        at = self._at(number)
        return at.inherited if self._nodes[number].rounds else at.total

    def _relative(self, number: int, error: float) -> float:
        exact = self._at(number).exact
        if np.isinf(error):
            return np.inf
        return error / exact if exact else float(error > 0)


#: Of a node that was not measured.
_NOTHING = Measured(*[0.0] * len(Measured._fields))

#: What may stand between a product of the backward pass and the gradient of a parameter.
_PASSES_ON = frozenset(["neg", "carry", "cond"]).union(
    *map(HAVING.__getitem__, (Trait.MOVES, Trait.VIEW, Trait.BROADCASTS, Trait.ADDS))
)


_MOVES = HAVING[Trait.MOVES] | HAVING[Trait.VIEW]

#: Operations whose result jumps where their operand passes a number, and the gradient of max pooling.
_JUMPS, _POOLING = HAVING[Trait.DECIDES] - HAVING[Trait.COMPARISON], "select_and_scatter_add"


class Rows:
    """Rows of a report.

    Args:
      comparison: that was run.
      measured: what it gave by node, as arrays of the host.
      gradients: nodes of the gradients of the parameters.
      squares: of each result, its part in the squared error that the report is about.
      of_loss: the same of the error of the loss.
      names: of the arguments of the program.
    """

    def __init__(
        self,
        comparison: Comparison,
        measured: Mapping[int, Measured],
        gradients: Sequence[int | None],
        squares: Sequence[float],
        of_loss: Sequence[float],
        names: Sequence[str],
    ):
        self._names = names
        self._nodes, self._raw = comparison.nodes, on_host(measured, comparison.unit_of)
        self._measured = over_all_trips(self._raw)
        self._budget = ErrorBudget(self._nodes, self._measured, all(map(math.isfinite, squares)))
        self.shares = self._budget.shares(comparison.results, squares)
        self.turned = self._budget.turned(comparison.results, squares)
        self._loss_shares = self._budget.shares(comparison.results, of_loss)
        self._results = set(comparison.results)
        self._consumers: dict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(self._nodes):
            for source in node.sources:
                self._consumers[source].append(number)
        self._nodes = [self._where_it_is_for(number) for number in range(len(self._nodes))]
        self._is_gradient: dict[int | None, bool] = dict.fromkeys(gradients, True)
        for number in reversed(range(len(self._nodes))):
            self._is_gradient.setdefault(number, self._leads_to_gradients(number))

    def rows(self, by_operation: bool) -> tuple[DriftRow, ...]:
        """One row per module (outside of modules: line) and direction, or per operation, line, direction."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, node in enumerate(self._nodes):
            if number in self._measured and not (by_operation and node.operation == "carry"):
                key = (node.site.line, node.operation) if by_operation else group_of(node)
                groups[(node.site.path, self._direction(number), *key)].append(number)
        within = None if by_operation else self._budget.introduced_within([*map(group_of, self._nodes)])
        rows = []
        for (module, direction, *_), numbers in groups.items():
            shown = numbers if by_operation else self._leaving(numbers)
            # Nothing is to be told of a branch that is not taken.
            if any(np.any(value) for number in shown for value in self._measured[number]):
                rows.append(self._row(module, direction, shown, numbers, within))
        return tuple(rows)

    def expected(self, error: float) -> float:
        """What an error would be if every operation rounded its result once, at random.

        The error of rounding to nearest is uniform in (-u, u) times the value, for unit roundoff u: its
        variance is at most u^2 / 3 times the square. How much an operation's error matters in the end is
        known from its share. A while loop, of which the operations inside are not known, may be off by 1 %.
        So may a scan in which errors of trips have one sign, so that more adds up than their squares; beyond
        that it is a sum that stopped growing.
        """
        found, carried = 0.0, carried_on(self._nodes) if error > _OF_LOOP else set[int]()
        for number in map(int, np.flatnonzero(self.shares)):
            at, dtype = self._measured[number], self._nodes[number].dtype
            if self._nodes[number].operation == "while" and at.introduced:
                found += self.shares[number] * min(_OF_LOOP**2 * at.exact / at.introduced, 1.0)
            elif at.introduced and math.isfinite(at.introduced) and is_half(dtype):
                unit_roundoff = float(jnp.finfo(dtype).eps) / 2
                made = at.introduced
                if number in carried and math.isfinite(at.total):
                    made = max(made, at.total - at.inherited)
                found += self.shares[number] * unit_roundoff**2 / 3 * at.exact / made
            elif np.isinf(at.introduced) and not self._budget.is_infinite_cause[number]:
                found += self.shares[number]  # Its infinite values do no harm, and hide its roundings.
        return error * math.sqrt(max(found, 0.0)) if math.isfinite(error) else 0.0

    def _where_it_is_for(self, number: int) -> Node:
        """A node; a cast of a cotangent counts for the one module below whose cotangent it is.

        It is where the module's result was cast to float32, and gone if the module computes in float32.
        """
        node = self._nodes[number]
        if node.operation != "convert_element_type" or not (node.site.backward and is_half(node.dtype)):
            return node
        above, waiting, paths = f"{node.site.path}/", [number], list[list[str]]()
        while waiting:
            for consumer in self._consumers[waiting.pop()]:
                reader = self._nodes[consumer]
                if reader.site.path == node.site.path and reader.operation in _MOVES:
                    waiting.append(consumer)
                elif not reader.site.path.startswith(above):
                    return node
                else:
                    paths.append(reader.site.path.split("/"))
        alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
        path = "/".join(names[0] for names in alike)
        if len(path) < len(above):
            return node
        return dataclasses.replace(node, site=dataclasses.replace(node.site, path=path))

    def _leads_to_gradients(self, number: int) -> bool:
        """Whether a value of the backward pass is a parameter's gradient on its way out."""
        consumers = self._consumers[number]
        return (
            bool(consumers)
            and number not in self._results
            and self._nodes[number].site.backward
            and all(self._is_gradient.get(c) and self._nodes[c].operation in _PASSES_ON for c in consumers)
        )

    def _direction(self, number: int) -> str:
        if self._is_gradient[number]:
            return PARAMETER_GRADIENTS
        return ACTIVATION_GRADIENTS if self._nodes[number].site.backward else OUTPUTS

    def _leaving(self, numbers: Sequence[int]) -> list[int]:
        """The values that other modules read, of the same pass if any does; results too."""
        floating = [n for n in numbers if is_floating(self._nodes[n])]
        by_pass, by_module = [], []
        for number in floating:
            here = self._nodes[number]
            consumers = [self._nodes[c] for c in self._consumers[number]]
            others = [c for c in consumers if group_of(c) != group_of(here)]
            if number in self._results or any(c.site.backward == here.site.backward for c in others):
                by_pass.append(number)
            elif others:
                by_module.append(number)
        # What nobody else reads is what the module's own gradients are computed from.
        return by_pass or by_module or floating

    def _row(
        self,
        module: str,
        direction: str,
        shown: Sequence[int],
        counted: Sequence[int],
        within: np.ndarray | None,
    ) -> DriftRow:
        """Makes a row.

        Args:
          module, direction: what it is about.
          shown: nodes whose errors it shows.
          counted: nodes whose shares it has.
          within: of a module, which part of each node's error was introduced there; None for operations.
        """
        measured = [self._measured[n] for n in shown]
        total, exact = sum(at.total for at in measured), sum(at.exact for at in measured)
        if within is None:
            introduced = sum(at.introduced for at in measured)
            inherited = sum(map(self._budget.inherited, shown))
        else:
            introduced = sum(within[n] * self._measured[n].total for n in shown if within[n])
            inherited = max(total - introduced, 0.0) if math.isfinite(introduced) else 0.0
        # Of a module one operation is named: what spoils the loss may do nothing to the gradient.
        main = max(counted, key=lambda n: (self._weight([n]), self._relative(n)))
        node = self._nodes[main]
        alike = [n for n in counted if self._is_like(n, main)]
        # Not a mask: that of -1e9 becomes -inf.
        overflows = self._budget.is_infinite_cause[main] and np.isinf(self._measured[main].introduced)
        notes = [self._nodes[n].note for n in counted if self._measured[n].introduced]
        return DriftRow(
            module=module,
            operation=node.operation,
            line=node.site.line,
            direction=direction,
            introduced=_root(introduced, exact),
            inherited=_root(inherited, exact),
            total=_root(total, exact),
            largest=float(max(at.largest for at in measured)),
            share=_share(self.shares, counted),
            loss_share=_share(self._loss_shares, counted),
            dtype=str(node.dtype),
            terms=node.terms,
            trips=self._trips(shown),
            others=bool(2 * self._weight(alike) < self._weight(counted)),
            note=OVERFLOWS if overflows else next(filter(None, notes), ""),
            argument="" if node.argument is None else self._names[node.argument],
            flushed=self._lost(counted, 1),
            saturated=self._lost(counted, 2),
        )

    def _is_like(self, number: int, other: int) -> bool:
        here, there = self._nodes[number], self._nodes[other]
        return (here.operation, here.argument) == (there.operation, there.argument)

    def _weight(self, numbers: Sequence[int]) -> float:
        return sum(self.shares[n] + self._loss_shares[n] for n in numbers)

    def _lost(self, numbers: Sequence[int], place: int) -> tuple[float, float]:
        """Which share of the left and the right operands of float8 products is lost."""
        counts = np.zeros((2, 3)) + sum(self._measured[n].lost for n in numbers)
        left, right = np.divide(counts[:, place], counts[:, 0], out=np.zeros(2), where=counts[:, 0] > 0)
        return round(float(left), 6), round(float(right), 6)

    def _relative(self, number: int) -> float:
        at = self._measured[number]
        return _root(at.introduced, at.exact)

    def _trips(self, numbers: Sequence[int]) -> tuple[float, ...]:
        """The relative error in each trip of the scan that values are in; none outside of scans."""
        shapes = {np.shape(self._raw[n].exact) for n in numbers}
        if len(shapes) != 1 or shapes == {()}:
            return ()
        error = np.sum([whole_error(self._raw[n]) for n in numbers], axis=0)
        exact = np.sum([self._raw[n].exact for n in numbers], axis=0)
        return tuple(_root(e, x) for e, x in zip(np.ravel(error), np.ravel(exact), strict=True))


def _share(shares: np.ndarray, numbers: Sequence[int]) -> float:
    """The sum of the shares of nodes, to as many digits as shares have."""
    return round(float(sum(shares[n] for n in numbers)), 6)


def _root(error: float, exact: float) -> float:
    if not error:
        return 0.0
    return float(np.sqrt(error / exact)) if exact and math.isfinite(error) else math.inf
