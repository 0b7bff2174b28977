"""Which operations of a program JAX's own functions have put there, by the files that define them."""

import functools
import importlib.util
import inspect
import itertools
import os
from collections.abc import Iterator
from typing import Any

import jax

from jmp_policy._src.jaxpr import compat


def is_drawn(eqn: Any) -> bool:
    """Returns whether an operation is one of those with which jax.random draws numbers."""
    return _is_jaxs(eqn, files_of(jax.random.normal, jax.random.multivariate_normal))


def is_of_algorithm(eqn: Any) -> bool:
    """Returns whether optax, JAX's linear algebra or its resizing made an operation, and not the user."""
    algebra, scipy = jax.lax.linalg, jax.scipy
    algorithms = (algebra.cholesky, algebra.qdwh, jax.numpy.linalg.pinv, jax.lax.custom_linear_solve)
    algorithms += (scipy.linalg.expm, scipy.sparse.linalg.gmres, jax.image.resize)
    return _is_jaxs(eqn, files_of(*algorithms)) or any(
        frame.file_name.startswith(_ALGORITHMS) or frame.function_name in _ALGORITHMS_BESIDE_OTHERS
        for frame in _library_frames(eqn)
    )


def _is_jaxs(eqn: Any, files: tuple[str, ...]) -> bool:
    return any(frame.file_name in files for frame in _library_frames(eqn))


def _library_frames(eqn: Any) -> Iterator[Any]:
    """The innermost frames, as long as they are JAX's or optax's."""
    return itertools.takewhile(lambda f: f.file_name.startswith(_LIBRARIES), compat.frames(eqn))


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


_JAX, _OPTAX = directory_of("jax"), directory_of("optax")
_LIBRARIES = (_JAX, _OPTAX)

#: Algorithms that are not imported with JAX, by where they are.
_ALGORITHMS = (
    os.path.join(_JAX, "_src", "scipy", "optimize", ""),
    os.path.join(_JAX, "experimental", "ode.py"),
    os.path.join(_JAX, "experimental", "sparse", "linalg.py"),
    _OPTAX,
)

#: Those in files with functions that hand on the user's `precision=`.
_ALGORITHMS_BESIDE_OTHERS = frozenset({"detrend"})
