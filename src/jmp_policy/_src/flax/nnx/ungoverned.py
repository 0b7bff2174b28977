"""Warns of what was put into a wrapped model after `wrap`, and computes without a policy.

    model = jmpp.wrap(Net(rngs), "mixed_float16")
    model.head = nnx.LoRALinear(...)             # no part of what was wrapped: float32 x float16 is float32
    model = jmpp.wrap(model, "mixed_float16")    # the repair: the same Variables, every module governed

What was there at the time is known by sight: a module of the user's is of a governed class, and a layer of
Flax has a `dtype`.
"""

import warnings
from collections.abc import Iterator
from typing import Any

from flax import nnx

from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.flax.nnx import graph_nodes, layers, told
from jmp_policy._src.policy.policy import Policy
from jmp_policy._src.policy.rules import path_text

_MOST_NAMED = 3


def warn_of_ungoverned(root: Any, name: str, policy: Policy) -> None:
    """Warns, once per model, of modules below an outermost one that no policy reaches.

    Args:
      root: the module whose governed call ends.
      name: of its class.
      policy: its policy.
    """
    if not is_half(policy.compute_dtype):
        return
    new = told.new_for(root, _ungoverned(root, (), {id(root)}))
    if new:
        more = f" (and {len(new) - _MOST_NAMED} more)" if len(new) > _MOST_NAMED else ""
        warnings.warn(
            f"{', '.join(new[:_MOST_NAMED])}{more}: put into {name} after wrap, and not under its policy "
            f"{str(policy)!r}, so that it computes in float32. Wrap the model again, which keeps its "
            "Variables: model = jmp_policy.wrap(model, policy).",
            UserWarning,
            stacklevel=4,
        )


def _ungoverned(node: Any, path: graph_nodes.Path, seen: set[int]) -> Iterator[str]:
    for below, value in graph_nodes.children(node):
        if not isinstance(value, nnx.Pytree) or id(value) in seen:
            continue
        seen.add(id(value))
        here = (*path, *below)
        if isinstance(value, nnx.Module) and callable(value) and not graph_nodes.is_governed(value):
            what = f"{type(value).__name__} at {path_text(here)!r}"
            if not layers.is_flax(type(value)):
                yield what
                continue
            if layers.has_uncast_params(value):
                continue  # Its `dtype` is None on purpose.
            if "dtype" in vars(value) and vars(value)["dtype"] is None:
                yield what
            elif names := layers.params_of_others(value):
                yield f"{', '.join(map(repr, names))} of {what}"
        yield from _ungoverned(value, here, seen)
