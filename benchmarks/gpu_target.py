"""Compile a jitted function for a GPU that this machine does not have, and count what comes out.

XLA's GPU compiler needs no GPU: a plugin, `ptxas` and a description of the card are enough. Nothing runs, so
there are no times here; kernels launched and bytes moved decide the time of everything but large products.
"""

import dataclasses
import importlib.metadata
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_policy._src.core.targets import GPUS
from jmp_policy._src.report.lowering.hlo import (
    CONTAINERS,
    NO_KERNEL,
    Traffic,
    arrays,
    executed,
    parse,
)

H100 = GPUS["H100"].config()
#: What results say of programs for it.
TARGET = "NVIDIA H100 80GB, compiled only"


class PluginMissingError(RuntimeError):
    """The CUDA compiler of JAX is not installed."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What one step is after compilation.

    Bytes are what kernels read and write, of slices no more than these, without the scratch memory of cuBLAS
    and cuDNN. Launches are the kernels that one step starts. What is in a loop counts as often as it runs.
    """

    kernels: int
    bytes: int
    temp_bytes: int
    copies: int
    kinds: dict[str, int]
    dots: dict[str, int]
    launches: int = 0


def compile_for_gpu(jitted: Any, args: tuple[Any, ...], target: str = H100) -> Report:
    """Compiles `jitted(*args)` for `target` and counts; `args` are trees of ShapeDtypeStructs."""
    compiled = compiled_for_gpu(jitted, args, target)
    return count(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


def compiled_for_gpu(jitted: Any, args: tuple[Any, ...], target: str = H100) -> Any:
    """The compiled program of `jitted(*args)` for one device."""
    _check_plugin()
    topology = topologies.get_topology_desc("", "cuda", target_config=target, topology="1x1x1")
    placed = NamedSharding(Mesh(np.array(topology.devices), "d"), PartitionSpec())
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
    lowered = jitted.trace(*types).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def table_rows(reports: dict[str, Report], bases: dict[str, str]) -> list[dict[str, Any]]:
    """One row per report, with what it adds to the one that it is to be compared with, if any."""
    rows = []
    for name, r in reports.items():
        row: dict[str, Any] = {
            "variant": name,
            "kernels": r.kernels,
            "gigabytes": round(r.bytes / 1e9, 2),
            "temp_gigabytes": round(r.temp_bytes / 1e9, 3),
            "copies": r.copies,
            "dots": r.dots,
        }
        if name in bases:
            base = reports[bases[name]]
            row["compared_with"] = bases[name]
            row["added_kernels"] = f"{r.kernels / base.kernels - 1:+.1%}"
            row["added_bytes"] = f"{r.bytes / base.bytes - 1:+.2%}"
        if r.launches != r.kernels:
            row["launches"] = r.launches
            if name in bases:
                row["added_launches"] = f"{r.launches / reports[bases[name]].launches - 1:+.1%}"
        rows.append(row)
    return rows


def _check_plugin() -> None:
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    needed = {name: f"{name}=={jax.__version__}" for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt")}
    needed["nvidia-cuda-nvcc-cu12"] = "nvidia-cuda-nvcc-cu12"
    if missing := [requirement for name, requirement in needed.items() if name not in installed]:
        raise PluginMissingError(
            "Compiling for a GPU needs JAX's CUDA plugin and ptxas, though no GPU: "
            f"pip install --no-deps {' '.join(missing)}"
        )
    # Making the first backend initialises every plugin that is installed; doing it here by hand as well would
    # fail with ALREADY_EXISTS.
    jax.devices("cpu")


def count(text: str, temp_bytes: int = 0) -> Report:
    """Counts an optimised HLO module's text."""
    computations, entry = parse(text)
    kinds: Counter[str] = Counter()
    dots: Counter[str] = Counter()
    traffic = Traffic(computations, on_chip=True)
    moved = launches = 0
    for name, runs in executed(computations, entry).items():
        scope = {i.name: i for i in computations[name]}
        for i in computations[name]:
            if i.opcode in NO_KERNEL or i.opcode in CONTAINERS:
                continue
            kinds[i.opcode] += 1
            launches += runs.times
            moved += runs.times * sum(traffic.of(i, scope))
    for body in computations.values():
        shapes = {i.name: i.shape for i in body}
        for i in body:
            if i.opcode == "dot" or (i.opcode == "custom-call" and "matmul" in i.line):
                found = [arrays(shapes.get(o, "")) for o in i.operands[:2]]
                dots["x".join(f[0][0] if f else "?" for f in found)] += 1
    return Report(kinds.total(), moved, temp_bytes, kinds["copy"], dict(kinds), dict(dots), launches)
