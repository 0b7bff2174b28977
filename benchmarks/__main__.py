"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import (
    accumulation_cost,
    autocast_cost,
    autocast_gpu_cost,
    checkpoint_pause,
    communication,
    faults,
    grad_dtype_cost,
    long_run,
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
    communication,
    accumulation_cost,
    rounding_cost,
    checkpoint_pause,
    faults,
    long_run,
)

if __name__ == "__main__":
    for benchmark in BENCHMARKS:
        benchmark.main()
