"""Runs XLA's compiler for GPUs or TPUs in a separate process, on a machine with or without such a device.

JAX's CUDA plugin and libtpu compile for any device that is described to them; only running needs one. Loading
them changes a process for good (a platform can be registered once, and with a device it takes its memory), so
the caller only exports its program, which needs neither, and `compile_process` compiles it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jmp_policy._src.core.targets import Target
from jmp_policy._src.report.lowering import compile_process
from jmp_policy._src.report.lowering.compile_process import Compiled, described, last_lines
from jmp_policy._src.report.lowering.export import Exported
from jmp_policy._src.report.lowering.installed import check_installed

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


def compiled(programs: Sequence[Exported], target: Target) -> list[Compiled]:
    """Compiles programs for a target, in one process that does nothing else.

    For a program that does not compile, `Compiled.error` says why.

    Raises:
      LoweringUnavailableError: when the compiler is not installed.
      ValueError: when the target is a slice of TPUs of which the program fills only a part.
      RuntimeError: when the process ends without an answer, with the last lines that it wrote.
    """
    topologies = [target.topology(program.devices) for program in programs]
    check_installed(target.platform)
    with tempfile.TemporaryDirectory() as folder:
        request = [
            {
                "mesh": program.mesh,
                "devices": program.devices,
                "donated": program.donated,
                "topology": topology,
                "options": target.options,
            }
            for program, topology in zip(programs, topologies, strict=True)
        ]
        Path(folder, "request.json").write_text(json.dumps(request))
        for i, program in enumerate(programs):
            Path(folder, f"{i}.bin").write_bytes(program.data)
        # -P: the files beside this one are no top-level modules.
        command = [sys.executable, "-P", compile_process.__file__, folder]
        ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        answers = [Path(folder, f"{i}.json") for i in range(len(programs))]
        if ran.returncode or not all(path.exists() for path in answers):
            raise RuntimeError(
                f"XLA's compiler for {target.name} ended with status {ran.returncode}. Its last lines:\n"
                + last_lines(ran.stderr)
            )
        return [Compiled(**json.loads(path.read_text())) for path in answers]


def compile_here(function: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> tuple[Any, Compiled]:
    """Compiles a function for the default device; returns the executable and its `Compiled`."""
    executable = jax.jit(function).lower(list(arrays)).compile()
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
