"""Recipes that are followed only where they gain on a device: "fp8_current@H100".

Whether 8 bits gain depends on the size of a product, which no rule sees: a rule knows paths and modules, and
a layer of 2048 features gains with many tokens and loses with few. So the device is part of the recipe, and
it is decided where a product is made.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence

import jax

from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.targets import TARGETS, Target, find_target
from jmp_policy._src.policy.recipes import RECIPES, is_recipe

_MARKER = re.compile(r"stays\[([\dx]+)~([\w:+@-]+)\]")


def worthwhile(recipe: str, target: str) -> str:
    """Returns a recipe that is followed only where it gains on a device, by estimate at each product's size.

    A product stays in compute dtype where rounding its operands to 8 bits costs more time than multiplying
    them saves, as torchao's filter of layers has it for PyTorch. What is compared is a training step, both
    gradients included, on one device: where an array is sharded under `jit`, its whole size counts.

    Args:
      recipe: "fp8_current", say.
      target: name of the device: "H100", "H200", "B200", "L4", or "v7x".

    Returns:
      "fp8_current@H100", which goes wherever a recipe does: `Policy("mixed_bfloat16", recipe=...)`, the text
      "mixed_bfloat16, r=fp8_current@H100", `autocast(fn, lower=...)`.

    Raises:
      ValueError: for an unknown recipe or device, and for one without float8 arithmetic.

    Example:
      >>> import jmp_policy as jmpp
      >>> jmpp.Policy("mixed_bfloat16", recipe=jmpp.report.worthwhile("fp8_current", target="H100")).recipe
      'fp8_current@H100'
    """
    if not is_recipe(without_target(recipe)):
        raise ValueError(
            f"Unknown recipe {recipe!r}.{did_you_mean(recipe, RECIPES)} Known: {', '.join(RECIPES)}."
        )
    card = find_target(target)
    if "float8" not in card.rates:
        able = [name for name, known in TARGETS.items() if "float8" in known.rates]
        raise ValueError(
            f"{card.name} has no float8 arithmetic, so that no product gains there. {', '.join(able)} have."
        )
    return f"{without_target(recipe)}@{card.name}"


def without_target(recipe: str) -> str:
    """Returns a recipe as it is where it is followed: "fp8_current" for "fp8_current@H100"."""
    return recipe.partition("@")[0]


def target_of(recipe: str) -> Target | None:
    """Returns the device on which a recipe must gain; None for one that is followed everywhere."""
    _, _, target = recipe.partition("@")
    return find_target(target) if target else None


@contextlib.contextmanager
def staying(recipe: str, size: Sequence[int]) -> Iterator[None]:
    """Marks a product, and those of its gradient, as ones that would lose by a recipe, for reports.

    Args:
      recipe: "fp8_current@H100".
      size: of the product in the forward pass; what is not known while it is traced counts as 0.
    """
    known = (str(n) if isinstance(n, int) else "0" for n in size)
    with jax.named_scope(f"stays[{'x'.join(known)}~{recipe}]"):
        yield


def is_staying(scope: str) -> bool:
    """Returns whether a scope of a name stack is such a marker."""
    return _MARKER.fullmatch(scope) is not None


def loses_by(scopes: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
    """Returns what `staying` says in the scopes around an operation; None where it says nothing."""
    for found in filter(None, map(_MARKER.fullmatch, scopes)):
        return found.group(2), tuple(map(int, found.group(1).split("x")))
    return None
