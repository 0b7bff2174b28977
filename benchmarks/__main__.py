"""Runs every benchmark: `python -m benchmarks`."""

from benchmarks import loss_scaling_cost, overhead, peers

if __name__ == "__main__":
    for benchmark in (loss_scaling_cost, overhead, peers):
        benchmark.main()
