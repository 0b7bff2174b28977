"""Remembers what the user was told about a model, so that a warning comes once for each."""

import weakref
from collections.abc import Iterable
from typing import Any

#: Identity of a module -> (reference to it, what was said). No attribute of the module, whose graph
#: definition would change with it.
_TOLD: dict[int, tuple[Any, set[Any]]] = {}


def new_for(module: Any, said: Iterable[Any]) -> list[Any]:
    """Returns those things that were not said about a module before, and remembers them."""
    key = id(module)
    if key not in _TOLD:
        _TOLD[key] = (weakref.ref(module, lambda _: _TOLD.pop(key, None)), set())
    told = _TOLD[key][1]
    new = [what for what in said if what not in told]
    told.update(new)
    return new
