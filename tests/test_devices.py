"""The finite test and the skip on eight devices: one decision, nothing moved to reach it."""

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import paired
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
SPECS = {"a": P("d"), "b": P(None, "d"), "c": P("d"), "d": P(), "e": P("d", None)}
SHAPES = {"a": (512, 256), "b": (512, 256), "c": (16,), "d": (24,), "e": (8, 8)}


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


def tree(bad=None):
    values = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    if bad is not None:
        values[bad].flat[-1] = np.inf
    return values


def placed(values, kind=AxisType.Auto):
    shardings = {name: NamedSharding(mesh(kind), spec) for name, spec in SPECS.items()}
    return jax.device_put(values, shardings)


def collectives(compiled):
    text = compiled.as_text()
    return {name: n for name in COLLECTIVES if (n := len(re.findall(rf" {name}(?:-start)?\(", text)))}


def copies(array):
    """What each device holds."""
    return [np.asarray(shard.data) for shard in array.addressable_shards]


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [None, *SHAPES])
def test_one_decision_with_one_scalar_all_reduce(bad):
    values = placed(tree(bad))
    jitted = jax.jit(jmpp.all_finite)
    assert bool(jitted(values)) is (bad is None)
    assert collectives(jitted.lower(values).compile()) == {"all-reduce": 1}
    assert bool(jmpp.all_finite(values)) is (bad is None)


def test_explicit_sharding_and_shard_map():
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        values = placed(tree("b"), AxisType.Explicit)
        assert not bool(jax.jit(jmpp.all_finite)(values))
    local = jax.shard_map(lambda t: jmpp.all_finite(t, "d"), mesh=mesh(), in_specs=(SPECS,), out_specs=P())
    assert not bool(jax.jit(local)(placed(tree("a"))))
    assert bool(jax.jit(local)(placed(tree())))
    # Without agreement each device answers for itself, and the type says so.
    own = jax.shard_map(lambda t: jmpp.all_finite(t)[None], mesh=mesh(), in_specs=(SPECS,), out_specs=P("d"))
    assert jax.jit(own)(placed(tree("a"))).tolist() == [True] * 7 + [False]


@pytest.mark.parametrize("bad", [None, 0, 3])
def test_equal_layers_share_a_reduction_and_nothing_else_is_moved(bad):
    """Matrices of one shape: those of equal layers lie alike, the two of a layer do not."""

    def layer(value):
        return {"query": {"kernel": np.full((64, 64), value)}, "out": {"kernel": np.ones((64, 64))}}

    values = [layer(np.nan if bad == i else 1.0) for i in range(4)]
    split = {"query": {"kernel": P("d")}, "out": {"kernel": P(None, "d")}}
    on = jax.tree.map(lambda spec: NamedSharding(mesh(), spec), split, is_leaf=lambda x: isinstance(x, P))
    named = {f"layer_{i}": {"Attention_0": value} for i, value in enumerate(values)}
    for layers, places in (
        (named, {name: {"Attention_0": on} for name in named}),
        ({"layers": values}, {"layers": [on] * 4}),
    ):
        layers = jax.device_put(layers, places)
        compiled = jax.jit(jmpp.all_finite).lower(layers).compile()
        assert bool(compiled(layers)) is (bad is None)
        assert collectives(compiled) == {"all-reduce": 1}
        # Fewer than one for each of the eight matrices.
        assert compiled.as_text().count(" reduce(") < 8
    # Modules of which only the last number differs may be placed in any way.
    several = {f"Dense_{i}": value["query"] for i, value in enumerate(values)}
    several = jax.device_put(
        several, {name: on["query" if i % 2 else "out"] for i, name in enumerate(several)}
    )
    assert collectives(jax.jit(jmpp.all_finite).lower(several).compile()) == {"all-reduce": 1}


def test_on_one_device_small_arrays_share_a_reduction():
    values = {f"b{i}": jnp.ones(32) for i in range(50)}

    def reductions(function):
        return jax.jit(function).lower(values).compile().as_text().count(" reduce(")

    assert reductions(jmpp.all_finite) <= 4
    assert reductions(lambda t: jnp.stack([jnp.isfinite(x).all() for x in t.values()]).all()) > 40


@pytest.mark.slow
@pytest.mark.parametrize("bad", [None, "a", "d"])
def test_every_device_skips_together_and_state_keeps_its_shardings(bad):
    tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(4.0))
    params, grads = placed(tree()), placed(tree(bad))
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    new, after = step(params, state, grads)
    assert bool(after.grads_finite) is (bad is None)
    assert float(after.loss_scale.loss_scale) == (4.0 if bad is None else 2.0)
    if bad is not None:
        jax.tree.map(np.testing.assert_array_equal, new, params)
    for name, leaf in new.items():
        assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim)
    assert set(collectives(step.lower(params, state, grads).compile())) <= {"all-reduce"}


# Training steps: what the devices decide, and what they send with loss scaling that they don't without.

BOTH, GRID = P(("data", "model")), P("data", "model")
#: Mesh; where the batch, both matrices and the hidden values lie; how many all-reduces the decision takes:
#: one for all parameters together, but XLA reduces over one dimension of an array at a time.
PLACEMENTS = {
    "replicated": ({"data": 8}, P("data"), P(), P(), P("data"), 0),
    "fsdp": ({"data": 8}, P("data"), P("data"), P("data"), P("data"), 1),
    "tensor": ({"data": 1, "model": 8}, P(), P(None, "model"), P("model"), P(None, "model"), 1),
    "data x tensor": ({"data": 4, "model": 2}, P("data"), P(None, "model"), P("model"), GRID, 1),
    "fsdp over both": ({"data": 4, "model": 2}, BOTH, BOTH, BOTH, BOTH, 1),
    "fsdp x tensor": ({"data": 4, "model": 2}, P("data"), GRID, GRID, GRID, 2),
}


def sent(compiled):
    """What a program's collectives send: how often each runs, and each type; and those that send booleans."""
    pattern = rf"= (\S+|\(.*?\)) ({'|'.join(COLLECTIVES)})(?:-start)?\("
    found = [
        (name, re.findall(r"\w+\[[\d,]*\]", types)) for types, name in re.findall(pattern, compiled.as_text())
    ]
    return (
        collections.Counter(name for name, _ in found),
        collections.Counter(f"{name} {t}" for name, types in found for t in types),
        sum(any(t.startswith("pred") for t in types) for _, types in found),
    )


class Training:
    """A step with loss scaling and one without, in one of PLACEMENTS."""

    def __init__(self, name, kind):
        sizes, batch, w, v, hidden, self.decisions = PLACEMENTS[name]
        self.mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
        shapes = {"w": ((64, 128), w), "v": ((128, 64), v), "b": ((64,), P())}
        rng = np.random.default_rng(0)
        self.params = {
            name: self.placed(rng.normal(size=shape), spec) for name, (shape, spec) in shapes.items()
        }
        x = rng.normal(size=(64, 64))
        self.good = self.placed(x, batch)
        x[-1, -1] = np.inf  # The last row: the batch of the last devices.
        self.bad = self.placed(x, batch)
        self.tx = jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(4.0))
        self.batch, self.hidden = (batch, hidden) if kind is AxisType.Explicit else (None, None)

    def placed(self, value, spec):
        return jax.device_put(value.astype(np.float32), NamedSharding(self.mesh, spec))

    def loss_fn(self, params, x):
        y = jnp.tanh(jnp.dot(x, params["w"], out_sharding=self.hidden))
        y = jnp.dot(y, params["v"], out_sharding=self.batch) + params["b"]
        return jnp.mean((y - x) ** 2)

    def step(self, params, state, x):
        loss, grads = jmpp.scaled_value_and_grad(self.loss_fn)(state, params, x)
        updates, state = self.tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def plain_step(self, params, state, x):
        loss, grads = jax.value_and_grad(self.loss_fn)(params, x)
        updates, state = optax.adamw(0.1).update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss


def check_state(state, finite):
    """One overflow in all, seen by all devices alike."""
    decided = jax.tree.leaves(state._replace(inner_state=()))
    assert all(leaf.sharding.is_fully_replicated for leaf in decided)
    assert all(same_bits(copy, leaf) for leaf in decided for copy in copies(leaf))
    assert float(state.loss_scale.loss_scale) == 2.0
    assert int(state.skipped) == 1
    assert bool(state.grads_finite) is finite


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), paired(PLACEMENTS, [AxisType.Auto, AxisType.Explicit]))
def test_an_overflow_on_one_device_skips_the_step_on_all(name, kind):
    training = Training(name, kind)
    params = training.params
    with jax.set_mesh(training.mesh):
        state = training.tx.init(params)
        places = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
        step = jax.jit(training.step, out_shardings=(*places, None))
        step = step.lower(params, state, training.good).compile()
        kept, skipped, _ = step(params, state, training.bad)
        check_state(skipped, finite=False)
        assert jax.tree.all(jax.tree.map(same_bits, kept, params))
        assert jax.tree.all(jax.tree.map(same_bits, skipped.inner_state, state.inner_state))
        taken, after, _ = step(kept, skipped, training.good)
        check_state(after, finite=True)
        assert not any(same_bits(taken[n], params[n]) for n in params)
        for n, leaf in taken.items():
            assert leaf.sharding.is_equivalent_to(params[n].sharding, leaf.ndim)

        # Without loss scaling. XLA may send the sum of the loss together with others there; with it the
        # gradients wait for the loss, since they depend on whether it is finite.
        places = jax.tree.map(lambda leaf: leaf.sharding, (params, state.inner_state))
        plain = jax.jit(training.plain_step, out_shardings=(*places, None))
        plain = plain.lower(params, state.inner_state, training.good).compile()
    (count, types, answers), (plain_count, plain_types, _) = sent(step), sent(plain)
    assert set(types - plain_types) == ({"all-reduce pred[]"} if training.decisions else set())
    assert not plain_types - types
    assert answers == training.decisions
    assert count - plain_count <= collections.Counter(
        {"all-reduce": training.decisions + max(training.decisions, 1)}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), paired(PLACEMENTS, [AxisType.Auto, AxisType.Explicit]))
def test_one_element_of_one_shard_of_a_gradient_skips_the_step(name, kind):
    training = Training(name, kind)
    params = training.params
    grads = dict(params, w=np.asarray(params["w"]).copy())
    grads["w"][-1, -1] = np.inf
    grads["w"] = jax.device_put(grads["w"], params["w"].sharding)
    with jax.set_mesh(training.mesh):
        state = training.tx.init(params)
        update = jax.jit(training.tx.update).lower(grads, state, params).compile()
        updates, state = update(grads, state, params)
    check_state(state, finite=False)
    assert all(same_bits(params[n] + updates[n], params[n]) for n in params)
    _, types, _ = sent(update)
    assert set(types) <= {"all-reduce pred[]"}


# Inside shard_map and pmap, where each device decides for itself unless it is told.


def own_parameters():
    """Parameters and gradients of eight devices, each of which has its own."""
    params = {"w": np.ones((8, 4, 4), np.float32), "b": np.zeros((8, 4), np.float32)}
    grads = jax.tree.map(np.ones_like, params)
    grads["w"][5, 1, 2] = np.inf
    return params, grads


def updating(inner):
    def update(params, state, grads):
        updates, state = inner.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return update


def scaled_adamw(axis_name):
    return jmpp.loss_scaled(optax.adamw(0.1), jmpp.DynamicLossScale(4.0), axis_name=axis_name)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_devices_of_a_shard_map_agree_over_axis_name(axes):
    grid = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    params, grads = own_parameters()

    def step(tx):
        state = tx.init(params)
        places = jax.tree.map(lambda leaf: P(tuple(axes)) if leaf.ndim else P(), (params, state, grads))
        return state, jax.jit(
            jax.shard_map(updating(tx), mesh=grid, in_specs=places, out_specs=places[:2], check_vma=True)
        ).lower(params, state, grads).compile()

    state, compiled = step(scaled_adamw(tuple(axes)))
    kept, skipped = compiled(params, state, grads)
    check_state(skipped, finite=False)
    assert jax.tree.all(jax.tree.map(same_bits, (kept, skipped.inner_state), (params, state.inner_state)))
    clean = jax.tree.map(np.ones_like, grads)
    taken, after = compiled(kept, skipped, clean)
    check_state(after, finite=True)
    assert all((np.asarray(taken[n]) != params[n]).all() for n in params)

    assert sent(compiled)[1] == {"all-reduce s32[]": 1}
    assert sent(step(optax.adamw(0.1))[1])[1] == {}
    with pytest.raises(ValueError, match="out_specs"):  # The types tell that devices would disagree.
        step(scaled_adamw(None))


@pytest.mark.slow
def test_devices_of_a_pmap_agree_over_axis_name():
    params, grads = own_parameters()

    def update(axis_name):
        tx = scaled_adamw(axis_name)
        state = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * 8), tx.init(jax.tree.map(lambda p: p[0], params))
        )
        return jax.pmap(updating(tx), axis_name="data")(params, state, grads)

    kept, state = update("data")
    assert state.grads_finite.tolist() == [False] * 8
    assert state.loss_scale.loss_scale.tolist() == [2.0] * 8
    assert state.skipped.tolist() == [1] * 8
    assert jax.tree.all(jax.tree.map(same_bits, kept, params))
    assert not state.inner_state[0].mu["w"].any()
    _, state = update(None)
    assert state.grads_finite.tolist() == [True] * 5 + [False] + [True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["shard_map", "pmap"])
def test_data_parallel_by_hand_is_the_step_of_one_device(way):
    """Replicated parameters, a part of the batch for each device, the mean of losses and gradients."""
    training = Training("replicated", AxisType.Auto)
    params, good, bad = jax.tree.map(np.asarray, (training.params, training.good, training.bad))
    tx, plain = scaled_adamw("data"), optax.adamw(0.1)

    def step(params, state, x):
        # The types of shard_map have the mean of the losses make that of the gradients; pmap has no types.
        typed = way == "shard_map"
        mean = functools.partial(lax.pmean, axis_name="data")
        loss_fn = (lambda p, x: mean(training.loss_fn(p, x))) if typed else training.loss_fn
        scaled = isinstance(state, jmpp.optim.LossScaledState)
        gradient = jmpp.scaled_value_and_grad(loss_fn) if scaled else None
        loss, grads = gradient(state, params, x) if scaled else jax.value_and_grad(loss_fn)(params, x)
        updates, state = (tx if scaled else plain).update(grads if typed else mean(grads), state, params)
        return optax.apply_updates(params, updates), state, loss if typed else mean(loss)

    if way == "shard_map":
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
        mapped = jax.jit(jax.shard_map(step, mesh=training.mesh, check_vma=True, **specs))
    else:
        mapped = jax.pmap(step, "data", in_axes=(None, None, 0), out_axes=None)
        good, bad = (x.reshape(8, 8, 64) for x in (good, bad))

    state = tx.init(params)
    kept, skipped, _ = mapped(params, state, bad)
    check_state(skipped, finite=False)
    assert jax.tree.all(jax.tree.map(same_bits, kept, params))
    taken, after, loss = mapped(kept, skipped, good)
    check_state(after, finite=True)

    expected = jax.jit(jax.value_and_grad(training.loss_fn))(params, good.reshape(64, 64))
    updates, inner = plain.update(expected[1], plain.init(params), params)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-8), after.inner_state, inner
    )
    whole = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), taken, whole)

    scaled, without = (sent(mapped.lower(params, s, good).compile()) for s in (state, plain.init(params)))
    assert scaled[1] - without[1] == collections.Counter({"all-reduce s32[]": 1})
    assert not without[1] - scaled[1]


# Statistics of BatchNorm are of the whole batch, and in float32.

IMAGES = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32) + np.arange(64)[:, None] / 16
WIDE = "mixed_float16"


class LinenNet:
    """A BatchNorm and a product, as functions of plain pytrees."""

    def __init__(self, policy, axis_name):
        # Without Flax's own care for the reductions, to see the policy's.
        options = {"axis_name": axis_name, "force_float32_reductions": False}
        norm = nn.BatchNorm(use_running_average=False, momentum=0.5, **options)
        self.model = jmpp.wrap(nn.Sequential([norm, nn.Dense(4)]), policy)
        variables = self.model.init(jax.random.key(0), IMAGES)
        self.params, self.stats = variables["params"], variables["batch_stats"]

    def __call__(self, params, stats, x):
        out, new = self.model.apply({"params": params, "batch_stats": stats}, x, mutable="batch_stats")
        return out, new["batch_stats"]


class NnxNet:
    def __init__(self, policy, axis_name):
        rngs = nnx.Rngs(0)
        norm = nnx.BatchNorm(16, momentum=0.5, axis_name=axis_name, rngs=rngs)
        model = jmpp.wrap(nnx.Sequential(norm, nnx.Linear(16, 4, rngs=rngs)), policy)
        self.graph, self.params, self.stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def __call__(self, params, stats, x):
        model = nnx.merge(self.graph, params, jax.tree.map(jnp.copy, stats))
        return model(x), nnx.state(model, nnx.BatchStat)


NETS = {"linen": LinenNet, "nnx": NnxNet}


def batch_norm_step(net, axis_name=None):
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(4.0), axis_name=axis_name)

    def step(params, stats, state, x):
        def loss_fn(params):
            out, new = net(params, stats, x)
            loss = jnp.mean(out**2)
            return (loss if axis_name is None else lax.pmean(loss, axis_name)), new

        (_, new), grads = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)(state, params)
        updates, state = tx.update(grads, state, params)
        stats = jmpp.select_tree(jmpp.grads_finite(state), new, stats)
        return optax.apply_updates(params, updates), stats, state

    return step, tx.init(net.params)


def on_all(step, axis_name, *args):
    """A jitted step and its arguments on eight devices; the last argument is their batch."""
    grid = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    if axis_name is not None:
        specs = {"in_specs": (*[P()] * len(args[:-1]), P("data")), "out_specs": P()}
        step = jax.shard_map(step, mesh=grid, check_vma=True, **specs)
    *rest, batch = args
    rest = jax.device_put(rest, NamedSharding(grid, P()))
    return jax.jit(step), (*rest, jax.device_put(batch, NamedSharding(grid, P("data"))))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "axis_name"), paired(NETS, [None, "data"]))
def test_batch_statistics_are_those_of_the_whole_batch(kind, axis_name):
    net = NETS[kind](WIDE, axis_name)
    alone, state = batch_norm_step(NETS[kind](WIDE, None))
    _, expected, _ = jax.jit(alone)(net.params, net.stats, state, IMAGES)

    step, state = batch_norm_step(net, axis_name)
    step, (params, old, state, x) = on_all(step, axis_name, net.params, net.stats, state, IMAGES)
    _, stats, after = step(params, old, state, x)
    assert bool(after.grads_finite)
    for leaf, whole, before in zip(*map(jax.tree.leaves, (stats, expected, old)), strict=True):
        np.testing.assert_allclose(leaf, whole, rtol=1e-5)
        assert leaf.dtype == jnp.float32
        assert not np.isclose(leaf, before).any()
        assert all(same_bits(copy, leaf) for copy in copies(leaf))

    # One device overflows, and all keep what they had.
    bad = IMAGES.copy()
    bad[-1, 3] = np.inf
    kept, stats, skipped = step(params, old, state, jax.device_put(bad, x.sharding))
    check_state(skipped, finite=False)
    assert jax.tree.all(jax.tree.map(same_bits, (kept, stats), (params, old)))
    assert all(same_bits(copy, leaf) for leaf in jax.tree.leaves(stats) for copy in copies(leaf))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "axis_name", "policy", "dtype"),
    [
        ("linen", None, WIDE, "f32"),
        ("linen", "data", WIDE, "f32"),
        ("nnx", None, WIDE, "f32"),
        ("nnx", "data", WIDE, "f32"),
        ("linen", "data", jmpp.PolicyMap(WIDE, float32_islands=False), "f16"),
    ],
)
def test_devices_send_batch_statistics_in_float32(kind, axis_name, policy, dtype):
    net = NETS[kind](policy, axis_name)
    step, args = on_all(lambda *args: net(*args)[1], axis_name, net.params, net.stats, IMAGES)
    _, types, _ = sent(step.lower(*args).compile())
    assert types == (
        {f"all-reduce {dtype}[16]": 2} if axis_name is None else {f"all-reduce {dtype}[2,16]": 1}
    )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_scales_and_metrics_see_the_gradients_of_all_devices(check_vma):
    """Each device has its part of the parameter, and so of the gradient: one magnitude differs by 2**20."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.StatisticLossScale(4.0), axis_name="data", monitor=True)
    grads = jnp.ones(16).at[5].set(2.0**20).at[9].set(2.0**-30)
    whole = jmpp.loss_scaled(optax.sgd(1.0), jmpp.StatisticLossScale(4.0), monitor=True)
    params = {"w": jnp.zeros(16)}
    state = tx.init(params)

    def local(grads, state, params):
        _, state = tx.update({"w": grads}, state, params)
        return state

    split = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    got = jmpp.metrics(jax.jit(split)(grads * 4, state, params))
    want = jmpp.metrics(whole.update({"w": grads * 4}, state, params)[1])
    assert {k: float(v) for k, v in got.items()} == {k: float(v) for k, v in want.items()}
    assert float(got["loss_scale"]) == 2.0**-7


def test_a_users_scale_learns_of_gradients_and_of_the_axis():
    class Largest(jmpp.NoOpLossScale):
        def adjust(self, grads_finite, *, grads, axis_name):
            asked.append((jax.tree.structure(grads), axis_name))
            return self

    class Anything(jmpp.NoOpLossScale):
        def adjust(self, grads_finite, **of_the_step):
            asked.append((jax.tree.structure(of_the_step["grads"]), of_the_step["axis_name"]))
            return self

    class Plain(jmpp.NoOpLossScale):
        def adjust(self, grads_finite):
            asked.append(None)
            return self

    class WithoutSignature:
        __signature__ = "of a function that is not written in Python"

        def __call__(self, grads_finite):
            asked.append(None)
            return NotPython()

    class NotPython(jmpp.NoOpLossScale):
        adjust = WithoutSignature()

    asked = []
    for cls in (Largest, Anything, Plain, NotPython):
        jax.tree_util.register_pytree_node(cls, lambda _: ((), None), lambda _, __, cls=cls: cls())
        tx = jmpp.loss_scaled(optax.sgd(1.0), cls(), axis_name="data")
        state = tx.init(jnp.ones(2))
        jax.vmap(lambda g, tx=tx, state=state: tx.update(g, state, g)[0], axis_name="data")(jnp.ones((3, 2)))
    assert asked == [(jax.tree.structure(0), "data")] * 2 + [None] * 2
