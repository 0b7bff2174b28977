"""Taps on what Linen modules return."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn

from jmp_policy._src.flax.linen.governing import Location, locate
from jmp_policy._src.flax.linen.interceptor import is_method
from jmp_policy._src.policy import watching


@contextlib.contextmanager
def tapped() -> Iterator[None]:
    """Watches the result of every public method of every module called in a with-block.

    A module under a policy is watched from outside: after its result was cast to output dtype.
    """
    models: list[str] = []
    running: list[Location | None] = [None]

    def interceptor(
        next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module, method = context.module, context.method_name
        if watching.current() is None or module.scope is None or not is_method(module, method):
            return next_fun(*args, **kwargs)
        is_watched = method == "__call__" or not (method == "setup" or method.startswith("_"))
        location = locate(module, running[-1])
        model = [type(module).__name__] if is_watched and not location.path else []
        models.extend(model)
        running.append(location)
        try:
            out = next_fun(*args, **kwargs)
            name = "/".join([*models[-1:], *location.path]) + ("" if method == "__call__" else f".{method}")
        finally:
            running.pop()
            del models[len(models) - len(model) :]
        return watching.returned(name, module, args, kwargs, out) if is_watched else out

    with nn.intercept_methods(interceptor):
        yield
