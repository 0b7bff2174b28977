"""Tells the state that float8 layers keep in gradients from gradients.

Flax's float8 layers return the new values of their scales and amax histories as cotangents, in a collection
of their own. They are no derivatives: nothing may multiply, divide or average them. Flax's `TrainState` hides
the collection from the optimizer; an optimizer that gets it with the parameters sees zeros, and the updates
are what makes the new values of the old ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_policy._src.core.types import PyTree

#: The collection's name, `flax.linen.fp8_ops.OVERWRITE_WITH_GRADIENT`.
COLLECTION = "_overwrite_with_gradient"


def is_overwritten(path: Sequence[Any]) -> bool:
    """Returns whether the keys of a leaf lead into the collection."""
    return any(getattr(key, "key", None) == COLLECTION for key in path)


def _flatten(tree: PyTree) -> tuple[list[tuple[bool, Any]], Any]:
    """Returns each leaf with whether it is in the collection, and the tree's structure."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(is_overwritten(path), leaf) for path, leaf in leaves], treedef


def derivatives(tree: PyTree) -> PyTree:
    """Returns gradients with None in the places of what is not one."""
    return map_derivatives(lambda x: x, tree, lambda x: None)


def zeros_for_state(grads: PyTree) -> PyTree:
    """Returns gradients with zeros in the places of what is not one."""
    return map_derivatives(lambda x: x, grads, jnp.zeros_like)


def with_new_state(updates: PyTree, grads: PyTree, params: PyTree) -> PyTree:
    """Returns updates that turn the state among the parameters into that among the gradients.

    Raises:
      ValueError: where there is such state, and no parameters were given.
    """
    if not any(apart for apart, _ in _flatten(grads)[0]):
        return updates
    if params is None:
        raise ValueError(
            f"The gradients hold new values of {COLLECTION!r}, the state of float8 layers, and update got no "
            "parameters to compare them with: tx.update(grads, state, params)."
        )
    return map_derivatives(lambda u, *_: u, updates, lambda u, new, old: new - old, rest=(grads, params))


def map_derivatives(
    function: Callable[..., Any], tree: PyTree, other: Callable[..., Any] = lambda x, *rest: x, rest: Any = ()
) -> PyTree:
    """Maps a function over the leaves of gradients, and `other` over what is not one (unchanged by default).

    Args:
      function, other: take a leaf, and the leaves of the trees in `rest` at the same place.
      tree: gradients. It comes back as the same object when no leaf changes.
      rest: trees of the same structure, in which None is a leaf.
    """
    flat, treedef = _flatten(tree)
    others = [treedef.flatten_up_to(one) for one in rest]
    leaves = [leaf for _, leaf in flat]
    new = [
        (other if apart else function)(leaf, *more)
        for (apart, leaf), *more in zip(flat, *others, strict=True)
    ]
    return tree if all(a is b for a, b in zip(leaves, new, strict=True)) else jax.tree.unflatten(treedef, new)
