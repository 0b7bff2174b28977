"""Knows GPUs and TPUs to compile for: their names, their peak rates, and how XLA's compilers know them.

NVIDIA's rates are those of its data sheets, for dense matrices: those "with sparsity" are twice as high. The
descriptions of cards are those that the cards give XLA themselves (openxla/xla, `target_config/specs`).

Google's rates and sizes are those of its documentation of each version, per chip. The compiler's own
`estimated_cycles` say which arithmetic a product is: in units of a bfloat16 one, they are 1 for float32 and
float16 at JAX's default precision, 3 for "high" and 6 for "highest" (v5e, v6e).
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from jmp_policy._src.core.suggest import did_you_mean


@dataclasses.dataclass(frozen=True)
class Target:
    """Device to compile for.

    Args:
      name: name that users give.
      description: name that the device gives itself.
      bandwidth: bandwidth of its memory, bytes per second.
      link: bandwidth to the other devices, bytes per second in one direction.
      memory: size in bytes.
      rates: operations per second by arithmetic: "float64", "float32", "tf32", "float16", "bfloat16",
        "bfloat16_x3", "float8", "int8", where it has them. "float32" is exact: of a GPU's ordinary units, or
        of six bfloat16 products each in a TPU. "float4" is that of values with scales, NVFP4.
      on_tensor_cores: kinds of arithmetic that its matrix units do; "mxfp8" where they take the scales of
        blocks of float8 values, which others multiply in bfloat16.

    Attributes:
      platform: JAX's name of the kind of device.
      matrix_units: what its matrix units are called.
      launch_seconds: time between one kernel and the next; 0 where the whole program is on the chip.
      options: options of the compiler.
    """

    name: str
    description: str
    bandwidth: float
    link: float
    memory: int
    rates: Mapping[str, float]
    on_tensor_cores: frozenset[str]

    platform: ClassVar[str]
    matrix_units: ClassVar[str]
    launch_seconds: ClassVar[float] = 0.0
    options: ClassVar[dict[str, Any]] = {}

    def rate(self, arithmetic: str) -> float:
        """Operations per second; arithmetic without faster units runs at the rate of float32."""
        return self.rates.get(arithmetic, self.rates["float32"])

    def topology(self, devices: int) -> dict[str, Any]:
        """The arguments of JAX's `get_topology_desc` for so many devices.

        Raises:
          ValueError: when there is no such arrangement of devices.
        """
        raise NotImplementedError


#: Seconds between the end of one small kernel and the start of the next. Launches from a stream take 2 to 5
#: microseconds; XLA records most of a step as a CUDA graph, where 1.5 to 2.5 are usual.
LAUNCH_SECONDS = 2e-6

#: Versions of the libraries of the cards' machines. Without them XLA takes the libraries for old ones, and
#: computes no float8 product with cuBLASLt. Counts of float16 and bfloat16 steps are the same without.
_CUDA, _CUDNN = "12.9.0", "9.10.0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu(Target):
    """NVIDIA card to compile for.

    Args:
      capability: compute capability, major and minor.
      cores: number of streaming multiprocessors.
      l2: size of the cache in bytes.
      clock_ghz: highest clock.
      shared_per_core, shared_per_block: bytes of shared memory of a multiprocessor, and the most that a block
        can use.
      threads_per_core: most threads at a time on a multiprocessor.
      units_per_core: number of float32 units of a multiprocessor.
    """

    capability: tuple[int, int]
    cores: int
    l2: int
    clock_ghz: float
    shared_per_core: int
    shared_per_block: int
    threads_per_core: int
    units_per_core: int

    platform: ClassVar[str] = "cuda"
    matrix_units: ClassVar[str] = "Tensor Cores"
    launch_seconds: ClassVar[float] = LAUNCH_SECONDS
    #: Autotuning would time kernels on the card.
    options: ClassVar[dict[str, Any]] = {"xla_gpu_autotune_level": 0}

    def topology(self, devices: int) -> dict[str, Any]:
        """The arguments of JAX's `get_topology_desc` for so many cards in one machine."""
        config, topology = self.config(), f"1x{devices}x1"
        return {"platform": "cuda", "topology_name": "", "target_config": config, "topology": topology}

    def config(self) -> str:
        """The card as XLA's `GpuTargetConfig`, in protobuf's text format."""
        (major, minor), dnn = self.capability, _CUDNN.split(".")
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_per_core} threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores} fpus_per_core: {self.units_per_core}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory} shared_memory_per_block_optin: {self.shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "{_CUDA}" runtime_version: "{_CUDA}" compile_time_toolkit_version: "{_CUDA}"
  dnn_version: "{_CUDNN}"
}}
platform_name: "CUDA" dnn_version_info {{ major: {dnn[0]} minor: {dnn[1]} patch: {dnn[2]} }}
device_description_str: "{self.description}"
"""


#: The fields of each card.
_CARDS = """
name capability cores bandwidth link  memory       description
V100 7.0        80    898.048e9 150e9 16935682048  Tesla V100-SXM2-16GB
T4   7.5        40    320.064e9 16e9  15843721216  Tesla T4
A100 8.0        108   2039.04e9 300e9 85100068864  NVIDIA A100-SXM4-80GB
L4   8.9        58    300.096e9 32e9  23669309440  NVIDIA L4
H100 9.0        132   3352e9    450e9 84942979072  NVIDIA H100 80GB HBM3
H200 9.0        132   4800e9    450e9 151397597184 NVIDIA H200 141GB HBM3e
B200 10.0       148   7672.32e9 900e9 191514411008 NVIDIA B200
"""

_MULTIPROCESSORS = """
name l2        clock_ghz shared_per_core shared_per_block threads_per_core units_per_core
V100 6291456   1.53      98304           98304            2048             64
T4   4194304   1.59      65536           65536            1024             64
A100 41943040  1.41      167936          166912           2048             64
L4   50331648  2.04      102400          101376           1536             128
H100 52428800  1.98      233472          232448           2048             128
H200 52428800  1.98      233472          232448           2048             128
B200 132644864 1.965     233472          232448           2048             128
"""

#: Tera-operations per second. A star is for those that Tensor Cores do not do.
_CARD_RATES = """
name float64 float32 tf32  float16 bfloat16 float8 mxfp8 float4 int8
V100 7.8*    15.7*   -     125     -        -      -     -      62.8*
T4   0.25*   8.1*    -     65      -        -      -     -      130
A100 19.5    19.5*   156   312     312      -      -     -      624
L4   0.47*   30.3*   60    121     121      242    -     -      242
H100 66.9    66.9*   494.7 989.4   989.4    1978.9 -     -      1978.9
H200 66.9    66.9*   494.7 989.4   989.4    1978.9 -     -      1978.9
B200 37      75*     1100  2250    2250     4500   4500  9000   4500
"""


def _rows(table: str) -> dict[str, dict[str, Any]]:
    """The rows of a table by their name: numbers, or text."""
    head, *rows = table.strip().splitlines()
    columns = head.split()
    cells = (row.split(maxsplit=len(columns) - 1) for row in rows)
    return {name: dict(zip(columns[1:], map(_cell, row), strict=True)) for name, *row in cells}


def _cell(text: str) -> Any:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _gpu(name: str, row: dict[str, Any], rates: dict[str, Any]) -> Gpu:
    known = {arithmetic: str(rate) for arithmetic, rate in rates.items() if rate != "-"}
    major, _, minor = str(row.pop("capability")).partition(".")
    return Gpu(
        name,
        rates={arithmetic: float(rate.rstrip("*")) * 1e12 for arithmetic, rate in known.items()},
        on_tensor_cores=frozenset(arithmetic for arithmetic, rate in known.items() if "*" not in rate),
        capability=(int(major), int(minor)),
        **row,
    )


#: The cards by name.
GPUS = {
    name: _gpu(name, row | _rows(_MULTIPROCESSORS)[name], _rows(_CARD_RATES)[name])
    for name, row in _rows(_CARDS).items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu(Target):
    """Slice of TPUs to compile for; all other numbers are those of one device.

    Args:
      xla_name: XLA's name of the version.
      dimensions: number of dimensions of a slice.
      devices_per_chip: devices of JAX in a chip.
      config: XLA's name of the configuration of a chip; "" for the default.
      chips: shape of the slice; () for one that has as many devices as the program.
    """

    xla_name: str
    dimensions: int
    devices_per_chip: int = 1
    config: str = ""
    chips: tuple[int, ...] = ()

    platform: ClassVar[str] = "tpu"
    matrix_units: ClassVar[str] = "the matrix units"

    def topology(self, devices: int) -> dict[str, Any]:
        """The arguments of JAX's `get_topology_desc` for a slice of so many devices."""
        chips = self.chips or self._slice(devices)
        # One device of a chip with two may compute alone; a slice that was named is all in use.
        if self.chips and devices != math.prod(chips) * self.devices_per_chip:
            raise ValueError(
                f"{self.name} has {math.prod(chips) * self.devices_per_chip} devices, and the program is for "
                f"{devices}. Give the arguments NamedShardings on a mesh of as many (virtual devices of the "
                f"CPU will do), or name no topology: {self.name.partition(':')[0]!r}."
            )
        return {
            "platform": "tpu",
            "topology_name": f"{self.xla_name}:{'x'.join(map(str, chips))}",
            # By default a host has 2x2 chips, and smaller slices are refused.
            "chips_per_host_bounds": [math.gcd(size, 2) for size in chips[:2]] + [1],
            **({"chip_config_name": self.config} if self.config else {}),
        }

    def _slice(self, devices: int) -> tuple[int, ...]:
        """The usual slice: every dimension is doubled in turn."""
        count = -(-devices // self.devices_per_chip)
        if count & (count - 1):
            raise ValueError(
                f"{self.name} has no usual slice for {devices} devices. Name its topology: "
                f"{self.name + ':' + 'x'.join(['2'] * self.dimensions)!r}, for example."
            )
        sizes = [1] * self.dimensions
        while math.prod(sizes) < count:
            least = min(sizes)
            smallest = [i for i, size in enumerate(sizes) if size == least]
            sizes[smallest[0] if least == 1 else smallest[-1]] *= 2
        return tuple(sizes)


#: The fields of each version. A chip of v4 and v5p is one device of two cores; a chip of v7x is two.
_VERSIONS = """
name dimensions devices_per_chip bandwidth link  memory       bfloat16 int8 float8 config xla_name description
v4   3          1                1228e9    150e9 34359738368  275      275  -      megacore v4       TPU v4
v5e  2          1                819e9     100e9 17179869184  197      393  -      -      v5e      TPU v5 lite
v5p  3          1                2765e9    300e9 102005473280 459      918  -      -      v5p      TPU v5
v6e  2          1                1640e9    224e9 34359738368  918      1836 -      -      v6e      TPU v6 lite
v7x  3          2                3690e9    300e9 103079215104 1153.5   -    2307   -      tpu7x    TPU7x
"""


def _tpu(name: str, row: dict[str, Any]) -> Tpu:
    rates = {arithmetic: row.pop(arithmetic) for arithmetic in ("bfloat16", "int8", "float8")}
    known = {arithmetic: rate * 1e12 for arithmetic, rate in rates.items() if rate != "-"}
    known |= {"bfloat16_x3": known["bfloat16"] / 3, "float32": known["bfloat16"] / 6}
    config = row.pop("config").strip("-")
    return Tpu(name, rates=known, on_tensor_cores=frozenset({*known, "int8"}), config=config, **row)


#: One device of each version, by name.
TPUS = {name: _tpu(name, row) for name, row in _rows(_VERSIONS).items()}


def slice_named(name: str) -> Tpu | None:
    """The slice that "v5e:2x4" names, or "v5e" without a shape; None if it is no version of a TPU.

    Raises:
      ValueError: when the shape is none of such a slice.
    """
    version, _, shape = name.lower().partition(":")
    if version not in TPUS:
        return None
    tpu = TPUS[version]
    if not shape:
        return None if ":" in name else tpu
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape) or shape.count("x") + 1 != tpu.dimensions:
        example = "x".join(["2"] * tpu.dimensions)
        raise ValueError(
            f"Unknown topology {shape!r} of a slice of {version}: its chips lie in {tpu.dimensions} "
            f"dimensions, as in '{version}:{example}'."
        )
    chips = tuple(map(int, shape.split("x")))
    return dataclasses.replace(tpu, name=f"{version}:{shape}", chips=chips)


#: The devices by name.
TARGETS: dict[str, Target] = {**GPUS, **TPUS}


def find_target(name: str) -> Target:
    """Finds a GPU by its name ("H100"), or a TPU by its version and topology ("v5e", "v5e:2x4").

    Raises:
      ValueError: when there is none.
    """
    hint = ""
    if isinstance(name, str):
        if found := GPUS.get(name.upper()) or slice_named(name):
            return found
        hint = did_you_mean(name.upper(), GPUS) or did_you_mean(name.lower(), TPUS)
    raise ValueError(
        f"Unknown target {name!r}.{hint} Known: {', '.join(TARGETS)}; a slice of TPUs as in 'v5e:2x4'; None "
        "for the device of this machine."
    )


def target_of_device(kind: str) -> Target | None:
    """Finds what a device's kind ("NVIDIA H100 80GB HBM3", "TPU v5 lite") names; None if it is not known."""
    tpus = {text: tpu for tpu in TPUS.values() for text in (tpu.description, f"TPU {tpu.name}")}
    words = re.split(r"[ -]", kind.upper())
    gpus = (gpu for name, gpu in GPUS.items() if name in words)
    return tpus.get(kind) or slice_named(kind) or next(gpus, None)
