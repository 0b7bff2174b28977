"""The rarer ways in which Linen modules run.

Marked for `autocast`; with float32 gradients; once more, for initial values that half ones had a part in; and
with an NNX module inside (`flax.nnx.bridge.ToLinen`), which follows the model's rules.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.dtypes import cast_leaf, is_floating_array
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.linen.governing import governed, locate
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import matches
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


def with_params_of(variables: Any, bare: Any) -> Any:
    """The variables with the parameters of the bare model, cast to the dtypes that they have."""

    def as_stored(stored: Any, value: Any) -> Any:
        return cast_leaf(value, stored.dtype) if is_floating_array(stored) else value

    params = jax.tree.map(as_stored, variables["params"], bare["params"])
    return type(variables)({**variables, "params": params})


def class_under_rules(scope: Scope, module: Any, path: str, precision: ModulePrecision) -> Callable[..., Any]:
    """The class of a bridged NNX module, with modules under the same rules as the bridge.

    Args:
      scope: the active scope.
      module: the bridge.
      path: where it is, as rules count paths.
      precision: what the rules mean for it.
    """
    make = module.nnx_class
    inside = scope.rules.relative_to(path, precision.policy).without_output_cast(precision.policy)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bridged = make(*args, **kwargs)
        framework = framework_of(bridged)
        if framework is None:
            return bridged
        new, asked = framework.wrap_part(bridged, inside)
        for below, part in asked:
            whole = "/".join(filter(None, (path, below)))
            scope.seen.paths.add(whole)
            overrides = enumerate(scope.rules.overrides)
            scope.seen.matched.update(i for i, (pattern, _) in overrides if matches(pattern, whole, part))
        return new

    return wrapped
