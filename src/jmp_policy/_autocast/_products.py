"""Products of half operands that accumulate into a float32 result, with half products as derivatives.

JAX transposes such a product into one of a float32 cotangent with a half operand, which no Tensor Core takes.
Here the tangent is a half product, converted: its transpose rounds the cotangent to half first, as it would
have been rounded had the result been half.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._autocast._jax import FLOAT32

#: Takes operands and the dtype of the result.
Product = Callable[[Sequence[Any], np.dtype], Any]


def widened(product: Product, half: np.dtype, operands: Sequence[Any]) -> Any:
    """A product with a float32 result.

    Args:
      product: linear in each floating operand.
      half: dtype of the floating operands.
      operands: arrays.

    Returns:
      The float32 product; its derivatives are half products.
    """

    @jax.custom_jvp
    def call(*operands: Any) -> Any:
        return product(operands, FLOAT32)

    def rule(primals: Any, tangents: Any) -> Any:
        out = call(*primals)
        terms = [
            product([*primals[:place], tangent, *primals[place + 1 :]], half)
            for place, tangent in enumerate(tangents)
            if not isinstance(tangent, jax.custom_derivatives.SymbolicZero)
        ]
        if not terms:
            return out, jnp.zeros_like(out)
        total = terms[0]
        for term in terms[1:]:
            total = lax.add(total, term)
        return out, lax.convert_element_type(total, FLOAT32)

    call.defjvp(rule, symbolic_zeros=True)
    return call(*operands)
