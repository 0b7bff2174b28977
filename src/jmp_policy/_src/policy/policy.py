"""Defines a precision policy: which dtype parameters, computation and outputs have; and its text.

The grammar of the text ("mixed_float16", "params=float32,compute=float16,output=float32") is jmp's, with its
gaps closed: spaces are allowed, every policy's `str` parses back, and the error for an unknown word lists the
known ones. `rules` has the policies that most programs name.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jmp_policy._src.core.dtype_words import float8_hint, parse_dtype
from jmp_policy._src.core.dtypes import cast_floating, is_half
from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.core.types import DTypeLike, PyTree
from jmp_policy._src.policy.recipes import checked_recipe, in_full, is_recipe, worthwhile

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
#: Words of other libraries (accelerate, Lightning, DeepSpeed). "fp16" and "bf16" mean mixed precision there.
_OTHER_WORDS = {
    **dict.fromkeys(("no", "false", "none", "32", "32-true", "fp32", "f32"), "float32"),
    **dict.fromkeys(("fp16", "f16", "16", "16-mixed", "fp16-mixed", "float16-mixed"), "mixed_float16"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat16-mixed"), "mixed_bfloat16"),
    **dict.fromkeys(("16-true", "fp16-true"), "float16"),
    "bf16-true": "bfloat16",
    **dict.fromkeys(("64", "64-true", "fp64", "f64"), "float64"),
    "auto": "mixed_half",
}


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
            if given is None and name != "grad_dtype":
                raise TypeError(
                    f"A Policy needs three dtypes or one text, such as 'mixed_float16'; {name} is missing."
                )
            if given is not None:
                object.__setattr__(self, name, parse_dtype(given, f"for {name} of a Policy"))
        if self.recipe is not None:
            text = self.recipe if isinstance(self.recipe, str) else shown(self.recipe)
            given, at, target = in_full(text).partition("@")
            recipe = checked_recipe(given, self.compute_dtype, _dtypes_text(self))
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
        return cls(**_parse_mapping(settings))

    def __str__(self) -> str:
        return _dtypes_text(self) + ("" if self.recipe is None else f",{_RECIPE}={self.recipe}")

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


def _dtypes_text(policy: Policy) -> str:
    """The text of a `Policy` without its recipe."""
    dtypes = {word: getattr(policy, field) for word, field in _WORD_TO_FIELD.items()}
    return ",".join(f"{word}={np.dtype(d).name}" for word, d in dtypes.items() if d is not None)


def parse_policy(text: Any) -> dict[str, Any]:
    """Parses a text that `get_policy` takes, to the fields of a `Policy`.

    Raises:
      ValueError: for an unknown word; the message lists the known ones.
      TypeError: for what is no text.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"A policy is a jmp_policy.Policy or its text, such as 'mixed_float16'; got {shown(text)} "
            f"of type {type(text).__name__}.{_instead_of(text)}"
        )
    name = text.strip().lower()
    name = _OTHER_WORDS.get(name, name)
    if name in _PURE:
        return {"param_dtype": name, "compute_dtype": name, "output_dtype": name}
    if name in _MIXED:
        half = name.removeprefix("mixed_")
        return {"param_dtype": "float32", "compute_dtype": half, "output_dtype": "float32"}
    if "=" in name:
        return _parse_assignments(text)
    known = (*_MIXED, *_PURE, *_OTHER_WORDS)
    if is_recipe(name) and name != "fp8":  # Which is taken for a policy, as fp16 is one.
        raise ValueError(
            f"{text!r} is a recipe, which goes with the dtypes of a policy: 'mixed_bfloat16,recipe={name}'."
        )
    hint = float8_hint(name) or did_you_mean(name, known)
    raise ValueError(
        f"Unknown policy {text!r}.{hint} Known: {', '.join((*_MIXED, *_PURE))}, other libraries' fp16, bf16, "
        "16-mixed, bf16-mixed, fp32 and no, or assignments such as "
        "'params=float32,compute=float16,output=float32' (short: 'p=f32,c=f16,o=f32')."
    )


def _instead_of(value: Any) -> str:
    """What to write in place of a value that is no policy; " ..." or ""."""
    if hasattr(value, "items"):
        return (
            " Rules are jmp_policy.PolicyMap(policy, rules), the policy of all other modules first; "
            "jmp_policy.from_config reads what a config holds."
        )
    with contextlib.suppress(ValueError):
        name = parse_dtype(value, "").name
        if f"mixed_{name}" not in _MIXED:
            return f" Write {name!r}."
        return f" Write 'mixed_{name}' for float32 parameters, or {name!r} for {name} parameters too."
    return ""


def _parse_assignments(text: str) -> dict[str, Any]:
    first, comma, rest = text.partition(",")
    named = comma and "=" not in first and first.strip().lower() in (*_MIXED, *_PURE, *_OTHER_WORDS)
    parts = [part.lower().split("=", 1) for part in (rest if named else text).split(",")]
    fields = _assigned([[piece.strip() for piece in part] for part in parts], f"policy {text!r}")
    return parse_policy(first) | fields if named else _with_defaults(fields)


def _parse_mapping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Parses `{"params": "float32", "compute": "float16"}` to the fields of a `Policy`.

    Raises:
      ValueError: for unknown keys and dtypes.
    """
    if not settings:
        raise ValueError(f"A policy needs one of the keys {', '.join(POLICY_KEYS)}; the mapping is empty.")
    return _with_defaults(_assigned(settings.items(), f"policy {shown(dict(settings.items()))}"))


def _assigned(parts: Iterable[Any], policy: str) -> dict[str, Any]:
    """The fields that parts `(key, word)` set."""
    given: dict[str, Any] = {}
    for part in parts:
        key = _SHORT_KEYS.get(part[0], part[0])
        if len(part) < 2 or key not in (*_WORD_TO_FIELD, _RECIPE):
            hint = did_you_mean(str(key), POLICY_KEYS)
            raise ValueError(
                f"Unknown part {'='.join(map(str, part))!r} in {policy}.{hint} Parts are key=dtype with "
                f"the keys {', '.join(POLICY_KEYS)}."
            )
        if key in given:
            raise ValueError(f"{policy[0].upper()}{policy[1:]} sets {key!r} twice.")
        given[key] = part[1] if key == _RECIPE else parse_dtype(part[1], f"in {policy}")
    return {_WORD_TO_FIELD.get(key, key): value for key, value in given.items()}


def _with_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    params = fields.get("param_dtype", np.dtype(np.float32))
    compute = fields.get("compute_dtype", params)
    return {"param_dtype": params, "compute_dtype": compute, "output_dtype": compute, **fields}
