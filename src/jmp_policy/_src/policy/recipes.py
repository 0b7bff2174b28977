"""Defines the float8 recipes that a policy can name, and which layers they leave out by their names.

Names are TransformerEngine's. A recipe says how the operands of a product are scaled before they are rounded
to 8 bits; everything else about the policy stays: parameters, inputs and results have its other dtypes.
"""

import re

import numpy as np

from jmp_policy._src.core.suggest import did_you_mean

#: The recipes of this library, with what has a scale of its own.
RECIPES = {
    "fp8_current": "one scale per tensor, from the largest value that it has now",
    "fp8_rowwise": "one scale per row and column, from the largest value that it has now",
}

#: What a name of a layer, or of one above it, ends in or is, and what it tells: where 8 bits cost the most
#: accuracy and save the least time.
_KEPT = (
    (re.compile(r"(.*_)?(heads?|logits?(_?dense|_?proj)?|classifier|score)(_?\d+)?"), "a head"),
    (re.compile(r"(.*_)?router(_?\d+)?|gate(_?\d+)?"), "a router"),
    (re.compile(r"(.*_)?(embed(der|dings?)?|patch(es)?|patch_proj\w*|stem)(_?\d+)?"), "a first layer"),
)
#: A name that ends in a word of the first pattern, and is none.
_NOT_KEPT = re.compile(r"(multi|single|num|n)_heads?", re.IGNORECASE)


def check_recipe(recipe: object, compute_dtype: np.dtype, policy: str) -> None:
    """Raises for what is no recipe, and for a recipe that does not go with a policy's compute dtype.

    Args:
      recipe: what was given.
      compute_dtype: the policy's.
      policy: the rest of the policy, for the message.

    Raises:
      ValueError: the message lists the recipes, or says which compute dtypes one goes with.
    """
    if not isinstance(recipe, str) or recipe not in RECIPES:
        hint = did_you_mean(recipe, RECIPES) if isinstance(recipe, str) else ""
        known = ", ".join(f"{name!r} ({why})" for name, why in RECIPES.items())
        raise ValueError(f"Unknown recipe {recipe!r} in policy {policy!r}.{hint} Known: {known}.")
    if compute_dtype.name not in ("bfloat16", "float16"):
        raise ValueError(
            f"The policy {policy!r} has recipe={recipe}: a float8 recipe is for products in 16 bits, and "
            "what it leaves out stays in the compute dtype. Ask for compute=bfloat16 or float16, as "
            f"'mixed_bfloat16,recipe={recipe}' does."
        )


def role_by_name(path: str) -> str:
    """Returns what a layer is by the names on its path, if float8 recipes leave it out; else "".

    Args:
      path: "decoder/lm_head". Of its names each counts: what is inside of a head belongs to it.
    """
    for name in filter(None, path.lower().split("/")):
        for pattern, role in _KEPT:
            if pattern.fullmatch(name) and not _NOT_KEPT.fullmatch(name):
                return role
    return ""
