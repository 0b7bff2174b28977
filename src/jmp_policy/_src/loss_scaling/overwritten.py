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

#: How Flax's names of the collection's leaves end.
_HISTORY, _SCALE = "_amax_history", "_scale"


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


def next_histories(grads: PyTree, params: PyTree) -> PyTree:
    """Returns gradients in which histories of largest values are those of one step later.

    JAX adds up the cotangents of all uses of a layer, and so the states that they return: with two uses every
    number in a history would double in each step, and without a use all were zero. The rest of a history is
    known from the old one. What is new in it stays a sum of the largest values of the uses.

    Args:
      grads: gradients, before any of them was divided or averaged.
      params: what they are the gradients of.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    old = {path: leaf for path, leaf in flat if is_overwritten(path)}
    if not old:
        return grads

    def later(path: Any, new: Any) -> Any:
        if path not in old:
            return new
        *above, name = path
        word = str(getattr(name, "key", ""))
        if word.endswith(_HISTORY):
            return jnp.roll(old[path], -1, axis=-1).at[..., 0].set(new[..., 0])
        history = old.get((*above, type(name)(word.removesuffix(_SCALE) + _HISTORY)))
        if not word.endswith(_SCALE) or history is None:
            return new
        # Of a use it is the scale by its history, and one that is empty leaves the scale as it was.
        known = jnp.max(history, axis=-1, keepdims=True) > 0
        return jnp.where(known.reshape(new.shape) & (new > 0), new, old[path])

    return jax.tree_util.tree_map_with_path(later, grads)


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
