"""Compile a jitted function for a GPU that this machine does not have, and count what comes out.

XLA's GPU compiler needs no GPU: a plugin, `ptxas` and a description of the card are enough. Nothing runs, so
there are no times here; kernels launched and bytes moved decide the time of everything but large products.
"""

import dataclasses
import importlib.metadata
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 1 patch: 1 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

#: Instructions of a scheduled computation that launch nothing. Every other one counts as one kernel, except
#: those that run another computation (while, call, conditional), which count as what is inside.
NO_KERNEL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "copy-done", "async-done", "all-reduce-done", "all-gather-done", "opt-barrier",
}  # fmt: skip
CONTAINERS = {"while", "call", "conditional"}
#: Bits per element by the names that HLO text uses, where the name itself does not say (f16, s32, f8e5m2).
BITS = {"pred": 8, "token": 0, "opaque": 0}

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class PluginMissingError(RuntimeError):
    """The CUDA compiler of JAX is not installed."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What one step is after compilation; bytes are operands plus results, summed over kernels."""

    kernels: int
    bytes: int
    temp_bytes: int
    copies: int
    kinds: dict[str, int]
    dots: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str


def compile_for_gpu(jitted: Any, args: tuple[Any, ...], devices: int = 1, target: str = H100) -> Report:
    """Compiles `jitted(*args)` for `target` and counts; `args` are trees of ShapeDtypeStructs.

    With more than one device the arguments' shardings are kept where they have one (made with `gpu_devices`).
    """
    placed = NamedSharding(Mesh(gpu_devices(devices, target), "d"), PartitionSpec())

    def place(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or placed)

    lowered = jitted.trace(*jax.tree.map(place, args)).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    return count(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


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
        rows.append(row)
    return rows


def gpu_devices(devices: int = 1, target: str = H100) -> np.ndarray:
    """Devices that only compile."""
    _check_plugin()
    topology = topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x{devices}x1")
    return np.array(topology.devices)


def _check_plugin() -> None:
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    version = jax.__version__
    needed = {
        "jax-cuda12-plugin": f"jax-cuda12-plugin=={version}",
        "jax-cuda12-pjrt": f"jax-cuda12-pjrt=={version}",
        "nvidia-cuda-nvcc-cu12": "nvidia-cuda-nvcc-cu12",
    }
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
    moved = 0
    for name in _executed(computations, entry):
        shapes = {i.name: i.shape for i in computations[name]}
        for i in computations[name]:
            if i.opcode in NO_KERNEL or i.opcode in CONTAINERS:
                continue
            kinds[i.opcode] += 1
            moved += shape_bytes(i.shape) + sum(shape_bytes(shapes.get(o, "")) for o in i.operands)
    for body in computations.values():
        shapes = {i.name: i.shape for i in body}
        for i in body:
            if i.opcode == "dot" or (i.opcode == "custom-call" and "matmul" in i.line):
                dtypes = [_ARRAY.match(shapes.get(o, "")) for o in i.operands[:2]]
                dots["x".join(m.group(1) if m else "?" for m in dtypes)] += 1
    return Report(kinds.total(), moved, temp_bytes, kinds["copy"], dict(kinds), dict(dots))


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of an HLO module by name, and the entry's name."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations[match.group(2)] = []
            entry = match.group(2) if match.group(1) else entry
        elif match := _INSTRUCTION.match(line):
            shape, rest = _split_shape(match.group(2))
            opcode, _, tail = rest.partition("(")
            operands = re.findall(r"%([\w.\-]+)", tail[: tail.find(")")])
            current.append(Instruction(match.group(1), shape, opcode, tuple(operands), line))
    return computations, entry


def shape_bytes(shape: str) -> int:
    """Bytes of an array's or a tuple's shape as HLO writes it."""
    total = 0
    for name, dims in _ARRAY.findall(shape):
        digits = re.search(r"\d+", name)
        bits = BITS.get(name, int(digits.group()) if digits else 0)
        total += math.prod(int(d) for d in dims.split(",") if d) * bits // 8
    return total


def _split_shape(text: str) -> tuple[str, str]:
    """`f32[2]{0} add(...)` or `(f32[2], s32[]) tuple(...)` to its shape and the rest."""
    if not text.startswith("("):
        shape, _, rest = text.partition(" ")
        return shape, rest
    depth = 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0:
            return text[: at + 1], text[at + 2 :]
    raise ValueError(f"unbalanced shape in {text!r}")


def _executed(computations: dict[str, list[Instruction]], entry: str) -> list[str]:
    """The entry and what it runs through while, call and conditional, each once."""
    names = [entry]
    for name in names:
        for i in computations[name]:
            if i.opcode in CONTAINERS:
                called = _CALLED.findall(i.line)
                for group in _BRANCHES.findall(i.line):
                    called += re.findall(r"[\w.\-]+", group)
                names += [c for c in called if c in computations and c not in names]
    return names
