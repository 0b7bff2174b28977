"""What an NNX model holds, by paths as `nnx.iter_graph` gives them, and how its modules are governed."""

import types
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from jmp_policy._src.core import dtypes as dtypes_
from jmp_policy._src.flax import compat

Path: TypeAlias = tuple[Any, ...]

#: Types of attributes that hold no Variables, for which nobody should wait.
PLAIN = frozenset(
    {int, float, bool, str, bytes, type(None), type, types.FunctionType, types.MethodType, np.dtype}
)


def is_node(value: Any) -> bool:
    """Whether a value is an NNX object or a Variable, which casts and walks treat as a whole."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def specification(node: Any) -> Any:
    """How a module is governed (`governed.Specification`); None for one that is not, or by settings alone."""
    return getattr(type(node), "_jmp_policy_specification", None)


def own_specification(module: Any) -> Any:
    """The same, but None for a module of a class that somebody derived from a wrapped one."""
    return vars(type(module)).get("_jmp_policy_specification")


def modules_in(tree: Any) -> list[nnx.Module]:
    """The modules in a pytree; not those inside of them."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def is_called(node: Any) -> bool:
    """Whether a node is a module that computes something, and no container of others."""
    return isinstance(node, nnx.Module) and not isinstance(node, nnx.List | nnx.Dict)


def children(node: nnx.Pytree) -> Iterator[tuple[Path, Any]]:
    """The nodes and Variables that an NNX object holds, in plain containers too; sorted as in Flax."""
    for name, attribute in sorted(vars(node).items()):
        if type(attribute) in PLAIN or compat.is_bookkeeping(name):
            continue
        if is_node(attribute):
            yield (name,), attribute
            continue
        for keys, leaf in jax.tree_util.tree_leaves_with_path(attribute, is_leaf=is_node):
            if is_node(leaf):
                yield (name, *map(key_of, keys)), leaf


def key_of(key: Any) -> Any:
    """The name or number that a key of a path in a pytree stands for."""
    return next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field))


def walk(root: Any) -> list[tuple[Path, Any]]:
    """The nodes and Variables of a model, each once: what is below the root, and the root itself."""
    return [(path, value) for path, value in nnx.iter_graph(root) if is_node(value)]


def variables(root: Any) -> list[tuple[Path, nnx.Variable]]:
    """The Variables of a model, each once."""
    return [(path, value) for path, value in walk(root) if isinstance(value, nnx.Variable)]


def own_params(node: nnx.Pytree) -> Iterator[tuple[Path, nnx.Param]]:
    """The floating Params that a node holds itself; those of modules below it are theirs."""
    for path, value in children(node):
        if isinstance(value, nnx.Param):
            if dtypes(value):
                yield path, value
        elif isinstance(value, nnx.Pytree) and not isinstance(value, nnx.Module):
            yield from (((*path, *below), param) for below, param in own_params(value))


def dtypes(variable: nnx.Variable) -> set[Any]:
    """The floating dtypes of what a Variable stores: arrays, Refs, shapes, or trees of them."""
    stored = [getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(variable.get_raw_value())]
    return {dtype for dtype in stored if dtype is not None and dtypes_.is_floating(dtype)}


def bare_class(cls: type) -> type:
    """The class that a governed one was made from; any other class itself."""
    return vars(cls).get("_jmp_policy_bare", cls)


def name_of(module: Any) -> str:
    """The class name of a module, as its author wrote it."""
    return bare_class(type(module)).__name__


def own_methods(cls: type) -> set[str]:
    """Names of the methods that a module's class has and `nnx.Module` has not."""
    own = [c for c in cls.__mro__ if c not in nnx.Module.__mro__]
    return {name for c in own for name, value in vars(c).items() if callable(value)}


def governed_methods(bare: type, methods: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the named methods that a class has, `__call__` among them."""
    has_attend = ("attend",) if issubclass(bare, nnx.Embed) else ()
    return tuple(m for m in ("__call__", *has_attend, *methods) if m in own_methods(bare))
