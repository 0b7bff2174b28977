"""A function of NNX modules given to a transformation of functions of arrays; updates of state are kept."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx import graph_nodes
from jmp_policy._src.flax.nnx.graph_nodes import is_node


class _Gap:
    """Stands for a node."""


NODE = _Gap()


def filled(structure: Any, leaves: Any, nodes: Any) -> Any:
    """Returns the tree, with the nodes in the places that were left for them."""
    given = iter(nodes)
    return jax.tree.unflatten(structure, [next(given) if leaf is NODE else leaf for leaf in leaves])


def taken_apart(tree: Any) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Returns what `filled` puts together: structure, leaves with `NODE` in place of nodes, the nodes."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_node)
    nodes = tuple(leaf for leaf in leaves if is_node(leaf))
    return structure, [NODE if is_node(leaf) else leaf for leaf in leaves], nodes


def variables(nodes: Any) -> Iterator[nnx.Variable]:
    """Returns every Variable of these nodes, once per node."""
    for node in nodes:
        if isinstance(node, nnx.Variable):
            yield node
        else:
            yield from (variable for _, variable in graph_nodes.variables(node))


def transformed(fn: Callable[..., Any], transform: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of modules that a transformation makes of a function of modules.

    Args:
      fn: a function of modules, other nodes and anything else.
      transform: takes a function of pytrees without nodes to another one with the same arguments and results.
    """
    pure = Pure(fn)
    new = transform(pure)

    @functools.wraps(fn)
    def of_modules(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(pure):
            nodes, states = pure.split(args, kwargs)
            values, changed, out, out_structure = new(*states)
            out_nodes: Any = ()
            if changed is not None:
                with nnx.merge_context(pure, inner=False) as context:
                    _, out_nodes = context.merge(*changed)
        if changed is None:
            _write_changed(nodes, values)
        return filled(out_structure, out, out_nodes)

    return of_modules


class Pure:
    """The function of states that a function of modules is."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def split(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Returns the nodes among the arguments, and the arguments of this function."""
        structure, others, nodes = taken_apart((args, kwargs))
        with nnx.split_context(self) as context:
            graph, state = context.split(nodes)
        return nodes, (structure, graph, state, others)

    def __call__(self, structure: Any, graph: Any, state: Any, others: Any) -> Any:
        with nnx.merge_context(self, inner=True) as context:
            nodes = context.merge(graph, state)
        before = nnx.graphdef(nodes)
        args, kwargs = filled(structure, others, nodes)
        out = self._fn(*args, **kwargs)
        out_structure, others, out_nodes = taken_apart(out)
        values, changed = [graph_nodes.read(variable) for variable in variables(nodes)], None
        if out_nodes or nnx.graphdef(nodes) != before:
            values = []
            with nnx.split_context(self) as context:
                changed = context.split((nodes, out_nodes))
        return values, changed, others, out_structure


def _write_changed(nodes: Any, values: Any) -> None:
    """Writes what a call has changed, and nothing else: parameters may be of a trace closed to writing."""
    for variable, value in zip(variables(nodes), values, strict=True):
        old, new = jax.tree.leaves(graph_nodes.read(variable)), jax.tree.leaves(value)
        if len(old) != len(new) or any(x is not y for x, y in zip(old, new, strict=True)):
            graph_nodes.write(variable, value)
