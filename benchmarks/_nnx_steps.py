"""Whole NNX training steps, `(model, optimizer, batch) -> loss`, and as functions of arrays."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import jmp_policy as jmpp
from benchmarks._steps import cross_entropy

Step = Callable[[nnx.Module, nnx.Optimizer, Any], jax.Array]


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return cross_entropy(model(batch[0]), batch[1])


def plain_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    """No loss scaling at all."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def library_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    """The step of the documentation; the optimizer's transformation is made by `jmp_policy.loss_scaled`."""
    with jmpp.nnx.keep_state_on_skip(optimizer, model):
        loss, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, batch)
        optimizer.update(model, grads)
    return loss


def optimizer(model: nnx.Module, tx: Any) -> nnx.Optimizer:
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def pure(step: Step, model: nnx.Module, optimizer: nnx.Optimizer) -> tuple[Any, Any]:
    """A step as `(state, batch) -> (state, loss)` over arrays, and its first state."""
    graphdef, state = nnx.split((model, optimizer))

    def run(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss = step(model, optimizer, batch)
        return nnx.state((model, optimizer)), loss

    return run, state
