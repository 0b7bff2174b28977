"""Defines a precision policy: which dtype parameters, computation and outputs have.

The text grammar is jmp's, with its gaps closed: spaces are allowed, every policy's `str` parses back,
and the error for an unknown word lists the known ones.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jmp_policy._src.core.cast import cast_floating
from jmp_policy._src.core.dtypes import DTYPE_WORDS, NO_SCALES, is_half, parse_dtype
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.policy.recipes import checked_recipe, is_recipe
from jmp_policy._src.policy.worthwhile import worthwhile


@dataclasses.dataclass(frozen=True)
class Policy:
    """Dtypes of a mixed-precision computation.

    Frozen and hashable: a policy may be a static argument of `jax.jit` or a field of a module.

    Args:
      param_dtype: dtype in which parameters are stored and updated (the master weights). Or the text of a
        policy, in place of the three dtypes: `Policy("mixed_bfloat16", recipe="fp8_current")`.
      compute_dtype: dtype to which parameters and inputs are cast for the computation. A half one is not for
        scalars and vectors that come with larger inputs (see `PolicyMap`'s `keep_small_inputs`).
      output_dtype: dtype of values that leave the governed part of a model for code under another policy or
        none.
      grad_dtype: dtype in which half-precision products return weight gradients; None leaves them in
        `compute_dtype` until the transpose of the parameter's cast.
      recipe: how layers compute their products from scaled 8-bit operands: "fp8_current", "fp8_rowwise",
        "fp8_block", "mxfp8" or "fp8_delayed".
        For the forward pass alone "fwd:fp8_current", for gradients alone "bwd:fp8_current", and in different
        ways "fwd:fp8_rowwise+bwd:fp8_current". "fp8_current@H100" does so where that gains on the device, at
        each product's size (`worthwhile`). None for products in compute dtype. Heads, routers, first layers
        and all else stay as without it.

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
      >>> get_policy(str(policy)) == policy
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
            named = get_policy(self.param_dtype)
            for name in (field.name for field in dataclasses.fields(self)):
                if name == "param_dtype" or getattr(self, name) is None:
                    object.__setattr__(self, name, getattr(named, name))
        for name in _WORD_TO_FIELD.values():
            given = getattr(self, name)
            if name == "grad_dtype" and given is None:
                continue
            dtype = parse_dtype(given, f"for {name} of a Policy")
            object.__setattr__(self, name, dtype)
        if self.recipe is not None:
            given, at, target = str(self.recipe).partition("@")
            recipe = checked_recipe(given, self.compute_dtype, ",".join(self._dtype_parts()))
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
        """Returns the same policy with another output dtype."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def with_compute_dtype(self, compute_dtype: DTypeLike) -> "Policy":
        """Returns the same policy with another compute dtype; without a recipe, if that has not 16 bits."""
        dtype = parse_dtype(compute_dtype, "for compute_dtype of a Policy")
        recipe = self.recipe if is_half(dtype) else None
        return dataclasses.replace(self, compute_dtype=dtype, recipe=recipe)

    def to_dict(self) -> dict[str, str]:
        """Returns the parts of the text: `{"params": "float32", "compute": "float16", ...}`."""
        return dict(part.split("=") for part in str(self).split(","))

    @classmethod
    def from_dict(cls, settings: Mapping[str, str]) -> "Policy":
        """Reads what `to_dict` returns; short keys, and keys left out, are as in the text of a policy.

        Raises:
          ValueError: for unknown keys and dtypes.
        """
        return get_policy(",".join(f"{key}={value}" for key, value in settings.items()))

    def __str__(self) -> str:
        recipe = [] if self.recipe is None else [f"{_RECIPE}={self.recipe}"]
        return ",".join([*self._dtype_parts(), *recipe])

    def _dtype_parts(self) -> list[str]:
        names = {word: getattr(self, field) for word, field in _WORD_TO_FIELD.items()}
        return [f"{w}={np.dtype(d).name}" for w, d in names.items() if d is not None]

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


#: What the public functions take where they need one policy.
PolicyLike: TypeAlias = "Policy | str"

_WORD_TO_FIELD = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "grad": "grad_dtype",
}
_RECIPE = "recipe"
_SHORT_KEYS = {"p": "params", "c": "compute", "o": "output", "g": "grad", "r": _RECIPE}
#: Words for the dtypes and the recipe of a policy, in its text and as a dict.
POLICY_KEYS = (*_WORD_TO_FIELD, _RECIPE, *_SHORT_KEYS)
_PURE = ("float32", "full", "float16", "bfloat16", "float64", "half")
_MIXED = ("mixed_float16", "mixed_bfloat16", "mixed_half")


def get_policy(text: PolicyLike) -> Policy:
    """Parses a policy from its text.

    Args:
      text: one of

        - `"mixed_float16"`, `"mixed_bfloat16"`: parameters and outputs float32, computation half;
          `"mixed_half"` with the half type that suits the default backend;
        - `"float32"` (or `"full"`), `"float16"`, `"bfloat16"`, `"float64"`, `"half"`: all of one type;
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
    if not isinstance(text, str):
        hint = " Rules are a jmp_policy.PolicyMap; jmp_policy.from_config reads what a config holds."
        raise TypeError(
            f"A policy is a jmp_policy.Policy or its text, such as 'mixed_float16'; got {text!r} "
            f"of type {type(text).__name__}.{hint if hasattr(text, 'items') else ''}"
        )
    name = text.strip().lower()
    if name in _PURE:
        return Policy(name, name, name)
    if name in _MIXED:
        return Policy("float32", name.removeprefix("mixed_"), "float32")
    if "=" in name:
        return _parse_assignments(text)
    known = (*_MIXED, *_PURE)
    if is_recipe(name):
        raise ValueError(
            f"{text!r} is a recipe, which goes with the dtypes of a policy: 'mixed_bfloat16,recipe={name}'."
        )
    hint = f" {NO_SCALES}" if re.search(r"(f|fp|float)8", name) else did_you_mean(name, known)
    if name in ("f16", "fp16", "bf16"):  # In a config they mean mixed precision.
        full = np.dtype(DTYPE_WORDS[name]).name
        hint = f" Write 'mixed_{full}' for float32 parameters, or {full!r} for {full} parameters too."
    raise ValueError(
        f"Unknown policy {text!r}.{hint} Known: {', '.join(known)}, or assignments such as "
        "'params=float32,compute=float16,output=float32' (short: 'p=f32,c=f16,o=f32')."
    )


def _parse_assignments(text: str) -> Policy:
    first, comma, rest = text.partition(",")
    named = comma and "=" not in first and first.strip().lower() in (*_MIXED, *_PURE)
    given: dict[str, Any] = {}
    for part in (rest if named else text).split(","):
        key, equals, word = (piece.strip().lower() for piece in part.partition("="))
        key = _SHORT_KEYS.get(key, key)
        if not equals or key not in (*_WORD_TO_FIELD, _RECIPE):
            hint = did_you_mean(key, POLICY_KEYS)
            raise ValueError(
                f"Unknown part {part.strip()!r} in policy {text!r}.{hint} Parts are key=dtype with "
                f"the keys {', '.join(POLICY_KEYS)}."
            )
        if key in given:
            raise ValueError(f"Policy {text!r} sets {key!r} twice.")
        given[key] = word if key == _RECIPE else parse_dtype(word, f"in policy {text!r}")
    fields = {_WORD_TO_FIELD.get(key, key): value for key, value in given.items()}
    if named:
        return dataclasses.replace(get_policy(first), **fields)
    params = given.get("params", np.dtype(DTYPE_WORDS["float32"]))
    compute = given.get("compute", params)
    return Policy(**{"param_dtype": params, "compute_dtype": compute, "output_dtype": compute, **fields})
