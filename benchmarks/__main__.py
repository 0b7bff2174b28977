"""Measures tables, and writes what pages say of them.

    python -m benchmarks                           # all that a CPU measures, or compiles soon
    python -m benchmarks gpu                       # those that want a GPU, or an hour to compile
    python -m benchmarks zoo_gpu ResNet-50 GPT-2   # these rows of one table
    python -m benchmarks pages                     # tables of the documentation, from results
    python -m benchmarks plots                     # their figures

`table.py` says how a table is declared.
"""

import importlib
import importlib.util
import os
import subprocess
import sys

import jax

#: Module -> the tables that it declares, in the order in which they are measured.
ON_CPU = {
    "counts.encoder": ("loss_scaling_cost", "autocast_gpu_cost", "grad_dtype_gpu_cost"),
    "times.overhead": ("overhead", "grad_dtype_cost", "zoo_cost"),
    "times.nnx": ("nnx_cost", "nnx_calls"),
    "times.autocast": ("autocast_cost",),
    "times.reports": ("report_cost", "first_call", "lines_printed", "drift_cost"),
    "times.optimizers": ("rounding_cost",),
    "accuracy.gradient_errors": ("gradient_errors",),
    "accuracy.tasks": ("accuracy",),
    "accuracy.modules": ("sensitivity", "recommend_zoo", "drift_shares"),
    "accuracy.report_checks": ("planted_faults", "healthy_models", "planted_parts"),
}
#: What the device of this machine runs.
ON_DEVICE = {"times.device": ("zoo_device", "fp8_device")}
ON_GPU = {
    **ON_DEVICE,
    **({"times.zoo_torch": ("zoo_torch",)} if importlib.util.find_spec("torch") else {}),
    "counts.zoo_gpu": ("zoo_gpu",),
    "counts.zoo_cards": ("zoo_cards", "zoo_tpu"),
    "counts.float8": ("fp8_gpu", "fp8_blocks", "fp8_attention", "fp8_profit"),
    "counts.scaling_out": ("scaling_out", "experts_sent"),
    "times.peers": ("zoo_peers",),
}
#: Only when they are named: one takes hours, others want PyTorch, its wheel, or rejax.
BY_NAME = {
    "accuracy.fp8_training": ("fp8_training", "fp8_gradients"),
    "times.zoo_torch": ("zoo_torch",),
    "accuracy.rejax_training": ("rejax",),
    "pages.torch_lists": ("torch_lists",),
}
#: Table -> its module.
MODULES = {
    name: module for some in (ON_CPU, ON_GPU, BY_NAME) for module, names in some.items() for name in names
}
#: What writes pages and figures.
WRITERS = {"pages": "benchmarks.pages.files", "plots": "benchmarks.pages.plots"}


def measure(name: str, *words: str) -> None:
    """Measures one table in this process."""
    if name not in MODULES:
        raise SystemExit(f"There is no table {name!r}; there are {', '.join(MODULES)}.")
    if name in ON_DEVICE["times.device"]:  # Before anything runs on the CPU.
        jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)
    tables = importlib.import_module(f"benchmarks.{MODULES[name]}").TABLES
    next(table for table in tables if table.name == name).main(words)


def main(words: list[str]) -> None:
    if words and words[0] in WRITERS:
        importlib.import_module(WRITERS[words[0]]).main()
    elif words and words != ["gpu"]:
        measure(*words)
    else:
        # A process each: what one sets up, or leaves in caches and memory, is nothing to the next.
        for names in (ON_GPU if words else ON_CPU).values():
            for name in names:
                subprocess.run([sys.executable, "-m", "benchmarks", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
