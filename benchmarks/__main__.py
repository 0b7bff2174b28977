"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import (
    autocast_cost,
    autocast_gpu_cost,
    loss_scaling_cost,
    nnx_cost,
    nnx_gpu_cost,
    overhead,
    peers,
    report_cost,
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
)

if __name__ == "__main__":
    for benchmark in BENCHMARKS:
        benchmark.main()
