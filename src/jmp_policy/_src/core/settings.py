"""Reads values of settings, which a config file or a command line may hold as text.

YAML reads 1e4 as a text, and what a command line or an environment variable sets is one. `bool("false")` is
True and `float(True)` is 1: each value is read as what it must be, or refused.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jmp_policy._src.core.suggest import did_you_mean

#: The words of YAML 1.1.
_FLAGS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}

#: Levels of a config that are more than any config has: data that contains itself.
_DEEP = 20


def flag(value: Any, name: str) -> bool:
    """Reads a setting that is on or off: a boolean, or a word for one in YAML.

    Raises:
      ValueError: for anything else, 0 and 1 included.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    known = _FLAGS.get(value.strip().lower()) if isinstance(value, str) else None
    if known is None:
        raise ValueError(f"{name} must be true or false, got {shown(value)}.")
    return known


def positive_int(value: Any, name: str) -> int:
    """Reads a static count: an int from 1 to 2**31 - 1."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # Refused below, as it was given.
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a whole number, got {shown(value)} of {type(value).__name__}.")
    if not 1 <= value < 2**31:
        raise ValueError(f"{name} must be between 1 and 2**31 - 1, got {shown(value)}.")
    return int(value)


def number(value: Any, name: str, above: float = -math.inf, below: float = math.inf) -> float:
    """Reads a static number: a finite float strictly between two bounds."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError("A boolean is no number.")
        result = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must be a number known before tracing, got {shown(value)} of {type(value).__name__}."
        ) from error
    except OverflowError:  # An int beyond the floats.
        result = math.inf
    if not math.isfinite(result) or not above < result < below:
        limits = [f"greater than {above:g}"] * (above > -math.inf)
        limits += [f"less than {below:g}"] * (below < math.inf)
        raise ValueError(f"{name} must be finite and {' and '.join(limits) or 'a number'}, got {result:g}.")
    return result


def check_keys(
    settings: Iterable[str],
    known: Iterable[str],
    what: str,
    spellings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises ValueError for a key that the settings of something do not have.

    Args:
      settings: the keys that were given.
      known: those that there are.
      what: whose they are, as the message says it.
      spellings: what others call some of them.
    """
    known = list(known)
    if unknown := [key for key in settings if key not in known]:
        hint = next(filter(None, (did_you_mean(str(key), known, spellings) for key in unknown)), "")
        raise ValueError(
            f"Unknown key {', '.join(map(shown, unknown))} in the settings of {what}.{hint} Known: "
            f"{', '.join(known)}."
        )


def check_depth(data: Any, what: str, limit: int = _DEEP) -> None:
    """Raises ValueError for nested data that is deeper than `limit`, and so may contain itself."""
    waiting: list[tuple[Any, tuple[str, ...]]] = [(data, ())]
    while waiting:
        node, path = waiting.pop()
        if len(path) > limit:
            raise ValueError(
                f"{what} is nested more than {limit} levels deep at {'/'.join(path[:8])}/...; does it "
                "contain itself?"
            )
        if hasattr(node, "items"):
            waiting += [(child, (*path, str(key))) for key, child in node.items()]
        elif isinstance(node, list | tuple):
            waiting += [(child, (*path, str(i))) for i, child in enumerate(node)]


def shown(value: Any) -> str:
    """Formats a value that was refused, however large it is."""
    try:
        text = repr(value)
    except Exception:  # An int of too many digits, data that is too deep, a broken __repr__.
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
