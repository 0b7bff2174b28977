"""What `wrap` says of models that it cannot put under a policy, and of what it leaves without one."""

import functools
import types
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.core.classes import is_instance_of
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.suggest import did_you_mean
from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.flax.nnx.graph_nodes import Path, governed_methods, name_of, own_methods
from jmp_policy._src.policy.module_precision import ModulePrecision
from jmp_policy._src.policy.patterns import path_text, unused_error, wrapped_twice
from jmp_policy._src.policy.rules import PolicyMap


def not_a_module(given: Any) -> TypeError:
    """For what is no NNX module."""
    if isinstance(given, type) and issubclass(given, nnx.Module):
        call = f"wrap({given.__name__}(..., rngs=rngs), policy)"
        return TypeError(f"wrap takes a module, not its class: {call}.")
    if is_instance_of(given, "flax.linen", "Module"):
        return TypeError(
            f"{type(given).__name__} is a Linen module, and NNX was expected: use jmp_policy.wrap or "
            "jmp_policy.linen.wrap, or make it an NNX module with flax.nnx.bridge.ToNNX."
        )
    return TypeError(f"nnx.wrap takes a flax.nnx.Module, got {type(given).__name__}.")


def makes_modules_when_called(module: Any, path: Path) -> TypeError:
    """For a module whose submodules cannot be reached."""
    return TypeError(
        f"{name_of(module)} at {path_text(path)!r} is a flax.nnx.bridge.Module, which makes its "
        "submodules when it is called, where wrap cannot reach them. Write it as an nnx.Module."
    )


def check_methods(plan: Any) -> None:
    """Raises for a name among the methods of a plan that no module of its model defines."""
    classes = {type(planned.module) for planned in plan.modules.values()}
    for name in plan.methods:
        if not any(name in governed_methods(cls, (name,)) for cls in classes):
            known = {method for cls in classes for method in own_methods(cls) if not method.startswith("_")}
            hint = did_you_mean(name, sorted(known))
            raise ValueError(f"methods={plan.methods!r}: no module of this model defines {name!r}.{hint}")


def check_used(plan: Any) -> None:
    """Raises for rules of a plan that match nothing."""
    bridges = [m for m in plan.modules.values() if layers.linen_modules(m.module)]
    unused = [p for p in plan.rules.unused(plan.met) if not _may_match_inside(p, bridges)]
    if unused:
        raise unused_error(unused, name_of(plan.model), (path_text(path) for path, _ in plan.met))


def _may_match_inside(pattern: Any, bridges: list[Any]) -> bool:
    """Whether a pattern may be meant for a module inside a bridged Linen module."""
    if isinstance(pattern, type) and issubclass(pattern, nnx.Module):
        return False
    alone = PolicyMap("float32", {pattern: "float32"})
    return any(alone.relative_to(bridge.path, alone.default).overrides for bridge in bridges)


def check_nothing_is_lost(module: nnx.Module, plan: Any) -> None:
    """Raises where a module that is wrapped already would be under another policy from now on."""
    pairs = zip(nnx.iter_modules(module), nnx.iter_modules(plan.model), strict=True)
    for (path, old), (_, new) in sorted(pairs, key=lambda pair: len(pair[0][0])):
        spec, dtype = graph_nodes.own_specification(old), vars(old).get("dtype")
        # Layers of Flax follow by their settings alone. One without a dtype was added after the first wrap.
        is_set_anew = dtype is not None and dtype != vars(new)["dtype"]
        if is_set_anew or (spec and spec.precision != plan.modules[id(new)].precision):
            given = spec.precision.policy if spec else dtype
            raise wrapped_twice(path_text(path) or name_of(module), str(given), plan.rules)


def too_many_paths(most: int) -> ValueError:
    """For modules that hold each other in so many ways that rules cannot be resolved."""
    return ValueError(
        f"The modules of this model are shared so often that they are at more than {most} "
        "paths: rules cannot be resolved for all of them. Use one policy, or share less."
    )


def two_policies(first: Any, second: Any) -> ValueError:
    """For a module that the rules give another policy at its second path, as planned at both."""
    return ValueError(
        f"{name_of(first.module)} is shared: it is at {path_text(first.path)!r}, where the rules "
        f"give it {str(first.precision.policy)!r}, and at {path_text(second.path)!r}, where they give "
        f"it {str(second.precision.policy)!r}. Add a rule that gives both places the same policy."
    )


def wrong_dtype(
    model: Any, path: Path, variable: nnx.Variable, precision: ModulePrecision, *, others: int
) -> ValueError:
    """For a parameter that is not stored in param dtype, and that many others."""
    stored = ", ".join(sorted(dtype.name for dtype in graph_nodes.dtypes(variable)))
    more = f" (and {others} more)" if others else ""
    return ValueError(
        f"The parameter {path_text(path)!r}{more} of {name_of(model)} is {stored}, but its "
        f"policy {str(precision.policy)!r} wants parameters in {precision.param_dtype.name}. Make the "
        f"module with param_dtype={precision.param_dtype.name}, or call jmp_policy.nnx.cast_params("
        "model, policy), which casts them in place, before wrap and before the optimizer is made. One that "
        "modules share needs the same param dtype in all of them."
    )


def never_cast(module: Any) -> str:
    """For a module whose parameters no governed method reads."""
    public = tuple(sorted(name for name in own_methods(type(module)) if not name.startswith("_")))
    advice = (
        f"List the methods that read them: jmp_policy.nnx.wrap(model, policy, methods={public!r})."
        if public
        else "Cast them where they are read."
    )
    return (
        f"{name_of(module)} has parameters of its own and no __call__, so that nothing casts them. {advice}"
    )


def check_stored_functions(stored: Sequence[tuple[Any, str, Any, Any]], modules: Sequence[Any]) -> None:
    """Raises for methods and partials that modules keep and that hold a module; warns of other functions.

    It warns of all functions that hold a module with parameters which is not in the model, too.

    Args:
      stored: of each function: the module, the attribute, where in it the function is, and the function.
      modules: all modules of the model.
    """
    with_state, unseen = {id(m) for m in modules if graph_nodes.variables(m)}, list[str]()
    seen = {id(param) for module in modules for _, param in graph_nodes.own_params(module)}
    for module, name, keys, function in stored:
        held, where = _held_by(function, {}), f"{name_of(module)}.{name}{jax.tree_util.keystr(keys)}"
        if with_state.isdisjoint(held):
            first = next((x for key, x in held.items() if key not in seen and _is_unseen(x)), None)
            unseen += [f"{where} ({name_of(first)})"] if first is not None else []
            continue
        if isinstance(function, types.MethodType | functools.partial):
            raise ValueError(
                f"{where} is a bound method, or a functools.partial, that holds a module of the model. NNX "
                "copies models (nnx.jit and nnx.grad do, too), and such a function stays with the module "
                "that it was made with: no policy and no eval() reaches it, and its gradients are 0. Keep "
                "the name of the method and call getattr(self, name), or call the method where it is needed."
            )
        warnings.warn(
            f"The function {where} holds a module of the model, in its closure, its defaults or an "
            "attribute. It keeps the module without a policy: pass the module as an argument, or make the "
            "function a method.",
            UserWarning,
            stacklevel=5,
        )
    if unseen:
        others = f" and {len(unseen) - 1} more" * (len(unseen) > 1)
        warnings.warn(
            f"Functions of this model hold modules or parameters that are no attributes of it: {unseen[0]}"
            f"{others}. NNX does not see them, so that they are not trained, and no policy reaches them. "
            "Write such a function as an nnx.Module with the layers as its attributes; or, if they are not "
            "to be trained, wrap those layers too.",
            UserWarning,
            stacklevel=5,
        )


def _is_unseen(node: Any) -> bool:
    """Whether it is a parameter, or has one in a module without a policy, that is not in half by itself."""
    if isinstance(node, nnx.Param):
        return not all(map(is_half, graph_nodes.dtypes(node)))
    if not isinstance(node, nnx.Module):
        return False
    modules = [module for _, module in nnx.iter_modules(node)]
    wrapped = [module for module in modules if graph_nodes.own_specification(module) is not None]
    governed = {id(module) for top in wrapped for _, module in nnx.iter_modules(top)}
    return any(
        _is_unseen(param)
        for module in modules
        if id(module) not in governed and not is_half(getattr(module, "dtype", None))
        if module is node or not isinstance(module, layers.NORMS)  # In float32 beside layers in half.
        for _, param in graph_nodes.own_params(module)
    )


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
    for part in parts:
        _held_by(part, seen)
    return seen


#: Where functions, methods and partials keep what they need.
_HELD_IN = (
    "__self__", "__wrapped__", "__defaults__", "__kwdefaults__", "__dict__", "func", "args", "keywords"
)  # fmt: skip
