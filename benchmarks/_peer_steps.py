"""The train step with each peer, as its documentation writes it. Runs in the peers' environment only.

Batch statistics stay in float32, as in each peer's own examples: jmp selects the old ones on a skipped step
(as Haiku's ImageNet example does), Flax's ImageNet example takes the new ones all the same, and mpx says
nothing about them; its step does as jmp's.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import _steps

INITIAL_SCALE = 2.0**15  # float16 holds it: mpx casts its scale to float16.


def jmp_step(model: Any, tx: Any, loss: Any = _steps.cross_entropy) -> Any:
    """jmp: the parameter tree and the inputs are cast in front of a model without dtypes."""
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    of_model = loss

    def in_full(outputs: Any, labels: Any) -> jax.Array:
        return of_model(policy.cast_to_output(outputs), labels)

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            params, inputs = policy.cast_to_compute((params, batch[0]))
            loss, stats = _steps.loss_and_stats(model, params, state.stats, (inputs, batch[1]), in_full)
            return state.scale.scale(loss), (loss, stats)

        (_, (loss, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        grads = state.scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), stats, opt_state
        kept = jmp.select_tree(finite, new, tuple(state[:3]))
        return _steps.State(*kept, state.scale.adjust(finite)), loss

    return step


def jmp_scale() -> Any:
    import jmp

    return jmp.DynamicLossScale(jnp.float32(INITIAL_SCALE))


def jmp_arrays_step(model: Any, tx: Any, loss: Any = _steps.cross_entropy) -> Any:
    """The same with jmp's loss scale taken apart outside the step, where JAX cannot lower it whole."""
    import jmp

    whole = jmp_step(model, tx, loss)

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        value, counter = state.scale
        state, loss = whole(state._replace(scale=jmp.DynamicLossScale(value, counter=counter)), batch)
        return state._replace(scale=(state.scale.loss_scale, state.scale.counter)), loss

    return step


def jmp_arrays() -> Any:
    return jnp.float32(INITIAL_SCALE), jnp.int32(0)


def mpx_step(model: Any, tx: Any, loss: Any = _steps.cross_entropy) -> Any:
    """mpx: its `filter_value_and_grad` casts parameters and batch, but not what the loss closes over."""
    import mpx

    of_model = loss

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any, batch: Any) -> Any:
            return _steps.loss_and_stats(model, params, state.stats, batch, of_model)

        gradient = mpx.filter_value_and_grad(loss_fn, state.scale, has_aux=True)
        (loss, stats), scale, finite, grads = gradient(state.params, batch)
        params, opt_state = mpx.optimizer_update(state.params, tx, state.opt_state, grads, finite)
        stats = mpx.select_tree(finite, stats, state.stats)
        return _steps.State(params, stats, opt_state, scale), loss

    return step


def mpx_scale() -> Any:
    import mpx

    return mpx.DynamicLossScaling(jnp.float32(INITIAL_SCALE), jnp.float32(1))


def flax_step(model: Any, tx: Any, loss: Any = _steps.cross_entropy) -> Any:
    """Flax's DynamicScale around a model with `dtype=float16` by hand, as in its ImageNet example."""
    of_model = loss

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any) -> Any:
            return _steps.loss_and_stats(model, params, state.stats, batch, of_model)

        gradient = state.scale.value_and_grad(loss_fn, has_aux=True)
        scale, finite, (loss, stats), grads = gradient(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        old = state.params, state.opt_state
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return _steps.State(params, stats, opt_state, scale), loss

    return step


def flax_scale() -> Any:
    from flax.training.dynamic_scale import DynamicScale

    return DynamicScale(scale=jnp.float32(INITIAL_SCALE))


def keras_step(scaled: bool) -> tuple[Any, Any]:
    """A step of Keras's ResNet-50 under `mixed_float16` by its stateless functions, and its state's types.

    Args:
      scaled: with `LossScaleOptimizer`.
    """
    os.environ["KERAS_BACKEND"] = "jax"  # Read when Keras is imported.
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    keras.config.set_dtype_policy(before)
    optimizer = keras.optimizers.AdamW(1e-4)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        (params, others, opt_state), ((images,), labels) = state, batch

        def loss_fn(params: Any) -> Any:
            logits, new = model.stateless_call(params, others, images, training=True)
            loss = _steps.cross_entropy(logits, labels)
            with keras.StatelessScope(list(zip(optimizer.variables, opt_state, strict=True))):
                scaled_loss = optimizer.scale_loss(loss)
            return scaled_loss, (loss, new)

        (_, (loss, others)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        params, opt_state = optimizer.stateless_apply(opt_state, grads, params)
        return (params, others, opt_state), loss

    kinds = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return step, tuple([jax.ShapeDtypeStruct(v.shape, v.value.dtype) for v in kind] for kind in kinds)
