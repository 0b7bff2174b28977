"""Shared settings: tests run on the CPU unless told otherwise, which shows itself as eight devices."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

# Most of the time of these tests is compiling. The programs of operations and buffers stay the same; LLVM
# does less to the machine code.
if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)
