"""Chooses the modules that compute in float32 or follow a float8 recipe, and writes them as rules.

Which products a recipe may have is known when it is traced: the policy with the recipe everywhere is asked.
If its gradient is off by more than the budget, one gradient per module with such products is computed, with
the recipe in that module alone. Errors of modules are taken to be independent, so that their squares
add up::

    error**2 = (without the recipe)**2 + sum of (what a module adds)**2

Modules that add most for the FLOPs that they would save go back to half first.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.report_base import count_text, percent
from jmp_policy._src.policy.patterns import Pattern, path_text, show_pattern
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import DELAYED, passes_of, target_of, without_target, worthwhile
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.sensitivity.rounding_errors import Effect, Effects
from jmp_policy._src.report.sensitivity.traced_loss import Loss, is_below, module_of


@dataclasses.dataclass(frozen=True)
class RecommendationRow:
    """One rule of a recommended policy.

    Args:
      pattern: path or glob; "" for the default.
      policy: text of the policy.
      reason: why.
      predicted: relative error of the gradient that the modules it is about would bring in half; infinite
        where a value overflows, 0 where it is not known, and of the default what was measured where modules
        were not looked at one by one.
    """

    pattern: str
    policy: str
    reason: str
    predicted: float


class Choice(NamedTuple):
    """Modules in float32.

    Args:
      found: what rounding does.
      reasons: why, by path of the module, whose own operations are meant.
    """

    found: Effects
    reasons: dict[str, str]

    @property
    def predicted(self) -> float:
        """The relative error of the gradient that is left."""
        return math.sqrt(sum(self.found.own[path].gradient for path in self.half))

    @property
    def half(self) -> list[str]:
        """The paths of the modules that stay in half."""
        return [path for path in self.found.own if path not in self.reasons]

    def next(self) -> str | None:
        """The module in half that brings most of the error that is left; None if there is none."""
        return max(self.half, key=lambda path: self.found.own[path].gradient, default=None)


def without_half(found: Effects, paths: Collection[str]) -> Choice:
    """The modules that cannot compute in half."""
    reason = "JAX has no Fourier transforms and no linear algebra of half arrays"
    return Choice(found, dict.fromkeys(paths, reason))


def needing_float32(found: Effects, not_half: Collection[str]) -> Choice:
    """The modules in which something overflows, or whose inputs do, and those that cannot compute in half."""
    reasons = without_half(found, not_half).reasons
    for path, own in found.own.items():
        enters = found.alone[path].overflow
        if own.overflow or own.gradient_overflow or enters:
            what = (own.overflow and "values") or (enters and "inputs") or "cotangents"
            count = own.overflow or enters or own.gradient_overflow
            reasons.setdefault(path, f"{count_text(count)} {what} exceed the range of {found.dtype}")
    return Choice(found, reasons)


def within(
    choice: Choice, budget: float, error: Callable[[Choice], float] = lambda choice: choice.predicted
) -> Choice:
    """Adds the modules that bring most of the error, until what is left is within a budget."""
    while error(choice) > budget and (path := choice.next()) is not None:
        choice = widened(choice, path)
    return choice


def widened(choice: Choice, path: str) -> Choice:
    """Adds one module, with the reason."""
    effect, total = choice.found.own[path], sum(e.gradient for e in choice.found.own.values())
    share = percent(effect.gradient / total) if 0 < total < math.inf else "0"
    zeros = f"; {count_text(effect.underflow)} values become zero" if effect.underflow else ""
    reason = f"brings {share} of the square of the gradient's error{zeros}"
    if math.isinf(effect.gradient):
        reason = f"makes the gradient not finite{zeros}"
    return choice._replace(reasons={**choice.reasons, path: reason})


def rules_of(choice: Choice) -> PolicyMap:
    """A choice as rules: the fewest that put these modules into float32 and no others."""
    half, wide = f"mixed_{choice.found.dtype}", set(choice.reasons)
    if wide and not choice.half:
        return PolicyMap("float32")
    tops = _tops(wide, choice.found.own)
    # What is below one of them and may be in half.
    mixed = [top for top in tops if any(is_below(path, top) for path in choice.half)]
    globs = [(f"{top}/*" if top else "*", half) for top in mixed]
    default = "float32" if "" in tops else half
    return PolicyMap(default, [*((top, "float32") for top in tops if top), *globs])


def rows_of(choice: Choice, rules: PolicyMap) -> list[RecommendationRow]:
    """The default and every rule, with the reason."""
    own = choice.found.own
    modules = {path_text(names[1:]): module for names, module in choice.found.modules.items()}

    def row(pattern: str, policy: Policy, index: int | None) -> RecommendationRow:
        paths = [path for path in own if rules.governing(path, modules.get(path)) == index]
        sums = " with weight gradients in float32" * (policy.grad_dtype is not None)
        reason = f"{len(paths)} of {len(own)} modules fit the budget{sums}"
        if not is_half(policy.compute_dtype):
            # What is said of the worst of them.
            wide = [path for path in paths if path in choice.reasons] or list(choice.reasons)
            worst = max(wide, key=lambda path: (own[path].error, path == pattern))
            reason = choice.reasons[worst] + ("" if worst == pattern else f" (in {worst or 'the model'})")
        error = sum((own[path] for path in paths), Effect()).error
        return RecommendationRow(pattern, str(policy), reason, error)

    named = [row(_text(pattern), policy, i) for i, (pattern, policy) in enumerate(rules.overrides)]
    return [row("", rules.default, None), *named]


def _text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else show_pattern(pattern)


class Float8(NamedTuple):
    """Modules in float8.

    Args:
      base: the rules without the recipe.
      recipe: the recipe.
      flops: those of the products that the recipe may have, by path of the module.
      added: square of the error of the gradient that each module adds; nan where nobody had to know.
      chosen: the modules that follow the recipe.
    """

    base: PolicyMap
    recipe: str
    flops: Mapping[str, int]
    added: Mapping[str, float]
    chosen: frozenset[str]

    @property
    def total(self) -> float:
        """What the chosen modules add to the square of the error."""
        return sum(self.added[path] for path in self.chosen)

    def rules(self) -> PolicyMap:
        """The choice as rules: the recipe in the default, or in rules, whichever are fewer."""
        if not self.chosen:
            return self.base
        known = [str(pattern) for pattern, _ in self.base.overrides]
        staying = _tops(set(self.flops) - self.chosen, self.flops, known)
        named = _tops(self.chosen, self.flops, known)
        # No rule names the whole model.
        if "" in staying or ("" not in named and len(named) < len(staying)):
            rules = [(path, self._with_recipe(self.base.resolve(path))) for path in named]
            return dataclasses.replace(self.base, overrides=[*rules, *self.base.overrides])
        overrides = [(pattern, self._with_recipe(policy)) for pattern, policy in self.base.overrides]
        rules = [(path, self.base.resolve(path)) for path in staying]
        default = self._with_recipe(self.base.default)
        return dataclasses.replace(self.base, default=default, overrides=[*rules, *overrides])

    def rows(self, known: Iterable[RecommendationRow]) -> list[RecommendationRow]:
        """The default and every rule, with the reason.

        Args:
          known: those of the rules without the recipe.
        """
        rules, before = self.rules(), {row.pattern: row for row in known}
        count = f"no product suits {self.recipe}"
        if self.flops:
            count = f"{len(self.chosen)} of {len(self.flops)} modules with products for {self.recipe} have it"
        default = before[""]
        rows = [dataclasses.replace(default, policy=str(rules.default), reason=f"{default.reason}; {count}")]
        for pattern, policy in rules.overrides:
            text = _text(pattern)
            if text in before:
                rows.append(dataclasses.replace(before[text], policy=str(policy)))
                continue
            inside = [path for path in self.flops if is_below(path, text)]
            added = sum(self.added[path] for path in inside)
            share = percent(added / sum(self.added.values()))
            reason = f"in float8 it brings {share} of the square of the error that the recipe adds"
            if policy.recipe is not None:
                reason = "in float8 it fits the budget"
            rows.append(RecommendationRow(text, str(policy), reason, math.sqrt(added)))
        return rows

    def _with_recipe(self, policy: Policy) -> Policy:
        is_able = is_half(policy.compute_dtype)
        return dataclasses.replace(policy, recipe=self.recipe) if is_able else policy


def usable_recipe(recipe: str, target: str | None) -> str:
    """The recipe to follow: with a card, only where it gains there.

    Raises:
      ValueError: for an unknown recipe, one that keeps state, and for a card without float8 arithmetic.
    """
    Policy("mixed_bfloat16", recipe=recipe)  # Checks the text.
    if DELAYED in passes_of(without_target(recipe)):
        raise ValueError(
            f"recommend measures one step, and the scales of {DELAYED} come from the steps before. Ask for "
            "recipe='fp8_current', which rounds the same way once there is a history, and write "
            f"{DELAYED} in its place."
        )
    return recipe if target is None or target_of(recipe) is not None else worthwhile(recipe, target)


def in_float8(
    loss: Loss,
    base: PolicyMap,
    recipe: str,
    before: float,
    budget: float,
    error: Callable[[PolicyMap], float],
) -> tuple[Float8, float]:
    """Chooses the modules that follow a recipe.

    Args:
      loss: the loss.
      base: the rules without it.
      recipe: the recipe.
      before: error of the gradient under `base`.
      budget: that is allowed.
      error: measures it under rules.

    Returns:
      The choice, and its error as measured.
    """
    nothing = Float8(base, recipe, {"": 1}, {}, frozenset([""]))
    flops = _flops(loss, nothing.rules())
    if not flops or before > budget:
        return nothing._replace(flops=flops, chosen=frozenset()), before
    choice = nothing._replace(flops=flops, chosen=frozenset(flops))
    measured = error(choice.rules())
    if measured <= budget:
        return choice._replace(added=dict.fromkeys(flops, math.nan)), measured
    alone = {path: error(choice._replace(chosen=frozenset([path])).rules()) for path in flops}
    # What rounding cancels by chance counts as nothing, and what is infinite as more than all others.
    added = {path: min(max(found**2 - before**2, 0.0), 1e30) for path, found in alone.items()}
    choice = choice._replace(added=added)
    ranked = sorted(flops, key=lambda path: added[path] / flops[path])
    for count in range(len(ranked) - 1, 0, -1):
        choice = choice._replace(chosen=frozenset(ranked[:count]))
        if choice.total <= budget**2 - before**2 and (measured := error(choice.rules())) <= budget:
            return choice, measured
    return choice._replace(chosen=frozenset()), before


def _flops(loss: Loss, rules: PolicyMap) -> dict[str, int]:
    """The FLOPs in float8 by module, of the loss and its gradient."""
    path_of, found = module_of(loss.modules), Counter[str]()
    for product in loss.under(rules).products:
        if product.scales:
            found[path_of(tuple(product.path.split("/"))) or ""] += product.flops
    return dict(found)


def _tops(paths: Collection[str], all_paths: Iterable[str], rules: Sequence[str] = ()) -> list[str]:
    """The fewest paths that have these below them and no others, and no path of `rules`."""

    def is_whole(top: str) -> bool:
        has_rules = any(is_below(path, top) for path in rules)
        return not has_rules and all(path in paths for path in all_paths if is_below(path, top))

    found = set()
    for path in paths:
        names = path.split("/")
        above = ("/".join(names[:end]) for end in range(1, len(names)))
        found.add(next(filter(is_whole, above), path))
    return sorted(found)
