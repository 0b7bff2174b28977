"""Linen's answers to what the rooms below Flax ask of a module framework."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jmp_policy._src.flax.linen import intercept, taps, wrapped
from jmp_policy._src.policy.frameworks import Framework
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.policy.scope import Scope, Seen


class LinenFramework(Framework):
    """`flax.linen`."""

    def wrap(self, module: Any, policy: Any, **keywords: Any) -> Any:
        """The module under a policy."""
        return wrapped.wrap(module, policy, **keywords)

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside an NNX model; its rules are asked when it is called."""
        return wrapped.wrap_part(module, rules), ()

    @contextlib.contextmanager
    def marking(self, rules: Any) -> Iterator[Any]:
        """Lets each module mark its operations with its policy, for `autocast`; casts nothing."""
        with intercept.pushed(Scope(rules, mark_only=True, seen=_seen_under(rules))) as scope:
            yield scope.seen

    def policy_of(self, module: Any) -> PolicyMap | None:
        """The rules of a wrapped module."""
        return wrapped.policy_of(module)

    def governing(self, rules: Any) -> contextlib.AbstractContextManager[Any]:
        """Runs the modules that are called under a policy."""
        return intercept.intercept(rules)

    def tapped(self) -> contextlib.AbstractContextManager[Any]:
        """Hands the result of every public method to the active taps."""
        return taps.tapped()


@functools.cache
def _seen_under(_: PolicyMap) -> Seen:
    """What equal rules have met so far: a function that they once traced calls no module again."""
    return Seen(set(), set())
