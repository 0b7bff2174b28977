"""Makes pickles, reprs and documentation name the public module that users import, not a file of `_src`."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any


def publish(module: str, names: dict[str, Any], also: Iterable[Any] = ()) -> None:
    """Sets `__module__` of the public classes and functions of a module to the module itself.

    Objects that another public module has published already keep that module's name, unless it lies below
    `module`.

    Args:
      module: name of the public module.
      names: globals of the public module.
      also: private classes and functions that pickles of public objects refer to. Pickle looks them up in the
        module by name, so that each is put there, with an underscore in front of its name.
    """
    for name, value in names.items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__.startswith("jmp_policy._src.") or value.__module__.startswith(f"{module}."):
            value.__module__ = module
    for value in also:
        name = f"_{value.__name__}"
        value.__module__, value.__qualname__ = module, name
        names[name] = value


#: By module: the public modules that take names from it at first use, their globals, and which names.
_LATER: dict[str, list[tuple[str, dict[str, Any], Iterable[str] | None]]] = {}


def publish_later(
    module: str, names: dict[str, Any], sources: Mapping[str, Iterable[str] | None]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a public module that imports some names when one is asked for.

    Args:
      module, names: name and globals of the public module.
      sources: the modules to import, and the names that the public module takes from each; None for all
        public ones.
    """
    for source, taken in sources.items():
        _LATER.setdefault(source, []).append((module, names, taken))

    def listed() -> list[str]:
        for source in sources:
            load(source)
        return sorted(name for name in names if name.startswith("__") or not name.startswith("_"))

    def get(name: str) -> Any:
        if name == "__all__":  # from module import *
            return [name for name in listed() if not name.startswith("_")]
        for source, taken in sources.items():
            may_have = not name.startswith("_") if taken is None else name in taken
            if may_have and hasattr(load(source), name):
                return names[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get, listed


def load(source: str) -> ModuleType:
    """Imports a module whose names are published later, and publishes them in all modules that take them."""
    loaded = importlib.import_module(source)
    for module, names, taken in _LATER.pop(source, ()):
        taken = taken or [name for name in vars(loaded) if not name.startswith("_")]
        objects = {name: getattr(loaded, name) for name in taken}
        publish(module, objects)
        names.update(objects)
    return loaded
