"""Parameters that are made during a governed call: stored in param dtype, in whatever dtype they were drawn.

A layer that makes its parameters on the first call takes their dtype from its input, or from parameters that
it reads: compute dtype in both cases. Only Params are cast. Losses, counters, statistics and caches in other
Variables stay as their module made them.
"""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx import graph_nodes, layers
from jmp_policy._src.policy.module_precision import ModulePrecision


def held(attributes: Any) -> dict[int, Any]:
    """Returns by identity the Params and modules in a pytree, and nothing of what those modules hold."""
    return {id(value): value for value in _held(attributes)}


def store(attributes: Any, known: dict[int, Any], precision: ModulePrecision) -> None:
    """Stores new Params in param dtype, those of new modules too; what is known is left alone.

    Args:
      attributes: a pytree of nodes and anything else, such as the attributes of a module.
      known: what was there before, as `held` returns it; what is new is added to it.
      precision: of the module that holds the Params.
    """
    for value in _held(attributes):
        if id(value) in known:
            continue
        known[id(value)] = value
        if isinstance(value, nnx.Param):
            graph_nodes.store_in(value, precision.param_dtype)
        elif not graph_nodes.is_governed(value):
            island = ModulePrecision(precision.policy, layers.is_island(value))
            store(vars(value), known, island)


def _held(attributes: Any) -> Iterator[Any]:
    """Yields the Params and modules in a pytree, in objects and NNX's containers too."""
    for leaf in jax.tree.leaves(_without_plain(attributes), is_leaf=graph_nodes.is_node):
        is_called = isinstance(leaf, nnx.Module) and not isinstance(leaf, nnx.List | nnx.Dict)
        if is_called or isinstance(leaf, nnx.Param):
            yield leaf
        elif isinstance(leaf, nnx.Pytree):
            yield from _held(vars(leaf))


def _without_plain(attributes: Any) -> Any:
    if not isinstance(attributes, dict):
        return attributes
    return [value for value in attributes.values() if type(value) not in graph_nodes.PLAIN]
