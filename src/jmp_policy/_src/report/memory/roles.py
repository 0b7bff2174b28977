"""Tells parameters, optimizer state and inputs apart among the arguments of a training step."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jmp_policy._src.core.imported import imported_attr
from jmp_policy._src.jaxpr.flatten import is_array
from jmp_policy._src.report.function import Argument, Function


def argument_roles(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Returns the category of each array among the arguments: parameters, optimizer state or inputs."""
    if function.has_state:
        state = [_is_named(argument, "opt_state") for argument in function.arguments]
        trains = _of_modules(function, args, kwargs)
    else:
        state = _optimizer_state(function, args, kwargs)
        trains = _trained(function, state)
    return [
        "optimizer state" if is_state else "parameters" if is_trained else "inputs"
        for is_state, is_trained in zip(state, trains, strict=True)
    ]


def _is_named(argument: Argument, name: str) -> bool:
    """Returns whether a name is on the path of an array."""
    return name in argument.path.split("/")


def _of_modules(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """Returns which arrays are Params of NNX modules."""
    holders = {
        place: _holds_nodes(args[place] if isinstance(place, int) else kwargs[place])
        for place in {argument.position for argument in function.arguments}
    }
    return [argument.trainable and holders[argument.position] for argument in function.arguments]


def _optimizer_state(function: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> list[bool]:
    """Returns which arrays are optimizer state: by their name, or since a state of optax holds them."""
    tree = (tuple(args), kwargs)
    marked = jax.tree.map(lambda node: jax.tree.map(lambda _: _is_state(node), node), tree, is_leaf=_is_state)
    marks = zip(jax.tree.leaves(tree), jax.tree.leaves(marked), strict=True)
    below = [mark for leaf, mark in marks if is_array(leaf)]
    return [
        _is_named(argument, "opt_state") or mark
        for argument, mark in zip(function.arguments, below, strict=True)
    ]


def _trained(function: Function, state: Sequence[bool]) -> list[bool]:
    """Returns which arrays are parameters: below the name `params`, or by what comes out again."""
    fits = [a.trainable and not is_state for a, is_state in zip(function.arguments, state, strict=True)]
    named = [fit and _is_named(a, "params") for fit, a in zip(fits, function.arguments, strict=True)]
    return named if any(named) else _first_trained(function, fits)


def _holds_nodes(argument: Any) -> bool:
    """Returns whether an argument is a module of NNX or has one inside."""
    kinds = tuple(filter(None, (imported_attr("flax.nnx", "Pytree"), imported_attr("flax.nnx", "Variable"))))
    leaves = jax.tree.leaves(argument, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def _is_state(node: Any) -> bool:
    """Returns whether a node of the arguments is a state of an optax transformation, ours included."""
    return hasattr(node, "_fields") and type(node).__module__.partition(".")[0] in ("optax", "jmp_policy")


def _first_trained(function: Function, fits: Sequence[bool]) -> list[bool]:
    """Returns which arrays are those of the first argument that comes out again; else of the first."""
    results = jax.tree.leaves(jax.eval_shape(function.call, function.arrays))
    made = Counter((tuple(t.shape), t.dtype) for t in results)
    groups: dict[int | str, Counter[Any]] = {}
    for argument, array, fit in zip(function.arguments, function.arrays, fits, strict=True):
        if fit:
            groups.setdefault(argument.position, Counter())[tuple(array.shape), array.dtype] += 1
    chosen = next((place for place, types in groups.items() if types <= made), next(iter(groups), None))
    return [fit and a.position == chosen for a, fit in zip(function.arguments, fits, strict=True)]
