"""A function of NNX modules as a function of their states: what tracing one takes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx import graph_nodes
from jmp_policy._src.flax.nnx.graph_nodes import is_node
from jmp_policy._src.flax.nnx.named import named
from jmp_policy._src.flax.nnx.states import NODE, filled, taken_apart, variables
from jmp_policy._src.policy.rules import PolicyMap


class Split:
    """The arguments of a function, with the nodes among them as states.

    Args:
      args, kwargs: what the function of modules takes.

    Attributes:
      state: a pytree of the arrays of all nodes; each Variable's once, however often it is shared.
      others: the other arguments, `NODE` in the place of nodes; structured as `structure` says.
      nodes: the nodes themselves.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        self.structure, self.others, self.nodes = taken_apart((tuple(args), kwargs))
        self._graph, self.state = nnx.split(self.nodes)

    def merged(self, state: Any) -> tuple[Any, ...]:
        """Returns new nodes of another state."""
        return nnx.merge(self._graph, state)

    def call(self, fn: Callable[..., Any], state: Any, others: Any) -> Any:
        """Returns the function's result, and what it changed: the values of all Variables."""
        nodes = self.merged(state)
        args, kwargs = filled(self.structure, others, nodes)
        with named(nodes, PolicyMap("float32")):
            out = fn(*args, **kwargs)
        out = jax.tree.map(_values, out, is_leaf=is_node)
        return out, [graph_nodes.read(variable) for variable in variables(nodes)]

    def describe(self, names: Sequence[str]) -> Iterator[tuple[str, int | str, bool]]:
        """Yields for each array of the state: its path, its argument, and whether it is trainable.

        Args:
          names: of the positional arguments.
        """
        whole = jax.tree.unflatten(self.structure, self.others)
        places = [path for path, leaf in jax.tree_util.tree_leaves_with_path(whole) if leaf is NODE]
        for path, variable in jax.tree_util.tree_leaves_with_path(self.state, is_leaf=is_node):
            keys = [_text(key) for key in path]
            which, place, *above = places[int(keys[0])]
            position = place.idx if which.idx == 0 else place.key
            start = str(names[position] if which.idx == 0 else position)
            inside = [_text(key) for key in above]
            is_param = isinstance(variable, nnx.Param)
            for below, array in jax.tree_util.tree_leaves_with_path(variable):
                end = [_text(key) for key in below[1:]]
                trains = is_param and bool(jax.numpy.issubdtype(array.dtype, jax.numpy.floating))
                yield "/".join([start, *inside, *keys[1:], *end]), position, trains


def _values(leaf: Any) -> Any:
    if isinstance(leaf, nnx.Variable):
        return graph_nodes.read(leaf)
    return jax.tree.map(_values, nnx.state(leaf), is_leaf=is_node) if is_node(leaf) else leaf


def _text(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
