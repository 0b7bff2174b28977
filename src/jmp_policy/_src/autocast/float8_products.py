"""Chooses the products that autocast computes in float8 under a recipe.

A function has no layers to tell a head or attention by. Its program shows them: a head's result goes to
float32 operations only (the loss), attention multiplies batches of activations, and what a first layer
multiplies are both arguments of the function.
"""

from collections.abc import Sequence
from typing import Any

from jmp_policy._src.autocast.values import CastCache, Value, computed
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.matrix_products import size_of
from jmp_policy._src.policy.marked_regions import Region
from jmp_policy._src.policy.recipes import role_by_name
from jmp_policy._src.policy.worthwhile import without_target
from jmp_policy._src.products.fp8.eligibility import stays_because
from jmp_policy._src.products.fp8.primitive import bind_float8
from jmp_policy._src.products.fp8.profit import loses


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
    return FLOAT8, f"; in float8 by the recipe {region.recipe}"


def _why_not(eqn: Any, ins: Sequence[Value], region: Region) -> str:
    if eqn.primitive.name != "dot_general":
        return f"recipes are for matrix products, not for {eqn.primitive.name}"
    if region.lower:
        return "the region asks for half"
    if any(eqn.params["dimension_numbers"][1]):
        return "it is one of batches, as in attention"
    if all(value.source == "leaf" for value in ins):
        return "both operands are arguments, as in a first layer"
    role = role_by_name("/".join((*region.path, *compat.scopes(eqn))), size_of(eqn).n)
    if role:
        return f"by its name it belongs to {role}"
    recipe = region.recipe or ""
    return stays_because(eqn, recipe) or loses(size_of(eqn), recipe)


class _Float8Product:
    """A product of float8 operands, made of half ones."""

    def run(self, step: Any, caches: Sequence[CastCache]) -> Sequence[CastCache]:
        arrays = [cache.read(dtype) for cache, dtype in zip(caches, step.reads, strict=True)]
        params = {**step.eqn.params, "preferred_element_type": None, "precision": None}
        return [computed(bind_float8(arrays, without_target(step.region.recipe), params))]


FLOAT8: Any = _Float8Product()
