"""Faults planted on purpose: training survives them, or ends with an error that names the fault."""

import functools
import itertools
from typing import Any

import damage
import fault_steps as steps
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scale_sequences
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

pytestmark = pytest.mark.once

VALUES = {"NaN": np.nan, "inf": np.inf, "-inf": -np.inf}
WHEN = {"first step": (0,), "growth step": (3,), "three in a row": (5, 6, 7), "now and then": (2, 8, 9, 13)}
RUN = 18
DEVICES = 8
MODELS = list(steps.MODELS)


@functools.cache
def undisturbed(
    name: str, left_out: tuple[int, ...], scale: float, place: Any = None
) -> list[tuple[Any, Any]]:
    """State and loss after each step of a run on the same batches without those that a fault spoils."""
    training, out = steps.MODELS[name](), []
    state = steps.scaled_by(training.start, scale)
    state = place(state) if place else state
    for i, batch in enumerate(steps.batches()[:RUN]):
        if i not in left_out:
            state, loss, _ = training.step(state, batch, steps.Plant())
            out.append((state, loss))
    return out


def disturbed(
    name: str, plant: steps.Plant, at: tuple[int, ...], scale: float = steps.START, place: Any = None
) -> tuple[dict[str, bool], int]:
    """A run with a fault at some steps: what held, and how many steps were skipped."""
    training = steps.MODELS[name]()
    state = steps.scaled_by(training.start, scale)
    state = place(state) if place else state
    want = scale_sequences.plain([i in at for i in range(RUN)], scale, steps.CONFIG)
    clean = iter(undisturbed(name, at, scale, place))
    names = ("only these steps skipped", "nothing lost", "scale by the rule", "recovers", "same bits")
    held = dict.fromkeys(names, True)
    for i, batch in enumerate(steps.batches()[:RUN]):
        before = state
        state, loss, _ = training.step(state, batch, plant if i in at else steps.Plant())
        opt = state["opt_state"]
        scales = opt.loss_scale
        seen = (scales.loss_scale, scales.growth_tracker, scales.hysteresis_tracker, scales.stuck)
        held["scale by the rule"] &= [float(x) for x in seen] == [float(x) for x in want[i]]
        held["only these steps skipped"] &= bool(opt.grads_finite) is (i not in at)
        if i in at:
            held["nothing lost"] &= steps.same(steps.trained(before), steps.trained(state))
        else:
            expected, expected_loss = next(clean)
            # Within the rounding of float16 gradients at another scale.
            held["recovers"] &= bool(np.isclose(float(loss), float(expected_loss), rtol=1e-3, atol=0))
            now, then = (steps.trained(state), loss), (steps.trained(expected), expected_loss)
            held["same bits"] &= steps.same(now, then)
    return held, int(state["opt_state"].skipped)


def skipped_alone(name, plant, when, scale=steps.START, place=None):
    """A fault costs the steps that it hits, and nothing else."""
    held, skipped = disturbed(name, plant, WHEN[when], scale, place)
    assert [what for what, holds in held.items() if not holds] == []
    assert skipped == len(WHEN[when])


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("field", ["inputs", "labels", "parameters", "gradient", "loss"])
@pytest.mark.parametrize("name", MODELS)
def test_transient_faults_cost_the_steps_they_hit(name, field, when):
    for value in VALUES.values():
        skipped_alone(name, steps.Plant(**{field: np.float32(value), "row": np.int32(3)}), when)


@pytest.mark.parametrize("scale", [steps.FLOOR, steps.CEILING])
@pytest.mark.parametrize("name", MODELS)
def test_at_floor_and_ceiling(name, scale):
    for when, value in itertools.product(WHEN, VALUES.values()):
        skipped_alone(name, steps.Plant(gradient=np.float32(value)), when, scale)


@functools.cache
def mesh():
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))


def sharded(state):
    def sharding(x):
        return NamedSharding(mesh(), P("d") if x.ndim == 2 and x.shape[0] % DEVICES == 0 else P())

    return jax.device_put(state, jax.tree.map(sharding, state))


@pytest.mark.parametrize("shard", [0, 5])
def test_one_shard_makes_all_devices_skip(shard):
    for value in VALUES.values():
        row = np.int32(steps.WIDTHS[0] // DEVICES * shard)
        skipped_alone("Linen", steps.Plant(gradient=np.float32(value), row=row), "growth step", place=sharded)


@functools.cache
def _mapped_step():
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(steps.START), axis_name="d")
    start = (jnp.ones((DEVICES, 3)), tx.init(jnp.ones((DEVICES, 3))))
    specs = jax.tree.map(lambda x: P("d") if x.ndim else P(), start)

    def loss_fn(w: jax.Array) -> jax.Array:
        return jnp.sum(w.astype(jnp.float16).astype(jnp.float32) ** 2)

    def step(state: Any, poison: jax.Array) -> Any:
        return steps.taken(tx, loss_fn, *state, poison=poison)[1:]

    run = jax.shard_map(step, mesh=mesh(), in_specs=(specs, P("d")), out_specs=specs, check_vma=False)
    return jax.jit(run), start


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("device", [0, 5])
def test_one_device_of_shard_map_makes_all_skip(device, value):
    """Six steps of eight devices with a parameter shard each; on the third one of them has the fault."""
    step, start = _mapped_step()
    clean, poison = np.zeros((DEVICES, 1), np.float32), np.zeros((DEVICES, 1), np.float32)
    poison[device] = value
    state, expected = start, start
    for i in range(6):
        before = state
        state = step(state, poison if i == 2 else clean)
        if i == 2:
            assert steps.same(*[(params, opt.inner_state) for params, opt in (before, state)])
        else:
            expected = step(expected, clean)
    assert int(state[1].skipped) == 1
    assert float(state[1].loss_scale.loss_scale) == steps.START / 2
    assert steps.same(*[(params, opt.inner_state) for params, opt in (state, expected)])


MICROBATCHES = 4


def _microbatch_loss(w, x):
    return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)


@functools.cache
def _microbatch_step():
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(steps.START, **steps.CONFIG))
    gradient = jmpp.accumulate_gradients(_microbatch_loss, MICROBATCHES)

    @jax.jit
    def step(state, x):
        _, grads = gradient(state[1], state[0], x)
        updates, opt_state = tx.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    w = jnp.ones((steps.WIDTHS[0], 4))
    return step, (w, tx.init(w))


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("part", range(MICROBATCHES))
def test_one_microbatch_skips_its_window(part, value):
    step, start = _microbatch_step()
    state, expected = start, start
    for i, x in enumerate(batch["x"] for batch in steps.batches()[:6]):
        bad = x.copy()
        bad[part::MICROBATCHES] += np.float32(value if i == 2 else 0)
        before = state
        state = step(state, bad)
        if i != 2:
            expected = step(expected, x)
        else:
            assert steps.same(*[(params, opt.inner_state) for params, opt in (before, state)])
    assert steps.same(*[(params, opt.inner_state) for params, opt in (state, expected)])
    assert int(state[1].skipped) == 1
    assert float(state[1].loss_scale.loss_scale) == steps.START / 2


def through(name, state, value=0.0):
    """All states of a run with a value in the new statistics of one step, which trains as without it."""
    states = []
    for i, batch in enumerate(steps.batches()[:RUN]):
        plant = steps.Plant(statistics=np.float32(value if i == 3 else 0))
        state, _, _ = steps.MODELS[name]().step(state, batch, plant)
        states.append(state)
    assert steps.same(undisturbed(name, (), steps.START)[-1][0]["params"], state["params"])
    assert int(state["opt_state"].skipped) == 0
    return states


@pytest.mark.parametrize("name", MODELS)
def test_batch_statistics_alone(name):
    """No gradient shows them: `all_finite` keeps the old ones, and stored ones stay NaN for good."""
    start = steps.MODELS[name]().start
    for value in VALUES.values():
        states = through(name, start, value)
        assert steps.same(states[2]["stats"], states[3]["stats"])
        assert bool(jmpp.all_finite(states[-1]["stats"]))
    poisoned = {**start, "stats": steps.planted(start["stats"], np.nan, 0)}
    assert not bool(jmpp.all_finite(through(name, poisoned)[-1]["stats"]))


#: What is NaN from the third step on -> what `check` says of it, in Linen.
HOPELESS = {
    "inputs": "batch/x is not finite to begin with",
    "labels": "batch/y is not finite to begin with",
    "parameters": "params/Dense_0/kernel is not finite to begin with",
    "gradient": "['Dense_0']['kernel']: 1 NaN, 0 inf of",
    "loss": "plant/loss is not finite to begin with",
}


def spoiled(field, states):
    """Two clean steps, then the fault on every step; the states from then on."""
    training, value = steps.linen(), np.float32(np.nan)
    state, plant = training.start, steps.Plant()
    for i, clean in enumerate(steps.batches()):
        batch = dict(clean)
        if i == 2 and field == "parameters":
            state = {**state, "params": steps.planted(state["params"], value, 0)}
        if i == 2:
            states.append(state)
        if i >= 2 and field in ("inputs", "labels"):
            letter = {"inputs": "x", "labels": "y"}[field]
            batch[letter] = batch[letter].copy()
            batch[letter][0, 0] = value
        if i >= 2 and field in ("gradient", "loss"):
            plant = steps.Plant(**{field: value})
        state, _, grads = training.step(state, batch, plant)
        if i >= 2:
            states.append(state)
        args = (state["params"], state["stats"], batch, plant)
        jmpp.check(state["opt_state"], grads, loss_fn=training.loss_fn, args=args, has_aux=True)


@pytest.mark.parametrize("field", HOPELESS)
def test_check_ends_hopeless_runs(field):
    """As soon as the scale is at its floor, and says where."""
    states = []
    with pytest.raises(jmpp.LossScaleStuckError, match="is at its floor") as caught:
        spoiled(field, states)
    assert HOPELESS[field] in str(caught.value)
    # As many skips as it takes to halve the scale down to its floor, and one that cannot.
    assert int(states[-1]["opt_state"].skipped) == int(np.log2(steps.START / steps.FLOOR)) + 1
    assert steps.same(steps.trained(states[0]), steps.trained(states[-1]))


@pytest.mark.parametrize("name", MODELS)
def test_check_names_the_parameter(name):
    training = steps.MODELS[name]()
    state = steps.scaled_by(training.start, steps.FLOOR)
    state = {**state, "params": steps.planted(state["params"], np.nan, 0)}
    batch = steps.batches()[0]
    state, _, grads = training.step(state, batch, steps.Plant())
    args = (state["params"], state["stats"], batch, steps.Plant())
    path = {"Linen": "params/Dense_0/kernel", "NNX": "params/first/kernel"}[name]
    message = rf"at its floor \(256\)(.|\n)*{path} is not finite to begin with"
    with pytest.raises(jmpp.LossScaleStuckError, match=message) as caught:
        jmpp.check(state["opt_state"], grads, loss_fn=training.loss_fn, args=args, has_aux=True)
    assert caught.value.diagnosis.path == path


CLASSES = 4
#: Labels and token ids that are too large or too small, and those that count from the end.
BEYOND, NEGATIVE = (4, 100, -5), (-1, -4)


def of_labels():
    def loss_fn(logits, ids):
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    return loss_fn, jnp.arange(8.0, dtype=jnp.float32).reshape(2, CLASSES)


def of_tokens():
    embed = jmpp.wrap(nn.Embed(CLASSES, 2), "mixed_float16")
    params = embed.init(jax.random.key(0), jnp.zeros(2, jnp.int32))
    return lambda params, ids: jnp.sum(embed.apply(params, ids) ** 2), params


def of_tokens_nnx():
    graph, params = nnx.split(jmpp.wrap(nnx.Embed(CLASSES, 2, rngs=nnx.Rngs(0)), "mixed_float16"))
    return lambda params, ids: jnp.sum(nnx.merge(graph, params)(ids) ** 2), params


@pytest.mark.parametrize("make", [of_labels, of_tokens, of_tokens_nnx])
def test_integers_out_of_range(make):
    loss_fn, params = make()
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(steps.START))
    step = jax.jit(functools.partial(steps.taken, tx, loss_fn))
    for last in BEYOND:
        loss, new, state = step(params, tx.init(params), jnp.array([0, last]))
        assert bool(jnp.isnan(loss))
        assert steps.same(params, new)
        assert int(state.skipped) == 1
    for last in NEGATIVE:
        loss, _, state = step(params, tx.init(params), jnp.array([0, last]))
        assert loss == step(params, tx.init(params), jnp.array([0, last + CLASSES]))[0]
        assert int(state.skipped) == 0


def test_empty_trees_and_arrays():
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(steps.START))

    def loss_fn(params, x):
        used = [jnp.sum(p.astype(jnp.float16)).astype(jnp.float32) for p in jax.tree.leaves(params)]
        return jnp.mean(x) + sum(used, jnp.float32(0))

    step = functools.partial(steps.taken, tx, loss_fn)
    trees = {}, {"a": None}, (), jnp.zeros(0), {"w": jnp.zeros((0, 4))}
    for params, jitted in itertools.product(trees, (False, True)):
        _, new, state = (jax.jit(step) if jitted else step)(params, tx.init(params), jnp.ones(2))
        assert steps.same(new, params)
        assert bool(state.grads_finite)
    params = {"w": jnp.ones(3)}
    for shape in ((0,), (0, 4)):  # The mean of nothing is NaN.
        _, new, state = jax.jit(step)(params, tx.init(params), jnp.zeros(shape))
        assert int(state.skipped) == 1
        assert steps.same(new, params)


@pytest.mark.parametrize("error", [KeyboardInterrupt, steps.InterruptedStepError])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_that_was_interrupted_can_be_repeated(name, error):
    held = steps.on_the_host(steps.MODELS[name](), error, at=0)
    assert held == {"old state whole": True, "same bits": True}


def test_interrupts_in_a_callback_leave_the_old_state_unless_it_was_donated():
    held = steps.in_a_callback(donate=False)
    assert held == {"the step raised": True, "old state whole": True, "same bits": True}
    held = steps.in_a_callback(donate=True)
    assert held == {"the step raised": True, "donated buffers are gone": True}


def test_threads_that_trace_under_several_policies_get_their_own_dtypes():
    calls, wrong = steps.threads(DEVICES, rounds=1)
    assert wrong == []
    assert calls == 8 * 6 * 9


def test_a_fault_that_is_not_skipped_is_counted(monkeypatch):
    # Without the finite test nothing is skipped: the counts must show it.
    training = steps.linen()
    undisturbed.cache_clear()
    step = training.step

    def careless(state, batch, plant):
        state, loss, grads = step(state, batch, plant._replace(loss=np.float32(0)))
        return state, loss, grads

    monkeypatch.setitem(steps.MODELS, "Linen", lambda: training._replace(step=careless))
    held, skipped = disturbed("Linen", steps.Plant(loss=np.float32(np.nan)), (3,))
    assert skipped == 0
    assert {name for name, holds in held.items() if not holds} >= {
        "only these steps skipped",
        "nothing lost",
        "scale by the rule",
        "same bits",
    }
    undisturbed.cache_clear()


def as_expected(rows):
    for row in rows:
        assert row.unexpected == []
        assert row.runs > 0


def test_damaged_states_are_refused_or_do_no_harm():
    rows = damage.states(["several losses", "NNX"])
    as_expected(rows)
    assert sum(row.refused for row in rows) >= 500


def test_damaged_configs_and_patterns_are_refused_or_do_no_harm():
    rows = [*damage.configs(300), *damage.patterns(1000)]
    as_expected(rows)


def test_random_sequences_of_overflows():
    found = scale_sequences.compare(10_000, per_configuration=1000, seed=1)
    assert found["steps"] == 500_000
    assert found["different"] == 0
    assert found["overflows"] > 100_000


@pytest.mark.parametrize("factor", [0.8, 1 / 3, 0.5])
@pytest.mark.parametrize("exponent", [-120, -60, -1, 0, 60, 120, 126])
def test_large_and_small_scales_back_off_to_the_nearest_number(factor, exponent):
    scale = jmpp.DynamicLossScale(
        2.0**exponent, backoff_factor=factor, min_loss_scale=2.0**-126, max_loss_scale=2.0**126
    )
    assert float(scale.adjust(False).loss_scale) == np.float32(2.0**exponent * factor)
    assert float(jax.jit(lambda s: s.adjust(False))(scale).loss_scale) == np.float32(2.0**exponent * factor)


@pytest.mark.parametrize("factor", [3.7, 1e30, 3.1e38, 1e39, 1e300])
def test_growth_beyond_float32_ends_at_the_ceiling(factor):
    scale = jmpp.DynamicLossScale(2.0**120, growth_factor=factor, growth_interval=1, max_loss_scale=2.0**121)
    assert float(scale.adjust(True).loss_scale) == 2.0**121
