"""Spectra of gradients and activations in the training step of an NNX model."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jmp_policy._src.flax.nnx.states import named
from jmp_policy._src.loss_scaling.loss_scale import split_loss
from jmp_policy._src.policy.rules import PolicyMap
from jmp_policy._src.report.spectrum import spectrum


def spectrum_value_and_grad(loss_fn: Callable[..., Any], *, has_aux: bool = False) -> Callable[..., Any]:
    """Counts magnitudes in the gradients of a loss function that takes an NNX model first.

    Args:
      loss_fn: a loss function `(model, *args) -> scalar`, or `(loss, aux)` with `has_aux`.
      has_aux: as for `jax.value_and_grad`.

    Returns:
      A function `(scale_or_optimizer, state, model, *args) -> ((value, grads), state)`, where `state` is a
      `SpectrumState.create(model, loss_fn, *args)`. The gradients are an `nnx.State` of the model's Params,
      and scaled. What the function changes in the model (batch statistics) is changed in it.

    Raises:
      TypeError: when `loss_fn` returns no scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_policy.report import SpectrumState
      >>> def loss_fn(model, x):
      ...     return (model(x) ** 2).mean()
      >>> model, x = nnx.Linear(3, 2, rngs=nnx.Rngs(0)), jnp.ones((4, 3))
      >>> state = SpectrumState.create(model, loss_fn, x)
      >>> (loss, grads), state = spectrum_value_and_grad(loss_fn)(8.0, state, model, x)
      >>> [(row.path, row.kind) for row in state.report().tensors if row.kind == "activation"]
      [('Linear', 'activation')]
    """

    @functools.wraps(loss_fn)
    def counted(scale_or_optimizer: Any, state: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def pure(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
            # New Variables of this trace, which may be written to.
            merged = nnx.merge(graph, *jax.tree.map(lambda x: x, (params, rest)))
            with named((merged,), PolicyMap("float32")):
                loss, aux = split_loss(loss_fn(merged, *args, **kwargs), has_aux)
            return loss, (aux, nnx.state(merged, nnx.Not(nnx.Param)))

        count = spectrum.spectrum_value_and_grad(pure, has_aux=True)
        given = (scale_or_optimizer, state, params, rest)
        ((loss, (aux, changed)), grads), state = count(*given, *args, **kwargs)
        nnx.update(model, changed)
        return ((loss, aux) if has_aux else loss, grads), state

    return counted
