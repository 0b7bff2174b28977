"""Gradients of a scaled loss of NNX modules."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import flax.nnx as nnx

from jmp_policy._src.loss_scaling.loss_scale import restore_scale, scale_loss, split_loss
from jmp_policy._src.loss_scaling.state import find_loss_scale

T = TypeVar("T")

#: Make contexts for the computing of a gradient: what a model stores changes there by what it writes itself.
WATCHING = contextvars.ContextVar[tuple[Callable[[], Any], ...]]("watching", default=())


def scaled_value_and_grad(
    fun: Callable[..., T],
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    loss: str | None = None,
) -> Callable[..., tuple[T, Any]]:
    """Differentiates the loss times its loss scale, as `nnx.value_and_grad`; the value is the loss.

    Args:
      fun: the loss function, which takes the module (and more), and returns a real scalar, or
        `(loss, aux)` with `has_aux`. Compute the loss in float32; a float16 loss draws a warning.
      argnums, has_aux, holomorphic, allow_int, graph, graph_updates: as for `nnx.value_and_grad`; among
        argnums `nnx.DiffState(0, filter)` for parameters other than `nnx.Param`.
      loss: of several losses with a loss scale each, the name of this one.

    Returns:
      A function `(scale_or_optimizer, model, *args, **kwargs) -> (value, grads)`, where `value` is
      `(loss, aux)` with `has_aux`. The first argument is a loss scale, an `nnx.Optimizer` whose
      transformation is `loss_scaled`, or its `opt_state`. The loss is multiplied in float32; `value` is
      unscaled; `grads` are still scaled, as `loss_scaled` takes them. Changes of the module's state in
      the forward pass are kept, as with `nnx.value_and_grad`.

    Raises:
      TypeError: when `fun` returns no scalar.
      ValueError: when no loss scale, or more than one, is found.

    Example:
      >>> import jax.numpy as jnp
      >>> import flax.nnx as nnx
      >>> from jmp_policy import StaticLossScale
      >>> model = nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> def loss_fn(model, x):
      ...     return model(x).sum()
      >>> loss, grads = scaled_value_and_grad(loss_fn)(StaticLossScale(8.0), model, jnp.ones((1, 1)))
      >>> float(grads.kernel[0, 0])
      8.0
    """
    if not callable(fun):
        raise TypeError(f"scaled_value_and_grad needs a loss function, got {fun!r}.")

    def value_and_scaled_grad(scale_or_optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(scale_or_optimizer, nnx.Module):
            raise TypeError(
                "scaled_value_and_grad(loss_fn) is called as (optimizer, model, ...); the first argument is "
                f"the model ({type(scale_or_optimizer).__name__})."
            )
        scale = find_loss_scale(scale_or_optimizer, loss)

        @functools.wraps(fun)  # NNX puts keyword arguments in their places by the signature.
        def scaled_loss(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            unscaled, aux = split_loss(fun(*args, **kwargs), has_aux)
            return scale_loss(scale, unscaled), (unscaled, aux)

        gradient = nnx.value_and_grad(
            scaled_loss,
            argnums=argnums,
            has_aux=True,
            holomorphic=holomorphic,
            allow_int=allow_int,
            graph=graph,
            graph_updates=graph_updates,
        )
        with contextlib.ExitStack() as stack:
            for watch in WATCHING.get():
                stack.enter_context(watch())
            (_, (unscaled, aux)), grads = gradient(*args, **kwargs)
        value = (unscaled, aux) if has_aux else unscaled
        return value, restore_scale(scale, unscaled, grads)

    return value_and_scaled_grad
