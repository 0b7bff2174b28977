"""Two rarer ways in which a Linen module's method runs: marked for `autocast`, and with float32 gradients."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from jmp_policy._src.flax import compat
from jmp_policy._src.flax.linen.governing import governed, locate
from jmp_policy._src.policy.regions import region
from jmp_policy._src.policy.scope import ACTIVE, Scope
from jmp_policy._src.weight_grads import transform


def call_marked(scope: Scope, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a method whose operations are marked, where another policy governs the module than its caller."""
    precision, location = governed(scope, module)
    policy, outer = precision.policy, scope.caller or scope.rules.default
    is_same = (policy.compute_dtype, policy.recipe) == (outer.compute_dtype, outer.recipe)
    with ACTIVE(scope.inside(policy, location)), contextlib.nullcontext() if is_same else region(policy):
        return call(*args, **kwargs)


def call_with_float32_gradients(
    call_governed: Callable[..., Any],
    scope: Scope,
    module: nn.Module,
    method: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs a method as a function of the module's variables (as `nn.jit` does), whose gradients are float32.

    Args:
      call_governed: runs a method of a module under a scope.
      scope: the active scope.
      module: the outermost governed module.
      method: the function that its class has.
      args, kwargs: what it is called with.
    """

    def float32_gradients(clone: nn.Module, args: Any, kwargs: Any) -> Any:
        return call_governed(ACTIVE.value, clone, functools.partial(method, clone), args, kwargs)

    function = nn.compact(float32_gradients) if compat.is_compact(method) else float32_gradients
    transformed = functools.partial(transform.with_float32_gradients, opens_scope=True)
    with ACTIVE(dataclasses.replace(scope, cloned=locate(module, scope.location).path)):
        return compat.over_variables(transformed, function, module, args, kwargs)
