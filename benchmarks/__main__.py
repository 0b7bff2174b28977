"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import (
    accumulation_cost,
    autocast_cost,
    autocast_gpu_cost,
    checkpoint_pause,
    grad_dtype_cost,
    loss_scaling_cost,
    nnx_cost,
    nnx_gpu_cost,
    overhead,
    peers,
    report_cost,
    rounding_cost,
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
    grad_dtype_cost,
    accumulation_cost,
    rounding_cost,
    checkpoint_pause,
)

if __name__ == "__main__":
    for benchmark in BENCHMARKS:
        benchmark.main()
