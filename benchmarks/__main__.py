"""Runs the benchmarks: `python -m benchmarks`; with `gpu` those that want a GPU, or an hour to compile."""

import importlib.util
import sys

from benchmarks import (
    accumulation_cost,
    accuracy,
    autocast_cost,
    autocast_gpu_cost,
    autocast_zoo,
    checkpoint_pause,
    communication,
    drift_cost,
    faults,
    fp8_device,
    grad_dtype_cost,
    half_moments,
    long_run,
    loss_scaling_cost,
    loss_scaling_zoo,
    nnx_cost,
    nnx_gpu_cost,
    overhead,
    peers,
    recommended_policy,
    report_cost,
    rounding_cost,
    sensitivity,
    stack_depth,
    statistic_scale,
    zoo_cards,
    zoo_cost,
    zoo_device,
    zoo_gpu,
    zoo_peers,
    zoo_tpu,
)

BENCHMARKS = (
    loss_scaling_cost,
    overhead,
    nnx_cost,
    nnx_gpu_cost,
    autocast_cost,
    autocast_gpu_cost,
    peers,
    report_cost,
    drift_cost,
    grad_dtype_cost,
    communication,
    accumulation_cost,
    rounding_cost,
    half_moments,
    checkpoint_pause,
    faults,
    long_run,
    accuracy,
    zoo_cost,
    stack_depth,
    statistic_scale,
    sensitivity,
    recommended_policy,
)
GPU_BENCHMARKS = [
    zoo_device,
    fp8_device,
    zoo_gpu,
    loss_scaling_zoo,
    zoo_cards,
    zoo_peers,
    autocast_zoo,
    zoo_tpu,
]
if importlib.util.find_spec("torch"):
    GPU_BENCHMARKS.insert(1, importlib.import_module("benchmarks.zoo_torch"))

if __name__ == "__main__":
    for benchmark in GPU_BENCHMARKS if sys.argv[1:] == ["gpu"] else BENCHMARKS:
        benchmark.main()
