"""Describes NVIDIA's cards: to XLA's compiler, and by their peak rates.

Rates are those of NVIDIA's data sheets, for dense matrices: those "with sparsity" are twice as high. The
descriptions are those that the cards give XLA themselves (openxla/xla, `target_config/specs`).
"""

import dataclasses
from typing import Any, ClassVar

from jmp_policy._src.core.targets.target import Target

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
        """Returns the arguments of JAX's `get_topology_desc` for so many cards in one machine."""
        config, topology = self.config(), f"1x{devices}x1"
        return {"platform": "cuda", "topology_name": "", "target_config": config, "topology": topology}

    def config(self) -> str:
        """Returns the card as XLA's `GpuTargetConfig`, in protobuf's text format."""
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
