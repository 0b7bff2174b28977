"""`loss_scaled` around every optax optimizer: clean steps, overflow steps, states."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jmp_policy as jmpp

PARAMS = {"w": jnp.array([[0.5, -1.0], [2.0, -0.0]]), "b": jnp.array([0.1, -0.2])}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)


def quadratic(params):
    return 0.5 * sum(jnp.sum((p - 1.0) ** 2) for p in jax.tree.leaves(params))


def _aliases():
    """Every optimizer in `optax` that can be made from a learning rate, and those that need more."""
    special = {
        "lbfgs": lambda: optax.lbfgs(),
        "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)),
        "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.1),
        "polyak_sgd": lambda: optax.polyak_sgd(),
        "rprop": lambda: optax.rprop(0.1),
        "sm3": lambda: optax.sm3(0.1),
        "adafactor": lambda: optax.adafactor(0.1),
    }
    deprecated = {"optimistic_adam"}
    found = {}
    for name, make in vars(optax).items():
        if not inspect.isfunction(make) or not make.__module__.endswith(".alias") or name in deprecated:
            continue
        parameters = inspect.signature(make).parameters
        if name in special:
            found[name] = special[name]
        elif "learning_rate" in parameters:
            found[name] = functools.partial(make, learning_rate=SCHEDULE)
    return found


WRAPPERS = {
    "chain": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.trace(0.9), optax.scale(-0.1)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    "clip": lambda: optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "inject_constant": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "multi_steps_transformation": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "schedule_free": lambda: contrib.schedule_free_adamw(0.1),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1)),
    "ema": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "apply_every": lambda: optax.chain(optax.sgd(0.1), optax.apply_every(2)),
    "bfloat16_moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "noise": lambda: optax.chain(optax.add_noise(0.01, 0.5, key=jax.random.key(0)), optax.sgd(0.1)),
    "muon": lambda: contrib.muon(0.1),
    "prodigy": lambda: contrib.prodigy(0.1),
    "cocob": lambda: contrib.cocob(),
    "identity": optax.identity,
    "set_to_zero": optax.set_to_zero,
    "per_parameter_state_none": lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: -x, u)),
}
OPTIMIZERS = _aliases() | WRAPPERS


def steps(tx, params, grad_fns, wrapped):
    """Runs jitted updates; returns every (params, state)."""

    traces = []

    # What the step closes over is compared by value: the same objects on every call.
    @jax.jit
    def step(params, state, factor):
        traces.append(None)
        value, grads = jax.value_and_grad(quadratic)(params)
        given = jax.tree.map(lambda g: g * factor, grads)
        # lbfgs and polyak_sgd want the value; line searches evaluate the loss themselves.
        extra = {"value": value, "value_fn": quadratic, "grad": given}
        if not wrapped:
            extra["grad"], given = grads, grads
        updates, state = optax.with_extra_args_support(tx).update(given, state, params, **extra)
        return optax.apply_updates(params, updates), state, updates

    state, seen = jax.jit(tx.init)(params), []
    for factor in grad_fns:
        params, state, updates = step(params, state, factor)
        seen.append((params, state, updates))
    return seen, len(traces)


def bits(tree):
    def raw(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x).tobytes()

    return [raw(x) for x in jax.tree.leaves(tree)]


@pytest.mark.once
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_clean_steps_equal_the_unwrapped_optimizer_and_overflows_change_nothing(name):
    tx = OPTIMIZERS[name]()
    scale = 2.0**4
    wrapped = jmpp.loss_scaled(tx, jmpp.StaticLossScale(scale))
    want, _ = steps(tx, PARAMS, [1.0] * 3, wrapped=False)
    bad = float("inf")
    got, cache = steps(wrapped, PARAMS, [scale, bad, scale, float("nan"), bad, scale], wrapped=True)
    # inf * 0 is NaN and inf * x is inf: both kinds occur.
    clean = [got[0], got[2], got[5]]
    for (params, state, updates), (want_params, want_state, want_updates) in zip(clean, want, strict=True):
        for a, b in ((params, want_params), (state.inner_state, want_state), (updates, want_updates)):
            assert jax.tree.structure(a) == jax.tree.structure(b)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert x.dtype == y.dtype
                if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                    x, y = jax.random.key_data(x), jax.random.key_data(y)
                np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
    for before, after in ((0, 1), (2, 3), (3, 4)):
        assert bits(got[before][0]) == bits(got[after][0])
        assert bits(got[before][1].inner_state) == bits(got[after][1].inner_state)
    assert [int(s.skipped) for _, s, _ in got] == [0, 1, 1, 2, 3, 3]
    assert [int(s.consecutive_skips) for _, s, _ in got] == [0, 1, 0, 1, 2, 0]
    assert cache == 1
    for _, state, _ in got:
        assert all(not x.aval.weak_type for x in jax.tree.leaves(state))


def test_the_table_is_not_empty():
    assert len(_aliases()) > 20
    assert {"adam", "adamw", "lbfgs", "sgd", "lion", "adafactor", "noisy_sgd"} <= set(OPTIMIZERS)


def test_the_schedule_holds_or_advances():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=SCHEDULE)
    for mode, want in (("hold", 0.09), ("advance", 0.07)):
        wrapped = jmpp.loss_scaled(tx, jmpp.NoOpLossScale(), count_mode=mode)
        state = wrapped.init(jnp.ones(2))
        for grad in (1.0, jnp.inf, jnp.nan, 1.0):
            updates, state = wrapped.update(jnp.full(2, grad), state, jnp.ones(2))
        np.testing.assert_allclose(-updates[0], want, rtol=1e-5)
    adam = jmpp.loss_scaled(optax.adam(SCHEDULE), jmpp.NoOpLossScale(), count_mode="advance")
    state = adam.init(jnp.ones(2))
    _, after = adam.update(jnp.full(2, jnp.nan), state, jnp.ones(2))
    assert [int(x.count) for x in after.inner_state if hasattr(x, "count")] == [1, 1]
    np.testing.assert_array_equal(after.inner_state[0].mu, jnp.zeros(2))


def test_half_precision_gradients_and_params_are_shown_as_float32():
    seen = {}

    def init(params):
        seen["init"] = params.dtype
        return {"m": jnp.zeros_like(params)}

    def update(grads, state, params=None):
        seen["grads"], seen["params"] = grads.dtype, params.dtype
        return grads, {"m": state["m"] + grads}

    tx = jmpp.loss_scaled(optax.GradientTransformation(init, update), jmpp.StaticLossScale(8.0))
    params = jnp.ones(2, jnp.float16)
    state = tx.init(params)
    updates, state = tx.update(jnp.full(2, 8, jnp.bfloat16), state, params)
    assert set(seen.values()) == {jnp.dtype("float32")}
    assert state.inner_state["m"].dtype == jnp.float32
    assert optax.apply_updates(params, updates).dtype == jnp.float16
    assert updates.tolist() == [1.0, 1.0]


def test_integer_float0_and_key_gradients():
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    tx = jmpp.loss_scaled(optax.stateless(lambda u, p: u), jmpp.StaticLossScale(8.0))
    state = tx.init(params)
    grads = {"w": jnp.full(2, jnp.inf), "n": np.zeros(2, jax.dtypes.float0)}
    updates, _ = tx.update(grads, state, params)
    assert updates["n"] is grads["n"]
    assert updates["w"].tolist() == [0.0, 0.0]
    updates, _ = tx.update({"w": jnp.ones(2), "n": jnp.arange(2)}, state, params)
    assert updates["n"].tolist() == [0, 1]


@pytest.mark.parametrize("params", [{}, jnp.zeros((0,)), None, {"a": None}])
def test_trees_without_numbers(params):
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale())
    updates, state = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert bool(state.grads_finite)


def test_float64_and_complex_parameters():
    with jax.enable_x64(True):
        params = {"d": jnp.ones(2, jnp.float64), "z": jnp.ones(2, jnp.complex64)}
        tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(8.0))
        grads = {"d": jnp.full(2, 8 / 3, jnp.float64), "z": jnp.full(2, 8j, jnp.complex64)}
        state = tx.init(params)
        updates, _ = tx.update(grads, state, params)
        assert updates["d"].dtype == jnp.float64
        np.testing.assert_array_equal(updates["d"], -0.1 * (np.float64(8) / 3) / 8)
        np.testing.assert_allclose(updates["z"], -0.1j, rtol=1e-6)
        bad = grads | {"z": jnp.array([1, complex(0, jnp.nan)], jnp.complex64)}
        updates, state = tx.update(bad, state, params)
        assert not bool(state.grads_finite)
        new = optax.apply_updates(params, updates)
        assert bits(new) == bits(params)


def test_states_are_strongly_typed_from_the_start():
    """Else the second step, whose state is, would be compiled again."""
    inner = optax.GradientTransformation(lambda params: jnp.asarray(2.0), lambda u, s, p=None: (u, s))
    state = jmpp.loss_scaled(inner, jmpp.StaticLossScale(2.0)).init(jnp.ones(2))
    assert not jax.typeof(state.inner_state).weak_type


@pytest.mark.slow
def test_states_may_be_donated_and_scales_reused():
    scale = jmpp.DynamicLossScale()
    tx, traces = jmpp.loss_scaled(optax.adam(0.1), scale), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        traces.append(None)
        grads = jax.tree.map(lambda p: p * state.loss_scale.loss_scale, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params = jax.tree.map(jnp.array, PARAMS)
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state)
    assert float(scale.loss_scale) == 2.0**16
    assert len(traces) == 1


def test_states_that_keep_the_parameters_may_be_donated_with_them():
    tx = jmpp.loss_scaled(optax.lbfgs(0.1, linesearch=None), jmpp.NoOpLossScale())
    params = jax.tree.map(jnp.array, PARAMS)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params, state = step(params, state)
    assert bool(jmpp.all_finite(params))


def test_in_scan_and_vmap():
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale(growth_interval=2))

    def step(carry, factor):
        params, state = carry
        updates, state = tx.update(state.loss_scale.scale(params * factor), state, params)
        return (optax.apply_updates(params, updates), state), jmpp.metrics(state)

    start = (jnp.ones(2), tx.init(jnp.ones(2)))
    (params, _), seen = jax.lax.scan(step, start, jnp.array([1.0, 1.0, jnp.inf, 1.0]))
    assert seen["grads_finite"].tolist() == [True, True, False, True]
    assert seen["loss_scale"].tolist() == [2.0**16, 2.0**17, 2.0**16, 2.0**16]
    assert seen["steps"].tolist() == [1, 2, 3, 4]
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    (many, _), _ = jax.vmap(lambda c, f: jax.lax.scan(step, c, f))(
        batch, jnp.array([[1.0, 1.0, jnp.inf, 1.0], [jnp.nan] * 4])
    )
    np.testing.assert_allclose(many[0], params, rtol=1e-6)
    np.testing.assert_array_equal(many[1], jnp.ones(2))


def by_hand(inner):
    """The least that skipping takes: test, unscale, update, select."""

    def init(params):
        return inner.init(params), jnp.float32(2.0**16)

    def update(grads, state, params):
        inner_state, scale = state
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, new = inner.update(grads, inner_state, params)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, inner_state)
        return updates, (new, jnp.where(finite, scale, scale / 2))

    return optax.GradientTransformation(init, update)


@pytest.mark.filterwarnings("ignore:.*computed in this function without it")
def test_no_branch_and_no_more_copies_bytes_or_memory_than_by_hand():
    params = {f"w{i}": jnp.ones((64, 64)) for i in range(4)}

    def compiled(tx):
        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(tx.init, params)
        program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state).compile()
        text = program.as_text()
        copies = len(re.findall(r"\[\d[\d,]*\]\S* copy\(", text))  # Scalars apart.
        memory = program.memory_analysis().temp_size_in_bytes
        return text.count(" conditional("), copies, memory, program.cost_analysis()["bytes accessed"]

    ours = compiled(jmpp.loss_scaled(optax.adamw(1e-3), jmpp.DynamicLossScale()))
    hand = compiled(by_hand(optax.adamw(1e-3)))
    assert ours[0] == hand[0] == 0
    assert ours[1] <= hand[1]
    assert ours[2] <= hand[2] + 256  # The counters.
    assert ours[3] <= 1.001 * hand[3]


def test_multi_steps_inside_drops_single_micro_batches():
    grads = [jnp.full(2, g) for g in (1.0, jnp.nan, 3.0, 5.0, 7.0)]
    inside = jmpp.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2), jmpp.StaticLossScale(4.0))
    state, out = inside.init(jnp.zeros(2)), []
    for g in grads:
        u, state = inside.update(g * 4, state, jnp.zeros(2))
        out.append(float(u[0]))
    assert out == [0.0, 0.0, -2.0, 0.0, -6.0]  # The bad micro-batch alone is dropped.


def test_check_warns_of_a_large_share_of_skipped_steps():
    state = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()).init(PARAMS)
    jmpp.check(state._replace(steps=jnp.int32(99), skipped=jnp.int32(50)))
    jmpp.check(state._replace(steps=jnp.int32(200), skipped=jnp.int32(40)))
    with pytest.warns(UserWarning, match=r"50 of 200 steps were skipped \(25%\).*DynamicLossScale"):
        jmpp.check(state._replace(steps=jnp.int32(200), skipped=jnp.int32(50)))


def test_states_that_update_fills():
    """`optax.monitor` starts with an empty dictionary, and with the mean of booleans as a boolean."""

    def clipped(updates):
        return optax.tree.norm(updates) > 1.0

    measures = {"norm": optax.tree.norm, "clipped": optax.measure_with_ema(clipped, decay=0.5)}
    tx = jmpp.loss_scaled(optax.chain(optax.monitor(measures), optax.sgd(0.1)), jmpp.StaticLossScale(2.0))
    params = {"w": jnp.array([3.0, 4.0])}

    def step(state, grads):
        return tx.update(grads, state, params)[1], None

    grads = {"w": jnp.stack([2 * params["w"], params["w"] / 10, params["w"] * jnp.nan])}
    state, _ = jax.lax.scan(step, tx.init(params), grads)
    measured = state.inner_state[0].measurements
    assert float(measured["norm"]) == 0.25
    np.testing.assert_allclose(measured["clipped"], 1 / 3)  # Of 1 and 0; the skipped step does not count.
    inside = jmpp.master_weights(optax.monitor({"norm": optax.tree.norm})).init(params).inner_state
    assert float(inside.measurements["norm"]) == 0


def test_a_state_that_only_extra_arguments_fill_is_refused():
    def update(updates, state, params, *, value):
        return updates, {"value": value}

    params, needs_more = jnp.ones(2), optax.GradientTransformationExtraArgs(lambda params: {}, update)
    tx = jmpp.loss_scaled(needs_more, jmpp.StaticLossScale(2.0))
    with pytest.raises(ValueError, match="changed the structure of its state"):
        tx.update(params, tx.init(params), params, value=jnp.float32(1.0))


def test_apply_if_finite_belongs_inside():
    scale, params = jmpp.DynamicLossScale(), jnp.ones(2)
    around = optax.apply_if_finite(jmpp.loss_scaled(optax.sgd(0.1), scale), 3)
    for tx in (around, optax.chain(optax.identity(), around)):
        with pytest.warns(UserWarning, match=r"falls late or never.*loss_scaled\(optax.apply_if_finite"):
            jmpp.scaled_value_and_grad(jnp.sum)(tx.init(params), params)
    inside = jmpp.loss_scaled(optax.apply_if_finite(optax.sgd(0.1), 3), scale)
    without = optax.apply_if_finite(jmpp.loss_scaled(optax.sgd(0.1), jmpp.NoOpLossScale()), 3)
    for tx in (inside, without):  # Warnings are errors.
        jmpp.scaled_value_and_grad(jnp.sum)(tx.init(params), params)


def test_what_stands_behind_in_a_chain_belongs_inside():
    """It runs on a skipped step, and sees -0.0: what it keeps changes."""
    scale, params, momentum = jmpp.DynamicLossScale(2.0), jnp.ones(2), optax.trace(0.9)
    scaled = jmpp.loss_scaled(optax.sgd(0.1), scale)
    decayed = optax.chain(scaled, optax.add_decayed_weights(0.1), optax.scale_by_schedule(lambda count: 1.0))
    named = optax.named_chain(("step", scaled), ("momentum", momentum))
    for tx in (decayed, named, optax.chain(scaled, momentum), optax.chain(optax.chain(scaled), momentum)):
        with pytest.warns(UserWarning, match=r"run on skipped steps.*loss_scaled\(optax\.chain"):
            jmpp.scaled_value_and_grad(jnp.sum)(tx.init(params), params)
        updates, _ = tx.update(jnp.full(2, jnp.inf), tx.init(params), params)
        assert updates.any() == (tx is decayed)
    inside = jmpp.loss_scaled(optax.chain(optax.sgd(0.1), momentum), scale)
    before = optax.chain(momentum, scaled)
    without = optax.chain(jmpp.loss_scaled(optax.sgd(0.1), jmpp.NoOpLossScale()), momentum)
    watched = optax.chain(scaled, optax.snapshot("seen", lambda updates: updates), optax.zero_nans())
    for tx in (inside, before, without, watched):
        jmpp.scaled_value_and_grad(jnp.sum)(tx.init(params), params)  # Warnings are errors.


class OtherState(NamedTuple):
    """A user's own; its name says nothing."""

    opt_state: Any
    step: Any


def test_states_of_several_optimizers_are_no_chain():
    params, average = jnp.ones(2), optax.ema(0.9)
    state = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale(2.0)).init(params)
    own = OtherState(state, jnp.zeros(()))
    others = (
        optax.adam(0.1),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.MultiSteps(optax.adam(0.1), 2),
    )
    groups = optax.partition({"all": optax.adam(0.1)}, "all")
    besides = (params, {"ema": params}, *(tx.init(params) for tx in (*others, groups, average)))
    for given in (*((state, beside) for beside in besides), (own, OtherState((), jnp.zeros(()))), own):
        jmpp.scaled_value_and_grad(jnp.sum)(given, params)  # Warnings are errors.
    ordered = collections.OrderedDict(step=state, ema=average.init(params))
    jmpp.scaled_value_and_grad(jnp.sum)(ordered, params)


def test_gradients_in_a_pair_are_no_loss_and_gradients():
    params = (jnp.ones(2), None)
    tx = jmpp.loss_scaled(optax.sgd(0.5), jmpp.StaticLossScale(2.0))
    for given in ((), (params,)):
        updates, _ = tx.update(params, tx.init(params), *given)
        np.testing.assert_array_equal(updates[0], [-0.25, -0.25])
        assert updates[1] is None


@pytest.mark.parametrize("outer", ["mechanize", "schedule_free", "lookahead", "sam"])
def test_wrappers_that_keep_something_belong_inside(outer):
    make = {
        "mechanize": optax.contrib.mechanize,
        "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
        "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
        "sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.05)),
    }[outer]
    params = jnp.ones(2)
    start = optax.LookaheadParams.init_synced(params) if outer == "lookahead" else params
    around = make(jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()))
    with pytest.warns(UserWarning, match=r"stands around loss_scaled: it runs on skipped steps as well"):
        jmpp.scaled_value_and_grad(jnp.sum)(around.init(start), params)
    inside = jmpp.loss_scaled(make(optax.sgd(0.1)), jmpp.DynamicLossScale())
    jmpp.scaled_value_and_grad(jnp.sum)(inside.init(start), params)  # Warnings are errors.


def test_one_masked_transformation_of_several_leaves_the_gradients_of_the_others_scaled():
    params, scale = {"w": jnp.ones(2), "b": jnp.ones(2)}, jmpp.DynamicLossScale()
    weights, biases = {"w": True, "b": False}, {"w": False, "b": True}

    def loss_fn(params):
        return params["w"].sum() + params["b"].sum()

    scaled = optax.masked(jmpp.loss_scaled(optax.adam(0.1), scale), weights)
    for other in (optax.sgd(0.1), optax.adam(0.1)):
        for parts in ((scaled, optax.masked(other, biases)), (optax.masked(other, biases), scaled)):
            state = optax.chain(*parts).init(params)
            with pytest.warns(UserWarning, match=r"inside one optax.masked of several.*never divided"):
                jmpp.scaled_value_and_grad(loss_fn)(state, params)
    # Warnings are errors.
    frozen = optax.chain(scaled, optax.masked(optax.chain(optax.set_to_zero()), biases))
    hyperparameters = optax.inject_hyperparams(lambda rate: jmpp.loss_scaled(optax.sgd(rate), scale))(0.1)
    for right in (frozen, hyperparameters):
        jmpp.scaled_value_and_grad(loss_fn)(right.init(params), params)


@pytest.mark.slow
def test_an_eps_that_float16_holds_as_zero_is_float32_inside():
    """Adam by itself divides 0 by 0 in float16; a gradient of zero is enough."""
    params = {"w": jnp.ones(2, jnp.float16)}
    grads = jax.tree.map(jnp.zeros_like, params)
    inner = optax.adam(1e-2)
    assert not jmpp.all_finite(inner.update(grads, inner.init(params), params)[0])
    for tx in (jmpp.loss_scaled(inner, jmpp.DynamicLossScale()), jmpp.master_weights(inner)):
        assert jmpp.all_finite(tx.update(grads, tx.init(params), params)[0])


def test_lookahead():
    tx = jmpp.loss_scaled(optax.lookahead(optax.sgd(0.1), 2, 0.5), jmpp.StaticLossScale(4.0))
    params = optax.LookaheadParams.init_synced(jnp.ones(2))
    state = tx.init(params)
    for g in (1.0, jnp.inf, 1.0):
        updates, state = tx.update(jnp.full(2, g * 4), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params.fast, [0.9, 0.9])
    np.testing.assert_allclose(params.slow, [0.9, 0.9])


LABELS = {"w": "t", "b": "f"}
STATES = {
    "itself": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "named_chain": lambda tx: optax.named_chain(("a", optax.identity()), ("b", tx)),
    "multi_transform": lambda tx: optax.multi_transform(
        {"t": tx, "f": optax.set_to_zero()}, {"w": "t", "b": "f"}
    ),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda lr: jmpp.loss_scaled(optax.sgd(lr), jmpp.DynamicLossScale())
    )(lr=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_state_is_found_anywhere(name):
    tx = STATES[name](jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale()))
    state = tx.init(PARAMS)
    found = jmpp.optim.get_loss_scale_state(state)
    assert isinstance(found, jmpp.optim.LossScaledState)
    assert float(jax.jit(lambda s: jmpp.metrics(s)["loss_scale"])(state)) == 2.0**16
    assert bool(jmpp.grads_finite(state))
    grads = jax.tree.map(lambda p: p * 2.0**16, PARAMS)
    _, state = tx.update(grads, state, PARAMS)
    assert jmpp.optim.get_loss_scale_state(state).loss_scale is not None


@pytest.mark.parametrize(
    ("others", "scale", "warns"),
    [(optax.sgd(0.1), jmpp.DynamicLossScale(), True), (optax.adam(0.1), jmpp.StaticLossScale(2.0), True),
     (optax.sgd(0.1), jmpp.NoOpLossScale(), False), (optax.set_to_zero(), jmpp.DynamicLossScale(), False),
     (optax.chain(optax.set_to_zero()), jmpp.DynamicLossScale(), False)],
)  # fmt: skip
def test_a_group_of_parameters_without_the_loss_scale_of_the_others_is_named(others, scale, warns):
    tx = optax.multi_transform({"t": jmpp.loss_scaled(optax.sgd(0.1), scale), "f": others}, LABELS)
    gradient = jmpp.scaled_value_and_grad(lambda params: sum(map(jnp.sum, jax.tree.leaves(params))))
    expected = pytest.warns(UserWarning, match=r"gradients of the group 'f' are never divided .* around the")
    with expected if warns else contextlib.nullcontext():
        gradient(tx.init(PARAMS), PARAMS)
    whole = jmpp.loss_scaled(optax.multi_transform({"t": optax.sgd(0.1), "f": others}, LABELS), scale)
    gradient(whole.init(PARAMS), PARAMS)


def test_none_and_several_scales():
    with pytest.raises(ValueError, match="no loss scale in this tuple"):
        jmpp.optim.get_loss_scale_state(optax.adam(0.1).init(PARAMS))
    scaled = lambda: jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale())  # noqa: E731
    two = optax.multi_transform({"a": scaled(), "b": scaled()}, {"w": "a", "b": "b"})
    with pytest.raises(
        ValueError, match=r"2 loss scales .*inner_states\['a'\].*inner_states\['b'\].* around the whole"
    ):
        jmpp.optim.get_loss_scale_state(two.init(PARAMS))
    nested = jmpp.loss_scaled(scaled(), jmpp.DynamicLossScale())
    with pytest.raises(ValueError, match=r"\(the state itself\), \.inner_state"):
        jmpp.metrics(nested.init(PARAMS))


NOOP = jmpp.NoOpLossScale()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jmpp.loss_scaled(optax.adam, jmpp.DynamicLossScale()), TypeError, "forget to call it"),
        (lambda: jmpp.loss_scaled(3, jmpp.DynamicLossScale()), TypeError, "got 3"),
        (lambda: jmpp.loss_scaled(optax.sgd(1.0), 1024.0), TypeError, r"mean StaticLossScale\(1024.0\)"),
        (
            lambda: jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale),
            TypeError,
            r"mean DynamicLossScale\(\)",
        ),
        (lambda: jmpp.loss_scaled(optax.sgd(1.0), None), TypeError, "needs a loss scale"),
        (
            lambda: jmpp.loss_scaled(optax.sgd(1.0), jmpp.NoOpLossScale(), count_mode="x"),
            ValueError,
            "'hold'",
        ),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_states():
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.NoOpLossScale())
    with pytest.raises(TypeError, match="state of another transformation"):
        tx.update(jnp.ones(2), optax.sgd(1.0).init(jnp.ones(2)))
    odd = optax.GradientTransformation(lambda p: (jnp.ones(2),), lambda u, s, p=None: (u, (*s, 1)))
    tx = jmpp.loss_scaled(odd, jmpp.NoOpLossScale())
    with pytest.raises(ValueError, match="changed the structure of its state"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


def test_check_and_metrics():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(4.0, min_loss_scale=2.0))
    state = tx.init(PARAMS)
    grads = {"w": jnp.array([[1.0, jnp.nan], [jnp.inf, jnp.inf]]), "b": jnp.ones(2)}
    for _ in range(2):
        jmpp.check(state, grads)
        _, state = tx.update(grads, state, PARAMS)
    message = r"at its floor \(2\).*2 steps skipped in a row(.|\n)*\['w'\]: 1 NaN, 2 inf of 4 \(float32\)$"
    with pytest.raises(jmpp.LossScaleStuckError, match=message):
        jmpp.check(state, grads)
    with pytest.raises(FloatingPointError, match="None of the gradients given"):
        jmpp.check(state, PARAMS)
    _, state = tx.update(PARAMS, state, PARAMS)
    jmpp.check(state)
    assert set(jmpp.metrics(state)) == {
        "loss_scale", "grads_finite", "skipped_steps", "consecutive_skips", "steps", "stuck",
    }  # fmt: skip
    with pytest.raises(TypeError, match="runs on the host"):
        jax.jit(lambda s: jmpp.check(s))(state)
    static = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(4.0))
    state = static.init(PARAMS)
    for _ in range(3):
        _, state = static.update(grads, state, PARAMS)
    jmpp.check(state)
    jmpp.check(state, max_consecutive_skips=4)
    with pytest.raises(jmpp.LossScaleStuckError, match="3 steps skipped in a row"):
        jmpp.check(state, max_consecutive_skips=3)


def test_a_number_in_the_place_of_the_loss_scale_is_refused():
    tx = jmpp.loss_scaled(optax.adam(1e-3), jmpp.DynamicLossScale())
    state = tx.init(PARAMS)
    number = optax.tree_utils.tree_set(state, loss_scale=jnp.float32(4.0))
    uses = (
        lambda s: jmpp.scaled_value_and_grad(lambda p: p["b"].sum())(s, PARAMS),
        lambda s: tx.update(PARAMS, s, PARAMS),
        jmpp.metrics,
    )
    for use in uses:
        with pytest.raises(TypeError, match=r"is a number \(4.0\).*dataclasses.replace"):
            use(number)
    scale = dataclasses.replace(jmpp.optim.get_loss_scale_state(state).loss_scale, loss_scale=4.0)
    good = optax.tree_utils.tree_set(state, loss_scale=scale)
    for use in uses:
        use(good)
    assert float(jmpp.metrics(good)["loss_scale"]) == 4.0
