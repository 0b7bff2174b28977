"""`loss_scaled(..., monitor=)` against NumPy, what it costs when it is off, and `MetricsLogger`."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import equations, paired
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jmp_policy as jmpp
from jmp_policy import MetricsLogger

F16, F32 = jnp.float16, jnp.float32
PARAMS = {
    "encoder": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)},
    "head": {"kernel": jnp.ones((3, 2)), "empty": jnp.ones((0, 2))},
}
SMALL = {"a": {"w": jnp.ones((4, 2))}, "b": jnp.ones(3)}


def tx(monitor=True, scale=8.0, **kwargs):
    return jmpp.loss_scaled(optax.sgd(0.1, 0.9), jmpp.DynamicLossScale(scale), monitor=monitor, **kwargs)


def by_kind(path):
    return "biases" if path.endswith("bias") else "kernels"


def measured(state):
    """What is measured of each group: `{group: {name: value}}`."""
    found = {}
    for name, value in jmpp.metrics(state).items():
        if name.startswith("grad_") and "/" in name:
            kind, _, group = name.partition("/")
            found.setdefault(group, {})[kind.removeprefix("grad_")] = float(value)
    return found


def in_numpy(arrays, scale):
    """The same with NumPy, underflow by casting to float16."""
    flat = np.abs(np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays]))
    with np.errstate(over="ignore"):
        becomes_zero = (flat * scale).astype(np.float32).astype(np.float16) == 0
    positive = flat[flat > 0]
    return {
        "max": flat.max(),
        "min": positive.min() if positive.size else 0.0,
        "underflow": becomes_zero.mean(),
    }


def update(transformation, grads, params=PARAMS, scale=8.0):
    """The state after scaled gradients."""
    state = transformation.init(params)
    return transformation.update(jax.tree.map(lambda g: g * scale, grads), state, params)[1]


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(2.0 ** rng.uniform(-40, 4, p.shape) * rng.choice([-1, 0, 1], p.shape), F32),
        PARAMS,
    )


GROUPINGS = {
    "first_name": (True, {"encoder": ["encoder/kernel", "encoder/bias"], "head": ["head/kernel"]}),
    "by_kind": (by_kind, {"biases": ["encoder/bias"], "kernels": ["encoder/kernel", "head/kernel"]}),
    "each": (lambda path: path, {p: [p] for p in ("encoder/kernel", "encoder/bias", "head/kernel")}),
    "one": (lambda path: "all", {"all": ["encoder/kernel", "encoder/bias", "head/kernel"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), paired(GROUPINGS, [1.0, 8.0, 2.0**16]))
def test_groups_are_numpys(name, scale):
    monitor, groups = GROUPINGS[name]
    grads = gradients()
    found = measured(update(tx(monitor, scale), grads, scale=scale))
    assert set(found) == set(groups)
    for group, paths in groups.items():
        leaves = [grads[path.split("/")[0]][path.split("/")[1]] for path in paths]
        expected = in_numpy(leaves, scale)
        assert found[group] == pytest.approx(expected, rel=1e-6), group


@pytest.mark.once
@settings(max_examples=60)
@given(
    grads=hnp.arrays(np.float32, 8, elements=st.floats(-(2.0**20), 2.0**20, width=32)),
    shift=st.integers(0, 20),
)
def test_any_gradients(grads, shift):
    # Of float32's subnormal numbers, the device makes zeros.
    grads = np.where(np.abs(grads) < 2.0**-100, 0, grads).astype(np.float32)
    scale = 2.0**shift
    found = measured(update(_ANY, {"w": jnp.asarray(grads)}, {"w": jnp.ones(8)}, 1.0))["w"]
    assert found == pytest.approx(in_numpy([grads], 1.0), rel=1e-6)
    state = _ANY.init({"w": jnp.ones(8)})
    state = state._replace(loss_scale=jmpp.StaticLossScale(scale))
    _, state = _ANY.update({"w": jnp.asarray(grads * np.float32(scale))}, state, {"w": jnp.ones(8)})
    assert measured(state)["w"] == pytest.approx(in_numpy([grads], scale), rel=1e-6)


_ANY = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(1.0), monitor=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "share"),
    [(2.0**-25, 1.0), (np.nextafter(np.float32(2.0**-25), np.float32(1)), 0.0), (2.0**-24, 0.0), (0.0, 1.0)],
)
def test_underflow_is_what_float16_holds_as_zero(value, share):
    assert (np.float32(value).astype(np.float16) == 0) == bool(share)
    found = measured(update(tx(scale=1.0), {"w": jnp.full(4, value, F32)}, {"w": jnp.ones(4)}, 1.0))
    assert found["w"]["underflow"] == share
    # A scale of 2**8 saves what is 2**8 below.
    found = measured(update(tx(scale=256.0), {"w": jnp.full(4, value / 256, F32)}, {"w": jnp.ones(4)}, 256.0))
    assert found["w"]["underflow"] == share


@pytest.mark.parametrize("dtype", [F16, jnp.bfloat16])
def test_half_gradients_are_measured_as_what_they_are_unscaled(dtype):
    grads = {"w": jnp.asarray([2.0, -4.0, 0.0], dtype)}
    found = measured(update(tx(scale=2.0**15), grads, {"w": jnp.ones(3)}, 1.0))
    assert found["w"] == {"max": 2.0**-13, "min": 2.0**-14, "underflow": pytest.approx(1 / 3)}


@pytest.mark.slow
def test_a_single_array_complex_and_no_numbers():
    found = measured(update(tx(), jnp.float32(2.0), jnp.float32(1.0)))
    assert found == {"all": {"max": 2.0, "min": 2.0, "underflow": 0.0}}
    assert measured(tx().init({})) == {}
    found = measured(update(tx(), {"c": jnp.asarray([3 + 4j])}, {"c": jnp.asarray([1 + 1j])}))
    assert found["c"]["max"] == 5.0
    mixed = {"w": jnp.ones(2), "steps": jnp.int32(1)}
    keeps = jmpp.loss_scaled(optax.identity(), jmpp.DynamicLossScale(8.0), monitor=True)
    grads = {"w": jnp.ones(2), "steps": np.zeros((), jax.dtypes.float0)}
    assert set(measured(keeps.update(grads, keeps.init(mixed), mixed)[1])) == {"w"}


@pytest.mark.once
def test_scalars_are_float32_of_no_shape():
    state = update(tx(), gradients())
    values = {k: v for k, v in jmpp.metrics(state).items() if k.startswith("grad_")}
    assert len(values) == 6
    assert {(v.shape, v.dtype.name) for v in values.values()} == {((), "float32")}


@pytest.mark.slow
def test_before_the_first_step_all_is_zero():
    state = tx().init(PARAMS)
    zero = {"max": 0.0, "min": 0.0, "underflow": 0.0}
    assert measured(state) == {"encoder": zero, "head": zero}
    after = update(tx(), gradients())
    assert jax.tree.structure(state) == jax.tree.structure(after)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, after)
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_skipped_steps_show_what_was_not_finite(bad):
    grads = {"a": {"w": jnp.full((4, 2), 2.0).at[0, 0].set(bad)}, "b": jnp.full(3, 0.5)}
    state = update(tx(), grads, SMALL)
    assert not jmpp.grads_finite(state)
    found = measured(state)
    assert not np.isfinite(found["a"]["max"])
    assert found["b"] == {"max": 0.5, "min": 0.5, "underflow": 0.0}
    # And the next step is measured anew.
    _, state = tx().update(jax.tree.map(lambda p: p * 8, SMALL), state, SMALL)
    assert measured(state)["b"]["max"] == pytest.approx(2.0)


# What it costs.


def step_of(transformation):
    def step(params, state, x):
        def loss(params):
            return ((x @ params["a"]["w"]).sum() + params["b"].sum()) ** 2

        value, grads = jmpp.scaled_value_and_grad(loss)(state, params)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


X = np.ones((2, 4), np.float32)


def test_groups_of_linens_variables_are_below_params():
    params = {"params": PARAMS}
    keeps = tx()
    _, state = keeps.update({"params": gradients()}, keeps.init(params), params)
    assert set(measured(state)) == {"encoder", "head"}


def test_off_adds_nothing():
    bare = jmpp.loss_scaled(optax.sgd(0.1, 0.9), jmpp.DynamicLossScale(8.0))
    jaxprs = [jax.make_jaxpr(step_of(t))(SMALL, t.init(SMALL), X) for t in (bare, tx(False), tx(True))]
    assert str(jaxprs[0]) == str(jaxprs[1])
    assert len(list(equations(jaxprs[2].jaxpr))) > len(list(equations(jaxprs[0].jaxpr)))
    assert tx(False).init(SMALL).gradients is None
    assert jax.tree.structure(tx(False).init(SMALL)) == jax.tree.structure(bare.init(SMALL))
    assert measured(tx(False).init(SMALL)) == {}


def test_updates_are_the_same():
    results = [step_of(t)(SMALL, t.init(SMALL), X) for t in (tx(False), tx(True))]
    assert all(map(np.array_equal, jax.tree.leaves(results[0][0]), jax.tree.leaves(results[1][0])))
    assert jax.tree.structure(results[0][1]._replace(gradients=None)) == jax.tree.structure(results[0][1])


def test_in_jit_one_trace_does():
    traces = []
    transformation = tx()

    @jax.jit
    def step(params, state, x):
        traces.append(1)
        params, state, _ = step_of(transformation)(params, state, x)
        return params, state, jmpp.metrics(state)

    params, state = SMALL, transformation.init(SMALL)
    for _ in range(3):
        params, state, values = step(params, state, X)
    assert len(traces) == 1
    # (8 + 3) ** 2 at first: its gradient by each of b is 22; by a, twice as much.
    assert values["grad_max/a"] == 2 * values["grad_max/b"]


@pytest.mark.once
def test_in_scan_and_vmap():
    transformation = tx()

    def body(carry, x):
        params, state, _ = step_of(transformation)(*carry, x)
        return (params, state), jmpp.metrics(state)["grad_max/b"]

    xs = jnp.stack([X, X * jnp.inf, X])
    (_, state), largest = jax.jit(lambda: jax.lax.scan(body, (SMALL, transformation.init(SMALL)), xs))()
    assert largest[0] == 2 * (16 + 3)
    assert not np.isfinite(largest[1])
    assert np.isfinite(largest[2])
    assert state.skipped == 1

    def of_one(g):
        return jmpp.metrics(transformation.update({"w": g}, transformation.init({"w": g}), {"w": g})[1])

    assert jax.vmap(of_one)(jnp.asarray([[8.0, 16.0], [0.0, 24.0]]))["grad_max/w"].tolist() == [2.0, 3.0]


def test_gradients_accumulated_inside_and_chained():
    inside = jmpp.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), jmpp.DynamicLossScale(8.0), monitor=True)
    state = inside.init(SMALL)
    for factor in (8.0, 16.0):
        _, state = inside.update(jax.tree.map(lambda p, f=factor: p * f, SMALL), state, SMALL)
    assert measured(state)["b"]["max"] == 2.0
    chained = optax.chain(optax.identity(), tx())
    _, state = chained.update(jax.tree.map(lambda p: p * 8, SMALL), chained.init(SMALL), SMALL)
    assert measured(state)["a"]["max"] == 1.0


@pytest.mark.slow
def test_nnx_optimizer():
    model = nnx.Dict(
        {"first": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "last": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}
    )
    optimizer = nnx.Optimizer(model, tx(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss(model):
            return (model["last"](model["first"](x)) ** 2).sum()

        _, grads = jmpp.nnx.scaled_value_and_grad(loss)(optimizer, model)
        optimizer.update(model, grads)

    step(model, optimizer, jnp.ones((1, 2)))
    found = measured(optimizer)
    assert set(found) == {"first", "last"}
    assert all(group["max"] > 0 for group in found.values())


# Saving and restoring.


def test_state_is_restored_by_flax():
    state = update(tx(), gradients())
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(tx().init(PARAMS), data)
    assert measured(restored) == measured(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_checkpoints_from_before_there_was_a_monitor():
    """`gradients` came last: states without it are made as before, and Flax wants it named."""
    old = tx(False).init(SMALL)
    saved = flax.serialization.to_state_dict(old)
    restored = flax.serialization.from_state_dict(tx(False).init(SMALL), saved)
    assert restored.gradients is None
    without = {k: v for k, v in saved.items() if k != "gradients"}
    values = {f: getattr(old, f) for f in old._fields if f != "gradients"}
    assert jmpp.optim.LossScaledState(**values) == old._replace(gradients=None)
    assert jmpp.optim.LossScaledState(*old[:-1]).gradients is None
    restored = flax.serialization.from_state_dict(tx(False).init(SMALL), {**without, "gradients": None})
    assert restored.gradients is None
    assert jax.tree.structure(restored) == jax.tree.structure(old)


def test_a_monitor_that_is_switched_on_later():
    transformation = tx()
    state = tx(False).init(SMALL)
    _, state = transformation.update(SMALL, state, SMALL)
    assert set(measured(state)) == {"a", "b"}
    _, state = tx(False).update(SMALL, state, SMALL)
    assert state.gradients is None


@pytest.mark.parametrize("monitor", [None, 1, "encoder", ["a"]])
def test_what_is_no_grouping(monitor):
    with pytest.raises(TypeError, match=r"monitor is True \(one group per part of the model\) or a function"):
        tx(monitor)


# The logger.


class Device:
    """An array that is there when it is told to be; reading it before counts as waiting."""

    def __init__(self, value):
        self.value, self.ready, self.copied, self.waited = value, False, False, False

    shape = ()

    def is_ready(self):
        return self.ready

    def copy_to_host_async(self):
        self.copied = True

    def __array__(self, dtype=None, copy=None):
        self.waited |= not self.ready
        return np.asarray(self.value, dtype)


@pytest.fixture
def slow(monkeypatch):
    """Makes every array that a logger takes a slow one; gives the list of them, step by step."""
    steps = []

    def metrics(state):
        steps.append({"loss_scale": Device(state)})
        return steps[-1]

    monkeypatch.setattr("jmp_policy._src.loss_scaling.metrics.metrics", metrics)
    monkeypatch.setattr("jmp_policy._src.loss_scaling.metrics.jnp.copy", lambda x: x)
    monkeypatch.setattr("jmp_policy._src.loss_scaling.metrics.jax.device_get", lambda tree: tree)
    return steps


def finish(arrays):
    for array in arrays.values():
        array.ready = True


def test_metrics_outlive_a_state_that_is_donated():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(), monitor=True)
    params = {"w": jnp.ones(4)}
    state = tx.init(params)
    found = jmpp.metrics(state)
    jax.jit(tx.update, donate_argnums=1)({"w": jnp.full(4, 65536.0)}, state, params)
    assert float(found["loss_scale"]) == 65536.0
    assert not any(value.is_deleted() for value in found.values())
    shapes = jmpp.metrics(jax.eval_shape(tx.init, params))
    assert shapes["loss_scale"] == jax.ShapeDtypeStruct((), jnp.float32)


def test_logger_never_waits_and_keeps_the_order(slow):
    written = []
    log = MetricsLogger(lambda step, scalars: written.append((step, scalars)))
    for step in range(3):
        log(step, 10.0 * step)
    assert written == []
    assert all(array.copied for step in slow for array in step.values())
    # The second is there first: it has to wait for its turn.
    finish(slow[1])
    log(3, 30.0)
    assert written == []
    finish(slow[0])
    log(4, 40.0)
    assert written == [(0, {"loss_scale": 0.0}), (1, {"loss_scale": 10.0})]
    assert not any(array.waited for step in slow for array in step.values())
    log.flush()
    assert [step for step, _ in written] == [0, 1, 2, 3, 4]
    assert [array.waited for step in slow for array in step.values()] == [False, False, True, True, True]
    log.flush()
    assert len(written) == 5


def test_a_step_is_written_when_all_of_it_is_there(slow):
    written = []
    log = MetricsLogger(lambda *args: written.append(args), every=10)
    loss = Device(0.5)
    log(0, 1.0, loss=loss)
    finish(slow[0])
    log(1, 1.0)
    assert written == []
    loss.ready = True
    # Steps that are not taken still write what is there.
    log(2, 1.0)
    assert written == [(0, {"loss_scale": 1.0, "loss": 0.5})]
    assert len(slow) == 1


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (10, [0])])
def test_every(every, steps):
    written = {}
    log = MetricsLogger(written.__setitem__, every=every)
    state = tx(False).init(SMALL)
    for step in range(7):
        log(step, state)
    log.flush()
    assert list(written) == steps


def test_prefix_names_and_numbers():
    written = {}
    log = MetricsLogger(written.__setitem__, prefix="train/")
    state = update(tx(), jax.tree.map(jnp.ones_like, SMALL), SMALL)
    log(np.int64(7), state, loss=jnp.float32(0.25), lr=0.5, epoch=3, half=jnp.float16(2.0))
    log.flush()
    ((step, scalars),) = written.items()
    assert type(step) is int
    assert {type(v) for v in scalars.values()} == {float}
    assert scalars["train/grad_max/a"] == 1.0
    assert scalars["train/loss_scale"] == 8.0
    assert scalars["train/grads_finite"] == 1.0
    extra = {k: scalars[f"train/{k}"] for k in ("loss", "lr", "epoch", "half")}
    assert extra == {"loss": 0.25, "lr": 0.5, "epoch": 3.0, "half": 2.0}
    assert set(scalars) == {f"train/{k}" for k in (*jmpp.metrics(state), *extra)}


def test_the_state_may_be_donated_afterwards():
    transformation = tx()
    step = jax.jit(step_of(transformation), donate_argnums=(0, 1))
    written = {}
    log = MetricsLogger(written.__setitem__)
    # Arrays of their own: the step takes them over.
    params = jax.tree.map(jnp.array, SMALL)
    state = jax.tree.map(jnp.array, transformation.init(params))
    losses = []
    for i in range(5):
        params, state, loss = step(params, state, X)
        log(i, state, loss=loss)
        losses.append(loss)
    log.flush()
    assert list(written) == list(range(5))
    assert [row["steps"] for row in written.values()] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in written.values()] == [float(x) for x in losses]
    assert written[0]["grad_max/b"] == 2 * (16 + 3)


def test_what_the_writer_raises_is_not_hidden():
    def write(step, scalars):
        raise OSError("disk full")

    log = MetricsLogger(write)
    with pytest.raises(OSError, match="disk full"):  # noqa: PT012 - whichever comes first
        log(0, tx(False).init(SMALL))
        log.flush()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MetricsLogger(None), TypeError, r"needs a function write\(step, scalars\), got None"),
        (lambda: MetricsLogger("x"), TypeError, "got 'x'"),
        (lambda: MetricsLogger(print, every=0), ValueError, "every must be between 1 and .*got 0"),
        (lambda: MetricsLogger(print, every=-5), ValueError, "every must be between 1 and .*got -5"),
        (lambda: MetricsLogger(print, every=2.5), ValueError, "every must be a whole number, got 2.5"),
        (lambda: MetricsLogger(print, every=True), ValueError, "every must be a whole number, got True"),
        (lambda: MetricsLogger(print)(0, optax.EmptyState()), ValueError, "There is no loss scale"),
        (
            lambda: MetricsLogger(print)(0, tx().init(PARAMS), loss=jnp.ones(2)),
            ValueError,
            r"writes scalars, and 'loss' has shape \(2,\)",
        ),
        (
            lambda: jax.jit(lambda state: MetricsLogger(print)(0, state))(tx().init(PARAMS)),
            TypeError,
            "runs on the host; 'loss_scale' is traced",
        ),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("scale", [jmpp.DynamicLossScale(), {"a": jmpp.DynamicLossScale()}])
def test_tree_map_params_passes_by_the_magnitudes(scale):
    params = {"w": jnp.ones(2), "b": jnp.ones(2)}
    tx = jmpp.loss_scaled(optax.adam(1e-3), scale, monitor=True)
    state = tx.init(params)
    doubled = optax.tree_map_params(tx, lambda x: x + 2, state)
    np.testing.assert_array_equal(doubled.inner_state[0].mu["w"], jnp.full(2, 2.0))
    assert jax.tree.structure(doubled) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, doubled.gradients, state.gradients)


def test_no_parameters_have_no_magnitudes():
    tx = jmpp.loss_scaled(optax.adam(1e-3), jmpp.DynamicLossScale(), monitor=True)
    state = jax.lax.scan(lambda s, _: (tx.update({}, s, {})[1], None), tx.init({}), None, 2)[0]
    assert not [name for name in jax.jit(jmpp.metrics)(state) if name.startswith("grad_")]
