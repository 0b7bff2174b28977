"""Which of several rules governs a Linen module: the nearest match at or above it."""

import flax.linen as nn

from jmp_policy._src.core.dtypes import is_dtype_or_none
from jmp_policy._src.core.types import Path
from jmp_policy._src.flax.linen.layers import ISLANDS, original_fields
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import matches, singles_out
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.scope import Scope


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
    # A module that is lifted, or run by `apply`, belongs to the one whose code does it.
    if scope.caller is not None and _is_detached(scope, above, start):
        return scope.caller, False, scope.location.rule
    return rules.default, False, None


def _is_detached(scope: Scope, module: nn.Module, start: Path) -> bool:
    """Whether a module has no parent because of how the running one calls it.

    That is by a lifted transform (nn.scan, nn.remat, nn.jit) or by `apply`.
    """
    whole = (*start, *module.path)
    return not isinstance(module.parent, nn.Module) and whole not in (scope.root_path, scope.cloned)
