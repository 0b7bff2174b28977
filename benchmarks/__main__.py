"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import loss_scaling_cost, nnx_cost, nnx_gpu_cost, overhead, peers

if __name__ == "__main__":
    for benchmark in (loss_scaling_cost, overhead, nnx_cost, nnx_gpu_cost, peers):
        benchmark.main()
