"""The finite test and the skip on eight devices: one decision, nothing moved to reach it."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def test_on_one_device_small_arrays_share_a_reduction():
    values = {f"b{i}": jnp.ones(32) for i in range(50)}

    def reductions(function):
        return jax.jit(function).lower(values).compile().as_text().count(" reduce(")

    assert reductions(jmpp.all_finite) <= 4
    assert reductions(lambda t: jnp.stack([jnp.isfinite(x).all() for x in t.values()]).all()) > 40


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

BOTH = P(("data", "model"))
#: Mesh; where the batch, both matrices and the hidden values lie; how many all-reduces a decision takes.
PLACEMENTS = {
    "replicated": ({"data": 8}, P("data"), P(), P(), P("data"), 0),
    "fsdp": ({"data": 8}, P("data"), P("data"), P("data"), P("data"), 1),
    "tensor": ({"data": 1, "model": 8}, P(), P(None, "model"), P("model"), P(None, "model"), 1),
    "data x tensor": (
        {"data": 4, "model": 2},
        P("data"),
        P(None, "model"),
        P("model"),
        P("data", "model"),
        1,
    ),
    "fsdp over both": ({"data": 4, "model": 2}, BOTH, BOTH, BOTH, BOTH, 1),
    "fsdp x tensor": (
        {"data": 4, "model": 2},
        P("data"),
        P("data", "model"),
        P("data", "model"),
        P("data", "model"),
        1,
    ),
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


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", PLACEMENTS)
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
    assert types - plain_types == collections.Counter({"all-reduce pred[]": 2 * training.decisions})
    assert not plain_types - types
    assert answers == training.decisions
    assert count - plain_count <= collections.Counter({"all-reduce": training.decisions + 1})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", PLACEMENTS)
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
