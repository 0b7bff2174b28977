"""NNX modules inside a Linen model, by `flax.nnx.bridge.ToLinen`: they follow the model's rules."""

from collections.abc import Callable
from typing import Any

from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import matches
from jmp_policy._src.policy.scope import Scope


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
