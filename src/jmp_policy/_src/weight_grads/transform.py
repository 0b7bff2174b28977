"""A function whose weight gradients are float32."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.flatten import flattened
from jmp_policy._src.products import binding
from jmp_policy._src.weight_grads.dual_values import DualValues, read
from jmp_policy._src.weight_grads.param_casts import TRACED_FOR_IT


def with_float32_gradients(fn: Callable[..., Any], *, opens_scope: bool = False) -> Callable[..., Any]:
    """Returns the function, with float32 gradients of every parameter that it casts by `cast_weight`.

    Where nothing is traced nobody differentiates, and the function runs as it is.

    Args:
      fn: a function of pytrees. Arguments and results that are no arrays are static.
      opens_scope: whether it opens a named scope of its own, which is to leave no trace.

    Warns:
      UserWarning: for places at which a gradient stays half.
    """

    @functools.wraps(fn)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        with TRACED_FOR_IT(True):
            if not any(map(ir.is_traced, jax.tree.leaves((args, kwargs)))):
                return fn(*args, **kwargs)
            jaxpr, arrays, rebuild = flattened(fn, args, kwargs)
        run = DualValues()
        if ir.is_explicit(compat.open_jaxpr(jaxpr).invars):
            # Op by op, constants would not get the shardings that the trace gave them.
            made = jax.jit(run.function(jaxpr))(*arrays)
        else:
            with binding.program(is_body=False):
                made = list(map(read, run.run(jaxpr, arrays, opens_scope)))
        for place, why in run.missed.items():
            warnings.warn(
                f"grad_dtype=float32 does not reach a weight at {place}: {why}. Its gradient is as without.",
                UserWarning,
                stacklevel=2,
            )
        atoms = compat.open_jaxpr(jaxpr).outvars
        return rebuild([ir.as_array(value, atom) for value, atom in zip(made, atoms, strict=True)])

    return in_float32
