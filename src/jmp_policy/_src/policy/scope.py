"""Holds the ambient policy: which rules are active in this thread, and for which module code runs.

`jax.make_user_context` makes it part of the `jax.jit` cache key, so that a function traced outside a
policy is traced again inside it (the cache does not see Haiku's and Flax's interceptors).
"""

import dataclasses
import functools
from typing import Any

import jax

from jmp_policy._src.policy.patterns import path_text
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import PolicyMap


@dataclasses.dataclass(frozen=True)
class Seen:
    """What has run: paths of modules, indices of the rules that matched one of them, paths of the modules
    whose initial values may depend on half-precision ones, and the paths that modules left for another's.

    No modules: jit caches keep the scopes they were traced under, and a module would keep its parameters.
    """

    paths: set[str] = dataclasses.field(default_factory=set)
    matched: set[int] = dataclasses.field(default_factory=set)
    drawn_in_half: set[str] = dataclasses.field(default_factory=set)
    moved: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Scope:
    """Entry of the ambient state; equal scopes trace equal programs.

    Args:
      rules: the innermost active rules; `root_path`: path of the module below which they count paths.
      mark_only: whether modules mark their operations for `autocast` instead of casting.
      caller: the policy of the module whose code is running, None for code outside every module.
      location: where that module is (`flax.linen.governing.Location`); it stays when other rules come.
      cloned: path of the module that was cloned to be a function, and so has lost its parent.
      model: weak reference to what made the rules active: a wrapped module, its class, or an interceptor.
      half_modules: by path, the class of each module that has run in the outermost call, if it uses its
        parameters in half precision, else None; None as a whole outside of such a call.
      last: the last blocks of the outermost module (`recipes.last_blocks`), where a recipe asks for them.
      seen: what has run; shared by all scopes below one entry, to find rules that matched nothing.
      key: of rules, `mark_only` and caller: what scopes are compared by, hundreds of times in a trace.
    """

    rules: PolicyMap = dataclasses.field(compare=False)
    mark_only: bool = dataclasses.field(default=False, compare=False)
    caller: Policy | None = dataclasses.field(default=None, compare=False)
    root_path: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    location: Any = dataclasses.field(default=None, compare=False)
    cloned: Any = dataclasses.field(default=None, compare=False)
    model: Any = dataclasses.field(default=None, compare=False)
    half_modules: Any = dataclasses.field(default=None, compare=False)
    last: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    seen: Seen = dataclasses.field(default_factory=Seen, compare=False)
    key: object = None

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", _key(self.rules, self.mark_only, self.caller))

    def inside(self, policy: Policy, location: Any) -> "Scope":
        """The scope of the code of a module that is called in this one."""
        key = self.key if policy is self.caller else None
        return dataclasses.replace(self, caller=policy, location=location, key=key)

    def relative(self, path: tuple[str, ...]) -> str:
        """A module's path, counted from the root of the rules."""
        inside = path[: len(self.root_path)] == self.root_path
        return path_text(path[len(self.root_path) :] if inside else path)


@functools.lru_cache(maxsize=4096)
def _key(rules: PolicyMap, mark_only: bool, caller: Policy | None) -> object:
    return object()


#: The active scope of this thread, or None: `ACTIVE.value`, `with ACTIVE(scope): ...`.
ACTIVE = jax.make_user_context(default_value=None)
#: The rules that a report tries in place of those that modules were wrapped with, or a `trials.Met`; or None.
TRIAL = jax.make_user_context(default_value=None)
#: Whether a report traces NNX models. Made at import: after a new context JAX traces all functions again.
OF_REPORT = jax.make_user_context(default_value=False)


def in_trial(rules: PolicyMap) -> PolicyMap:
    """The rules to follow where a module or a block has these: those that are tried, if any are."""
    trial = TRIAL.value
    if trial is not None and not isinstance(trial, PolicyMap):
        trial.rules[rules] = None
    return trial if isinstance(trial, PolicyMap) else rules
