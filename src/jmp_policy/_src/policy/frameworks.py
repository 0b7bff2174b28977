"""What a module framework (Flax Linen, Flax NNX) implements, and what it shows to reports.

`flax.linen` and `flax.nnx` each implement `Framework`. The rooms below Flax look frameworks up here, and so
never import Flax: a framework's implementation is loaded when one of its modules is met.

A report that counts values, or lists calls, is a `Watcher`. Frameworks show it the result of every public
method with `returned`; functions without modules use `tap`. Without a watcher both give back the very value
that they were given::

    class Printer(Watcher):
        def returned(self, name, module, args, kwargs, out):
            print(name)
            return out

    with framework.tapped(), looking(Printer()):
        model.apply(variables, x)
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

from jmp_policy._src.core.classes import imported_attr, is_instance_of

T = TypeVar("T")
W = TypeVar("W", bound="Watcher")


class Framework:
    """Operations that a module framework implements; the defaults do nothing.

    Attributes:
      holds_arrays: whether its modules hold their parameters, and so are themselves arguments of functions.
      products: classes of layers whose work is a matrix product or convolution.
    """

    holds_arrays: bool = False
    products: tuple[type, ...] = ()

    def wrap(self, module: Any, policy: Any) -> Any:
        """Returns a module that holds its arrays under a policy."""
        raise NotImplementedError

    def has_half_params(self, module: Any) -> bool:
        """Whether a parameter that a module holds has 16 bits or fewer."""
        return False

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside a larger model of another framework.

        Args:
          module: a module.
          rules: the rules that govern it; whoever has the whole model checks that each matches something.

        Returns:
          The module under the rules, and the (path, module) pairs that the rules were asked about already.
        """
        raise NotImplementedError

    def marking(self, rules: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager in which modules mark their operations with the policy that governs them.

        It yields a `policy.scope.Seen` of the modules that ran, or None.
        """
        return contextlib.nullcontext()

    def policy_of(self, module: Any) -> Any:
        """Returns the policy of a wrapped module, which replaces the one around it; None without one."""
        return None

    def governing(self, rules: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager in which modules that hold no arrays are governed by rules."""
        return contextlib.nullcontext()

    def tapped(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context manager in which the outputs of modules are shown to the active watcher."""
        return contextlib.nullcontext()

    def naming(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager in which modules that a function makes of their arrays name scopes."""
        return contextlib.nullcontext()

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Splits modules among the arguments of a function from their arrays.

        Returns:
          A `flax.nnx.states.Split`, or None where none of the framework's modules is among them.
        """
        return None


#: By the package that defines `Module`, the base class of its modules: what gives a framework.
FRAMEWORKS: dict[str, Callable[[], Framework]] = {}


def framework_of(value: Any) -> Framework | None:
    """Returns the framework whose module a value is an instance of, or None."""
    found = (load for package, load in FRAMEWORKS.items() if is_instance_of(value, package, "Module"))
    load = next(found, None)
    return None if load is None else load()


def imported_frameworks() -> Iterator[Framework]:
    """Yields the frameworks that the program has imported."""
    for package, load in FRAMEWORKS.items():
        if imported_attr(package, "Module") is not None:
            yield load()


class Watcher:
    """What sees the results of modules, and the values that are named with `tap`."""

    def returned(self, name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
        """Sees what a method of a module returns; its own result is returned instead.

        Args:
          name: name of the model's class, and of the attributes that lead to the module: "Net/Dense_0".
          module, args, kwargs, out: the module, the arguments of the method, and its result.
        """
        return out

    def tapped(self, x: T, name: str) -> T:
        """Sees a value that `tap` names; its own result is used instead."""
        return x


_CONTEXT = jax.make_user_context(default_value=None)


def current_watcher() -> Watcher | None:
    """The active watcher of this thread."""
    return _CONTEXT.value


@contextlib.contextmanager
def looking(watcher: W) -> Iterator[W]:
    """Makes a watcher the active one for the length of a with-block."""
    with _CONTEXT(watcher):
        yield watcher


def returned(name: str, module: Any, args: Any, kwargs: Any, out: T) -> T:
    """Shows the result of a module's method to the active watcher."""
    watcher = current_watcher()
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
    watcher = current_watcher()
    return x if watcher is None else watcher.tapped(x, name)
