"""What the rules mean for every module of an NNX model, worked out before anything is changed.

The idea::

    def visit(node, path, policy, outside):            # paths as in nnx.iter_graph: ("blocks", 0, "attn")
        if a rule matches path and node:
            policy = the first such rule's
        island = node is a norm, and no rule names it  # float32 inside a half-precision model
        modules[node] = path, policy, island, policy != outside
        for name, child in children(node):
            visit(child, (*path, name), policy, outside=policy)

    visit(model, (), rules.default, outside=None)

    for node, planned in modules.items():              # in `wrap_module`
        if settings suffice:                           # a layer of Flax
            node.dtype = planned.policy.compute_dtype
        else:
            node.__class__ = governed_class(type(node), planned.policy)

A module shared between places is visited at each of them, and its policy must be the same at all.
"""

import dataclasses
import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.core.dtypes import cast_floating, is_half
from jmp_policy._src.flax.nnx import graph_nodes, layers, plan_errors
from jmp_policy._src.flax.nnx.graph_nodes import Path, bare_class, governed_methods, name_of
from jmp_policy._src.policy.module_precision import ModulePrecision, policy_changes
from jmp_policy._src.policy.patterns import singles_out, unused_error
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import last_blocks
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike, any_is_nvfp4, as_policy_map, path_text

#: A model whose modules are met at more paths than this shares them in a way no rules can be resolved for.
_MOST_PATHS = 100_000


@dataclasses.dataclass(frozen=True)
class PlannedModule:
    """One module, the path at which it was met first, and what the rules mean for it.

    Args:
      policy_changes: whether code under another policy calls it, so that its output dtype applies.
      keeps_dtype: whether the `dtype` that it was made with wins over the policy.
    """

    path: Path
    module: Any
    precision: ModulePrecision
    policy_changes: bool
    keeps_dtype: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of a model.

    Args:
      model: a copy of it, over the same Variables and of bare classes.
      rules: for its modules.
      methods: names of the methods that are governed beside `__call__`.
      modules: its modules, by identity.
      met: path and module of every visit.
    """

    model: Any
    rules: PolicyMap
    methods: tuple[str, ...]
    modules: dict[int, PlannedModule]
    met: list[tuple[Path, Any]]

    @functools.cached_property
    def last_blocks(self) -> frozenset[str]:
        """The last of its numbered blocks, where a recipe asks for them."""
        if not any_is_nvfp4(self.rules):
            return frozenset()
        return last_blocks([*map(str, path)] for path, *_ in self.params())

    def check_used(self) -> None:
        """Raises for rules that match nothing."""
        bridges = [m for m in self.modules.values() if layers.linen_modules(m.module)]
        unused = [p for p in self.rules.unused(self.met) if not _may_match_inside(p, bridges)]
        if unused:
            raise unused_error(unused, name_of(self.model), (path_text(path) for path, _ in self.met))

    def params(self) -> Iterator[tuple[Path, Any, ModulePrecision]]:
        """Path, Variable and precision of each floating Param, for every module that has it as its own."""
        for planned in self.modules.values():
            for path, variable in graph_nodes.own_params(planned.module):
                yield (*planned.path, *path), variable, planned.precision

    def cast_params(self) -> None:
        """Casts the parameters to param dtype, in place: all of them, or none where a cast fails."""
        new = [
            (variable, cast_floating(graph_nodes.read(variable), precision.param_dtype))
            for _, variable, precision in self.params()
            if not _fits(variable, precision)
        ]
        for variable, value in new:
            graph_nodes.write(variable, value)

    def check_params(self) -> None:
        """Raises for parameters that are not in param dtype."""
        if wrong := [(path, v, p) for path, v, p in self.params() if not _fits(v, p)]:
            raise plan_errors.wrong_dtype(self.model, *wrong[0], others=len(wrong) - 1)


def make(module: Any, policy: PolicyMapLike, methods: tuple[str, ...]) -> Plan:
    """Makes the plan for a module; nothing of the module is changed.

    Raises:
      TypeError, ValueError: for what `wrap` raises them, unused rules and dtypes of parameters excepted.
    """
    if not isinstance(module, nnx.Module):
        raise plan_errors.not_a_module(module)
    rules = as_policy_map(policy, name_of(module))
    model = bare_copy(module, variables=False)
    plan = Plan(model, rules, methods, *resolve(model, rules))
    _check_methods(plan)
    _check_tied_params(plan)
    return plan


def resolve(model: Any, rules: PolicyMap) -> tuple[dict[int, PlannedModule], list[tuple[Path, Any]]]:
    """What the rules mean for each module of a model by its identity, and path and module of every visit."""
    walk = _Walk(rules)
    walk.visit(model, (), rules.default, None, None)
    return walk.modules, walk.met


def bare_copy(module: nnx.Module, *, variables: bool) -> Any:
    """A copy of a model without policies; with Variables of its own, or over the same ones.

    Raises:
      ValueError: for a function that is kept in an attribute and would stay with a module of the original.
    """
    old = [m for _, m in graph_nodes.walk(module) if isinstance(m, nnx.Module)]
    _check_stored_functions(old)
    copy = nnx.clone(module, variables=variables, graph=True)
    new = [m for _, m in graph_nodes.walk(copy) if isinstance(m, nnx.Module)]
    for before, after in zip(old, new, strict=True):
        vars(after).update(layers.without_settings(before))
        if bare_class(type(after)) is not type(after):
            object.__setattr__(after, "__class__", bare_class(type(after)))
    return copy


def _check_stored_functions(modules: list[Any]) -> None:
    """Raises for methods and partials that modules keep and that hold a module; warns of other functions."""
    with_state = {id(m) for m in modules if graph_nodes.variables(m)}

    def is_leaf(value: Any) -> bool:
        return graph_nodes.is_node(value) or isinstance(value, functools.partial)

    for module in modules:
        for name, value in vars(module).items():
            for keys, function in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_leaf):
                if graph_nodes.is_node(function) or not callable(function):
                    continue
                if with_state.isdisjoint(_held_by(function, {})):
                    continue
                where = f"{name_of(module)}.{name}{jax.tree_util.keystr(keys)}"
                if isinstance(function, types.MethodType | functools.partial):
                    raise plan_errors.stored_method(where)
                warnings.warn(plan_errors.closure(where), UserWarning, stacklevel=5)


def _held_by(value: Any, seen: dict[int, Any]) -> dict[int, Any]:
    """By identity, what a function is bound to, is given, wraps, closes over, or keeps in an attribute."""
    if id(value) in seen:
        return seen
    seen[id(value)] = value
    parts: list[Any] = []
    if isinstance(value, list | tuple):
        parts += value
    elif isinstance(value, dict):
        parts += value.values()
    elif callable(value) and not isinstance(value, type) and not graph_nodes.is_node(value):
        parts += [getattr(value, name, None) for name in _HELD_IN]
        cells = getattr(value, "__closure__", None) or ()
        parts += [cell.cell_contents for cell in cells if cell != types.CellType()]
        parts.append(getattr(value, "__dict__", None))
    for part in parts:
        _held_by(part, seen)
    return seen


#: Where functions, methods and partials keep what they need.
_HELD_IN = ("__self__", "__wrapped__", "__defaults__", "__kwdefaults__", "func", "args", "keywords")


class _Walk:
    """Resolves the rules at every path of every module."""

    def __init__(self, rules: PolicyMap):
        self.rules = rules
        self.modules: dict[int, PlannedModule] = {}
        self.met: list[tuple[Path, Any]] = []
        self._above: set[int] = set()

    def visit(self, node: Any, path: Path, policy: Policy, outside: Policy | None, holder: Any) -> None:
        """Notes a module met at a path, and what is below it.

        Args:
          node: the module, or another NNX object on the way to one.
          path: where it was met.
          policy: the policy of the nearest module above that has one.
          outside: the policy of the code that calls the module; None at the root.
          holder: the module above.
        """
        if id(node) in self._above:
            return  # A reference back up.
        known = id(node) in self.modules
        if isinstance(node, nnx.Module):
            planned, policy = self._resolve(node, path, policy, outside, holder)
            self._note(planned)
            outside, holder = planned.precision.policy, node
        if known and not self.rules.overrides:
            return
        self._above.add(id(node))
        for below, value in graph_nodes.children(node):
            if isinstance(value, nnx.Pytree):
                self.visit(value, (*path, *below), policy, outside, holder)
        self._above.discard(id(node))

    def _resolve(
        self, module: Any, path: Path, inherited: Policy, outside: Policy | None, holder: Any
    ) -> tuple[PlannedModule, Policy]:
        """What the rules mean for a module, and the policy that those below it inherit."""
        if isinstance(module, nnx.bridge.Module):
            raise plan_errors.makes_modules_when_called(module, path)
        rules = self.rules
        index = rules.match(path, module)
        policy = governing = inherited if index is None else rules.overrides[index][1]
        named = index is not None and singles_out(rules.overrides[index][0])
        asked_dtype = layers.asked_dtype(module, holder) if rules.keep_module_dtypes else None
        if asked_dtype is not None:
            # The module has a dtype of its own. Those below it say for themselves whether they have one.
            policy = governing.with_compute_dtype(asked_dtype)
        precision = rules.precision(policy, layers.is_island(module), index, named)
        keeps_float32 = rules.keep_small_inputs and asked_dtype is None and is_half(policy.compute_dtype)
        if keeps_float32 and layers.sums_few(module):
            precision = precision.as_island()
        is_boundary = policy_changes(outside, policy)
        return PlannedModule(path, module, precision, is_boundary, asked_dtype is not None), governing

    def _note(self, planned: PlannedModule) -> None:
        self.met.append((planned.path, planned.module))
        if len(self.met) > _MOST_PATHS:
            raise plan_errors.too_many_paths(_MOST_PATHS)
        first = self.modules.setdefault(id(planned.module), planned)
        if first.precision != planned.precision:
            policies = first.precision.policy, planned.precision.policy
            raise plan_errors.two_policies(planned.module, (first.path, planned.path), policies)
        if planned.policy_changes and not first.policy_changes:
            self.modules[id(planned.module)] = dataclasses.replace(first, policy_changes=True)


def _fits(variable: nnx.Variable, precision: ModulePrecision) -> bool:
    allowed = {precision.param_dtype}
    if precision.island:
        allowed.add(precision.policy.param_dtype)
    return graph_nodes.dtypes(variable) <= allowed


def _may_match_inside(pattern: Any, bridges: list[PlannedModule]) -> bool:
    """Whether a pattern may be meant for a module inside a bridged Linen module."""
    if isinstance(pattern, type) and issubclass(pattern, nnx.Module):
        return False
    alone = PolicyMap("float32", {pattern: "float32"})
    return any(alone.relative_to(bridge.path, alone.default).overrides for bridge in bridges)


def _check_methods(plan: Plan) -> None:
    classes = {type(planned.module) for planned in plan.modules.values()}
    for name in plan.methods:
        if not any(name in governed_methods(cls, (name,)) for cls in classes):
            raise plan_errors.unknown_method(name, plan.methods, classes)


def _check_tied_params(plan: Plan) -> None:
    first: dict[int, tuple[Path, Any]] = {}
    for path, variable, precision in plan.params():
        before, dtype = first.setdefault(id(variable), (path, precision.policy.param_dtype))
        if dtype != precision.policy.param_dtype:
            raise plan_errors.two_param_dtypes((before, path), (dtype, precision.policy.param_dtype))
