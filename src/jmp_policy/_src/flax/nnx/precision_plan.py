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

A module shared between places is visited at each of them, and its policy must be the same at all.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.flax.nnx import graph_nodes, layers, plan_errors
from jmp_policy._src.flax.nnx.graph_nodes import Path, bare_class, name_of
from jmp_policy._src.policy.module_precision import ModulePrecision, policy_changes
from jmp_policy._src.policy.patterns import singles_out
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.recipes import last_blocks
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike, any_is_nvfp4, as_policy_map

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


class Plan:
    """What becomes of the modules of a model.

    Args:
      model: the model, of bare classes; `make` gives a plan for a copy of it, over the same Variables.
      rules: for its modules.
      methods: names of the methods that are governed beside `__call__`.

    Attributes:
      modules: its modules, by identity.
      met: path and module of every visit.
    """

    def __init__(self, model: Any, rules: PolicyMap, methods: tuple[str, ...] = ()):
        self.model, self.rules, self.methods = model, rules, methods
        self.modules: dict[int, PlannedModule] = {}
        self.met: list[tuple[Path, Any]] = []
        self._above: set[int] = set()
        self._visit(model, (), rules.default, None, None)

    def _visit(self, node: Any, path: Path, policy: Policy, outside: Policy | None, holder: Any) -> None:
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
            planned, policy = self._resolved(node, path, policy, outside, holder)
            self._note(planned)
            outside, holder = planned.precision.policy, node
        if known and not self.rules.overrides:
            return
        self._above.add(id(node))
        for below, value in graph_nodes.children(node):
            if isinstance(value, nnx.Pytree):
                self._visit(value, (*path, *below), policy, outside, holder)
        self._above.discard(id(node))

    def _resolved(
        self, module: Any, path: Path, inherited: Policy, outside: Policy | None, holder: Any
    ) -> tuple[PlannedModule, Policy]:
        """What the rules mean for a module, and the policy that those below it inherit."""
        if isinstance(module, nnx.bridge.Module):
            raise plan_errors.makes_modules_when_called(module, path)
        rules, policy, named = self.rules, inherited, False
        index = rules.match(path, module) if rules.overrides else None
        if index is not None:
            pattern, policy = rules.overrides[index]
            named = singles_out(pattern)
        governing = policy
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
            raise plan_errors.two_policies(first, planned)
        if planned.policy_changes and not first.policy_changes:
            self.modules[id(planned.module)] = dataclasses.replace(first, policy_changes=True)

    @functools.cached_property
    def last_blocks(self) -> frozenset[str]:
        """The last of its numbered blocks, where a recipe asks for them."""
        if not any_is_nvfp4(self.rules):
            return frozenset()
        return last_blocks([*map(str, path)] for path, *_ in self.params())

    def params(self) -> Iterator[tuple[Path, Any, ModulePrecision]]:
        """Path, Variable and precision of each floating Param, for every module that has it as its own."""
        for planned in self.modules.values():
            for path, variable in graph_nodes.own_params(planned.module):
                yield (*planned.path, *path), variable, planned.precision

    def wrong_params(self) -> list[tuple[Path, Any, ModulePrecision]]:
        """Those that are not stored in param dtype."""
        return [(path, variable, p) for path, variable, p in self.params() if not _fits(variable, p)]


def _fits(variable: nnx.Variable, precision: ModulePrecision) -> bool:
    return graph_nodes.dtypes(variable) <= {
        precision.param_dtype,
        precision.policy.param_dtype,  # Of an island it may be either.
    }


def make(module: Any, policy: PolicyMapLike, methods: tuple[str, ...]) -> Plan:
    """Makes the plan for a module; nothing of the module is changed.

    Raises:
      TypeError, ValueError: for what `wrap` raises them, unused rules and dtypes of parameters excepted.
    """
    if not isinstance(module, nnx.Module):
        raise plan_errors.not_a_module(module)
    rules = as_policy_map(policy, name_of(module))
    plan = Plan(bare_copy(module, variables=False), rules, methods)
    if methods:
        plan_errors.check_methods(plan)
    return plan


def bare_copy(module: nnx.Module, *, variables: bool) -> Any:
    """A copy of a model without policies; with Variables of its own, or over the same ones.

    Raises:
      ValueError: for a function that is kept in an attribute and would stay with a module of the original.
    """
    old = [m for _, m in graph_nodes.walk(module) if isinstance(m, nnx.Module)]
    stored = [
        (m, name, keys, function)
        for m in old
        for name, value in vars(m).items()
        for keys, function in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_node_or_partial)
        if layers.is_users_function(function)
    ]
    if stored:
        plan_errors.check_stored_functions(stored, old)
    copy = nnx.clone(module, variables=variables, graph=True)
    new = [m for _, m in graph_nodes.walk(copy) if isinstance(m, nnx.Module)]
    for before, after in zip(old, new, strict=True):
        vars(after).update(layers.without_settings(before))
        if bare_class(type(after)) is not type(after):
            object.__setattr__(after, "__class__", bare_class(type(after)))
    return copy


def _is_node_or_partial(value: Any) -> bool:
    return graph_nodes.is_node(value) or isinstance(value, functools.partial)
