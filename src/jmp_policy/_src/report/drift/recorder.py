"""Records the operations at which two runs of one program may differ, and by how much they do.

A node is a value that differs. Its sources are the nodes that it was computed from.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtypes import is_floating
from jmp_policy._src.jaxpr.float32_replay import to_float32
from jmp_policy._src.jaxpr.op_table import HAVING, Trait
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.pieces import totals

_BOUNDED, _RANKS = HAVING[Trait.BOUNDED], HAVING[Trait.RANKS]

#: Squares of gradients leave float32's range below 1e-19: cotangents are multiplied by this first.
_BACKWARD_UNIT = 2.0**32

#: From here on a float32 number that is 0 in the half run is not one that was too small for half precision.
VANISHED = 1e-6

#: A sum of squares below this may have lost some. Those of errors are smaller, and float32 ends at 1e-38.
LEAST = 1e-22


@dataclasses.dataclass(frozen=True)
class Errors:
    """Computes errors of arrays.

    Args:
      quick: whether to take all numbers for finite, and their squares for normal numbers. Then an error is a
        plain subtraction, which compilers put into the sum over its squares: a CPU adds it up in a quarter of
        the time and without memory for it. Sums of other numbers are not finite, or less than `LEAST`.
    """

    quick: bool = False

    def unit(self, backward: bool) -> float:
        """A power of two by which errors are to be multiplied, of gradients or of other values."""
        return _BACKWARD_UNIT if backward and not self.quick else 1.0

    def difference(self, value: Any, exact: Any, unit: float = 1.0) -> Any:
        """The error of a value in float32; none where both are equally infinite, or both NaN.

        Args:
          value, exact: arrays of one shape.
          unit: power of two that the error is multiplied by.
        """
        if value is exact:
            return jnp.zeros((), jnp.float32)
        value, exact = _numbers(value), _numbers(exact)
        if self.quick:
            return _times(value - exact, unit)
        same = (value == exact) | (jnp.isnan(value) & jnp.isnan(exact))
        return jnp.where(same, 0, _times(value, unit) - _times(exact, unit))

    def finite(self, x: Any, unit: float = 1.0) -> Any:
        """The numbers of an array, times a unit; 0 for those that are not finite."""
        x = _numbers(x)
        return _times(x if self.quick else jnp.where(jnp.isfinite(x), x, 0), unit)


def squares(x: Any) -> Any:
    """The sum of the squares of an array's magnitudes."""
    return totals([_square(x)])[0]


def _square(x: Any) -> Any:
    return jnp.square(jnp.abs(x) if jnp.iscomplexobj(x) else x)


def _numbers(x: Any) -> Any:
    """The numbers of an array in a floating or complex dtype; zeros for keys."""
    x = to_float32(jnp.asarray(x))
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or x.dtype == jax.dtypes.float0:
        return jnp.zeros(x.shape, jnp.float32)
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _times(x: Any, unit: float) -> Any:
    return x * np.asarray(unit, x.dtype) if unit != 1.0 else x


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
      note: what to say of it where it introduces an error.
      argument: of a cast of an argument of the program, its index.
    """

    site: Site
    operation: str
    dtype: Any
    terms: int
    sources: tuple[int, ...]
    rounds: bool
    adds: bool
    note: str = ""
    argument: int | None = None


class Measured(NamedTuple):
    """Sums over the elements of a value, each of shape (), in scans (trips,).

    In a traced program None stands for what is not measured, or known to be 0, and errors are in a unit.

    Args:
      introduced: squares of the error that the operation itself made.
      inherited: squares of the rest.
      total: squares of the whole error.
      exact: squares of the value in float32.
      vanished: squares of the error of elements that are 0 in half, though not too small for it, or computed
        from what is infinite in half only.
      turned: of a `select_n`, squares of what it changes to pick float32's values by half's decisions.
      lost: what rounding operands to float8 lost, as `lost_in_float8` counts it.
      largest: largest absolute error.
    """

    introduced: Any
    inherited: Any
    total: Any
    exact: Any
    vanished: Any
    turned: Any
    lost: Any
    largest: Any


class Recorder:
    """Keeps the nodes of a program, and what is measured at them.

    Args:
      measures: whether anything is.
      errors: how errors are computed.

    Attributes:
      measures: as given; False while nodes are not those of the end.
      nodes: of the program.
      measured: by node.
    """

    def __init__(self, measures: bool, errors: Errors):
        self.nodes: list[Node] = []
        self.measured: dict[int, Measured] = {}
        self.measures, self._errors = measures, errors

    def add(
        self,
        node: Node,
        half: Any,
        wide: Any,
        exact: Any,
        lost: Any = None,
        operands: Sequence[Any] = (),
    ) -> int:
        """Adds a node, measures it, and returns its number.

        Args:
          node: the node.
          half: its value as the program computes it.
          wide: what the operation gives in float32 for the operands that the program has there.
          exact: its value in the float32 run.
          lost: what rounding operands to float8 lost; None without float8.
          operands: the twins that this read, element by element where they have the value's shape.
        """
        self.nodes.append(node)
        number = len(self.nodes) - 1
        if not self.measures:
            return number
        unit = self._errors.unit(node.site.backward)
        difference = functools.partial(self._errors.difference, unit=unit)
        error, terms = difference(half, exact), dict[str, Any]()
        if node.rounds:
            terms["introduced"] = difference(half, wide)
        # What is computed from values that are equal in both runs has nothing to inherit.
        if node.rounds and node.sources:
            terms["inherited"] = difference(wide, exact)
        if node.sources or not node.rounds:
            terms["total"] = error
        terms["exact"] = self._errors.finite(exact, unit)
        if node.operation == "select_n" and operands and operands[0].node is not None:
            which, *picked = operands
            other = jax.lax.select_n(which.half, *(to_float32(twin.exact) for twin in picked))
            terms["turned"] = jnp.where(
                (error != 0) & (which.half != which.exact), difference(other, exact), 0
            )
        if not self._errors.quick:
            terms["vanished"] = self._errors.finite(
                jnp.where(_vanished(node, half, exact, operands), error, 0)
            )
        sums = totals(list(map(_square, terms.values())), jnp.abs(error))
        found = {"lost": lost, **dict(zip([*terms, "largest"], sums, strict=True))}
        found.setdefault("total", found.get("introduced"))
        self.measured[number] = Measured(*map(found.get, Measured._fields))
        return number


def _vanished(node: Node, half: Any, exact: Any, operands: Sequence[Any]) -> Any:
    """Which elements of a value are 0 in half, though not too small for it, or made of something infinite."""
    found = (half == 0) & (jnp.abs(exact) > VANISHED) if is_floating(node.dtype) else False
    for i, twin in enumerate(operands):
        is_alike, ranks = jnp.shape(twin.half) == jnp.shape(half), node.operation in _RANKS
        on_other_mesh = jax.typeof(twin.half).sharding.mesh != jax.typeof(half).sharding.mesh
        if twin.node is None or on_other_mesh or not (is_alike or ranks):
            continue
        infinite = jnp.isinf(_numbers(twin.half)) & jnp.isfinite(_numbers(twin.exact))
        if not is_alike:
            # Any may be what was picked in place of another; a mask has the other sign.
            first = twin.half < 0 if node.operation == "argmin" else twin.half > 0
            infinite = jnp.any(infinite & first)
        elif node.operation == "select_n":
            infinite &= operands[0].exact == i - 1  # What float32 does not take does not matter.
        elif node.operation in _BOUNDED:
            infinite &= _numbers(twin.exact) == _numbers(exact)
        found |= infinite
    return found


def on_host(measured: Mapping[int, Measured], unit_of: Callable[[int], float]) -> dict[int, Measured]:
    """Measurements in float64 and in no unit; NaN becomes infinite, and what was not measured zero.

    Args:
      measured: arrays of the host.
      unit_of: gives what the errors of a node were multiplied by.
    """
    found = {}
    for number, values in measured.items():
        host = (np.float64(0) if v is None else np.asarray(v, np.float64) for v in values)
        (*sums, lost, largest), unit = host, unit_of(number)
        scaled = (*(v / unit**2 for v in sums), lost, largest / unit)
        found[number] = Measured._make(np.nan_to_num(v, nan=np.inf, posinf=np.inf) for v in scaled)
    return found


def over_all_trips(measured: Mapping[int, Measured]) -> dict[int, Measured]:
    """Adds up what was measured over the trips of loops, on the host; all nodes have a total then."""
    found = {}
    for number, values in measured.items():
        *sums, lost, largest = values
        added = Measured(
            *(value.sum() for value in sums),
            # An array for each trip; 0 without float8.
            lost=lost.reshape(-1, 2, 3).sum(0) if lost.size > 1 else 0.0,
            largest=largest.max(initial=0.0),
        )
        found[number] = added._replace(total=whole_error(added))
    return found


def whole_error(at: Measured) -> Any:
    """The squares of the whole error; of a node that has no total, by its parts."""
    return np.where(at.total == 0, at.introduced + at.inherited, at.total)
