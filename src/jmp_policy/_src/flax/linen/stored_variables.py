"""Variables that a Linen module may read as they are stored: asked for where a product is float32."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from jmp_policy._src.core.classes import imported_attr
from jmp_policy._src.flax.linen.governing import locate
from jmp_policy._src.policy.rules import path_text
from jmp_policy._src.policy.scope import Scope

#: What to do about a variable that is used as it is stored.
REPAIR = (
    'Read it with self.param or self.get_variable("params", name) in a method of the module that owns it, '
    "or cast it (.astype(x.dtype))."
)


def in_half(scope: Scope, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The variables of the outermost module, and those below it, that belong to modules in half precision.

    A module that has not run belongs to the next one above it.
    """
    start, half_modules = locate(module, scope.location).path, scope.half_modules
    bridge = imported_attr("flax.nnx.bridge", "ToLinen") or ()
    for keys, array in jax.tree_util.tree_leaves_with_path(nn.meta.unbox(module.variables)):
        collection, *names = (str(getattr(key, "key", key)) for key in keys)
        path = (*start, *names)
        owner = next(path[:depth] for depth in range(len(path), -1, -1) if path[:depth] in half_modules)
        cls = half_modules[owner]
        if cls is not None and not issubclass(cls, bridge):  # An NNX module looks at its variables itself.
            text = path_text(path)
            yield text if collection == "params" else f"{text} of {collection}", array
