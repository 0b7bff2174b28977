"""Shows what modules return to a watcher: a report that counts values, or lists calls.

Module frameworks show the result of every public method with `returned`; functions without modules use `tap`.
Without a watcher both give back the very value that they were given::

    class Printer(Watcher):
        def returned(self, name, module, args, kwargs, out):
            print(name)
            return out

    with framework.tapped(), looking(Printer()):
        model.apply(variables, x)
"""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")
W = TypeVar("W", bound="Watcher")


class Watcher:
    """What sees the results of modules, and the values that are named with `tap`."""

    def returned(self, name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
        """Sees what a method of a module returns; its own result is returned instead.

        Args:
          name: name of the model's class, and of the attributes that lead to the module: "Net/Dense_0".
          module: the module.
          args, kwargs: arguments of the method.
          out: its result.
        """
        return out

    def tapped(self, x: T, name: str) -> T:
        """Sees a value that `tap` names; its own result is used instead."""
        return x


_CONTEXT = jax.make_user_context(default_value=None)


def current() -> Watcher | None:
    """The active watcher of this thread."""
    return _CONTEXT.value


@contextlib.contextmanager
def looking(watcher: W) -> Iterator[W]:
    """Makes a watcher the active one for the length of a with-block."""
    with _CONTEXT(watcher):
        yield watcher


def returned(name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
    """Shows the result of a module's method to the active watcher."""
    watcher = current()
    return out if watcher is None else watcher.returned(name, module, args, kwargs, out)


def tap(x: T, name: str) -> T:
    """Names a value for `gradient_spectrum`, in functions without Flax modules.

    Args:
      x: an array, or a pytree whose floating arrays are counted.
      name: name in the report; where there are several arrays, the path of each is added. Counts of equal
        names add up.

    Returns:
      The same value; the very same object outside of `gradient_spectrum`.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.ones(3)
      >>> tap(x, "hidden") is x
      True
    """
    watcher = current()
    return x if watcher is None else watcher.tapped(x, name)
