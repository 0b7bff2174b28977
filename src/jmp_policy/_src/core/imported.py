"""Asking about classes of packages that may not be imported."""

import sys
from typing import Any


def imported_attr(module: str, name: str) -> Any:
    """A module's attribute if anybody imported that module, else None."""
    return getattr(sys.modules.get(module), name, None)


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Isinstance without importing: an object of a module that nobody imported cannot exist."""
    cls = imported_attr(module, name)
    return cls is not None and isinstance(value, cls)
