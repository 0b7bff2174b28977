"""Counts what rounding to float8 makes of operands: elements that become zero, or the largest number."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.policy.recipes import DELAYED
from jmp_policy._src.products.fp8 import nvfp4
from jmp_policy._src.products.fp8.eligibility import recipe_of
from jmp_policy._src.products.fp8.primitive import rounder
from jmp_policy._src.products.fp8.ragged import axes_of
from jmp_policy._src.products.fp8.scales import as_matrices, has_blocks, quantised


def lost_in_float8(eqn: Any, operands: Sequence[Any]) -> jax.Array:
    """Counts elements of the two operands of a float8 product.

    Args:
      eqn: the product.
      operands: all of its operands.

    Returns:
      float32 of shape (2, 3): for each operand how many elements it has, how many that are not zero become
      zero, and how many finite ones are beyond the range of their scale.
    """
    recipe = recipe_of(eqn)
    contracted, batch = axes_of(eqn.params)
    transforms = nvfp4.is_transformed(recipe, eqn.params["weight"], eqn.params["gradient"])
    found = []
    for place, format in enumerate(eqn.params["formats"]):
        x, scale = operands[place], operands[2 + place]
        largest = float(jnp.finfo(format).max)
        if has_blocks(recipe):
            x = as_matrices(x, contracted[place], batch[place])
            scaled = rounder(eqn.params, operands[4], operands[7:])(place, x)
            scale = scaled.scale_of_each if scaled.whole is None else scaled.scale_of_each * scaled.whole
            x = nvfp4.transformed(x) if transforms else x
            is_zero = scaled.values == 0
        else:
            is_zero = quantised(x, scale, format, saturates=recipe == DELAYED) == 0
        divided = x.astype(jnp.float32) / jnp.where(scale > 0, scale, jnp.inf)
        counted = is_zero & (x != 0), jnp.isfinite(x) & (jnp.abs(divided) > largest)
        found.append([jnp.float32(x.size), *(jnp.sum(each, dtype=jnp.float32) for each in counted)])
    return jnp.array(found)
