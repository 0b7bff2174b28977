"""Splits the arguments of a loss function into micro-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_policy._src.core.dtypes import array_type_text


def is_key(x: Any) -> bool:
    """Returns whether a leaf is an array of typed PRNG keys."""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


class Batch(NamedTuple):
    """Arguments of a loss function that are to be split, leaf by leaf.

    Args:
      leaves: leaves of the arguments.
      treedef: tree structure of the arguments.
      names: names of the leaves, for messages.
      axis: axis along which arrays are split.
    """

    leaves: tuple[Any, ...]
    treedef: Any
    names: tuple[str, ...]
    axis: int

    @classmethod
    def of(cls, arguments: tuple[tuple[Any, ...], dict[str, Any]], axis: int) -> "Batch":
        """Makes the batch of the arguments `(args, kwargs)`, to be split along an axis."""
        found = []
        for group, name in zip(arguments, ("batch", "kwargs"), strict=True):
            for path, leaf in jax.tree_util.tree_leaves_with_path(group):
                found.append((name + jax.tree_util.keystr(path), leaf))
        names, leaves = zip(*found, strict=True) if found else ((), ())
        return cls(leaves, jax.tree.structure(arguments), names, axis)

    def is_split(self, leaf: Any) -> bool:
        """Returns whether a leaf is an array with rows, which is split."""
        return isinstance(leaf, jax.Array | np.ndarray) and leaf.ndim > 0

    @property
    def rows(self) -> list[Any]:
        """Returns the arrays that are split."""
        return [x for x in self.leaves if self.is_split(x)]

    @property
    def others(self) -> list[Any]:
        """Returns the arrays without axes, PRNG keys among them."""
        return [x for x in self.leaves if isinstance(x, jax.Array) and not self.is_split(x)]

    def with_arrays(self, rows: list[Any], others: list[Any]) -> "Batch":
        """Returns the same arguments with other arrays."""
        split, whole = iter(rows), iter(others)

        def new(leaf: Any) -> Any:
            if self.is_split(leaf):
                return next(split)
            return next(whole) if isinstance(leaf, jax.Array) else leaf

        return self._replace(leaves=tuple(map(new, self.leaves)))

    def check(self, parts: int, meant: str) -> None:
        """Raises ValueError unless all arrays have the same number of rows, a multiple of `parts`."""
        named = [(name, x) for name, x in zip(self.names, self.leaves, strict=True) if self.is_split(x)]
        shapes = ", ".join(f"{name}: {array_type_text(x)}" for name, x in named)
        if not named and parts > 1 and not any(map(is_key, self.leaves)):
            raise ValueError(
                f"There is no array to split into {meant}: pass the batch as an argument, "
                "accumulate_gradients(loss_fn, n)(opt_state, params, batch), instead of closing over it."
            )
        if any(x.ndim <= self.axis for _, x in named):
            raise ValueError(f"batch_axis={self.axis} is beyond the last axis of an array in {shapes}.")
        sizes = {x.shape[self.axis] for _, x in named}
        if len(sizes) > 1:
            raise ValueError(
                f"All arrays after the parameters are split along axis {self.axis}, and these differ in "
                f"length there: {shapes}. Close over what is not to be split; make PRNG keys with "
                "jax.random.key."
            )
        if sizes and min(sizes) % parts:
            raise ValueError(
                f"A batch of {min(sizes)} along axis {self.axis} cannot be split into {meant} of equal size: "
                f"{shapes}."
            )

    def microbatches(self, n: int, *, is_only: bool) -> Callable[[Any, Any], tuple[Any, Any]]:
        """Returns a function that gives the arguments `(args, kwargs)` of a micro-batch.

        The function takes the micro-batch's index and its number among those of all devices. Rows of a
        micro-batch lie n apart: as runs of neighbouring rows, each micro-batch would lie on few devices.
        """
        axis, is_split = self.axis, [self.is_split(x) for x in self.leaves]
        leaves = self.leaves
        if n > 1:
            leaves = [_parts(x, n, axis) if split else x for x, split in zip(leaves, is_split, strict=True)]

        def microbatch(i: Any, number: Any) -> tuple[Any, Any]:
            def of(leaf: Any, split: bool) -> Any:
                if split:
                    return lax.dynamic_index_in_dim(leaf, i, axis + 1, keepdims=False) if n > 1 else leaf
                return jax.random.fold_in(leaf, number) if is_key(leaf) and not is_only else leaf

            return jax.tree.unflatten(self.treedef, map(of, leaves, is_split))

        return microbatch


def _parts(x: Any, n: int, axis: int) -> jax.Array:
    rows = x.shape[axis] // n
    return jnp.reshape(x, (*x.shape[:axis], rows, n, *x.shape[axis + 1 :]))
