"""What `advise` says of a run, from what the run has logged."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmpp

PARAMS = {"params": {"encoder": {"w": jnp.ones(64)}, "head": {"w": jnp.ones(64)}}}


class Halved(NamedTuple):
    """A loss scale of one's own."""

    loss_scale: Any

    def scale(self, tree):
        return jax.tree.map(lambda x: x * self.loss_scale, tree)

    def unscale(self, tree):
        return jax.tree.map(lambda x: x / self.loss_scale, tree)

    def adjust(self, grads_finite):
        return Halved(jnp.where(grads_finite, self.loss_scale, self.loss_scale / 2))


def trained(gradients, scale=None, **kwargs):
    """The state after updates with gradients of (encoder, head), which are unscaled here."""
    tx = jmpp.loss_scaled(optax.sgd(0.1), scale or jmpp.StaticLossScale(2.0), **kwargs)
    state = tx.init(PARAMS)
    update = jax.jit(tx.update)
    for of_encoder, of_head in gradients:
        current = jmpp.optim.get_loss_scale_state(state).loss_scale.loss_scale
        sizes = {"encoder": of_encoder, "head": of_head}
        grads = {"params": {name: {"w": jnp.full(64, size) * current} for name, size in sizes.items()}}
        _, state = update(grads, state, PARAMS)
    return state


@pytest.mark.slow
def test_a_healthy_run_needs_no_change():
    found = jmpp.advise(
        trained([(1e-2, 1e-3)] * 5, monitor=True), {"drift/gradient_error": jnp.float32(0.01)}
    )
    assert (found.changes, found.rules, found.verdict) == ((), {}, "Nothing to change.")
    assert "Nothing to change." in str(found)


def test_steps_that_are_skipped_one_after_the_other():
    found = jmpp.advise(trained([(np.nan, 1.0)] * 12, jmpp.DynamicLossScale(2.0**10)))
    assert found.rules == {"": "mixed_bfloat16"}
    assert "12 steps in a row were skipped at a loss scale of 0.25" in found.verdict


def test_a_static_scale_that_is_too_large():
    state = trained([(np.inf, 1.0)] * 60, jmpp.StaticLossScale(2.0**24))
    (change,) = jmpp.advise(state).changes
    assert change.change == "Use DynamicLossScale(), which finds a smaller one; if none helps, call diagnose"
    assert change.rule == ""
    with pytest.raises(jmpp.LossScaleStuckError, match=r"never changes: use DynamicLossScale\(\), or"):
        jmpp.check(state)
    # Scales of one's own may change without counting what they do; below 1 there is nothing to gain.
    with pytest.raises(jmpp.LossScaleStuckError, match="A smaller scale cannot help"):
        jmpp.check(trained([(np.inf, 1.0)] * 60, Halved(jnp.float32(2.0**80))))
    with pytest.raises(jmpp.LossScaleStuckError, match="A smaller scale cannot help"):
        jmpp.check(trained([(np.inf, 1.0)] * 60, jmpp.NoOpLossScale()))


@pytest.mark.slow
def test_of_several_losses_the_one_is_named():
    scales = {"actor": jmpp.DynamicLossScale(2.0**10), "critic": jmpp.StaticLossScale(8.0)}
    tx = jmpp.loss_scaled(optax.sgd(0.1), scales)
    state = tx.init(PARAMS)
    for _ in range(12):
        parts = {
            name: jax.tree.map(lambda p, bad=name == "actor": p * (np.nan if bad else 1), PARAMS)
            for name in scales
        }
        _, state = tx.update(parts, state, PARAMS)
    (change,) = jmpp.advise(state).changes
    assert (
        change.finding
        == "12 steps in a row were skipped for gradients of loss 'actor' at a loss scale of 0.25"
    )


def test_a_scale_that_grows_too_often():
    steps = [(1.0, 1.0)] * 4 + [(np.inf, 1.0)]
    (change,) = jmpp.advise(trained(steps * 30, jmpp.DynamicLossScale(8.0, growth_interval=4))).changes
    assert change.change == "Let the scale grow less often: growth_interval=2000, not 4"
    found = jmpp.advise(
        trained(steps * 30, jmpp.DynamicLossScale(2.0**20, growth_interval=100, backoff_factor=0.99))
    ).changes
    assert "More than the growth of the scale explains" in found[0].change


@pytest.mark.slow
def test_gradients_that_float16_loses():
    # Of one part, while another fills the range; of all, while there is room.
    (change,) = jmpp.advise(trained([(1e-9, 1e4)], monitor=True)).changes
    assert (change.path, change.rule) == ("encoder", "mixed_bfloat16")
    found = jmpp.advise(trained([(1e-9, 1e-8)], monitor=True))
    assert found.changes[0].change.startswith("The loss scale can be ")
    assert found.rules == {}
    (first, _) = jmpp.advise(trained([(0.0, 0.0)], monitor=True)).changes
    assert first.change == "Start with a larger one, which falls: DynamicLossScale(2.0**24)"
    # Rows of a table that no token asked for are 0, and lost to nothing.
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(2.0), monitor=True)
    _, state = tx.update(
        {"table": jnp.zeros((100, 4)).at[3].set(0.1)}, tx.init({"table": jnp.ones((100, 4))})
    )
    assert not jmpp.advise(state).changes


def test_rules_are_those_of_the_most_urgent_changes():
    first, second = (jmpp.report.Change("a", "", "", rule) for rule in ("float32", "mixed_bfloat16"))
    assert jmpp.report.Advice((first, second)).rules == {"a": "float32"}


def test_states_that_are_stacked_are_refused():
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), trained([(1e-2, 1e-3)]))
    with pytest.raises(ValueError, match=r"advise takes one state; .* has shape \(2,\)"):
        jmpp.advise(stacked)


@pytest.mark.once
def test_errors_and_spectra():
    state = trained([(1e-2, 1e-3)])
    found = jmpp.advise(state, {"loss": 3.0, "drift/gradient_error": np.float32(0.4)})
    assert "40% off float32's (drift/gradient_error)" in found.verdict
    assert not jmpp.advise(state, {"loss": jnp.bfloat16(3.0), **jmpp.metrics(state)}).changes
    assert "not finite" in jmpp.advise(state, {"drift/gradient_error": np.nan}).verdict
    with pytest.raises(TypeError, match="advise takes numbers; 'norms' is "):
        jmpp.advise(state, {"norms": jnp.ones(3)})
    spectrum = jmpp.report.SpectrumState.create(jnp.ones(3)).update(jnp.full(3, 1e6))
    (change,) = jmpp.advise(state, spectrum=spectrum).changes
    assert "gradients overflow above" in change.finding
    with pytest.raises(TypeError, match="spectrum is a GradientSpectrum or SpectrumState, got dict"):
        jmpp.advise(state, spectrum={})
    with pytest.raises(ValueError, match="loss scale"):
        jmpp.advise(optax.sgd(0.1).init(PARAMS))


@pytest.mark.once
def test_a_spike_in_the_history_of_a_recipe_and_the_way_out_and_back():
    model = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(32)])
    x = jnp.ones((16, 32))

    def state_of(policy):
        params = jmpp.wrap(model, policy).init(jax.random.key(0), x)
        return jmpp.linen.TrainState.create(
            apply_fn=model.apply, params=params, tx=optax.sgd(1e-3), precision=policy
        )

    @jax.jit
    def step(state, x):
        _, grads = state.value_and_grad(lambda v: (state.apply_fn(v, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    delayed, current = "mixed_bfloat16, r=fp8_delayed", "mixed_bfloat16, r=fp8_current"
    state = state_of(delayed)
    for i in range(110):
        state = step(state, 1000 * x if i == 3 else x)
    found = jmpp.advise(state)
    assert found.rules["layers_0"] == current
    assert "the scale of input is that of a value 1000 times as large" in str(found.changes[0].finding)
    # Out of the recipe and in again, on the parameters and the counts that there are.
    out = step(jmpp.restore_state(state_of(current), state), x)
    assert "_overwrite_with_gradient" not in out.params
    back = step(jmpp.restore_state(state_of(delayed), out), x)
    assert int(back.step) == 112
    kept, before = back.params["params"], out.params["params"]
    assert np.allclose(*(np.asarray(p["layers_0"]["kernel"]) for p in (kept, before)), atol=1e-2)
    assert not jmpp.advise(back).changes
