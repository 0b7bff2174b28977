"""Counts the bytes of memory that an instruction of an optimised HLO module reads and writes.

Where a kernel takes a slice of an array or writes one in place, as in the body of a scan over stacked layers,
the slice counts and not the array. A TPU's arrays in the memory of the chip itself cost no bandwidth of the
device's: they do not count.
"""

from collections.abc import Iterator, Mapping

from jmp_policy._src.report.lowering.hlo import Computations, Instruction, result_bytes, shape_bytes

_SLICING = frozenset(["dynamic-slice", "slice", "gather"])
_FORWARDING = frozenset(["bitcast", "reshape"])
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

    def read(self, instruction: Instruction, scope: Mapping[str, Instruction]) -> int:
        """Returns the bytes that an instruction reads.

        Args:
          instruction: a kernel.
          scope: instructions of its computation by name.
        """
        if instruction.opcode in _COPIES and not self._on_chip:
            return self._copied(instruction) if self._bytes(scope[instruction.operands[0]].shape) else 0
        inner = self._fused(instruction)
        total = 0
        for position, name in enumerate(instruction.operands):
            whole = self._bytes(scope[name].shape) if name in scope else 0
            users = _users(inner, position) if inner else [(instruction, position)]
            total += min(whole, sum(self._used(user, place, whole) for user, place in users))
        return total

    def written(self, instruction: Instruction) -> int:
        """Returns the bytes that an instruction writes."""
        if instruction.opcode in _COPIES and not self._on_chip:
            return self._bytes(_destination(instruction))
        inner = self._fused(instruction)
        root = next((i for i in inner.values() if i.is_root), None)
        if root is None:
            return result_bytes(instruction) if self._on_chip else self._bytes(instruction.shape)
        outputs = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        # The root of a fusion of the TPU compiler does not say where the result lies; the fusion does.
        shapes = [output.shape for output in outputs] if self._on_chip else _parts(instruction.shape)
        if len(outputs) != len(shapes):
            # The root is itself a fusion of several results.
            return sum(map(self._bytes, shapes))
        return sum(self._output(o, s, inner) for o, s in zip(outputs, shapes, strict=True))

    def _bytes(self, shape: str) -> int:
        return shape_bytes(shape, self._on_chip)

    def _copied(self, instruction: Instruction) -> int:
        return shape_bytes(_destination(instruction))

    def _used(self, user: Instruction, place: int, whole: int) -> int:
        """Returns the bytes that an instruction reads of the operand in that place."""
        if user.opcode in _SLICING and place == 0:
            return shape_bytes(user.shape)
        if user.opcode == "dynamic-update-slice" and place == 0:
            # Written in place.
            return 0
        return whole

    def _output(self, output: Instruction, shape: str, scope: Mapping[str, Instruction]) -> int:
        source = output
        while source.opcode in _FORWARDING and source.operands[0] in scope:
            source = scope[source.operands[0]]
        if source.opcode == "dynamic-update-slice" and source.operands[1] in scope:
            return shape_bytes(scope[source.operands[1]].shape) if self._bytes(shape) else 0
        return self._bytes(shape)

    def _fused(self, instruction: Instruction) -> dict[str, Instruction]:
        if instruction.opcode not in _FUSIONS:
            return {}
        return {i.name: i for name in instruction.called for i in self._computations.get(name, ())}


def _destination(copy: Instruction) -> str:
    """Returns the shape that `(destination, source, flag)` or `((source), destination, flag)` copies to."""
    parts = _parts(copy.shape)
    return parts[1] if copy.opcode == "slice-start" else parts[0]


def _parts(shape: str) -> list[str]:
    """Splits the shape of a tuple into those of its elements; of an array, into itself."""
    if not shape.startswith("("):
        return [shape]
    parts, depth, begin = [], 0, 1
    for at, letter in enumerate(shape):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if (letter == "," and depth == 1) or depth == 0:
            parts.append(shape[begin:at].strip())
            begin = at + 1
    return parts


def _users(inner: Mapping[str, Instruction], position: int) -> Iterator[tuple[Instruction, int]]:
    """Yields the instructions of a fusion that use an operand of it, and their operand's place."""
    waiting = [
        i.name for i in inner.values() if i.opcode == "parameter" and f"parameter({position})" in i.line
    ]
    for name in waiting:
        for user in inner.values():
            for place, operand in enumerate(user.operands):
                if operand != name:
                    continue
                if user.opcode in _FORWARDING:
                    waiting.append(user.name)
                else:
                    yield user, place
