"""Tells the state that float8 layers keep in gradients from gradients.

Flax's float8 layers return the new values of their scales and amax histories as cotangents, in a collection
of their own::

    grads = {"params": {...}, "_overwrite_with_gradient": {"Dense_0": {"kernel_scale": new value, ...}}}

They are no derivatives: nothing may multiply, divide, test or average them. Flax's `TrainState` hides the
collection from the optimizer; an optimizer that gets it with the parameters sees zeros, and the updates are
what makes the new values of the old ones.

Nothing here runs for gradients without the collection: `loss_scale.holds_float8_state` looks for it first.
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


def is_float8_state(path: Sequence[Any]) -> bool:
    """Whether the keys of a leaf lead into the collection."""
    return any(getattr(key, "key", None) == COLLECTION for key in path)


def derivatives(tree: PyTree) -> PyTree:
    """Gradients with None in the places of what is not one."""
    return map_derivatives(lambda x: x, tree, lambda x: None)


def next_histories(grads: PyTree, params: PyTree) -> PyTree:
    """Moves histories of largest values one step on, whatever JAX made of them.

    JAX adds up the cotangents of all uses of a layer, and so the states that they return: with two uses every
    number in a history would double in each step, and without a use all were zero. The rest of a history is
    known from the old one. What is new in it stays a sum of the largest values of the uses.

    Args:
      grads: gradients, before any of them was divided or averaged.
      params: what they are the gradients of.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    old = {path: leaf for path, leaf in flat if is_float8_state(path)}

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


def around(update: Callable[..., Any], params: PyTree) -> Callable[..., Any]:
    """Makes an optimizer's update see zeros for the state, and gives updates that lead to its new values.

    Args:
      update: the `update` of an optax transformation.
      params: the parameters with the old state, as `optax.apply_updates` adds to them.
    """

    def beside(grads: PyTree, *args: Any, **extra_args: Any) -> Any:
        if params is None:
            raise ValueError(
                f"The gradients hold new values of {COLLECTION!r}, the state of float8 layers, and update "
                "got no parameters to compare them with: tx.update(grads, state, params)."
            )
        zeros = map_derivatives(lambda x: x, grads, jnp.zeros_like)
        updates, state = update(zeros, *args, **extra_args)
        changes = [grads, params]
        return map_derivatives(lambda u, *_: u, updates, lambda u, new, old: new - old, changes), state

    return beside


def map_derivatives(
    function: Callable[..., Any], tree: PyTree, other: Callable[..., Any] = lambda x, *rest: x, rest: Any = ()
) -> PyTree:
    """Maps a function over the leaves of gradients, and `other` over what is not one (unchanged by default).

    Args:
      function, other: take a leaf, and the leaves of the trees in `rest` at the same place.
      tree: gradients. It comes back as the same object when no leaf changes.
      rest: trees of the same structure, in which None is a leaf.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    others = [treedef.flatten_up_to(one) for one in rest]
    new = [
        (other if is_float8_state(path) else function)(leaf, *more)
        for (path, leaf), *more in zip(flat, *others, strict=True)
    ]
    unchanged = all(leaf is x for (_, leaf), x in zip(flat, new, strict=True))
    return tree if unchanged else jax.tree.unflatten(treedef, new)
