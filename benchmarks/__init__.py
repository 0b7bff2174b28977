"""Measurements of jmp_policy against hand-written mixed precision and against its peers."""

import jax

# Everything here runs on the CPU or is only compiled for a GPU; with other platforms allowed, the CUDA plugin
# would look for a driver.
jax.config.update("jax_platforms", "cpu")
