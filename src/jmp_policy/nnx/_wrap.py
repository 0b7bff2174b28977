"""An NNX module under a policy: a new tree of modules over the same Variables.

NNX has no interceptor. Layers of Flax follow a policy through their own `dtype` setting, everything else by
a subclass that casts (see `_governed`). Where settings suffice, the graph definition equals that of a layer
written by hand, and so do its programs.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from jmp_policy import linen
from jmp_policy._cast import cast_floating
from jmp_policy._dtypes import is_half, widened
from jmp_policy._loaded import is_instance_of
from jmp_policy._policy import Policy
from jmp_policy._rules import (
    PolicyMap,
    PolicyMapLike,
    as_policy_map,
    path_text,
    require_no_grad_dtype,
    unused_error,
)
from jmp_policy._treatment import Treatment
from jmp_policy._words import did_you_mean
from jmp_policy.nnx import _graph, _layers
from jmp_policy.nnx._governed import Specification, bare_class, governed_class, governed_methods, own_methods

M = TypeVar("M", bound=nnx.Module)


def wrap(module: M, policy: PolicyMapLike, *, methods: Sequence[str] = ()) -> M:
    """An NNX module that computes under a policy and shares every Variable with the original.

    Args:
      module: an instance of `flax.nnx.Module`; it is not changed. A wrapped module gets the new policy in
        place of its old one. Its parameters must be in param dtype already.
      policy: a `PolicyMap`, a `Policy` or its text. Paths are those of `nnx.iter_graph` ("blocks/0/attn").
      methods: names of further methods that are called from outside their module, as `__call__` is, and
        read parameters of its own: inputs, parameters and results are cast in them too. A method that
        `__call__` itself uses needs no mention.

    Returns:
      A module of the same structure over the same Variables: training one trains the other. Layers of Flax
      follow by their settings; other modules are instances of a subclass of their class.

    Raises:
      TypeError: for something that is no NNX module instance, or whose class cannot be subclassed.
      ValueError: for rules that match nothing, for rules that disagree on a module or parameter shared
        between places, for parameters that are not in param dtype, for unknown methods.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> bare = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> model = wrap(bare, "p=f32, c=bf16, o=bf16")
      >>> model(jnp.ones((1, 3))).dtype, model.kernel is bare.kernel
      (dtype(bfloat16), True)
    """
    plan = _plan(module, policy, tuple(methods))
    plan.check_used()
    plan.check_params()
    return plan.carried_out()


def wrap_part(module: M, rules: PolicyMap) -> tuple[M, list[tuple[_graph.Path, nnx.Module]]]:
    """An NNX module inside a larger model, whose rules are checked to match by whoever has the whole.

    Its parameters are cast to param dtype. The second result tells what the rules were asked about.
    """
    plan = _plan(module, rules, ())
    plan.cast_params()
    return plan.carried_out(), plan.seen


def cast_params(module: M, policy: PolicyMapLike) -> M:
    """Casts the parameters of an NNX model to the param dtype of a policy, in place.

    Args:
      module: a bare or wrapped module. Only floating `nnx.Param`s are cast; normalisation layers keep at
        least float32 where they are float32 islands.
      policy: as for `wrap`.

    Returns:
      The module itself.

    Raises:
      TypeError, ValueError: as `wrap` does, before anything is changed.
    """
    plan = _plan(module, policy, ())
    plan.check_used()
    plan.cast_params()
    return module


@dataclasses.dataclass(frozen=True)
class _Place:
    """One module of the new tree, where it was met first, and what the rules mean for it."""

    path: _graph.Path
    module: Any
    treatment: Treatment
    at_border: bool
    keeps_dtype: bool


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A copy of the module to be wrapped, over the same Variables and not changed yet."""

    module: Any
    rules: PolicyMap
    methods: tuple[str, ...]
    places: list[_Place]
    seen: list[tuple[_graph.Path, Any]]

    def carried_out(self) -> Any:
        """Makes every module follow its policy; returns the root."""
        needs_class = [self._needs_class(place) for place in self.places]
        for place, needed in zip(self.places, needs_class, strict=True):
            _warn_if_never_cast(place, self.methods)
            _apply(place, self.rules)
            if needed:
                spec = Specification(place.treatment, place.at_border, self.methods)
                cls = governed_class(type(place.module), spec)
                object.__setattr__(place.module, "__class__", cls)
        return self.module

    def _needs_class(self, place: _Place) -> bool:
        """Whether settings alone do not make a module do all that its policy says."""
        module, policy = place.module, place.treatment.policy
        if type(module) in (nnx.List, nnx.Dict):
            # Not called, but what it holds is read in the dtype that its own rule says.
            return next(_graph.own_params(module), None) is not None
        if not _layers.follows_by_itself(module, type(module)):
            return True
        output = policy.output_dtype if place.at_border else policy.compute_dtype
        if _layers.passes_on(module):
            return not self._is_uniform(module, policy) or output != policy.compute_dtype
        if _layers.is_bridge(module) or not place.at_border:
            return False
        return output != policy.compute_dtype or "dtype" not in vars(module)

    def _is_uniform(self, module: nnx.Module, policy: Policy) -> bool:
        """Whether a module and all below it are under one policy."""
        if not self.rules.overrides and not self.rules.keep_module_dtypes:
            return True
        policies = {id(place.module): place.treatment.policy for place in self.places}
        return all(policies[id(below)] == policy for below in _modules(module))

    def check_used(self) -> None:
        """Raises for rules that match nothing."""
        unused = self.rules.unused(self.seen)
        if any(_layers.is_bridge(place.module) for place in self.places):
            unused = tuple(pattern for pattern in unused if not _may_match_linen(pattern))
        if unused:
            raise unused_error(unused, _name(self.module), (path_text(path) for path, _ in self.seen))

    def params(self) -> Iterator[tuple[_graph.Path, Any, Treatment]]:
        """Path, Variable and treatment of the modules' own floating Params, at every place they have."""
        for place in self.places:
            for path, variable in _graph.own_params(place.module):
                yield (*place.path, *path), variable, place.treatment

    def cast_params(self) -> None:
        """Casts the parameters to param dtype, in place."""
        new = [
            (variable, cast_floating(_graph.read(variable), treatment.param_dtype))
            for _, variable, treatment in self.params()
            if not _fits(variable, treatment)
        ]
        for variable, value in new:
            _graph.write(variable, value)

    def check_params(self) -> None:
        """Raises for parameters that are not in param dtype."""
        wrong = [(path, v, t) for path, v, t in self.params() if not _fits(v, t)]
        if not wrong:
            return
        path, variable, treatment = wrong[0]
        stored = ", ".join(sorted(dtype.name for dtype in _graph.dtypes(variable)))
        others = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise ValueError(
            f"The parameter {path_text(path)!r}{others} of {_name(self.module)} is {stored}, but its policy "
            f"{str(treatment.policy)!r} wants parameters in {treatment.param_dtype.name}. Make the module "
            f"with param_dtype={treatment.param_dtype.name}, or call jmp_policy.nnx.cast_params(model, "
            "policy), which casts them in place, before wrap and before the optimizer is made."
        )


def _fits(variable: nnx.Variable, treatment: Treatment) -> bool:
    allowed = {treatment.param_dtype}
    if treatment.island:
        allowed.add(treatment.policy.param_dtype)
    return _graph.dtypes(variable) <= allowed


def _plan(module: Any, policy: PolicyMapLike, methods: tuple[str, ...]) -> _Plan:
    _check_is_module(module)
    rules = as_policy_map(policy)
    require_no_grad_dtype(rules)
    new = nnx.clone(module, variables=False, graph=True)
    _unwrap(module, new)
    walk = _Walk(rules)
    walk.visit(new, (), rules.default, None, None)
    places = list(walk.places.values())
    _check_methods(methods, places)
    plan = _Plan(new, rules, methods, places, walk.seen)
    _check_tied_params(plan)
    return plan


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
        hint = " Merge it first: nnx.merge(graphdef, state)." if isinstance(module, nnx.GraphDef) else ""
        raise TypeError(f"nnx.wrap takes a flax.nnx.Module, got {type(module).__name__}.{hint}")


def _name(module: Any) -> str:
    return bare_class(type(module)).__name__


def _may_match_linen(pattern: Any) -> bool:
    """Whether a pattern may be meant for a module inside a bridged Linen module."""
    return not isinstance(pattern, type) or not issubclass(pattern, nnx.Module)


def _warn_if_never_cast(place: _Place, methods: tuple[str, ...]) -> None:
    module, bare = place.module, type(place.module)
    is_holder = isinstance(module, nnx.List | nnx.Dict) or _layers.is_flax(bare)
    if is_holder or governed_methods(bare, methods) or next(_graph.own_params(module), None) is None:
        return
    public = tuple(sorted(name for name in own_methods(bare) if not name.startswith("_")))
    warnings.warn(
        f"{_name(module)} has parameters of its own and no __call__, so that nothing casts them. List the "
        f"methods that read them: jmp_policy.nnx.wrap(model, policy, methods={public!r}).",
        UserWarning,
        stacklevel=3,
    )


def _check_methods(methods: tuple[str, ...], places: list[_Place]) -> None:
    for name in methods:
        if not any(name in governed_methods(type(place.module), (name,)) for place in places):
            known = {m for place in places for m in dir(type(place.module)) if not m.startswith("_")}
            hint = did_you_mean(name, sorted(known))
            raise ValueError(f"methods={methods!r}: no module of this model defines {name!r}.{hint}")


def _unwrap(original: nnx.Module, copy: nnx.Module) -> None:
    """Makes bare modules of the copies of wrapped ones."""
    pairs = zip(_modules(original), _modules(copy), strict=True)
    for old, new in pairs:
        vars(new).update(_layers.without_settings(old))
        if bare_class(type(new)) is not type(new):
            object.__setattr__(new, "__class__", bare_class(type(new)))


def _modules(root: nnx.Module) -> list[nnx.Module]:
    found: dict[int, Any] = {id(root): root}

    def visit(node: Any) -> None:
        for _, value in _graph.children(node):
            if isinstance(value, nnx.Pytree) and id(value) not in found:
                found[id(value)] = value
                visit(value)

    visit(root)
    return [node for node in found.values() if isinstance(node, nnx.Module)]


class _Walk:
    """Resolves the rules at every path of every module."""

    def __init__(self, rules: PolicyMap):
        self.rules = rules
        self.places: dict[int, _Place] = {}
        self.seen: list[tuple[_graph.Path, Any]] = []
        self._open: set[int] = set()

    def visit(
        self, node: Any, path: _graph.Path, policy: Policy, outside: Policy | None, holder: Any
    ) -> None:
        """Notes a module met at a path, and what is below it.

        Args:
          node: the module, or another NNX object on the way to one.
          policy: the policy of the nearest module above that has one.
          outside: the policy of the code that calls the module; None at the root.
          holder: the module above.
        """
        if id(node) in self._open:
            return  # A reference back up.
        known = id(node) in self.places
        if isinstance(node, nnx.Module):
            if isinstance(node, nnx.bridge.Module):
                raise TypeError(
                    f"{_name(node)} at {path_text(path)!r} is a flax.nnx.bridge.Module, which makes its "
                    "submodules when it is called, where wrap cannot reach them. Write it as an nnx.Module."
                )
            place = self._resolve(node, path, policy, outside, holder)
            self._check_agrees(place)
            self.seen.append((path, node))
            policy, outside, holder = self._inherited(place, policy), place.treatment.policy, node
        if known and not self.rules.overrides:
            return
        self._open.add(id(node))
        for below, value in _graph.children(node):
            if isinstance(value, nnx.Pytree):
                self.visit(value, (*path, *below), policy, outside, holder)
        self._open.discard(id(node))

    def _resolve(
        self, module: Any, path: _graph.Path, inherited: Policy, outside: Policy | None, holder: Any
    ) -> _Place:
        rules = self.rules
        index = rules.match(path, module)
        policy = inherited if index is None else rules.overrides[index][1]
        named = index is not None and rules.names(index, module)
        wish = _layers.wish(module, holder) if rules.keep_module_dtypes else None
        if wish is not None:
            policy = dataclasses.replace(policy, compute_dtype=wish)
        half = is_half(policy.compute_dtype)
        island = rules.float32_islands and not named and half and _layers.is_island(module)
        return _Place(path, module, Treatment(policy, island), policy != outside, wish is not None)

    def _inherited(self, place: _Place, inherited: Policy) -> Policy:
        """A module's own wish is for itself alone; rules govern what is below, too."""
        index = self.rules.match(place.path, place.module)
        return inherited if index is None else self.rules.overrides[index][1]

    def _check_agrees(self, place: _Place) -> None:
        first = self.places.setdefault(id(place.module), place)
        if first.treatment != place.treatment:
            raise ValueError(
                f"{_name(place.module)} is shared: it is at {path_text(first.path)!r}, where the rules give "
                f"it {str(first.treatment.policy)!r}, and at {path_text(place.path)!r}, where they give it "
                f"{str(place.treatment.policy)!r}. Add a rule that gives both places the same policy."
            )


def _check_tied_params(plan: _Plan) -> None:
    first: dict[int, tuple[_graph.Path, np.dtype]] = {}
    for path, variable, treatment in plan.params():
        before, dtype = first.setdefault(id(variable), (path, treatment.policy.param_dtype))
        if widened(dtype) != widened(treatment.policy.param_dtype) or dtype != treatment.policy.param_dtype:
            raise ValueError(
                f"The parameter {path_text(before)!r} is shared with {path_text(path)!r}, and the rules want "
                f"it stored in {dtype.name} at the first and in {treatment.policy.param_dtype.name} at the "
                "second place. Give both the same param dtype."
            )


def _apply(place: _Place, rules: PolicyMap) -> None:
    """Sets what settings of a module of the new tree can say."""
    module, treatment = place.module, place.treatment
    new = _layers.settings(
        module, treatment, float32_islands=rules.float32_islands, keeps_dtype=place.keeps_dtype
    )
    if "dtype" in new:
        _layers.remember_own_dtype(module, vars(module)["dtype"])
    vars(module).update(new)
    if _layers.is_bridge(module):
        _govern_linen(place, rules)


def _govern_linen(place: _Place, rules: PolicyMap) -> None:
    """Puts the Linen module inside a bridge under the same rules, counted from where the bridge is."""
    policy = place.treatment.policy
    inside = rules.below(place.path, policy)
    if not place.at_border:
        inside = inside.handing_on(policy)
    vars(place.module)["to_nnx__module"] = linen.wrap_part(place.module.to_nnx__module, inside)
