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
    """Returns whether JAX's linear algebra or resizing made an operation, and not a call of the user's."""
    algebra, scipy = jax.lax.linalg, jax.scipy
    algorithms = (algebra.cholesky, algebra.qdwh, jax.numpy.linalg.pinv, jax.lax.custom_linear_solve)
    algorithms += (scipy.linalg.expm, scipy.sparse.linalg.gmres, jax.image.resize)
    return _is_jaxs(eqn, files_of(*algorithms)) or any(
        frame.file_name.startswith(_ALGORITHMS) or frame.function_name in _ALGORITHMS_BESIDE_OTHERS
        for frame in _frames_of_jax(eqn)
    )


def _is_jaxs(eqn: Any, files: tuple[str, ...]) -> bool:
    return any(frame.file_name in files for frame in _frames_of_jax(eqn))


def _frames_of_jax(eqn: Any) -> Iterator[Any]:
    """The innermost frames, as long as they are JAX's."""
    return itertools.takewhile(lambda f: f.file_name.startswith(directory_of("jax")), compat.frames(eqn))


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


#: Algorithms that are not imported with JAX, by where they are.
_ALGORITHMS = tuple(
    os.path.join(directory_of("jax"), *path)
    for path in (
        ("_src", "scipy", "optimize", ""),
        ("experimental", "ode.py"),
        ("experimental", "sparse", "linalg.py"),
    )
)

#: Those in files with functions that hand on the user's `precision=`.
_ALGORITHMS_BESIDE_OTHERS = frozenset({"detrend"})
