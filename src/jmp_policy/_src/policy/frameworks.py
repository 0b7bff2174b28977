"""Defines what a module framework (Flax Linen, Flax NNX) implements, and finds the framework of a module.

`flax.linen` and `flax.nnx` each implement `Framework`. The rooms below Flax look frameworks up here, and so
never import Flax: a framework's implementation is loaded when one of its modules is met.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jmp_policy._src.core.classes import imported_attr, is_instance_of


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

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Splits modules among the arguments of a function from their arrays.

        Returns:
          A `flax.nnx.states.Split`, or None where none of the framework's modules is among them.
        """
        return None


#: By the package that defines the base class of a framework's modules: the name of that class, and what
#: returns the implementation.
_FRAMEWORKS: dict[str, tuple[str, Callable[[], Framework]]] = {}


def register_framework(module: str, base: str, load: Callable[[], Framework]) -> None:
    """Registers a framework.

    Args:
      module: name of the package that defines the base class of its modules.
      base: name of that class.
      load: returns the implementation; called once, for the first of its modules.
    """
    _FRAMEWORKS[module] = base, functools.cache(load)


def framework_of(value: Any) -> Framework | None:
    """Returns the framework whose module a value is an instance of, or None."""
    found = (load for module, (base, load) in _FRAMEWORKS.items() if is_instance_of(value, module, base))
    load = next(found, None)
    return None if load is None else load()


def imported_frameworks() -> Iterator[Framework]:
    """Yields the frameworks that the program has imported."""
    for module, (base, load) in _FRAMEWORKS.items():
        if imported_attr(module, base) is not None:
            yield load()
