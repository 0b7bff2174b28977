"""A policy for the Linen modules that are called in a with-block or a decorated function."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from jmp_policy._src.flax.linen.governing import Location, locate
from jmp_policy._src.flax.linen.interceptor import call_governed, pushed, running_location
from jmp_policy._src.policy.rules import PolicyMap, PolicyMapLike, as_policy_map
from jmp_policy._src.policy.scope import Scope, in_trial


class _Entered(threading.local):
    """What one thread has entered."""

    def __init__(self) -> None:
        self.stacks: list[contextlib.ExitStack] = []


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
        self._entered = _Entered()

    def __enter__(self) -> Scope:
        stack, location = contextlib.ExitStack(), running_location()
        root_path = () if location is None else location.path
        scope = stack.enter_context(pushed(self._scope(root_path, location)))
        self._entered.stacks.append(stack)
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
