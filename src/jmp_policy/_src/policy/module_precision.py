"""Holds what the rules decide for one module: its policy, and whether it computes in float32 all the same."""

import dataclasses

import numpy as np

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import role_by_name
from jmp_policy._src.policy.rules import PolicyMap


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """Policy of one module, and whether the module is a float32 island.

    A float32 island is a module that computes in float32 inside a half-precision model, such as a
    normalisation layer; it takes and returns the compute dtype of its policy.

    Args:
      policy: its policy.
      island: whether it is one.
      keeps_small_inputs: whether scalars, and vectors next to larger inputs, are not cast to half.
      recipe_is_asked_for: whether a rule with a recipe names the module itself, by its path or a predicate.
    """

    policy: Policy
    island: bool
    keeps_small_inputs: bool = True
    recipe_is_asked_for: bool = False

    @property
    def compute_dtype(self) -> np.dtype:
        """Returns the dtype in which the module passes values on."""
        return self.policy.compute_dtype

    @property
    def param_dtype(self) -> np.dtype:
        """Returns the dtype in which parameters are stored."""
        return promote_dtype(self.policy.param_dtype) if self.island else self.policy.param_dtype

    @property
    def used_param_dtype(self) -> np.dtype:
        """Returns the dtype of parameters where they are used."""
        return self.param_dtype if self.island else self.policy.compute_dtype

    def recipe_at(self, path: str) -> str | None:
        """Returns the float8 recipe of a layer at a path; None where its names say that it is left out."""
        is_left_out = self.island or (not self.recipe_is_asked_for and role_by_name(path))
        return None if is_left_out else self.policy.recipe

    def recipe_note(self, path: str) -> str:
        """Returns what to say of the recipe of a layer with products; "" without one."""
        role = role_by_name(path)
        left_out = f"not in float8: {role}" if role else ""
        return "" if self.policy.recipe is None else self.recipe_at(path) or left_out


def make_precision(
    rules: PolicyMap, policy: Policy, *, island: bool, named: bool, index: int | None
) -> ModulePrecision:
    """Returns what rules mean for one module.

    Args:
      rules: all of them.
      policy: the one that governs the module.
      island: whether it is a float32 island.
      named: whether rule `index` singles out this very module.
      index: of the rule.
    """
    is_class = index is not None and isinstance(rules.overrides[index][0], type)
    asked_for = named and not is_class and policy.recipe is not None
    return ModulePrecision(policy, island, rules.keep_small_inputs, asked_for)
