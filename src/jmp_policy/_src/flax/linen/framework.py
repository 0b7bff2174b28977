"""What else is done with Linen modules: a policy for a block of code, taps on what modules return.

And `Framework`, by which the rooms below Flax, and NNX, ask for it.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import flax.linen as nn

from jmp_policy._src.flax.linen import layers
from jmp_policy._src.flax.linen.governing import Location, locate
from jmp_policy._src.flax.linen.interceptor import call_governed, is_method, pushed, running_location
from jmp_policy._src.flax.linen.wrapped import CHECKED, RULES, bare_class, with_class, wrapped_class
from jmp_policy._src.policy.frameworks import Framework, current_watcher, returned
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike, as_policy_map
from jmp_policy._src.policy.scope import Scope, Seen, in_trial

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


class intercept(contextlib.ContextDecorator):  # noqa: N801 - used like a function
    """Runs the Linen modules called in a with-block, or in a decorated function, under a policy.

    Usable around `module.apply` and inside a module's method; the innermost policy wins. Inside a method of
    a governed module path patterns count from that module, elsewhere from the root. Values that a module
    returns straight to the code in the block have the policy's output dtype. One object may be entered again
    and by several threads.

    Modules of one `nn.jit` class share one trace where their fields are equal, so that rules cannot tell
    them apart by their paths; call `nn.jit` once for each.

    As a decorator of a module's method the method itself is governed too: its arguments, parameters and
    results are cast as if it were the `__call__` of a module of its own.

    Args:
      policy: a `PolicyMap`, a `Policy` or its text.

    Raises:
      ValueError, TypeError: for something that is no policy, when it is made.

    Example:
      >>> import jax, flax.linen as nn, jax.numpy as jnp
      >>> model, x = nn.Dense(2), jnp.ones((1, 3))
      >>> params = model.init(jax.random.key(0), x)
      >>> with intercept("p=f32,c=f16,o=f16"):
      ...     model.apply(params, x).dtype
      dtype('float16')
    """

    def __init__(self, policy: PolicyMapLike):
        self.rules: PolicyMap = as_policy_map(policy)
        self._entered = threading.local()  # What one thread has entered.

    def __enter__(self) -> Scope:
        stack, location = contextlib.ExitStack(), running_location()
        root_path = () if location is None else location.path
        scope = stack.enter_context(pushed(self._scope(root_path, location)))
        vars(self._entered).setdefault("stacks", []).append(stack)
        return scope

    def __exit__(self, *exc: Any) -> None:
        self._entered.stacks.pop().close()

    def _scope(self, root_path: tuple[str, ...], location: Location | None) -> Scope:
        rules = in_trial(self.rules)
        return Scope(rules, root_path=root_path, location=location, model=weakref.ref(self))

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def governed(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], nn.Module) and args[0].scope is not None:
                (module, *rest), running = args, running_location()
                root_path = locate(module, running).path
                with pushed(self._scope(root_path, running)) as scope:
                    call = functools.partial(function, module)
                    return call_governed(scope, module, call, tuple(rest), kwargs)
            with self:
                return function(*args, **kwargs)

        return governed

    def __repr__(self) -> str:
        return f"intercept({self.rules!r})"

    def __reduce__(self) -> Any:
        # What is entered belongs to threads of this process.
        return type(self), (self.rules,)


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

    def governing(self, rules: Any) -> contextlib.AbstractContextManager[Any]:
        """Runs the modules that are called under a policy."""
        return intercept(rules)

    @contextlib.contextmanager
    def tapped(self) -> Iterator[None]:
        """Watches the result of every public method of every module called in a with-block.

        A module under a policy is watched from outside: after its result was cast to output dtype.
        """
        models: list[str] = []
        running: list[Location | None] = [None]

        def interceptor(
            next_fun: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext
        ) -> Any:
            module, method = context.module, context.method_name
            if current_watcher() is None or module.scope is None or not is_method(module, method):
                return next_fun(*args, **kwargs)
            is_watched = method == "__call__" or not (method == "setup" or method.startswith("_"))
            location = locate(module, running[-1])
            model = [type(module).__name__] if is_watched and not location.path else []
            models.extend(model)
            running.append(location)
            try:
                out = next_fun(*args, **kwargs)
                name = "/".join([*models[-1:], *location.path]) + (
                    "" if method == "__call__" else f".{method}"
                )
            finally:
                running.pop()
                del models[len(models) - len(model) :]
            return returned(name, module, args, kwargs, out) if is_watched else out

        with nn.intercept_methods(interceptor):
            yield


FRAMEWORK = LinenFramework()
