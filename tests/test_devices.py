"""The finite test and the skip on eight devices: one decision, nothing moved to reach it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

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
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    text = compiled.as_text()
    return {name: n for name in names if (n := len(re.findall(rf" {name}(?:-start)?\(", text)))}


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
