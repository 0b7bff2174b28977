"""Evaluates scans and while loops on the values of both runs, and measures what is inside them.

A scan has as many trips in both runs, and what is measured in it is known for each trip. The trips of a
while loop may be counted by values that differ. Both runs go on together while both of them go on, and what
is measured is added up. What is left to the one that has more trips it does alone: the difference that this
makes is introduced by the loop itself.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.float32_replay import replay_equation
from jmp_policy._src.jaxpr.walk import Site
from jmp_policy._src.report.drift.recorder import Measured, Node, Recorder, Stack, over_trips
from jmp_policy._src.report.drift.twin import Run, Twin, as_written, held, nodes_of, packed, unpacked
from jmp_policy._src.report.drift.two_ways import result_of

_NOTE = "one of the two runs takes more trips"


def scan(run: Run, recorder: Recorder, eqn: Any, twins: Sequence[Twin], site: Site) -> list[Twin]:
    """Returns the results of a scan."""
    params = eqn.params
    consts, carries = compat.scan_sizes(params)
    fixed, start, xs = twins[:consts], twins[consts : consts + carries], twins[consts + carries :]
    trips = dataclasses.replace(site, times=site.times * params["length"])
    loop = _Loop(run, recorder, eqn, params["jaxpr"], trips, fixed, start, xs)
    loop.settle(lambda: _run_scan(loop))
    (last, ys), measured = _run_scan(loop)
    for i, (number, begun) in enumerate(zip(loop.carried, start, strict=True)):
        if number is not None and (own := loop.made[i]) is not None:
            recorder.measure_carry(number, begun.half, begun.exact, own, measured, params["reverse"])
    loop.connect()
    recorder.measured.update(measured)
    final = unpacked(last, loop.differs, [twin.node for twin in loop.results[:carries]])
    return final + unpacked(ys, *nodes_of(loop.results[carries:]))


def _run_scan(loop: "_Loop") -> Any:
    """Evaluates a scan; gives its last carry and outputs, and what was measured in each trip."""

    def trip(carry: Any, arrays: Any) -> Any:
        measured = loop.trip(carry, arrays)
        loop.find_made()
        after, ys = loop.results[: len(loop.start)], loop.results[len(loop.start) :]
        return loop.packed(after), (packed(ys, nodes_of(ys)[0]), Stack(measured))

    options = {name: loop.eqn.params[name] for name in ("length", "reverse", "unroll")}
    xs = packed(loop.xs, nodes_of(loop.xs)[0])
    last, (ys, stack) = lax.scan(trip, loop.packed(loop.start), xs, **options)
    return (last, ys), stack.measured()


def has_one_end(eqn: Any) -> bool:
    """Returns whether a while loop ends for all its values at once; under vmap each example has its end."""
    return not ir.shape_of(compat.open_jaxpr(eqn.params["cond_jaxpr"]).outvars[0])


def while_loop(run: Run, recorder: Recorder, eqn: Any, twins: Sequence[Twin], site: Site) -> list[Twin]:
    """Returns the results of a while loop that ends for all its values at once."""
    params = eqn.params
    first, stop = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    tested, fixed, start = twins[:first], twins[first:stop], twins[stop:]
    trips = dataclasses.replace(site, counted=False)
    loop = _Loop(run, recorder, eqn, params["body_jaxpr"], trips, fixed, start, ())

    def test(carry: Any) -> Twin:
        with recorder.forgetting():
            (goes_on,) = run(params["cond_jaxpr"], [*tested, *loop.nodes_of_carries(carry)], trips)
        return goes_on

    def both_go_on(state: Any) -> Any:
        goes_on = test(state[0])
        return goes_on.exact if goes_on.node is None else goes_on.exact & goes_on.half

    def trip(state: Any) -> Any:
        carry, stack = state
        measured = loop.trip(carry, ())
        return loop.packed(loop.results), Stack(over_trips(stack.measured(), measured))

    def one_trip() -> Stack:
        return Stack(loop.trip(loop.packed(start), ()))

    loop.settle(one_trip)
    with recorder.inside():
        nothing = jax.tree.map(ir.zeros, jax.eval_shape(lambda: one_trip()))
    last, stack = lax.while_loop(both_go_on, trip, (loop.packed(start), nothing))
    loop.connect()
    recorder.measured.update(stack.measured())
    goes_on, final = test(last), unpacked(last, loop.differs, [None] * len(start))
    apart = None
    if goes_on.node is not None:
        apart = goes_on.half | goes_on.exact
        rest = [*tested, *fixed, *final]
        halves, exacts = as_written(eqn, rest), replay_equation(eqn, [twin.exact for twin in rest])
        final = [Twin(half, exact) for half, exact in zip(halves, exacts, strict=True)]
    return [
        result_of(recorder, eqn, i, site, twin, (begun.node, made.node), apart, _NOTE)
        for i, (twin, begun, made) in enumerate(zip(final, start, loop.results, strict=True))
    ]


@dataclasses.dataclass
class _Loop:
    """A loop that is being evaluated.

    Args:
      run, recorder: evaluate its body, and take note.
      eqn, body, site: its equation, the jaxpr of a trip, and where it is.
      fixed, start, xs: its constants, first carries, and inputs.

    Attributes:
      differs: for each carry, whether the two runs may differ in it.
      carried: for each carry, its node at the start of a trip.
      results: of its body.
      made: for each carry of a scan, the node of the body that it is after a trip; None if it is none of this
        loop. Its error at the start of a trip is then that of the trip before, and not measured again.
    """

    run: Run
    recorder: Recorder
    eqn: Any
    body: Any
    site: Site
    fixed: Sequence[Twin]
    start: Sequence[Twin]
    xs: Sequence[Twin]

    def __post_init__(self) -> None:
        self.differs = [twin.node is not None for twin in self.start]
        self.carried: list[int | None] = []
        self.results: list[Twin] = []
        self.made: list[int | None] = [None] * len(self.start)
        self._begin = len(self.recorder.nodes)

    def settle(self, trip: Callable[[], Any]) -> None:
        """Sets `differs`: what differs after a trip, which a function traces, differs at its start."""
        while True:
            with self.recorder.forgetting():
                # A new function each time: JAX would not trace the same one again.
                jax.eval_shape(lambda: trip())
            differs = [a or b.node is not None for a, b in zip(self.differs, self.results, strict=False)]
            if differs == self.differs:
                return
            self.differs = differs

    def trip(self, carry: Any, arrays: Any) -> dict[int, Measured]:
        """Evaluates the body for arrays that were packed; returns what was measured."""
        # A loop may trace its body more than once; what was recorded before is void.
        del self.recorder.nodes[self._begin :]
        with self.recorder.inside() as measured:
            carried = self.nodes_of_carries(carry)
            self.carried = [twin.node for twin in carried]
            xs = unpacked(arrays, *nodes_of(self.xs))
            self.results = self.run(self.body, [*self.fixed, *carried, *xs], self.site)
        return measured

    def find_made(self) -> None:
        """Sets `made`, after the body was evaluated."""
        nodes = self.recorder.nodes
        last_carry = max((n for n in self.carried if n is not None), default=-1)
        for i, result in enumerate(self.results[: len(self.start)]):
            node = result.node if self.carried[i] is not None else None
            is_own = node is not None and node > last_carry and nodes[node].site.times == self.site.times
            self.made[i] = node if is_own else None

    def connect(self) -> None:
        """Gives the nodes of carries their sources: the first carry, and what a trip makes of it."""
        nodes = self.recorder.nodes
        for number, begun, result in zip(self.carried, self.start, self.results, strict=False):
            if number is not None:
                # Its place is that of what makes it in every trip, so that it is in the same module.
                made = nodes[number if result.node is None else result.node]
                sources = tuple(n for n in (begun.node, result.node) if n is not None)
                nodes[number] = dataclasses.replace(nodes[number], site=made.site, sources=sources)

    def packed(self, carries: Sequence[Twin]) -> list[Any]:
        """Returns the arrays of carries, before or after a trip, in the same dtypes."""
        twins = [
            twin._replace(half=held(twin.half, var)) if two else twin
            for twin, var, two in zip(carries, self.eqn.outvars, self.differs, strict=False)
        ]
        return packed(twins, self.differs)

    def nodes_of_carries(self, arrays: Any) -> list[Twin]:
        """Returns the carries at the start of a trip, each a node of its own if it may differ."""
        carries = unpacked(arrays, self.differs, [None] * len(self.differs))
        return [
            self._carry(i, twin) if two else twin
            for i, (twin, two) in enumerate(zip(carries, self.differs, strict=True))
        ]

    def _carry(self, i: int, twin: Twin) -> Twin:
        node = Node(self.site, "carry", ir.dtype_of(self.eqn.outvars[i]), 1, (), rounds=False, adds=True)
        number = self.recorder.add(node)
        if self.made[i] is None:
            self.recorder.measure(number, twin.half, twin.exact, twin.exact)
        return Twin(twin.half, twin.exact, number)
