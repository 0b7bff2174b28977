"""Running a plan: each operation on operands of the planned dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jmp_policy._src.autocast.planner import Plan
from jmp_policy._src.autocast.values import CastCache, argument, computed, constant
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.ir import evaluate
from jmp_policy._src.products import binding


def run(plan: Plan, caches: Sequence[CastCache]) -> list[CastCache]:
    """Runs the operations of a plan, on behalf of the lines of code they come from.

    Args:
      plan: what is to be done.
      caches: the arguments. Casts made of them are kept in them.

    Returns:
      The results.
    """
    steps = iter(plan.program.steps)

    def step(eqn: Any, operands: list[CastCache]) -> Sequence[CastCache]:
        planned = next(steps)
        with compat.eqn_context(planned.at or eqn):
            return planned.rule.run(planned, operands)

    return evaluate(
        plan.program, caches, step, constant=_constant, literal=_literal, last_uses=plan.last_uses
    )


def _constant(var: Any, value: Any) -> CastCache:
    return constant(value, var.aval.dtype if ir.is_plain_array(var) else None)


def _literal(atom: Any) -> CastCache:
    # An array: what it is handed to as an argument may ask for its shape, which a Python number has not.
    value = np.asarray(atom.val, ir.dtype_of(atom))
    return CastCache(value, value.dtype, value.astype)


def as_function(plan: Plan, dtypes: Sequence[np.dtype | None]) -> Callable[..., list[Any]]:
    """Returns a plan as a function of arrays in the dtypes it was made for.

    Args:
      plan: what is to be done.
      dtypes: of each result; None for results as they come.
    """

    def function(*arrays: Any) -> list[Any]:
        with binding.program(is_body=True):
            outs = run(plan, list(map(argument, arrays, plan.ins)))
            return [cache.read(dtype) for cache, dtype in zip(outs, dtypes, strict=True)]

    return function


def rebound(step_eqn: Any, reads: Sequence[np.dtype | None], caches: Sequence[CastCache]) -> list[CastCache]:
    """Does the operation itself, with its own parameters, on operands in the given dtypes."""
    arrays = [cache.read(dtype) for cache, dtype in zip(caches, reads, strict=True)]
    return [computed(out) for out in binding.bind(step_eqn, *arrays)]
