"""Defines a precision policy: which dtype parameters, computation and outputs have.

Its text is read and written in `policy_text`; `named` has the policies that most programs name.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jmp_policy._src.core.dtype_words import parse_dtype
from jmp_policy._src.core.dtypes import cast_floating, is_half
from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.policy.policy_text import dtypes_text, parse_assignments, parse_policy, policy_text
from jmp_policy._src.policy.recipes import checked_recipe, in_full, worthwhile


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a mixed-precision computation.

    Frozen and hashable: a policy may be a static argument of `jax.jit` or a field of a module.

    Args:
      param_dtype: dtype in which parameters are stored and updated (the master weights). Or the text of a
        policy, in place of the three dtypes: `Policy("mixed_bfloat16", recipe="fp8_current")`.
      compute_dtype: dtype to which parameters, and what products read, are cast for the computation.
      output_dtype: dtype of values that leave the governed part of a model for code under another policy or
        none.
      grad_dtype: dtype in which half-precision products return weight gradients; None leaves them in
        `compute_dtype` until the transpose of the parameter's cast.
      recipe: how products are computed from scaled 8-bit or 4-bit operands: "fp8_current", "fp8_rowwise",
        "fp8_block", "mxfp8", "fp8_delayed" or "nvfp4". For the forward pass alone "fwd:fp8_current", for
        gradients alone "bwd:fp8_current", and in different ways "fwd:fp8_rowwise+bwd:fp8_current".
        "fp8_current+scores+values" has attention's own products as well, under `autocast`.
        "fp8_current@H100" is followed where that gains on the device, at each product's size (`worthwhile`).
        None for products in compute dtype. Heads, routers, first layers and all else stay as without it.

    Raises:
      TypeError: when one of the three dtypes is missing.
      ValueError: when a dtype is unknown or not floating, when a recipe is unknown or the compute dtype has
        not 16 bits.

    Example:
      >>> import jax.numpy as jnp
      >>> policy = Policy("float32", jnp.float16, "float32")
      >>> policy.cast_to_compute({"w": jnp.ones(2), "step": jnp.array(3)})["w"].dtype
      dtype('float16')
      >>> str(policy)
      'params=float32,compute=float16,output=float32'
      >>> Policy(str(policy)) == policy
      True
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype = None  # type: ignore[assignment]
    output_dtype: np.dtype = None  # type: ignore[assignment]
    grad_dtype: np.dtype | None = None
    recipe: str | None = None

    if TYPE_CHECKING:  # Anything that names a dtype goes in, and a dtype comes out.

        def __init__(
            self,
            param_dtype: DTypeLike,
            compute_dtype: DTypeLike | None = None,
            output_dtype: DTypeLike | None = None,
            grad_dtype: DTypeLike | None = None,
            recipe: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.param_dtype, str) and self.compute_dtype is None and self.output_dtype is None:
            named = Policy(**parse_policy(self.param_dtype))
            for name in (field.name for field in dataclasses.fields(self)):
                if name == "param_dtype" or getattr(self, name) is None:
                    object.__setattr__(self, name, getattr(named, name))
        for name in ("param_dtype", "compute_dtype", "output_dtype", "grad_dtype"):
            given = getattr(self, name)
            if name != "grad_dtype" or given is not None:
                object.__setattr__(self, name, parse_dtype(given, f"for {name} of a Policy"))
        if self.recipe is not None:
            text = self.recipe if isinstance(self.recipe, str) else shown(self.recipe)
            given, at, target = in_full(text).partition("@")
            recipe = checked_recipe(given, self.compute_dtype, dtypes_text(self))
            object.__setattr__(self, "recipe", worthwhile(recipe, target) if at else recipe)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `param_dtype`, and returns all others as the same objects."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `compute_dtype`, and returns all others as the same objects."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """Casts floating leaves to `output_dtype`, and returns all others as the same objects."""
        return cast_floating(tree, self.output_dtype)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """The same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def with_compute_dtype(self, compute_dtype: DTypeLike) -> "Policy":
        """The same policy with another compute dtype; without a recipe, if that has not 16 bits."""
        dtype = parse_dtype(compute_dtype, "for compute_dtype of a Policy")
        recipe = self.recipe if is_half(dtype) else None
        return dataclasses.replace(self, compute_dtype=dtype, recipe=recipe)

    def to_dict(self) -> dict[str, str]:
        """The parts of the text: `{"params": "float32", "compute": "float16", ...}`."""
        return dict(part.split("=") for part in str(self).split(","))

    @classmethod
    def from_dict(cls, settings: Mapping[str, str]) -> "Policy":
        """Reads what `to_dict` returns; short keys, and keys left out, are as in the text of a policy.

        Raises:
          ValueError: for unknown keys and dtypes.
        """
        return cls(**parse_assignments(settings))

    def __str__(self) -> str:
        return policy_text(self)

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"
