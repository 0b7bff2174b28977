"""Modules that name a scope in a trace, and are watched by taps.

A trace of an NNX model says nothing of its modules. Here every module, for the length of the trace, is of a
subclass whose methods name a scope, so that path rules find it and profiles and reports show it.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx import governed, param_cast_proxy, precision_plan
from jmp_policy._src.policy.patterns import unused_error
from jmp_policy._src.policy.regions import region
from jmp_policy._src.policy.rules import PolicyMap, path_text
from jmp_policy._src.report.spectrum import tapping


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a module is in the model it came with.

    Args:
      names: of the model's class and of the attributes on the way to the module.
      marked_as: what its operations are marked with; None where no rules are.
    """

    names: tuple[str, ...] = ()
    marked_as: str | None = None


_HERE: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("running module", default=None)


@contextlib.contextmanager
def named(nodes: Any, rules: PolicyMap) -> Iterator[None]:
    """Lets the modules name scopes, and mark their operations where rules govern them."""
    classes: list[tuple[Any, type]] = []
    seen: list[Any] = []
    try:
        for node in nodes:
            if not isinstance(node, nnx.Module):
                continue
            places, met = precision_plan.resolved(node, rules)
            seen += met
            for place in places.values():
                module: Any = place.module
                if any(module is other for other, _ in classes):
                    continue  # Handed in twice.
                marked_as = place.precision.policy.compute_dtype.name if rules.overrides else None
                names = (precision_plan.name_of(node), *map(str, place.path))
                classes.append((module, type(module)))
                object.__setattr__(module, "__class__", _scoped_class(type(module), _Place(names, marked_as)))
        if unused := rules.unused(seen):
            paths = [path_text(path) for path, _ in seen]
            raise unused_error(unused, "the function's models", paths)
        start = _Place((), rules.default.compute_dtype.name if rules.overrides else None)
        token = _HERE.set(start)
        try:
            yield
        finally:
            _HERE.reset(token)
    finally:
        for module, cls in reversed(classes):
            object.__setattr__(module, "__class__", cls)


@functools.lru_cache(maxsize=4096)
def _scoped_class(bare: type, place: _Place) -> type:
    """Returns a subclass whose methods name a scope; the same one for the same place, so that caches hit."""
    namespace: dict[str, Any] = {}
    for name in governed.own_methods(bare):
        method = inspect.getattr_static(bare, name)
        if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
            namespace[name] = _scoped(method, place)
    with param_cast_proxy.CLASSES:
        return param_cast_proxy.subclass(bare, namespace)


def _scoped(method: Callable[..., Any], place: _Place) -> Callable[..., Any]:
    suffix = "" if method.__name__ == "__call__" else f".{method.__name__}"

    @functools.wraps(method)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        here = _HERE.get() or _Place()
        inside = place.names[: len(here.names)] == here.names
        below = place.names[len(here.names) :] if inside else place.names
        with contextlib.ExitStack() as stack:
            if below:
                stack.enter_context(jax.named_scope("/".join(below)))
            if place.marked_as != here.marked_as and place.marked_as is not None:
                stack.enter_context(region(place.marked_as))
            token = _HERE.set(place)
            stack.callback(_HERE.reset, token)
            out = method(*args, **kwargs)
        return tapping.returned("/".join(place.names) + suffix, args[0], args[1:], kwargs, out)

    return scoped
