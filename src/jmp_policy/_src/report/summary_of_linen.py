"""The rows of a summary, for Linen modules."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.dtypes import is_dtype_or_none
from jmp_policy._src.flax.linen.framework import FRAMEWORK, bare, intercept, policy_of
from jmp_policy._src.flax.linen.governing import governed
from jmp_policy._src.flax.linen.layers import has_dtype_of_parent
from jmp_policy._src.flax.linen.unused_rules import check_used
from jmp_policy._src.flax.linen.wrapped import bare_class
from jmp_policy._src.policy.frameworks import looking
from jmp_policy._src.policy.recipes import recipe_note
from jmp_policy._src.policy.rules import PolicyMap, as_policy_map
from jmp_policy._src.policy.scope import ACTIVE
from jmp_policy._src.report import tapping
from jmp_policy._src.report.function import as_function


def described(
    model: nn.Module, policy: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, PolicyMap, list[Any], Any]:
    """The name, rules, rows (as arguments of `make_row`) and jaxpr, from traces of `init` and `apply`."""
    rules = policy_of(model) if policy is None else as_policy_map(policy, bare_class(model).__name__)
    if rules is None:
        raise TypeError("summary needs a policy for a bare module: summary(model, 'mixed_float16', inputs).")
    model = bare(model)
    key = jax.random.key(0)
    under_rules = intercept(rules)

    def init(*inputs: Any, **kwargs: Any) -> Any:
        with under_rules:
            return model.init({"params": key, "dropout": key}, *inputs, **kwargs)

    start = as_function(init, inputs, kwargs, "summary")
    variables = jax.eval_shape(start.call, start.arrays)
    mutable = [collection for collection in variables if collection != "params"]

    def note(module: Any) -> Any:
        if not isinstance(module, nn.Module):
            return None  # An NNX module is a part of its bridge.
        scope = ACTIVE.value
        precision, location = governed(scope, module)
        path = scope.relative(location.path)
        is_dense = isinstance(module, nn.Dense | nn.DenseGeneral)
        recipe = recipe_note(precision, path, module.features, scope.last) if is_dense else ""
        own = getattr(module, "dtype", None)
        is_own = own is not None and is_dtype_or_none(own) and not has_dtype_of_parent(module)
        return bare_class(module), precision, location, own if is_own else None, recipe

    calls = tapping.Calls(note)

    def apply(variables: Any, *inputs: Any, **kwargs: Any) -> Any:
        # What comes first is outermost: it sees what callers give and get.
        with FRAMEWORK.tapped(), looking(calls), under_rules as scope:
            out = model.apply(
                variables, *inputs, rngs={"params": key, "dropout": key}, mutable=mutable, **kwargs
            )
        check_used(model, rules, scope, check_all=True, variables=variables)
        calls.done()
        return out

    jaxpr = as_function(apply, (variables, *inputs), kwargs, "summary").jaxpr()
    noted = [(call, note) for call, note in calls.calls if note is not None]
    return type(model).__name__, rules, _rows(rules, variables, noted), jaxpr


def _rows(rules: PolicyMap, variables: Any, calls: Sequence[Any]) -> list[Any]:
    by_path: dict[tuple[str, ...], list[Any]] = {}
    for call, note in calls:
        by_path.setdefault(note[2].path, []).append((call, note))
    # A module returns after those inside it; it is to stand before them.
    first: dict[tuple[str, ...], int] = {}
    for i, path in enumerate(by_path):
        for depth in range(len(path) + 1):
            first.setdefault(path[:depth], i)
    rows, own = [], _own_parameters(variables.get("params", {}), by_path)
    for path in sorted(by_path, key=lambda path: [first[path[:depth]] for depth in range(len(path) + 1)]):
        (_, (cls, precision, location, dtype, recipe)), *_ = by_path[path]
        module = "/".join(path), cls, rules, location.rule, precision, own.get(path, ())
        rows.append((*module, [c for c, _ in by_path[path]], dtype, rules.keep_module_dtypes, [recipe]))
    return rows


def _own_parameters(params: Any, paths: Any) -> dict[tuple[str, ...], list[Any]]:
    """The parameters of each module: those of which no module further down is the owner."""
    own: dict[tuple[str, ...], list[Any]] = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(str(getattr(key, "key", key)) for key in key_path)
        owner = next(names[:depth] for depth in range(len(names), -1, -1) if names[:depth] in paths)
        own.setdefault(owner, []).append(leaf)
    return own
