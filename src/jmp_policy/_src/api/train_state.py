"""Flax's TrainState with one precision for all its parts: model, optimizer, loss scale, skipped steps."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax.training import train_state

from jmp_policy._src.api.precision import check_one_loss_scale, from_config
from jmp_policy._src.core.dtypes import is_half
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.flax.linen.framework import intercept, policy_of
from jmp_policy._src.loss_scaling.metrics import grads_finite
from jmp_policy._src.loss_scaling.selection import select_tree
from jmp_policy._src.loss_scaling.state import Transformation
from jmp_policy._src.loss_scaling.value_and_grad import scaled_value_and_grad
from jmp_policy._src.policy.rules import PolicyMap, policies_of
from jmp_policy._src.policy.scope import ACTIVE

S = TypeVar("S", bound="TrainState")


class TrainState(train_state.TrainState):
    """Flax's `TrainState` that trains under a precision, and keeps state on skipped steps.

    Its fields are those of a `flax.training.train_state.TrainState` whose `tx` is `loss_scaled`: checkpoints
    of either restore into the other. Subclass it for more fields, such as `batch_stats`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
      >>> model, x = nn.Dense(1), jnp.ones((4, 2))
      >>> params = model.init(jax.random.key(0), x)["params"]
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, params=params, tx=optax.sgd(0.1), precision="bf16")
      >>> @jax.jit
      ... def train_step(state, x):
      ...     def loss_fn(params):
      ...         return (state.apply_fn({"params": params}, x) ** 2).mean()
      ...     loss, grads = state.value_and_grad(loss_fn)(state.params)
      ...     return state.apply_gradients(grads=grads), loss
      >>> state, loss = train_step(state, x)
      >>> loss.dtype, int(state.step)
      (dtype('float32'), 1)
    """

    @classmethod
    def create(
        cls: type[S], *, apply_fn: Any, params: PyTree, tx: Transformation, precision: Any, **kwargs: Any
    ) -> S:
        """Makes a state at step 0.

        Args:
          apply_fn: `model.apply` of a bare module, or another function that calls Linen modules. What it
            calls is governed by the policy.
          params: the parameters, in param dtype.
          tx: an optax transformation, without `loss_scaled` around it.
          precision: a `Precision`, or what `from_config` reads: "bf16", a mapping, ... It has the rules, too.
          kwargs: other fields of a subclass.

        Raises:
          TypeError, ValueError: for what is no precision, and a model as `apply_fn`; for a `tx` that has a
            loss scale already, and a model that is wrapped already, under another policy; for parameters in
            half where no policy has such.
        """
        if isinstance(apply_fn, nn.Module):
            raise TypeError("apply_fn is a function: write apply_fn=model.apply in place of the model.")
        precision = from_config(precision)
        module = getattr(apply_fn, "__self__", None)
        if isinstance(module, nn.Module):
            governed = getattr(precision.wrap(module), apply_fn.__name__)
        else:
            governed = intercept(precision.policy)(apply_fn)
        _check_params(params, precision.policy)
        tx = precision.loss_scaled(tx)
        state = super().create(apply_fn=governed, params=params, tx=tx, **kwargs)
        check_one_loss_scale(state.opt_state)
        return state

    def value_and_grad(self, fun: Callable[..., Any], **options: Any) -> Callable[..., tuple[Any, PyTree]]:
        """Differentiates a loss times the state's loss scale; as `jmp_policy.scaled_value_and_grad`.

        Args:
          fun: the loss function.
          options: `argnums`, `has_aux`, `loss` and the others of `scaled_value_and_grad`.

        Returns:
          A function `(*args, **kwargs) -> (value, grads)`: the loss as it is, and gradients for
          `apply_gradients`. It warns of a loss whose Linen modules are all without a policy.
        """
        gradient = scaled_value_and_grad(_with_check(fun, self.apply_fn), **options)

        def value_and_scaled_grad(*args: Any, **kwargs: Any) -> Any:
            return gradient(self.opt_state, *args, **kwargs)

        return value_and_scaled_grad

    def apply_gradients(self: S, *, grads: PyTree, **kwargs: Any) -> S:
        """Updates the state, or leaves it as it was where a gradient is infinite or NaN.

        Args:
          grads: from `value_and_grad`.
          kwargs: other fields to replace, such as `batch_stats`. On a skipped step they stay as they were.

        Returns:
          The new state; `step` counts skipped steps too, as Flax's does.

        Raises:
          TypeError, ValueError: for a field that cannot be chosen at run time: one of another structure than
            before, or a static one with another value.
        """
        new = super().apply_gradients(grads=grads, **kwargs)
        finite = grads_finite(new.opt_state)

        def kept(name: str) -> Any:
            try:
                return select_tree(finite, getattr(new, name), getattr(self, name))
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"apply_gradients({name}=...): on a skipped step the field must stay as it was, and "
                    f"which steps are skipped is known at run time only. {error}\nSet it by "
                    f"state.replace({name}=...), or give it this structure from the first step on."
                ) from error

        return new.replace(params=kept("params"), **{name: kept(name) for name in kwargs})


def _with_check(fun: Any, apply_fn: Any) -> Any:
    """A loss function that warns where it calls Linen modules, and none of them under a policy."""
    module = getattr(apply_fn, "__self__", None)
    rules = policy_of(module) if isinstance(module, nn.Module) else None
    if not callable(fun) or rules is None or not any(is_half(p.compute_dtype) for p in policies_of(rules)):
        return fun

    @functools.wraps(fun)
    def loss(*args: Any, **kwargs: Any) -> Any:
        governed = list[bool]()

        def see(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            governed.append(ACTIVE.value is not None or policy_of(context.module) is not None)
            return next_fun(*args, **kwargs)

        with nn.intercept_methods(see):
            out = fun(*args, **kwargs)
        if governed and not any(governed):
            warnings.warn(
                "No module that the loss calls has a policy: all compute as they were written. Call "
                "state.apply_fn in place of the bare model's apply.",
                UserWarning,
                stacklevel=2,
            )
        return out

    return loss


def _check_params(params: PyTree, rules: PolicyMap) -> None:
    if any(is_half(policy.param_dtype) for policy in policies_of(rules)):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if is_half(getattr(leaf, "dtype", None)):
            raise ValueError(
                f"The parameter {jax.tree_util.keystr(path, simple=True, separator='/')!r} is {leaf.dtype}, "
                f"and the policy {str(rules.default)!r} keeps parameters in "
                f"{rules.default.param_dtype.name}: half ones lose small updates. Initialise the model with "
                "such parameters (param_dtype). Of those that are not trained, a rule says so: "
                "{'base': 'p=bf16, c=bf16'}."
            )
