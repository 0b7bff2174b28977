"""Faults planted on purpose: training survives them, or ends with an error that names the fault."""

import damage
import fault_steps as steps
import jax
import numpy as np
import planted_faults as faults
import pytest
import scale_sequences as sequences

import jmp_policy as jmpp

pytestmark = pytest.mark.once
MODELS = list(steps.MODELS)


def as_expected(rows, identical=True):
    for row in rows:
        assert row.unexpected == []
        assert row.runs > 0
        assert row.identical in ((row.runs,) if identical else (None, row.runs))


@pytest.mark.parametrize("name", MODELS)
def test_transient_faults_cost_the_steps_they_hit(name):
    rows = faults.transient([name], [3])
    as_expected(rows)
    # Three values, and 1 + 1 + 3 + 4 steps.
    assert [row.skipped for row in rows] == [27] * 5


@pytest.mark.parametrize("name", MODELS)
def test_at_floor_and_ceiling(name):
    as_expected(faults.at_the_bounds([name]))


def test_one_shard_makes_all_devices_skip():
    rows = faults.sharded([0, 5])
    as_expected(rows)
    assert [row.skipped for row in rows] == [6, 6]


@pytest.mark.parametrize("name", MODELS)
def test_batch_statistics_alone(name):
    rows = faults.statistics([name])
    as_expected(rows)
    assert [row.skipped for row in rows] == [0, 0]


def test_one_microbatch_is_dropped_with_its_window_or_alone():
    window, single = faults.microbatches()
    as_expected([window])
    as_expected([single], identical=False)
    assert (window.skipped, single.skipped) == (12, 0)


def test_check_ends_hopeless_runs():
    rows = faults.hopeless(["Linen"], ["NaN"])
    as_expected(rows, identical=False)
    assert [row.skipped for row in rows] == [5] * 5  # From 2**12 to 2**8, and once at the floor.


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


def test_integers_out_of_range():
    beyond, negative = faults.integers()
    as_expected([beyond, negative], identical=False)
    assert (beyond.skipped, negative.skipped) == (9, 0)


def test_empty_trees_and_arrays():
    rows = faults.nothing()
    as_expected(rows, identical=False)
    assert [row.skipped for row in rows] == [0, 2]


def test_interruptions_and_threads():
    host, kept, gone, threads = faults.interrupted(rounds=1, thread_rounds=1)
    as_expected([host, kept])
    as_expected([gone, threads], identical=False)
    assert threads.runs == 8 * 6 * 9


def test_a_fault_that_is_not_skipped_is_counted(monkeypatch):
    # Without the finite test nothing is skipped: the counts must show it.
    training = steps.linen()
    faults.undisturbed.cache_clear()
    step = training.step

    def careless(state, batch, plant):
        state, loss, grads = step(state, batch, plant._replace(loss=np.float32(0)))
        return state, loss, grads

    monkeypatch.setitem(steps.MODELS, "Linen", lambda: training._replace(step=careless))
    held, skipped = faults.disturbed("Linen", steps.Plant(loss=np.float32(np.nan)), (3,))
    assert skipped == 0
    assert {name for name, holds in held.items() if not holds} >= {
        "only these steps skipped",
        "nothing lost",
        "scale by the rule",
        "same bits",
    }
    faults.undisturbed.cache_clear()


def test_damaged_states_are_refused_or_do_no_harm():
    rows = damage.states(["several losses", "NNX"])
    as_expected(rows, identical=False)
    assert sum(row.refused for row in rows) > 500


def test_damaged_configs_and_patterns_are_refused_or_do_no_harm():
    rows = [*damage.configs(300), *damage.patterns(1000)]
    as_expected(rows, identical=False)


def test_random_sequences_of_overflows():
    found = sequences.compare(10_000, per_configuration=1000, seed=1)
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
