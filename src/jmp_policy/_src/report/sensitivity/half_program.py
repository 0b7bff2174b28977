"""A loss function as it runs under a policy: traced, with the module that each operation belongs to."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_policy._src.autocast.api import autocast
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling.value_and_grad import split_loss
from jmp_policy._src.policy import watching
from jmp_policy._src.policy.frameworks import framework_of, imported_frameworks
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.policy.scope import ACTIVE, Scope
from jmp_policy._src.report.function import Function, as_function, replaced, trained_arguments
from jmp_policy._src.report.spectrum import tapping


class Loss(NamedTuple):
    """A loss function and its arguments.

    Args:
      call: `(params, *args, **kwargs) -> scalar`, or `(scalar, aux)`.
      params: a pytree of arrays, or an NNX model.
      args, kwargs: the rest of its arguments.
      has_aux: whether it returns a pair.
      use: the name of the report, for messages.
    """

    call: Callable[..., Any]
    params: PyTree
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    has_aux: bool
    use: str

    def function(self) -> Function:
        """Returns it as a function of arrays that gives the loss alone."""

        @functools.wraps(self.call)
        def loss(*args: Any, **kwargs: Any) -> Any:
            return split_loss(self.call(*args, **kwargs), self.has_aux)[0]

        return as_function(loss, (self.params, *self.args), dict(self.kwargs), self.use)

    def trained(self) -> list[int]:
        """Returns which of the function's arrays are parameters; raises ValueError when there are none."""
        return trained_arguments(self.function(), self.use)

    def calls(self) -> list[tuple[tapping.Call, Scope | None]]:
        """The calls of modules in it, each with the policy that was active in Flax Linen."""
        watcher, function = tapping.Calls(lambda module: ACTIVE.value), self.function()
        with contextlib.ExitStack() as stack:
            for framework in imported_frameworks():
                stack.enter_context(framework.tapped())
            stack.enter_context(watching.looking(watcher))
            jax.eval_shape(function.call, function.arrays)
        return watcher.calls

    def modules(self) -> dict[tuple[str, ...], Any]:
        """The modules that it calls, by the names that lead to them: the model's class first."""
        # Some modules are only containers of those that run.
        found: dict[tuple[str, ...], Any] = {}
        for call, _ in self.calls():
            names = plain_names(call.name.split("/"))
            for end in range(1, len(names)):
                found.setdefault(names[:end], None)
            found[names] = call.module
        return found

    def under(self, rules: PolicyMap) -> "Loss":
        """Returns the loss whose modules are governed by rules; a function without modules under autocast."""
        calls = self.calls()
        if not calls:
            return self._replace(call=autocast(self.call, rules))
        for call, scope in calls:
            framework = framework_of(call.module)
            policy = (framework and framework.policy_of(call.module)) or (scope and scope.rules)
            if policy:
                raise self._not_bare(call.name, policy)

        @functools.wraps(self.call)
        def governed(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for framework in imported_frameworks():
                    stack.enter_context(framework.governing(rules))
                return self.call(*args, **kwargs)

        def wrapped(value: Any) -> Any:
            framework = framework_of(value)
            return value if framework is None or not framework.holds_arrays else framework.wrap(value, rules)

        params, args, kwargs = jax.tree.map(
            wrapped, (self.params, self.args, dict(self.kwargs)), is_leaf=_is_module
        )
        return self._replace(call=governed, params=params, args=args, kwargs=kwargs)

    def gradient(self) -> tuple[Callable[..., Any], list[Any], list[Any]]:
        """Returns its gradient, a function of the parameters and all arrays, and these."""
        function, trained = self.function(), self.trained()

        def loss_of(params: Sequence[Any], arrays: Sequence[Any]) -> Any:
            return function.result(replaced(arrays, trained, params))

        return jax.grad(loss_of), [function.arrays[i] for i in trained], function.arrays

    def _not_bare(self, path: str, policy: Any) -> ValueError:
        """The error for a module that would keep its own policy under any other."""
        return ValueError(
            f"{self.use} puts the float32 model under its own policies, and {path} is wrapped: it stays "
            f"under {policy!r}. Call the model as it was before `wrap` in the loss."
        )

    def value_and_grad(self, scale: float = 1.0) -> tuple[jax.Array, list[jax.Array]]:
        """Runs it once: the loss, and the gradients of the parameters, in float32 and without the scale."""
        function, trained = self.function(), self.trained()

        def loss_of(params: Sequence[Any], arrays: Sequence[Any]) -> Any:
            loss = function.result(replaced(arrays, trained, params)).astype(jnp.float32)
            return loss * scale, loss

        @jax.jit
        def run(arrays: Sequence[Any]) -> Any:
            (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)([arrays[i] for i in trained], arrays)
            return loss, [grad.astype(jnp.float32) / scale for grad in grads]

        return run(function.arrays)


def plain_names(scopes: Sequence[str]) -> tuple[str, ...]:
    """Returns names of modules from those of scopes, in which methods other than `__call__` are named too."""
    return tuple(part.partition(".")[0] for scope in scopes for part in scope.split("/"))


class Places:
    """Finds the module that an operation belongs to.

    Args:
      modules: as `Loss.modules` gives them; without any the names of the scopes count.
    """

    def __init__(self, modules: Mapping[tuple[str, ...], Any]):
        self._modules = modules
        self.of = functools.cache(self._of)

    def _of(self, scopes: tuple[str, ...]) -> str | None:
        """Returns a path as rules know it; None for what no module does."""
        if not self._modules:
            return "/".join(scopes)
        found: tuple[str, ...] = ()
        for name in plain_names(scopes):
            # A module that was handed to the one that calls it (the cell of an `nn.RNN`) belongs where it was
            # made. Other scopes in the code of a module are none.
            starts = (found[:end] for end in range(len(found), -1, -1))
            found = next((module for s in starts if (module := (*s, name)) in self._modules), found)
        return "/".join(found[1:]) if found else None


def is_below(path: str, above: str) -> bool:
    """Returns whether a path is another one, or below it."""
    return not above or path == above or path.startswith(above + "/")


def _is_module(value: Any) -> bool:
    return framework_of(value) is not None
