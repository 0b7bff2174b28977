"""Registers classes with `flax.serialization` once the program imports that, and does not import it.

It has a registry but no protocol, and a program that never imports Flax should not pay for it (0.15 s on top
of jax and optax). Importing it eagerly would do that; registering when an object is made would miss a Flax
imported later. What is saved is nested data: `check_depth` refuses what may contain itself, and pickles that
name a module which is gone are explained.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def register_with_flax(cls: type, leaves: Sequence[str], replace: Callable[..., Any]) -> None:
    """Tells Flax how to save objects of a class: leaves by name; settings come from the restoring program.

    Args:
      cls: the class.
      leaves: names of the fields that are saved.
      replace: function `(object, **fields)` that returns a copy with other values of some fields.
    """

    def register(serialization: Any) -> None:
        def to_state_dict(obj: Any) -> dict[str, Any]:
            return {n: serialization.to_state_dict(getattr(obj, n)) for n in leaves}

        def from_state_dict(obj: Any, state: dict[str, Any]) -> Any:
            unknown = sorted(set(state) - set(leaves))
            if unknown:
                raise ValueError(
                    f"The saved state has fields {unknown} that {cls.__name__} does not have; it has "
                    f"{list(leaves)}. Was it saved from another kind of loss scale?"
                )
            # A field that the checkpoint lacks keeps the target's value: it was made before the field was.
            known = [n for n in leaves if n in state]
            restored = {n: serialization.from_state_dict(getattr(obj, n), state[n], name=n) for n in known}
            return replace(obj, **restored)

        serialization.register_serialization_state(cls, to_state_dict, from_state_dict, override=True)

    _after_import("flax.serialization", register)


def _after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now if the module `name` is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _CallingLoader(importlib.abc.Loader):
    """Loader that delegates to the module's loader, and then runs the callback."""

    def __init__(self, loader: Any, callback: Callable[[ModuleType], None]):
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module by asking the other finders, and takes itself off the list."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]):
        self._name = name
        self._callback = callback

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self._callback)
        return spec


#: Levels of a config that are more than any config has: data that contains itself.
_DEEP = 20


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


class _GoneModules(importlib.abc.MetaPathFinder):
    """Finder that explains the import of a private module that is gone, as unpickling makes it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("jmp_policy._"):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}. Pickles that jmp_policy 0.1.0 wrote name such modules, and "
                "only 0.1.0 loads them. Save the state there with flax.serialization.to_bytes (msgpack), and "
                "fit it into the state of this program with jmp_policy.restore_state.",
                name=fullname,
            )


# The last finder: it is asked for what all others have not found.
sys.meta_path.append(_GoneModules())
