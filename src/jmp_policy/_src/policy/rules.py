"""Policies by name, and which policy governs which module: an ordered map from patterns to policies."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.core.dtype_words import check_has_range
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.settings import flag
from jmp_policy._src.policy.half_errors import check_grad_dtype
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import HoldsRules, Pattern, Rules, checked_pairs, path_inside
from jmp_policy._src.policy.policy import Policy, parse_policy
from jmp_policy._src.policy.recipes import arithmetic_of

#: What the public functions take where they need one policy.
PolicyLike: TypeAlias = "Policy | str"

_FLOAT32 = np.dtype(np.float32)
_HALVES = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))

#: The policies that most programs name; `parse_policy` knows all texts.
_NAMED = {
    "float32": Policy(_FLOAT32, _FLOAT32, _FLOAT32),
    **{half.name: Policy(half, half, half) for half in _HALVES},
    **{f"mixed_{half.name}": Policy(_FLOAT32, half, _FLOAT32) for half in _HALVES},
}


def get_policy(text: PolicyLike) -> Policy:
    """Parses a policy from its text.

    Args:
      text: one of

        - `"mixed_float16"`, `"mixed_bfloat16"`: parameters and outputs float32, computation half;
          `"mixed_half"` with the half type that suits the default backend;
        - `"fp16"`, `"bf16"`, `"16-mixed"`, `"bf16-mixed"`, `"no"`: words of other libraries, for mixed
          precision and for none;
        - `"float32"` (or `"full"`), `"float16"`, `"bfloat16"`, `"float64"`, `"half"`: all of one type,
          parameters too, as in jmp and Keras;
        - `"params=float32,compute=float16,output=float32"`, or short `"p=f32, c=f16, o=f32"`, and `g`
          for `grad`, `r` for `recipe`: params default to float32, compute to params, output to compute;
        - a name and assignments that change it: `"mixed_bfloat16, r=fp8_current"`.

        A `Policy` is returned unchanged.

    Raises:
      ValueError: for an unknown word; the message lists the known ones.
      TypeError: for anything that is neither a text nor a policy.

    Example:
      >>> get_policy("p=f32, c=bf16")
      Policy('params=float32,compute=bfloat16,output=bfloat16')
    """
    if isinstance(text, Policy):
        return text
    named = _NAMED.get(text) if isinstance(text, str) else None
    return named or Policy(**parse_policy(text))


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PolicyMap(Rules):
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


#: The flags of a `PolicyMap`, with their defaults.
FLAGS: Mapping[str, bool] = PolicyMap._flags  # type: ignore[assignment]

#: What `wrap` and `intercept` take.
PolicyMapLike: TypeAlias = PolicyMap | Policy | str | HoldsRules


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


def any_is_nvfp4(rules: PolicyMap) -> bool:
    """Returns whether a policy among rules has a recipe of 4 bits."""
    return any(p.recipe is not None and arithmetic_of(p.recipe) == "float4" for p in policies_of(rules))


def wants_fp32_weight_grads(policy: Policy) -> bool:
    """Returns whether weight gradients under a policy are wider than its products."""
    grad = policy.grad_dtype
    return grad is not None and grad.itemsize > policy.compute_dtype.itemsize


def any_wants_fp32_weight_grads(rules: PolicyMap) -> bool:
    """Returns whether a policy among rules asks for wider weight gradients."""
    return any(map(wants_fp32_weight_grads, policies_of(rules)))
