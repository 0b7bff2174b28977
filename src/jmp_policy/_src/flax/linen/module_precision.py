"""Which policy governs a Linen module that is called, by the rules of the active scope."""

import dataclasses
from typing import Any

import flax.linen as nn

from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half
from jmp_policy._src.flax.linen import layers
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import (
    matches,
)
from jmp_policy._src.policy.scope import Scope


def module_precision(scope: Scope, module: nn.Module) -> ModulePrecision:
    """Returns what the rules of a scope mean for a module."""
    rules = scope.rules
    policy, named, _ = _governing(scope, module) if rules.overrides else (rules.default, False, None)
    own = getattr(module, "dtype", None)
    keeps_own = rules.keep_module_dtypes and own is not None and "dtype" not in original_fields(module)
    if keeps_own and is_dtype_or_none(own):
        policy = dataclasses.replace(policy, compute_dtype=own)
    island = (
        rules.float32_islands and not named and is_half(policy.compute_dtype) and layers.is_island(module)
    )
    return ModulePrecision(policy, island, rules.keep_small_inputs)


def governing_rule(scope: Scope, module: nn.Module) -> tuple[ModulePrecision, int | None]:
    """Returns the precision of a module that is called in a scope, and the index of the rule for it."""
    return module_precision(scope, module), _governing(scope, module)[2]


def _governing(scope: Scope, module: nn.Module) -> tuple[Policy, bool, int | None]:
    """Returns the nearest match at or above a module: policy, whether it names the module, its index."""
    rules, path = scope.rules, scope.relative(module.path)
    matched = [i for i, (pattern, _) in enumerate(rules.overrides) if matches(pattern, path, module)]
    scope.seen.paths.add(path)
    scope.seen.matched.update(matched)
    if matched:
        return rules.overrides[matched[0]][1], rules.names(matched[0], module), matched[0]
    above = module
    while isinstance(above.parent, nn.Module) and above.parent.scope is not None:
        above = above.parent
        if above.path[: len(scope.root_path)] != scope.root_path:
            break
        index = rules.match(scope.relative(above.path), above)
        if index is not None:
            return rules.overrides[index][1], False, index
    # A module that a lifted transform runs has no parent; it belongs to the one whose code lifted it.
    lifted = is_lifted(scope, above) and scope.caller is not None
    return (scope.caller if lifted else rules.default), False, None  # type: ignore[return-value]


def is_lifted(scope: Scope, module: nn.Module) -> bool:
    """Returns whether a transform (nn.scan, nn.remat, nn.jit) runs the module: it has no parent then."""
    return not isinstance(module.parent, nn.Module) and module.path not in (scope.root_path, scope.cloned)


def identity(module: nn.Module) -> Any:
    """Returns what is equal for a module and the clones of it that lifted transforms make."""
    return (module.path, type(module))


def original_fields(module: nn.Module) -> dict[str, Any]:
    """Returns the fields of a module that are overridden just now, as they were; empty if none are."""
    return module.__dict__.get(ORIGINAL, {})


ORIGINAL = "_jmp_policy_original"


def is_from_parent(module: nn.Module, field: str) -> bool:
    """Returns whether a field has the value that the module's parent has by its policy."""
    parent = module.parent
    if not isinstance(parent, nn.Module) or field not in original_fields(parent):
        return False
    return getattr(parent, field) == getattr(module, field) != original_fields(parent)[field]
