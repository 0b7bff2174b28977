"""Records the operations at which two runs of one program may differ, and by how much they do.

A node is a value that differs. Its sources are the nodes that it was computed from.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.jaxpr.walk import Site

#: Squares of gradients leave float32's range below 1e-19: cotangents are multiplied by this first.
_BACKWARD_UNIT = 2.0**32


@dataclasses.dataclass(frozen=True)
class Node:
    """A value at which the two runs may differ.

    Args:
      site: where it is computed.
      operation: name of the primitive; "carry" for the carry of a loop at the start of a trip.
      dtype: dtype that the value was traced in.
      terms: of a sum, how many terms each of its results has.
      sources: the operands that differ.
      rounds: whether the operation itself may introduce an error.
      adds: whether the errors of its operands add up as they are; else relative to each operand.
    """

    site: Site
    operation: str
    dtype: Any
    terms: int
    sources: tuple[int, ...]
    rounds: bool
    adds: bool


class Measured(NamedTuple):
    """Sums over the elements of a value, each of shape (), in scans (trips,); squared errors in one unit.

    Args:
      introduced: squares of the error that the operation itself made.
      inherited: squares of the rest.
      total: squares of the whole error.
      exact: squares of the value in float32.
      largest: largest absolute error, in the same unit.
    """

    introduced: Any
    inherited: Any
    total: Any
    exact: Any
    largest: Any


class Recorder:
    """Keeps the nodes of a program, and the measurements of those that are wanted.

    Args:
      wanted: by node, whether everything of it is measured or only what shares are computed from; nothing is
        measured of other nodes.
    """

    def __init__(self, wanted: Mapping[int, bool]):
        self.nodes: list[Node] = []
        self.measured: dict[int, Measured] = {}
        self._wanted = wanted

    def add(self, node: Node) -> int:
        """Adds a node, and returns its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def measure(self, number: int, half: Any, wide: Any, exact: Any) -> None:
        """Measures a node, if that is wanted.

        Args:
          number: of the node.
          half: its value as the program computes it.
          wide: what the operation gives in float32 for the operands that the program has there.
          exact: its value in the float32 run.
        """
        everything = self._wanted.get(number)
        if everything is None:
            return
        unit = _BACKWARD_UNIT if self.nodes[number].site.backward else 1.0
        error = difference(half, exact, unit)
        zero = jnp.zeros((), jnp.float32)
        introduced = inherited = total = largest = zero
        if self.nodes[number].rounds:
            introduced = squares(difference(half, wide, unit))
            inherited = squares(difference(wide, exact, unit))
        if everything or not self.nodes[number].rounds:
            total = squares(error)
        if everything:
            largest = jnp.max(jnp.abs(error), initial=0.0)
        exact = squares(_numbers(exact, unit, finite=True))
        self.measured[number] = Measured(introduced, inherited, total, exact, largest)

    @contextlib.contextmanager
    def inside(self) -> Iterator[dict[int, Measured]]:
        """Collects the measurements of a loop's body, whose arrays belong to a trace of their own."""
        outer, self.measured = self.measured, {}
        try:
            yield self.measured
        finally:
            self.measured = outer

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Forgets what is recorded in a with-block."""
        count = len(self.nodes)
        with self.inside():
            yield
        del self.nodes[count:]


def difference(value: Any, exact: Any, unit: float = 1.0) -> Any:
    """Returns the error of a value in float32; none where both are equally infinite, or both NaN."""
    if value is exact:
        return jnp.zeros((), jnp.float32)
    value, exact = _numbers(value, unit), _numbers(exact, unit)
    same = (value == exact) | (jnp.isnan(value) & jnp.isnan(exact))
    return jnp.where(same, 0, value - exact)


def squares(x: Any) -> Any:
    """Returns the sum of the squares of an array's magnitudes."""
    square = jnp.square(jnp.abs(x) if jnp.iscomplexobj(x) else x)
    # The last axis last: compilers for CPUs vectorise no sum along it.
    return jnp.sum(jnp.sum(square, range(square.ndim - 1)))


def _numbers(x: Any, unit: float, finite: bool = False) -> Any:
    """Returns the numbers of an array in a floating or complex dtype; zeros for keys."""
    x = jnp.asarray(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == jax.dtypes.float0:
        return jnp.zeros(x.shape, jnp.float32)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.float32)
    if finite:
        x = jnp.where(jnp.isfinite(x), x, 0)
    return x * np.asarray(unit, x.dtype) if unit != 1.0 else x


def totals(measured: Mapping[int, Measured]) -> dict[int, Measured]:
    """Adds up what was measured over the trips of loops, on the host; NaN becomes infinite."""
    found = {}
    for number, values in measured.items():
        rows = [np.nan_to_num(np.asarray(v, np.float64), nan=np.inf, posinf=np.inf) for v in values]
        introduced, inherited, total, exact = (row.sum() for row in rows[:-1])
        found[number] = Measured(introduced, inherited, total, exact, rows[-1].max(initial=0.0))
    return found


def unit_of(nodes: Sequence[Node], number: int) -> float:
    """Returns what the errors of a node were multiplied by when they were measured."""
    return _BACKWARD_UNIT if nodes[number].site.backward else 1.0
