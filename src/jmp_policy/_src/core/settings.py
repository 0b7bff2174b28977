"""Reads values of settings, which a config file or a command line may hold as text.

YAML reads 1e4 as a text, and what a command line or an environment variable sets is one. `bool("false")` is
True and `float(True)` is 1: each value is read as what it must be, or refused.
"""

import contextlib
import math
from typing import Any

import numpy as np

#: The words of YAML 1.1.
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def flag(value: Any, name: str) -> bool:
    """Reads a boolean, or a word for one in YAML; refuses anything else, 0 and 1 included."""
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


def shown(value: Any) -> str:
    """Formats a value that was refused, however large it is."""
    try:
        text = repr(value)
    except Exception:  # An int of too many digits, data that is too deep, a broken __repr__.
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
