"""XLA's buffer assignment: which arrays lie in which memory when the memory in use is largest.

Compiled programs hand it out as serialised protocol buffers (`BufferAssignmentProto` and `HloModuleProto` of
XLA's `hlo.proto`), of which the few fields that matter are read here, without a protobuf library.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Buffer(NamedTuple):
    """An array in memory.

    Args:
      size: in bytes.
      shape: its axes, as compiled.
      op_name: name stack and operation that made it: "jit(step)/transpose(jvp(Net))/dot_general".
    """

    size: int
    shape: tuple[int, ...] = ()
    op_name: str = ""


class Allocation(NamedTuple):
    """A piece of memory that a program holds as long as it runs.

    Args:
      size: in bytes.
      parameter: which argument of the program lies there, or None.
      is_result: whether a result lies there in the end.
      buffers: what is in it when the program's arrays take most memory.
    """

    size: int
    parameter: int | None
    is_result: bool
    buffers: tuple[Buffer, ...]


def allocations(compiled: Any) -> list[Allocation]:
    """The memory of a compiled program, constants left out; [] where its backend doesn't say.

    Args:
      compiled: a `jax.stages.Compiled`.
    """
    assignment = getattr(compiled.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    modules = compiled.runtime_executable().hlo_modules() if assignment else []
    if len(modules) != 1:
        return []
    try:
        return _read(_Message(assignment), _Module(modules[0].as_serialized_hlo_module_proto()))
    except (LookupError, TypeError, ValueError):
        # A program in a form that other versions of XLA may give it: its totals are known all the same.
        return []


class _Message:
    """A serialised message: by number of a field its values, integers or bytes of what is in it.

    Args:
      data: the message.
    """

    def __init__(self, data: bytes = b""):
        self._fields: dict[int, list[Any]] = defaultdict(list)
        at = 0
        while at < len(data):
            key, at = _varint(data, at)
            kind = key & 7
            if kind == 0:
                value, at = _varint(data, at)
            else:
                size, at = _varint(data, at) if kind == 2 else (8 if kind == 1 else 4, at)
                value, at = data[at : at + size], at + size
            self._fields[key >> 3].append(value)

    def number(self, field: int) -> int:
        """A field of one integer."""
        return self._fields[field][0] if self._fields[field] else 0

    def text(self, field: int) -> str:
        """A field of text."""
        return b"".join(self._fields[field]).decode(errors="replace")

    def messages(self, field: int) -> list[Any]:
        """A field of messages."""
        return list(map(_Message, self._fields[field]))

    def message(self, field: int) -> "_Message":
        """A field of one message."""
        return _Message(b"".join(self._fields[field]))

    def numbers(self, field: int) -> list[int]:
        """A repeated field of integers, packed."""
        data, at, found = b"".join(self._fields[field]), 0, list[int]()
        while at < len(data):
            number, at = _varint(data, at)
            found.append(number)
        return found


class _Module:
    """The instructions of a serialised HloModuleProto by number."""

    def __init__(self, data: bytes):
        self.instructions: dict[int, _Message] = {}
        self._inside: dict[int, list[int]] = {}
        self._users: dict[int, list[int]] = defaultdict(list)
        for computation in _Message(data).messages(3):
            # An instruction's number holds that of its computation in its upper half, in newer versions.
            made = {part.number(35): part for part in computation.messages(2)}
            self.instructions.update(made)
            self._inside[computation.number(5)] = list(made)
        for number, instruction in self.instructions.items():
            for operand in instruction.numbers(36):
                self._users[operand].append(number)

    def op_name(self, number: int) -> str:
        """The name of an operation; of those that XLA put there, that of a neighbour."""
        return self._nearest(number, self._before) or self._nearest(number, self._users.__getitem__)

    def _nearest(self, number: int, near: Callable[[int], Iterable[int]]) -> str:
        layer, seen = [number], {number}
        for _ in range(8):
            layer = [n for n in layer if n in self.instructions]
            names = (self.instructions[n].message(7).text(2) for n in layer)
            if name := next(filter(None, names), ""):
                return name
            layer = list(dict.fromkeys(m for n in layer for m in near(n) if m not in seen))
            seen.update(layer)
        return ""

    def _before(self, number: int) -> list[int]:
        instruction = self.instructions[number]
        is_fusion = instruction.text(2) == "fusion"
        inside = self._inside[instruction.numbers(38)[0]] if is_fusion else ()
        return [*reversed(inside), *instruction.numbers(36)]

    def shape(self, number: int, index: Sequence[int]) -> tuple[int, ...]:
        """The axes of a result of an instruction, or of an element of it; those of a scalar if unknown."""
        shape = self.instructions.get(number, _Message()).message(3)
        for i in index:
            shape = (*shape.messages(4)[i : i + 1], _Message())[0]
        return tuple(shape.numbers(3))


def _read(assignment: _Message, module: _Module) -> list[Allocation]:
    buffers: dict[int, Buffer] = {}
    for array in assignment.messages(1):
        place = array.message(3)
        number = place.number(4)
        shape = module.shape(number, place.numbers(3))
        buffers[array.number(1)] = Buffer(array.number(2), shape, module.op_name(number))
    at_peak = {trace.number(1): trace.numbers(2) for trace in assignment.messages(5)}
    return [
        Allocation(
            size=held.number(2),
            parameter=held.number(6) if held.number(5) else None,
            is_result=bool(held.number(7)),
            buffers=tuple(buffers[array] for array in at_peak[held.number(1)]),
        )
        for held in assignment.messages(3)
        # Not those in threads' own memory (3), nor constants (12).
        if not held.number(3) and not held.number(12)
    ]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
