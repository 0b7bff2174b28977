"""Which policy governs a Linen module that is called, by the rules of the active scope."""

import dataclasses
from typing import Any

import flax.linen as nn

from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half
from jmp_policy._src.flax.linen import layers
from jmp_policy._src.flax.linen.places import Place, place_of
from jmp_policy._src.policy.module_precision import ModulePrecision, make_precision
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import (
    matches,
)
from jmp_policy._src.policy.scope import Scope


def module_precision(scope: Scope, module: nn.Module) -> ModulePrecision:
    """Returns what the rules of a scope mean for a module."""
    return governed_place(scope, module)[0]


def governed_place(scope: Scope, module: nn.Module) -> tuple[ModulePrecision, Place]:
    """Returns the precision of a module that is called in a scope, and where it is, with the rule for it."""
    rules, place = scope.rules, place_of(module, scope.place)
    policy, named, index = rules.default, False, None
    if rules.overrides:
        policy, named, index = _governing(scope, module, place)
    own = getattr(module, "dtype", None)
    keeps_own = rules.keep_module_dtypes and "dtype" not in original_fields(module)
    if keeps_own and own is not None and is_dtype_or_none(own):
        policy = policy.with_compute_dtype(own)
    island = (
        rules.float32_islands and not named and is_half(policy.compute_dtype) and layers.is_island(module)
    )
    precision = make_precision(rules, policy, island=island, named=named, index=index)
    return precision, dataclasses.replace(place, rule=index)


def _governing(scope: Scope, module: nn.Module, place: Place) -> tuple[Policy, bool, int | None]:
    """Returns the nearest match at or above a module: policy, whether it names the module, its index."""
    rules, path = scope.rules, scope.relative(place.path)
    matched = [i for i, (pattern, _) in enumerate(rules.overrides) if matches(pattern, path, module)]
    scope.seen.paths.add(path)
    scope.seen.matched.update(matched)
    if matched:
        return rules.overrides[matched[0]][1], rules.names(matched[0], module), matched[0]
    above = module
    while isinstance(above.parent, nn.Module) and above.parent.scope is not None:
        above = above.parent
        whole = (*place.start, *above.path)
        if whole[: len(scope.root_path)] != scope.root_path:
            break
        index = rules.match(scope.relative(whole), above)
        if index is not None:
            return rules.overrides[index][1], False, index
    # A module that is lifted, or run by `apply`, belongs to the one whose code does it.
    if scope.caller is not None and is_detached(scope, above, place):
        return scope.caller, False, scope.place.rule
    return rules.default, False, None


def is_detached(scope: Scope, module: nn.Module, place: Place) -> bool:
    """Returns whether a module has no parent because of how the running one calls it.

    That is by a lifted transform (nn.scan, nn.remat, nn.jit) or by `apply`.

    Args:
      scope: the active scope.
      module: a module that is called, or one above it.
      place: where the module that is called is.
    """
    whole = (*place.start, *module.path)
    return not isinstance(module.parent, nn.Module) and whole not in (scope.root_path, scope.cloned)


def original_fields(module: nn.Module) -> dict[str, Any]:
    """Returns the fields of a module that are overridden just now, as they were; empty if none are."""
    return module.__dict__.get(ORIGINAL, {})


ORIGINAL = "_jmp_policy_original"


def own_field(module: nn.Module, field: str) -> Any:
    """Returns a field as it would be without a policy."""
    if is_from_parent(module, field):
        return original_fields(module.parent)[field]  # type: ignore[arg-type]
    return original_fields(module).get(field, getattr(module, field))


def is_from_parent(module: nn.Module, field: str) -> bool:
    """Returns whether a field has the value that the module's parent has by its policy."""
    parent = module.parent
    if not isinstance(parent, nn.Module) or field not in original_fields(parent):
        return False
    return getattr(parent, field) == getattr(module, field) != original_fields(parent)[field]
