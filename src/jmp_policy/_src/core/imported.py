"""Knows other packages without importing them: a program that never uses Flax should not pay for it.

`import flax` takes 0.15 s on top of jax and optax. So classes of other packages are looked up among what the
program has imported, and what is to be registered with one is registered right after its import: the loss
scales with `flax.serialization`, which has a registry and no protocol.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def imported_attr(module: str, name: str) -> Any:
    """A module's attribute if the program has imported that module, else None."""
    return getattr(sys.modules.get(module), name, None)


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Whether a value is an instance of `module.name`, without importing the module.

    A class of a module that was never imported has no instances.
    """
    cls = imported_attr(module, name)
    return cls is not None and isinstance(value, cls)


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module `name` is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _CallingLoader(importlib.abc.Loader):
    """Loader that delegates to the module's loader, and then runs the callback."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]):
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by asking the other finders, and takes itself off the list."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]):
        self._name = name
        self._callback = callback

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._callback)
        return spec
