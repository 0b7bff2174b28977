"""Makes pickles, reprs and documentation name the public module that users import, not a file of `_src`."""

import inspect
from collections.abc import Iterable
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

    Example:
      >>> names = {}
      >>> publish("jmp_policy.example", names, also=[type("Row", (), {})])
      >>> names
      {'_Row': <class 'jmp_policy.example._Row'>}
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
