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
        of six bfloat16 products each in a TPU.
      on_tensor_cores: kinds of arithmetic that its matrix units do; "mxfp8" where they take the scales of
        blocks of float8 values, which others multiply in bfloat16.

    Attributes:
      platform: JAX's name of the kind of device.
      matrix_units: what its matrix units are called.
      launch_seconds: time between one kernel and the next.
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
    launch_seconds: ClassVar[float]
    options: ClassVar[dict[str, Any]]

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
        major, minor = self.capability
        dnn = _CUDNN.split(".")
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


_VOLTA = frozenset({"float16"})
_TURING = _VOLTA | {"int8"}
_AMPERE = _TURING | {"bfloat16", "tf32", "float64"}
_ADA = (_AMPERE - {"float64"}) | {"float8"}
_HOPPER = _AMPERE | {"float8"}
_BLACKWELL = _HOPPER | {"mxfp8"}


def _rates(**tera: float) -> dict[str, float]:
    return {arithmetic: rate * 1e12 for arithmetic, rate in tera.items()}


_HOPPER_RATES = _rates(
    float64=66.9, float32=66.9, tf32=494.7, float16=989.4, bfloat16=989.4, float8=1978.9, int8=1978.9
)

#: The cards by name.
GPUS = {
    target.name: target
    for target in (
        Gpu(
            "V100", "Tesla V100-SXM2-16GB", capability=(7, 0), cores=80, bandwidth=898.048e9, link=150e9,
            memory=16_935_682_048, l2=6_291_456, clock_ghz=1.53, shared_per_core=98_304,
            shared_per_block=98_304, threads_per_core=2048, units_per_core=64, on_tensor_cores=_VOLTA,
            rates=_rates(float64=7.8, float32=15.7, float16=125.0, int8=62.8),
        ),
        Gpu(
            "T4", "Tesla T4", capability=(7, 5), cores=40, bandwidth=320.064e9, link=16e9,
            memory=15_843_721_216, l2=4_194_304, clock_ghz=1.59, shared_per_core=65_536,
            shared_per_block=65_536, threads_per_core=1024, units_per_core=64, on_tensor_cores=_TURING,
            rates=_rates(float64=0.25, float32=8.1, float16=65.0, int8=130.0),
        ),
        Gpu(
            "A100", "NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, bandwidth=2039.04e9, link=300e9,
            memory=85_100_068_864, l2=41_943_040, clock_ghz=1.41, shared_per_core=167_936,
            shared_per_block=166_912, threads_per_core=2048, units_per_core=64, on_tensor_cores=_AMPERE,
            rates=_rates(float64=19.5, float32=19.5, tf32=156.0, float16=312.0, bfloat16=312.0, int8=624.0),
        ),
        Gpu(
            "L4", "NVIDIA L4", capability=(8, 9), cores=58, bandwidth=300.096e9, link=32e9,
            memory=23_669_309_440, l2=50_331_648, clock_ghz=2.04, shared_per_core=102_400,
            shared_per_block=101_376, threads_per_core=1536, units_per_core=128, on_tensor_cores=_ADA,
            rates=_rates(
                float64=0.47, float32=30.3, tf32=60.0, float16=121.0, bfloat16=121.0, float8=242.0, int8=242.0
            ),
        ),
        Gpu(
            "H100", "NVIDIA H100 80GB HBM3", capability=(9, 0), cores=132, bandwidth=3352e9, link=450e9,
            memory=84_942_979_072, l2=52_428_800, clock_ghz=1.98, shared_per_core=233_472,
            shared_per_block=232_448, threads_per_core=2048, units_per_core=128, on_tensor_cores=_HOPPER,
            rates=_HOPPER_RATES,
        ),
        Gpu(
            "H200", "NVIDIA H200 141GB HBM3e", capability=(9, 0), cores=132, bandwidth=4800e9, link=450e9,
            memory=151_397_597_184, l2=52_428_800, clock_ghz=1.98, shared_per_core=233_472,
            shared_per_block=232_448, threads_per_core=2048, units_per_core=128, on_tensor_cores=_HOPPER,
            rates=_HOPPER_RATES,
        ),
        Gpu(
            "B200", "NVIDIA B200", capability=(10, 0), cores=148, bandwidth=7672.32e9, link=900e9,
            memory=191_514_411_008, l2=132_644_864, clock_ghz=1.965, shared_per_core=233_472,
            shared_per_block=232_448, threads_per_core=2048, units_per_core=128, on_tensor_cores=_BLACKWELL,
            rates=_rates(
                float64=37.0, float32=75.0, tf32=1100.0, float16=2250.0, bfloat16=2250.0, float8=4500.0,
                mxfp8=4500.0, int8=4500.0,
            ),
        ),
    )
}  # fmt: skip


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
    #: The whole program is on the chip.
    launch_seconds: ClassVar[float] = 0.0
    options: ClassVar[dict[str, Any]] = {}

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
        made: dict[str, Any] = {
            "platform": "tpu",
            "topology_name": f"{self.xla_name}:{'x'.join(map(str, chips))}",
            # By default a host has 2x2 chips, and smaller slices are refused.
            "chips_per_host_bounds": [math.gcd(size, 2) for size in chips[:2]] + [1],
        }
        return made | ({"chip_config_name": self.config} if self.config else {})

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


def _tpu_rates(bfloat16: float, **others: float) -> dict[str, float]:
    passes = {"bfloat16": bfloat16, "bfloat16_x3": bfloat16 / 3, "float32": bfloat16 / 6}
    return {arithmetic: rate * 1e12 for arithmetic, rate in (passes | others).items()}


_UNITS = frozenset({"bfloat16", "bfloat16_x3", "float32", "int8"})

#: One device of each version, by name. A chip of v4 and v5p is one device of two cores; a chip of v7x is two.
TPUS = {
    tpu.name: tpu
    for tpu in (
        Tpu(
            name="v4", description="TPU v4", xla_name="v4", dimensions=3, config="megacore",
            bandwidth=1228e9, link=150e9, memory=32 * 2**30, on_tensor_cores=_UNITS,
            rates=_tpu_rates(275.0, int8=275.0),
        ),
        Tpu(
            name="v5e", description="TPU v5 lite", xla_name="v5e", dimensions=2,
            bandwidth=819e9, link=100e9, memory=16 * 2**30, on_tensor_cores=_UNITS,
            rates=_tpu_rates(197.0, int8=393.0),
        ),
        Tpu(
            name="v5p", description="TPU v5", xla_name="v5p", dimensions=3,
            bandwidth=2765e9, link=300e9, memory=95 * 2**30, on_tensor_cores=_UNITS,
            rates=_tpu_rates(459.0, int8=918.0),
        ),
        Tpu(
            name="v6e", description="TPU v6 lite", xla_name="v6e", dimensions=2,
            bandwidth=1640e9, link=224e9, memory=32 * 2**30, on_tensor_cores=_UNITS,
            rates=_tpu_rates(918.0, int8=1836.0),
        ),
        Tpu(
            name="v7x", description="TPU7x", xla_name="tpu7x", dimensions=3, devices_per_chip=2,
            bandwidth=3690e9, link=300e9, memory=96 * 2**30, on_tensor_cores=_UNITS | {"float8"},
            rates=_tpu_rates(1153.5, float8=2307.0),
        ),
    )
}  # fmt: skip


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
    if isinstance(name, str):
        gpus = {key.lower(): gpu for key, gpu in GPUS.items()}
        if found := gpus.get(name.lower()) or slice_named(name):
            return found
    known = {key.lower(): key for key in TARGETS}
    hint = did_you_mean(name.lower(), known) if isinstance(name, str) else ""
    for lower, key in known.items():
        hint = hint.replace(f"'{lower}'", f"'{key}'")
    raise ValueError(
        f"Unknown target {name!r}.{hint} Known: {', '.join(TARGETS)}; a slice of TPUs as in 'v5e:2x4'; None "
        "for the device of this machine."
    )


def target_of_device(kind: str) -> Target | None:
    """Finds what a device's kind ("NVIDIA H100 80GB HBM3", "TPU v5 lite") names; None if it is not known."""
    if kind.startswith("TPU"):
        short = kind.replace(" lite", "e")
        return next((tpu for tpu in TPUS.values() if short in (tpu.description.replace(" lite", "e"),
                     f"TPU {tpu.name}")), None)  # fmt: skip
    if kind.partition(":")[0].lower() in TPUS:
        return slice_named(kind)
    words = re.split(r"[ -]", kind.upper())
    return next((gpu for name, gpu in GPUS.items() if name in words), None)
