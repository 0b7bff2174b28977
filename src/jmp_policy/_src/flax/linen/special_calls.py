"""The rarer ways in which Linen modules run.

Marked for `autocast`; with float32 gradients; once more, for initial values that half ones had a part in;
with the last blocks in compute dtype; with an NNX module inside (`flax.nnx.bridge.ToLinen`), which follows
the model's rules; and with float32 products, for which variables may be used as they are stored.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.classes import imported_attr
from jmp_policy._src.core.dtypes import cast_leaf, is_floating_array
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.linen.governing import governed, locate
from jmp_policy._src.flax.linen.layers import all_params
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import matches, path_text
from jmp_policy._src.policy.recipes import last_blocks
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
    precision, location = governed(scope, module)
    inner = dataclasses.replace(scope, half_modules={}).inside(precision.policy, location)
    run = functools.partial(transform.with_float32_gradients, opens_scope=True, inside=lambda: ACTIVE(inner))
    with ACTIVE(dataclasses.replace(scope, cloned=locate(module, scope.location).path)):
        return compat.over_variables(run, function, module, args, kwargs)


def with_params_of(out: Any, bare: Any) -> Any:
    """What `init` and its like gave, with the parameters of the bare model in the dtypes that they have.

    Args:
      out, bare: variables of the wrapped and of the bare model, or pairs of the model's result and these.
    """
    if isinstance(out, tuple):
        return out[0], with_params_of(out[1], bare[1])
    params = jax.tree.map(
        lambda stored, value: cast_leaf(value, stored.dtype) if is_floating_array(stored) else value,
        out["params"],
        bare["params"],
    )
    return type(out)({**out, "params": params})


def last_blocks_inside(scope: Scope, module: nn.Module) -> frozenset[str]:
    """Paths of the last blocks of a module, which recipes of 4 bits leave in compute dtype."""
    paths = (names for names, _ in jax.tree.leaves_with_path(all_params(module)))
    blocks = last_blocks([str(getattr(name, "key", name)) for name in names] for names in paths)
    start = locate(module, scope.location).path
    return frozenset(scope.relative((*start, *block.split("/"))) for block in blocks)


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


#: What to do about a variable that is used as it is stored.
REPAIR = (
    'Read a parameter with self.param or self.get_variable("params", name) in a method of the module that '
    "owns it, and cast anything else (.astype(x.dtype))."
)


def stored_by_path(scope: Scope, module: nn.Module) -> Iterator[tuple[str | None, Any]]:
    """The variables as they are stored, with their paths if they are of modules in half, else with None.

    They are those of the outermost module and below it. What has not run belongs to the next module above it.
    """
    start, half_modules = locate(module, scope.location).path, scope.half_modules
    bridge = imported_attr("flax.nnx.bridge", "ToLinen") or ()
    for keys, array in jax.tree_util.tree_leaves_with_path(nn.meta.unbox(module.variables)):
        collection, *names = (str(getattr(key, "key", key)) for key in keys)
        path = (*start, *names)
        owner = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in half_modules)
        cls = half_modules[owner]
        text = path_text(path) if collection == "params" else f"{path_text(path)} of {collection}"
        # An NNX module looks at its variables itself.
        yield None if cls is None or issubclass(cls, bridge) else text, array
