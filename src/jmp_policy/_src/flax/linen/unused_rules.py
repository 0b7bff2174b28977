"""Finds rules that match no module of a Linen model, once its modules have run."""

from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.policy.patterns import matches, unused_error
from jmp_policy._src.policy.rules import PolicyMap, path_text
from jmp_policy._src.policy.scope import Scope


def check_used(module: nn.Module, rules: PolicyMap, scope: Scope, check_all: bool, variables: Any) -> None:
    """Raises for rules that match neither a module that was called nor a path among the variables.

    A call of part of the model (`method=`) cannot tell whether a class or predicate matches elsewhere.
    """
    paths, moved = _variable_paths(variables), scope.seen.moved
    for pattern, path in ((p, path) for p, _ in rules.overrides for path in moved if isinstance(p, str)):
        lasting = (scope.seen.paths | paths) - moved.keys()
        if matches(pattern, path, None) and not any(matches(pattern, p, None) for p in lasting):
            raise ValueError(
                f"The rule for {pattern!r} of {type(module).__name__} does nothing: the module at {path!r} "
                f"shares the scope of {moved[path]!r} (nn.share_scope), and has its path. Write the rule for "
                f"{moved[path]!r}."
            )
    unused = [
        pattern
        for index, (pattern, _) in enumerate(rules.overrides)
        if index not in scope.seen.matched
        and not any(isinstance(pattern, str) and matches(pattern, path, None) for path in paths)
        and (check_all or isinstance(pattern, str))
    ]
    if unused and (check_all or variables is not None):
        raise unused_error(unused, type(module).__name__, (scope.seen.paths | paths) - moved.keys())


def _variable_paths(variables: Any) -> set[str]:
    """The module paths that a variable collection tells of."""
    paths = set()
    for key_path, _ in jax.tree_util.tree_leaves_with_path(variables):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in key_path][1:-1]
        paths |= {path_text(names[:depth]) for depth in range(1, len(names) + 1)}
    return paths
