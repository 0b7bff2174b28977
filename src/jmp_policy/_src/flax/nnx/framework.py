"""NNX's answers to what the rooms below Flax ask of a module framework."""

from collections.abc import Sequence
from typing import Any

import jax

from jmp_policy._src.flax.nnx import graph_nodes, wrap_module
from jmp_policy._src.policy.frameworks import Framework
from jmp_policy._src.policy.rules import path_text


class NNXFramework(Framework):
    """`flax.nnx`, whose modules name themselves to taps wherever they are called."""

    holds_arrays = True

    def wrap(self, module: Any, policy: Any, **keywords: Any) -> Any:
        """Puts a module under a policy."""
        return wrap_module.wrap(module, policy, **keywords)

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside a Linen model, whose parameters are cast to param dtype."""
        new, met = wrap_module.wrap_part(module, rules)
        return new, [(path_text(path), part) for path, part in met]

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Splits modules and Variables among arguments from their arrays; None where there are none."""
        leaves = jax.tree.leaves((tuple(args), kwargs), is_leaf=graph_nodes.is_node)
        if not any(map(graph_nodes.is_node, leaves)):
            return None
        from jmp_policy._src.flax.nnx.states import Split

        return Split(args, kwargs)
