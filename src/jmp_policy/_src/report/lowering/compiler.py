"""Exports programs, and compiles them for GPUs or TPUs in a process of its own, with or without a device.

JAX's CUDA plugin and libtpu compile for any device that is described to them; only running needs one. Loading
them changes a process for good (a platform can be registered once, and with a device it takes its memory), so
the caller only exports its program, which needs neither, and `compile_process` compiles it.
"""

import contextlib
import fnmatch
import importlib.metadata
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from jmp_policy._src.core.targets import Target
from jmp_policy._src.report import progress
from jmp_policy._src.report.lowering import compile_process
from jmp_policy._src.report.lowering.compile_process import Compiled, described, last_lines

_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=\S+")

#: What libtpu asks of the machine that a TPU is in, and of its metadata server, is answered here. It then
#: compiles for any version of a TPU.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    # A TPU of this machine is left to the caller.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class LoweringUnavailableError(RuntimeError):
    """Error for a compiler of JAX's that is not installed, or not in the version of JAX.

    Example:
      >>> issubclass(LoweringUnavailableError, RuntimeError)
      True
    """


def is_installed(platform: str = "cuda") -> bool:
    """Whether programs can be compiled here for a GPU ("cuda"), or for a TPU ("tpu")."""
    return not _missing(platform)


def check_installed(platform: str) -> None:
    """Raises `LoweringUnavailableError` unless the compiler for a platform is installed."""
    if not (missing := _missing(platform)):
        return
    what, device = {
        "cuda": (f"JAX's CUDA plugin of JAX's own version ({jax.__version__}) and ptxas", "GPU"),
        "tpu": (f"libtpu in the version that JAX {jax.__version__} asks for", "TPU"),
    }[platform]
    raise LoweringUnavailableError(
        f"Compiling for a {device} needs {what}, though no {device}. Missing, or of another version: "
        f"{', '.join(missing)}. Run: pip install {' '.join(map(''.join, missing.items()))}  "
        f"(all of them: pip install 'jmp_policy[{device.lower()}-lowering]')."
    )


def _missing(platform: str) -> dict[str, str]:
    """The packages to install, and the version asked for: "==0.10.2", "==0.0.42.*" or ""."""
    same = f"=={jax.__version__}"
    # Whatever version of CUDA is here; ptxas may also come with CUDA itself.
    cuda, nvcc = ("cuda13", "") if _has("jax-cuda13-plugin") else ("cuda12", "-cu12")
    needed = {f"jax-{cuda}-plugin": same, f"jax-{cuda}-pjrt": same}
    if not shutil.which("ptxas"):
        needed[f"nvidia-cuda-nvcc{nvcc}"] = ""
    if platform == "tpu":
        # As JAX's own extra for TPUs asks for it.
        lines = importlib.metadata.requires("jax") or ()
        asked = next((line for line in lines if line.startswith("libtpu")), "")
        needed = {"libtpu": asked.partition(";")[0].replace(" ", "").removeprefix("libtpu")}
    missing = needed | {"flatbuffers": ""}
    for name, asked in list(missing.items()):
        if _has(name, asked.removeprefix("==") or "*"):
            del missing[name]
    return missing


def _has(package: str, version: str = "*") -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return fnmatch.fnmatch(importlib.metadata.version(package), version)
    return False


#: Names of custom calls in JAX's message: as StableHLO shows them.
_CUSTOM_CALL = re.compile(r"custom_call @\"?([^\s\"(]+)")
_MESH = re.compile(r"sdy\.mesh @\w+ = <\[((?:\"[^\"]+\"=\d+(?:, )?)+)\]")


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


def exported(
    function: Callable[[Sequence[Any]], Any],
    arrays: Sequence[Any],
    donated: Sequence[int] = (),
    platform: str = "cuda",
) -> Exported:
    """Exports the program of a function of a list of arrays; needs no compiler, and runs nothing.

    Args:
      function: the function.
      arrays: its argument; `jax.ShapeDtypeStruct`s will do.
      donated: positions of the arrays that it may overwrite.
      platform: "cuda" for any GPU, "tpu" for any TPU.

    Raises:
      ValueError: when it calls back to the host, or its arguments are on several meshes.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        check_installed(platform)
    types = list(map(type_of, arrays))
    mesh = _mesh_of(types)

    def call(arrays: Sequence[Any]) -> list[Any]:
        # jax.export refuses trees with classes that it does not know, such as an optimizer's state.
        return jax.tree.leaves(function(arrays))

    program = _export(jax.jit(call), types, platform)
    if program.nr_devices > 1 and not mesh:
        # That of the function itself.
        match = _MESH.search(program.mlir_module())
        axes = re.findall(r'"([^"]+)"=(\d+)', match[1]) if match else []
        mesh = tuple((name, int(size), "Auto") for name, size in axes)
    return Exported(bytes(program.serialize()), program.nr_devices, mesh, tuple(donated))


def type_of(array: Any) -> jax.ShapeDtypeStruct:
    """The type of an array or of a `jax.ShapeDtypeStruct`, laid out on the mesh that it lies on, if any."""
    sharding, weak = getattr(array, "sharding", None), bool(getattr(array, "weak_type", False))
    kept = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=kept, weak_type=weak)


def _mesh_of(types: Sequence[jax.ShapeDtypeStruct]) -> tuple[tuple[str, int, str], ...]:
    meshes = set()
    for mesh in (t.sharding.mesh for t in types if isinstance(t.sharding, NamedSharding)):
        axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        meshes.add(tuple((str(name), size, kind.name) for name, size, kind in axes))
    if len(meshes) > 1:
        raise ValueError(f"The arguments lie on different meshes: {sorted(meshes)}. Give them one mesh.")
    return meshes.pop() if meshes else ()


def _export(jitted: Any, types: Sequence[jax.ShapeDtypeStruct], platform: str) -> Any:
    try:
        return jax.export.export(jitted, platforms=[platform])(list(types))
    except ValueError as error:
        # Targets of custom calls that may change with the version of JAX; here both sides are of one version.
        if "custom calls" not in str(error):
            raise
        names = _CUSTOM_CALL.findall(str(error))
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in dict.fromkeys(names)]
    return jax.export.export(jitted, platforms=[platform], disabled_checks=allowed)(list(types))


def compiled(programs: Sequence[Exported], target: Target) -> list[Compiled]:
    """Compiles programs for a target, in one process that does nothing else.

    For a program that does not compile, `Compiled.error` says why. After Ctrl-C those that were compiled are
    returned, if the first one is among them.

    Raises:
      LoweringUnavailableError: when the compiler is not installed.
      ValueError: when the target is a slice of TPUs of which the program fills only a part.
      RuntimeError: when the process ends without an answer, with the last lines that it wrote.
    """
    topologies = [target.topology(program.devices) for program in programs]
    check_installed(target.platform)
    with tempfile.TemporaryDirectory() as folder:
        parts = zip(programs, topologies, strict=True)
        request = [p._asdict() | {"topology": t, "options": target.options} for p, t in parts]
        Path(folder, "request").write_bytes(pickle.dumps(request))
        # -P: the files beside this one are no top-level modules.
        command = [sys.executable, "-P", compile_process.__file__, folder]
        answer, answers = Path(folder, "answer"), list[Compiled]()
        with progress.interruptible("programs to compare with were not compiled", answers):
            pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
            with subprocess.Popen(command, env=_environment(), text=True, **pipes) as process:
                try:
                    _, said = process.communicate()
                finally:
                    process.kill()
                    process.wait()  # `subprocess.run` does not after Ctrl-C.
                    if answer.exists():
                        answers += [Compiled(*fields) for fields in pickle.loads(answer.read_bytes())]
            if process.returncode or not answers:
                status = f"ended with status {process.returncode}"
                raise RuntimeError(
                    f"XLA's compiler for {target.name} {status}. Its last lines:\n{last_lines(said)}"
                )
        return answers


def compile_here(
    function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any], **options: Any
) -> tuple[Any, Compiled]:
    """Compiles a function for the default device; returns the executable and its `Compiled`.

    Args:
      function, arrays: as of `exported`; the executable takes the arrays one by one.
      options: those of `jax.jit`.
    """
    executable = jax.jit(lambda *arrays: function(list(arrays)), **options).lower(*arrays).compile()
    return executable, described(executable)


def _environment() -> dict[str, str]:
    flags = _DEVICE_COUNT.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    return {
        **os.environ,
        **_NO_TPU,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        # A GPU of this machine is left to the caller.
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
