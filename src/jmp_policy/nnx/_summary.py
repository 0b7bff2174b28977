"""The rows of a summary, for NNX modules."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jmp_policy import _taps
from jmp_policy._rules import PolicyMap, as_policy_map, path_text
from jmp_policy.nnx import _graph, _layers, _plan, _wrap
from jmp_policy.report import _summary
from jmp_policy.report._function import as_function


def summary(model: Any, policy: Any, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The `Summary` of an NNX module, from a trace of a call of it."""
    if policy is None:
        raise TypeError("summary needs a policy for an NNX module: summary(model, 'mixed_float16', inputs).")
    rules = as_policy_map(policy)
    # Of its own Variables: the model's parameters may be of another dtype than the policy's.
    copy = nnx.clone(model, graph=True)
    _plan.unwrap(model, copy)
    half = _wrap.wrap(_wrap.cast_params(copy, rules), rules)
    plan = _plan.make(copy, rules, ())
    calls = _taps.Calls()
    function = as_function(half, inputs, kwargs, "summary")

    def call(arrays: Any) -> Any:
        with _taps.looking(calls):
            return function.call(arrays)

    jaxpr = jax.make_jaxpr(call)(function.arrays)
    by_path: dict[str, list[Any]] = {}
    for made, _ in calls.calls:
        by_path.setdefault(made.name.partition("/")[2], []).append(made)
    modules = {place.path: place.module for place in plan.places}
    rows = [
        _row(rules, place, modules, by_path.get(path_text(place.path), ()))
        for place in plan.places
        if not isinstance(place.module, nnx.List | nnx.Dict | nnx.Rngs) or _own(place.module)
    ]
    return _summary.made(_plan.name_of(model), rules, rows, jaxpr)


def _row(rules: PolicyMap, place: _plan.Place, modules: dict[Any, Any], calls: Sequence[Any]) -> Any:
    module = place.module
    above = [path for depth in range(len(place.path), -1, -1) if (path := place.path[:depth]) in modules]
    matches = (rules.match(path, modules[path]) for path in above)
    index = next((i for i in matches if i is not None), None)
    rule = _summary.rule_text(rules, index, place.treatment)
    holder = modules[above[1]] if len(above) > 1 else None
    notes = _overruled(place, holder), _uncalled(place, calls)
    note = ", ".join(filter(None, notes))
    return _summary.row(path_text(place.path), type(module), rule, place.treatment, _own(module), calls, note)


def _overruled(place: _plan.Place, holder: Any) -> str:
    """What to say of a module that has a dtype of its own."""
    wish = _layers.wish(place.module, holder)
    if wish is None or (not place.keeps_dtype and wish == place.treatment.policy.compute_dtype):
        return ""
    return f"its dtype={jax.numpy.dtype(wish).name} is {'kept' if place.keeps_dtype else 'overruled'}"


def _uncalled(place: _plan.Place, calls: Sequence[Any]) -> str:
    return "" if calls or isinstance(place.module, nnx.List | nnx.Dict) else "not called"


def _own(module: Any) -> list[Any]:
    """The arrays of a module's own parameters."""
    return [leaf for _, param in _graph.own_params(module) for leaf in jax.tree.leaves(_graph.read(param))]
