"""What the rooms below Flax, and reports, ask of Linen: `Framework`, and taps on what modules return."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import flax.linen as nn

from jmp_policy._src.flax.linen import layers
from jmp_policy._src.flax.linen.governing import Location, locate
from jmp_policy._src.flax.linen.interceptor import is_method, pushed
from jmp_policy._src.flax.linen.wrapped import CHECKED, RULES, bare_class, with_class, wrapped_class
from jmp_policy._src.policy import watching
from jmp_policy._src.policy.frameworks import Framework
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.policy.scope import Scope, Seen

M = TypeVar("M", bound=nn.Module)


def wrap_part(module: M, rules: PolicyMap) -> M:
    """Wraps a Linen module inside a larger model, whose owner checks that its rules match.

    Example:
      >>> import flax.linen as nn
      >>> from jmp_policy import PolicyMap
      >>> part = wrap_part(nn.Dense(2), PolicyMap("mixed_float16", {"elsewhere/in/the/model": "float32"}))
      >>> type(part).__name__
      'Dense'
    """
    wrapped = with_class(module, wrapped_class(bare_class(module), rules))
    wrapped.__dict__[CHECKED] = True
    return wrapped


def policy_of(module: nn.Module) -> PolicyMap | None:
    """The rules that a wrapped module computes under; None for a bare one.

    Example:
      >>> import flax.linen as nn
      >>> from jmp_policy.linen import wrap
      >>> policy_of(wrap(nn.Dense(2), "mixed_float16"))
      PolicyMap('params=float32,compute=float16,output=float32')
    """
    return getattr(type(module), RULES, None)


def bare(module: M) -> M:
    """The module without a policy of its own; itself if it has none."""
    return module if policy_of(module) is None else with_class(module, bare_class(module))


@functools.cache
def _seen_under(_: PolicyMap) -> Seen:
    """What equal rules have met so far: a function that they once traced calls no module again."""
    return Seen()


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


class LinenFramework(Framework):
    """`flax.linen`."""

    products = (*layers.PRODUCTS, nn.MultiHeadDotProductAttention)

    def wrap_part(self, module: Any, rules: Any) -> tuple[Any, Sequence[tuple[str, Any]]]:
        """Wraps a module inside an NNX model; its rules are asked when it is called."""
        return wrap_part(module, rules), ()

    @contextlib.contextmanager
    def marking(self, rules: Any) -> Iterator[Any]:
        """Lets each module mark its operations with its policy, for `autocast`; casts nothing."""
        with pushed(Scope(rules, mark_only=True, seen=_seen_under(rules))) as scope:
            yield scope.seen

    def policy_of(self, module: Any) -> PolicyMap | None:
        """The rules of a wrapped module."""
        return policy_of(module)

    def tapped(self) -> contextlib.AbstractContextManager[Any]:
        """Hands the result of every public method to the active taps."""
        return tapped()

    def governing(self, rules: Any) -> contextlib.AbstractContextManager[Any]:
        """Runs the modules that are called under a policy."""
        from jmp_policy._src.flax.linen.intercept import intercept  # For autocast and reports.

        return intercept(rules)


FRAMEWORK = LinenFramework()
