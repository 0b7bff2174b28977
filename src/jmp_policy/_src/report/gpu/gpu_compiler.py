"""Runs XLA's GPU compiler in a separate process, on a machine with or without a GPU.

JAX's CUDA plugin compiles for any card that is described to it; only running needs one. Loading the plugin
changes a process for good (its platform can be registered once, and with a GPU it takes memory), so the
caller only exports its program, which needs no plugin, and this file, run as a program, compiles it.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

#: Autotuning would time kernels on the card.
OPTIONS: Any = {"xla_gpu_autotune_level": 0}

_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S+")
_MESH = re.compile(r"sdy\.mesh @\w+ = <\[((?:\"[^\"]+\"=\d+(?:, )?)+)\]")


class LoweringUnavailableError(RuntimeError):
    """Error for JAX's GPU compiler that is not installed, or not in the version of JAX.

    Example:
      >>> issubclass(LoweringUnavailableError, RuntimeError)
      True
    """


class Exported(NamedTuple):
    """Program to compile.

    Args:
      data: the program as `jax.export` serialised it.
      devices: number of devices that it runs on.
      mesh: (name, size, type) of each axis of the mesh of its arguments.
      donated: positions of the arguments that it may overwrite.
    """

    data: bytes
    devices: int
    mesh: tuple[tuple[str, int, str], ...]
    donated: tuple[int, ...]


class Compiled(NamedTuple):
    """Result of compiling a program.

    Args:
      text: optimised HLO.
      argument_bytes, output_bytes, temp_bytes: memory, per device.
      error: why there is no program, if there is none.
    """

    text: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    error: str = ""


def exported(
    function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], donated: Sequence[int] = ()
) -> Exported:
    """Exports the program of a function of a list of arrays, for any GPU; needs no plugin, and runs nothing.

    Raises:
      ValueError: when it calls back to the host, or its arguments are on several meshes.
    """
    types = [_type(array) for array in arrays]
    mesh = _mesh_of(types)

    def call(arrays: Sequence[Any]) -> list[Any]:
        # jax.export refuses trees with classes that it does not know, such as an optimizer's state.
        return jax.tree.leaves(function(arrays))

    program = _export(jax.jit(call), types)
    try:
        data = bytes(program.serialize())
    except ImportError as error:
        raise _unavailable(["flatbuffers"]) from error
    if program.nr_devices > 1 and not mesh:
        mesh = _mesh_in(program.mlir_module())
    return Exported(data, program.nr_devices, mesh, tuple(donated))


def compiled(programs: Sequence[Exported], config: str) -> list[Compiled]:
    """Compiles programs for the card that `config` describes, in one process that does nothing else.

    For a program that does not compile, `Compiled.error` says why.

    Raises:
      LoweringUnavailableError: when the compiler is not installed.
      RuntimeError: when the process ends without an answer, with the last lines that it wrote.
    """
    _check_installed()
    with tempfile.TemporaryDirectory() as folder:
        request = [
            {"devices": p.devices, "mesh": p.mesh, "donated": p.donated, "config": config} for p in programs
        ]
        Path(folder, "request.json").write_text(json.dumps(request))
        for i, program in enumerate(programs):
            Path(folder, f"{i}.bin").write_bytes(program.data)
        # -P: the files beside this one are no top-level modules.
        command = [sys.executable, "-P", __file__, folder]
        ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        answers = [Path(folder, f"{i}.json") for i in range(len(programs))]
        if ran.returncode or not all(path.exists() for path in answers):
            raise RuntimeError(
                f"XLA's GPU compiler ended with status {ran.returncode}. Its last lines:\n"
                + _last_lines(ran.stderr)
            )
        return [Compiled(**json.loads(path.read_text())) for path in answers]


def is_installed() -> bool:
    """Returns whether programs can be compiled for a GPU here."""
    return not _missing()


def compile_here(function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> tuple[Any, Compiled]:
    """Compiles a function for the default device; returns the executable and its `Compiled`."""
    executable = jax.jit(function).lower(list(arrays)).compile()
    return executable, _describe(executable)


def _describe(executable: Any) -> Compiled:
    memory = executable.memory_analysis()
    return Compiled(
        executable.as_text(),
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
    )


def _type(array: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(array, "sharding", None)
    kept = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=kept)


def _mesh_of(types: Sequence[jax.ShapeDtypeStruct]) -> tuple[tuple[str, int, str], ...]:
    meshes = {
        tuple(
            (str(name), size, kind.name)
            for name, size, kind in zip(m.axis_names, m.axis_sizes, m.axis_types, strict=True)
        )
        for m in (t.sharding.mesh for t in types if isinstance(t.sharding, NamedSharding))
    }
    if len(meshes) > 1:
        raise ValueError(f"The arguments lie on different meshes: {sorted(meshes)}. Give them one mesh.")
    return meshes.pop() if meshes else ()


def _mesh_in(text: str) -> tuple[tuple[str, int, str], ...]:
    match = _MESH.search(text)
    axes = re.findall(r'"([^"]+)"=(\d+)', match.group(1)) if match else []
    return tuple((name, int(size), "Auto") for name, size in axes)


def _export(jitted: Any, types: Sequence[jax.ShapeDtypeStruct]) -> Any:
    allowed: list[Any] = []
    try:
        return jax.export.export(jitted, platforms=["cuda"])(list(types))
    except ValueError as error:
        # Targets of custom calls that may change with the version of JAX; here both sides are of one version.
        if "custom calls" not in str(error):
            raise
        allowed = [
            jax.export.DisabledSafetyCheck.custom_call(n) for n in re.findall(r"'([^']+)'", str(error))
        ]
    return jax.export.export(jitted, platforms=["cuda"], disabled_checks=allowed)(list(types))


def _needed() -> dict[str, str]:
    version = jax.__version__
    return {
        "jax-cuda12-plugin": f"jax-cuda12-plugin=={version}",
        "jax-cuda12-pjrt": f"jax-cuda12-pjrt=={version}",
        "nvidia-cuda-nvcc-cu12": "nvidia-cuda-nvcc-cu12",
        "flatbuffers": "flatbuffers",
    }


def _missing() -> list[str]:
    missing = []
    for name, requirement in _needed().items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version or requirement not in (name, f"{name}=={version}"):
            missing.append(name)
    return missing


def _check_installed() -> None:
    if missing := _missing():
        raise _unavailable(missing)


def _unavailable(missing: Sequence[str]) -> LoweringUnavailableError:
    needed = _needed()
    return LoweringUnavailableError(
        f"Compiling for a GPU needs JAX's CUDA plugin of JAX's own version ({jax.__version__}) and ptxas, "
        f"though no GPU. Missing, or of another version: {', '.join(missing)}. Run: "
        f"pip install {' '.join(needed[name] for name in missing)}  "
        "(all of them: pip install 'jmp_policy[gpu-lowering]')."
    )


def _environment() -> dict[str, str]:
    flags = _DEVICE_COUNT.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    return {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        # A GPU of this machine is left to the caller.
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _last_lines(text: str, most: int = 12) -> str:
    lines = [line for line in text.splitlines() if line.strip() and "cudart_stub" not in line]
    return "\n".join(lines[-most:])


def main(folder: str) -> None:
    """Compiles the programs in a folder, and writes the answers beside them; runs in the separate process."""
    # Making the first backend initialises the plugin; doing so by hand as well fails with ALREADY_EXISTS.
    jax.devices("cpu")
    for i, request in enumerate(json.loads(Path(folder, "request.json").read_text())):
        data = Path(folder, f"{i}.bin").read_bytes()
        try:
            answer = _compile(data, **request)
        except Exception as error:
            answer = Compiled(error=_last_lines(f"{type(error).__name__}: {error}"))
        Path(folder, f"{i}.json").write_text(json.dumps(answer._asdict()))


def _compile(data: bytes, devices: int, mesh: Sequence[Any], donated: Sequence[int], config: str) -> Compiled:
    from jax.experimental import topologies

    program = jax.export.deserialize(bytearray(data))
    topology = topologies.get_topology_desc("", "cuda", target_config=config, topology=f"1x{devices}x1")
    axes = [tuple(axis) for axis in mesh] or [("devices", devices, "Auto")]
    placed = Mesh(
        np.array(topology.devices).reshape([size for _, size, _ in axes]),
        [name for name, _, _ in axes],
        axis_types=tuple(AxisType[kind] for _, _, kind in axes),
    )
    shardings = [s or NamedSharding(placed, PartitionSpec()) for s in program.in_shardings_jax(placed)]
    types = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
        for aval, sharding in zip(program.in_avals, shardings, strict=True)
    ]

    def call(*arrays: Any) -> Any:
        return program.call(list(arrays))

    jitted = jax.jit(call, donate_argnums=tuple(donated))
    lowered = jitted.trace(*types).lower(lowering_platforms=("cuda",))
    return _describe(lowered.compile(compiler_options=OPTIONS))


if __name__ == "__main__":
    main(sys.argv[1])
