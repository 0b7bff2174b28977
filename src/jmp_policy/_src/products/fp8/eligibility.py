"""Says which products are computed in float8, which of a program are, and why the others are not."""

from typing import Any

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.jaxpr.matrix_products import Size, size_of
from jmp_policy._src.policy.recipes import passes_of, role_by_name
from jmp_policy._src.policy.worthwhile import loses_by
from jmp_policy._src.products.fp8.blocks import BLOCKS, TERMS
from jmp_policy._src.products.fp8.profit import loses

#: Tensor Cores take float8 products whose sizes are multiples of the first, and with blocks of the second.
MULTIPLE, BLOCK_MULTIPLE = 16, TERMS

#: What has so many times as many outputs as inputs makes logits of a vocabulary, or looks it up backwards.
_VOCABULARY = 8


def recipe_of(eqn: Any) -> str:
    """Returns the recipe by which the operands of a product are rounded; "" where they are not.

    Those of a replay in float32 are not.
    """
    forward = passes_of(eqn.params.get("recipe", "")).fwd or ""
    is_rounded = forward and None not in eqn.params["formats"] and is_half(ir.dtype_of(eqn.invars[0]))
    return forward if is_rounded else ""


def formats_of(eqn: Any) -> tuple[str, str] | None:
    """Returns the float8 dtypes of the operands of a product; None for one of other dtypes."""
    return eqn.params["formats"] if recipe_of(eqn) else None


def stays_because(eqn: Any, recipe: str = "", is_asked_for: bool = False) -> str:
    """Returns why a half product is not computed in float8, or "".

    Args:
      eqn: a `dot_general` of a jaxpr.
      recipe: the one that it would have.
      is_asked_for: whether somebody asked for this very product, so that only the hardware's limits count.
    """
    size, dtype = size_of(eqn), ir.dtype_of(eqn.invars[0])
    if eqn.params["preferred_element_type"] not in (None, dtype):
        return f"its result is asked for in {eqn.params['preferred_element_type']}"
    if ir.asks_for_precision(eqn):
        return f"it asks for precision={eqn.params['precision']}"
    # A size that is known only when an exported program is called is that of a batch.
    sizes = {name: n for name in "mnk" if isinstance(n := getattr(size, name), int)}
    multiple = BLOCK_MULTIPLE if any(name in BLOCKS for name in passes_of(recipe)) else MULTIPLE
    refused = [f"{name}={n}" for name, n in sizes.items() if n % multiple or not n]
    if refused:
        return f"{', '.join(refused)} is no multiple of {multiple}"
    n, k = sizes.get("n", 1), sizes.get("k", 1)
    if not is_asked_for and max(n, k) > _VOCABULARY * min(n, k):
        return "a vocabulary's size: " + (f"n={n} of k={k}" if n > k else f"k={k} to n={n}")
    return ""


def operand_dtypes(eqn: Any) -> tuple[str, ...]:
    """Returns the dtypes in which a product's two operands are multiplied."""
    return formats_of(eqn) or tuple(str(ir.dtype_of(atom)) for atom in eqn.invars[:2])


def why_not(eqn: Any, path: str) -> str:
    """Returns why a half product of a program with a recipe is not in float8, as far as the program tells.

    Args:
      eqn: a product of a jaxpr.
      path: names of the scopes around it.
    """
    if formats_of(eqn) or not all(is_half(ir.dtype_of(atom)) for atom in eqn.invars[:2]):
        return ""
    if eqn.primitive.name != "dot_general":
        return f"recipes are for matrix products, not for {eqn.primitive.name}"
    if any(eqn.params["dimension_numbers"][1]):
        return "one of batches, as in attention"
    if "recipe" in eqn.params:
        return "" if None in eqn.params["formats"] else "the recipe is for gradients"
    return role_by_name(path, size_of(eqn).n) or stays_in_half(eqn) or "no recipe reaches it"


def stays_in_half(eqn: Any) -> str:
    """Returns why a product of a layer with a recipe is not in float8, by its size and settings; else ""."""
    if "recipe" in eqn.params:
        return ""
    marked = loses_by(compat.scopes(eqn))
    return stays_because(eqn) if marked is None else loses(Size(*marked[1]), marked[0])
