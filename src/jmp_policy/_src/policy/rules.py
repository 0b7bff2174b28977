"""Decides which policy governs which module: an ordered map from patterns to policies."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from jmp_policy._src.core.dtype_words import check_has_range
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.settings import flag
from jmp_policy._src.policy.half_errors import check_grad_dtype
from jmp_policy._src.policy.module_precision import ModulePrecision, policy_changes
from jmp_policy._src.policy.named import PolicyLike, get_policy, wants_fp32_weight_grads
from jmp_policy._src.policy.patterns import (
    Pattern,
    WrittenRules,
    checked_pairs,
    matches,
    path_inside,
    patterns_below,
)
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import arithmetic_of


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PolicyMap(WrittenRules):
    """Default policy of a model, and overrides for the modules that match a pattern.

    A rule governs the module it matches and everything below it, unless something below is matched
    itself. Among rules that match the same module the first listed wins.

    Args:
      default: policy (or its text) of every module that no rule governs.
      overrides: mapping, or sequence of pairs, from pattern to policy. A pattern is a path glob whose
        `*` stays within one name and whose `**` spans any number of them
        (`"decoder/layer_*/attention"`, `"**/head"`), a module class (matched with `isinstance`), or a
        predicate `(path, module) -> bool` with the path as text.
      keep_module_dtypes: let the `dtype=` field of a module win over the policy. Off by default: published
        Flax models pass `dtype=jnp.float32` to every layer, and a policy that yielded would do nothing.
      float32_islands: compute normalisation layers and the softmax of attention in float32 wherever a
        policy computes in 16 bits or fewer. A rule that matches a normalisation layer by its class or
        by its name overrides this for that layer.
      keep_small_inputs: where a policy computes in 16 bits or fewer, leave in float32 what costs nothing:
        scalars, vectors next to larger inputs, few features, and layers whose product sums fewer than 8
        terms. A high frequency of a time or a noise level is wrong in half precision.

    Raises:
      TypeError, ValueError: for something that is not a pattern or not a policy.

    Example:
      >>> rules = PolicyMap("mixed_float16", {"decoder/head": "float32"})
      >>> str(rules.resolve("decoder/head/Dense_0").compute_dtype)
      'float32'
      >>> str(rules.resolve("encoder").compute_dtype)
      'float16'
    """

    default: Policy
    overrides: tuple[tuple[Pattern, Policy], ...]
    keep_module_dtypes: bool
    float32_islands: bool
    keep_small_inputs: bool

    def __init__(
        self,
        default: PolicyLike,
        overrides: Mapping[Pattern, PolicyLike] | Sequence[tuple[Pattern, PolicyLike]] = (),
        *,
        keep_module_dtypes: bool = False,
        float32_islands: bool = True,
        keep_small_inputs: bool = True,
    ):
        pairs = () if overrides == () else checked_pairs(overrides)
        checked = tuple([(pattern, get_policy(policy)) for pattern, policy in pairs])
        vars(self).update(
            default=get_policy(default),
            overrides=checked,
            keep_module_dtypes=flag(keep_module_dtypes, "keep_module_dtypes"),
            float32_islands=flag(float32_islands, "float32_islands"),
            keep_small_inputs=flag(keep_small_inputs, "keep_small_inputs"),
        )

    _flags = __init__.__kwdefaults__

    @functools.cached_property
    def _hash(self) -> int:
        # Kept: the map is part of every jit cache key that is looked up while it is active.
        return hash(tuple(self.__getstate__().values()))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of classes and strings differ between processes.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def match(self, path: str | Sequence[Any], module: Any = None) -> int | None:
        """The index of the first rule whose pattern matches this very module, or None."""
        text = path_text(path)
        for index, (pattern, _) in enumerate(self.overrides):
            if matches(pattern, text, module):
                return index
        return None

    def resolve(
        self,
        path: str | Sequence[Any],
        module: Any = None,
        ancestors: Iterable[tuple[str | Sequence[Any], Any]] | None = None,
    ) -> Policy:
        """The policy that governs a module.

        Args:
          path: where the module is: `"decoder/layer_0"`, or its names in sequence.
          module: the module itself, for patterns that are classes or predicates.
          ancestors: `(path, module)` of the modules above, nearest first. Left out, only the paths of the
            ancestors are known, so that only path patterns can match them.
        """
        if ancestors is None:
            names = [name for name in path_text(path).split("/") if name]
            ancestors = [("/".join(names[:depth]), None) for depth in range(len(names) - 1, -1, -1)]
        for candidate_path, candidate in ((path, module), *ancestors):
            index = self.match(candidate_path, candidate)
            if index is not None:
                return self.overrides[index][1]
        return self.default

    def precision(
        self, policy: Policy, is_normalisation: bool, index: int | None = None, named: bool = False
    ) -> ModulePrecision:
        """What the rules mean for a module under a policy: that of rule `index`, or the default (None).

        A normalisation layer is one of activations or of weights; it is named where the rule singles it out.
        """
        island = is_normalisation and self.float32_islands and not named and is_half(policy.compute_dtype)
        is_class = index is not None and isinstance(self.overrides[index][0], type)
        asked_for = named and not is_class and policy.recipe is not None
        return ModulePrecision(policy, island, self.keep_small_inputs, asked_for)

    @functools.cached_property
    def default_precision(self) -> dict[bool, ModulePrecision]:
        """What the default policy means for a module, by whether that is a normalisation layer."""
        return {is_norm: self.precision(self.default, is_norm) for is_norm in (False, True)}

    def unused(self, modules: Iterable[tuple[str | Sequence[Any], Any]]) -> tuple[Pattern, ...]:
        """The patterns that match none of the modules of a model, given as pairs `(path, module)`."""
        named = [(path_text(path), module) for path, module in modules]
        return tuple(
            pattern
            for pattern, _ in self.overrides
            if not any(matches(pattern, path, module) for path, module in named)
        )

    def relative_to(self, path: str | Sequence[Any], policy: Policy) -> "PolicyMap":
        """The same rules for a part of the model, with paths counted from that part.

        Args:
          path: where the part is in the larger model.
          policy: the policy that governs the part itself.
        """
        start = path_text(path)
        below = [(p, override) for whole, override in self.overrides for p in patterns_below(whole, start)]
        return dataclasses.replace(self, default=policy, overrides=below)

    def without_output_cast(self, policy: Policy) -> "PolicyMap":
        """The same rules, with a policy's outputs in compute dtype for code under that policy."""

        def replaced(p: Policy) -> Policy:
            return p if policy_changes(p, policy) else p.with_output_dtype(p.compute_dtype)

        overrides = [(pattern, replaced(p)) for pattern, p in self.overrides]
        return dataclasses.replace(self, default=replaced(self.default), overrides=overrides)

    def with_recipe(self, recipe: str) -> "PolicyMap":
        """The same rules with a recipe in the default policy."""
        return dataclasses.replace(self, default=dataclasses.replace(self.default, recipe=recipe))


#: The flags of a `PolicyMap`, with their defaults.
FLAGS: Mapping[str, bool] = PolicyMap._flags  # type: ignore[assignment]

#: What `wrap` and `intercept` take.
PolicyMapLike: TypeAlias = "PolicyMap | Policy | str | HoldsRules"


class HoldsRules(Protocol):
    """What has rules as its `policy`: a `Precision`."""

    @property
    def policy(self) -> PolicyMap:
        """The rules."""
        ...


def as_policy_map(policy: PolicyMapLike, model: str | None = None) -> PolicyMap:
    """The rules that are to be applied: a `PolicyMap` as it is, else one without overrides.

    Args:
      policy: as users give it.
      model: name of the model that they are for. Paths in reports begin with it ("Net/head",
        "Net.encode/head"), as those in profiles do; paths in rules begin inside.

    Raises:
      ValueError: for policies that compute, store or hand on values in 8 bits, and for those whose
        `grad_dtype` no product can return.
    """
    named: Any = getattr(policy, "policy", policy)  # Of a `Precision`.
    rules = named if isinstance(named, PolicyMap) else PolicyMap(named)
    for given in policies_of(rules):
        for dtype in (given.param_dtype, given.compute_dtype, given.output_dtype):
            if dtype.itemsize < 2:
                check_has_range(dtype, f"The policy {str(given)!r}")
        if given.grad_dtype not in (None, given.compute_dtype):
            check_grad_dtype(given)
    if model is None or not rules.overrides:
        return rules
    overrides = [(path_inside(pattern, model), override) for pattern, override in rules.overrides]
    return dataclasses.replace(rules, overrides=overrides)


def policies_of(rules: PolicyMap) -> tuple[Policy, ...]:
    """The default policy, and those of all rules."""
    return rules.default, *(policy for _, policy in rules.overrides)


def path_text(path: str | Sequence[Any]) -> str:
    """The text of a path: names joined by slashes, "" for the root."""
    return path if isinstance(path, str) else "/".join(map(str, path))


def any_is_nvfp4(rules: PolicyMap) -> bool:
    """Returns whether a policy among rules has a recipe of 4 bits."""
    return any(p.recipe is not None and arithmetic_of(p.recipe) == "float4" for p in policies_of(rules))


def any_wants_fp32_weight_grads(rules: PolicyMap) -> bool:
    """Returns whether a policy among rules asks for wider weight gradients."""
    return any(map(wants_fp32_weight_grads, policies_of(rules)))
