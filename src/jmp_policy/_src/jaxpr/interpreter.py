"""The one interpreter of jaxprs: control flow is here, once, and each analysis says what the rest means.

An analysis is a subclass of `Interpreter`. It chooses what a value is (an array, two of them, an array with
what is known of it), says what an operation does to values, which calls, loops and branches are entered, and
how the carries of a loop are handed from trip to trip::

    class Doubled(Interpreter):                       # a program whose sines are doubled, in loops too
        def operation(self, eqn, values, where):
            outs = self.bind(eqn, *values)
            return [2 * outs[0]] if eqn.primitive.name == "sin" else outs

    Doubled().run(jaxpr, arrays)

Values go through loops, branches and devices as pytrees: their leaves are arrays, and their structure is what
is known without running the program. `evaluate` is the plain loop over equations, for those who run no
operations: what a value is and what happens to it is up to a function there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jmp_policy._src.jaxpr import calls, compat, control_flow, ir
from jmp_policy._src.jaxpr.calls import Kind


class Carries:
    """How the carries of one loop go from trip to trip: as they are.

    An analysis whose values change their structure on the way has a subclass.

    Args:
      start: the first carries.
    """

    def __init__(self, start: Sequence[Any]):
        self.start = list(start)

    def settle(self, trial: Callable[[], Any]) -> None:
        """Finds out what the first carries have to be; `trial` runs the loop, for types only."""

    def first(self) -> list[Any]:
        """The first carries, in the structure that all have."""
        return self.start

    def begin(self, carry: list[Any]) -> list[Any]:
        """The carries as the body takes them."""
        return carry

    def end(self, results: list[Any]) -> list[Any]:
        """The body's results, in the structure that all carries have."""
        return results

    def last(self, carry: list[Any]) -> list[Any]:
        """The results of the loop."""
        return carry


class Interpreter:
    """Runs jaxprs. Subclasses say what values are and what operations do.

    `where` is what an analysis wants to know of the place of an operation, such as the scopes around it; None
    unless `at` says otherwise.
    """

    def operation(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Does an operation that is not entered, or that holds no jaxpr; one value per result."""
        raise NotImplementedError

    def bind(self, eqn: Any, *arrays: Any, **changed: Any) -> list[Any]:
        """Does an operation itself, on arrays, with some parameters changed."""
        return compat.bind_primitive(eqn.primitive, arrays, {**eqn.params, **changed})

    def constant(self, atom: Any, value: Any) -> Any:
        """The value of a constant or of a number that stands in the program."""
        return value

    def enters(self, eqn: Any, kind: Kind, values: list[Any]) -> bool:
        """Whether the jaxprs of a call, loop or branch are run; else it is an operation."""
        return True

    def at(self, eqn: Any, around: Any) -> Any:
        """Where an operation is, in a jaxpr that is run at `around`."""
        return around

    def context(self, eqn: Any, around: Any) -> Any:
        """The with-block in which an operation of a jaxpr that is run at `around` is done."""
        return compat.eqn_context(eqn)

    def carries(self, eqn: Any, loop: control_flow.Loop, where: Any) -> Carries:
        """How the carries of a loop go from trip to trip."""
        return Carries(loop.start)

    def inside(self, jaxpr: Any, take: Callable[[], list[Any]], where: Any) -> tuple[list[Any], Any]:
        """Runs a jaxpr in a trace of its own, on the values that `take` gives there.

        Returns its results and a record, a pytree of arrays. The record leaves the trace and is given to
        `keep`: of a scan with an axis of trips in front, of a shard_map as `over_devices` joins devices. That
        of a while loop is dropped.
        """
        return self.run(jaxpr, take(), where), ()

    def keep(self, record: Any) -> None:
        """Takes what was recorded."""

    def of_trip(self, record: Any) -> Any:
        """The record of one trip, as a loop hands it out."""
        return record

    def over_devices(self, eqn: Any, record: Any) -> Any:
        """The record of all devices of a shard_map, for that of one; inside of it."""
        return record

    def run(self, jaxpr: Any, values: Sequence[Any], where: Any = None) -> list[Any]:
        """The results of a jaxpr, closed or not.

        Args:
          jaxpr: the program.
          values: its arguments.
          where: where it is called.
        """

        def step(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            with self.context(eqn, where):
                return self.equation(eqn, operands, self.at(eqn, where))

        return ir.evaluate(
            jaxpr,
            values,
            step,
            constant=self.constant,
            literal=lambda atom: self.constant(atom, atom.val),
        )

    def equation(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """The results of one equation, jaxprs inside it included."""
        kind = calls.kind_of(eqn)
        if kind is None or not self.enters(eqn, kind, values):
            return self.operation(eqn, values, where)
        return getattr(self, _METHODS.get(kind, "call"))(eqn, values, where)

    def call(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs what an operation calls once, in its place: a jit is inlined, own derivatives are dropped."""
        called = calls.called(eqn)
        assert called is not None
        return self.run(called.jaxpr, values[called.skipped :], where)

    def checkpoint(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs a jax.checkpoint, as one."""

        def function(*values: Any) -> list[Any]:
            results, record = self.inside(eqn.params["jaxpr"], lambda: list(values), where)
            return [*results, record]

        *results, record = control_flow.checkpoint(eqn, function, values, self.bind)
        self.keep(record)
        return results

    def shard_map(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs a jax.shard_map, as one. What is recorded is the same on all devices."""

        def on_device(*values: Any) -> list[Any]:
            results, record = self.inside(eqn.params["jaxpr"], lambda: list(values), where)
            return [*results, self.over_devices(eqn, record)]

        *results, record = control_flow.shard_map(eqn, on_device, values, (*eqn.params["out_specs"], jax.P()))
        self.keep(record)
        return results

    def scan(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs a lax.scan, as one."""
        loop = control_flow.loop(eqn, values)
        carries, count = self.carries(eqn, loop, where), len(loop.start)

        def trip(carry: Any, xs: Any) -> Any:
            take = lambda: [*loop.fixed, *carries.begin(carry), *xs]  # noqa: E731
            results, record = self.inside(loop.body, take, where)
            return carries.end(results[:count]), (results[count:], self.of_trip(record))

        def run() -> Any:
            # A new function each time: JAX does not trace one that it has traced.
            return control_flow.scan(eqn, lambda carry, xs: trip(carry, xs), carries.first(), loop.xs)

        carries.settle(run)
        last, (ys, record) = run()
        self.keep(record)
        return [*carries.last(last), *ys]

    def while_loop(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs a lax.while_loop that ends for all its values at once, as one; carries are as they are."""
        loop = control_flow.loop(eqn, values)

        def goes_on(carry: list[Any]) -> Any:
            (found,) = self.run(loop.test, [*loop.tested, *carry], where)
            return found

        def trip(carry: list[Any]) -> list[Any]:
            return self.inside(loop.body, lambda: [*loop.fixed, *carry], where)[0]

        return lax.while_loop(goes_on, trip, list(loop.start))

    def cond(self, eqn: Any, values: list[Any], where: Any) -> Sequence[Any]:
        """Runs a lax.cond or lax.switch, as one."""

        def branch(jaxpr: Any) -> Callable[..., list[Any]]:
            return lambda *operands: self.inside(jaxpr, lambda: list(operands), where)[0]

        return control_flow.cond(list(map(branch, control_flow.branches(eqn))), values)


#: What runs those that are entered; the rest are plain calls.
_METHODS: Mapping[Kind, str] = {
    Kind.CHECKPOINT: "checkpoint",
    Kind.SHARD_MAP: "shard_map",
    Kind.SCAN: "scan",
    Kind.WHILE: "while_loop",
    Kind.COND: "cond",
}
