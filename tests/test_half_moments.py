"""Moments of optimizers in half precision: dtypes, rounding, skipped steps, checkpoints."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jmp_policy as jmpp

PARAMS = {"w": jnp.linspace(-1, 1, 24).reshape(4, 6), "b": jnp.zeros(6)}
GRADS = jax.tree.map(lambda p: jnp.cos(3 * p) + 0.1, PARAMS)

#: Optimizer -> fields that become half, and bytes of state per parameter before and after.
OPTIMIZERS = {
    "adam": (optax.adam(1e-2), 8, 4),
    "adamw": (optax.adamw(1e-2), 8, 4),
    "nadam": (optax.nadam(1e-2), 8, 4),
    "amsgrad": (optax.amsgrad(1e-2), 12, 6),
    "adabelief": (optax.adabelief(1e-2), 8, 4),
    "lamb": (optax.lamb(1e-2), 8, 4),
    "adan": (optax.adan(1e-2), 16, 12),
    "lion": (optax.lion(1e-3), 4, 2),
    "momentum": (optax.sgd(1e-2, momentum=0.9), 4, 2),
    "rmsprop": (optax.rmsprop(1e-2), 4, 2),
    "centered rmsprop": (optax.rmsprop(1e-2, centered=True), 8, 8),
    "sgd": (optax.sgd(1e-2), 0, 0),
    "chain": (optax.chain(optax.clip(1.0), optax.adam(1e-2)), 8, 4),
    "masked": (optax.masked(optax.adam(1e-2), {"w": True, "b": True}), 8, 4),
    "injected": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), 8, 4),
}


eight_bits = functools.partial(jmpp.half_moments, mu="fp8_block", nu="fp8_block")


def bytes_of(state):
    return sum(x.nbytes for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim)


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_halves_and_keeps_its_types_in_a_loop(name):
    inner, before, after = OPTIMIZERS[name]
    tx = jmpp.half_moments(inner)
    count = sum(p.size for p in jax.tree.leaves(PARAMS))
    state = tx.init(PARAMS)
    assert (bytes_of(inner.init(PARAMS)), bytes_of(state)) == (before * count, after * count)

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(GRADS, state, params)
        return (optax.apply_updates(params, updates), state), None

    # scan refuses a carry whose dtypes change.
    out, _ = jax.eval_shape(lambda carry: jax.lax.scan(body, carry, length=3), (PARAMS, state))
    types = [(x.dtype, x.weak_type) for x in jax.tree.leaves(out)]
    assert types == [(x.dtype, False) for x in jax.tree.leaves((PARAMS, state))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "lion", "momentum", "masked", "rmsprop"])
def test_eight_bits_take_an_eighth_more_than_a_byte(name):
    inner, before, _ = OPTIMIZERS[name]
    params = {"w": jnp.ones((3, 256)), "b": jnp.zeros(128)}
    tx = eight_bits(inner)
    assert bytes_of(tx.init(params)) / sum(p.size for p in params.values()) == before / 4 * (1 + 4 / 128)


@pytest.mark.once
def test_adafactor_passes_as_it_is():
    inner = optax.adafactor(1e-2)
    params = {"w": jnp.ones((256, 256))}
    tx = jmpp.half_moments(inner)
    grads = {"w": jnp.full((256, 256), 0.1)}
    updates, state = tx.update(grads, tx.init(params), params)
    want, want_state = inner.update(grads, inner.init(params), params)
    assert same(updates, want)
    assert same(state.inner_state, want_state)


@pytest.mark.once
def test_a_step_is_that_of_float32_on_the_rounded_moments():
    tx, inner = jmpp.half_moments(optax.adam(1e-2), stochastic_rounding=False), optax.adam(1e-2)
    updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    want, exact = inner.update(GRADS, inner.init(PARAMS), PARAMS)
    assert same(updates, want)
    for field in ("mu", "nu"):
        nearest = jax.tree.map(lambda x: x.astype(jnp.bfloat16), getattr(exact[0], field))
        assert same(getattr(state.inner_state[0], field), nearest)


@pytest.mark.once
def test_small_changes_of_the_second_moment_arrive_on_average():
    params = jnp.zeros(2000)
    inner = optax.scale_by_adam(b2=0.999)

    def decayed(stochastic):
        tx = jmpp.half_moments(inner, stochastic_rounding=stochastic)
        state = tx.update(jnp.ones(2000), tx.init(params), params)[1]
        first = state.inner_state.nu.astype(jnp.float32).mean()

        def body(state, _):
            return tx.update(jnp.zeros(2000), state, params)[1], None

        state, _ = jax.jit(lambda state: jax.lax.scan(body, state, length=300))(state)
        return float(state.inner_state.nu.astype(jnp.float32).mean() / first)

    assert decayed(True) == pytest.approx(0.999**300, rel=0.01)
    # To nearest it does not move at all.
    assert decayed(False) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("half", "place"), [(jmpp.half_moments, "inside"), (eight_bits, "around"), (eight_bits, "inside")]
)
def test_a_skipped_step_keeps_every_bit(half, place):
    scale = jmpp.StaticLossScale(8.0)
    tx = (
        jmpp.loss_scaled(half(optax.adamw(1e-2)), scale)
        if place == "inside"
        else half(jmpp.loss_scaled(optax.adamw(1e-2), scale))
    )
    update = jax.jit(tx.update)
    _, state = update(GRADS, tx.init(PARAMS), PARAMS)
    bad = {**GRADS, "b": GRADS["b"].at[2].set(jnp.nan)}
    updates, skipped = update(bad, state, PARAMS)
    assert same(optax.apply_updates(PARAMS, updates), PARAMS)

    def moments(state):
        return [x for x in jax.tree.leaves(state) if x.ndim]

    assert len(moments(state)) == (4 if half is jmpp.half_moments else 8)
    assert same(moments(state), moments(skipped))
    assert not jmpp.grads_finite(skipped)
    if place == "inside":
        assert same(state.inner_state, skipped.inner_state)


@pytest.mark.once
def test_eight_bits_keep_range_and_a_second_moment_that_is_not_zero():
    # Squares as far apart as those of one layer are: of a gradient 1 and one 1e-5.
    params = jnp.zeros(128)
    grads = jnp.full(128, 1e-5).at[0].set(1).at[1].set(0)
    tx = eight_bits(optax.scale_by_adam())
    updates, state = tx.update(grads, tx.init(params), params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params)
    nu = state.inner_state.nu
    assert nu.values.dtype == jnp.float8_e4m3fn
    assert (np.asarray(nu.values[2:], np.float32) > 0).all()
    assert float(nu.values[1]) == 0
    # Adam's step is 1 for a steady gradient; divided by a square root of 0 it would be 1e3.
    assert float(jnp.abs(updates).max()) < 4


@pytest.mark.once
def test_eight_bits_of_a_moment_that_has_a_sign():
    # What SM3 calls `nu` is its momentum.
    params = jnp.ones((4, 8))
    tx = jmpp.half_moments(optax.sm3(0.1), nu="fp8_block", mu="float32")
    state = tx.update(-jnp.ones((4, 8)), tx.init(params), params)[1]
    updates, _ = tx.update(-jnp.ones((4, 8)), state, params)
    exact = optax.sm3(0.1)
    want, _ = exact.update(-jnp.ones((4, 8)), exact.update(-jnp.ones((4, 8)), exact.init(params))[1])
    assert np.allclose(updates, want, rtol=0.15)


@pytest.mark.once
def test_eight_bits_of_what_is_not_finite():
    tx = eight_bits(optax.trace(0.9))
    state = tx.update(jnp.ones(256).at[3].set(jnp.inf), tx.init(jnp.zeros(256)))[1]
    trace = np.asarray(state.inner_state.trace.values, np.float32)
    assert np.isnan(trace[3])
    assert (np.delete(trace, 3) * np.repeat(state.inner_state.trace.scales, 128)[0] == 1).all()


@pytest.mark.slow
def test_donated_states_train_on():
    tx = jmpp.half_moments(optax.adam(1e-2), mu="float16", nu="float32")
    traces = []

    def update(params, state):
        traces.append(None)
        return tx.update(GRADS, state, params)

    step = jax.jit(update, donate_argnums=1)
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = step(PARAMS, state)
    adam = state.inner_state[0]
    assert (adam.mu["w"].dtype, adam.nu["w"].dtype) == (jnp.float16, jnp.float32)
    assert int(state.count) == 3
    assert len(traces) == 1


@pytest.mark.once
def test_bits_differ_by_step_moment_and_seed_and_repeat():
    def moments(seed, steps=2):
        tx = jmpp.half_moments(optax.adam(1e-2), seed=seed)
        state = tx.init(PARAMS)
        for _ in range(steps):
            _, state = tx.update(GRADS, state, PARAMS)
        return state.inner_state[0]

    assert same(moments(0), moments(0))
    assert not same(moments(0).mu, moments(1).mu)


@pytest.mark.slow
def test_parameters_in_half_and_mu_dtype_of_optax():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    tx = jmpp.stochastic_rounding(jmpp.half_moments(optax.adamw(1e-2, mu_dtype=jnp.bfloat16), mu="float16"))
    state = tx.init(params)
    _, new = tx.update(GRADS, state, params)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, new)
    assert new.inner_state.inner_state[0].mu["w"].dtype == jnp.float16


@pytest.mark.slow
@pytest.mark.parametrize(("half", "how"), [(jmpp.half_moments, "msgpack"), (eight_bits, "orbax")])
def test_checkpoints_keep_the_halves(half, how, tmp_path):
    tx = half(optax.adamw(1e-2))

    def update(state):
        return jax.jit(lambda state: tx.update(GRADS, state, PARAMS))(state)  # Traced anew each time.

    _, state = update(tx.init(PARAMS))
    if how == "msgpack":
        data = flax.serialization.to_bytes(state)
        restored = flax.serialization.from_bytes(tx.init(PARAMS), data)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", state)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, PARAMS))
    assert same(restored, state)
    assert same(update(restored), update(state))


def test_empty_trees_and_structures_of_other_names():
    tx = jmpp.half_moments(optax.adam(1e-2))
    assert tx.update({}, tx.init({}), {})[0] == {}
    # Parameters called as moments are no moments.
    params = {"mu": jnp.ones(3), "nu": jnp.ones(3)}
    state = jmpp.half_moments(optax.ema(0.9)).init(params)
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"mu": "float8_e4m3fn"}, "mu in bfloat16, float16, float32 or fp8_block, got 'float8_e4m3fn'"),
        ({"nu": "float16"}, "got 'float16'. It holds squares of gradients"),
        ({"nu": "half a number"}, "keeps nu in bfloat16, float32 or fp8_block"),
        ({"seed": 1.5}, "seed"),
        ({"stochastic_rounding": 1}, "must be True or False"),
    ],
)
def test_wrong_arguments(kwargs, match):
    with pytest.raises((TypeError, ValueError), match=match):
        jmpp.half_moments(optax.adam(1e-2), **kwargs)


def test_the_state_of_another_transformation():
    tx = jmpp.half_moments(optax.adam(1e-2))
    with pytest.raises((TypeError, ValueError), match="half_moments"):
        tx.update(GRADS, optax.adam(1e-2).init(PARAMS), PARAMS)
