"""Adds to an error about half precision which module met it, and what helps; refuses policies that cannot be.

JAX's Fourier transforms and linear algebra know no half precision, and loops, branches and updates of slices
take no two dtypes. Their messages name dtypes that the user has written nowhere.
"""

import numpy as np

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.policy import Policy

#: What JAX raises for an operation that takes no half precision.
KINDS = (TypeError, ValueError, NotImplementedError)


def explain(error: Exception, module: str, pattern: str, precision: ModulePrecision) -> None:
    """Adds an explanation to an error that half precision causes in the code of a module, and to no other.

    Linear algebra under `jax.jit` fails when the program is compiled, which is outside of every module.

    Args:
      error: one of `KINDS`; subclasses may have arguments of their own, and stay as they are.
      module: what to call the module.
      pattern: a pattern of a `PolicyMap` that matches it, as a user would write it.
      precision: what governs it.
    """
    dtype, text = precision.compute_dtype, str(error)
    names_half = dtype.name in text and ("float32" in text or "upported" in text)
    is_ours = names_half and not precision.island and is_half(dtype) and _MARK not in text
    if type(error) not in KINDS or not is_ours:
        return
    half, param = dtype.name, precision.policy.param_dtype.name
    # A result in half would not agree with the float32 carry or branch around the module.
    output = half if any(words in text for words in _OF_OPERATIONS) else "float32"
    rule = f'PolicyMap(..., {{{pattern}: "params={param},compute=float32,output={output}"}})'
    if text.startswith(("query dtype", "key dtype", "value dtype")):
        advice = (
            "Attention takes queries, keys and values of one dtype, and some of them have met float32 "
            f"numbers, a rotary embedding, say: cast them back before it (q.astype(jnp.{half}))."
        )
    elif output == half:
        advice = (
            "Fourier transforms, linear algebra and complex numbers know no half precision: cast what the "
            "operation takes (x.astype(jnp.float32)), or let the module compute in float32 by a rule: "
            f"{rule}."
        )
    else:
        advice = (
            "An array that the module makes itself (an initial carry, a buffer, a branch's result) or gets "
            f"(a cache that the model has returned: output={half} keeps it half) is float32 where it meets "
            "half values, as is a NumPy number (np.sqrt(2), and not float(np.sqrt(2))). Make arrays in the "
            "dtype of what they meet (jnp.zeros(shape, x.dtype)), give a branch that returns its input that "
            f"in half (x.astype(jnp.{half})), and a loop the argument that it reads, or let the module "
            f"compute in float32 by a rule: {rule}."
        )
    error.args = (f"{text}\n\n{module} computes in {half} {_MARK}. {advice}",)


_MARK = "under its policy"

#: What JAX says of operations that take no half precision.
_OF_OPERATIONS = ("upported", "must be float32 or float64", "Accepted dtypes")


def check_grad_dtype(policy: Policy) -> None:
    """Raises ValueError for a policy that asks for weight gradients which its products cannot return."""
    if policy.grad_dtype != np.float32:
        raise ValueError(
            f"The policy {str(policy)!r} asks for weight gradients in {policy.grad_dtype}. Products of "
            f"{policy.compute_dtype.name} return that or what they accumulate in: leave grad out, or "
            "set it to float32."
        )
    if is_half(policy.param_dtype):
        raise ValueError(
            f"The policy {str(policy)!r} asks for float32 gradients of {policy.param_dtype.name} "
            "parameters, and JAX gives gradients the dtype of the parameters. Keep them in float32: "
            "params=float32."
        )
