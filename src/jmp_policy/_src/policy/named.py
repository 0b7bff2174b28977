"""Policies by their names and texts, as programs ask for them."""

from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.policy_text import parse_policy

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


def wants_fp32_weight_grads(policy: Policy) -> bool:
    """Returns whether weight gradients under a policy are wider than its products."""
    grad = policy.grad_dtype
    return grad is not None and grad.itemsize > policy.compute_dtype.itemsize
