"""Reads and writes a policy as text: "mixed_float16", "params=float32,compute=float16,output=float32".

The grammar is jmp's, with its gaps closed: spaces are allowed, every policy's `str` parses back, and the
error for an unknown word lists the known ones.
"""

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jmp_policy._src.core.dtype_words import float8_hint, parse_dtype
from jmp_policy._src.core.settings import shown
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.policy.recipes import is_recipe

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


def policy_text(policy: Any) -> str:
    """The text of a `Policy`, which `parse_policy` reads back."""
    recipe = "" if policy.recipe is None else f",{_RECIPE}={policy.recipe}"
    return dtypes_text(policy) + recipe


def dtypes_text(policy: Any) -> str:
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
        return f" Write 'mixed_{name}' for float32 parameters, or {name!r} for {name} parameters too."
    return ""


def _parse_assignments(text: str) -> dict[str, Any]:
    first, comma, rest = text.partition(",")
    named = comma and "=" not in first and first.strip().lower() in (*_MIXED, *_PURE, *_OTHER_WORDS)
    parts = [part.lower().split("=", 1) for part in (rest if named else text).split(",")]
    fields = _assigned([[piece.strip() for piece in part] for part in parts], f"policy {text!r}")
    return parse_policy(first) | fields if named else _with_defaults(fields)


def parse_assignments(settings: Mapping[str, Any]) -> dict[str, Any]:
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
