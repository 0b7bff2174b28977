"""Which operations of a program JAX's own functions have put there, by the files that define them."""

import functools
import importlib.util
import inspect
import itertools
import os
from typing import Any

import jax

from jmp_policy._src.jaxpr import compat


def is_drawn(eqn: Any) -> bool:
    """Whether an operation is one of those with which jax.random draws numbers."""
    drawing, inside = files_of(jax.random.normal, jax.random.multivariate_normal), directory_of("jax")
    frames = itertools.takewhile(lambda frame: frame.file_name.startswith(inside), compat.frames(eqn))
    return any(frame.file_name in drawing for frame in frames)


@functools.cache
def files_of(*functions: Any) -> tuple[str, ...]:
    """The files in which functions of JAX are."""
    return tuple({inspect.unwrap(function).__code__.co_filename for function in functions})


@functools.cache
def directory_of(name: str) -> str:
    """The directory of a package, with a slash at its end; "" if it is not installed."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    return "" if found is None or not found.origin else os.path.dirname(found.origin) + os.sep
