"""Writes the patterns of rules as text, which a config file can hold, and finds them again by it."""

import importlib
import operator
from typing import Any


def pattern_to_text(pattern: Any) -> str:
    """Returns a path glob as it is, and a class or function as "module:name".

    Raises:
      ValueError: for a class or function that cannot be imported by its name, such as a lambda.
    """
    if isinstance(pattern, str):
        return pattern
    name = getattr(pattern, "__qualname__", None) or repr(pattern)
    text = f"{getattr(pattern, '__module__', None)}:{name}"
    try:
        found = pattern_from_text(text)
    except ValueError:
        found = None
    if found is not pattern:
        raise ValueError(
            f"The pattern {name} cannot be written as text: that holds path globs, and classes and functions "
            "that can be imported by name. Define it at the top of a module, or match by path."
        )
    return text


def pattern_from_text(text: Any) -> Any:
    """Imports the class or function that "module:name" names, and returns anything else as it is.

    Raises:
      ValueError: for a name that cannot be imported.
    """
    if not isinstance(text, str) or ":" not in text:
        return text
    module, _, name = text.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"The pattern {text!r} names a class or function that cannot be imported ({error}). It is "
            "written 'module:name', such as 'flax.linen:Dense'; a path glob has no colon."
        ) from error
