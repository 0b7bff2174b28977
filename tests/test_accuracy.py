"""The comparison of accuracies in `benchmarks/accuracy.py`: what it finds, and that it can find a difference."""

import dataclasses
import functools
import importlib
import json
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from scipy import stats

import jmp_policy as jmpp

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
try:
    accuracy = importlib.import_module("benchmarks.accuracy")
finally:
    sys.path.remove(str(ROOT))

TASK = "diabetes, MLP regression"
SEEDS, STEPS = (0, 1, 2), 12
#: One standard deviation of five seeds; twice as many steps as the result is about.
BASE = np.asarray([0.50, 0.53, 0.49, 0.52, 0.51])


class Coarse(nn.Module):
    """The task's model, with what it is given and what it gives rounded as by an 8-bit number."""

    @nn.compact
    def __call__(self, x):
        def rounded(x):
            return jax.lax.reduce_precision(x, 5, 2)

        return rounded(accuracy.TASKS[TASK].model(rounded(x)))
