"""Runs a callback once another module has been imported, without importing it.

The loss scales want to be known to `flax.serialization`, which has a registry but no protocol, and
a program that never imports Flax should not pay for it (0.15 s on top of jax and optax). Importing
it eagerly would do that; registering when a scale is made would miss a Flax imported later.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


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


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module `name` is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))
