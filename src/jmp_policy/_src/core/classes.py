"""Classes of others: looked up without importing their package, and subclassed without their hooks running.

The library stands a subclass of the same name in for a user's class. Made with a class statement, it would
run what the class's author wrote for new classes: a registry would then hold the library's class in place of
the author's, and a hook with a required keyword would raise.
"""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import jax


def imported_attr(module: str, name: str) -> Any:
    """A module's attribute if the program has imported that module, else None."""
    return getattr(sys.modules.get(module), name, None)


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Whether a value is an instance of `module.name`; of a module that was never imported nothing is."""
    cls = imported_attr(module, name)
    return cls is not None and isinstance(value, cls)


def is_nnx_object(value: Any) -> bool:
    """Whether a value is a module, container or stream of random numbers of Flax NNX."""
    return is_instance_of(value, "flax.nnx", "Pytree")


def check_no_nnx_module(function: str, *args: Any) -> None:
    """Raises TypeError for NNX modules in pytrees: a function of arrays would flatten and not update them."""
    is_known = imported_attr("flax.nnx", "Pytree") is not None
    if is_known and any(map(is_nnx_object, jax.tree.leaves(args, is_leaf=is_nnx_object))):
        raise TypeError(
            f"{function} is for functions of arrays, and an NNX module that is handed to it would lose its "
            f"updates (batch statistics, random streams). Use jmp_policy.nnx.{function}, which keeps them."
            + " With graph=False its gradients are a module."
            * (function == "scaled_value_and_grad")
        )


def make_subclass(
    bare: type,
    namespace: dict[str, Any],
    *,
    root: type,
    metaclass: type | None = None,
    finish: Callable[[Any], None] = lambda cls: None,
) -> Any:
    """Returns a subclass of a class, of the same name, without running its author's hooks.

    Neither `__init_subclass__` nor the `__new__` of a metaclass runs, unless a metaclass is Python's own or
    comes from the package that defines `root`. What hooks have set on the class is inherited.
    The new class is among `bare.__subclasses__()`: Python has no way around that.

    Args:
      bare: the class.
      namespace: attributes of the new class; `__set_name__` is called on those that have it.
      root: base class that the framework defines; `bare` derives from it.
      metaclass: a subclass of the class's metaclass; left out, that one itself.
      finish: what the framework's own hook has to do for the new class.
    """
    meta: Any = metaclass or type(bare)
    packages = sys.stdlib_module_names | {root.__module__.partition(".")[0]}
    known = next(m for m in meta.__mro__ if m.__module__.partition(".")[0] in packages)
    names = {"__module__": bare.__module__, "__qualname__": bare.__qualname__, "__doc__": bare.__doc__}
    # Python calls the nearest `__init_subclass__` above the new class: that of a first base, which does
    # nothing, and is a base no longer afterwards.
    base: Any = bare
    while base.__dictoffset__:
        base = base.__base__
    cls = known.__new__(meta, bare.__name__, (_without_hook(base), bare), names | namespace)
    type.__setattr__(cls, "__bases__", (bare,))
    finish(cls)
    return cls


@functools.cache
def _without_hook(base: type) -> type:
    """Returns a class whose subclasses go unnoticed.

    Python takes a base away only if objects keep their layout in memory. So this one adds a `__dict__` to the
    class to which the user's classes add theirs.
    """
    hook = classmethod(lambda cls, **keywords: None)
    return types.new_class("WithoutHook", (base,), {}, lambda ns: ns.update(__init_subclass__=hook))
