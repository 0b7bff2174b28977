"""What the rules mean for every module of an NNX model, worked out before anything is changed."""

import dataclasses
import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import cast_floating
from jmp_policy._src.core.imported import is_instance_of
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.flax.nnx.governed import bare_class, governed_methods, own_methods
from jmp_policy._src.policy.module_precision import ModulePrecision, policy_changes
from jmp_policy._src.policy.patterns import singles_out, unused_error
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import (
    PolicyMap,
    PolicyMapLike,
    as_policy_map,
    path_text,
)
from jmp_policy._src.weight_grads.param_casts import wants_fp32_weight_grads

#: A model whose modules are met at more paths than this shares them in a way no rules can be resolved for.
_MOST_PATHS = 100_000


@dataclasses.dataclass(frozen=True)
class Place:
    """One module of the new tree, where it was met first, and what the rules mean for it."""

    path: graph_nodes.Path
    module: Any
    precision: ModulePrecision
    policy_changes: bool
    keeps_dtype: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """A copy of the module to be wrapped, over the same Variables and of bare classes."""

    module: Any
    rules: PolicyMap
    methods: tuple[str, ...]
    places: list[Place]
    seen: list[tuple[graph_nodes.Path, Any]]

    def needs_class(self, place: Place) -> bool:
        """Returns whether settings alone do not make a module do all that its policy says."""
        module, policy = place.module, place.precision.policy
        if type(module) in (nnx.List, nnx.Dict):
            # Not called, but what it holds is read in the dtype that its own rule says.
            return next(graph_nodes.own_params(module), None) is not None
        if wants_fp32_weight_grads(policy) or not layers.follows_by_itself(module, type(module)):
            return True
        output = policy.output_dtype if place.policy_changes else policy.compute_dtype
        if layers.passes_on(module):
            return not self._is_uniform(module, policy) or output != policy.compute_dtype
        if isinstance(module, nnx.Sequential):
            return True
        if layers.is_bridge(module) or not place.policy_changes:
            return False
        return output != policy.compute_dtype or "dtype" not in vars(module)

    def _is_uniform(self, module: nnx.Module, policy: Policy) -> bool:
        """Returns whether a module and all below it are under one policy."""
        if not self.rules.overrides and not self.rules.keep_module_dtypes:
            return True
        policies = {id(place.module): place.precision.policy for place in self.places}
        return all(policies[id(below)] == policy for below in _modules(module).values())

    def check_used(self) -> None:
        """Raises for rules that match nothing."""
        bridges = [place for place in self.places if layers.linen_modules(place.module)]
        unused = [p for p in self.rules.unused(self.seen) if not self._may_match_inside(p, bridges)]
        if unused:
            raise unused_error(unused, name_of(self.module), (path_text(path) for path, _ in self.seen))

    def _may_match_inside(self, pattern: Any, bridges: list[Place]) -> bool:
        """Returns whether a pattern may be meant for a module inside a bridged Linen module."""
        if isinstance(pattern, type) and issubclass(pattern, nnx.Module):
            return False
        alone = PolicyMap("float32", {pattern: "float32"})
        return any(alone.relative_to(place.path, alone.default).overrides for place in bridges)

    def params(self) -> Iterator[tuple[graph_nodes.Path, Any, ModulePrecision]]:
        """Yields path, Variable and precision of the modules' own floating Params, at every place."""
        for place in self.places:
            for path, variable in graph_nodes.own_params(place.module):
                yield (*place.path, *path), variable, place.precision

    def cast_params(self) -> None:
        """Casts the parameters to param dtype, in place."""
        new = [
            (variable, cast_floating(graph_nodes.read(variable), precision.param_dtype))
            for _, variable, precision in self.params()
            if not _fits(variable, precision)
        ]
        for variable, value in new:
            graph_nodes.write(variable, value)

    def check_params(self) -> None:
        """Raises for parameters that are not in param dtype."""
        wrong = [(path, v, t) for path, v, t in self.params() if not _fits(v, t)]
        if not wrong:
            return
        path, variable, precision = wrong[0]
        stored = ", ".join(sorted(dtype.name for dtype in graph_nodes.dtypes(variable)))
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"The parameter {path_text(path)!r}{others} of {name_of(self.module)} is {stored}, but its "
            f"policy {str(precision.policy)!r} wants parameters in {precision.param_dtype.name}. Make the "
            f"module with param_dtype={precision.param_dtype.name}, or call jmp_policy.nnx.cast_params("
            "model, policy), which casts them in place, before wrap and before the optimizer is made."
        )


def make(module: Any, policy: PolicyMapLike, methods: tuple[str, ...]) -> Plan:
    """Makes the plan for a module; nothing of the module is changed.

    Raises:
      TypeError, ValueError: for what `wrap` raises them, unused rules and dtypes of parameters excepted.
    """
    _check_is_module(module)
    rules = as_policy_map(policy)
    new = nnx.clone(module, variables=False, graph=True)
    unwrap(module, new)
    walk = _Walk(rules)
    walk.visit(new, (), rules.default, None, None)
    places = list(walk.places.values())
    _check_methods(methods, places)
    plan = Plan(new, rules, methods, places, walk.seen)
    _check_tied_params(plan)
    return plan


def resolved(module: Any, rules: PolicyMap) -> tuple[dict[int, Place], list[tuple[graph_nodes.Path, Any]]]:
    """Returns what the rules mean for each module of a model by its identity, and the modules met."""
    walk = _Walk(rules)
    walk.visit(module, (), rules.default, None, None)
    return walk.places, walk.seen


def name_of(module: Any) -> str:
    """Returns the class name of a module, as its author wrote it."""
    return bare_class(type(module)).__name__


def never_cast(place: Place, methods: tuple[str, ...]) -> str | None:
    """Returns what to say of a module whose own parameters no governed method reads; or None."""
    module, bare = place.module, type(place.module)
    is_holder = isinstance(module, nnx.List | nnx.Dict) or layers.is_flax(bare)
    if is_holder or governed_methods(bare, methods) or next(graph_nodes.own_params(module), None) is None:
        return None
    public = tuple(sorted(name for name in own_methods(bare) if not name.startswith("_")))
    advice = (
        f"List the methods that read them: jmp_policy.nnx.wrap(model, policy, methods={public!r})."
        if public
        else "Cast them where they are read."
    )
    return (
        f"{name_of(module)} has parameters of its own and no __call__, so that nothing casts them. {advice}"
    )


def _fits(variable: nnx.Variable, precision: ModulePrecision) -> bool:
    allowed = {precision.param_dtype}
    if precision.island:
        allowed.add(precision.policy.param_dtype)
    return graph_nodes.dtypes(variable) <= allowed


def _check_is_module(module: Any) -> None:
    if isinstance(module, type) and issubclass(module, nnx.Module):
        raise TypeError(
            f"wrap takes a module, not its class: wrap({module.__name__}(..., rngs=rngs), policy)."
        )
    if is_instance_of(module, "flax.linen", "Module"):
        raise TypeError(
            f"{type(module).__name__} is a Linen module, and NNX was expected: use jmp_policy.wrap or "
            "jmp_policy.linen.wrap, or make it an NNX module with flax.nnx.bridge.ToNNX."
        )
    if not isinstance(module, nnx.Module):
        hints = (
            (nnx.GraphDef, " Merge it first: nnx.merge(graphdef, state)."),
            (nnx.Optimizer, " Wrap the model, and make the optimizer from the wrapped one."),
            (nnx.Variable, " Wrap the module that holds it."),
        )
        hint = next((text for cls, text in hints if isinstance(module, cls)), "")
        raise TypeError(f"nnx.wrap takes a flax.nnx.Module, got {type(module).__name__}.{hint}")


def _check_methods(methods: tuple[str, ...], places: list[Place]) -> None:
    for name in methods:
        if not any(name in governed_methods(type(place.module), (name,)) for place in places):
            known = {m for place in places for m in own_methods(type(place.module)) if not m.startswith("_")}
            hint = did_you_mean(name, sorted(known))
            raise ValueError(f"methods={methods!r}: no module of this model defines {name!r}.{hint}")


def unwrap(original: nnx.Module, copy: nnx.Module) -> None:
    """Makes bare modules of the copies of wrapped ones, and lets them hold each other."""
    olds, news = _modules(original), _modules(copy)
    new_of = {id(old): new for old, new in zip(olds.values(), news.values(), strict=True)}
    for old, new in zip(olds.values(), news.values(), strict=True):
        vars(new).update(layers.without_settings(old))
        if bare_class(type(new)) is not type(new):
            object.__setattr__(new, "__class__", bare_class(type(new)))
        for name, value in vars(new).items():
            if callable(value) and not graph_nodes.is_node(value):
                vars(new)[name] = _rebound(value, new_of, f"{name_of(new)}.{name}")


def _rebound(function: Any, new_of: dict[int, Any], where: str) -> Any:
    """Binds a method or partial that a module keeps to the new modules; warns of a closure."""
    if isinstance(function, types.MethodType) and id(function.__self__) in new_of:
        return types.MethodType(function.__func__, new_of[id(function.__self__)])
    if isinstance(function, functools.partial):
        inner = _rebound(function.func, new_of, where)
        args = [new_of.get(id(x), x) for x in function.args]
        kwargs = {key: new_of.get(id(x), x) for key, x in function.keywords.items()}
        values = (*args, *kwargs.values())
        before = (*function.args, *function.keywords.values())
        if inner is function.func and all(a is b for a, b in zip(values, before, strict=True)):
            return function
        return functools.partial(inner, *args, **kwargs)
    cells = getattr(function, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if cell != types.CellType()]
    if any(id(x) in new_of for x in held):
        warnings.warn(
            f"The function {where} closes over a module of the model. It keeps the module without a policy: "
            "pass the module as an argument, or make the function a method.",
            UserWarning,
            stacklevel=6,
        )
    return function


def _modules(root: nnx.Module) -> dict[int, Any]:
    """Returns the modules of a model by identity, each where it is met first."""
    found: dict[int, Any] = {id(root): root}

    def visit(node: Any) -> None:
        for _, value in graph_nodes.children(node):
            if isinstance(value, nnx.Pytree) and id(value) not in found:
                found[id(value)] = value
                visit(value)

    visit(root)
    return {key: node for key, node in found.items() if isinstance(node, nnx.Module)}


class _Walk:
    """Resolves the rules at every path of every module."""

    def __init__(self, rules: PolicyMap):
        self.rules = rules
        self.places: dict[int, Place] = {}
        self.seen: list[tuple[graph_nodes.Path, Any]] = []
        self._open: set[int] = set()

    def visit(
        self, node: Any, path: graph_nodes.Path, policy: Policy, outside: Policy | None, holder: Any
    ) -> None:
        """Notes a module met at a path, and what is below it.

        Args:
          node: the module, or another NNX object on the way to one.
          path: where it was met.
          policy: the policy of the nearest module above that has one.
          outside: the policy of the code that calls the module; None at the root.
          holder: the module above.
        """
        if id(node) in self._open:
            return  # A reference back up.
        known = id(node) in self.places
        if isinstance(node, nnx.Module):
            place, policy = self._resolve(node, path, policy, outside, holder)
            self._note(place)
            outside, holder = place.precision.policy, node
        if known and not self.rules.overrides:
            return
        self._open.add(id(node))
        for below, value in graph_nodes.children(node):
            if isinstance(value, nnx.Pytree):
                self.visit(value, (*path, *below), policy, outside, holder)
        self._open.discard(id(node))

    def _resolve(
        self, module: Any, path: graph_nodes.Path, inherited: Policy, outside: Policy | None, holder: Any
    ) -> tuple[Place, Policy]:
        """Returns what the rules mean for a module, and the policy that those below it inherit."""
        if isinstance(module, nnx.bridge.Module):
            raise TypeError(
                f"{name_of(module)} at {path_text(path)!r} is a flax.nnx.bridge.Module, which makes its "
                "submodules when it is called, where wrap cannot reach them. Write it as an nnx.Module."
            )
        rules = self.rules
        index = rules.match(path, module)
        policy = governing = inherited if index is None else rules.overrides[index][1]
        named = index is not None and singles_out(rules.overrides[index][0])
        asked_dtype = layers.asked_dtype(module, holder) if rules.keep_module_dtypes else None
        if asked_dtype is not None:
            # A asked_dtype of its own; those below have theirs.
            policy = governing.with_compute_dtype(asked_dtype)
        precision = rules.precision(policy, layers.is_island(module), index, named)
        is_boundary = policy_changes(outside, policy)
        return Place(path, module, precision, is_boundary, asked_dtype is not None), governing

    def _note(self, place: Place) -> None:
        self.seen.append((place.path, place.module))
        if len(self.seen) > _MOST_PATHS:
            raise ValueError(
                f"The modules of this model are shared so often that they are at more than {_MOST_PATHS} "
                "paths: rules cannot be resolved for all of them. Use one policy, or share less."
            )
        first = self.places.setdefault(id(place.module), place)
        if first.precision != place.precision:
            raise ValueError(
                f"{name_of(place.module)} is shared: it is at {path_text(first.path)!r}, where the rules "
                f"give it {str(first.precision.policy)!r}, and at {path_text(place.path)!r}, where they give "
                f"it {str(place.precision.policy)!r}. Add a rule that gives both places the same policy."
            )
        if place.policy_changes and not first.policy_changes:
            self.places[id(place.module)] = dataclasses.replace(first, policy_changes=True)


def _check_tied_params(plan: Plan) -> None:
    first: dict[int, tuple[graph_nodes.Path, np.dtype]] = {}
    for path, variable, precision in plan.params():
        before, dtype = first.setdefault(id(variable), (path, precision.policy.param_dtype))
        if dtype != precision.policy.param_dtype:
            raise ValueError(
                f"The parameter {path_text(before)!r} is shared with {path_text(path)!r}, and the rules want "
                f"it stored in {dtype.name} at the first and in {precision.policy.param_dtype.name} at the "
                "second place. Give both the same param dtype."
            )
