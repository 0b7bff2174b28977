"""Records the operations at which two runs of one program may differ, and by how much they do.

A node is a value that differs. Its sources are the nodes that it was computed from.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.jaxpr.compat import varying
from jmp_policy._src.jaxpr.float32_replay import to_float32
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.one_pass import totals

#: Squares of gradients leave float32's range below 1e-19: cotangents are multiplied by this first.
_BACKWARD_UNIT = 2.0**32

#: A sum of squares below this may have lost some. Those of errors are smaller, and float32 ends at 1e-38.
LEAST = 1e-22


@dataclasses.dataclass(frozen=True)
class Errors:
    """Computes errors of arrays.

    Args:
      quick: whether to take all numbers for finite, and their squares for normal numbers. Then an error is a
        plain subtraction, which compilers put into the sum over its squares: a CPU adds it up in half the
        time and without memory for it. Sums of other numbers are not finite, or less than `LEAST`.
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
      operands: of an operation that goes on with a region that has several sources, its operands that differ,
        each with whether it is in that region; else none.
    """

    site: Site
    operation: str
    dtype: Any
    terms: int
    sources: tuple[int, ...]
    rounds: bool
    adds: bool
    note: str = ""
    operands: tuple[tuple[int, bool], ...] = ()


class Measured(NamedTuple):
    """Sums over the elements of a value, each of shape (), in scans (trips,).

    In a traced program None stands for what is not measured, or known to be 0, and errors are in a unit.

    Args:
      introduced: squares of the error that the operation itself made.
      inherited: squares of the rest.
      total: squares of the whole error.
      exact: squares of the value in float32.
      lost: what rounding operands to float8 lost, as `lost_in_float8` counts it.
      largest: largest absolute error.
    """

    introduced: Any
    inherited: Any
    total: Any
    exact: Any
    lost: Any
    largest: Any


class Recorder:
    """Keeps the nodes of a program, and the measurements of those that are wanted.

    Args:
      wanted: by node, which fields of `Measured` are; nothing is measured of other nodes.
      errors: how errors are computed.

    Attributes:
      nodes: of the program.
      measured: by node.
    """

    def __init__(self, wanted: Mapping[int, Container[str]], errors: Errors):
        self.nodes: list[Node] = []
        self.measured: dict[int, Measured] = {}
        self._wanted, self._errors = wanted, errors

    def add(self, node: Node) -> int:
        """Adds a node, and returns its number."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def measure(self, number: int, half: Any, wide: Any, exact: Any, lost: Any = None) -> None:
        """Measures a node, if that is wanted.

        Args:
          number: of the node.
          half: its value as the program computes it.
          wide: what the operation gives in float32 for the operands that the program has there.
          exact: its value in the float32 run.
          lost: what rounding operands to float8 lost; None without float8.
        """
        if number not in self._wanted:
            return
        fields, node = self._wanted[number], self.nodes[number]
        unit = self._errors.unit(node.site.backward)
        difference = functools.partial(self._errors.difference, unit=unit)
        error, terms = difference(half, exact), dict[str, Any]()
        if "introduced" in fields and node.rounds:
            terms["introduced"] = difference(half, wide)
        # What is computed from values that are equal in both runs has nothing to inherit.
        if "inherited" in fields and node.rounds and node.sources:
            terms["inherited"] = difference(wide, exact)
        if "total" in fields and (node.sources or not node.rounds):
            terms["total"] = error
        if "exact" in fields:
            terms["exact"] = self._errors.finite(exact, unit)
        names = [*terms, "largest"] if "largest" in fields else list(terms)
        sums = totals(list(map(_square, terms.values())), jnp.abs(error) if "largest" in fields else None)
        found = {"lost": lost, **dict(zip(names, sums, strict=True))}
        if "total" in fields:
            found.setdefault("total", found.get("introduced"))
        self.measured[number] = Measured(*map(found.get, Measured._fields))

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
        """Forgets the nodes of a with-block; measures none, since their numbers may be others in the end."""
        count, kept = len(self.nodes), self._wanted
        self._wanted = {}
        try:
            yield
        finally:
            self._wanted = kept
            del self.nodes[count:]


@jax.tree_util.register_pytree_node_class
class Stack:
    """What is measured in a trip of a loop as one array: a loop that fills hundreds of small ones is slow.

    Args:
      measured: by node.
    """

    def __init__(self, measured: Mapping[int, Measured]):
        leaves, self._structure = jax.tree.flatten(dict(measured))
        self._shapes = tuple(map(jnp.shape, leaves))
        # Of a program in float64 some are.
        dtype = max((leaf.dtype for leaf in leaves), key=lambda d: d.itemsize, default=jnp.float32)
        self._array = jnp.concatenate([jnp.zeros(0, dtype), *(jnp.ravel(x).astype(dtype) for x in leaves)])

    def measured(self) -> dict[int, Measured]:
        """What was put in, with the axes that the array has got in front."""
        sizes = list(map(math.prod, self._shapes))
        parts = lax.split(self._array, sizes, self._array.ndim - 1) if sizes else []
        before = self._array.shape[:-1]
        leaves = [part.reshape(before + shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)

    def tree_flatten(self) -> Any:
        return (self._array,), (self._structure, self._shapes)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Stack":
        stack = object.__new__(cls)
        (stack._array,), (stack._structure, stack._shapes) = arrays, static
        return stack


def _by_field(function: Callable[..., Any], *all_measured: Mapping[int, Measured]) -> dict[int, Measured]:
    """Maps `function(is_largest, *values)` over the fields of each node; None stays None."""
    is_largest = [field == "largest" for field in Measured._fields]
    return {
        number: Measured._make(
            None if values[0] is None else function(largest, *values)
            for largest, *values in zip(is_largest, *(of[number] for of in all_measured), strict=True)
        )
        for number in all_measured[-1]
    }


def over_trips(sums: Mapping[int, Measured], trip: Mapping[int, Measured]) -> dict[int, Measured]:
    """Measurements of the trips of a loop up to one, for those before it and its own."""
    return _by_field(lambda largest, *pair: (jnp.maximum if largest else jnp.add)(*pair), sums, trip)


def over_devices(measured: Mapping[int, Measured], axes: Sequence[str], typed: bool) -> dict[int, Measured]:
    """Measurements of all devices, for those of one device's shards; within `jax.shard_map`.

    Args:
      measured: by node.
      axes: of the mesh.
      typed: whether arrays say over which axes they vary, so that one that all devices have counts once.
    """

    def whole(largest: bool, x: Any) -> Any:
        names = tuple(a for a in axes if not typed or a in varying(jax.typeof(x)))
        return (lax.pmax if largest else lax.psum)(x, names) if names else x

    return _by_field(whole, measured)


def on_host(measured: Mapping[int, Measured], unit_of: Callable[[int], float]) -> dict[int, Measured]:
    """Measurements in float64 and in no unit; NaN becomes infinite, and what was not measured zero.

    Args:
      measured: arrays of the host.
      unit_of: gives what the errors of a node were multiplied by.
    """
    found = {}
    for number, values in measured.items():
        *sums, lost, largest = (np.float64(0) if v is None else np.asarray(v, np.float64) for v in values)
        unit = unit_of(number)
        scaled = (*(v / unit**2 for v in sums), lost, largest / unit)
        found[number] = Measured._make(np.nan_to_num(v, nan=np.inf, posinf=np.inf) for v in scaled)
    return found


def over_all_trips(measured: Mapping[int, Measured]) -> dict[int, Measured]:
    """Adds up what was measured over the trips of loops, on the host."""
    return {
        number: Measured(
            *(value.sum() for value in values[:-2]),
            # An array for each trip; 0 without float8.
            lost=values.lost.reshape(-1, 2, 3).sum(0) if values.lost.size > 1 else 0.0,
            largest=values.largest.max(initial=0.0),
        )
        for number, values in measured.items()
    }
