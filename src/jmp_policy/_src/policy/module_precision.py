"""What the rules mean for one module."""

import dataclasses

import numpy as np

from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class ModulePrecision:
    """The policy of one module, and whether the module is a float32 island within it."""

    policy: Policy
    island: bool

    @property
    def compute_dtype(self) -> np.dtype:
        """Dtype that values are handed on in."""
        return self.policy.compute_dtype

    @property
    def param_dtype(self) -> np.dtype:
        """Dtype that parameters are stored in."""
        return promote_dtype(self.policy.param_dtype) if self.island else self.policy.param_dtype

    @property
    def used_param_dtype(self) -> np.dtype:
        """Dtype that parameters have where they are used."""
        return self.param_dtype if self.island else self.policy.compute_dtype
