"""Which rule governs a Linen module; and, once the modules of a model have run, which rules match none."""

from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.dtypes import is_dtype_or_none
from jmp_policy._src.core.types import Path
from jmp_policy._src.flax.linen.layers import ISLANDS, original_fields
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import matches, path_text, singles_out, unused_error
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import PolicyMap
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


def precision_by_rules(
    scope: Scope, module: nn.Module, path: Path, start: Path
) -> tuple[ModulePrecision, int | None]:
    """What the rules of a scope mean for a module, and the index of the one that governs it.

    Args:
      scope: the active scope.
      module: the module.
      path: where it is.
      start: path of the module whose `apply` runs, from which Flax counts paths.
    """
    rules = scope.rules
    policy, named, index = rules.default, False, None
    if rules.overrides:
        policy, named, index = _governing_rule(scope, module, path, start)
    own = getattr(module, "dtype", None)
    keeps_own = rules.keep_module_dtypes and "dtype" not in original_fields(module)
    if keeps_own and own is not None and is_dtype_or_none(own):
        policy = policy.with_compute_dtype(own)
    return rules.precision(policy, isinstance(module, ISLANDS), index, named), index


def _governing_rule(
    scope: Scope, module: nn.Module, path: Path, start: Path
) -> tuple[Policy, bool, int | None]:
    """The nearest match at or above a module: policy, whether it names the module, its index."""
    rules, text = scope.rules, scope.relative(path)
    matched = [i for i, (pattern, _) in enumerate(rules.overrides) if matches(pattern, text, module)]
    scope.seen.paths.add(text)
    scope.seen.matched.update(matched)
    if matched:
        pattern, policy = rules.overrides[matched[0]]
        return policy, singles_out(pattern), matched[0]
    above = module
    while isinstance(above.parent, nn.Module) and above.parent.scope is not None:
        above = above.parent
        whole = (*start, *above.path)
        if whole[: len(scope.root_path)] != scope.root_path:
            break
        index = rules.match(scope.relative(whole), above)
        if index is not None:
            return rules.overrides[index][1], False, index
    if scope.caller is None:
        return rules.default, False, None
    # A module that is lifted, or run by `apply`, belongs to the one whose code does it. So does one that was
    # passed to a module with a rule, as the layers of an `nn.Sequential` are; not one above that.
    running = scope.location
    is_above = len(path) < len(running.path) and running.path[: len(path)] == path
    is_passed = running.rule is not None and not is_above
    if is_passed or _is_detached(scope, above, start):
        return scope.caller, False, running.rule
    return rules.default, False, None


def _is_detached(scope: Scope, module: nn.Module, start: Path) -> bool:
    """Whether a module has no parent because of how the running one calls it.

    That is by a lifted transform (nn.scan, nn.remat, nn.jit) or by `apply`.
    """
    whole = (*start, *module.path)
    return not isinstance(module.parent, nn.Module) and whole not in (scope.root_path, scope.cloned)


def outermost(module: nn.Module) -> nn.Module:
    """The module above a bound one that has no bound one above itself."""
    while isinstance(module.parent, nn.Module) and module.parent.scope is not None:
        module = module.parent
    return module


def is_lifted_in_run(top: nn.Module, running: Any) -> bool:
    """Whether a transform made a module's root scope, and not a call of `apply`.

    A transform keeps paths. Where the path is empty, it can only be the root module that is running, whose
    name and class the copy has, or a base class: `nn.remat(Net)` runs a Net.
    """
    if top.path:
        return True
    related = issubclass(running.cls, type(top)) or issubclass(type(top), running.cls)
    return running.path == running.start and running.name == top.name and related
