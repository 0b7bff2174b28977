"""A function of pytrees as a jaxpr of arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

#: What of a function's arguments is traced; all else is static. Shapes are for looking at.
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def is_array(value: Any) -> bool:
    """Whether a leaf is an array that a trace takes, and no Python scalar or `float0`."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and hasattr(value, "shape") and dtype != jax.dtypes.float0


class Flat(NamedTuple):
    """A traced function.

    Args:
      jaxpr: of its arrays alone.
      arrays: its arguments, of those that are arrays.
      rebuild: gives the function's result from a list of its arrays.
    """

    jaxpr: Any
    arrays: list[Any]
    rebuild: Callable[[list[Any]], Any]


def flattened(fn: Callable[..., Any], args: Any, kwargs: Any) -> Flat:
    """Traces a function; arguments and results that are no arrays are static."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, _ARRAYS) for leaf in leaves]
    outs: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        whole = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        new_args, new_kwargs = jax.tree.unflatten(structure, whole)
        out_leaves, out_structure = jax.tree.flatten(fn(*new_args, **new_kwargs))
        is_made = [isinstance(leaf, _ARRAYS) for leaf in out_leaves]
        kept = [None if made else leaf for leaf, made in zip(out_leaves, is_made, strict=True)]
        outs[:] = [out_structure, is_made, kept]
        return [leaf for leaf, made in zip(out_leaves, is_made, strict=True) if made]

    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    jaxpr = jax.make_jaxpr(flat)(*arrays)

    def rebuild(made: list[Any]) -> Any:
        out_structure, is_made, kept = outs
        given = iter(made)
        return jax.tree.unflatten(
            out_structure,
            [next(given) if array else leaf for leaf, array in zip(kept, is_made, strict=True)],
        )

    # As the trace took them: NumPy's float64 is float32 here, unless x64 is on.
    arrays = [jax.numpy.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in arrays]
    return Flat(jaxpr, arrays, rebuild)
