"""What went wrong in other libraries, each as a test that it does not here."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from helpers import CNN

import jmp_policy as jmpp


def test_jmp_min_loss_scale_survives_a_flatten():
    scale = jmpp.DynamicLossScale(4.0, min_loss_scale=2.0)
    for _ in range(5):
        scale = jax.tree.map(lambda x: x, scale.adjust(False))
    assert float(scale.loss_scale) == scale.min_loss_scale == 2.0


def test_jmp_integers_are_not_scaled_and_policies_print():
    assert int(jmpp.StaticLossScale(8.0).scale(jnp.int32(3))) == 3
    assert "bfloat16" in str(jmpp.Policy(jnp.dtype("bfloat16"), "bfloat16", "bfloat16"))
    assert jmpp.get_policy("p=f32, c=f16") == jmpp.get_policy("p=f32,c=f16")


def test_mpx_gradients_do_not_depend_on_the_scale_on_a_growth_step():
    """mpx unscales with the adjusted scale: gradients come out halved when it grows."""
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale(2.0**10, growth_interval=2))
    state, seen, scales = tx.init(jnp.ones(2)), [], []
    for _ in range(6):
        _, grad = jmpp.scaled_value_and_grad(lambda w: jnp.sum(w * 3))(state, jnp.ones(2))
        updates, state = tx.update(grad, state)
        seen.append(float(updates[0]))
        scales.append(float(state.loss_scale.loss_scale))
    assert seen == [-3.0] * 6
    assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12, 2.0**12, 2.0**13]


def test_mpx_two_models_with_different_half_types_at_once():
    """mpx has one global half type, and setting it to bfloat16 does nothing."""
    x, variables = jnp.ones((1, 4)), nn.Dense(4).init(jax.random.key(0), jnp.ones((1, 4)))
    for half in ("bfloat16", "float16", "bfloat16"):
        model = jmpp.wrap(nn.Dense(4), f"c={half}")
        assert model.apply(variables, x).dtype == half


def test_flax_growth_is_exact_and_nothing_is_weakly_typed():
    scale, traces = jmpp.DynamicLossScale(8.0, growth_interval=3), []

    @jax.jit
    def step(scale):
        traces.append(scale)
        return scale.adjust(True)

    seen = []
    for _ in range(4):
        scale = step(scale)
        seen.append(float(scale.loss_scale))
    assert seen == [8.0, 8.0, 16.0, 16.0]
    assert len(traces) == 1
    # The peer, for comparison: one step late.
    peer, seen = dynamic_scale.DynamicScale(growth_interval=3, scale=8.0), []
    for _ in range(4):
        peer, *_ = peer.value_and_grad(lambda w: w)(jnp.float32(1))
        seen.append(float(peer.scale))
    assert seen == [8.0, 8.0, 8.0, 16.0]


def test_flax_small_float16_gradients_survive_the_first_step():
    """A weakly typed scale multiplies in float16 and flushes what it was to save."""
    scale = jmpp.DynamicLossScale(2.0**16)

    def loss(w):
        return jnp.sum(w.astype(jnp.float16) * jnp.float16(2.0**-10)).astype(jnp.float32) * 2.0**-20

    _, grad = jmpp.scaled_value_and_grad(loss)(scale, jnp.ones(2))
    np.testing.assert_array_equal(scale.unscale(grad), np.full(2, 2.0**-30))
    assert not np.any(jax.grad(loss)(jnp.ones(2)))


def test_flax_a_nan_loss_with_finite_gradients_is_skipped():
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale())
    state = tx.init(jnp.ones(2))
    _, grads = jmpp.scaled_value_and_grad(lambda w: w.sum() + jnp.nan)(state, jnp.ones(2))
    _, state = tx.update(grads, state)
    assert not bool(jmpp.grads_finite(state))


@pytest.mark.slow
def test_flax_examples_batch_statistics_survive_an_overflow():
    model = jmpp.wrap(CNN(), "mixed_float16")
    tx = jmpp.loss_scaled(optax.sgd(1e-2), jmpp.DynamicLossScale())
    x = jnp.ones((4, 8, 8, 3))
    variables = model.init(jax.random.key(0), x)

    @jax.jit
    def step(variables, opt_state, x):
        def loss(params):
            out, new = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.mean(out**2), new["batch_stats"]

        value_and_grad = jmpp.scaled_value_and_grad(loss, has_aux=True)
        (_, stats), grads = value_and_grad(opt_state, variables["params"])
        updates, opt_state = tx.update(grads, opt_state, variables["params"])
        kept = jmpp.select_tree(jmpp.grads_finite(opt_state), stats, variables["batch_stats"])
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, "batch_stats": kept}, opt_state, stats

    opt_state = tx.init(variables["params"])
    after, opt_state, stats = step(variables, opt_state, x * 1e6)
    assert not bool(jmpp.all_finite(stats))
    jax.tree.map(np.testing.assert_array_equal, after, variables)
    after, opt_state, _ = step(after, opt_state, x)
    assert bool(jmpp.grads_finite(opt_state))


def test_optax_adam_does_not_square_float16_gradients():
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.NoOpLossScale())
    _, state = tx.update(jnp.full(2, 300, jnp.float16), tx.init(jnp.ones(2)), jnp.ones(2))
    np.testing.assert_allclose(state.inner_state[0].nu, 0.001 * 300**2, rtol=1e-5)


def test_optax_global_norm_of_float16_gradients_does_not_clip_to_zero():
    tx = jmpp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.scale(-1)), jmpp.NoOpLossScale())
    updates, _ = tx.update(jnp.full(1, 300, jnp.float16), tx.init(jnp.ones(1)), jnp.ones(1))
    np.testing.assert_allclose(updates, [-1.0])


def test_optax_clip_does_not_turn_inf_into_one():
    tx = jmpp.loss_scaled(optax.chain(optax.clip(1.0), optax.sgd(1.0)), jmpp.NoOpLossScale())
    updates, state = tx.update(jnp.full(1, jnp.inf), tx.init(jnp.ones(1)), jnp.ones(1))
    assert updates.tolist() == [0.0]
    assert int(state.skipped) == 1


def test_optax_accumulation_is_in_float32_and_not_poisoned():
    tx = jmpp.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 3), jmpp.NoOpLossScale())
    state = tx.init(jnp.ones(1, jnp.float16))
    for g in (2048.0, jnp.nan, 1.0, 1.0):
        updates, state = tx.update(jnp.full(1, g, jnp.float16), state, jnp.ones(1, jnp.float16))
    np.testing.assert_allclose(updates, [-2050 / 3], rtol=1e-6)


def test_optax_apply_if_finite_lets_nan_through_after_errors():
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale())
    state = tx.init(jnp.ones(1))
    for _ in range(50):
        updates, state = tx.update(jnp.full(1, jnp.nan), state, jnp.ones(1))
        assert updates.tolist() == [0.0]
    assert bool(jmpp.all_finite(state.inner_state))


def test_torch_and_keras_scale_has_a_floor_and_a_ceiling():
    scale = jmpp.DynamicLossScale(growth_interval=1)
    for finite in (False, True):
        moved = functools.reduce(lambda s, _: s.adjust(finite), range(200), scale)
        assert 0 < float(moved.loss_scale) < np.inf
    assert float(moved.loss_scale) == scale.max_loss_scale


def test_torch_float16_parameters_are_taken():
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale())
    params = jnp.ones(2, jnp.float16)
    updates, _ = tx.update(jnp.full(2, 64, jnp.float16), tx.init(params), params)
    assert optax.apply_updates(params, updates).dtype == jnp.float16


@pytest.mark.slow
def test_keras_eager_apply_works():
    model = jmpp.wrap(nn.Dense(2), "mixed_float16")
    x = jnp.ones((1, 2))
    variables = model.init(jax.random.key(0), x)
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale())
    state = tx.init(variables)
    loss, grads = jmpp.scaled_value_and_grad(lambda v: model.apply(v, x).sum())(state, variables)
    _, state = tx.update(grads, state, variables)
    assert bool(jnp.isfinite(loss))


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [16, 24])
def test_all_a_float16_loss_trains_at_any_scale(exponent):
    model = jmpp.wrap(nn.Dense(1), "p=f32,c=f16,o=f16")
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(2.0**exponent))
    x = jnp.ones((4, 2)) * 1e-3
    params = model.init(jax.random.key(0), x)
    state, skips = tx.init(params), 0
    for _ in range(3):
        with pytest.warns(UserWarning, match="loss is float16"):
            _, grads = jmpp.scaled_value_and_grad(lambda p: model.apply(p, x).mean())(state, params)
        _, state = tx.update(grads, state, params)
        skips += not bool(state.grads_finite)
    assert skips == 0


def test_jmp_and_jamp_states_can_be_lowered_and_mapped():
    state = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale()).init(jnp.ones(2))
    jax.jit(lambda s: s).lower(state)
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), state)
    assert specs.loss_scale.loss_scale == jax.sharding.PartitionSpec()
    jax.jit(lambda s: s).lower(jax.eval_shape(lambda: state))


def test_jaxamp_a_non_finite_aux_does_not_lower_the_scale():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale())
    state = tx.init(jnp.ones(2))
    value_and_grad = jmpp.scaled_value_and_grad(lambda w: (w.sum(), jnp.inf), has_aux=True)
    _, grads = value_and_grad(state, jnp.ones(2))
    _, state = tx.update(grads, state)
    assert float(state.loss_scale.loss_scale) == 2.0**16


def test_most_the_user_can_tell_that_a_step_was_skipped():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale())
    _, state = tx.update(jnp.full(2, jnp.inf), tx.init(jnp.ones(2)))
    values = jmpp.metrics(state)
    assert (bool(values["grads_finite"]), int(values["skipped_steps"])) == (False, 1)
