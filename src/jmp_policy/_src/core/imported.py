"""Looks up classes of packages without importing the packages."""

import sys
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
