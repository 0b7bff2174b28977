"""NNX's answers to what the rooms below Flax ask of a module framework."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx import pure, wrap
from jmp_policy._src.policy.frameworks import Framework
from jmp_policy._src.policy.rules import path_text


class NNXFramework(Framework):
    """`flax.nnx`, whose modules name themselves to taps wherever they are called."""

    holds_arrays = True

    def wrap(self, module: Any, policy: Any, **keywords: Any) -> Any:
        """Returns the module under a policy."""
        return wrap.wrap(module, policy, **keywords)

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside a Linen model, whose parameters are cast to param dtype."""
        new, seen = wrap.wrap_part(module, rules)
        return new, [(path_text(path), part) for path, part in seen]

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> pure.Split | None:
        """Splits modules and Variables among arguments from their arrays; None where there are none."""
        leaves = jax.tree.leaves((tuple(args), kwargs), is_leaf=_is_node)
        return pure.Split(args, kwargs) if any(map(_is_node, leaves)) else None


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)
