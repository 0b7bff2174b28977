"""A loss scale for each of several losses, a scale for each of several optimizers, gradients of gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.loss_scaling.gradients import Decision

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.float32(3.0)}
SCALES = {"reconstruction": jmpp.StaticLossScale(8.0), "adversarial": jmpp.DynamicLossScale(4.0)}
BAD = {"inf": jnp.inf, "nan": jnp.nan}


def adversarial(params, x=1.0):
    return jnp.sum(params["w"]) * x + 0 * params["b"]


def reconstruction(params, x=1.0):
    return params["b"] ** 2 * x + 0 * jnp.sum(params["w"])


LOSSES = {"adversarial": adversarial, "reconstruction": reconstruction}


def scaled_grads(state, params, **factors):
    """Gradients by loss, each loss times its factor."""
    return {
        name: jmpp.scaled_value_and_grad(fun, loss=name)(state, params, factors.get(name, 1.0))[1]
        for name, fun in LOSSES.items()
    }


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def scale_of(state, name):
    return float(jmpp.optim.get_loss_scale_state(state).loss_scale[name].loss_scale)


# Arithmetic.


def test_each_loss_is_scaled_and_unscaled_by_its_own_scale():
    tx = jmpp.loss_scaled(optax.stateless(lambda u, p: u), SCALES)
    state = tx.init(PARAMS)
    grads = scaled_grads(state, PARAMS)
    assert grads["adversarial"]["w"].tolist() == [4.0, 4.0]
    assert float(grads["reconstruction"]["b"]) == 8 * 6.0
    updates, _ = tx.update(grads, state, PARAMS)
    assert updates["w"].tolist() == [1.0, 1.0]
    assert float(updates["b"]) == 6.0


def test_the_sum_is_that_of_a_single_loss():
    """With powers of two there is nothing to round: bit for bit the step of the sum of both losses."""
    both = lambda p: adversarial(p) + reconstruction(p)  # noqa: E731
    one = jmpp.loss_scaled(optax.adam(0.1), jmpp.StaticLossScale(16.0))
    several = jmpp.loss_scaled(optax.adam(0.1), SCALES)
    p, q, s, t = PARAMS, PARAMS, one.init(PARAMS), several.init(PARAMS)
    for _ in range(3):
        u, s = one.update(jmpp.scaled_value_and_grad(both)(s, p)[1], s, p)
        v, t = several.update(scaled_grads(t, q), t, q)
        p, q = optax.apply_updates(p, u), optax.apply_updates(q, v)
    assert bits(p) == bits(q)
    assert bits(s.inner_state) == bits(t.inner_state)


def test_half_precision_gradients_are_added_in_float32():
    tx = jmpp.loss_scaled(
        optax.stateless(lambda u, p: u), {"a": jmpp.NoOpLossScale(), "b": jmpp.NoOpLossScale()}
    )
    grads = {"a": jnp.float16(2.0**15), "b": jnp.float16(2.0**15)}  # Their sum is no float16 number.
    updates, state = tx.update(grads, tx.init(jnp.float16(0)))
    assert updates.dtype == jnp.float32
    assert float(updates) == 2.0**16
    assert bool(state.grads_finite)


def test_the_sum_goes_in_the_order_of_the_names_given():
    """A dictionary that has been through jit is in alphabetical order, and sums of three depend on theirs."""
    tx = jmpp.loss_scaled(optax.stateless(lambda u, p: u), {n: jmpp.NoOpLossScale() for n in "cab"})
    grads = {"a": jnp.float32(-(2.0**30)), "b": jnp.float32(1.0), "c": jnp.float32(2.0**30)}
    for update in (tx.update, jax.jit(tx.update)):
        assert float(update(grads, tx.init(jnp.float32(0)))[0]) == 1.0


def test_integer_parameters_and_line_searches():
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    tx = jmpp.loss_scaled(optax.stateless(lambda u, p: u), SCALES)
    state, zero = tx.init(params), np.zeros(2, jax.dtypes.float0)
    grads = {name: {"w": jnp.full(2, 8.0), "n": zero} for name in SCALES}
    updates, _ = tx.update(grads, state, params)
    assert updates["w"].tolist() == [3.0, 3.0]
    assert updates["n"].dtype == jax.dtypes.float0
    seen = {}
    inner = optax.GradientTransformationExtraArgs(
        lambda p: (), lambda u, s, p=None, **extra: (seen.update(extra), (u, s))[1]
    )
    tx = jmpp.loss_scaled(inner, SCALES)
    grads = {"adversarial": jnp.float32(4.0), "reconstruction": jnp.float32(16.0)}
    tx.update(grads, tx.init(jnp.float32(0)), grad=grads, value=1.0)
    assert float(seen["grad"]) == 3.0
    assert seen["value"] == 1.0
    assert "overflowed" not in seen


# Skipping.


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_bad_loss_skips_the_step_and_lowers_only_its_own_scale(loss, bad):
    tx = jmpp.loss_scaled(optax.adam(0.1), {name: jmpp.DynamicLossScale(4.0) for name in LOSSES})
    state = tx.init(PARAMS)
    updates, after = tx.update(scaled_grads(state, PARAMS, **{loss: BAD[bad]}), state, PARAMS)
    assert bits(optax.apply_updates(PARAMS, updates)) == bits(PARAMS)
    assert bits(after.inner_state) == bits(state.inner_state)
    other = next(name for name in LOSSES if name != loss)
    assert (scale_of(after, loss), scale_of(after, other)) == (2.0, 4.0)
    assert {name: np.asarray(value).item() for name, value in jmpp.metrics(after).items()} == {
        f"loss_scale/{loss}": 2.0, f"grads_finite/{loss}": False, f"stuck/{loss}": False,
        f"nonfinite_steps/{loss}": 1, f"consecutive_nonfinite/{loss}": 1,
        f"loss_scale/{other}": 4.0, f"grads_finite/{other}": True, f"stuck/{other}": False,
        f"nonfinite_steps/{other}": 0, f"consecutive_nonfinite/{other}": 0,
        "grads_finite": False, "skipped_steps": 1, "consecutive_skips": 1, "steps": 1,
    }  # fmt: skip
    assert not bool(jmpp.grads_finite(after))
    assert (bool(jmpp.grads_finite(after, loss)), bool(jmpp.grads_finite(after, other))) == (False, True)


@dataclasses.dataclass
class Model:
    """What the scale of one loss and its counters do, in plain Python."""

    scale: float = 4.0
    clean: int = 0
    bad: int = 0
    in_a_row: int = 0

    def step(self, finite):
        if finite:
            self.clean += 1
            if self.clean == 3:
                self.scale, self.clean = min(self.scale * 2, 16.0), 0
        else:
            self.scale, self.clean = max(self.scale / 2, 1.0), 0
        self.bad += not finite
        self.in_a_row = 0 if finite else self.in_a_row + 1


@functools.cache
def machine():
    scale = jmpp.DynamicLossScale(4.0, growth_interval=3, min_loss_scale=1.0, max_loss_scale=16.0)
    tx = jmpp.loss_scaled(optax.sgd(1.0), {"x": scale, "y": scale})

    def step(carry, events):
        param, state = carry
        scales = jmpp.optim.get_loss_scale_state(state).loss_scale
        grads = {n: jnp.where(events[n], jnp.inf, scales[n].scale(1.0)) for n in ("x", "y")}
        updates, state = tx.update(grads, state, param)
        param = optax.apply_updates(param, updates)
        return (param, state), (param, jmpp.metrics(state))

    return jax.jit(lambda events: jax.lax.scan(step, (jnp.zeros(()), tx.init(jnp.zeros(()))), events)[1])


LENGTH = 24
EVENT = st.sampled_from([0, 0, 0, 1])  # Clean; not finite.


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.tuples(EVENT, EVENT), min_size=LENGTH, max_size=LENGTH))
def test_every_scale_follows_its_own_loss(events):
    x, y = np.array(events, np.int32).T
    params, seen = jax.device_get(machine()({"x": x, "y": y}))
    models, param, skipped = {"x": Model(), "y": Model()}, 0.0, 0
    for i, event in enumerate(events):
        finite = {}
        for name, kind in zip(("x", "y"), event, strict=True):
            finite[name] = kind != 1
            models[name].step(finite[name])
            got = tuple(
                seen[f"{what}/{name}"][i].item()
                for what in ("loss_scale", "grads_finite", "nonfinite_steps", "consecutive_nonfinite")
            )
            model = models[name]
            assert got == (model.scale, finite[name], model.bad, model.in_a_row)
        taken = all(finite.values())
        param -= 2 * taken
        skipped += not taken
        assert (float(params[i]), int(seen["skipped_steps"][i])) == (param, skipped)


def test_scales_that_look_at_gradients_see_those_of_their_own_loss():
    scales = {
        "small": jmpp.StatisticLossScale(2.0, margin=0),
        "large": jmpp.StatisticLossScale(2.0, margin=0),
    }
    tx = jmpp.loss_scaled(optax.sgd(1.0), scales)
    grads = {"small": jnp.float32(2.0**-4), "large": jnp.float32(2.0**6)}
    _, state = tx.update(grads, tx.init(jnp.float32(0)))
    assert (scale_of(state, "small"), scale_of(state, "large")) == (2.0**20, 2.0**10)  # 2**15 / (grad / 2)


# Where it runs.


def test_donated_jit_compiles_once_and_the_scales_can_be_used_again():
    tx, traces = jmpp.loss_scaled(optax.adam(0.1), SCALES), []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        traces.append(None)
        updates, state = tx.update(scaled_grads(state, params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):
        params = jax.tree.map(jnp.array, PARAMS)
        state = tx.init(params)
        for _ in range(3):
            params, state = step(params, state)
    assert len(traces) == 1
    assert [float(s.loss_scale) for s in SCALES.values()] == [8.0, 4.0]
    assert all(not x.aval.weak_type for x in jax.tree.leaves(state))


CHAINS = {
    "before": lambda tx: optax.chain(optax.scale(1.0), tx),
    "after": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "named": lambda tx: optax.named_chain(("scaled", tx), ("halved", optax.scale(0.5))),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_around(name):
    tx = CHAINS[name](jmpp.loss_scaled(optax.sgd(1.0), SCALES))
    state = tx.init(PARAMS)
    updates, state = jax.jit(tx.update)(scaled_grads(state, PARAMS), state, PARAMS)
    assert updates["w"].tolist() == ([-1.0, -1.0] if name == "before" else [-0.5, -0.5])
    assert int(jmpp.metrics(state)["steps"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "kind"),
    [(None, AxisType.Auto), ("adversarial", AxisType.Explicit), ("adversarial", AxisType.Auto)],
)
def test_sharded_over_eight_devices(bad, kind):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    tx = jmpp.loss_scaled(optax.adam(0.1), SCALES)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("d"))
        params = jax.device_put(jnp.ones(16), sharding)
        state = jax.jit(tx.init)(params)
        grads = {name: np.full(16, 8.0, np.float32) for name in SCALES}
        if bad is not None:
            grads[bad][-1] = np.inf
        updates, after = jax.jit(tx.update)(jax.device_put(grads, sharding), state, params)
    assert bool(jmpp.grads_finite(after)) == (bad is None)
    assert (scale_of(after, "adversarial"), scale_of(after, "reconstruction")) == (2.0 if bad else 4.0, 8.0)
    np.testing.assert_array_equal(after.inner_state[0].mu, np.full(16, 0.0 if bad else 0.3, np.float32))
    assert updates.sharding.is_equivalent_to(sharding, 1)


def test_the_devices_of_a_shard_map_agree_with_one_all_reduce():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    scales = {"x": jmpp.DynamicLossScale(4.0), "y": jmpp.DynamicLossScale(4.0)}
    tx = jmpp.loss_scaled(optax.sgd(1.0), scales, axis_name="d")

    def step(state, grads):
        updates, state = tx.update(grads, state)
        return updates, state

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P("d"), P())))
    state = tx.init(jnp.ones(8))
    grads = {"x": jnp.full(8, 4.0).at[3].set(jnp.nan), "y": jnp.full(8, 4.0)}
    updates, after = mapped(state, grads)
    assert updates.tolist() == [0.0] * 8  # All devices skip.
    assert (scale_of(after, "x"), scale_of(after, "y")) == (2.0, 4.0)
    assert mapped.lower(state, grads).as_text().count("all_reduce") == 1


@pytest.mark.slow
@pytest.mark.parametrize("bad", [None, "a"])
def test_nnx_optimizer(bad):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    scales = {"b": jmpp.DynamicLossScale(4.0), "a": jmpp.DynamicLossScale(8.0)}
    optimizer = nnx.Optimizer(model, jmpp.loss_scaled(optax.sgd(0.5), scales), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        scales = jmpp.optim.get_loss_scale_state(optimizer).loss_scale
        grads = {
            name: jmpp.nnx.scaled_value_and_grad(lambda m, n=name: m(x[n]).sum())(scales[name], model)[1]
            for name in ("a", "b")
        }
        optimizer.update(model, grads)

    before = np.array(model.kernel[...])
    x = {"a": jnp.ones((1, 2)), "b": jnp.full((1, 2), 2.0)}
    if bad:
        x[bad] = x[bad] * jnp.inf
    step(model, optimizer, x)
    np.testing.assert_array_equal(model.kernel[...], before - (0.0 if bad else 1.5))
    metrics = jmpp.metrics(optimizer)
    assert float(metrics["loss_scale/a"]) == (4.0 if bad else 8.0)
    assert float(metrics["loss_scale/b"]) == 4.0
    assert bool(metrics["grads_finite"]) is (bad is None)


@pytest.mark.parametrize("bad", [None, "a"])
def test_nnx_by_name_keeps_batch_statistics_on_a_skipped_step(bad):
    model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    scales = {"b": jmpp.DynamicLossScale(4.0), "a": jmpp.DynamicLossScale(8.0)}
    optimizer = nnx.Optimizer(model, jmpp.loss_scaled(optax.sgd(0.5), scales), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            gradient = functools.partial(jmpp.nnx.scaled_value_and_grad, lambda m, x: (m(x) ** 3).sum())
            grads = {name: gradient(loss=name)(optimizer, model, x[name])[1] for name in ("a", "b")}
            optimizer.update(model, grads)
        return grads

    x = {name: jnp.array([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0]]) for name in scales}
    if bad:
        x[bad] = x[bad] * jnp.inf
    grads = step(model, optimizer, x)
    if not bad:  # The same gradient, by two scales.
        np.testing.assert_array_equal(grads["a"].bias[...], 2 * grads["b"].bias[...])
    assert (np.abs(model.mean[...]).sum() > 0) == (bad is None)
    assert bool(jmpp.grads_finite(optimizer)) is (bad is None)
    with pytest.raises(ValueError, match="each of the losses 'b', 'a'|each of the losses 'a', 'b'"):
        jmpp.nnx.scaled_value_and_grad(lambda m: m(x["b"]).sum())(optimizer, model)


def test_checkpoints_by_flax_and_pytrees():
    tx = jmpp.loss_scaled(optax.adam(0.1), SCALES)
    state = tx.init(PARAMS)
    _, state = tx.update(scaled_grads(state, PARAMS, adversarial=jnp.inf), state, PARAMS)
    restored = serialization.from_bytes(tx.init(PARAMS), serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert ".loss_scale.scales['adversarial'].loss_scale" in names


# What a training loop sees.


def test_names_and_iteration():
    scales = jmpp.loss_scaled(optax.sgd(1.0), SCALES).init(PARAMS).loss_scale
    assert isinstance(scales, jmpp.optim.LossScales)
    assert (list(scales), len(scales), "adversarial" in scales) == (list(SCALES), 2, True)
    with pytest.raises(KeyError, match="'x' is none of the losses: 'reconstruction', 'adversarial'"):
        scales["x"]


def test_monitored_magnitudes_are_by_loss_and_part():
    tx = jmpp.loss_scaled(optax.sgd(1.0), SCALES, monitor=True)
    state = tx.init(PARAMS)
    grads = scaled_grads(state, PARAMS)
    _, after = tx.update(grads, state, PARAMS)
    metrics = jmpp.metrics(after)
    assert float(metrics["grad_max/adversarial/w"]) == 1.0
    assert float(metrics["grad_max/reconstruction/b"]) == 6.0
    assert float(metrics["grad_max/reconstruction/w"]) == 0.0
    assert set(metrics) == set(jmpp.metrics(state))
    # 2**-28 is 2**-26 at a scale of 4 and 2**-25 at 8: gone in float16. At 64 it would be there.
    tiny = {"adversarial": 4 * 2.0**-27, "reconstruction": 8 * 2.0**-27}
    _, after = tx.update({n: {"w": jnp.full(2, v), "b": jnp.float32(v)} for n, v in tiny.items()}, state)
    metrics = jmpp.metrics(after)
    assert float(metrics["grad_underflow/adversarial/w"]) == 1.0
    assert float(metrics["grad_underflow/reconstruction/w"]) == 0.0


def test_the_logger_writes_all_names():
    written = {}
    log = jmpp.MetricsLogger(written.__setitem__)
    log(0, jmpp.loss_scaled(optax.sgd(1.0), SCALES).init(PARAMS))
    log.flush()
    assert written[0]["loss_scale/reconstruction"] == 8.0
    assert written[0]["grads_finite/adversarial"] == 1.0


def run_bad(scales, losses):
    """The state after steps in which the losses named were not finite."""
    tx = jmpp.loss_scaled(optax.sgd(1.0), scales)
    state = tx.init(jnp.float32(0))
    for names in losses:
        grads = {n: jnp.float32(jnp.nan if n in names else 1.0) for n in scales}
        _, state = tx.update(grads, state)
    return state


def test_check_names_the_loss():
    scales = {"x": jmpp.StaticLossScale(8.0), "y": jmpp.DynamicLossScale(4.0, min_loss_scale=2.0)}
    jmpp.check(run_bad(scales, ["y"]))
    state = run_bad(scales, ["y", "y"])
    with pytest.raises(
        jmpp.LossScaleStuckError, match=r"loss scale of 'y' is at its floor \(2\).* 2 times in a row"
    ):
        jmpp.check(state)
    state = run_bad(scales, ["x", "x", "x"])
    jmpp.check(state, max_consecutive_skips=4)
    with pytest.raises(jmpp.LossScaleStuckError, match=r"of 'x' cannot help \(8\).* 3 times in a row"):
        jmpp.check(state, max_consecutive_skips=3)


def test_check_where_losses_take_turns():
    scales = {"x": jmpp.StaticLossScale(8.0), "y": jmpp.StaticLossScale(8.0)}
    turns = ["x", "y", "x", "y", "x"]
    message = r"5 steps skipped in a row.*'x' 3, 'y' 2\."
    with pytest.raises(jmpp.LossScaleStuckError, match=message):
        jmpp.check(run_bad(scales, turns), max_consecutive_skips=3)


def test_check_shows_the_gradients_by_loss_and_where():
    scales = {"x": jmpp.DynamicLossScale(4.0, min_loss_scale=4.0), "y": jmpp.StaticLossScale(8.0)}
    grads = {"x": jnp.float32(jnp.nan), "y": jnp.float32(1.0)}
    with pytest.raises(jmpp.LossScaleStuckError, match=r"\['x'\]: 1 NaN, 0 inf of 1") as error:
        jmpp.check(run_bad(scales, ["x"]), grads, loss_fn=lambda w: jnp.log(w), args=(jnp.float32(-1.0),))
    assert error.value.diagnosis is not None
    assert "log" in str(error.value)


# Errors.


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: jmpp.loss_scaled(optax.sgd(1.0), {}), ValueError, "no loss scale: the mapping .* is empty"),
        (lambda: jmpp.loss_scaled(optax.sgd(1.0), {"a": 8.0}), TypeError, "'a', .*mean StaticLossScale"),
        (lambda: jmpp.loss_scaled(optax.sgd(1.0), {1: SCALES["adversarial"]}), ValueError, "by text.*got 1"),
    ],
)
def test_bad_scales(make, error, message):
    with pytest.raises(error, match=message):
        make()


TREE = {"w": jnp.ones(2), "b": jnp.ones(())}


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        (TREE, TypeError, r"takes gradients by loss: \{'reconstruction': grads, .*got dict of 'w', 'b'"),
        (jnp.ones(2), TypeError, "by loss: .*; got ArrayImpl"),
        ({"adversarial": TREE}, ValueError, "'reconstruction' is missing.*zeros_like"),
        ({"adversarial": TREE, "reconstuction": TREE}, ValueError, "Did you mean 'reconstruction'"),
        (
            {**dict.fromkeys(SCALES, TREE), "other": TREE},
            ValueError,
            "names 'other', which is none of the losses",
        ),
        ({"adversarial": TREE, "reconstruction": {"w": jnp.ones(2)}}, ValueError, "key mismatch.*'b'"),
    ],
)
def test_bad_gradients(grads, error, message):
    tx = jmpp.loss_scaled(optax.sgd(1.0), SCALES)
    with pytest.raises(error, match=message):
        tx.update(grads, tx.init(TREE), TREE)


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        (None, "state", "each of the losses 'reconstruction', 'adversarial'. .* loss='reconstruction'"),
        (None, "scales", "each of the losses 'reconstruction', 'adversarial'"),
        ("adverserial", "state", "Did you mean 'adversarial'"),
        ("adversarial", "one", "here is only one. Leave it out"),
        ("adversarial", "scale", "here is only one. Leave it out"),
        ("adversarial", "none", "no loss scale in this tuple"),
    ],
)
def test_a_name_for_every_one_of_several_scales_and_for_no_other(loss, given, message):
    gradient = jmpp.scaled_value_and_grad(adversarial, loss=loss)
    holders = {
        "state": jmpp.loss_scaled(optax.sgd(1.0), SCALES).init(PARAMS),
        "scales": SCALES,
        "one": jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale()).init(PARAMS),
        "scale": jmpp.DynamicLossScale(),
        "none": optax.sgd(1.0).init(PARAMS),
    }
    with pytest.raises(ValueError, match=message):
        gradient(holders[given], PARAMS)


def test_unknown_names_elsewhere():
    tx = jmpp.loss_scaled(optax.sgd(1.0), SCALES)
    state = tx.init(TREE)
    with pytest.raises(ValueError, match="names 'x', which is none"):
        jmpp.grads_finite(state, "x")


# One scale is what it was.


def test_one_scale_adds_nothing():
    """The program of one loss scale has not one operation more than with the steps written out."""
    tx = jmpp.loss_scaled(optax.sgd(0.5), jmpp.DynamicLossScale())
    state = tx.init(PARAMS)
    text = str(jax.make_jaxpr(tx.update)(PARAMS, state, PARAMS))
    assert type(state.loss_scale) is jmpp.DynamicLossScale

    def written_out(grads, state, params):
        grads = state.loss_scale.unscale(grads)
        finite = jmpp.all_finite(grads)
        updates, inner = optax.sgd(0.5).update(grads, state.inner_state, params)
        for_small = Decision(finite).for_small
        skipped = ~for_small
        updates = jax.tree.map(lambda u: jax.lax.select(for_small, u, jax.lax.full_like(u, -0.0)), updates)
        scale = state.loss_scale.adjust(for_small)

        def count(n, otherwise):
            return jnp.where(skipped, optax.safe_increment(n), otherwise)

        return updates, state._replace(
            inner_state=inner,
            loss_scale=scale,
            grads_finite=finite,
            skipped=count(state.skipped, state.skipped),
            consecutive_skips=count(state.consecutive_skips, jnp.int32(0)),
            steps=optax.safe_increment(state.steps),
        )

    assert text == str(jax.make_jaxpr(written_out)(PARAMS, state, PARAMS))


def test_one_name_is_one_scale():
    """Several scales of which there is one: the same numbers, step after step."""
    one = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale(4.0, growth_interval=2))
    named = jmpp.loss_scaled(optax.adam(0.1), {"x": jmpp.DynamicLossScale(4.0, growth_interval=2)})
    s, t = one.init(PARAMS), named.init(PARAMS)
    for factor in (1.0, jnp.inf, 1.0, 1.0, jnp.nan, 1.0):
        grads = jax.tree.map(lambda p, f=factor: p * f, PARAMS)
        u, s = one.update(grads, s, PARAMS)
        v, t = named.update({"x": grads}, t, PARAMS)
        assert bits((u, s._replace(loss_scale=None))) == bits((v, t._replace(loss_scale=None)))
        assert bits(s.loss_scale) == bits(t.loss_scale["x"])


# A scale for each optimizer.


def test_two_optimizers_with_a_scale_each():
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale(4.0))
    states = {"generator": tx.init(PARAMS), "discriminator": tx.init(PARAMS)}
    _, states["generator"] = tx.update(jax.tree.map(lambda p: p * jnp.nan, PARAMS), states["generator"])
    assert float(jmpp.metrics(states["generator"])["loss_scale"]) == 2.0
    assert float(jmpp.metrics(states["discriminator"])["loss_scale"]) == 4.0
    with pytest.raises(ValueError, match=r"2 loss scales .* at \['discriminator'\], \['generator'\]"):
        jmpp.optim.get_loss_scale_state(states)


# Gradients of gradients.

SCALE_KINDS = {
    "none": jmpp.NoOpLossScale(),
    "static": jmpp.StaticLossScale(2.0**10),
    "dynamic": jmpp.DynamicLossScale(2.0**10),
    "statistic": jmpp.StatisticLossScale(2.0**10),
    "pid": jmpp.PIDLossScale(2.0**10),
}


def cubic(w):
    return jnp.sum(w**3) + w[0] * w[1] ** 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_hessians_through_scaled_gradients(kind):
    """Small whole numbers and powers of two: exact in every mode of differentiation."""
    scale, w, v = SCALE_KINDS[kind], jnp.array([1.0, 2.0]), jnp.array([1.0, -1.0])

    def gradient(w):
        return scale.unscale(jmpp.scaled_value_and_grad(cubic)(scale, w)[1])

    want = jnp.array([[6.0, 4.0], [4.0, 14.0]])
    np.testing.assert_array_equal(jax.jvp(gradient, (w,), (v,))[1], want @ v)  # forward over reverse
    np.testing.assert_array_equal(jax.vjp(gradient, w)[1](v)[0], want @ v)  # reverse over reverse
    np.testing.assert_array_equal(jax.jit(jax.jacfwd(gradient))(w), want)
    value, tangent = jax.jvp(lambda w: jmpp.scaled_value_and_grad(cubic)(scale, w)[0], (w,), (v,))
    assert (float(value), float(tangent)) == (13.0, float(jax.grad(cubic)(w) @ v))


@pytest.mark.parametrize("kind", SCALE_KINDS)
def test_gradients_through_unscale(kind):
    scale, factor = SCALE_KINDS[kind], 1.0 if kind == "none" else 2.0**10
    grads = {"h": jnp.array([2.0, 4.0], jnp.float16), "n": jnp.arange(2)}
    through = jax.grad(lambda h: jnp.sum(scale.unscale({**grads, "h": h})["h"] ** 2))(grads["h"])
    assert through.dtype == jnp.float16
    np.testing.assert_array_equal(through, 2 * np.array([2.0, 4.0]) / factor**2)


def critic(params, x):
    """Two layers in float16, whose slope is below what float16 can hold."""
    h = jnp.tanh(x.astype(jnp.float16) @ params["w"].astype(jnp.float16))
    return (h @ params["v"].astype(jnp.float16)).astype(jnp.float32)


def penalty(params, x, inner, unit=2.0**22):
    """How far the critic's slope is from 1 / unit, as a WGAN-GP has it. `inner` scales the slope."""

    def slope(x):
        _, grad = jmpp.scaled_value_and_grad(lambda x: critic(params, x))(inner, x)
        return inner.unscale(grad)

    return distance(jax.vmap(slope)(x), unit)


def distance(slopes, unit=2.0**22):
    return jnp.mean((jnp.sqrt(jnp.sum((slopes * unit) ** 2, axis=-1)) - 1) ** 2)


def penalty_parts():
    rng = np.random.default_rng(0)
    params = {"w": 2.0**-12 * rng.normal(size=(4, 8)), "v": 2.0**-12 * rng.normal(size=8)}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    return params, jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)


def float32_penalty(params, x):
    return distance(jax.vmap(jax.grad(lambda x: jnp.tanh(x @ params["w"]) @ params["v"]))(x))


penalty_gradient = jax.jit(jmpp.scaled_value_and_grad(penalty))


@pytest.mark.slow
@pytest.mark.parametrize(("inner_scale", "close"), [(2.0**15, True), (1.0, False)])
def test_a_gradient_penalty_needs_a_scale_of_its_own(inner_scale, close):
    params, x = penalty_parts()
    want, want_grads = jax.jit(jax.value_and_grad(float32_penalty))(params, x)
    outer = jmpp.StaticLossScale(2.0**4)
    value, grads = penalty_gradient(outer, params, x, jmpp.StaticLossScale(inner_scale))
    for got, right in (
        (value, want),
        *zip(*map(jax.tree.leaves, (outer.unscale(grads), want_grads)), strict=True),
    ):
        # Ten roundings in a row, forward and backward twice.
        assert (float(jnp.linalg.norm(got - right) / jnp.linalg.norm(right)) < 10 * 2.0**-11) is close


@pytest.mark.parametrize(("inner_scale", "fits"), [(2.0**15, True), (2.0**16, False), (2.0**60, False)])
def test_where_the_inner_gradient_overflows_the_step_is_skipped(inner_scale, fits):
    params, x = penalty_parts()
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale(2.0**4))
    state = tx.init(params)
    _, grads = penalty_gradient(state.loss_scale, params, x, jmpp.StaticLossScale(inner_scale))
    updates, state = tx.update(grads, state, params)
    assert bool(jmpp.grads_finite(state)) is fits
    assert (bits(optax.apply_updates(params, updates)) == bits(params)) is not fits


def test_the_scale_of_the_state_may_serve_the_inner_gradient_too():
    """Where slopes are near 1. It overflows inside, steps are skipped, and the scale falls until both fit."""
    params, x = penalty_parts()
    params = jax.tree.map(lambda p: p * 2.0**12, params)
    tx = jmpp.loss_scaled(optax.sgd(0.0), {"penalty": jmpp.DynamicLossScale(2.0**20, backoff_factor=2.0**-3)})

    @jax.jit
    def step(state):
        inner = jmpp.optim.get_loss_scale_state(state).loss_scale["penalty"]
        _, grads = jmpp.scaled_value_and_grad(penalty, loss="penalty")(state, params, x, inner, 1.0)
        return tx.update({"penalty": grads}, state, params)[1]

    state, finite = tx.init(params), []
    for _ in range(6):
        state = step(state)
        finite.append(bool(jmpp.grads_finite(state)))
    assert not finite[0]
    assert finite[-1]
    assert finite == sorted(finite)
