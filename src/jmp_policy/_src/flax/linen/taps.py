"""Taps on what Linen modules return."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn

from jmp_policy._src.flax.linen.intercept import is_method
from jmp_policy._src.report.spectrum import tapping


@contextlib.contextmanager
def tapped() -> Iterator[None]:
    """Watches the result of every public method of every module called in a with-block.

    A module under a policy is watched from outside: after its result was cast to output dtype.
    """
    models: list[str] = []

    def interceptor(
        next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
    ) -> Any:
        module, method = context.module, context.method_name
        if tapping.current() is None or module.scope is None or not _is_watched(module, method):
            return next_fun(*args, **kwargs)
        is_model = not module.path
        if is_model:
            models.append(type(module).__name__)
        try:
            out = next_fun(*args, **kwargs)
            name = "/".join([*models[-1:], *module.path]) + ("" if method == "__call__" else f".{method}")
        finally:
            if is_model:
                models.pop()
        return tapping.returned(name, module, args, kwargs, out)

    with nn.intercept_methods(interceptor):
        yield


def _is_watched(module: nn.Module, method: str) -> bool:
    hidden = method == "setup" or (method.startswith("_") and method != "__call__")
    return not hidden and is_method(module, method)
