"""Parses an optimised HLO module: its instructions, how often they run, and the bytes that they move.

The GPU compiler writes the number of trips of a loop down. The TPU compiler does not: it follows from what
the loop's counter begins at, is compared with, and grows by.

Where a kernel takes a slice of an array or writes one in place, as in the body of a scan over stacked layers,
the slice counts and not the array. A TPU's arrays in the memory of the chip itself cost no bandwidth of the
device's: they do not count.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jmp_policy._src.jaxpr.jax_sources import directory_of

#: Instructions of a scheduled computation that launch nothing. Every other one counts as one kernel, except
#: those that run another computation (while, call, conditional), which count as what is inside.
NO_KERNEL = frozenset([
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "copy-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
    "collective-permute-done", "fusion-done", "slice-done", "send-done", "recv-done", "opt-barrier",
])  # fmt: skip
CONTAINERS = frozenset(["while", "call", "conditional"])
#: Bits per element by the names that HLO text uses, where the name itself does not say (f16, s32, f8e5m2).
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_LIBRARIES = ("__cublas$", "__cudnn$")

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_ON_CHIP = re.compile(_ARRAY.pattern + r"\{[^}]*S\(1\)[^}]*\}")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

_DIRECTORY = re.compile(r"^.*[/\\]")
_FILE = re.compile(r'^(\d+) "(.*)"$', re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", re.M)
#: Files whose lines are not the user's: installed packages and this library.
_LIBRARY = re.compile(r"(?:site|dist)-packages/|^<frozen|^" + re.escape(directory_of("jmp_policy")))


class Instruction(NamedTuple):
    """Instruction, one line of a computation: name, shape as text, opcode and names of its operands."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool = False

    @property
    def op_name(self) -> str:
        """The name that tracing gave it: "jit(step)/jvp(Net)/Dense_0/dot_general"; "" if none."""
        match = _OP_NAME.search(self.line)
        return match.group(1).partition(";")[0] if match else ""

    def attribute(self, name: str) -> str:
        """The text of an attribute, without braces or quotes; "" if it is missing."""
        match = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|\"([^\"]*)\"|%?([\w.\-]+))", self.line)
        return next((group for group in match.groups() if group), "") if match else ""

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs or is made of."""
        branches = (re.findall(r"[\w.\-]+", group) for group in _BRANCHES.findall(self.line))
        return sum(branches, _CALLED.findall(self.line))


Computations = dict[str, list[Instruction]]
#: Instructions of a computation by name.
Scope = Mapping[str, Instruction]


def parse(text: str) -> tuple[Computations, str]:
    """Parses an HLO module into its computations by name; returns them and the name of the entry."""
    computations: Computations = {}
    current: list[Instruction] = []
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations[match.group(2)] = []
            entry = match.group(2) if match.group(1) else entry
        elif match := _INSTRUCTION.match(line):
            root, name, text = match.groups()
            end = _end(text, " ")
            opcode, _, tail = text[end + 1 :].partition("(")
            operands = re.findall(r"%([\w.\-]+)", tail[: tail.find(")")])
            current.append(Instruction(name, text[:end], opcode, tuple(operands), line, bool(root)))
    return computations, entry


def inside(instruction: Instruction, computations: Computations) -> dict[str, Instruction]:
    """The instructions of the computations that an instruction runs or is made of, by name."""
    return {i.name: i for name in instruction.called for i in computations.get(name, ())}


def root_of(scope: Scope) -> Instruction:
    """The instruction whose result is that of its computation."""
    (root,) = (i for i in scope.values() if i.is_root)
    return root


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parses a shape into the dtype, as HLO names it, and the dimensions of each of its arrays."""
    return [(name, tuple(int(d) for d in dims.split(",") if d)) for name, dims in _ARRAY.findall(shape)]


def shape_bytes(shape: str, on_chip: bool = True) -> int:
    """The bytes of the shape of an array or tuple, as HLO writes it.

    Args:
      shape: the text.
      on_chip: whether arrays in the memory of a TPU's chip, `S(1)`, count.
    """
    total = 0
    for name, dims in arrays(shape if on_chip else _ON_CHIP.sub("", shape)):
        digits = re.search(r"\d+", name)
        bits = _BITS.get(name, int(digits.group()) if digits else 0)
        total += math.prod(dims) * bits // 8
    return total


def result_bytes(instruction: Instruction, on_chip: bool = True) -> int:
    """The bytes of what an instruction makes; the scratch memory of cuBLAS and cuDNN is none of it.

    XLA gives their calls the scratch memory as one more result, the last one: `(f16[8,8], s8[4194304])`.
    """
    found = _ARRAY.findall(instruction.shape)
    library = instruction.attribute("custom_call_target")
    has_scratch = library.startswith(_LIBRARIES) and len(found) > 1 and found[-1][0] in ("s8", "u8")
    scratch = shape_bytes(f"{found[-1][0]}[{found[-1][1]}]") if has_scratch else 0
    return shape_bytes(instruction.shape, on_chip) - scratch


class Sources:
    """Source lines of instructions, from the tables that stand before the computations."""

    def __init__(self, text: str):
        head = text[: text.find("\nENTRY ")]
        # Behind the names of files are those of functions, in the same form.
        files = dict(_FILE.findall(head.partition("\nFunctionNames\n")[0]))
        self._lines = {at: (files.get(file, ""), line) for at, file, line in _LOCATION.findall(head)}
        self._frames = {frame: (at, parent) for frame, at, parent in _FRAME.findall(head)}

    def line(self, instruction: Instruction) -> str:
        """The user's source line: "mlp.py:41"; a library's line where no other is known; or ""."""
        frame, places = instruction.attribute("stack_frame_id"), []
        while frame in self._frames:
            at, parent = self._frames[frame]
            places.append(self._lines.get(at, ("", "")))
            # Parents are numbered from 1, so that 0 means none.
            frame = str(int(parent) - 1)
        users = [place for place in places if not _LIBRARY.search(place[0])]
        file, line = next(iter(users or places), ("", ""))
        return f"{_DIRECTORY.sub('', file)}:{line}" if file else ""


def _end(text: str, letter: str) -> int:
    """Where a letter stands in a text, outside of brackets; the end if nowhere."""
    depth = 0
    for at, found in enumerate(text):
        depth += (found in "([{") - (found in ")]}")
        if found == letter and not depth:
            return at
    return len(text)


_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"\bconstant\((-?\d+)\)")
#: What a loop's counter passes through unchanged.
_COPYING = frozenset(["copy", "bitcast", "copy-start", "copy-done"])


class Runs(NamedTuple):
    """Number of runs of a computation.

    Args:
      times: runs in one run of the program; loops with an unknown number of trips count as one trip.
      counted: whether no such loop is around it.
    """

    times: int
    counted: bool


def executed(computations: Computations, entry: str) -> dict[str, Runs]:
    """How often the entry runs each computation, through `while`, `call` and `conditional`."""
    runs, waiting = {entry: Runs(1, True)}, [entry]
    # Outer ones first.
    for name in waiting:
        outer = runs[name]
        for instruction in computations[name]:
            if instruction.opcode not in CONTAINERS:
                continue
            trips = _trips(instruction, name, computations) if instruction.opcode == "while" else 1
            times, counted = outer.times * (trips or 1), outer.counted and trips is not None
            for called in filter(computations.__contains__, instruction.called):
                before = runs.get(called, Runs(0, True))
                runs[called] = Runs(before.times + times, before.counted and counted)
                if called not in waiting:
                    waiting.append(called)
    return runs


def _trips(loop: Instruction, where: str, computations: Computations) -> int | None:
    """The number of trips of a loop, where the program says it; else None."""
    if known := _KNOWN.search(loop.line):
        return int(known.group(1))
    names = where, loop.attribute("condition"), loop.attribute("body")
    try:
        return _counted_trips(loop, *({i.name: i for i in computations[name]} for name in names))
    except (LookupError, ValueError):
        return None


def _counted_trips(loop: Instruction, outside: Scope, condition: Scope, body: Scope) -> int | None:
    """The trips of a loop whose counter grows from one constant to another by a constant; None for others.

    Args:
      loop: the instruction.
      outside, condition, body: the computations that it is in, and that it runs.

    Raises:
      LookupError, ValueError: for some of the others.
    """
    start, test, end = outside[loop.operands[0]], root_of(condition), root_of(body)

    def element(name: str, scope: Scope) -> int:
        """Which element of the loop's state a value is; ValueError if it is none."""
        return int(_source(name, scope).attribute("index"))

    def number(name: str, scope: Scope, given: Sequence[str] = start.operands) -> int:
        """The value of a constant, also of one that the loop is given and hands on."""
        if match := _CONSTANT.search(_source(name, scope).line):
            return int(match[1])
        return number(given[element(name, scope)], outside, ())

    counter = element(test.operands[0], condition)
    added = body[end.operands[counter]]
    first = number(start.operands[counter], outside, ())
    last, step = number(test.operands[1], condition), number(added.operands[1], body)
    opcodes = (start.opcode, test.opcode, test.attribute("direction"), end.opcode, added.opcode)
    is_counted = opcodes == ("tuple", "compare", "LT", "tuple", "add") and step > 0
    is_counted = is_counted and element(added.operands[0], body) == counter
    return max(-(-(last - first) // step), 0) if is_counted else None


def _source(name: str, scope: Scope) -> Instruction:
    """What makes a value, copies aside."""
    while scope[name].opcode in _COPYING:
        name = scope[name].operands[0]
    return scope[name]


_SLICING = frozenset(["dynamic-slice", "slice", "gather"])
_RESHAPING = frozenset(["bitcast", "reshape"])
_FUSIONS = frozenset(["fusion", "fusion-start"])
#: Copies beside the computation. Their results are a tuple, which has the source in it too.
_COPIES = frozenset(["copy-start", "slice-start"])


class Traffic:
    """Bytes read and written by the instructions of a module.

    Args:
      computations: those of the module.
      on_chip: whether arrays in the memory of the chip itself count: `S(1)` means another thing on GPUs.
    """

    def __init__(self, computations: Computations, on_chip: bool):
        self._computations, self._on_chip = computations, on_chip

    def of(self, instruction: Instruction, scope: Scope) -> tuple[int, int]:
        """The bytes that an instruction reads, and those that it writes.

        Args:
          instruction: a kernel.
          scope: instructions of its computation by name.
        """
        if instruction.opcode in _COPIES and not self._on_chip:
            source, made = scope[instruction.operands[0]].shape, _destination(instruction)
            return shape_bytes(made) if self._bytes(source) else 0, self._bytes(made)
        inner = inside(instruction, self._computations) if instruction.opcode in _FUSIONS else {}
        read = 0
        for position, name in enumerate(instruction.operands):
            whole = self._bytes(scope[name].shape) if name in scope else 0
            users = _users(inner, position) if inner else [(instruction, position)]
            read += min(whole, sum(_used(user, place, whole) for user, place in users))
        return read, self._written(instruction, inner)

    def _written(self, instruction: Instruction, inner: Scope) -> int:
        if not inner:
            return result_bytes(instruction, self._on_chip)
        root = root_of(inner)
        outputs = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        # The root of a fusion of the TPU compiler does not say where the result lies; the fusion does.
        shapes = [output.shape for output in outputs] if self._on_chip else _parts(instruction.shape)
        if len(outputs) != len(shapes):
            # The root is itself a fusion of several results.
            return sum(map(self._bytes, shapes))
        return sum(self._output(o, s, inner) for o, s in zip(outputs, shapes, strict=True))

    def _output(self, source: Instruction, shape: str, scope: Scope) -> int:
        while source.opcode in _RESHAPING and source.operands[0] in scope:
            source = scope[source.operands[0]]
        if source.opcode == "dynamic-update-slice" and source.operands[1] in scope:
            return shape_bytes(scope[source.operands[1]].shape) if self._bytes(shape) else 0
        return self._bytes(shape)

    def _bytes(self, shape: str) -> int:
        return shape_bytes(shape, self._on_chip)


def _used(user: Instruction, place: int, whole: int) -> int:
    """The bytes that an instruction reads of the operand in that place; in an update that is written to."""
    if place == 0 and user.opcode in _SLICING:
        return shape_bytes(user.shape)
    return 0 if place == 0 and user.opcode == "dynamic-update-slice" else whole


def _destination(copy: Instruction) -> str:
    """The shape that `(destination, source, flag)` or `((source), destination, flag)` copies to."""
    parts = _parts(copy.shape)
    return parts[1] if copy.opcode == "slice-start" else parts[0]


def _parts(shape: str) -> list[str]:
    """Splits the shape of a tuple into those of its elements; of an array, into itself."""
    if not shape.startswith("("):
        return [shape]
    parts, rest = [], shape[1:-1]
    while rest:
        end = _end(rest, ",")
        parts.append(rest[:end].strip())
        rest = rest[end + 1 :]
    return parts


def _users(inner: Scope, position: int) -> Iterator[tuple[Instruction, int]]:
    """Yields the instructions of a fusion that use an operand of it, and their operand's place."""
    waiting = [
        i.name for i in inner.values() if i.opcode == "parameter" and f"parameter({position})" in i.line
    ]
    for name in waiting:
        uses = (
            (i, place) for i in inner.values() for place, operand in enumerate(i.operands) if operand == name
        )
        for user, place in uses:
            if user.opcode in _RESHAPING:
                waiting.append(user.name)
            else:
                yield user, place
