"""The arrays that a model stores for its modules in half precision, which no product should meet uncast."""

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from jmp_policy._src.core.dtypes import is_dtype_or_none, is_half
from jmp_policy._src.flax import compat
from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.flax.nnx.graph_nodes import Path
from jmp_policy._src.policy.rules import path_text

#: What to do about an array that is used as it is stored.
REPAIR = (
    "Make it an nnx.Param that a method of its own module reads from self, or cast it (.astype(x.dtype)); "
    "what was put into the model after wrap is governed when the model is wrapped again."
)


def in_half(root: nnx.Module) -> Iterator[tuple[str, Any]]:
    """The arrays in a model that belong to modules in half precision, with their paths.

    Modules of bound methods come last: they may be copies without a policy of what was met before.
    """
    waiting: collections.deque[tuple[Path, Any, bool]] = collections.deque([((), root, True)])
    methods: collections.deque[tuple[Path, Any, bool]] = collections.deque()
    seen: set[int] = set()
    while waiting or methods:
        path, value, half = (waiting or methods).popleft()
        if graph_nodes.is_node(value):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, nnx.Variable):
            value = value.get_raw_value()
        elif isinstance(value, nnx.Pytree):
            half = _computes_in_half(value, half)
            value = {name: x for name, x in vars(value).items() if not compat.is_bookkeeping(name)}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=graph_nodes.is_node):
            here = (*path, *map(graph_nodes.key_of, keys))
            if isinstance(leaf, jax.Array | np.ndarray):
                if half:
                    yield path_text(here), leaf
            elif graph_nodes.is_node(leaf):
                waiting.append((here, leaf, half))
            elif isinstance(leaf, functools.partial):
                methods.append((here, [leaf.func, leaf.args, leaf.keywords], half))
            elif isinstance(leaf, types.MethodType):
                methods.append((here, leaf.__self__, half))


def _computes_in_half(node: Any, above: bool) -> bool:
    """Whether a node uses its arrays in half precision; if it does not say, as the one that holds it."""
    if layers.is_island(node) or layers.linen_modules(node):
        return False  # A Linen module looks at its variables itself.
    spec = graph_nodes.specification(node)
    if spec is not None:
        return is_half(spec.precision.used_param_dtype)
    dtype = vars(node).get("dtype")
    return above if dtype is None or not is_dtype_or_none(dtype) else is_half(dtype)
