"""Public names do not name files: pickles, reprs and documentation show the module that users import from."""

import inspect
from typing import Any


def publish(module: str, names: dict[str, Any]) -> None:
    """Sets `__module__` of the public classes and functions of a module to the module itself.

    Objects that another public module has published already keep its name, unless `module` is above it.

    Args:
      module: the public module's name.
      names: its globals.
    """
    for name, value in names.items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if value.__module__.startswith("jmp_policy._src.") or value.__module__.startswith(f"{module}."):
            value.__module__ = module
