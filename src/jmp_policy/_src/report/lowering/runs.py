"""How often an optimised HLO module runs each of its computations, through loops, calls and branches.

The GPU compiler writes the number of trips of a loop down. The TPU compiler does not: it follows from what
the loop's counter begins at, is compared with, and grows by.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jmp_policy._src.report.lowering.hlo import CONTAINERS, Computations, Instruction

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"constant\((-?\d+)\)")
_FORWARDING = frozenset(["copy", "bitcast", "copy-start", "copy-done"])


@dataclasses.dataclass(frozen=True)
class Runs:
    """Number of runs of a computation.

    Args:
      times: runs in one run of the program; loops with an unknown number of trips count as one trip.
      counted: whether no such loop is around it.
    """

    times: int
    counted: bool


def executed(computations: Computations, entry: str) -> dict[str, Runs]:
    """Returns how often the entry runs each computation, through `while`, `call` and `conditional`."""
    runs = {entry: Runs(1, True)}
    for name, called, trips in _calls(computations, entry):
        outer = runs[name]
        times, counted = outer.times * (trips or 1), outer.counted and trips is not None
        before = runs.get(called, Runs(0, True))
        runs[called] = Runs(before.times + times, before.counted and counted)
    return runs


def _calls(computations: Computations, entry: str) -> Iterator[tuple[str, str, int | None]]:
    """Yields (caller, called, trips) for every call, outer ones first."""
    waiting = [entry]
    for name in waiting:
        for instruction in computations[name]:
            if instruction.opcode not in CONTAINERS:
                continue
            trips = _trips(instruction, name, computations) if instruction.opcode == "while" else 1
            for called in instruction.called:
                if called in computations:
                    yield name, called, trips
                    if called not in waiting:
                        waiting.append(called)


def _trips(loop: Instruction, where: str, computations: Computations) -> int | None:
    """Returns the number of trips of a loop, where the program says it; else None."""
    if known := _KNOWN.search(loop.line):
        return int(known.group(1))
    scopes = [
        {i.name: i for i in computations.get(name, ())}
        for name in (where, loop.attribute("condition"), loop.attribute("body"))
    ]
    outside, condition, body = scopes
    given = outside.get(loop.operands[0])
    test = next((i for i in condition.values() if i.is_root), None)
    if given is None or given.opcode != "tuple" or test is None or test.opcode != "compare":
        return None
    place = _place(test.operands[0], condition)
    if place is None or test.attribute("direction") != "LT":
        return None
    first = _number(given.operands[place], outside)
    last = _number(test.operands[1], condition, given.operands, outside)
    step = _step(body, place, given.operands, outside)
    if first is None or last is None or not step or step < 0:
        return None
    return max(-(-(last - first) // step), 0)


def _step(
    body: Mapping[str, Instruction], place: int, given: tuple[str, ...], outside: Mapping[str, Instruction]
) -> int | None:
    """Returns what a trip adds to the loop's counter."""
    root = next((i for i in body.values() if i.is_root), None)
    if root is None or root.opcode != "tuple":
        return None
    added = body.get(root.operands[place])
    if added is None or added.opcode != "add" or _place(added.operands[0], body) != place:
        return None
    return _number(added.operands[1], body, given, outside)


def _place(name: str, scope: Mapping[str, Instruction]) -> int | None:
    """Returns which element of the loop's state a value is, copies aside."""
    while name in scope and scope[name].opcode in _FORWARDING:
        name = scope[name].operands[0]
    if name not in scope or scope[name].opcode != "get-tuple-element":
        return None
    return int(scope[name].attribute("index"))


def _number(
    name: str,
    scope: Mapping[str, Instruction],
    given: tuple[str, ...] = (),
    outside: Mapping[str, Instruction] | None = None,
) -> int | None:
    """Returns the value of a constant, also of one that the loop is given and hands on."""
    while name in scope:
        found = scope[name]
        if found.opcode == "constant":
            match = _CONSTANT.search(found.line)
            return int(match.group(1)) if match else None
        place = _place(name, scope)
        if place is not None and given and outside is not None:
            return _number(given[place], outside)
        if found.opcode not in _FORWARDING:
            return None
        name = found.operands[0]
    return None
