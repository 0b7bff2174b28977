"""XLA's buffer assignment: which arrays lie in which memory when the memory in use is largest.

Compiled programs hand it out as serialised protocol buffers (`BufferAssignmentProto` and `HloModuleProto` of
XLA's `hlo.proto`), of which the few fields that matter are read here, without a protobuf library. How long an
array is needed follows from the schedule, which is part of the module.
"""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
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
      buffers: what is in it when the program's arrays take most memory; for results, what it is in the end.
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
    element: int
    number: int
    op_name: str
    shape: Any


class _Module:
    """The instructions of a serialised HloModuleProto, in the order in which they run."""

    def __init__(self, data: bytes):
        self.instructions: dict[int, _Instruction] = {}
        self.roots: dict[int, int] = {}
        self.orders: dict[int, list[int]] = {}
        for computation in _all(data, 3):
            own = _first(computation, 5, 0)
            # An instruction's number holds that of its computation in its upper half, in newer versions.
            made = {_first(part, 35, 0): _instruction(part) for part in _all(computation, 2)}
            self.instructions.update(made)
            self.roots[own] = _first(computation, 6, 0)
            self.orders[own] = list(made)
        for entry in _all(_first(data, 7, b""), 1):
            own, sequence = _first(entry, 1, 0), _integers(_first(entry, 2, b""), 1)
            if set(sequence) == set(self.orders.get(own, ())):
                self.orders[own] = sequence
        self.entry = _first(data, 6, 0)
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
        inside = self.orders[instruction.calls[0]] if instruction.opcode == "fusion" else ()
        return [*reversed(inside), *instruction.operands]

    def _after(self, number: int) -> list[int]:
        return self._users.get(number, [])


def _instruction(data: bytes) -> _Instruction:
    return _Instruction(
        _text(data, 2),
        _integers(data, 36),
        _integers(data, 38),
        _first(data, 13, 0),
        _first(data, 9, 0),
        _text(_first(data, 7, b""), 2),
        _first(data, 3, b""),
    )


class _Slot(NamedTuple):
    """A place in memory: which allocation, and where in it."""

    allocation: int
    offset: int
    size: int


#: By the place within a tuple: the arrays that a value consists of.
_Sources = dict[tuple[int, ...], frozenset[int]]


class _Lives:
    """From when to when each array is needed: runs through the schedule once, loops included.

    Args:
      module: the program.
      made: arrays that an instruction makes, by instruction and place within its result.
    """

    def __init__(self, module: _Module, made: dict[int, dict[tuple[int, ...], int]]):
        self._module, self._made = module, made
        self.born: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self._time = 0
        results = self._run(module.entry, [])
        self.results = frozenset().union(*results.values())
        self.last.update(dict.fromkeys(self.results, self._time))

    def _run(self, computation: int, arguments: Sequence[_Sources]) -> _Sources:
        known: dict[int, _Sources] = {}
        for number in self._module.orders[computation]:
            instruction = self._module.instructions[number]
            self._time += 1
            operands = [known.get(operand, {}) for operand in instruction.operands]
            for sources in operands:
                self._use(sources)
            passed = self._passed(instruction, operands, arguments)
            own = {place: frozenset([array]) for place, array in self._made.get(number, {}).items()}
            self._use(own)
            known[number] = {place: own.get(place, frozenset()) | passed.get(place, frozenset())
                             for place in {*own, *passed}}  # fmt: skip
        return known.get(self._module.roots[computation], {})

    def _use(self, sources: _Sources) -> None:
        for arrays in sources.values():
            for array in arrays:
                self.born.setdefault(array, self._time)
                self.last[array] = self._time

    def _passed(
        self, instruction: _Instruction, operands: list[_Sources], arguments: Sequence[_Sources]
    ) -> _Sources:
        """What an instruction passes on without making it."""
        match instruction.opcode:
            case "parameter" if arguments:
                return arguments[instruction.number]
            case "tuple":
                return {(i, *place): a for i, part in enumerate(operands) for place, a in part.items()}
            case "get-tuple-element":
                i = instruction.element
                return {place[1:]: a for place, a in operands[0].items() if place[:1] == (i,)}
            case "bitcast" | "opt-barrier":
                return operands[0]
            case "call":
                return self._run(instruction.calls[0], operands)
            case "while":
                for body in instruction.calls:
                    self._run(body, operands)
            case "conditional":
                for branch, operand in zip(instruction.calls, operands[1:], strict=True):
                    self._run(branch, [operand])
        return {}

    def at_peak(self, slots: dict[_Slot, list[int]]) -> set[int]:
        """The arrays needed when those needed take most memory: one for each slot, the first in it.

        Several arrays share a slot when one is changed in place, as the carries of loops are.
        """
        events = []
        for slot, arrays in slots.items():
            for array in filter(self.born.__contains__, arrays):
                events += [(self.born[array], 1, slot, array), (self.last[array] + 1, 0, slot, array)]
        live: dict[_Slot, list[int]] = {}
        most, now, found = -1, 0, set()
        for _, is_born, slot, array in sorted(events):
            inside = live.setdefault(slot, [])
            now += slot.size * ((not inside) if is_born else -(len(inside) == 1))
            (inside.append if is_born else inside.remove)(array)
            if now > most:
                most, found = now, {arrays[0] for arrays in live.values() if arrays}
        return found


def _read(assignment: bytes, module: _Module) -> list[Allocation]:
    buffers: dict[int, Buffer] = {}
    made: dict[int, dict[tuple[int, ...], int]] = {}
    for data in _all(assignment, 1):
        array, place = _first(data, 1, 0), _first(data, 3, b"")
        number, index = _first(place, 4, 0), tuple(_integers(place, 3))
        made.setdefault(number, {})[index] = array
        instruction = module.instructions.get(number)
        shape = _shape(instruction.shape, index) if instruction else ()
        buffers[array] = Buffer(_first(data, 2, 0), shape, module.name(number))
    lives = _Lives(module, made)
    # Not those in threads' own memory (3), nor constants (12).
    held = [data for data in _all(assignment, 3) if not _first(data, 3, 0) and not _first(data, 12, 0)]
    heap: dict[_Slot, list[int]] = {}
    for data in held:
        if not _first(data, 5, 0) and not _first(data, 7, 0):
            for array, offset, size in _assigned(data):
                heap.setdefault(_Slot(_first(data, 1, 0), offset, size), []).append(array)
    kept = lives.at_peak(heap)
    return [
        Allocation(
            _first(data, 2, 0),
            _first(data, 6, 0) if _first(data, 5, 0) else None,
            bool(_first(data, 7, 0)),
            tuple(buffers[array] for array in _apart(data, lives.results if _first(data, 7, 0) else kept)),
        )
        for data in held
    ]


def _apart(allocation: bytes, kept: AbstractSet[int]) -> list[int]:
    """Those of an allocation's arrays that are kept, without those that overlap an earlier one.

    A loop's carry may be overwritten by another array before its next value is there.
    """
    found, end = [], 0
    for array, offset, size in sorted(_assigned(allocation), key=lambda part: part[1:]):
        if array in kept and offset >= end:
            found.append(array)
            end = offset + size
    return found


def _assigned(allocation: bytes) -> list[tuple[int, int, int]]:
    """Arrays, offsets and sizes."""
    return [(_first(part, 1, 0), _first(part, 2, 0), _first(part, 3, 0)) for part in _all(allocation, 9)]


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
