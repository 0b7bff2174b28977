"""The state that Flax's float8 layers keep in gradients is no gradient: it stays as it is, everywhere."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import jmp_policy as jmpp
from jmp_policy._src.loss_scaling.float8_state import COLLECTION

#: Gradients as two layers' worth of a model has them.
GRADS = {
    "params": {"w": jnp.full(2, 4.0, jnp.float16)},
    COLLECTION: {"dense": {"scale": jnp.ones(1), "amax": jnp.array([100.0, 3.0])}},
}


def assert_state(tree, scale, amax):
    found = tree[COLLECTION]["dense"]
    np.testing.assert_array_equal(found["scale"], np.float32([scale]))
    np.testing.assert_array_equal(found["amax"], np.float32(amax))


def overwriting(params, x):
    """A loss that gives the new state as the cotangent of the old one, as Flax's layers do."""

    @jax.custom_vjp
    def layer(w, state, x):
        return jnp.sum(w * x)

    def backward(residuals, cotangent):
        w, state, x = residuals
        new = {"scale": state["scale"], "amax": jnp.roll(state["amax"], 1).at[0].set(jnp.max(jnp.abs(x)))}
        return cotangent * x, new, cotangent * w

    layer.defvjp(lambda w, state, x: (layer(w, state, x), (w, state, x)), backward)
    return layer(params["params"]["w"], params[COLLECTION]["dense"], x.sum(0) / len(x))


PARAMS = {
    "params": {"w": jnp.ones(2)},
    COLLECTION: {"dense": {"scale": jnp.full(1, 0.5), "amax": jnp.array([3.0, 2.0])}},
}
X = jnp.array([[1.0, 0.0], [100.0, 1.0], [2.0, 0.0], [50.0, 1.0]])


def test_the_collection_is_flaxs():
    assert COLLECTION == OVERWRITE_WITH_GRADIENT


@pytest.mark.parametrize(
    "scale", [jmpp.StaticLossScale(8.0), jmpp.DynamicLossScale(8.0), jmpp.NoOpLossScale()]
)
def test_scale_and_unscale_leave_it(scale):
    for changed in (scale.scale(GRADS), scale.unscale(GRADS), scale.unscale(nn.FrozenDict(GRADS))):
        assert_state(changed, 1, [100, 3])
        assert changed["params"]["w"].dtype == (jnp.float16 if changed is GRADS else jnp.float32)


@pytest.mark.slow
def test_gradients_of_a_float16_loss():
    def half(params, x):
        return overwriting(params, x).astype(jnp.float16)

    with pytest.warns(UserWarning, match="loss is float16"):
        _, grads = jmpp.scaled_value_and_grad(half)(jmpp.StaticLossScale(2.0**18), PARAMS, X)
    assert_state(grads, 0.5, [38.25, 3])


@pytest.mark.slow
@pytest.mark.parametrize("axis", [None, "data"])
def test_accumulation_takes_the_maximum(axis):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    where = {} if axis is None else {"axis_name": axis, "mesh": mesh}
    gradient = jmpp.accumulate_gradients(overwriting, 2, accumulator_dtype="bfloat16", **where)
    _, grads = gradient(jmpp.StaticLossScale(8.0), PARAMS, X)
    assert grads["params"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(grads["params"]["w"], jnp.bfloat16([38.25 * 8, 0.5 * 8]))
    assert_state(grads, 0.5, [100 if axis else 75, 3])


@pytest.mark.once
def test_loss_scaled_neither_tests_nor_measures_it():
    bad = GRADS | {COLLECTION: {"dense": {"scale": jnp.ones(1), "amax": jnp.array([jnp.inf, 3.0])}}}
    seen = []
    inner = optax.stateless(lambda updates, params: seen.append(updates) or updates)
    tx = jmpp.loss_scaled(inner, jmpp.StatisticLossScale(2.0), monitor=True)
    updates, state = tx.update(bad, tx.init(GRADS), PARAMS)
    assert bool(state.grads_finite)
    assert float(state.loss_scale.loss_scale) == 2.0**12  # Of a largest gradient of 2.
    assert [name for name in jmpp.metrics(state) if name.startswith("grad_max")] == ["grad_max/w"]
    assert_state(seen[0], 0, [0, 0])
    assert_state(optax.apply_updates(PARAMS, updates), 1, [jnp.inf, 3])


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_an_optimizer_that_gets_it_with_the_parameters_leaves_it_alone(skip):
    """What clips, decays and averages parameters does not touch it; a skipped step keeps every bit."""
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, weight_decay=0.5))
    tx = jmpp.loss_scaled(inner, jmpp.StaticLossScale(2.0))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    grads = GRADS | {"params": {"w": jnp.full(2, jnp.inf if skip else 6.0)}}
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    alone = jmpp.loss_scaled(inner, jmpp.StaticLossScale(2.0))
    weights, _ = alone.update(grads["params"], alone.init(params["params"]), params["params"])
    np.testing.assert_array_equal(new["params"]["w"], params["params"]["w"] + weights["w"])
    assert_state(new, *((0.5, [3, 2]) if skip else (1, [100, 3])))


def test_updates_of_the_state_need_the_parameters():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.NoOpLossScale())
    with pytest.raises(ValueError, match="the state of float8 layers, and update got no parameters"):
        tx.update(GRADS, tx.init(PARAMS))


def test_of_several_losses_it_is_the_maximum():
    seen = []
    inner = optax.stateless(lambda updates, params: seen.append(updates) or updates)
    scales = {"a": jmpp.StaticLossScale(2.0), "b": jmpp.StaticLossScale(4.0)}
    tx = jmpp.loss_scaled(inner, scales)
    other = GRADS | {COLLECTION: {"dense": {"scale": jnp.ones(1), "amax": jnp.array([7.0, 3.0])}}}
    updates, _ = tx.update({"a": GRADS, "b": other}, tx.init(GRADS), PARAMS)
    assert_state(optax.apply_updates(PARAMS, updates), 1, [100, 3])
    np.testing.assert_array_equal(seen[0]["params"]["w"], [3.0, 3.0])


@pytest.mark.once
def test_reports_of_gradients_leave_it_out():
    model = nn.Dense(4, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = jnp.ones((4, 4))
    variables = model.init(jax.random.key(0), x)
    found = jmpp.gradient_spectrum(lambda v, x: model.apply(v, x).sum(), variables, x)
    weights = [row["path"] for row in found.to_dict()["tensors"] if row["kind"] == "weight gradient"]
    assert [path for path in weights if "/" in path] == ["params/kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("master", [False, True])
def test_a_float8_layer_trains_in_a_train_state(master):
    """As the same step without a loss scale: only amax histories of gradients see the scale."""
    model = jmpp.wrap(nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp), "mixed_bfloat16")
    x = jnp.tile(jnp.array([[1.0], [100.0]]), (8, 16))
    variables = model.init(jax.random.key(0), x)

    def loss_fn(variables, x):
        return (model.apply(variables, x).astype(jnp.float32) ** 2).mean()

    def train(scale):
        tx = jmpp.loss_scaled(optax.sgd(2.0**-10), scale)
        tx = jmpp.master_weights(tx) if master else tx
        state = TrainState.create(apply_fn=None, params=variables, tx=tx)

        @jax.jit
        def step(state):
            _, grads = jmpp.accumulate_gradients(loss_fn, 2)(state.opt_state, state.params, x)
            return state.apply_gradients(grads=grads)

        return step(step(state)).params[COLLECTION]

    plain, scaled = train(jmpp.NoOpLossScale()), train(jmpp.StaticLossScale(2.0**10))
    (a,), (b,) = plain.values(), scaled.values()
    for name in ("input_amax_history", "kernel_amax_history", "input_scale", "kernel_scale"):
        np.testing.assert_allclose(a[name], b[name], rtol=0.02)
    assert float(b["input_amax_history"][0]) == 100
    np.testing.assert_allclose(b["output_grad_amax_history"][1], a["output_grad_amax_history"][1] * 2**10)
