"""Differentiates a loss times its loss scale.

The gradients are returned scaled and the loss unscaled; `loss_scaled` (or `LossScale.unscale`) divides. If
gradients were unscaled here, the optimizer could not know which scale was used.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jmp_policy._src.core.classes import check_no_nnx_module
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import loss_scale, scale_mistakes
from jmp_policy._src.loss_scaling.float8_state import next_histories
from jmp_policy._src.loss_scaling.state import find_loss_scale

T = TypeVar("T")


def scaled_value_and_grad(
    fun: Callable[..., T],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    loss: str | None = None,
) -> Callable[..., tuple[T, PyTree]]:
    """Differentiates the loss times its scale, as `jax.value_and_grad` does, and returns the loss unscaled.

    Args:
      fun: the loss function, returning a real scalar, float32 at best, or `(loss, aux)` with `has_aux`.
      argnums, has_aux, holomorphic, allow_int: as for `jax.value_and_grad`.
      loss: where there are several losses with a loss scale each, the name of this one.

    Returns:
      A function `(scale_or_opt_state, *args, **kwargs) -> (value, grads)`, with a loss scale or an optimizer
      state that holds one. `value` is the loss, unscaled, or `(loss, aux)`; `grads` are still scaled, in the
      dtypes of `jax.value_and_grad`. Where the loss is not finite, neither are they: the step is skipped.

    Raises:
      TypeError, ValueError: when `fun` returns no scalar; for an NNX module, which is for
        `jmp_policy.nnx.scaled_value_and_grad`; when no loss scale, or more than one, is found.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_policy import StaticLossScale
      >>> loss, grad = scaled_value_and_grad(lambda w: w**2)(StaticLossScale(8.0), jnp.float32(3.0))
      >>> float(loss), float(grad)
      (9.0, 48.0)

    References:
      Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """
    if not callable(fun):
        raise TypeError(f"scaled_value_and_grad needs a loss function, got {fun!r}.")
    if getattr(fun, "__name__", "") == "value_and_scaled_grad":
        raise scale_mistakes.no_loss_itself()
    numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
    if not all(hasattr(number, "__index__") for number in numbers):
        raise scale_mistakes.called_at_once(argnums)

    def value_and_scaled_grad(scale_or_opt_state: Any, /, *args: Any, **kwargs: Any) -> Any:
        params = [args[i] for i in numbers if -len(args) <= i < len(args)]
        check_no_nnx_module("scaled_value_and_grad", *params)
        scale = find_loss_scale(scale_or_opt_state, loss)
        if len(args) <= max(numbers, default=0):
            raise scale_mistakes.too_few(len(args), argnums)

        def scaled_loss(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            unscaled, aux = loss_scale.split_loss(fun(*args, **kwargs), has_aux)
            return loss_scale.scale_loss(scale, unscaled), (unscaled, aux)

        gradient = jax.value_and_grad(scaled_loss, argnums, True, holomorphic, allow_int)
        (_, (unscaled, aux)), grads = gradient(*args, **kwargs)
        if loss_scale.holds_float8_state(grads):
            params = tuple(args[i] for i in numbers)
            grads = next_histories(grads, params if isinstance(argnums, Sequence) else params[0])
        value: Any = (unscaled, aux) if has_aux else unscaled
        return value, loss_scale.restore_scale(scale, unscaled, grads)

    return value_and_scaled_grad
