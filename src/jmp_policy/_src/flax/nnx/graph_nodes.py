"""Walking an NNX model: what a node holds, by paths as `nnx.iter_graph` gives them."""

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jmp_policy._src.core import dtypes as dtypes_
from jmp_policy._src.core.dtypes import cast_floating
from jmp_policy._src.flax import compat

Path = tuple[Any, ...]

#: Types of attributes that hold no Variables, for which nobody should wait.
PLAIN = frozenset(
    {int, float, bool, str, bytes, type(None), type, types.FunctionType, types.MethodType, np.dtype}
)


class Child(NamedTuple):
    """A node or Variable held by another: its path from there, and itself."""

    path: Path
    value: Any


def is_node(value: Any) -> bool:
    """Returns whether a value is an NNX object or a Variable, which casts and walks treat as a whole."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def is_governed(node: Any) -> bool:
    """Returns whether a module is of a subclass that casts (`governed`)."""
    return hasattr(type(node), "_jmp_policy_specification")


def children(node: nnx.Pytree) -> Iterator[Child]:
    """Yields the nodes and Variables that an NNX object holds, in plain containers too; sorted as in Flax."""
    for name, attribute in sorted(vars(node).items()):
        if type(attribute) in PLAIN or compat.is_bookkeeping(name):
            continue
        if is_node(attribute):
            yield Child((name,), attribute)
            continue
        for keys, leaf in jax.tree_util.tree_leaves_with_path(attribute, is_leaf=is_node):
            if is_node(leaf):
                yield Child((name, *map(_key, keys)), leaf)


def _key(key: Any) -> Any:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return getattr(key, field)
    return key


def own_params(node: nnx.Pytree) -> Iterator[Child]:
    """Yields the floating Params that a node holds itself; those of modules below it are theirs."""
    for path, value in children(node):
        if isinstance(value, nnx.Param):
            if is_floating(value):
                yield Child(path, value)
        elif isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Module):
            yield from (Child((*path, *below), param) for below, param in own_params(value))


def store_in(variable: nnx.Variable, dtype: Any) -> None:
    """Casts what a Variable stores to a floating dtype; a Variable stored in it already is left alone."""
    if not dtypes(variable) <= {dtype}:
        write(variable, cast_floating(read(variable), dtype))


def variables(node: nnx.Pytree) -> Iterator[Child]:
    """Returns every Variable of a model, each once."""
    seen: set[int] = set()

    def visit(node: nnx.Pytree, path: Path) -> Iterator[Child]:
        for below, value in children(node):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nnx.Variable):
                yield Child((*path, *below), value)
            else:
                yield from visit(value, (*path, *below))

    yield from visit(node, ())


def dtypes(variable: nnx.Variable) -> set[Any]:
    """Returns the floating dtypes of what a Variable stores: arrays, Refs, shapes, or trees of them."""
    stored = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(variable.get_raw_value())]
    return {dtype for dtype in stored if dtype is not None and dtypes_.is_floating(dtype)}


def is_floating(variable: nnx.Variable) -> bool:
    """Returns whether a Variable stores anything floating."""
    return bool(dtypes(variable))


def read(variable: nnx.Variable) -> Any:
    """Returns the stored value, past any cast of the Variable's class; Refs are read."""
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
