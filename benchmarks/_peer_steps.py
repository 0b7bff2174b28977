"""The train step with each peer, as its documentation writes it. Imported in the peers' environment only."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import _steps

INITIAL_SCALE = 2.0**15  # float16 holds it: mpx casts its scale to float16.


def jmp_step(model: Any, tx: Any) -> Any:
    """jmp: the whole parameter tree is cast in front of a model without dtypes."""
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            inputs, labels = policy.cast_to_compute(batch)
            logits = model.apply({"params": policy.cast_to_compute(params)}, inputs)
            loss = _steps.cross_entropy(policy.cast_to_output(logits), labels)
            return state.scale.scale(loss), loss

        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = state.scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jmp.select_tree(finite, new, (state.params, state.opt_state))
        return _steps.State(params, {}, opt_state, state.scale.adjust(finite)), loss

    return step


def jmp_scale() -> Any:
    import jmp

    return jmp.DynamicLossScale(jnp.float32(INITIAL_SCALE))


def jmp_arrays_step(model: Any, tx: Any) -> Any:
    """The same with jmp's loss scale taken apart outside the step, where JAX cannot lower it whole."""
    import jmp

    whole = jmp_step(model, tx)

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        value, counter = state.scale
        state, loss = whole(state._replace(scale=jmp.DynamicLossScale(value, counter=counter)), batch)
        return state._replace(scale=(state.scale.loss_scale, state.scale.counter)), loss

    return step


def jmp_arrays() -> Any:
    return jnp.float32(INITIAL_SCALE), jnp.int32(0)


def mpx_step(model: Any, tx: Any) -> Any:
    """mpx: parameters and batch are cast by its `filter_value_and_grad`."""
    import mpx

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return _steps.cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

        gradient = mpx.filter_value_and_grad(loss_fn, state.scale)
        loss, scale, finite, grads = gradient(state.params, batch)
        params, opt_state = mpx.optimizer_update(state.params, tx, state.opt_state, grads, finite)
        return _steps.State(params, {}, opt_state, scale), loss

    return step


def mpx_scale() -> Any:
    import mpx

    return mpx.DynamicLossScaling(jnp.float32(INITIAL_SCALE), jnp.float32(1))


def flax_step(model: Any, tx: Any) -> Any:
    """Flax's DynamicScale around a model with `dtype=float16` by hand, as in its ImageNet example."""

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return _steps.cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

        scale, finite, loss, grads = state.scale.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return _steps.State(params, {}, opt_state, scale), loss

    return step


def flax_scale() -> Any:
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(scale=jnp.float32(INITIAL_SCALE))
