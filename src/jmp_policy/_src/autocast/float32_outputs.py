"""Products of half operands that accumulate into a float32 result, with half products as derivatives.

JAX transposes such a product into one of a float32 cotangent with a half operand, which no Tensor Core takes.
Here the tangent is a half product, converted: its transpose rounds the cotangent to half first, as it would
have been rounded had the result been half.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.products import binding
from jmp_policy._src.products.primitives import CONV_WITH_FLOAT32_RESULT
from jmp_policy._src.weight_grads.dual_values import FLOAT32_PRODUCT


def product(eqn: Any, operands: Sequence[Any], result: np.dtype) -> Any:
    """Computes the product of an equation, of half operands, with a result in the given dtype."""
    changed = {"preferred_element_type": result, "precision": None}
    if result == FLOAT32 and eqn.primitive.name == CONV_WITH_FLOAT32_RESULT.name:
        return binding.bind_product(CONV_WITH_FLOAT32_RESULT, operands, {**eqn.params, **changed})[0]
    return binding.bind(eqn, *operands, **changed)[0]


def dot_with_float32_output(eqn: Any, half: np.dtype, operands: Sequence[Any]) -> Any:
    """Computes the product of an equation with a float32 result.

    Args:
      eqn: a product, linear in each floating operand.
      half: dtype of the floating operands.
      operands: arrays.

    Returns:
      The float32 product; its derivatives are half products.
    """

    def dot(*operands: Any) -> Any:
        with binding.program(is_body=True):
            return product(eqn, operands, FLOAT32)

    dot.__name__ = FLOAT32_PRODUCT
    call = jax.custom_jvp(dot)

    def rule(primals: Any, tangents: Any) -> Any:
        # Not `call` again: policies of jax.checkpoint that save products must see one here. Only a third
        # derivative in reverse would meet JAX's own transpose of it.
        out = product(eqn, primals, FLOAT32)
        terms = [
            product(eqn, [*primals[:place], tangent, *primals[place + 1 :]], half)
            for place, tangent in enumerate(tangents)
            if not isinstance(tangent, jax.custom_derivatives.SymbolicZero)
        ]
        if not terms:
            return out, jnp.zeros_like(out)
        return out, lax.convert_element_type(functools.reduce(lax.add, terms), FLOAT32)

    call.defjvp(rule, symbolic_zeros=True)
    return call(*operands)
