"""Walking a traced program: every operation with where it is, how often it runs, and what its operands are.

Values are followed through calls and loops, so that a report can say what an operand was computed from.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jmp_policy._src.jaxpr import calls, compat, control_flow, ir, source_lines
from jmp_policy._src.jaxpr.calls import Kind
from jmp_policy._src.policy.marked_regions import is_marker


class Placed:
    """Base class of what has a place in a program.

    Attributes:
      path: names of the scopes around it, joined by slashes.
      line: where it is in the source.
    """

    path: str
    line: str

    @property
    def place(self) -> str:
        """Formats path, file and line: "Net/head (mlp.py:41)"."""
        line = self.line.partition(" ")[0]
        return f"{self.path} ({line})" if self.path and line else self.path or line or "(unknown place)"


@dataclasses.dataclass(frozen=True)
class PlacedOperation(Placed):
    """Base class of what is said of one operation.

    Args:
      operation: name of the primitive.
      path, line: as of `Placed`.
      backward: whether it is part of a backward pass.
    """

    operation: str
    path: str
    line: str
    backward: bool

    @property
    def direction(self) -> str:
        """The name of the pass, as tables show it."""
        return "backward" if self.backward else "forward"


@dataclasses.dataclass(frozen=True)
class Site(Placed):
    """Where an operation is.

    Args:
      path: names of the scopes around it, joined by slashes: modules of Flax and Haiku, named scopes.
      backward: whether differentiation put it there.
      times: how often one run of the program runs it: the product of the lengths of the scans around it.
      counted: whether `times` is exact; inside a `while` it is a lower bound.
      line: where it is in the source.
    """

    path: str = ""
    backward: bool = False
    times: int = 1
    counted: bool = True
    line: str = ""


class ValueInfo(NamedTuple):
    """What is known of a value.

    Args:
      key: the same for the same value wherever it is passed on.
      origin: index of the program's argument that it is, or None.
      provenance: the marks that a visitor put on values that it was computed from.
      constant: the number or array of the program that it is; None for anything else.
      is_carry: whether it is a loop's carry at the start of a trip.
    """

    key: int
    origin: int | None = None
    provenance: frozenset[int] = frozenset()
    constant: Any = None
    is_carry: bool = False


class Operation(NamedTuple):
    """An operation that has no program inside; or a loop.

    Args:
      eqn, site: its equation, and where it is.
      operands, results: what is known of its values; nothing of those of a loop.
    """

    eqn: Any
    site: Site
    operands: Sequence[ValueInfo] = ()
    results: Sequence[ValueInfo] = ()

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop."""
        return calls.kind_of(self.eqn) in _LOOPS


class Walk:
    """The operations of a closed jaxpr, those in calls and loops too.

    Args:
      jaxpr: the program.

    Attributes:
      seen: all in order, loops before what is in them.
      operations: those that are no loops.
      results: what is known of the program's results.
    """

    def __init__(self, jaxpr: Any):
        self._keys = 0
        self.seen: list[Operation] = []
        arguments = [self.new(origin=i) for i in range(len(compat.open_jaxpr(jaxpr).invars))]
        self.results = self.inside(jaxpr, arguments, Site(), silent=False)
        self.operations = [operation for operation in self.seen if not operation.is_loop]

    def marks(self, eqn: Any, site: Site, operands: Sequence[ValueInfo]) -> frozenset[int]:
        """The marks that the results of an equation carry; asked several times for what is in loops."""
        return frozenset()

    def see(self, operation: Operation) -> None:
        """Takes note of an operation or loop; called once for each, in order."""
        self.seen.append(operation)

    def new(self, provenance: frozenset[int] = frozenset(), origin: int | None = None) -> ValueInfo:
        self._keys += 1
        return ValueInfo(self._keys, origin, provenance)

    def inside(
        self, jaxpr: Any, arguments: Sequence[ValueInfo], outer: Site, silent: bool
    ) -> list[ValueInfo]:
        def step(eqn: Any, operands: list[ValueInfo]) -> list[ValueInfo]:
            # Where exactly matters to nobody in silent rounds.
            site = outer if silent and not compat.is_transposed(eqn) else site_of(eqn, outer)
            return self.equation(eqn, operands, site, silent)

        return ir.evaluate(
            jaxpr,
            arguments,
            step,
            constant=lambda _, value: self.new()._replace(constant=value),
            literal=lambda atom: self.new()._replace(constant=atom.val),
        )

    def equation(self, eqn: Any, operands: list[ValueInfo], site: Site, silent: bool) -> list[ValueInfo]:
        """What is known of an equation's results; goes over what is inside of it."""
        kind = calls.kind_of(eqn)
        if kind in _LOOPS:
            if not silent:
                self.see(Operation(eqn, site))
            return self._loop(eqn, operands, site, silent)
        if kind in (Kind.COND, Kind.PLATFORM):
            branches = [self.inside(j, operands[1:], site, silent) for j in control_flow.branches(eqn)]
            return [self.new(_joined(results)) for results in zip(*branches, strict=True)]
        called = calls.looked_into(eqn)
        if called is not None:
            return self.inside(called.jaxpr, operands[called.skipped :], site, silent)
        inner = calls.inner_jaxprs(eqn)
        if not inner:
            provenance = self.marks(eqn, site, operands)
            results = [self.new(provenance) for _ in eqn.outvars]
            if not silent:
                self.see(Operation(eqn, site, operands, results))
            return results
        provenance = _joined(operands)
        for jaxpr in inner:
            arguments = [self.new(provenance) for _ in compat.open_jaxpr(jaxpr).invars]
            self.inside(jaxpr, arguments, site, silent)
        return [self.new(provenance) for _ in eqn.outvars]

    def _loop(self, eqn: Any, operands: list[ValueInfo], site: Site, silent: bool) -> list[ValueInfo]:
        loop = control_flow.loop(eqn, operands)
        if loop.trips is None:
            trips = dataclasses.replace(site, counted=False)
        else:
            trips = dataclasses.replace(site, times=site.times * loop.trips)
        xs = [self.new(x.provenance) for x in loop.xs]

        def body(carry: Sequence[ValueInfo], silent: bool) -> list[ValueInfo]:
            return self.inside(loop.body, [*loop.fixed, *carry, *xs], trips, silent)

        def carried(provenance: Sequence[frozenset[int]]) -> list[ValueInfo]:
            return [self.new(known)._replace(is_carry=True) for known in provenance]

        def after(provenance: list[frozenset[int]]) -> list[frozenset[int]]:
            results = body(carried(provenance), True)
            return [known | info.provenance for known, info in zip(provenance, results, strict=False)]

        carry = carried(ir.fixed_point([info.provenance for info in loop.start], after))
        if loop.test is not None:
            self.inside(loop.test, [*loop.tested, *carry], trips, silent)
        return [self.new(info.provenance) for info in body(carry, silent)]


def _joined(infos: Sequence[ValueInfo]) -> frozenset[int]:
    return frozenset().union(*(info.provenance for info in infos))


def site_of(eqn: Any, outer: Site) -> Site:
    """Where an equation is, in a program that is called at another site."""
    names = [name for name in compat.scopes(eqn) if not is_marker(name) and name not in _REMAT]
    is_transposed, half = compat.is_transposed(eqn), len(names) // 2
    if is_transposed and calls.kind_of(eqn) is Kind.CHECKPOINT and names[:half] == names[half:]:
        names = names[half:]  # It has the names around it twice.
    path = "/".join(filter(None, (outer.path, *names)))
    backward = outer.backward or is_transposed
    return dataclasses.replace(
        outer, path=path, backward=backward, line=source_lines.source_line(eqn, outer.line)
    )


_LOOPS = (Kind.SCAN, Kind.WHILE)

#: Names that `jax.checkpoint` puts around what it computes a second time.
_REMAT = ("rematted_computation", "checkpoint", "remat")


def size(atom: Any) -> int:
    """The number of elements of an atom of a jaxpr; 0 for tokens and the like."""
    return math.prod(getattr(atom.aval, "shape", (0,)))
