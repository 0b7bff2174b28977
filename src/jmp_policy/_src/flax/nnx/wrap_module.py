"""An NNX module under a policy: a copy of the tree of modules, over the same Variables.

NNX has no interceptor. Layers of Flax follow a policy through their own `dtype` setting, everything else by
a subclass that casts (see `governed`). Where settings suffice, the graph definition equals that of a layer
written by hand, and so do its programs.
"""

import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

from flax import nnx

from jmp_policy._src.flax.nnx import graph_nodes, layers, plan_errors, precision_plan
from jmp_policy._src.flax.nnx.governed import Specification, governed_class
from jmp_policy._src.flax.nnx.precision_plan import Plan, PlannedModule
from jmp_policy._src.policy.frameworks import framework_of
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike, wants_fp32_weight_grads
from jmp_policy._src.policy.scope import in_trial

M = TypeVar("M", bound=nnx.Module)


def wrap(module: M, policy: PolicyMapLike, *, methods: Sequence[str] = ()) -> M:
    """Makes an NNX module that computes under a policy and shares every Variable with the original.

    Args:
      module: an instance of `flax.nnx.Module`; it is not changed. Its parameters must be in param dtype
        already.
      policy: a `PolicyMap`, a `Policy` or its text. Paths are those of `nnx.iter_graph` ("blocks/0/attn").
      methods: names of further methods that are called from outside their module, as `__call__` is, and
        read parameters of its own: inputs, parameters and results are cast in them too. A method that
        `__call__` itself uses needs no mention. Left out, those of a module that is wrapped already.

    Returns:
      A module of the same structure over the same Variables: training one trains the other. Layers of Flax
      follow by their settings; other modules are instances of a subclass of their class.

    Raises:
      TypeError: for something that is no NNX module instance.
      ValueError: for a module that is wrapped already, or holds one that is, under another policy; for
        rules that match nothing, for rules that disagree on a module or parameter shared between places, for
        parameters that are not in param dtype, for unknown methods.

    Example:
      >>> import jax.numpy as jnp
      >>> import flax.nnx as nnx
      >>> bare = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> model = wrap(bare, "p=f32, c=bf16, o=bf16")
      >>> model(jnp.ones((1, 3))).dtype, model.kernel is bare.kernel
      (dtype(bfloat16), True)
    """
    old = graph_nodes.own_specification(module)
    names = _checked(methods) or (old.methods if old else ())
    plan = precision_plan.make(module, policy, names)
    if (tried := in_trial(plan.rules)) is not plan.rules:
        plan = precision_plan.make(module, tried, names)
    if plan.rules.overrides:
        plan_errors.check_used(plan)
    if wrong := plan.wrong_params():
        raise plan_errors.wrong_dtype(plan.model, *wrong[0], others=len(wrong) - 1)
    for planned in plan.modules.values():
        if _is_never_cast(planned.module, plan.methods):
            warnings.warn(plan_errors.never_cast(planned.module), UserWarning, stacklevel=2)
    new = carried_out(plan, plan.rules)
    if any(graph_nodes.own_specification(part) for _, part in nnx.iter_modules(module)):
        plan_errors.check_nothing_is_lost(module, plan)
    return new


def rules_of(node: Any) -> PolicyMap | None:
    """The rules that this model was wrapped with, or what it is a copy of.

    None for others, parts of a model, and a layer alone that follows by its settings.
    """
    spec = graph_nodes.own_specification(node)
    return None if spec is None else spec.rules


def _checked(methods: Any) -> tuple[str, ...]:
    if isinstance(methods, str):
        raise TypeError(f"methods is a sequence of names, got the text {methods!r}: methods=[{methods!r}].")
    special = [name for name in methods if name.startswith("__") and name != "__call__"]
    if special:
        raise ValueError(f"methods: {special[0]!r} is a method that Python calls, and cannot be governed.")
    return tuple(methods)


def _is_never_cast(module: nnx.Module, methods: tuple[str, ...]) -> bool:
    """Whether a module has parameters of its own that no governed method reads."""
    if isinstance(module, nnx.List | nnx.Dict) or layers.is_flax(type(module)):
        return False
    has_method = bool(graph_nodes.governed_methods(type(module), methods))
    return not has_method and next(graph_nodes.own_params(module), None) is not None


def carried_out(plan: Plan, rules: PolicyMap | None = None) -> Any:
    """Makes every module of the copied model follow its policy; gives the model, which keeps the rules."""
    for planned in plan.modules.values():
        _set(planned, plan)
        if _needs_class(planned, plan):
            known = rules if planned.module is plan.model else None
            spec = Specification(planned.precision, planned.policy_changes, plan.methods, known)
            cls = governed_class(type(planned.module), spec)
            object.__setattr__(planned.module, "__class__", cls)
    return plan.model


def _needs_class(planned: PlannedModule, plan: Plan) -> bool:
    """Whether settings alone do not make a module do all that its policy says."""
    module, policy = planned.module, planned.precision.policy
    if type(module) in (nnx.List, nnx.Dict):
        # Not called, but what it holds is read in the dtype that its own rule says.
        return next(graph_nodes.own_params(module), None) is not None
    returns_float32 = planned.precision.island and layers.sums_few(module)
    if wants_fp32_weight_grads(policy) or returns_float32 or not layers.follows_by_itself(module):
        return True
    casts_output = planned.policy_changes and policy.output_dtype != policy.compute_dtype
    if layers.passes_on(module):
        below = (value for _, value in graph_nodes.walk(module) if isinstance(value, nnx.Module))
        return casts_output or any(plan.modules[id(m)].precision.policy != policy for m in below)
    if isinstance(module, nnx.Sequential):
        return True
    if isinstance(module, nnx.bridge.ToNNX):
        return False
    return casts_output or (planned.policy_changes and "dtype" not in vars(module))


def _set(planned: PlannedModule, plan: Plan) -> None:
    """Sets what settings of a module of the copied model can say."""
    module, precision, rules = planned.module, planned.precision, plan.rules
    new = layers.settings(planned, rules, plan.last_blocks)
    if "dtype" in new:
        layers.remember_own_dtype(module, vars(module)["dtype"], new["dtype"])
    vars(module).update(new)
    for name, linen_module in layers.linen_modules(module).items():
        inside = rules.relative_to(planned.path, precision.policy)
        if not planned.policy_changes:
            inside = inside.without_output_cast(precision.policy)
        framework = framework_of(linen_module)
        assert framework is not None
        vars(module)[name] = framework.wrap_part(linen_module, inside)[0]
