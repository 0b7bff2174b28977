"""Compiles exported programs for a device that need not be there; run as a program, it answers in files.

It imports nothing of the library, so that the separate process begins quickly.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


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
    """Compiles the programs in a folder, and writes the answers beside them; runs in the separate process."""
    # Making the first backend initialises the CUDA plugin; by hand as well, it fails with ALREADY_EXISTS.
    jax.devices("cpu")
    for i, request in enumerate(json.loads(Path(folder, "request.json").read_text())):
        data = Path(folder, f"{i}.bin").read_bytes()
        try:
            answer = _compile(data, **request)
        except Exception as error:
            answer = Compiled(error=last_lines(f"{type(error).__name__}: {error}"))
        Path(folder, f"{i}.json").write_text(json.dumps(answer._asdict()))


def _compile(
    data: bytes,
    mesh: Sequence[Any],
    devices: int,
    donated: Sequence[int],
    topology: dict[str, Any],
    options: dict[str, Any],
) -> Compiled:
    from jax.experimental import topologies

    program = jax.export.deserialize(bytearray(data))
    found = topologies.get_topology_desc(**topology).devices[:devices]
    axes = [tuple(axis) for axis in mesh] or [("devices", devices, "Auto")]
    placed = _mesh(found, axes)
    shardings = [s or NamedSharding(placed, PartitionSpec()) for s in program.in_shardings_jax(placed)]
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.in_avals, shardings, strict=True)
    ]

    def call(*arrays: Any) -> Any:
        return program.call(list(arrays))

    jitted = jax.jit(call, donate_argnums=tuple(donated))
    lowered = jitted.trace(*types).lower(lowering_platforms=(topology["platform"],))
    return described(lowered.compile(compiler_options=options))


def _mesh(devices: Sequence[Any], axes: Sequence[tuple[str, int, str]]) -> Mesh:
    """Devices as a mesh; those of TPUs so that neighbours on an axis are neighbours in the slice."""
    names, sizes, kinds = zip(*axes, strict=True)
    types = tuple(AxisType[kind] for kind in kinds)
    if devices[0].platform == "tpu":
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=types)


if __name__ == "__main__":
    main(sys.argv[1])
