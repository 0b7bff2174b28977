"""Holds what the rules decide for one module: its policy, and whether it computes in float32 all the same."""

import dataclasses

import numpy as np

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """Policy of one module, and whether the module is a float32 island.

    A float32 island is a module that computes in float32 inside a half-precision model, such as a
    normalisation layer; it takes and returns the compute dtype of its policy.

    Args:
      policy: its policy.
      island: whether it is one.
      keeps_small_inputs: whether scalars, and vectors next to larger inputs, are not cast to half.
    """

    policy: Policy
    island: bool
    keeps_small_inputs: bool = True

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
