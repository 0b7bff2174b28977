"""How a product of half operands is computed: with a half or float32 result, or in float8 under a recipe.

A function has no layers to tell a head or attention by. Its program shows them: a head's result goes to
float32 operations only (the loss), attention multiplies batches of activations, experts batches of which one
is an argument of the function, and what a first layer multiplies are both arguments.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.autocast.values import CastCache, Value, computed
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.jaxpr.matrix_products import size_of
from jmp_policy._src.policy.marked_regions import Region
from jmp_policy._src.policy.recipes import role_by_name
from jmp_policy._src.policy.worthwhile import without_target
from jmp_policy._src.products import binding
from jmp_policy._src.products.fp8.eligibility import loses, stays_because
from jmp_policy._src.products.fp8.primitive import bind_float8
from jmp_policy._src.products.primitives import CONV_WITH_FLOAT32_RESULT
from jmp_policy._src.weight_grads.transform import FLOAT32_PRODUCT


def choose(eqn: Any, ins: Sequence[Value], region: Region) -> tuple[Any, str]:
    """Returns the rule of a product, None for that of half products, and the reason as `explain` shows it.

    Args:
      eqn: a product that is lowered, with a half result.
      ins: what is known of its operands.
      region: where it is.
    """
    why_not = _why_not(eqn, ins, region)
    if why_not:
        return None, f"; in {region.half} and not in float8: {why_not}"
    return FLOAT8[ins[0].source == "leaf"], f"; in float8 by the recipe {region.recipe}"


def _why_not(eqn: Any, ins: Sequence[Value], region: Region) -> str:
    if eqn.primitive.name != "dot_general":
        return f"recipes are for matrix products, not for {eqn.primitive.name}"
    if region.lower:
        return "the region asks for half"
    is_weight = [value.source == "leaf" for value in ins]
    if any(eqn.params["dimension_numbers"][1]) and not any(is_weight):
        return "it is one of batches, as in attention"
    if all(is_weight):
        return "both operands are arguments, as in a first layer"
    role = role_by_name("/".join((*region.path, *compat.scopes(eqn))), size_of(eqn).n)
    if role:
        return f"by its name it belongs to {role}"
    recipe = region.recipe or ""
    return stays_because(eqn, recipe) or loses(size_of(eqn), recipe)


class _Float8Product(NamedTuple):
    """A product of float8 operands, made of half ones; `weight` is the operand that is one."""

    weight: int

    def run(self, step: Any, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        arrays = [cache.read(dtype) for cache, dtype in zip(caches, step.reads, strict=True)]
        params = {**step.eqn.params, "preferred_element_type": None, "precision": None}
        recipe = without_target(step.region.recipe)
        return [computed(bind_float8(arrays, recipe, params, weight=self.weight))]


#: By whether the weight is the left operand.
FLOAT8: Any = {True: _Float8Product(0), False: _Float8Product(1)}


def product(eqn: Any, operands: Sequence[Any], result: np.dtype) -> Any:
    """Computes the product of an equation, of half operands, with a result in the given dtype."""
    changed = {"preferred_element_type": result, "precision": None}
    if result == FLOAT32 and eqn.primitive.name == CONV_WITH_FLOAT32_RESULT.name:
        return binding.bind_product(CONV_WITH_FLOAT32_RESULT, operands, {**eqn.params, **changed})[0]
    return binding.bind(eqn, *operands, **changed)[0]


def dot_with_float32_output(eqn: Any, half: np.dtype, operands: Sequence[Any]) -> Any:
    """Computes the product of an equation with a float32 result, whose derivatives are half products.

    JAX transposes such a product into one of a float32 cotangent with a half operand, which no Tensor Core
    takes. Here the tangent is a half product, converted: its transpose rounds the cotangent to half first, as
    it would have been rounded had the result been half.

    Args:
      eqn: a product, linear in each floating operand.
      half: dtype of the floating operands.
      operands: arrays.
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
