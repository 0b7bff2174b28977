"""Registers classes with `flax.serialization` once the program imports that, and does not import it.

It has a registry but no protocol, and a program that never imports Flax should not pay for it (0.15 s on top
of jax and optax). Importing it eagerly would do that; registering when an object is made would miss a Flax
imported later. What is saved is nested data: `check_depth` refuses what may contain itself.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def register_with_flax(cls: type, leaves: Sequence[str], replace: Callable[..., Any]) -> None:
    """Tells Flax how to save objects of a class: leaves by name; settings come from the restoring program.

    Args:
      cls: the class.
      leaves: names of the fields that are saved.
      replace: function `(object, **fields)` that returns a copy with other values of some fields.
    """

    def register(serialization: Any) -> None:
        def to_state_dict(obj: Any) -> dict[str, Any]:
            return {n: serialization.to_state_dict(getattr(obj, n)) for n in leaves}

        def from_state_dict(obj: Any, state: dict[str, Any]) -> Any:
            unknown = sorted(set(state) - set(leaves))
            if unknown:
                raise ValueError(
                    f"The saved state has fields {unknown} that {cls.__name__} does not have; it has "
                    f"{list(leaves)}. Was it saved from another kind of loss scale?"
                )
            # A field that the checkpoint lacks keeps the target's value: it was made before the field was.
            known = [n for n in leaves if n in state]
            restored = {n: serialization.from_state_dict(getattr(obj, n), state[n], name=n) for n in known}
            return replace(obj, **restored)

        serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)

    _after_import("flax.serialization", register)


def _after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module `name` is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by asking the other finders, and takes itself off the list."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]):
        self._name, self._callback = name, callback

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._callback(module)

            # On the loader of this one module.
            spec.loader.exec_module = execute_and_call
        return spec


#: Levels of a config that are more than any config has: data that contains itself.
_DEEP = 20


def check_depth(data: Any, what: str, limit: int = _DEEP, path: tuple[str, ...] = ()) -> None:
    """Raises ValueError for nested data that is deeper than `limit`, and so may contain itself."""
    if len(path) > limit:
        raise ValueError(
            f"{what} is nested more than {limit} levels deep at {'/'.join(path[:8])}/...; does it contain "
            "itself?"
        )
    if hasattr(data, "items"):
        children = data.items()
    else:
        children = enumerate(data) if isinstance(data, list | tuple) else ()
    for key, child in children:
        check_depth(child, what, limit, (*path, str(key)))
