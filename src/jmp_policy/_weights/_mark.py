"""Casts of parameters whose gradients are to stay wide, told by the named scope around them."""

import contextlib
import re
from typing import Any

import jax
import numpy as np

from jmp_policy._cast import cast_floating
from jmp_policy._jax import FLOAT32
from jmp_policy._policy import Policy
from jmp_policy._rules import PolicyMap
from jmp_policy._types import PyTree

#: An operation in this scope is the cast of a parameter.
_SCOPE = "float32_gradient"
_MARKED = re.compile(rf"(^|[/(]){_SCOPE}\)*$")


def cast_weight(tree: PyTree, dtype: np.dtype, policy: Policy) -> PyTree:
    """`cast_floating` of parameters, marked where their gradients are to leave products in float32."""
    if not asks(policy):
        return cast_floating(tree, dtype)
    with marked():
        return cast_floating(tree, dtype)


def marked() -> contextlib.AbstractContextManager[Any]:
    """A with-block whose casts are marked."""
    return jax.named_scope(_SCOPE)


def asks(policy: Policy) -> bool:
    """Whether weight gradients under a policy are wider than its products."""
    grad = policy.grad_dtype
    return grad is not None and grad.itemsize > policy.compute_dtype.itemsize


def any_asks(rules: PolicyMap) -> bool:
    """Whether a policy among rules asks for wider weight gradients."""
    return any(map(asks, (rules.default, *(policy for _, policy in rules.overrides))))


def is_marked(eqn: Any) -> bool:
    """Whether an equation is the cast of a float32 parameter whose gradient is to stay float32."""
    return (
        eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.dtype == FLOAT32
        and _MARKED.search(str(eqn.source_info.name_stack)) is not None
    )
