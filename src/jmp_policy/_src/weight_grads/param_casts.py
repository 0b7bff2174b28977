"""Casts of parameters whose gradients are to be float32, told by the named scope around them."""

import functools
import re
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jmp_policy._src.core.dtypes import cast_floating, cast_leaf, is_floating_array, map_changed
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import FLOAT32
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import wants_fp32_weight_grads
from jmp_policy._src.products import binding

#: A cast in such a scope is one of a parameter.
_SCOPE = "float32_gradient"
_MARKED = re.compile(rf"(?:^|[/(]){_SCOPE}\)*$")


def cast_weight(tree: PyTree, dtype: np.dtype, policy: Policy) -> PyTree:
    """Casts parameters, marked where their gradients are to leave products in float32."""
    if not wants_fp32_weight_grads(policy):
        return map_changed(functools.partial(_cast, np.dtype(dtype)), tree)
    with jax.named_scope(_SCOPE):
        return cast_floating(tree, dtype)


def _cast(dtype: np.dtype, x: Any) -> Any:
    is_cast = isinstance(x, Tracer) and is_floating_array(x) and x.dtype != dtype
    return binding.converted_as_kept(x, dtype) if is_cast else cast_leaf(x, dtype)


#: Whether `transform.with_float32_gradients` traces a function just now. Part of the key of jit's cache.
TRACED_FOR_IT = jax.make_user_context(default_value=False)


def is_param_cast(eqn: Any) -> bool:
    """Whether an equation casts a parameter whose gradient is to be float32."""
    if eqn.primitive.name != "convert_element_type" or eqn.invars[0].aval.dtype.itemsize < FLOAT32.itemsize:
        return False
    return _MARKED.search(str(compat.stack_of(eqn))) is not None
