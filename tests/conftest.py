"""Shared settings: tests run on the CPU unless told otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
