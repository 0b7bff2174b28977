"""A training state saved and restored: every way, on other devices, after a kill, from older checkpoints."""

import collections
import dataclasses
import functools
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import restart_runs as runs
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from helpers import paired
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

PARAMS = {"w": jnp.full((8, 4), 0.5, jnp.float32), "b": jnp.arange(4.0)}
GRADS = {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}
ADAMW = optax.adamw(0.1)
SCALED = jmpp.loss_scaled(ADAMW, jmpp.DynamicLossScale(2.0**8))
MONITORED = jmpp.loss_scaled(ADAMW, jmpp.DynamicLossScale(2.0**8), monitor=True)


def assert_same(one, other):
    """Structure, types, weakness and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert runs.fingerprint(one) == runs.fingerprint(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert getattr(a, "weak_type", False) == getattr(b, "weak_type", False)


@functools.cache
def moved(tx):
    """A state that is nowhere at its initial values: after two steps and a skipped one."""
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for grads in (GRADS, GRADS, jax.tree.map(lambda g: g * jnp.inf, GRADS)):
        state = update(grads, state, PARAMS)[1]
    return state


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _orbax(checkpointer, target):
    def keep(path, state, template):
        with checkpointer() as c:
            c.save(path, state)
            if hasattr(c, "wait_until_finished"):
                c.wait_until_finished()
            if checkpointer is ocp.PyTreeCheckpointer:
                return c.restore(path, item=template) if target else c.restore(path)
            return c.restore(path, abstract(template)) if target else c.restore(path)

    return keep


def _manager(path, state, template):
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=True)
    with ocp.CheckpointManager(path, options=options) as manager:
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        jmpp.optim.check_restored(manager.item_metadata(3), template)
        return manager.restore(3, args=ocp.args.StandardRestore())


def _on_host(path, state, template):
    """Read as NumPy arrays: how a process with fewer devices reads without naming a target."""
    with ocp.PyTreeCheckpointer() as c:
        c.save(path, state)
        tree = c.metadata(path).item_metadata.tree
        return c.restore(
            path, restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        )


KEEPERS = {
    "orbax": _orbax(ocp.StandardCheckpointer, target=False),
    "orbax target": _orbax(ocp.StandardCheckpointer, target=True),
    "orbax pytree": _orbax(ocp.PyTreeCheckpointer, target=False),
    "orbax pytree target": _orbax(ocp.PyTreeCheckpointer, target=True),
    "orbax async manager": _manager,
    "orbax to host": _on_host,
    "flax bytes": lambda _, s, t: flax.serialization.from_bytes(t, flax.serialization.to_bytes(s)),
    "flax msgpack": lambda _, s, t: flax.serialization.msgpack_restore(flax.serialization.to_bytes(s)),
    "flax state dict": lambda _, s, t: flax.serialization.to_state_dict(s),
    "flax from state dict": lambda _, s, t: flax.serialization.from_state_dict(
        t, flax.serialization.to_state_dict(s)
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring")
@pytest.mark.parametrize(("scale", "keeper"), paired(runs.SCALES, KEEPERS))
def test_training_goes_on_bit_for_bit(scale, keeper, tmp_path):
    undisturbed = runs.run(runs.init(scale), 6, scale)
    first = runs.run(runs.init(scale), 3, scale)
    saved = KEEPERS[keeper](tmp_path / "at", first, runs.init(scale))
    restored = jmpp.restore_state(runs.init(scale), saved)
    assert_same(restored, first)
    assert_same(runs.run(restored, 3, scale), undisturbed)
    types = [jax.typeof(x) for x in jax.tree.leaves(first)]  # The same ones compile nothing anew.
    assert [jax.typeof(x) for x in jax.tree.leaves(restored)] == types
    skipped = int(undisturbed["opt_state"].skipped)
    assert skipped == 2
    assert int(undisturbed["batch_stats"]["count"]) == 6 - skipped


@pytest.mark.once
def test_survives_sigkill_at_any_time(tmp_path):
    started, survived, undisturbed = runs.survive(tmp_path, steps=12, kills=2)
    assert survived == undisturbed
    assert started == sorted(set(started))
    assert started[0] == 0


def mesh(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("d",), devices=jax.devices()[:count], axis_types=(kind,))


def sharded(tree, on):
    """What every leaf's sharding is under FSDP: by the first axis where it divides, else replicated."""

    def place(x):
        split = x.ndim and x.shape[0] % on.size == 0
        return NamedSharding(on, P("d") if split else P())

    return jax.tree.map(place, tree)


MOVES = {
    "target": [(8, 2), (2, 1), (1, 8)],
    "to host": [(8, 2)],
    "uncommitted scalars": [(8, 2), (1, 8)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "way"), [(*move, way) for way, moves in MOVES.items() for move in moves]
)
def test_into_another_sharding_and_device_count(before, after, way, tmp_path):
    state = runs.run(jax.device_put(runs.init(), sharded(runs.init(), mesh(before))), 2)
    assert len(state["opt_state"].inner_state[0].mu["body"]["kernel"].sharding.device_set) == before
    fresh = runs.init()
    target = sharded(fresh, mesh(after))
    if way == "uncommitted scalars":  # As tx.init leaves them, outside of jax.jit.
        template = jax.tree.map(lambda x, s: jax.device_put(x, s) if x.ndim else x, fresh, target)
    else:
        template = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), fresh, target
        )
    keeper = KEEPERS["orbax to host" if way == "to host" else "orbax target"]
    restored = jmpp.restore_state(template, keeper(tmp_path / "at", state, template))
    assert_same(restored, state)
    for leaf, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert leaf.sharding == wanted.sharding
        assert leaf.committed == getattr(wanted, "committed", True)
    # On another number of devices sums have another order: the same state moved there is the reference.
    there = jax.tree.map(
        lambda x, t: jax.device_put(np.asarray(x), t.sharding if getattr(t, "committed", True) else None),
        state,
        template,
    )
    assert_same(runs.run(restored, 2), runs.run(there, 2))


@pytest.mark.slow
@pytest.mark.parametrize("host", [True, False])
def test_into_an_explicit_mesh(host):
    on = mesh(8, AxisType.Explicit)
    params = jax.tree.map(lambda p: jax.device_put(p, NamedSharding(on, P())), PARAMS)
    params["w"] = jax.device_put(PARAMS["w"], NamedSharding(on, P("d")))
    with jax.set_mesh(on):
        saved = moved(SCALED)
        saved = jax.tree.map(np.asarray, saved) if host else saved
        for template in (jax.eval_shape(SCALED.init, params), SCALED.init(params)):
            restored = jmpp.restore_state(template, saved)
            assert_same(restored, saved)
            assert restored.inner_state[0].mu["w"].sharding.is_equivalent_to(NamedSharding(on, P("d")), 2)


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))


def nnx_training(tx):
    model = jmpp.wrap(Model(), "mixed_float16")
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def nnx_step(model, optimizer, x):
    def loss_fn(model):
        return jnp.mean((model(x).astype(jnp.float32) - 1.0) ** 2)

    _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model)
    optimizer.update(model, grads)


def nnx_run(training, steps):
    for step in steps:
        nnx_step(*training, jnp.nan_to_num(runs.batch_of(step), posinf=60000.0))
    return training


NNX_KEEPERS = {
    "orbax": lambda path, state: KEEPERS["orbax"](path, state, None),
    "orbax target": lambda path, state: KEEPERS["orbax target"](path, state, state),
    "orbax of a pure dict": lambda path, state: KEEPERS["orbax"](path, nnx.to_pure_dict(state), None),
    "pure dict": lambda path, state: nnx.to_pure_dict(state),
    "flax": lambda path, state: flax.serialization.msgpack_restore(
        flax.serialization.msgpack_serialize(
            jax.tree.map(np.asarray, flax.serialization.to_state_dict(text_keys(nnx.to_pure_dict(state))))
        )
    ),
}


def text_keys(tree):
    return {str(k): text_keys(v) for k, v in tree.items()} if isinstance(tree, dict) else tree


@functools.cache
def nnx_states():
    """States of an undisturbed run, after two and four steps."""
    training = nnx_run(nnx_training(SCALED), range(2))
    first = jax.tree.map(jnp.copy, nnx.state(training))
    return first, nnx.state(nnx_run(training, range(2, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("keeper", NNX_KEEPERS)
def test_nnx_goes_on_bit_for_bit(keeper, tmp_path):
    first, undisturbed = nnx_states()
    saved = NNX_KEEPERS[keeper](tmp_path / "at", first)
    fresh = nnx_training(SCALED)
    nnx.update(fresh, jmpp.restore_state(nnx.state(fresh), saved))
    assert_same(nnx.state(fresh), first)
    assert_same(nnx.state(nnx_run(fresh, range(2, 4))), undisturbed)
    assert int(fresh[1].opt_state.steps[...]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("raw", [True, False])
def test_nnx_from_a_float32_optimizer(raw, tmp_path):
    training = nnx_training(ADAMW)
    nnx_step_plain = nnx.jit(lambda m, o, x: o.update(m, nnx.grad(lambda m: jnp.mean(m(x) ** 2))(m)))
    nnx_step_plain(*training, runs.batch_of(0))
    saved = nnx.state(training)
    if raw:
        saved = KEEPERS["orbax"](tmp_path / "at", saved, None)
    fresh = nnx_training(SCALED)
    initial = nnx.state(fresh[1])["opt_state"]["loss_scale"]
    nnx.update(fresh, jmpp.restore_state(nnx.state(fresh), saved))
    new, old = nnx.state(fresh), nnx.state(training)
    assert_same(new[0], old[0])
    assert_same(new[1]["opt_state"]["inner_state"], old[1]["opt_state"])
    assert_same(new[1]["opt_state"]["loss_scale"], initial)
    nnx_run(fresh, range(1))


# Optimizers around, inside and beside loss_scaled.
def _scaled(inner):
    return jmpp.loss_scaled(inner, jmpp.DynamicLossScale(2.0**8))


INSIDE = {
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 9)
    ),
    "stateless": lambda: optax.sgd(0.1),
    "keys": lambda: optax.add_noise(0.1, 0.5, jax.random.key(0)),
}
OPTIMIZERS = {
    **{f"{name} inside": lambda make=make: _scaled(make()) for name, make in INSIDE.items()},
    "monitor": lambda: MONITORED,
    "in chain": lambda: optax.chain(optax.identity(), _scaled(optax.adam(0.1))),
    "in masked": lambda: optax.masked(_scaled(optax.adam(0.1)), {"w": True, "b": False}),
    "in multi_transform": lambda: optax.multi_transform(
        {"a": _scaled(optax.adam(0.1)), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}
    ),
    "in multi_steps": lambda: optax.MultiSteps(_scaled(optax.adam(0.1)), 2),
    "in inject_hyperparams": lambda: optax.inject_hyperparams(lambda lr: _scaled(optax.adam(lr)))(lr=0.1),
}


@pytest.mark.once
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_nesting_of_optimizers(name, tmp_path):
    tx = OPTIMIZERS[name]()
    state, fresh = moved(tx), tx.init(PARAMS)
    # Only Orbax keeps typed PRNG keys.
    for keeper in ["orbax"] if name == "keys inside" else ["orbax", "flax msgpack", "orbax to host"]:
        saved = KEEPERS[keeper](tmp_path / keeper, {"o": state}, None)["o"]
        for template in (fresh, jax.eval_shape(tx.init, PARAMS)):
            restored = jmpp.restore_state(template, saved)
            assert jax.tree.structure(restored) == jax.tree.structure(fresh)
            assert comparable(restored) == comparable(state)


def comparable(tree):
    """Types and bits, also of typed keys."""

    def bits(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [(str(x.dtype), np.asarray(bits(x)).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "raw"), paired([n for n in INSIDE if n != "keys"], [True, False]))
def test_the_plain_optimizers_state_goes_inside(name, raw, tmp_path):
    inner = INSIDE[name]()
    saved = state = inner.update(GRADS, inner.init(PARAMS), PARAMS)[1]
    if raw:
        saved = KEEPERS["orbax"](tmp_path / "at", {"o": state, "any": jnp.ones(1)}, None)["o"]
    tx = _scaled(INSIDE[name]())
    restored = jmpp.restore_state(tx.init(PARAMS), saved)
    assert_same(restored.inner_state, jax.tree.map(jnp.asarray, state))
    assert_same(restored._replace(inner_state=None), tx.init(PARAMS)._replace(inner_state=None))


@pytest.mark.slow
@pytest.mark.parametrize("outer", [lambda tx: tx, _scaled], ids=["alone", "in loss_scaled"])
@pytest.mark.parametrize("raw", [True, False])
def test_half_parameters_go_on_with_masters(raw, outer, tmp_path):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    plain = optax.sgd(0.1, momentum=0.9, accumulator_dtype="float32")
    saved = state = plain.update(GRADS, plain.init(half), half)[1]
    if raw:
        saved = KEEPERS["orbax"](tmp_path / "at", {"o": state, "any": jnp.ones(1)}, None)["o"]
    tx = outer(jmpp.master_weights(plain))
    # The template's masters are those of other parameters.
    restored = jmpp.restore_state(tx.init(jax.tree.map(jnp.ones_like, half)), saved)
    masters = restored.inner_state if isinstance(restored, jmpp.optim.LossScaledState) else restored
    assert_same(masters.inner_state, state)
    updates, _ = tx.update(GRADS, restored, half)
    want, _ = tx.update(GRADS, jmpp.restore_state(tx.init(half), saved), half)
    assert_same(updates, want)
    with pytest.raises(ValueError, match="masters/.* was not saved, and the template has only its shape"):
        jmpp.restore_state(jax.eval_shape(tx.init, half), saved)


def test_a_state_with_masters_does_not_fit_an_optimizer_without():
    with pytest.raises(ValueError, match=r"(?s)one of master_weights, the template's is not.*\.inner_state"):
        jmpp.restore_state(ADAMW.init(PARAMS), jmpp.master_weights(ADAMW).init(PARAMS))


def test_from_a_loss_scale_to_none_and_back():
    """As of a run that goes on in bfloat16, and returns to float16."""
    saved, without = moved(SCALED), jmpp.loss_scaled(ADAMW, jmpp.NoOpLossScale())
    for form in (saved, flax.serialization.to_state_dict(saved)):
        restored = jmpp.restore_state(without.init(PARAMS), form)
        assert isinstance(restored.loss_scale, jmpp.NoOpLossScale)
        assert_same(restored.inner_state, saved.inner_state)
        assert restored.steps == saved.steps
    back = jmpp.restore_state(SCALED.init(PARAMS), restored)
    assert_same(back.loss_scale, SCALED.init(PARAMS).loss_scale)
    assert_same(back.inner_state, saved.inner_state)


def test_a_missing_state_is_not_blamed_on_the_loss_scale():
    saved = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()).init(PARAMS)
    with pytest.raises(ValueError, match="missing") as e:
        jmpp.restore_state(jmpp.loss_scaled(ADAMW, jmpp.NoOpLossScale()).init(PARAMS), saved)
    assert "another kind of loss scale" not in str(e.value)


def test_from_one_loss_scale_to_several():
    tx = jmpp.loss_scaled(ADAMW, {"a": jmpp.DynamicLossScale(), "b": jmpp.DynamicLossScale(4.0)})
    saved = flax.serialization.to_state_dict(moved(SCALED))
    with pytest.raises(ValueError, match=r"where there are several now\? To start with"):
        jmpp.restore_state(tx.init(PARAMS), saved)
    without = moved(SCALED)._replace(loss_scale=None)  # As the message says.
    assert_same(jmpp.restore_state(tx.init(PARAMS), without).loss_scale, tx.init(PARAMS).loss_scale)
    inner = saved.pop("loss_scale") and saved["inner_state"]
    restored = jmpp.restore_state(tx.init(PARAMS), saved)
    assert_same(restored.loss_scale, tx.init(PARAMS).loss_scale)
    assert_same(flax.serialization.to_state_dict(restored.inner_state), inner)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keeper", "plain"), [("orbax", False), ("flax bytes", True), ("flax msgpack", False)]
)
def test_train_state(plain, keeper, tmp_path):
    def create(tx):
        return TrainState.create(
            apply_fn=Net().apply, params={"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, tx=tx
        )

    apply = jax.jit(lambda state: state.apply_gradients(grads=GRADS))
    tx = ADAMW if plain else SCALED
    before = apply(create(tx))
    saved = KEEPERS[keeper](tmp_path / "at", before, create(tx))
    template = create(SCALED)
    restored = jmpp.restore_state(template, saved)
    assert jax.tree.structure(restored) == jax.tree.structure(template)
    assert restored.step == 1
    assert type(restored.step) is int  # As TrainState.create has it.
    assert_same(restored.params, before.params)
    inner = before.opt_state if plain else before.opt_state.inner_state
    assert_same(restored.opt_state.inner_state, inner)
    apply(restored)


# Checkpoints of the past.
OldState = collections.namedtuple(
    "OldState", [f for f in jmpp.optim.LossScaledState._fields if f != "gradients"]
)


def as_old(state):
    return OldState(*state[:-1])


def at(tree, path):
    return functools.reduce(lambda inner, name: inner[name], path, tree)


def put(*path, value):
    def change(tree):
        at(tree, path[:-1])[path[-1]] = value
        return tree

    return change


def drop(*path):
    def change(tree):
        del at(tree, path[:-1])[path[-1]]
        return tree

    return change


SCALE_FIELDS = ("loss_scale", "growth_tracker", "hysteresis_tracker", "stuck")
OUR_FIELDS = [("loss_scale",), ("consecutive_skips",), ("steps",), *(("loss_scale", f) for f in SCALE_FIELDS)]


@pytest.mark.slow
@pytest.mark.parametrize("tx", [SCALED, MONITORED], ids=["", "monitor"])
def test_a_state_from_before_a_field_existed(tx, tmp_path):
    state, fresh = moved(tx), tx.init(PARAMS)
    raw = KEEPERS["orbax"](tmp_path / "at", as_old(state), None)
    assert "gradients" not in raw
    for saved in (raw, as_old(state)):
        restored = jmpp.restore_state(fresh, saved)
        assert_same(restored, state._replace(gradients=fresh.gradients))


@pytest.mark.parametrize("path", [*OUR_FIELDS, ("skipped",), ("grads_finite",)], ids="/".join)
def test_every_field_of_ours_may_be_missing(path):
    state, fresh = moved(SCALED), SCALED.init(PARAMS)
    expected = flax.serialization.to_state_dict(state)
    put(*path, value=at(flax.serialization.to_state_dict(fresh), path))(expected)
    restored = jmpp.restore_state(fresh, drop(*path)(flax.serialization.to_state_dict(state)))
    assert_same(flax.serialization.to_state_dict(restored), expected)


def test_a_loss_scale_of_its_own_may_be_older_too():
    template = {"scale": jmpp.DynamicLossScale(), "step": jnp.int32(0)}
    saved = {"scale": {"loss_scale": np.float32(4.0)}, "step": np.int32(3)}
    restored = jmpp.restore_state(template, saved)
    assert_same(restored, {"scale": jmpp.DynamicLossScale(4.0), "step": jnp.int32(3)})


def test_counters_start_anew_in_a_template_of_shapes():
    abstract_state = jax.eval_shape(SCALED.init, PARAMS)
    plain = ADAMW.init(PARAMS)
    with pytest.raises(ValueError, match="loss_scale/loss_scale was not saved.*_replace"):
        jmpp.restore_state(abstract_state, plain)
    restored = jmpp.restore_state(abstract_state._replace(loss_scale=jmpp.DynamicLossScale(2.0**8)), plain)
    assert_same(restored, SCALED.init(PARAMS))


def test_the_scale_survives_a_change_of_kind_where_it_can():
    fresh = SCALED.init(PARAMS)
    for scale, value in {"static": 2.0**10, "noop": 2.0**8}.items():
        saved = jmpp.loss_scaled(ADAMW, runs.SCALES[scale]).init(PARAMS)
        assert float(jmpp.restore_state(fresh, saved).loss_scale.loss_scale) == value


def test_the_template_and_its_buffers_stay_usable():
    fresh = SCALED.init(PARAMS)
    step = jax.jit(lambda s: SCALED.update(GRADS, s, PARAMS)[1], donate_argnums=0)
    for _ in range(2):
        saved = jax.tree.map(np.asarray, moved(ADAMW))
        kept = jax.tree.map(np.copy, saved)
        step(jmpp.restore_state(fresh, saved))
        assert_same(saved, kept)
    assert float(fresh.loss_scale.loss_scale) == 2.0**8


MU = ("opt_state", "inner_state", "0", "mu")
REFUSED = {
    "a moment is missing": (drop(*MU, "w"), r"1 missing:\n  opt_state/inner_state/0/mu/w: float32\[8,4\]"),
    "a moment is None": (put(*MU, "w", value=None), r"1 missing:\n  opt_state/inner_state/0/mu/w"),
    "parameters are missing": (drop("params"), r"2 missing:\n  params/b: float32\[4\]\n  params/w"),
    "the optimizer state is missing": (drop("opt_state"), r"5 missing:\n  opt_state/inner_state/0/count"),
    "another parameter": (
        put("params", "v", value=np.ones(3)), r"1 left over:\n  params/v: float64\[3\]"
    ),
    "a tree for an array": (
        put("params", "b", value={"x": np.ones(2)}), r"1 missing:\n  params/b.*1 left over:\n  params/b/x"
    ),
    "an array for a tree": (
        put(*MU, value=np.ones(2)), r"2 missing:.*1 left over:\n  opt_state/inner_state/0/mu: float64\[2\]"
    ),
    "another shape": (
        put("params", "w", value=np.ones((4, 8), np.float32)),
        r"1 of another shape:\n  params/w: float32\[8,4\] -> float32\[4,8\]",
    ),
    "another scale": (
        put("opt_state", "loss_scale", value={"log2_scale": np.float32(3)}),
        r"left over:\n  opt_state/loss_scale/log2_scale.*another kind of loss scale, or .*\? To start",
    ),
    "magnitudes nobody asks for": (
        put("opt_state", "gradients", value={"w": {"max": np.float32(3)}}),
        r"left over:\n  opt_state/gradients/w/max.*same monitor=",
    ),
    "a Python float": (put("opt_state", "skipped", value=0.5), r"e/skipped: int32\[\] -> float32\[\]"),
    "text": (put("step", value="3"), r"step: int32\[\] -> str"),
    "float64": (
        put("params", "b", value=np.ones(4)), r"params/b: float32\[4\] -> float64\[4\].*cast=True"
    ),
    "half parameters": (
        put("params", "b", value=jnp.ones(4, jnp.bfloat16)),
        r"1 restored value is not .*params/b: float32\[4\] -> bfloat16\[4\]: saved in lower precision; the "
        r"float32 values \(masters\) are lost",
    ),
    "a wide counter": (
        put("opt_state", "loss_scale", "growth_tracker", value=np.int64(3)),
        r"opt_state/loss_scale/growth_tracker: int32\[\] -> int64\[\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_dropped_or_made_up(name):
    change, message = REFUSED[name]
    state = {"params": PARAMS, "opt_state": moved(SCALED), "step": jnp.int32(3)}
    template = {"params": PARAMS, "opt_state": SCALED.init(PARAMS), "step": jnp.int32(0)}
    saved = flax.serialization.to_state_dict(state)
    assert_same(jmpp.restore_state(template, saved), state)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jmpp.restore_state(template, change(saved))


BAD_SCALES = (np.nan, np.inf, 0.0, -8.0, 2.0**100, 2.0**-20, 1e-42)
#: Kind of scale -> leaf -> numbers that no constructor takes and no step leaves behind.
DAMAGED = {
    "dynamic": {"loss_scale": BAD_SCALES, "growth_tracker": (-1, 2**31 - 1), "hysteresis_tracker": (-3,)},
    "static": {"loss_scale": (np.nan, np.inf, 0.0, -8.0, 1e-42)},
    "statistic": {"loss_scale": BAD_SCALES, "widened": (-1, 2**30), "clean_scale": (np.nan, -1.0)},
    "pid": {"log2_scale": (np.nan, np.inf, 100.0), "integral": (np.nan,), "previous_error": (np.inf,)},
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("way", ["state", "shapes", "nnx"])
def test_a_loss_scale_that_no_constructor_takes_is_refused(kind, way):
    tx = jmpp.loss_scaled(ADAMW, runs.SCALES[kind])
    fresh = tx.init(PARAMS)
    if way == "nnx":
        fresh = nnx.state(nnx.Optimizer(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param))["opt_state"]
    saved = flax.serialization.to_state_dict(text_keys(nnx.to_pure_dict(fresh)) if way == "nnx" else fresh)
    template = jax.eval_shape(lambda: fresh) if way == "shapes" else fresh
    for name, values in DAMAGED[kind].items():
        good = at(saved, ("loss_scale", name))
        for value in values:
            if way == "nnx" and value in (2.0**100, 2.0**-20, 100.0):
                continue  # The leaves alone do not say what the bounds are.
            put("loss_scale", name, value=np.asarray(value, good.dtype))(saved)
            with pytest.raises(ValueError, match=rf"damaged.*\n  loss_scale/{name}: .*outside"):
                jmpp.restore_state(template, saved)
        put("loss_scale", name, value=good)(saved)
    jmpp.restore_state(template, saved)


@pytest.mark.parametrize("name", ["skipped", "consecutive_skips", "steps"])
def test_negative_counts_of_steps_are_refused(name):
    saved = moved(SCALED)._replace(**{name: jnp.int32(-5)})
    with pytest.raises(ValueError, match=f"{name}: -5, outside"):
        jmpp.restore_state(SCALED.init(PARAMS), saved)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*MU, "w"), np.full((8, 4), np.nan, np.float32), "inner_state/0/mu/w: not finite"),
        ((*MU[:-1], "nu", "b"), np.full(4, np.inf, np.float32), "inner_state/0/nu/b: not finite"),
        ((*MU[:-1], "nu", "b"), np.float32([1, -1, 1, 1]), "nu/b: some values, outside .0, inf."),
        ((*MU[:-1], "count"), np.int32(-1), "count: -1, a negative count"),
        (("step",), np.int32(-7), "step: -7, a negative count"),
        (("params", "w"), np.full((8, 4), np.inf, np.float32), "params/w: not finite"),
        (("best",), np.float32(np.nan), "best: not finite"),
    ],
)
@pytest.mark.parametrize("shapes", [False, True])
def test_damage_is_found_where_it_is_looked_for(path, value, message, shapes):
    opt_state = moved.__wrapped__(SCALED)  # Not what a test on a mesh made.
    state = {"params": PARAMS, "opt_state": opt_state, "step": jnp.int32(3), "nu": jnp.float32(-1.0)}
    state["best"] = jnp.float32(0.5 if shapes else np.inf)  # Early stopping begins so.
    template = jax.eval_shape(lambda: state) if shapes else state
    saved = flax.serialization.to_state_dict(state)
    assert_same(jmpp.restore_state(template, saved, check=True), state)
    put(*path, value=value)(saved)
    jmpp.restore_state(template, saved)
    with pytest.raises(ValueError, match=message):
        jmpp.restore_state(template, saved, check=True)


def test_infinite_magnitudes_of_a_skipped_step_are_no_damage():
    state = moved(MONITORED)
    assert not np.isfinite(jax.tree.leaves(state.gradients)).all()
    assert_same(jmpp.restore_state(MONITORED.init(PARAMS), state, check=True), state)


def test_a_state_that_is_too_deep_names_the_place():
    deep = functools.reduce(lambda inner, _: {"a": inner}, range(2000), {})
    for template, saved in ((PARAMS, {**PARAMS, "w": deep}), ({"w": deep}, {"w": deep})):
        with pytest.raises(ValueError, match=r"nested more than 100 levels deep at w/a/a/a/a/a/a/a/\.\.\."):
            jmpp.restore_state(template, saved)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in DAMAGED if kind != "static"])
def test_training_leads_a_damaged_scale_back(kind):
    # What was restored by other means.
    tx = jmpp.loss_scaled(optax.sgd(0.1), runs.SCALES[kind])
    leaf = next(iter(DAMAGED[kind]))

    @jax.jit
    def step(params, state):
        _, grads = jmpp.scaled_value_and_grad(lambda p: jnp.sum((p - 2) ** 2))(state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for bad in DAMAGED[kind][leaf]:
        params, state = jnp.ones(3), tx.init(jnp.ones(3))
        damaged = {leaf: jnp.float32(bad)}
        state = state._replace(loss_scale=flax.serialization.from_state_dict(state.loss_scale, damaged))
        for _ in range(50):
            params, state = step(params, state)
            assert runs.SCALES[kind].min_loss_scale <= state.loss_scale.loss_scale
            assert state.loss_scale.loss_scale <= runs.SCALES[kind].max_loss_scale
            assert not state.loss_scale.stuck
            jmpp.check(state)
        np.testing.assert_allclose(params, 2.0, rtol=1e-3)


def test_a_scale_that_is_none_is_reported_at_once():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.StaticLossScale(8.0))
    for bad in (np.nan, np.inf, 0.0, -8.0):
        scale = flax.serialization.from_state_dict(
            jmpp.StaticLossScale(8.0), {"loss_scale": jnp.float32(bad)}
        )
        state = tx.update(jnp.ones(3), tx.init(jnp.ones(3))._replace(loss_scale=scale), jnp.ones(3))[1]
        with pytest.raises(jmpp.LossScaleStuckError, match="damaged checkpoint"):
            jmpp.check(state)


@pytest.mark.parametrize("scale", [jmpp.StaticLossScale(8.0), jmpp.NoOpLossScale()])
def test_check_ends_a_run_of_sixty_skipped_steps(scale):
    tx = jmpp.loss_scaled(optax.sgd(0.1), scale)
    state = tx.init(jnp.ones(3))
    update = jax.jit(tx.update)
    for _ in range(59):
        state = update(jnp.full(3, jnp.nan), state, jnp.ones(3))[1]
        jmpp.check(state)
    state = update(jnp.full(3, jnp.nan), state, jnp.ones(3))[1]
    jmpp.check(state, max_consecutive_skips=None)
    with pytest.raises(jmpp.LossScaleStuckError, match="60 steps skipped in a row"):
        jmpp.check(state)


def test_a_scaled_state_does_not_fit_an_optimizer_without_scaling():
    with pytest.raises(
        ValueError, match=r"(?s)5 missing.*1[0-9] left over.*and . more.*one of loss_scaled, the temp"
    ):
        jmpp.restore_state(ADAMW.init(PARAMS), SCALED.init(PARAMS))


def test_an_optimizer_is_no_template():
    with pytest.raises(TypeError, match=r"needs a state to fill, got a transformation \(GradientTransf"):
        jmpp.restore_state(SCALED, SCALED.init(PARAMS))
    with pytest.raises(TypeError, match="takes what a checkpoint held, not its path: read 'step_10' before"):
        jmpp.restore_state(SCALED.init(PARAMS), "step_10")


def test_weak_values_of_this_process_become_strong():
    weak = jnp.full(2, 0.5)
    assert weak.weak_type
    assert_same(jmpp.restore_state(jnp.zeros(2, jnp.float32), weak), jnp.full(2, 0.5, jnp.float32))
    assert_same(jmpp.restore_state(jnp.float32(0.0), 0.5), jnp.float32(0.5))


def test_many_changes_are_counted():
    wide = {f"w{i:02}": jnp.ones(2) for i in range(13)}
    half = jmpp.get_policy("half").cast_to_param(wide)
    with pytest.raises(ValueError, match=r"(?s)13 restored values are.*w09: [^\n]*\n  \.\.\. and 3 more$"):
        jmpp.optim.check_restored(half, wide)
    with pytest.raises(ValueError, match=r"(?s)13 missing:.*w09: [^\n]*\n  \.\.\. and 3 more$"):
        jmpp.restore_state(wide, {})


def test_keys_that_are_the_same_as_text_are_refused():
    with pytest.raises(ValueError, match=r"The keys \['0', '0'\] of a Twice are not different as text"):
        jmpp.restore_state(Twice(1, 2), {"0": 1})


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Twice:
    a: int
    b: int

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(0), self.a), (jax.tree_util.DictKey("0"), self.b)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


WEAK = jnp.asarray(3.0)
CHECKED = {
    "same": (jnp.ones(2), jnp.ones(2), None),
    "host": (np.ones(2, np.float32), jnp.ones(2), None),
    "shapes": (jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(2), None),
    "became strong": (jnp.float32(3.0), WEAK, None),
    "became weak": (WEAK, jnp.float32(3.0), r"float32\[\] -> float32\[\] \(weak\): a weak type promotes"),
    "became Python": (3.0, jnp.float32(3.0), r"float32\[\] -> float \(a Python number\)"),
    "a Python number's kind": (np.int64(3), 0, None),
    "another kind": (np.float32(3), 0, r"int \(a Python number\) -> float32\[\]"),
    "integer": (np.int64(3), jnp.int32(3), r"int32\[\] -> int64\[\]$"),
    "half": (jnp.ones(2, jnp.float16), jnp.ones(2), r"float32\[2\] -> float16\[2\]: saved in lower prec"),
    "float8": (jnp.ones(2, jnp.float8_e4m3fn), jnp.ones(2, jnp.bfloat16), r"the bfloat16 values \(mas"),
    "other half": (jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16), r"another precision.*cast=True"),
    "wider": (jnp.ones(2), jnp.ones(2, jnp.float16), r"float16\[2\] -> float32\[2\]: saved in another"),
    "shape": (jnp.ones(3), jnp.ones(2), r"1 of another shape:\n  a/x: float32\[2\] -> float32\[3\]"),
    "a key's data, as Orbax has it": (jnp.zeros(2, jnp.uint32), jax.random.key(0), None),
    "another key's": (jnp.zeros(4, jnp.uint32), jax.random.key(0), r"a/x: key<fry>\[\] -> uint32\[4\]"),
    "no key": (jax.random.key(0), jnp.zeros(2, jnp.uint32), r"a/x: uint32\[2\] -> key<fry>\[\]"),
    "text": (jnp.ones(2), "adam", r"str -> float32\[2\]|another shape"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_restored(name):
    restored, expected, message = CHECKED[name]
    if message is None:
        jmpp.optim.check_restored({"a": {"x": restored}}, {"a": {"x": expected}})
    else:
        with pytest.raises(ValueError, match=f"(?s)a/x: .*{message}|{message}"):
            jmpp.optim.check_restored({"a": {"x": restored}}, {"a": {"x": expected}})


def test_check_restored_does_not_fill_in():
    old = flax.serialization.to_state_dict(SCALED.init(PARAMS))
    del old["loss_scale"]["stuck"]
    with pytest.raises(ValueError, match=r"1 missing:\n  loss_scale/stuck: bool\[\]$"):
        jmpp.optim.check_restored(old, SCALED.init(PARAMS))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_keys_that_were_read_as_numbers_are_keys_again(impl, shape):
    """As Orbax gives the streams of an NNX model with dropout, without a target."""
    keys = jax.random.split(jax.random.key(7, impl=impl), shape) if shape else jax.random.key(7, impl=impl)
    saved = {"dropout": {"key": np.asarray(jax.random.key_data(keys))}}
    fresh = jax.random.wrap_key_data(jnp.zeros_like(jax.random.key_data(keys)), impl=impl)
    for template in (fresh, jax.ShapeDtypeStruct(keys.shape, keys.dtype)):
        for read in (saved, {"dropout": {"key": keys}}):
            restored = jmpp.restore_state({"dropout": {"key": template}}, read, cast=True)["dropout"]["key"]
            np.testing.assert_array_equal(jax.random.key_data(restored), jax.random.key_data(keys))
        restored = jmpp.restore_state({"dropout": {"key": template}}, saved)["dropout"]["key"]
        assert restored.dtype == keys.dtype
        np.testing.assert_array_equal(jax.random.key_data(restored), jax.random.key_data(keys))
    with pytest.raises(ValueError, match=r"dropout/key: key<\w+>.* -> uint32"):
        jmpp.restore_state({"dropout": {"key": fresh}}, {"dropout": {"key": np.zeros((5, 9), np.uint32)}})


def test_orbax_casts_silently_and_its_metadata_tells(tmp_path):
    """Why the metadata are to be checked: after the restore the types are right and the digits gone."""
    half = {"w": jnp.array([1.0, 1.001], jnp.bfloat16)}
    wide = {"w": jnp.array([1.0, 1.001])}
    with ocp.StandardCheckpointer() as c:
        c.save(tmp_path / "at", half)
        c.wait_until_finished()
        restored = c.restore(tmp_path / "at", abstract(wide))
        jmpp.optim.check_restored(restored, wide)
        assert restored["w"].tolist() == [1.0, 1.0]
        with pytest.raises(ValueError, match=r"w: float32\[2\] -> bfloat16\[2\]: saved in lower precision"):
            jmpp.optim.check_restored(c.metadata(tmp_path / "at").item_metadata, wide)


@pytest.mark.parametrize(("saved", "wanted"), [
    (jnp.ones(2, jnp.bfloat16), jnp.zeros(2)),
    (np.ones(2), jnp.zeros(2)),
    (jnp.ones(2), jnp.zeros(2, jnp.float16)),
    (np.ones(2, np.int64), jnp.zeros(2, jnp.int32)),
])  # fmt: skip
def test_cast_when_asked(saved, wanted):
    with pytest.raises(ValueError, match="x: "):
        jmpp.restore_state({"x": wanted}, {"x": saved})
    assert_same(jmpp.restore_state({"x": wanted}, {"x": saved}, cast=True), {"x": jnp.ones_like(wanted)})


@pytest.mark.parametrize("saved", [np.array([2**40]), np.ones(1, np.float32), np.ones(1, np.bool_)])
def test_cast_changes_no_integers_and_no_kinds(saved):
    with pytest.raises(ValueError, match=r"x: int32\[1\] -> "):
        jmpp.restore_state({"x": jnp.zeros(1, jnp.int32)}, {"x": saved}, cast=True)


def test_boxed_parameters_match_plain_ones():
    boxed = {"w": nn.Partitioned(jnp.zeros((8, 4)), ("d", None)), "b": jnp.zeros(4)}
    for saved in (PARAMS, {"w": {"value": PARAMS["w"]}, "b": {"value": PARAMS["b"]}}):
        restored = jmpp.restore_state(boxed, saved)
        assert isinstance(restored["w"], nn.Partitioned)
        assert_same(nn.unbox(restored), PARAMS)
    assert_same(jmpp.restore_state(PARAMS, restored), PARAMS)


@pytest.mark.slow
def test_a_checkpoint_that_was_cut_off_is_not_the_latest(tmp_path):
    """What a kill inside a save leaves: a directory under a temporary name, which is no step."""
    state = runs.init()
    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    shutil.move(tmp_path / "2", tmp_path / "2.orbax-checkpoint-tmp")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 1
        assert_same(
            jmpp.restore_state(runs.init(), manager.restore(1, args=ocp.args.StandardRestore())), state
        )
