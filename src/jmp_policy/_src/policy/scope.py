"""Holds the ambient policy: which rules are active in this thread, and for which module code runs.

`jax.make_user_context` makes it part of the `jax.jit` cache key, so that a function traced outside a
policy is traced again inside it (the cache does not see Haiku's and Flax's interceptors).
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import PolicyMap, path_text


@dataclasses.dataclass(frozen=True)
class Seen:
    """Paths of the modules that ran, indices of the rules that matched one of them, and paths of the modules
    whose initial values may depend on half-precision ones.

    It holds paths and no modules: jit caches keep the scopes they were traced under, and a module would keep
    its parameters alive.
    """

    paths: set[str]
    matched: set[int]
    drawn_in_half: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class Scope:
    """Entry of the ambient state; equal scopes trace equal programs.

    Args:
      rules: the innermost active rules.
      mark_only: whether modules mark their operations for `autocast` instead of casting.
      caller: the policy of the module whose code is running, None for code outside every module.
      root_path: path of the module below which `rules` counts paths.
      place: where the module is whose code is running, as its framework has it (`flax.linen.places`); it
        stays when other rules become active.
      cloned: path of the module that was cloned to be a function, and so has lost its parent.
      model: weak reference to what made the rules active: a wrapped module, its class, or an interceptor.
      half_modules: for each module that has run since the outermost one was called, by its path, its class if
        it uses its parameters in half precision, else None; None as a whole outside of such a call.
      seen: modules that the rules were resolved for and rules that matched; shared by all scopes below one
        entry, to find rules that matched nothing.
    """

    rules: PolicyMap
    mark_only: bool = False
    caller: Policy | None = None
    root_path: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    place: Any = dataclasses.field(default=None, compare=False)
    cloned: Any = dataclasses.field(default=None, compare=False)
    model: Any = dataclasses.field(default=None, compare=False)
    half_modules: Any = dataclasses.field(default=None, compare=False)
    seen: "Seen" = dataclasses.field(default_factory=lambda: Seen(set(), set()), compare=False)

    def relative(self, path: tuple[str, ...]) -> str:
        """Returns a module's path, counted from the root of the rules."""
        inside = path[: len(self.root_path)] == self.root_path
        return path_text(path[len(self.root_path) :] if inside else path)


_CONTEXT = jax.make_user_context(default_value=None)


def current() -> Scope | None:
    """Returns the active scope of this thread, or None."""
    return _CONTEXT.value


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[Scope]:
    """Makes `scope` the active one for the length of a with-block."""
    with _CONTEXT(scope):
        yield scope
