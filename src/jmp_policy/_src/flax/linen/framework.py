"""Linen's answers to what the rooms below Flax ask of a module framework."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jmp_policy._src.flax.linen import intercept, taps, wrap
from jmp_policy._src.policy.frameworks import Framework
from jmp_policy._src.policy.rules import PolicyMap


class LinenFramework(Framework):
    """`flax.linen`."""

    def wrap(self, module: Any, policy: Any, **keywords: Any) -> Any:
        """Returns the module under a policy."""
        return wrap.wrap(module, policy, **keywords)

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside an NNX model; its rules are asked when it is called."""
        return wrap.wrap_part(module, rules), ()

    @contextlib.contextmanager
    def marking(self, rules: Any) -> Iterator[Any]:
        """Lets each module that is called mark its operations."""
        with intercept.marking(rules) as scope:
            yield scope.seen

    def policy_of(self, module: Any) -> PolicyMap | None:
        """Returns the rules of a wrapped module."""
        return wrap.policy_of(module)

    def governing(self, rules: Any) -> contextlib.AbstractContextManager[Any]:
        """Runs the modules that are called under a policy."""
        return intercept.intercept(rules)

    def tapped(self) -> contextlib.AbstractContextManager[Any]:
        """Hands the result of every public method to the active taps."""
        return taps.tapped()
