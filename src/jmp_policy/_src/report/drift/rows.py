"""Makes rows of a report from what was measured at the nodes of a program."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.report.drift.comparison import Comparison, group_of, is_floating
from jmp_policy._src.report.drift.findings import ACTIVATION_GRADIENTS, OUTPUTS, PARAMETER_GRADIENTS, DriftRow
from jmp_policy._src.report.drift.recorder import Measured, Node, on_host, over_all_trips

#: Of what goes round in a loop, this is lost in each trip, so that the sum over all trips is finite.
_LOST = 1e-9


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
    """

    def __init__(self, nodes: Sequence[Node], measured: Mapping[int, Measured]):
        self._nodes, self._measured = nodes, measured
        self._known: dict[int, dict[int, float]] = {}
        self._introduced = np.array([self._introduced_part(i) for i in range(len(nodes))])
        self._edges = [(i, *edge) for i in range(len(nodes)) for edge in self._split(i)]

    def error(self, number: int) -> float:
        """The sum of the squared errors of a node."""
        if number not in self._measured:
            return 0.0
        found = self._measured[number]
        return found.total if found.total else found.introduced + found.inherited

    def shares(self, weights: Mapping[int, float]) -> np.ndarray:
        """How much of an error was introduced at each node.

        Args:
          weights: by node, its share in the error; they add up to 1.

        Returns:
          An array with one share per node. They add up to 1, but for nodes whose errors were too small to
          measure.
        """
        start = np.zeros(len(self._nodes))
        for number, weight in weights.items():
            start[number] += weight
        arriving = self._solve(start, lambda i, j: True, backward=True)
        return arriving * self._introduced

    def introduced_within(self, group: Sequence[object]) -> np.ndarray:
        """For each node which part of its error was introduced in the node's own group.

        Args:
          group: of each node.
        """
        return self._solve(self._introduced, lambda i, j: group[i] == group[j], backward=False)

    def _solve(self, start: np.ndarray, follows: object, *, backward: bool) -> np.ndarray:
        """Solves x = start + A x, in which A has what each node inherits from each of its sources."""
        from scipy import sparse
        from scipy.sparse import linalg

        edges = [(i, j, w) for i, j, w in self._edges if follows(i, j)]  # type: ignore[operator]
        size = len(start)
        if not edges:
            return start
        rows, columns, values = (np.array(part) for part in zip(*edges, strict=True))
        places = (columns, rows) if backward else (rows, columns)
        matrix = sparse.csc_matrix((values * (1 - _LOST), places), shape=(size, size))
        return np.asarray(linalg.spsolve(sparse.identity(size, format="csc") - matrix, start))

    def _introduced_part(self, number: int) -> float:
        if not self._nodes[number].rounds or number not in self._measured:
            return 0.0
        here, before = self._measured[number].introduced, self._measured[number].inherited
        if np.isinf(before) or not here:
            return 0.0
        return 1.0 if np.isinf(here) else here / (here + before)

    def _split(self, number: int) -> list[tuple[int, float]]:
        """The sources of a node, with the part of its error that it inherits from each."""
        inherited = 1 - self._introduced[number]
        if not self._nodes[number].sources or not inherited:
            return []
        return [(source, inherited * part) for source, part in self._parts(number).items() if part]

    def _parts(self, number: int) -> dict[int, float]:
        """How what a node inherits is split among its sources; within a region, operation by operation."""
        if number in self._known:
            return self._known[number]
        node = self._nodes[number]
        operands = node.operands or tuple((source, False) for source in node.sources)
        errors = [self.error(operand) for operand, _ in operands]
        inner = [
            i for i, (operand, inside) in enumerate(operands) if inside and operand not in self._measured
        ]
        if node.adds and len(inner) == 1 and number in self._measured:
            # What the others leave of the whole.
            errors[inner[0]] = max(self._inherited(number) - sum(errors), 0.0)
        elif not node.adds:
            errors = [
                self._relative(o, self._inherited(o) if inside else self.error(o)) for o, inside in operands
            ]
        elif inner:
            outside = [self._nodes[o].sources if inside else (o,) for o, inside in operands]
            errors = [sum(self._relative(s, self.error(s)) for s in sources) for sources in outside]
        if len(errors) == 1 or not any(errors):
            errors = [1.0] * len(errors)
        if any(map(np.isinf, errors)):
            errors = [float(np.isinf(e)) for e in errors]
        whole, parts = sum(errors), dict.fromkeys(node.sources, 0.0)
        for (operand, inside), error in zip(operands, errors, strict=True):
            for source, part in (self._parts(operand) if inside else {operand: 1.0}).items():
                parts[source] += part * error / whole
        self._known[number] = parts
        return parts

    def _inherited(self, number: int) -> float:
        """The sum of the squared errors that a node inherits."""
        found = self._measured.get(number)
        if found is None:
            return 0.0
        return found.inherited if self._nodes[number].rounds else self.error(number)

    def _relative(self, number: int, error: float) -> float:
        exact = self._measured[number].exact if number in self._measured else 0.0
        if np.isinf(error):
            return np.inf
        return error / exact if exact else float(error > 0)


#: What may stand between a product of the backward pass and the gradient of a parameter.
_PASSES_ON = frozenset(["neg", "carry", "cond"]).union(
    *map(HAVING.__getitem__, (Trait.MOVES, Trait.VIEW, Trait.BROADCASTS, Trait.ADDS))
)


class Rows:
    """Rows of a report.

    Args:
      comparison: that was run.
      measured: what it gave by node, as arrays of the host.
      gradients: nodes of the gradients of the parameters.
      weights: by node, its share in the error that the report is about.
      loss_weights: the same of the loss.
    """

    def __init__(
        self,
        comparison: Comparison,
        measured: Mapping[int, Measured],
        gradients: Sequence[int],
        weights: Mapping[int, float],
        loss_weights: Mapping[int, float],
    ):
        self._nodes, self._raw = comparison.nodes, on_host(measured, comparison.unit_of)
        self._measured = over_all_trips(self._raw)
        self._budget = ErrorBudget(self._nodes, self._measured)
        self.shares = self._budget.shares(weights)
        self._loss_shares = self._budget.shares(loss_weights)
        self._results = {number for number in comparison.results if number is not None}
        self._consumers: dict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(self._nodes):
            for source in node.sources:
                self._consumers[source].append(number)
        self._is_gradient: dict[int, bool] = dict.fromkeys(gradients, True)
        for number in reversed(range(len(self._nodes))):
            self._is_gradient.setdefault(number, self._leads_to_gradients(number))

    def of_operations(self) -> tuple[DriftRow, ...]:
        """One row per operation, line and direction."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, node in enumerate(self._nodes):
            if number in self._measured and node.operation != "carry":
                direction = self._direction(number)
                groups[(node.site.path, node.site.line, node.operation, direction)].append(number)
        return tuple(
            self._row(key[0], key[3], numbers, False, numbers, self._sum(numbers, "introduced"))
            for key, numbers in groups.items()
            if self._ran(numbers)
        )

    def of_modules(self) -> tuple[DriftRow, ...]:
        """One row per module and direction."""
        within = self._budget.introduced_within(list(map(group_of, self._nodes)))
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, node in enumerate(self._nodes):
            if number in self._measured:
                groups[(node.site.path, self._direction(number))].append(number)
        rows = []
        for (module, direction), numbers in groups.items():
            leaving = self._leaving(numbers)
            if leaving and self._ran(leaving):
                introduced = sum(within[n] * self._budget.error(n) for n in leaving if within[n])
                rows.append(self._row(module, direction, leaving, True, numbers, introduced))
        return tuple(rows)

    def expected(self, error: float) -> float:
        """What an error would be if every operation rounded its result once, at random.

        The error of rounding to nearest is uniform in (-u, u) times the value, for unit roundoff u: its
        variance is at most u^2 / 3 times the square. How much an operation's error matters in the end is
        known from its share.
        """
        found = 0.0
        for number in map(int, np.flatnonzero(self.shares)):
            at, dtype = self._measured[number], self._nodes[number].dtype
            if at.introduced and math.isfinite(at.introduced) and is_half(dtype):
                unit_roundoff = float(jnp.finfo(dtype).eps) / 2
                found += self.shares[number] * unit_roundoff**2 / 3 * at.exact / at.introduced
        return error * math.sqrt(max(found, 0.0)) if math.isfinite(error) else 0.0

    def _ran(self, numbers: Sequence[int]) -> bool:
        """Whether there is anything to tell of nodes: not of those in a branch that is not taken."""
        return any(np.any(value) for number in numbers for value in self._measured[number])

    def _leads_to_gradients(self, number: int) -> bool:
        """Whether a value of the backward pass is a parameter's gradient on its way out."""
        consumers = self._consumers[number]
        return (
            bool(consumers)
            and number not in self._results
            and self._nodes[number].site.backward
            and all(self._is_gradient.get(c, False) and self._passes_on(c) for c in consumers)
        )

    def _passes_on(self, number: int) -> bool:
        return self._nodes[number].operation in _PASSES_ON

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

    def _sum(self, numbers: Sequence[int], field: str) -> float:
        return sum(getattr(self._measured[n], field) for n in numbers)

    def _row(
        self,
        module: str,
        direction: str,
        shown: Sequence[int],
        is_module: bool,
        counted: Sequence[int],
        introduced: float,
    ) -> DriftRow:
        """Makes a row.

        Args:
          module, direction: what it is about.
          shown: nodes whose errors it shows.
          is_module: whether it is about a module, for which `inherited` is what is not introduced.
          counted: nodes whose shares it has.
          introduced: sum of the squared errors introduced.
        """
        total, exact = sum(map(self._budget.error, shown)), self._sum(shown, "exact")
        rest = max(total - introduced, 0.0) if math.isfinite(introduced) else 0.0
        inherited = rest if is_module else self._inherited(shown)
        # Of a module one operation is named: what spoils the loss may do nothing to the gradient.
        main = max(counted, key=lambda n: (self.shares[n] + self._loss_shares[n], self._relative(n)))
        node = self._nodes[main]
        largest = max(self._measured[n].largest for n in shown)
        return DriftRow(
            module=module,
            operation=node.operation,
            line=node.site.line,
            direction=direction,
            introduced=_root(introduced, exact),
            inherited=_root(inherited, exact),
            total=_root(total, exact),
            largest=float(largest),
            share=_share(self.shares, counted),
            loss_share=_share(self._loss_shares, counted),
            dtype=str(node.dtype),
            terms=node.terms,
            trips=self._trips(shown),
            note=next(
                filter(None, (self._nodes[n].note for n in counted if self._measured[n].introduced)), ""
            ),
            flushed=self._lost(counted, 1),
            saturated=self._lost(counted, 2),
        )

    def _lost(self, numbers: Sequence[int], place: int) -> tuple[float, float]:
        """Which share of the left and the right operands of float8 products is lost."""
        counts = np.zeros((2, 3)) + sum(self._measured[n].lost for n in numbers)
        left, right = np.divide(counts[:, place], counts[:, 0], out=np.zeros(2), where=counts[:, 0] > 0)
        return round(float(left), 6), round(float(right), 6)

    def _inherited(self, numbers: Sequence[int]) -> float:
        """The sum of the squared errors that operations inherit; all where nothing is rounded."""
        return sum(
            self._measured[n].inherited if self._nodes[n].rounds else self._budget.error(n) for n in numbers
        )

    def _relative(self, number: int) -> float:
        at = self._measured[number]
        return _root(at.introduced, at.exact)

    def _trips(self, numbers: Sequence[int]) -> tuple[float, ...]:
        """The relative error in each trip of the scan that values are in; none outside of scans."""
        shapes = {np.shape(self._raw[n].exact) for n in numbers}
        if len(shapes) != 1 or shapes == {()}:
            return ()
        error = np.sum([_total(self._raw[n]) for n in numbers], axis=0)
        exact = np.sum([self._raw[n].exact for n in numbers], axis=0)
        return tuple(_root(e, x) for e, x in zip(np.ravel(error), np.ravel(exact), strict=True))


def _share(shares: np.ndarray, numbers: Sequence[int]) -> float:
    """The sum of the shares of nodes, to as many digits as shares have."""
    return round(float(sum(shares[n] for n in numbers)), 6)


def _total(at: Measured) -> np.ndarray:
    return np.where(at.total == 0, at.introduced + at.inherited, at.total)


def _root(error: float, exact: float) -> float:
    if not error:
        return 0.0
    return float(np.sqrt(error / exact)) if exact and math.isfinite(error) else math.inf
