"""Chooses the modules that must compute in float32, and writes them as rules."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.report_base import count_text, percent
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.sensitivity.half_program import is_below
from jmp_policy._src.report.sensitivity.probes import Effect, Effects
from jmp_policy._src.report.sensitivity.recommendation import RecommendationRow


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
        """Returns the relative error of the gradient that is left."""
        return math.sqrt(sum(self.found.own[path].gradient for path in self.half))

    @property
    def half(self) -> list[str]:
        """Returns the paths of the modules that stay in half."""
        return [path for path in self.found.own if path not in self.reasons]

    def next(self) -> str | None:
        """Returns the module in half that brings most of the error that is left; None if there is none."""
        left = {path: self.found.own[path].gradient for path in self.half}
        return max(left, key=left.__getitem__) if left else None


def overflowing(found: Effects) -> Choice:
    """Returns the modules in which something overflows, or whose inputs do."""
    reasons = {}
    for path, own in found.own.items():
        enters = found.alone[path].overflow
        if own.overflow or own.gradient_overflow or enters:
            what = (own.overflow and "values") or (enters and "inputs") or "cotangents"
            count = own.overflow or enters or own.gradient_overflow
            reasons[path] = f"{count_text(count)} {what} exceed the range of {found.dtype}"
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
    share = percent(effect.gradient / total) if total else "0"
    zeros = f"; {count_text(effect.underflow)} values become zero" if effect.underflow else ""
    reason = f"brings {share} of the square of the gradient's error{zeros}"
    return choice._replace(reasons={**choice.reasons, path: reason})


def rules_of(choice: Choice) -> PolicyMap:
    """Returns a choice as rules: the fewest that put these modules into float32 and no others."""
    half, wide = f"mixed_{choice.found.dtype}", set(choice.reasons)
    exact, globs = [], []
    for path in sorted(wide):
        if any(_covers(above, wide, choice.found) for above in _above(path)):
            continue
        exact.append((path, "float32"))
        if not _covers(path, wide, choice.found):
            globs.append((f"{path}/*" if path else "*", half))
    if ("", "float32") in exact:
        exact.remove(("", "float32"))
        return PolicyMap("float32", [*exact, *globs])
    return PolicyMap(half, [*exact, *globs])


def rows_of(choice: Choice, rules: PolicyMap) -> list[RecommendationRow]:
    """Returns the default and every rule, with the reason."""
    own, rows = choice.found.own, []
    left = choice.half
    why = "" if is_half(rules.default.compute_dtype) else choice.reasons[""]
    rows.append(
        _row("", rules.default, why or f"{len(left)} of {len(own)} modules fit the budget", own, left)
    )
    for pattern, policy in rules.overrides:
        path = str(pattern).removesuffix("*").removesuffix("/")
        if str(pattern).endswith("*"):
            below = [p for p in left if is_below(p, path)]
            rows.append(_row(pattern, policy, "what is inside fits the budget", own, below))
            continue
        inside = [p for p in choice.reasons if is_below(p, path)]
        worst = max(inside, key=lambda p: (own[p].error, p == path))
        where = "" if worst == path else f" (in {worst})"
        rows.append(_row(pattern, policy, choice.reasons[worst] + where, own, inside))
    return rows


def _row(pattern: Any, policy: Any, reason: str, own: dict[str, Effect], paths: Iterable[str]) -> Any:
    error = sum((own[path] for path in paths), Effect()).error
    return RecommendationRow(str(pattern), str(policy), reason, error)


def _above(path: str) -> Sequence[str]:
    names = path.split("/")
    return ["/".join(names[:end]) for end in range(len(names))] if path else []


def _covers(path: str, wide: set[str], found: Effects) -> bool:
    """Returns whether a module and all below it that round anything are in float32."""
    return path in wide and all(p in wide for p in found.own if is_below(p, path))
