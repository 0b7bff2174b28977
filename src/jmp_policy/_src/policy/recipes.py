"""Defines the recipes of 8 and 4 bits that a policy can name, and which layers they leave out by their names.

Names are TransformerEngine's. A recipe says how the operands of a product are scaled before they are rounded
to 8 or 4 bits; everything else about the policy stays: parameters, inputs and results have its other dtypes.

A recipe is one word, so that policies, rules and scopes can name it: "fp8_current" for all products,
"fwd:fp8_current" for those of the forward pass, "bwd:fp8_current" for those of gradients, and
"fwd:fp8_rowwise+bwd:fp8_current" for both in different ways.

"fp8_current+scores+values" is for attention's own products as well, under `autocast`.

"fp8_current@H100" is followed only where it gains on that device. That depends on the size of a product,
which no rule sees: a layer of 2048 features gains with many tokens and loses with few. So the device is part
of the recipe, and it is decided where a product is made.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.targets import TARGETS, Target, find_target

#: The recipes of this library, with what has a scale of its own.
RECIPES = {
    "fp8_current": "one scale per tensor, from the largest value that it has now",
    "fp8_rowwise": "one scale per row and column, from the largest value that it has now",
    "fp8_block": "one scale per 128 terms of a sum, and per 128 x 128 values of a weight",
    "mxfp8": "one scale per 32 terms of a sum",
    "fp8_delayed": "one scale per tensor, from the largest values of the steps before",
    "nvfp4": "4 bits, one scale per 16 terms of a sum and one per tensor",
}

#: The recipe of 4 bits, and its parts. "nvfp4-sr" is it without stochastic rounding of gradients, "nvfp4-rht"
#: without the random Hadamard transform, "nvfp4-2d" without square blocks of weights.
NVFP4, _PARTS = "nvfp4", ("2d", "sr", "rht")

#: Attention's own products, of queries with keys and of probabilities with values.
SCORES, VALUES = "scores", "values"

#: The recipe that keeps state: scales and largest values, in variables of Flax Linen.
DELAYED = "fp8_delayed"

#: The name of a router, and of one of the wide products of a SwiGLU: only a router has few outputs. Models
#: with 256 experts are among the largest.
_GATE, _MOST_EXPERTS = re.compile(r"gate(_?\d+)?"), 256

#: What a name of a layer, or of one above it, ends in or is, and what it tells: where 8 bits cost the most
#: accuracy and save the least time.
_KEPT = (
    (re.compile(r"(.*_)?(heads?|logits?(_?dense|_?proj)?|classifier|score)(_?\d+)?"), "a head"),
    (re.compile(r"(.*_)?router(_?\d+)?"), "a router"),
    (_GATE, "a router"),
    (re.compile(r"(.*_)?(embed(der|dings?)?|patch(es)?|patch_proj\w*|stem)(_?\d+)?"), "a first layer"),
)
#: A name that ends in a word of the first pattern, and is none.
_NOT_KEPT = re.compile(r"(multi|single|num|n)_heads?", re.IGNORECASE)


def parts_of_nvfp4(recipe: str | None) -> frozenset[str] | None:
    """The parts of `NVFP4` that a recipe has, of "2d", "sr" and "rht"; None for another recipe."""
    name, *without = (recipe or "").split("-")
    if name != NVFP4 or not set(without) <= set(_PARTS):
        return None
    return frozenset(_PARTS) - frozenset(without)


def of_attention(recipe: str | None) -> tuple[str, ...]:
    """Those of attention's own products that a recipe is for: `SCORES`, `VALUES`."""
    words = without_target(recipe or "").split("+")
    return tuple(word for word in (SCORES, VALUES) if word in words)


def needs_key(recipe: str | None) -> bool:
    """Whether gradients are rounded at random by a recipe of both passes or one."""
    return "sr" in (parts_of_nvfp4(passes_of(without_target(recipe or "")).bwd) or ())


def _is_known(name: str) -> bool:
    return name in RECIPES or parts_of_nvfp4(name) is not None


def _shortest(name: str) -> str:
    parts = parts_of_nvfp4(name)
    return name if parts is None else "-".join([NVFP4, *(part for part in _PARTS if part not in parts)])


class Passes(NamedTuple):
    """Recipes of the products of the forward pass and of those of gradients; None for compute dtype."""

    fwd: str | None
    bwd: str | None


@functools.lru_cache(maxsize=256)
def passes_of(recipe: str) -> Passes:
    """Returns what a recipe means for the two passes: compute dtype in both for a text that is no recipe.

    Args:
      recipe: "fp8_current", "fwd:fp8_current", "bwd:fp8_current" or "fwd:fp8_rowwise+bwd:fp8_current";
        "+scores" and "+values" may follow, and the device on which it must gain: "fp8_current@H100".
    """
    words = [word for word in without_target(recipe).split("+") if word not in (SCORES, VALUES)]
    if len(words) == 1 and _is_known(words[0]):
        return Passes(words[0], words[0])
    parts = [part.partition(":") for part in words]
    given = {key: name for key, _, name in parts if key in Passes._fields and _is_known(name)}
    is_whole = len(given) == len(parts)
    return Passes(given.get("fwd"), given.get("bwd")) if is_whole else Passes(None, None)


def is_recipe(text: object) -> bool:
    """Returns whether a value is the text of a recipe."""
    return isinstance(text, str) and any(passes_of(text))


def checked_recipe(recipe: object, compute_dtype: np.dtype, policy: str) -> str:
    """Returns a recipe as it is written shortest.

    Args:
      recipe: what was given.
      compute_dtype: the policy's.
      policy: the rest of the policy, for the message.

    Raises:
      ValueError: for what is no recipe, and for a recipe that does not go with the compute dtype. The message
        lists the recipes, or says which compute dtypes one goes with.
    """
    if not isinstance(recipe, str) or not is_recipe(recipe):
        names = re.split(r"[:+]", recipe) if isinstance(recipe, str) else []
        known_words = (*Passes._fields, SCORES, VALUES)
        wrong = [name for name in names if not _is_known(name) and name not in known_words]
        hint = did_you_mean(wrong[0], RECIPES) if wrong else ""
        known = ", ".join(f"{name!r} ({why})" for name, why in RECIPES.items())
        raise ValueError(
            f"Unknown recipe {recipe!r} in policy {policy!r}.{hint} Known: {known}; for one pass alone "
            "'fwd:fp8_current' or 'bwd:fp8_current', for two 'fwd:fp8_rowwise+bwd:fp8_current'; nvfp4 "
            "without some of its parts as 'nvfp4-2d-sr-rht'; for attention's own products, too, as "
            "'fp8_current+scores+values'."
        )
    if compute_dtype.name not in ("bfloat16", "float16"):
        raise ValueError(
            f"The policy {policy!r} has recipe={recipe}: a recipe is for products in 16 bits, and "
            "what it leaves out stays in the compute dtype. Ask for compute=bfloat16 or float16, as "
            f"'mixed_bfloat16,recipe={recipe}' does."
        )
    passes = passes_of(recipe)
    if passes.fwd != passes.bwd and DELAYED in passes:
        raise ValueError(
            f"The policy {policy!r} has recipe={recipe}: {DELAYED} keeps one state for both passes, and "
            f"cannot be the recipe of one of them. Write recipe={DELAYED}."
        )
    names = {key: _shortest(name) for key, name in passes._asdict().items() if name}
    is_one = len(names) == 2 and names["fwd"] == names["bwd"]
    words = [names["fwd"]] if is_one else [f"{key}:{name}" for key, name in names.items()]
    return "+".join([*words, *of_attention(recipe)])


def check_has_no_state(recipe: str | None, what: str) -> None:
    """Raises ValueError for a recipe that keeps state, where there is no place for it.

    Args:
      recipe: as a policy has it.
      what: that cannot keep it, for the message: "autocast".
    """
    if DELAYED in passes_of(recipe or ""):
        raise ValueError(
            f"The recipe {DELAYED} keeps scales in variables of Flax Linen modules, which {what} has not. "
            "Ask for fp8_current, whose scales need no state, or wrap a Linen module."
        )


def last_blocks(paths: Iterable[Sequence[str]]) -> frozenset[str]:
    """Paths of the last 15 % of a model's numbered blocks, which recipes of 4 bits leave in compute dtype.

    Blocks are what the outermost number on a path counts ("layers_3", "blocks/3"), layers themselves aside.

    Args:
      paths: of the parameters of a model, names of layer and parameter last.
    """
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for path in paths:
        for depth, name in enumerate(path[:-2]):
            if match := _NUMBERED.fullmatch(name):
                blocks = found.setdefault((*path[:depth], match[1]), {})
                blocks[int(match[2])] = "/".join(path[: depth + 1])
                break
    return frozenset(
        blocks[number]
        for blocks in found.values()
        for number in sorted(blocks)[len(blocks) - round(_LAST * len(blocks)) :]
    )


#: A name with a number, and the share of blocks that stays in compute dtype, as of NVIDIA's models in NVFP4.
_NUMBERED, _LAST = re.compile(r"(.*?)_?(\d+)"), 0.15


def role_of(recipe: str | None, path: str, outputs: Any, last: frozenset[str]) -> str:
    """What a layer is by its names or by its place in a model, if its recipe leaves it out; else "".

    Args:
      recipe: of its policy.
      path, outputs: as for `role_by_name`.
      last: what `last_blocks` gives of the model.
    """
    is_last = any(path == block or path.startswith(f"{block}/") for block in last)
    is_kept = is_last and arithmetic_of(recipe) == "float4"
    return role_by_name(path, outputs) or ("one of the last blocks" if is_kept else "")


def arithmetic_of(recipe: str | None) -> str:
    """What operands become by a recipe: "float4" where those of a pass do, else "float8"."""
    few = any(parts_of_nvfp4(name) is not None for name in passes_of(recipe or ""))
    return "float4" if few else "float8"


def role_by_name(path: str, outputs: Any = None) -> str:
    """Returns what a layer is by the names on its path, if float8 recipes leave it out; else "".

    Args:
      path: "decoder/lm_head". Of its names each counts: what is inside of a head belongs to it.
      outputs: how many the layer has, or their shape; None where that is not known.
    """
    is_wide = isinstance(outputs, int | tuple | list) and np.prod(outputs) > _MOST_EXPERTS
    for name in filter(None, path.lower().split("/")):
        for pattern, role in _KEPT:
            if pattern is _GATE and is_wide:
                continue
            if pattern.fullmatch(name) and not _NOT_KEPT.fullmatch(name):
                return role
    return ""


def recipe_note(precision: Any, path: str, outputs: Any, last: frozenset[str]) -> str:
    """What to say of the recipe of a layer with products, "" without one.

    Args:
      precision: what the rules mean for it, a `ModulePrecision`.
      path, outputs, last: as for its `recipe_at`.
    """
    recipe = precision.policy.recipe
    role = role_of(recipe, path, outputs, last)
    left_out = f"not in {arithmetic_of(recipe)}: {role}" if role else ""
    return "" if recipe is None else precision.recipe_at(path, outputs, last) or left_out


#: A scope around a product that would lose by its recipe.
_STAYS = re.compile(r"stays\[([\dx]+)~([\w:+@-]+)\]")


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


def in_full(recipe: str) -> str:
    """Returns a recipe with its device: "fp8" alone is `fp8_current` where it gains on an H100."""
    return f"{_DEFAULT}@H100" if recipe == "fp8" else recipe


#: The recipe that "fp8" means.
_DEFAULT = "fp8_current"


def without_target(recipe: str) -> str:
    """Returns a recipe as it is where it is followed: "fp8_current" for "fp8_current@H100"."""
    return in_full(recipe).partition("@")[0]


def target_of(recipe: str) -> Target | None:
    """Returns the device on which a recipe must gain; None for one that is followed everywhere."""
    _, _, target = in_full(recipe).partition("@")
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
    return _STAYS.fullmatch(scope) is not None


def loses_by(scopes: Sequence[str]) -> tuple[str, tuple[int, ...]] | None:
    """Returns what `staying` says in the scopes around an operation; None where it says nothing."""
    for found in filter(None, map(_STAYS.fullmatch, scopes)):
        return found.group(2), tuple(map(int, found.group(1).split("x")))
    return None
