"""Parses the text of an optimised HLO module: computations, instructions, shapes, source lines.

`kernels` turns the instructions into kernels.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Instructions of a scheduled computation that launch nothing. Every other one counts as one kernel, except
#: those that run another computation (while, call, conditional), which count as what is inside.
NO_KERNEL = frozenset(
    [
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
        "replica-id", "copy-done", "async-done", "async-update", "all-reduce-done", "all-gather-done",
        "collective-permute-done", "fusion-done", "slice-done", "send-done", "recv-done", "opt-barrier",
    ]
)  # fmt: skip
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
_FILE = re.compile(r'^(\d+) "(.*)"$')
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")
#: Files whose lines are not the user's: installed packages and this library.
_LIBRARY = re.compile(r"(?:site|dist)-packages/|^<frozen|^" + re.escape(str(Path(__file__).parent.parent)))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """Instruction, one line of a computation: name, shape as text, opcode and names of its operands."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str
    is_root: bool = False

    @property
    def op_name(self) -> str:
        """Returns the name that tracing gave it: "jit(step)/jvp(Net)/Dense_0/dot_general"; "" if none."""
        match = _OP_NAME.search(self.line)
        return match.group(1).partition(";")[0] if match else ""

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute, without braces or quotes; "" if it is missing."""
        match = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|\"([^\"]*)\"|%?([\w.\-]+))", self.line)
        return next((group for group in match.groups() if group), "") if match else ""

    @property
    def called(self) -> list[str]:
        """Returns the names of the computations that it runs or is made of."""
        names = _CALLED.findall(self.line)
        for group in _BRANCHES.findall(self.line):
            names += re.findall(r"[\w.\-]+", group)
        return names


Computations = dict[str, list[Instruction]]


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
            shape, rest = _split_shape(match.group(3))
            opcode, _, tail = rest.partition("(")
            operands = re.findall(r"%([\w.\-]+)", tail[: tail.find(")")])
            name = match.group(2)
            current.append(Instruction(name, shape, opcode, tuple(operands), line, bool(match.group(1))))
    return computations, entry


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Parses a shape into the dtype, as HLO names it, and the dimensions of each of its arrays."""
    return [(name, tuple(int(d) for d in dims.split(",") if d)) for name, dims in _ARRAY.findall(shape)]


def shape_bytes(shape: str, on_chip: bool = True) -> int:
    """Returns the bytes of the shape of an array or tuple, as HLO writes it.

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


def result_bytes(instruction: Instruction) -> int:
    """Returns the bytes of what an instruction makes; the scratch memory of cuBLAS and cuDNN is none of it.

    XLA gives their calls the scratch memory as one more result, the last one: `(f16[8,8], s8[4194304])`.
    """
    found = _ARRAY.findall(instruction.shape)
    library = instruction.attribute("custom_call_target")
    has_scratch = library.startswith(_LIBRARIES) and len(found) > 1 and found[-1][0] in ("s8", "u8")
    scratch = shape_bytes(f"{found[-1][0]}[{found[-1][1]}]") if has_scratch else 0
    return shape_bytes(instruction.shape) - scratch


class Sources:
    """Source lines of instructions, from the tables that stand before the computations."""

    def __init__(self, text: str):
        head = text[: text.find("\nENTRY ")]
        self._files = _table(head, "FileNames", _FILE)
        self._locations = _table(head, "FileLocations", _LOCATION)
        self._frames = _table(head, "StackFrames", _FRAME)

    def line(self, instruction: Instruction) -> str:
        """Returns the user's source line: "mlp.py:41"; a library's line where no other is known; or ""."""
        frame = instruction.attribute("stack_frame_id")
        places = list(self._places(frame))
        users = [place for place in places if not _LIBRARY.search(place[0])]
        for file, line in users or places:
            return _DIRECTORY.sub("", file) + f":{line}"
        return ""

    def _places(self, frame: str) -> Iterator[tuple[str, str]]:
        seen = set()
        while frame in self._frames and frame not in seen:
            seen.add(frame)
            location, parent = self._frames[frame]
            if location in self._locations:
                file, line = self._locations[location]
                yield self._files.get(file, ("",))[0], line
            # Parents are numbered from 1, so that 0 means none.
            frame = str(int(parent) - 1)


def _table(head: str, title: str, pattern: re.Pattern[str]) -> Mapping[str, tuple[str, ...]]:
    _, found, rest = head.partition(f"\n{title}\n")
    rows = {}
    for line in rest.splitlines() if found else ():
        match = pattern.match(line)
        if match is None:
            break
        rows[match.group(1)] = match.groups()[1:]
    return rows


def _split_shape(text: str) -> tuple[str, str]:
    """Splits `f32[2]{0} add(...)` or `(f32[2], s32[]) tuple(...)` into its shape and the rest."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[: at + 1], text[at + 2 :]
    raise ValueError(f"unbalanced shape in {text!r}")
