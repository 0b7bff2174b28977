"""Knows GPUs and TPUs: their names, their peak rates, and how they are described to XLA's compilers."""
