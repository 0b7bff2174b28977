"""XLA's buffer assignment: which arrays lie in which memory when the memory in use is largest.

Compiled programs hand it out as serialised protocol buffers (`BufferAssignmentProto` and `HloModuleProto` of
XLA's `hlo.proto`), of which the few fields that matter are read here, without a protobuf library.
"""

from collections.abc import Callable, Iterator, Sequence
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
        return _read(assignment, _Module(modules[0].as_serialized_hlo_module_proto()))
    except (LookupError, ValueError):
        # A program in a form that other versions of XLA may give it: its totals are known all the same.
        return []


class _Instruction(NamedTuple):
    opcode: str
    operands: list[int]
    calls: list[int]
    op_name: str
    shape: Any


class _Module:
    """The instructions of a serialised HloModuleProto by number."""

    def __init__(self, data: bytes):
        self.instructions: dict[int, _Instruction] = {}
        self._inside: dict[int, list[int]] = {}
        for computation in _all(data, 3):
            # An instruction's number holds that of its computation in its upper half, in newer versions.
            made = {_first(part, 35, 0): _instruction(part) for part in _all(computation, 2)}
            self.instructions.update(made)
            self._inside[_first(computation, 5, 0)] = list(made)
        self._users: dict[int, list[int]] = {}
        for number, instruction in self.instructions.items():
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(number)

    def name(self, number: int) -> str:
        """The name of an operation; of those that XLA put there, that of a neighbour."""
        return self._nearest(number, self._before) or self._nearest(number, self._after)

    def _nearest(self, number: int, near: Callable[[int], list[int]]) -> str:
        layer, seen = [number], {number}
        for _ in range(8):
            layer = [n for n in layer if n in self.instructions]
            for n in layer:
                if self.instructions[n].op_name:
                    return self.instructions[n].op_name
            layer = list(dict.fromkeys(m for n in layer for m in near(n) if m not in seen))
            seen.update(layer)
        return ""

    def _before(self, number: int) -> list[int]:
        instruction = self.instructions[number]
        inside = self._inside[instruction.calls[0]] if instruction.opcode == "fusion" else ()
        return [*reversed(inside), *instruction.operands]

    def _after(self, number: int) -> list[int]:
        return self._users.get(number, [])


def _instruction(data: bytes) -> _Instruction:
    return _Instruction(
        opcode=_text(data, 2),
        operands=_integers(data, 36),
        calls=_integers(data, 38),
        op_name=_text(_first(data, 7, b""), 2),
        shape=_first(data, 3, b""),
    )


def _read(assignment: bytes, module: _Module) -> list[Allocation]:
    buffers: dict[int, Buffer] = {}
    for data in _all(assignment, 1):
        place = _first(data, 3, b"")
        number, index = _first(place, 4, 0), _integers(place, 3)
        instruction = module.instructions.get(number)
        shape = _shape(instruction.shape, index) if instruction else ()
        buffers[_first(data, 1, 0)] = Buffer(_first(data, 2, 0), shape, module.name(number))
    at_peak = {_first(data, 1, 0): _integers(data, 2) for data in _all(assignment, 5)}
    # Not those in threads' own memory (3), nor constants (12).
    held = [data for data in _all(assignment, 3) if not _first(data, 3, 0) and not _first(data, 12, 0)]
    return [
        Allocation(
            size=_first(data, 2, 0),
            parameter=_first(data, 6, 0) if _first(data, 5, 0) else None,
            is_result=bool(_first(data, 7, 0)),
            buffers=tuple(buffers[array] for array in at_peak[_first(data, 1, 0)]),
        )
        for data in held
    ]


def _shape(data: bytes, index: Sequence[int]) -> tuple[int, ...]:
    for i in index:
        parts = list(_all(data, 4))
        data = parts[i] if i < len(parts) else b""
    return tuple(_integers(data, 3))


def _all(data: bytes, field: int) -> Iterator[Any]:
    return (value for number, value in _fields(data) if number == field)


def _first(data: bytes, field: int, default: Any) -> Any:
    return next(_all(data, field), default)


def _text(data: bytes, field: int) -> str:
    return _first(data, field, b"").decode(errors="replace")


def _integers(data: bytes, field: int) -> list[int]:
    """A repeated field of integers, packed or not."""
    found: list[int] = []
    for value in _all(data, field):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields numbers and values of a message's fields: integers, or bytes of texts, messages, lists."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 2:
                size, at = _varint(data, at)
                value, at = data[at : at + size], at + size
            case kind:
                size = 8 if kind == 1 else 4
                value, at = data[at : at + size], at + size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
