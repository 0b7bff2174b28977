"""The arrays that a model stores: read and written past any cast, and those that no product should meet."""

import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import cast_floating, is_dtype_or_none, is_half
from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.flax.nnx.graph_nodes import Path
from jmp_policy._src.policy.patterns import path_text

#: What to do about an array that is used as it is stored.
REPAIR = (
    "Make it an nnx.Param that a method of its own module reads from self, or cast it (.astype(x.dtype)); "
    "what was put into the model after wrap is governed when the model is wrapped again."
)

_ARRAYS = (jax.Array, np.ndarray)


def by_path(root: Any, start: Path = (), is_half_above: bool = True) -> Iterator[tuple[str | None, Any]]:
    """The arrays in a model: with their paths if they belong to modules in half precision, else with None.

    Those of modules that are known by a bound method or a partial alone come last.

    Args:
      root: the model, or a pytree of modules.
      start: path of the root.
      is_half_above: whether it is used in half precision, where it does not say so itself.
    """
    nodes: dict[Path, Any] = dict(nnx.iter_graph(root))
    functions = []
    for path, node in nodes.items():
        is_variable = isinstance(node, nnx.Variable)
        if not isinstance(node, (nnx.Variable, *_ARRAYS, types.MethodType, functools.partial)):
            continue
        around = (nodes[path[:depth]] for depth in range(len(path) - 1, -1, -1))
        # It belongs to the nearest node above that says how it computes.
        is_used_in_half = next((x for x in map(_computes_in_half, around) if x is not None), is_half_above)
        value = node.get_raw_value() if is_variable else node
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value):
            here = (*start, *path, *map(graph_nodes.key_of, keys))
            if isinstance(leaf, types.MethodType):
                functions.append((leaf.__self__, here, is_used_in_half))
            elif isinstance(leaf, functools.partial):
                functions.append(([leaf.func, leaf.args, leaf.keywords], here, is_used_in_half))
            elif isinstance(leaf, _ARRAYS):
                yield path_text(here) if is_used_in_half else None, leaf
    known = set(map(id, nodes.values()))
    for held, here, is_used_in_half in functions:
        if id(held) not in known:
            yield from by_path(held, here, is_used_in_half)


def _computes_in_half(node: Any) -> bool | None:
    """Whether a node uses its arrays in half precision; None if it does not say."""
    if not isinstance(node, nnx.Pytree):
        return None
    if layers.is_island(node) or layers.linen_modules(node):
        return False  # A Linen module looks at its variables itself.
    spec = graph_nodes.specification(node)
    if spec is not None:
        return is_half(spec.precision.used_param_dtype)
    dtype = vars(node).get("dtype")
    return None if dtype is None or not is_dtype_or_none(dtype) else is_half(dtype)


def read(variable: nnx.Variable) -> Any:
    """The stored value, past any cast of the Variable's class; Refs are read."""
    value = variable.get_raw_value()
    return value[...] if variable.get_metadata().get("ref") else value


def write(variable: nnx.Variable, value: Any) -> None:
    """Stores a value, in its own dtype."""
    if variable.get_metadata().get("ref"):
        stored: Any = variable.get_raw_value()
        if stored.dtype == value.dtype:
            stored[...] = value
            return
        value = jax.new_ref(value)
    variable.set_raw_value(value)


def store_in(variable: nnx.Variable, dtype: Any) -> None:
    """Casts what a Variable stores to a floating dtype; one that is stored in it already is left alone."""
    if not graph_nodes.dtypes(variable) <= {dtype}:
        write(variable, cast_floating(read(variable), dtype))
