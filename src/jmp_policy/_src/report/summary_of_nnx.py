"""The rows of a summary, for NNX modules."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx import (
    framework,
    graph_nodes,
    layers,
    precision_plan,
    stored_arrays,
    wrap_module,
)
from jmp_policy._src.policy.frameworks import looking
from jmp_policy._src.policy.patterns import path_text
from jmp_policy._src.policy.recipes import recipe_note
from jmp_policy._src.policy.rules import PolicyMap, as_policy_map
from jmp_policy._src.report import tapping
from jmp_policy._src.report.function import as_function


def described(
    model: Any, policy: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, PolicyMap, list[Any], Any]:
    """The name, rules, rows (as arguments of `make_row`) and jaxpr, from a trace of a call."""
    if policy is None:
        policy = wrap_module.rules_of(model)
    if policy is None:
        raise TypeError("summary needs a policy for an NNX module: summary(model, 'mixed_float16', inputs).")
    rules = as_policy_map(policy, graph_nodes.name_of(model))
    # Of its own Variables: the model's parameters may be of another dtype than the policy's.
    copy = precision_plan.bare_copy(model, variables=True)
    half = wrap_module.wrap(framework.cast_params(copy, rules), rules)
    plan = precision_plan.make(copy, rules, ())
    calls = tapping.Calls()
    function = as_function(half, inputs, kwargs, "summary")

    def call(arrays: Any) -> Any:
        with looking(calls):
            return function.call(arrays)

    jaxpr = jax.make_jaxpr(call)(function.arrays)
    by_path: dict[str, list[Any]] = {}
    for made, _ in calls.calls:
        by_path.setdefault(made.name.partition("/")[2], []).append(made)
    modules = {place.path: place.module for place in plan.modules.values()}

    def row(place: precision_plan.PlannedModule) -> Any:
        module, path, precision = place.module, path_text(place.path), place.precision
        above = [at for depth in range(len(place.path), -1, -1) if (at := place.path[:depth]) in modules]
        matches = (rules.match(at, modules[at]) for at in above)
        index = next((i for i in matches if i is not None), None)
        own_dtype = layers.asked_dtype(module, modules[above[1]] if len(above) > 1 else None)
        notes = []
        if isinstance(module, nnx.Linear | nnx.LinearGeneral):
            notes.append(recipe_note(precision, path, module.out_features, plan.last_blocks))
        made = by_path.get(path, ())
        if not made and not isinstance(module, nnx.List | nnx.Dict):
            notes.append("not called")
        own = _own(module)
        return path, type(module), rules, index, precision, own, made, own_dtype, place.keeps_dtype, notes

    shown = [
        row(place)
        for place in plan.modules.values()
        if not isinstance(place.module, nnx.List | nnx.Dict | nnx.Rngs) or _own(place.module)
    ]
    return graph_nodes.name_of(model), rules, shown, jaxpr


def _own(module: Any) -> list[Any]:
    """The arrays of a module's own parameters."""
    return [
        leaf
        for _, param in graph_nodes.own_params(module)
        for leaf in jax.tree.leaves(stored_arrays.read(param))
    ]
