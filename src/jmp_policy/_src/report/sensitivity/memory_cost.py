"""Estimates the memory that a loss and its gradient take, from the traced program alone."""

from typing import Any

import jax

from jmp_policy._src.report.memory.analytic_model import analytic_memory_model
from jmp_policy._src.report.sensitivity.half_program import Loss


def memory_of(loss: Loss) -> int:
    """Returns bytes of parameters, half copies, gradients and activations; nothing is run or compiled."""
    gradient, params, arrays = loss.gradient()

    def of_params(params: Any) -> Any:
        return gradient(params, arrays)

    jaxpr = jax.make_jaxpr(of_params)(params)
    alone = [1] * len(params)
    return analytic_memory_model(jaxpr, ["parameters"] * len(params), (), alone).total()
