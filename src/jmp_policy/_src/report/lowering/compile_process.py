"""Compiles exported programs for a device that need not be there; run as a program, it answers in a file.

It imports nothing of the library, so that the separate process begins quickly.
"""

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Compiled(NamedTuple):
    """Result of compiling a program.

    Args:
      text: optimised HLO.
      argument_bytes, output_bytes, temp_bytes: memory, per device.
      alias_bytes: how much of the results lies where arguments did.
      peak_bytes: the most memory in use, arguments and results included; 0 where the compiler does not say.
      error: why there is no program, if there is none.
    """

    text: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    peak_bytes: int = 0
    error: str = ""


def described(executable: Any) -> Compiled:
    """What a compiled program says of itself."""
    memory = executable.memory_analysis()
    return Compiled(
        executable.as_text(),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.peak_memory_in_bytes,
    )


def last_lines(text: str, most: int = 12) -> str:
    """The last lines of what a compiler wrote."""
    lines = [line for line in text.splitlines() if line.strip() and "cudart_stub" not in line]
    return "\n".join(lines[-most:])


def main(folder: str) -> None:
    """Compiles the programs of a folder's request, and writes the answers beside it."""
    # Making the first backend initialises the CUDA plugin; by hand as well, it fails with ALREADY_EXISTS.
    jax.devices("cpu")
    answers = []
    for program in pickle.loads(Path(folder, "request").read_bytes()):
        try:
            answers.append(_compile(**program))
        except Exception as error:
            answers.append(Compiled(error=last_lines(f"{type(error).__name__}: {error}")))
        # Whole at any time: the caller may be interrupted.
        part = Path(folder, "part")
        part.write_bytes(pickle.dumps([tuple(answer) for answer in answers]))
        part.replace(Path(folder, "answer"))


def _compile(
    data: bytes,
    devices: int,
    mesh: Sequence[tuple[str, int, str]],
    donated: Sequence[int],
    topology: dict[str, Any],
    options: dict[str, Any],
) -> Compiled:
    from jax.experimental import topologies

    program = jax.export.deserialize(bytearray(data))
    found = topologies.get_topology_desc(**topology).devices[:devices]
    names, sizes, kinds = zip(*(mesh or [("devices", devices, "Auto")]), strict=True)
    # Of TPUs, neighbours on an axis are neighbours in the slice.
    placed = jax.make_mesh(sizes, names, tuple(AxisType[kind] for kind in kinds), devices=found)
    shardings = [s or NamedSharding(placed, PartitionSpec()) for s in program.in_shardings_jax(placed)]
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.in_avals, shardings, strict=True)
    ]

    jitted = jax.jit(lambda *arrays: program.call(list(arrays)), donate_argnums=tuple(donated))
    lowered = jitted.trace(*types).lower(lowering_platforms=(topology["platform"],))
    return described(lowered.compile(compiler_options=options))


if __name__ == "__main__":
    main(sys.argv[1])
