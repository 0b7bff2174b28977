"""The loss scales: state machines, parity with torch, and life as pytrees."""

import dataclasses
import json
import pickle
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_policy as jmpp

GOLDEN = json.loads((Path(__file__).parent / "golden" / "gradscaler_torch.json").read_text())["cases"]
SCALES = [
    jmpp.NoOpLossScale(),
    jmpp.StaticLossScale(1024.0),
    jmpp.DynamicLossScale(1024.0, growth_interval=3, hysteresis=2, max_loss_scale=2.0**20),
    jmpp.StatisticLossScale(1024.0),
    jmpp.PIDLossScale(1024.0, kp=0.1, ki=0.01, kd=0.02),
]
GRADS = {"w": jnp.array([0.1, -3.0])}


def name(scale):
    return type(scale).__name__


def adjust(scale, finite):
    return scale.adjust(finite, grads=GRADS)


@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_parity_with_torch_grad_scaler(case):
    scale = jmpp.DynamicLossScale(
        case["init_scale"],
        growth_interval=case["growth_interval"],
        growth_factor=case["growth_factor"],
        backoff_factor=case["backoff_factor"],
        min_loss_scale=2.0**-126,
        max_loss_scale=2.0**127,
    )

    def step(scale, overflow):
        scale = scale.adjust(overflow == 0)
        return scale, scale.loss_scale

    _, got = jax.lax.scan(step, scale, jnp.asarray(case["overflow"]))
    np.testing.assert_array_equal(got, np.asarray(case["scale_after"], np.float32))


def model(overflows, *, scale, interval, growth, backoff, low, high, hysteresis):
    """A plain Python model of the state machine."""
    clean, tolerated, out = 0, hysteresis, []
    for overflow in overflows:
        stuck = False
        if overflow:
            clean, tolerated = 0, max(tolerated - 1, -1)
            if tolerated <= 0:
                stuck = scale <= low
                scale, tolerated = max(scale * backoff, low), 0
        else:
            clean += 1
            if clean == interval:
                scale, clean, tolerated = min(scale * growth, high), 0, hysteresis
        out.append((scale, stuck))
    return out


@pytest.mark.once
@settings(max_examples=25)
@given(
    st.lists(st.booleans(), min_size=300, max_size=300),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0.5, 0.25]),
    st.sampled_from([2.0, 4.0]),
)
def test_state_machine_against_a_plain_model(overflows, interval, hysteresis, backoff, growth):
    config = {"low": 2.0**-3, "high": 2.0**5}
    want = model(
        overflows,
        scale=2.0,
        interval=interval,
        growth=growth,
        backoff=backoff,
        hysteresis=hysteresis,
        **config,
    )
    scale = jmpp.DynamicLossScale(
        2.0, interval, growth, backoff, config["low"], config["high"], hysteresis=hysteresis
    )

    def step(scale, overflow):
        scale = scale.adjust(~overflow)
        return scale, (scale.loss_scale, scale.stuck)

    last, (got, stuck) = jax.jit(lambda s, o: jax.lax.scan(step, s, o))(scale, jnp.asarray(overflows))
    np.testing.assert_array_equal(got, [s for s, _ in want])
    np.testing.assert_array_equal(stuck, [s for _, s in want])
    assert jax.tree.structure(last) == jax.tree.structure(scale)


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES, ids=name)
@pytest.mark.parametrize("finite", [True, False])
def test_stays_normal_and_bounded_for_ever(scale, finite):
    def step(scale, _):
        return adjust(scale, finite), scale.loss_scale

    last, seen = jax.lax.scan(step, scale, None, length=3000)
    seen = np.asarray(seen)
    assert np.isfinite(seen).all()
    assert (seen >= np.finfo(np.float32).tiny).all()
    if hasattr(scale, "stuck"):
        assert bool(last.stuck) is not finite
        assert seen.min() >= scale.min_loss_scale
        assert seen.max() <= scale.max_loss_scale
        assert not bool(adjust(last, True).stuck)


def test_hysteresis():
    scale = jmpp.DynamicLossScale(16.0, growth_interval=2, hysteresis=3)
    seen = []
    for finite in (False, False, False, False, True, True, False, False, True, False):
        scale = scale.adjust(finite)
        seen.append(float(scale.loss_scale))
    assert seen == [16, 16, 8, 4, 4, 8, 8, 8, 8, 4]


def test_statistic_scale_is_the_patents_rule():
    for largest, margin in [(1.0, 0), (0.75, 0), (2.0**-20, 3), (8192.0, 0), (5e-6, 2)]:
        scale = jmpp.StatisticLossScale(margin=margin, max_loss_scale=2.0**100)
        got = float(scale.adjust(True, grads=[jnp.float32(-largest), jnp.int32(9)]).loss_scale)
        bound = 2.0 ** (15 - margin)
        assert got * largest <= bound < 2 * got * largest
        assert np.log2(got) % 1 == 0
    scale = jmpp.StatisticLossScale(1024.0)
    assert float(scale.adjust(True, grads=jnp.zeros(3)).loss_scale) == 1024
    assert float(scale.adjust(True, grads={}).loss_scale) == 1024
    assert float(scale.adjust(False, grads=jnp.float32(jnp.nan)).loss_scale) == 512
    with pytest.raises(ValueError, match="needs the unscaled gradients"):
        scale.adjust(True)


def test_an_overflow_below_the_statistics_scale_widens_its_margin():
    """Activations' gradients that overflow above 2**10, parameters' that ask for 2**20."""
    scale, seen = jmpp.StatisticLossScale(2.0**8, recovery_interval=4), []
    for _ in range(16):
        finite = float(scale.loss_scale) <= 2.0**10
        scale = scale.adjust(finite, grads=jnp.float32(2.0**-7 if finite else jnp.nan))
        seen.append(int(jnp.frexp(scale.loss_scale)[1]) - 1)
    # Back to the scale that was clean, two exponents below it, and up again by one in four clean steps.
    assert seen == [20, 8, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8, 9, 9]


def test_an_overflow_that_the_statistic_explains_does_not_stick():
    """A first scale that is too large says nothing of the margin, nor do steps without gradients."""
    scale = jmpp.StatisticLossScale(2.0**20)
    for _ in range(6):
        scale = scale.adjust(False, grads=jnp.float32(jnp.inf))
    scale = scale.adjust(True, grads=jnp.zeros(2)).adjust(True, grads=jnp.float32(2.0**3))
    assert (float(scale.loss_scale), int(scale.widened)) == (2.0**10, 0)
    scale = scale.adjust(False).adjust(
        True, grads=jnp.float32(2.0**8)
    )  # They have grown: a small margin more.
    assert (float(scale.loss_scale), int(scale.widened)) == (2.0**3, 2)


def test_an_overflow_after_a_large_gradient_says_little_of_small_ones():
    scale = jmpp.StatisticLossScale()
    for largest in (1.0, 1e3, jnp.nan, 1.0):
        scale = scale.adjust(jnp.isfinite(largest), grads=jnp.float32(largest))
    assert (float(scale.loss_scale), int(scale.widened)) == (2.0**10, 3)


@pytest.mark.once
def test_gradients_beyond_float32_send_the_statistic_scale_to_its_floor():
    with jax.enable_x64(True):
        scale = jmpp.StatisticLossScale(2.0**10).adjust(True, grads=jnp.float64(1e300))
        assert float(scale.loss_scale) == scale.min_loss_scale


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-1, 1e-3])
def test_the_statistic_scale_skips_few_steps_where_inputs_are_small(size):
    # The scale goes by gradients of parameters; those of activations are larger, and overflow first.
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = size * jax.random.normal(keys[0], (32, 16)), jax.random.normal(keys[1], (32, 4))
    model = jmpp.wrap(nn.Dense(4), "mixed_float16")
    tx = jmpp.loss_scaled(optax.adam(1e-1), jmpp.StatisticLossScale())

    def step(carry, _):
        params, state = carry
        loss = jmpp.scaled_value_and_grad(lambda params: jnp.mean((model.apply(params, x) - y) ** 2))
        updates, state = tx.update(loss(state, params)[1], state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def skipped(params):
        return jax.lax.scan(step, (params, tx.init(params)), length=200)[0][1].skipped

    assert int(skipped(model.init(keys[2], x))) <= 4


def test_pid_terms():
    scale = jmpp.PIDLossScale(2.0**10, kp=0.5, ki=0.25, kd=1.0, overflow_weight=1.0)
    first = scale.adjust(True)  # e = 1, sum = 1, difference 1
    assert float(first.log2_scale) == 10 + 0.5 + 0.25 + 1.0
    second = first.adjust(False)  # e = -1, sum = 0, difference -2
    assert float(second.log2_scale) == 11.75 - 0.5 - 2.0
    assert float(second.loss_scale) == 2.0**9
    limited = jmpp.PIDLossScale(ki=0.001, integral_limit=3.0, kp=0)
    for _ in range(10):
        limited = limited.adjust(True)
    assert float(limited.integral) == 3.0


@pytest.mark.parametrize("scale", SCALES, ids=name)
def test_scale_and_unscale(scale):
    s = float(scale.loss_scale)
    tree = {
        "f16": jnp.asarray(3.0, jnp.float16),
        "bf16": jnp.asarray(3.0, jnp.bfloat16),
        "f32": jnp.asarray(3.0),
        "complex": jnp.asarray(3.0 + 1.0j),
        "int": jnp.asarray(3),
        "key": jax.random.key(0),
        "float0": np.zeros((), jax.dtypes.float0),
        "f8": jnp.ones((), jnp.float8_e5m2),
        "none": None,
        "text": "t",
    }
    up, down = scale.scale(tree), scale.unscale(tree)
    for same in ("int", "key", "float0", "text"):
        assert up[same] is down[same] is tree[same]
    for half in ("f16", "bf16", "f32"):
        assert float(up[half]) == 3 * s
        assert float(down[half]) == 3 / s
        assert down[half].dtype == jnp.float32
    assert down["f8"].dtype == jnp.float32
    assert complex(down["complex"]) == (3 + 1j) / s
    assert complex(up["complex"]) == (3 + 1j) * s
    with jax.enable_x64(True):
        assert scale.unscale(jnp.asarray(3.0, jnp.float64)).dtype == jnp.float64


@pytest.mark.parametrize("exponent", [-126, -14, 0, 16, 100, 126])
def test_powers_of_two_are_exact(exponent):
    scale = jmpp.StaticLossScale(2.0**exponent)
    x = jnp.asarray([1.1, -3.3e-3], jnp.float32) * 2.0 ** (-exponent / 2)
    np.testing.assert_array_equal(scale.unscale(scale.scale(x)), x)


def test_numbers():
    assert float(jmpp.StaticLossScale(8.0).scale(3.0)) == 24.0
    assert jmpp.StaticLossScale(8.0).scale(3) == 3


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES, ids=name)
def test_life_as_a_pytree(scale, tmp_path):
    def same(a, b):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == y.dtype
            assert jnp.asarray(y).aval.weak_type is False
            np.testing.assert_array_equal(x, y)

    moved = adjust(adjust(scale, False), True)
    assert isinstance(moved, jmpp.LossScale)
    same(moved, jax.tree.map(lambda x: x, moved))
    same(moved, jax.jit(lambda s: s)(moved))
    same(moved, pickle.loads(pickle.dumps(moved)))
    same(moved, jax.tree.map(jnp.asarray, serialization.from_bytes(scale, serialization.to_bytes(moved))))
    same(moved, jax.tree.map(lambda x: x[1], jax.vmap(lambda _: moved)(jnp.arange(2))))
    jax.tree.map(lambda x: object(), moved)
    jax.tree.map(lambda x: jax.sharding.PartitionSpec(), moved)
    jax.eval_shape(lambda s: adjust(s, True), moved)

    with ocp.StandardCheckpointer() as checkpointer:
        state = {"scale": moved, "x": jnp.ones(2)}
        checkpointer.save(tmp_path / "checkpoint", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"scale": scale, "x": jnp.ones(2)})
        same(state, checkpointer.restore(tmp_path / "checkpoint", abstract))

    traces = []

    @jax.jit
    def jitted(s, finite):
        traces.append(None)
        return adjust(s, finite)

    jitted.lower(scale, jnp.array(True)).compile()
    new = jitted(scale, jnp.array(True))
    jitted(new, jnp.array(False))
    assert len(traces) == 1
    batch = jax.tree.map(lambda x: jnp.stack([x, x]), moved)
    finite = jnp.array([True, False])
    two = jax.vmap(adjust)(batch, finite)
    for i in range(2):
        same(jax.tree.map(lambda x, i=i: x[i], two), adjust(moved, finite[i]))


def test_static_scale_is_no_part_of_the_jit_key():
    traces = []

    @jax.jit
    def jitted(s, x):
        traces.append(None)
        return s.scale(x)

    assert float(jitted(jmpp.StaticLossScale(2.0), jnp.float32(1))) == 2
    assert float(jitted(jmpp.StaticLossScale(4.0), jnp.float32(1))) == 4
    assert len(traces) == 1


def test_statistic_states_from_before_the_margin_was_widened():
    scale = jmpp.StatisticLossScale().adjust(True, grads=GRADS).adjust(False, grads=GRADS)
    state = serialization.to_state_dict(scale)
    old = {name: np.asarray(state[name]) for name in ("loss_scale", "stuck")}
    for restored in (
        serialization.from_state_dict(jmpp.StatisticLossScale(), old),
        jmpp.restore_state(jmpp.StatisticLossScale(), old),
    ):
        assert restored.loss_scale == scale.loss_scale
        assert (int(restored.widened), float(restored.failed_scale)) == (0, 2.0**127)


def test_serialization_of_older_and_foreign_states():
    scale = jmpp.DynamicLossScale(64.0).adjust(True)
    state = serialization.to_state_dict(scale)
    del state["stuck"]
    restored = serialization.from_state_dict(jmpp.DynamicLossScale(growth_interval=7), state)
    assert float(restored.loss_scale) == 64
    assert restored.growth_interval == 7
    with pytest.raises(ValueError, match="'log2_scale'.*DynamicLossScale does not have"):
        serialization.from_state_dict(scale, serialization.to_state_dict(jmpp.PIDLossScale()))


def test_reprs():
    scale = jmpp.DynamicLossScale(1024.0)
    assert repr(scale).startswith("DynamicLossScale(loss_scale=1024.0, growth_tracker=0,")
    shown = []
    jax.jit(lambda s: shown.append(repr(s)) or s)(scale)
    assert "loss_scale=float32[]" in shown[0]
    assert repr(jmpp.NoOpLossScale()) == "NoOpLossScale()"
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), scale)
    assert "loss_scale=float32[2]" in repr(stacked)
    assert "object" in repr(jax.tree.map(lambda x: object(), scale))
    deleted = jax.tree.map(jnp.array, scale)
    deleted.loss_scale.delete()
    assert "deleted" in repr(deleted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jmpp.DynamicLossScale(0.0), "loss_scale is 0, outside"),
        (lambda: jmpp.DynamicLossScale(-2.0), "loss_scale is -2, outside"),
        (lambda: jmpp.DynamicLossScale(float("inf")), "must be finite"),
        (lambda: jmpp.DynamicLossScale(float("nan")), "must be finite"),
        (lambda: jmpp.DynamicLossScale(2.0**30), "outside"),
        (lambda: jmpp.DynamicLossScale(jnp.ones(2)), r"scalar, got shape \(2,\)"),
        (lambda: jmpp.DynamicLossScale("x"), "loss_scale must be a number"),
        (lambda: jmpp.DynamicLossScale(growth_interval=0), "between 1 and"),
        (lambda: jmpp.DynamicLossScale(growth_interval=-3), "between 1 and"),
        (lambda: jmpp.DynamicLossScale(growth_interval=2.5), "whole number, got 2.5"),
        (lambda: jmpp.DynamicLossScale(growth_interval=True), "whole number"),
        (lambda: jmpp.DynamicLossScale(growth_factor=1.0), "greater than 1"),
        (lambda: jmpp.DynamicLossScale(growth_factor=0.5), "greater than 1"),
        (lambda: jmpp.DynamicLossScale(backoff_factor=0.0), "greater than 0 and less than 1"),
        (lambda: jmpp.DynamicLossScale(backoff_factor=1.0), "less than 1"),
        (lambda: jmpp.DynamicLossScale(backoff_factor=-1), "greater than 0"),
        (lambda: jmpp.DynamicLossScale(min_loss_scale=0.0), "positive, finite, normal"),
        (lambda: jmpp.DynamicLossScale(min_loss_scale=1e-40), "positive, finite, normal"),
        (lambda: jmpp.DynamicLossScale(max_loss_scale=float("inf")), "must be finite"),
        (lambda: jmpp.DynamicLossScale(min_loss_scale=4, max_loss_scale=2), "greater than max"),
        (lambda: jmpp.DynamicLossScale(hysteresis=0), "hysteresis must be between"),
        (lambda: jmpp.StaticLossScale(0), "outside"),
        (lambda: jmpp.StaticLossScale(2.0**127), "outside"),
        (lambda: jmpp.StaticLossScale(None), "must be a number"),
        (lambda: jmpp.StatisticLossScale(margin=-1), "margin must be"),
        (lambda: jmpp.PIDLossScale(overflow_weight=0), "overflow_weight must be"),
        (lambda: jmpp.PIDLossScale(kp=float("nan")), "kp must be finite"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES, ids=name)
def test_dataclasses_replace(scale):
    """It passes every field to `__init__`: counters stay, what is changed is checked."""
    moved = adjust(adjust(scale, True), False)
    for same in (dataclasses.replace(moved), jax.jit(dataclasses.replace)(moved)):
        assert jax.tree.structure(same) == jax.tree.structure(moved)
        for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(moved), strict=True):
            assert (a, a.dtype, jnp.asarray(a).aval.weak_type) == (b, b.dtype, False)
    if not isinstance(scale, jmpp.NoOpLossScale):
        new = dataclasses.replace(moved, loss_scale=8.0)
        assert float(new.loss_scale) == 8
        assert len(jax.tree.leaves(new)) == len(jax.tree.leaves(moved))
        changed = [float(a) for a, b in zip(*map(jax.tree.leaves, (new, moved)), strict=True) if a != b]
        assert changed in ([8.0], [3.0])  # The scale, or its logarithm.
        with pytest.raises(ValueError, match="outside"):
            dataclasses.replace(moved, loss_scale=0.0)


def test_replaced_counters_are_strongly_typed():
    scale = dataclasses.replace(jmpp.DynamicLossScale(), growth_tracker=3, growth_interval=7)
    assert (scale.growth_tracker.dtype, scale.growth_tracker.aval.weak_type) == (jnp.int32, False)
    assert (int(scale.growth_tracker), scale.growth_interval) == (3, 7)


def test_made_inside_jit():
    @jax.jit
    def run(x):
        return jmpp.DynamicLossScale(x).adjust(True), jmpp.StaticLossScale(x).scale(x)

    scale, _ = run(jnp.float32(4.0))
    assert float(scale.loss_scale) == 4
    assert scale.growth_tracker.dtype == jnp.int32


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES, ids=name)
def test_strict_promotion(scale):
    with jax.numpy_dtype_promotion("strict"):
        state = jmpp.loss_scaled(optax.sgd(1.0), scale).init(jnp.ones(2))
        jmpp.loss_scaled(optax.sgd(1.0), scale).update(jnp.ones(2), state)
        jmpp.loss_scaled(optax.sgd(1.0), scale).update(jnp.ones(2, jnp.float16), state)
        jmpp.scaled_value_and_grad(lambda x: jnp.sum(x * x))(scale, jnp.ones(2))
