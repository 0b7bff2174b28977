"""Whole training steps: written by hand, and with jmp_policy. Each is `(state, batch) -> (state, loss)`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp


class State(NamedTuple):
    params: Any
    stats: Any
    opt_state: Any
    scale: Any = ()


class HandScale(NamedTuple):
    """The dynamic loss scale of the recipe, as it stands in many training scripts."""

    value: jax.Array
    clean: jax.Array


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_and_stats(
    model: Any, params: Any, stats: Any, batch: Any, loss: Any = cross_entropy
) -> tuple[jax.Array, Any]:
    """The loss, and the batch statistics after it; `batch` is `(inputs, labels)`, several inputs a tuple."""
    inputs, labels = batch
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if not stats:
        return loss(model.apply({"params": params}, *inputs), labels), stats
    variables = {"params": params, "batch_stats": stats}
    outputs, new = model.apply(variables, *inputs, mutable=["batch_stats"])
    return loss(outputs, labels), new["batch_stats"]


def init(model: Any, tx: Any, batch: Any, scale: Any = ()) -> State:
    inputs = batch[0] if isinstance(batch[0], tuple) else (batch[0],)
    variables = model.init(jax.random.key(0), *inputs)
    params = variables["params"]
    return State(params, variables.get("batch_stats", {}), tx.init(params), scale)


def hand_scale() -> HandScale:
    return HandScale(jnp.float32(2.0**16), jnp.int32(0))


def plain_step(model: Any, tx: Any, autocast: Any = None, loss: Any = cross_entropy) -> Any:
    """No loss scaling at all; `autocast` is the half type that the loss is put under, if any."""
    of_model = loss

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return loss_and_stats(model, params, state.stats, batch, of_model)

        loss_fn = loss_fn if autocast is None else jmpp.autocast(loss_fn, autocast)
        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), stats, opt_state), loss

    return step


def hand_scaled_step(model: Any, tx: Any, loss: Any = cross_entropy) -> Any:
    """Dynamic loss scaling by hand: one test per parameter, and a select."""
    of_model = loss

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        scale = state.scale

        def loss_fn(params: Any) -> Any:
            loss, stats = loss_and_stats(model, params, state.stats, batch, of_model)
            return loss * scale.value, (loss, stats)

        (_, (loss, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = jax.tree.map(lambda g: g / scale.value, grads)
        finite = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), stats, opt_state
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, tuple(state[:3]))
        grow = scale.clean == 1999
        value = jnp.where(finite, scale.value * jnp.where(grow, 2.0, 1.0), scale.value * 0.5)
        clean = jnp.where(finite & ~grow, scale.clean + 1, 0)
        return State(*kept, HandScale(jnp.clip(value, 2.0**-14, 2.0**24), clean)), loss

    return step


def library_step(model: Any, tx: Any, loss: Any = cross_entropy) -> Any:
    """The step of the documentation; `tx` is made by `jmp_policy.loss_scaled`."""
    of_model = loss

    def step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return loss_and_stats(model, params, state.stats, batch, of_model)

        gradient = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = gradient(state.opt_state, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        if stats:
            stats = jmpp.select_tree(jmpp.grads_finite(opt_state), stats, state.stats)
        return State(optax.apply_updates(state.params, updates), stats, opt_state), loss

    return step
