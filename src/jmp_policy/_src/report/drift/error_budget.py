"""Says how much of the error of a result was introduced where: an error budget.

The errors that operations introduce are taken for independent, so that their squares add up, and small, so
that each operation passes its operands' errors on in proportion. Then the square of an error flows back from
a result to where it was made. At each operation the part that it introduced stays, in the proportion that was
measured; the rest goes on to its operands::

    y = op(a, b)       stays:     introduced(y)^2 / (introduced(y)^2 + inherited(y)^2)
                       to a:      the rest times error(a)^2 / (error(a)^2 + error(b)^2)

Errors are absolute where the operation adds its operands, and relative to the operand where it multiplies
them. That is the law of propagation of uncertainty (Guide to the Expression of Uncertainty in Measurement,
5.1.2), with the sensitivities measured. All shares together are 1. Errors of one cause that arrive by two
ways, and cancel or reinforce one another, are what it does not see.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jmp_policy._src.report.drift.recorder import Measured, Node

#: Of what goes round in a loop, this is lost in each trip, so that the sum over all trips is finite.
_LOST = 1e-9


class ErrorBudget:
    """Computes shares of errors from what was measured.

    Args:
      nodes: of a program.
      measured: of those at which errors are introduced or meet.
    """

    def __init__(self, nodes: Sequence[Node], measured: Mapping[int, Measured]):
        self._nodes, self._measured = nodes, measured
        self._introduced = np.array([self._introduced_part(i) for i in range(len(nodes))])
        self._edges = [(i, *edge) for i in range(len(nodes)) for edge in self._split(i)]

    def error(self, number: int) -> float:
        """Returns the sum of the squared errors of a node."""
        if number not in self._measured:
            return 0.0
        found = self._measured[number]
        return found.total if found.total else found.introduced + found.inherited

    def shares(self, weights: Mapping[int, float]) -> np.ndarray:
        """Returns how much of an error was introduced at each node.

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
        """Returns for each node which part of its error was introduced in the node's own group.

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
        """Returns the sources of a node, with the part of its error that it inherits from each."""
        node = self._nodes[number]
        inherited = 1 - self._introduced[number]
        if not node.sources or not inherited:
            return []
        errors = [self.error(source) for source in node.sources]
        if not node.adds:
            errors = [self._relative(s, e) for s, e in zip(node.sources, errors, strict=True)]
        if len(errors) == 1 or not any(errors):
            errors = [1.0] * len(errors)
        if any(map(np.isinf, errors)):
            errors = [float(np.isinf(e)) for e in errors]
        whole = sum(errors)
        return [(s, inherited * e / whole) for s, e in zip(node.sources, errors, strict=True) if e]

    def _relative(self, number: int, error: float) -> float:
        exact = self._measured[number].exact if number in self._measured else 0.0
        if np.isinf(error):
            return np.inf
        return error / exact if exact else float(error > 0)
