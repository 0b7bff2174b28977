"""Counts from compilers: kernels, bytes, memory and products of programs that do not run."""
