"""Compile a step for a device that this machine does not have, and count what comes out.

XLA's GPU compiler needs no GPU: a plugin, `ptxas` and a description of the card are enough. Nothing runs, so
there are no times here; kernels launched and bytes moved decide the time of everything but large products.
"""

import dataclasses
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_policy._src.core.targets import GPUS, Target
from jmp_policy._src.report.function import as_function
from jmp_policy._src.report.lowering.compile_process import Compiled
from jmp_policy._src.report.lowering.compiler import check_installed, compiled, exported
from jmp_policy._src.report.lowering.hlo import arrays, parse
from jmp_policy._src.report.lowering.kernels import Kernel, kernels_of

H100 = GPUS["H100"]
#: What results say of programs for it.
TARGET = "NVIDIA H100 80GB, compiled only"


@dataclasses.dataclass(frozen=True)
class Report:
    """What one step is after compilation.

    Bytes are what kernels read and write, of slices no more than these, without the scratch memory of cuBLAS
    and cuDNN. Launches are the kernels that one step starts. What is in a loop counts as often as it runs.
    """

    kernels: int
    launches: int
    bytes: int
    temp_bytes: int
    copies: int
    dots: dict[str, int]


def compile_for_gpu(jitted: Any, args: tuple[Any, ...]) -> Report:
    """Compiles `jitted(*args)` for an H100 and counts; `args` are trees of ShapeDtypeStructs."""
    program = compiled_for_gpu(jitted, args)
    return count(program.as_text(), program.memory_analysis().temp_size_in_bytes)


def compiled_for_gpu(jitted: Any, args: tuple[Any, ...]) -> Any:
    """The compiled program of `jitted(*args)` for one H100."""
    check_installed("cuda")
    # Making the first backend initialises every plugin that is installed; doing it here by hand as well would
    # fail with ALREADY_EXISTS.
    jax.devices("cpu")
    topology = topologies.get_topology_desc("", "cuda", target_config=H100.config(), topology="1x1x1")
    placed = NamedSharding(Mesh(np.array(topology.devices), "d"), PartitionSpec())
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
    lowered = jitted.trace(*types).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def compiled_for(target: Target, step: Any, state: Any, batch: Any) -> tuple[tuple[Kernel, ...], Compiled]:
    """The kernels of a step on any card or TPU, and what its compiler says, an error among it."""
    function = as_function(step, (state, batch), {}, "compiled_for")
    program = exported(function.call, function.arrays, range(len(jax.tree.leaves(state))), target.platform)
    (answer,) = compiled([program], target)
    return () if answer.error else kernels_of(answer.text, target), answer


def table_rows(reports: dict[str, Report], bases: dict[str, str]) -> list[dict[str, Any]]:
    """One row per report, with what it adds to the one that it is to be compared with, if any."""
    rows = []
    for name, r in reports.items():
        row: dict[str, Any] = {
            "variant": name,
            "kernels": r.kernels,
            "launches": r.launches,
            "gigabytes": round(r.bytes / 1e9, 2),
            "temp_gigabytes": round(r.temp_bytes / 1e9, 3),
            "copies": r.copies,
            "dots": r.dots,
        }
        if name in bases:
            base = reports[bases[name]]
            row["compared_with"] = bases[name]
            row["added_kernels"] = f"{r.kernels / base.kernels - 1:+.1%}"
            row["added_launches"] = f"{r.launches / base.launches - 1:+.1%}"
            row["added_bytes"] = f"{r.bytes / base.bytes - 1:+.2%}"
        rows.append(row)
    return rows


def count(text: str, temp_bytes: int = 0) -> Report:
    """Counts an optimised HLO module's text."""
    kernels, dots = kernels_of(text, H100), Counter[str]()
    for body in parse(text)[0].values():
        shapes = {i.name: i.shape for i in body}
        for i in body:
            if i.opcode == "dot" or (i.opcode == "custom-call" and "matmul" in i.line):
                found = [arrays(shapes.get(o, "")) for o in i.operands[:2]]
                dots["x".join(f[0][0] if f else "?" for f in found)] += 1
    moved, launches = sum(k.times * k.bytes for k in kernels), sum(k.times for k in kernels)
    copies = sum(k.kind == "copy" for k in kernels)
    return Report(len(kernels), launches, moved, temp_bytes, copies, dict(dots))
