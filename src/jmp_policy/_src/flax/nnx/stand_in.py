"""Classes that stand in for a module's own: subclasses of the same name, which its `__class__` is set to.

A module may ask about its class: `type(self).hook is Base.hook` tells a base class whether somebody has
overridden its hook. `nnx.capture` replaces what a class itself defines, and nothing that it inherits. So a
stand-in defines what the class defines, inherits what the class inherits, and its methods, read from the
class, are those of the author.
"""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from jmp_policy._src.core.classes import make_subclass
from jmp_policy._src.flax import compat


class Method:
    """A method of a stand-in: that of the bare class, whatever that is when it is asked for.

    Args:
      bare: the class.
      name: of the method.
      instead: the function that is bound to a module in its place; None for the author's.
    """

    def __init__(self, bare: type, name: str, instead: Callable[..., Any] | None = None):
        self._bare, self._name, self._instead = bare, name, instead
        functools.update_wrapper(self, inspect.getattr_static(bare, name), updated=())

    def __get__(self, module: Any, cls: type | None = None) -> Any:
        if module is not None and self._instead is not None:
            return types.MethodType(self._instead, module)
        return bound(inspect.getattr_static(self._bare, self._name), module, cls)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self.__get__(module, type(module))(*args, **kwargs)


def bound(method: Any, module: Any, cls: type | None = None) -> Any:
    """A method as it is read from a module, or, where that is None, from a class."""
    return method.__get__(module, cls or type(module)) if hasattr(method, "__get__") else method


def subclass(bare: Any, namespace: dict[str, Any], metaclass: type | None = None) -> type:
    """A subclass of an NNX class, of the same name, which its author's hooks do not see."""
    finish = compat.register_node_class
    return make_subclass(bare, namespace, root=nnx.Pytree, metaclass=metaclass, finish=finish)


def stand_in(
    bare: type, methods: Mapping[str, Any], namespace: dict[str, Any], metaclass: type | None = None
) -> type:
    """A stand-in for a class.

    Args:
      bare: the class.
      methods: what runs in place of methods that it has.
      namespace: other attributes of the new class.
      metaclass: a subclass of the class's metaclass; left out, that one itself.
    """
    own = [name for name, value in vars(bare).items() if _is_public_method(name, value)]
    inherited = {name: method for name, method in methods.items() if name not in own}
    base = subclass(bare, inherited) if inherited else bare
    defined = {name: methods.get(name) or Method(bare, name) for name in own}
    return subclass(base, {**namespace, **defined}, metaclass)


def _is_public_method(name: str, value: Any) -> bool:
    is_public = name == "__call__" or not name.startswith("_")
    return is_public and callable(value) and not isinstance(value, type | staticmethod)


#: Held while classes are made: two threads that make one at a time would get two.
CLASSES = threading.RLock()
