"""Adds to an error about half precision which module met it, and what helps.

JAX's Fourier transforms and linear algebra know no half precision, and loops, branches and updates of slices
take no two dtypes. Their messages name dtypes that the user has written nowhere.
"""

import contextlib
from collections.abc import Iterator

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.policy.module_precision import ModulePrecision


@contextlib.contextmanager
def explained(module: str, pattern: str, precision: ModulePrecision) -> Iterator[None]:
    """Explains errors that half precision causes in the code of a module; all others pass as they are.

    Linear algebra under `jax.jit` fails when the program is compiled, which is outside of every module.

    Args:
      module: what to call the module.
      pattern: a pattern of a `PolicyMap` that matches it, as a user would write it.
      precision: what governs it.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        dtype, text = precision.compute_dtype, str(error)
        is_plain = type(error) in (TypeError, ValueError, NotImplementedError)
        names_half = dtype.name in text and ("float32" in text or "upported" in text)
        if is_plain and names_half and not precision.island and is_half(dtype) and _MARK not in text:
            error.args = (f"{text}\n\n{_advice(module, pattern, precision)}",)
        raise


_MARK = "under its policy"


def _advice(module: str, pattern: str, precision: ModulePrecision) -> str:
    half, policy = precision.compute_dtype.name, precision.policy
    rule = f"params={policy.param_dtype.name},compute=float32,output={half}"
    return (
        f"{module} computes in {half} {_MARK}. Fourier transforms and linear algebra take no half "
        "precision, and an array that the module makes itself (an initial carry, a buffer, the result of a "
        "branch) is float32 where it meets half values. Cast what the operation takes "
        "(x.astype(jnp.float32)), make arrays in the dtype of what they meet (jnp.zeros(shape, x.dtype)), "
        "or let the module compute "
        f'in float32 by a rule: PolicyMap(..., {{{pattern}: "{rule}"}}).'
    )
