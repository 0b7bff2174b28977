"""Differentiates a loss times its loss scale.

The gradients are returned scaled and the loss unscaled; `loss_scaled` (or `LossScale.unscale`) divides. If
gradients were unscaled here, the optimizer could not know which scale was used.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
from jax import lax

from jmp_policy._src.core.classes import check_no_nnx_module
from jmp_policy._src.core.dtypes import promote_dtype
from jmp_policy._src.core.settings import positive_int
from jmp_policy._src.core.types import PyTree
from jmp_policy._src.loss_scaling import float16_loss, scale_mistakes
from jmp_policy._src.loss_scaling.float8_state import next_histories
from jmp_policy._src.loss_scaling.loss_scale import LossScale, holds_float8_state
from jmp_policy._src.loss_scaling.retries import repeat_until_finite, replace_loss_scale
from jmp_policy._src.loss_scaling.state import find_loss_scale

T = TypeVar("T")


@overload
def scaled_value_and_grad(
    fun: Callable[..., T],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    loss: str | None = None,
    retries: Literal[0] = 0,
) -> Callable[..., tuple[T, PyTree]]: ...


@overload
def scaled_value_and_grad(
    fun: Callable[..., T],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    loss: str | None = None,
    retries: int,
) -> Callable[..., tuple[tuple[T, PyTree], Any]]: ...


def scaled_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    loss: str | None = None,
    retries: int = 0,
) -> Callable[..., Any]:
    """Differentiates the loss times its scale, as `jax.value_and_grad` does, and returns the loss unscaled.

    Args:
      fun: the loss function, returning a real scalar, or `(loss, aux)` with `has_aux`. Compute the loss
        in float32; a float16 loss draws a warning.
      argnums, has_aux, holomorphic, allow_int: as for `jax.value_and_grad`.
      loss: where there are several losses with a loss scale each, the name of this one.
      retries: repeat a step whose gradients are not finite up to this many times, each time with the
        scale that `adjust(False)` gives, instead of skipping it. Each repetition costs a whole forward
        and backward pass; a step without overflow costs nothing more.

    Returns:
      A function `(scale_or_opt_state, *args, **kwargs) -> (value, grads)`, where `value` is
      `(loss, aux)` with `has_aux`. The first argument is a loss scale, or an optimizer state that holds
      one. The loss is multiplied in float32; `value` is unscaled; `grads` are still scaled and have the
      dtypes `jax.value_and_grad` would give. Where the loss is not finite, neither are the gradients,
      so that the step is skipped.

      With `retries` it returns `((value, grads), scale_or_opt_state)`: the state that was passed in, with
      the scale that the gradients were computed with. Pass that to `update`.

    Raises:
      TypeError: when `fun` returns no scalar; for an NNX module, which `jmp_policy.nnx.scaled_value_and_grad`
        takes.
      ValueError: when no loss scale, or more than one, is found; for a name that is missing or unknown.

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
    if retries:
        positive_int(retries, "retries")

    def scaled_loss(scale: LossScale, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        unscaled, aux = split_loss(fun(*args, **kwargs), has_aux)
        return scale_loss(scale, unscaled), (unscaled, aux)

    shift = _shift(argnums)
    gradient = jax.value_and_grad(
        scaled_loss, shift, has_aux=True, holomorphic=holomorphic, allow_int=allow_int
    )

    def once(scale: LossScale, args: Any, kwargs: Any) -> tuple[Any, PyTree]:
        (_, (unscaled, aux)), grads = gradient(scale, *args, **kwargs)
        value = (unscaled, aux) if has_aux else unscaled
        params = tuple(args[i] for i in argnums) if isinstance(argnums, Sequence) else args[argnums]
        if holds_float8_state(params):
            grads = next_histories(grads, params)
        return value, restore_scale(scale, unscaled, grads)

    def value_and_scaled_grad(scale_or_opt_state: Any, /, *args: Any, **kwargs: Any) -> Any:
        numbers = argnums if isinstance(argnums, Sequence) else (argnums,)
        check_no_nnx_module("scaled_value_and_grad", *[args[i] for i in numbers if i < len(args)])
        scale = find_loss_scale(scale_or_opt_state, loss)
        if len(args) <= max(numbers, default=0):
            raise scale_mistakes.too_few(len(args), argnums)
        if not retries:
            return once(scale, args, kwargs)
        result, scale = repeat_until_finite(lambda s: once(s, args, kwargs), scale, retries)
        return result, replace_loss_scale(scale_or_opt_state, scale, loss)

    return value_and_scaled_grad


def _shift(argnums: int | Sequence[int]) -> Any:
    """Shifts argument numbers by one: the differentiated function takes the loss scale first."""

    def one(argnum: int) -> int:
        return argnum + 1 if argnum >= 0 else argnum

    return tuple(map(one, argnums)) if isinstance(argnums, Sequence) else one(operator.index(argnums))


def split_loss(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Splits what a loss function returned into the loss and the auxiliary output."""
    if has_aux and isinstance(out, tuple | list) and len(out) == 2:
        return out[0], out[1]
    if has_aux or jax.tree.structure(out) != jax.tree.structure(0):
        raise scale_mistakes.no_loss(out, has_aux)
    return out, None


def scale_loss(scale: LossScale, loss: Any) -> Any:
    """Multiplies the loss by its scale in float32; gradients of a loss that is not finite become NaN."""
    dtype = getattr(loss, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return scale.scale(loss)  # A Python number, or what jax.value_and_grad will refuse.
    # A NaN loss whose gradients happen to be finite is a bad step too (Flax's DynamicScale counts it as
    # good). A NaN factor turns the cotangent, and so all gradients, to NaN for the price of one scalar:
    # x - x is 0 for every finite number, and NaN for inf and NaN.
    promoted = loss.astype(promote_dtype(dtype))
    one_if_finite = lax.stop_gradient(promoted - promoted) + 1
    if dtype == jnp.float16:
        return promoted * (float16_loss.checked_cotangent(scale) * one_if_finite)
    return scale.scale(loss) * one_if_finite


def restore_scale(scale: LossScale, loss: Any, grads: PyTree) -> PyTree:
    """Multiplies gradients of a float16 loss by the part of the scale that its cotangent could not hold."""
    return float16_loss.restore(scale, grads) if getattr(loss, "dtype", None) == jnp.float16 else grads
