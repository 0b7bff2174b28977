"""Functions of pytrees as functions of arrays: what is no array among the arguments is static."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_array(value: Any) -> bool:
    """Whether a leaf is an array that a trace takes, or its type; no Python scalar, no `float0`."""
    # By type: a scalar type (`np.float32`) has a `dtype` and a `shape` too.
    return isinstance(value, _ARRAYS) and value.dtype != jax.dtypes.float0


class Split(NamedTuple):
    """A pytree, taken apart into its arrays and the rest.

    Args:
      arrays: its leaves that are arrays.
      places: which of its leaves those are.
      leaves: all of them.
      structure: as `jax.tree.structure` gives it.
    """

    arrays: list[Any]
    places: list[int]
    leaves: list[Any]
    structure: Any

    def merged(self, arrays: Sequence[Any]) -> Any:
        """The pytree with other arrays in place of its own."""
        leaves = list(self.leaves)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def split_arrays(tree: Any) -> Split:
    """Takes a pytree apart into its arrays and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    return Split([leaves[place] for place in places], places, leaves, structure)


class Flat(NamedTuple):
    """A traced function.

    Args:
      jaxpr: of its arrays alone.
      arrays: its arguments, of those that are arrays.
      rebuild: gives the function's result from a list of its arrays.
    """

    jaxpr: Any
    arrays: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def flattened(fn: Callable[..., Any], args: Any, kwargs: Any) -> Flat:
    """Traces a function; arguments and results that are no arrays are static."""
    given, results = split_arrays((args, kwargs)), list[Split]()

    def flat(*arrays: Any) -> list[Any]:
        new_args, new_kwargs = given.merged(arrays)
        made = split_arrays(fn(*new_args, **new_kwargs))
        # Without the tracers of a trace that will be over.
        leaves = [None if is_array(leaf) else leaf for leaf in made.leaves]
        results.append(made._replace(arrays=[], leaves=leaves))
        return made.arrays

    jaxpr = jax.make_jaxpr(flat)(*given.arrays)
    # As the trace took them: NumPy's float64 is float32 here, unless x64 is on.
    arrays = [jax.numpy.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in given.arrays]
    return Flat(jaxpr, arrays, results[-1].merged)
