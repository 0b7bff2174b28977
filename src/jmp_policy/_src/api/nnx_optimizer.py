"""The optimizer of NNX with one precision for all parts of a step."""

from collections.abc import Callable
from typing import Any, TypeVar

import flax.nnx as nnx

from jmp_policy._src.api.precision import Precision, check_one_loss_scale, from_config
from jmp_policy._src.flax.nnx.framework import policy_of
from jmp_policy._src.flax.nnx.graph_nodes import modules_in
from jmp_policy._src.flax.nnx.model_state import keep_state_on_skip
from jmp_policy._src.flax.nnx.train import scaled_value_and_grad
from jmp_policy._src.loss_scaling.state import Transformation

T = TypeVar("T")


class Optimizer(nnx.Optimizer):
    """Flax's `nnx.Optimizer` that scales losses, and skips steps whose gradients are not finite.

    Its state is that of an `nnx.Optimizer` whose transformation is `loss_scaled`: checkpoints of either
    restore into the other.

    Args:
      model: the wrapped model: `precision.wrap(model)`.
      tx: an optax transformation, without `loss_scaled` around it.
      wrt: which Variables are trained, as an NNX filter.
      precision: a `Precision`, or what `from_config` reads: "bf16", a mapping, ...
      graph: as for `nnx.Optimizer`.

    Raises:
      TypeError, ValueError: for what is no precision; for a model that is not wrapped, or under another
        policy; for a `tx` that has a loss scale already.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> import jmp_policy
      >>> precision = jmp_policy.from_config("bf16")
      >>> model = precision.wrap(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
      >>> optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision=precision)
      >>> @nnx.jit
      ... def train_step(optimizer, model, x):
      ...     return optimizer.minimize(lambda model, x: (model(x) ** 2).mean(), model, x)
      >>> loss = train_step(optimizer, model, jnp.ones((4, 2)))
      >>> loss.dtype, int(optimizer.step[...])
      (dtype('float32'), 1)
    """

    def __init__(
        self, model: nnx.Module, tx: Transformation, *, wrt: Any, precision: Any, graph: bool | None = None
    ):
        _check_wrapped(model, precision)
        self._has_policy = _has_policy(model)
        super().__init__(model, from_config(precision).loss_scaled(tx), wrt=wrt, graph=graph)
        check_one_loss_scale(self)

    def value_and_grad(self, fun: Callable[..., T], **options: Any) -> Callable[..., tuple[T, Any]]:
        """Differentiates a loss times its loss scale with respect to `wrt` of the first argument.

        Args:
          fun: the loss function, which takes the model first.
          options: as for `jmp_policy.nnx.scaled_value_and_grad`.

        Returns:
          A function `(model, *args, **kwargs) -> (value, grads)`: the loss as it is, and gradients for
          `update`. It raises ValueError for the model as it was before it was wrapped.
        """
        is_first = "argnums" not in options
        options.setdefault("argnums", nnx.DiffState(0, self.wrt))
        gradient = scaled_value_and_grad(fun, **options)

        def value_and_scaled_grad(*args: Any, **kwargs: Any) -> Any:
            if is_first and self._has_policy and not all(map(_has_policy, modules_in(args[:1]))):
                raise ValueError(
                    f"This optimizer is of a wrapped model, and {type(args[0]).__name__} is not wrapped: it "
                    "computes as it was written. Pass the wrapped model, which shares its Variables."
                )
            return gradient(self, *args, **kwargs)

        return value_and_scaled_grad

    def minimize(
        self, fun: Callable[..., T], model: nnx.Module, *args: Any, has_aux: bool = False, **kwargs: Any
    ) -> T:
        """Trains one step: gradients, update, and on a skipped step all state of models as it was.

        Args:
          fun: the loss function. It takes the model, and returns a scalar, or `(loss, aux)` with `has_aux`.
          model: the model.
          args, kwargs: further arguments of the loss function, other models too.
          has_aux: whether the loss function returns something beside the loss.

        Returns:
          The loss as it is, or `(loss, aux)`. The optimizer is given it as `value`, as some of optax need.

        Raises:
          TypeError: for a model in the place of the loss function.
          ValueError: for the model as it was before it was wrapped.
        """
        if isinstance(fun, nnx.Module):
            raise TypeError(
                f"minimize takes the loss function first: minimize(loss_fn, model); got {type(fun)}."
            )
        with keep_state_on_skip(self, model, *modules_in((args, kwargs))):
            value, grads = self.value_and_grad(fun, has_aux=has_aux)(model, *args, **kwargs)
            loss: Any = value
            self.update(model, grads, value=loss[0] if has_aux else loss)
        return value


def _has_policy(model: nnx.Module) -> bool:
    return any(policy_of(module) is not None for _, module in nnx.iter_modules(model))


def _check_wrapped(model: Any, precision: Any) -> None:
    is_governed = policy_of(model) is not None
    if not is_governed and _has_policy(model):
        return  # A part of it is.
    made = from_config(precision).wrap(model)  # Raises where it is under another policy.
    if not is_governed and nnx.graphdef(made) != nnx.graphdef(model):
        is_made = isinstance(precision, Precision)
        made = "" if is_made else f"precision = jmp_policy.from_config({precision!r}); "
        raise ValueError(
            f"The model ({type(model).__name__}) is not wrapped: it would compute as it was written, "
            f"whatever the precision. Make it before the optimizer: {made}model = precision.wrap(model). "
            "With autocast it stays as it is: flax.nnx.Optimizer(model, jmp_policy.loss_scaled(tx, "
            "jmp_policy.DynamicLossScale()), wrt=wrt) goes with jmp_policy.nnx.scaled_value_and_grad."
        )
