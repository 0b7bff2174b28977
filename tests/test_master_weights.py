"""Half parameters: masters, stochastic rounding and Kahan summation, and the rounding under them."""

import functools
import re

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.core.narrowing import AWAY_FROM_ZERO, TOWARDS_ZERO, rounded

HALF = [jnp.float16, jnp.bfloat16]
NUMPY = {jnp.float16: np.float16, jnp.bfloat16: ml_dtypes.bfloat16}
STOCHASTIC_MASTERS = functools.partial(jmpp.master_weights, stochastic_rounding=True)
METHODS = {
    "masters": jmpp.master_weights,
    "stochastic masters": STOCHASTIC_MASTERS,
    "stochastic": jmpp.stochastic_rounding,
    "kahan": jmpp.kahan_summation,
}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
halves = pytest.mark.parametrize("dtype", HALF, ids=lambda d: d.__name__)
#: Bits of significand: neighbours of 1 are 2**-BITS and 2**(1-BITS) away.
BITS = {jnp.float16: 11, jnp.bfloat16: 8}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def numpy_rounded(x, dtype):
    with np.errstate(all="ignore"):
        return np.asarray(x, np.float32).astype(NUMPY[dtype]).astype(np.float32)


def same(a, b):
    """Equal to the last bit, NaN like NaN."""
    a, b = np.asarray(a), np.asarray(b)
    return (a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))


@functools.cache
def numbers(dtype):
    """Every number of a half type, every midpoint and its float32 neighbours, and random bit patterns."""
    every = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype]).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    largest = np.float32(jnp.finfo(dtype).max)
    over = largest * np.float32([1 + 2.0**-20, 1 + 2.0**-9, 1 + 2.0**-12, 1 + 2.0**-11, 1 + 2.0**-10])
    random = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    near = [np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf)]
    return np.concatenate([every, middle, *near, over, -over, random])


@pytest.mark.slow
@halves
@pytest.mark.parametrize("jit", [False, True])
def test_rounding_to_nearest_is_that_of_numpy(dtype, jit):
    x = numbers(dtype)
    function = jax.jit(rounded, static_argnums=1) if jit else rounded
    assert same(function(jnp.asarray(x), dtype), numpy_rounded(x, dtype)).all()


@pytest.mark.slow
@halves
def test_rounding_at_random_takes_the_two_neighbours_and_leaves_exact_values(dtype):
    x = numbers(dtype)
    largest = float(jnp.finfo(dtype).max)
    below, above = (np.asarray(rounded(jnp.asarray(x), dtype, way)) for way in (TOWARDS_ZERO, AWAY_FROM_ZERO))
    random = jax.random.bits(jax.random.key(0), x.shape, jnp.uint32)
    got = np.asarray(rounded(jnp.asarray(x), dtype, random))
    assert (same(got, below) | same(got, above)).all()
    exact = same(x, numpy_rounded(x, dtype))
    assert same(got, x)[exact].all()
    # Float32's subnormal numbers may be 0 to the processor.
    inside = (np.abs(x) <= largest) & ~exact & (np.abs(x) >= 2.0**-126)
    assert (np.abs(below) < np.abs(x))[inside].all()
    assert (np.abs(above) > np.abs(x))[inside].all()
    assert np.isfinite(above[np.abs(x) <= largest]).all()
    # Neighbours: nothing of the type lies between the two.
    half = NUMPY[dtype]
    patterns = [way[inside].astype(half).view(np.uint16).astype(int) for way in (below, above)]
    assert (patterns[1] - patterns[0] == 1).all()
    # Beyond the largest number, as to nearest.
    beyond = np.abs(x) > largest
    assert same(got, numpy_rounded(x, dtype))[beyond].all()


@pytest.mark.slow
@halves
def test_rounding_at_random_has_the_right_expectation(dtype):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    x = np.float32([1.001, -1.999, 0.1, 3e-5, 65503.0, -7e-6])
    if dtype == jnp.float16:  # Bfloat16's subnormal numbers are float32's.
        x = np.concatenate([x, smallest * np.float32([0.25, -0.9, 1.5, 5.3])])
    n = 50_000
    random = jax.random.bits(jax.random.key(1), (n, x.size), jnp.uint32)
    got = np.asarray(rounded(jnp.broadcast_to(x, (n, x.size)), dtype, random), np.float64)
    below = np.asarray(rounded(jnp.asarray(x), dtype, TOWARDS_ZERO), np.float64)
    above = np.asarray(rounded(jnp.asarray(x), dtype, AWAY_FROM_ZERO), np.float64)
    assert ((got == below) | (got == above)).all()
    share = (x - below) / (above - below)
    assert ((share > 0.01) & (share < 0.99)).all()
    sigma = np.abs(above - below) * np.sqrt(share * (1 - share) / n)
    assert (np.abs(got.mean(0) - x) < 5 * sigma).all()


def train(tx, params, grads, steps):
    """One jitted program per step, as a user has it: parameters are rounded between steps."""
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.array, params)
    state = tx.init(params)
    dtypes = [(x.dtype, x.weak_type) for x in jax.tree.leaves(state)]
    for _ in range(steps):
        params, state = step(params, state, grads)
    assert len(traces) == 1
    assert [(x.dtype, x.weak_type) for x in jax.tree.leaves(state)] == dtypes
    return params, state


@pytest.mark.slow
@halves
@pytest.mark.parametrize("at", [1.0, -(2.0**-10)])  # At the second, half of a distance is subnormal float16.
def test_updates_that_vanish_arrive(dtype, at):
    """0.3 of the distance to the neighbour in each step is nothing to a half parameter."""
    distance, n, steps = abs(at) * 2.0 ** (1 - BITS[dtype]), 512, 100
    step = 0.3 * distance
    start = jnp.full(n, at, dtype)
    grads, sgd = jnp.full(n, -np.sign(at), dtype), optax.sgd(step)
    reference = at + np.sign(at) * steps * np.float64(np.float32(step))
    assert abs(reference) < 2 * abs(at)  # The distance is the same all the way.

    plain, _ = train(sgd, start, grads, steps)
    assert plain.tolist() == start.tolist()
    found = {
        name: np.asarray(train(m(sgd), start, grads, steps)[0], np.float64) for name, m in METHODS.items()
    }
    error = {name: np.abs(x - reference) for name, x in found.items()}
    float32 = steps * 2.0**-23 * abs(at)
    assert (error["masters"] <= distance / 2 + float32).all()
    # The compensation is at most half the distance, of as many bits as the parameter, in each step.
    left_over = steps * distance / 2 * 2.0 ** -BITS[dtype]
    assert (error["kahan"] <= distance / 2 + left_over + float32).all()
    assert (error["stochastic masters"] <= distance + float32).all()
    # Each step's variance is share (1 - share) distance**2.
    sigma = distance * np.sqrt(steps * 0.3 * 0.7)
    assert (error["stochastic"] < 6 * sigma).all()
    assert abs(found["stochastic"].mean() - reference) < 5 * sigma / np.sqrt(n)
    share = abs(reference) / distance % 1
    sigma = distance * np.sqrt(share * (1 - share))
    assert abs(found["stochastic masters"].mean() - reference) < 5 * sigma / np.sqrt(n) + float32


def digits_like():
    """Ten classes around centres in 32 dimensions."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((10, 32))
    labels = rng.integers(0, 10, 512)
    x = (centres[labels] + rng.standard_normal((512, 32))).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(labels)


def classifier_loss(params, x, labels):
    params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    logits = jnp.tanh(x @ params["w"]) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def fit(tx, dtype, steps=100):
    x, labels = digits_like()
    keys = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(keys[0], (32, 32)) / 4, "v": jax.random.normal(keys[1], (32, 10)) / 2}
    params = jax.tree.map(lambda p: p.astype(dtype), params)

    def step(carry, _):
        params, state = carry
        grads = jax.grad(classifier_loss)(params, x, labels)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda params: jax.lax.scan(step, (params, tx.init(params)), length=steps))
    (params, _), _ = run(params)
    return float(classifier_loss(params, x, labels))


@pytest.mark.once
def test_a_classifier_in_bfloat16_parameters_learns_again():
    tx = optax.adam(3e-4)
    reference, plain = fit(tx, jnp.float32), fit(tx, jnp.bfloat16)
    losses = {name: fit(method(tx), jnp.bfloat16) for name, method in METHODS.items()}
    assert max(losses.values()) < 1.01 * reference < 0.7 * plain, (reference, plain, losses)


EXTREMES = [0.0, -0.0, 1.0, -1.0, 1000.0, 65504.0, -65504.0, 1e-6, -1e-7, 2.0**-24, 6e-5, 3.0**-20]


@pytest.mark.slow
@halves
@settings(max_examples=100)
@given(
    st.one_of(st.sampled_from(EXTREMES), st.floats(-65504, 65504, width=32)),
    st.one_of(st.sampled_from(EXTREMES), st.floats(-65504, 65504, width=32)),
)
def test_applied_updates_give_the_rounded_masters(dtype, p, master):
    """Exactly, unless the parameter shrinks by a factor that float32 does not resolve."""
    p, master = np.float32(p), np.float32(master)
    p, master = (np.float32(0) if 0 < abs(x) < 2.0**-126 else x for x in (p, master))
    params = jnp.asarray(p).astype(dtype)
    tx = jmpp.master_weights(optax.stateless(lambda u, masters: u - masters))
    updates, state = tx.update(jnp.asarray(master), tx.init(params), params)
    old, reached = np.float32(params), np.asarray(state.masters)
    assert updates.dtype == jnp.float32
    new, want = np.float32(optax.apply_updates(params, updates)), numpy_rounded(reached, dtype)
    limit = {jnp.float16: 2.0**12, jnp.bfloat16: 2.0**15}[dtype]
    # Bfloat16's smallest numbers are subnormal in float32.
    if abs(want) * limit > abs(old) or want == 0 or old == 0:
        assert new == want
    else:
        assert abs(new - want) <= 2.0**-23 * abs(old)


def test_a_float32_sum_cannot_reach_every_master():
    """The bound above is needed: no float32 update takes 1000 to 1e-6."""
    p = np.float32(1000)
    nearest = [np.nextafter(-p, np.float32(way)) for way in (0, -np.inf)]
    assert min(abs(p + u) for u in nearest) > 1e-5
    assert p + -p == 0


@pytest.mark.once
@methods
@halves
def test_zero_updates_and_skipped_steps_change_no_bit(method, dtype):
    start = jnp.array([0.0, -0.0, 1.0, -1.5, 6e-8, -1e-5, 65504.0, 0.3, jnp.inf, -jnp.inf], dtype)
    grads = jnp.linspace(-1.0, 1.0, start.size)
    tx = method(jmpp.loss_scaled(optax.adam(1e-4), jmpp.DynamicLossScale(4.0)))
    state = tx.init(start)
    update = jax.jit(tx.update)
    params = start
    for _ in range(3):
        updates, state = update(4 * grads, state, params)
        params = optax.apply_updates(params, updates)
    for bad in (jnp.inf, jnp.nan):
        updates, after = update(grads.at[3].set(bad), state, params)
        assert jmpp.metrics(after)["skipped_steps"] == 1
        assert bits(optax.apply_updates(params, updates)) == bits(params)
        for name in ("masters", "compensation"):
            assert bits(getattr(after, name, None)) == bits(getattr(state, name, None))
    fresh = method(optax.sgd(0.0))
    updates, _ = jax.jit(fresh.update)(grads, fresh.init(start), start)
    assert bits(optax.apply_updates(start, updates)) == bits(start)


@pytest.mark.slow
@halves
def test_both_orders_of_loss_scaling_and_masters(dtype):
    scale = jmpp.DynamicLossScale(4.0)
    outside = jmpp.master_weights(jmpp.loss_scaled(optax.adamw(1e-3), scale))
    inside = jmpp.loss_scaled(jmpp.master_weights(optax.adamw(1e-3)), scale)
    start = {"w": jax.random.normal(jax.random.key(0), (64,)).astype(dtype), "b": jnp.zeros(3, dtype)}
    reference = jax.tree.map(lambda p: p.astype(jnp.float32), start)
    grads = jax.tree.map(lambda p: 4 * jnp.sin(7 * p), start)
    found = [train(tx, start, grads, 20) for tx in (outside, inside)]
    plain, _ = train(
        optax.adamw(1e-3), reference, jax.tree.map(lambda g: g.astype(jnp.float32) / 4, grads), 20
    )
    masters = [found[0][1].masters, found[1][1].inner_state.masters]
    for (params, _), tree in zip(found, masters, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), tree, plain)
        assert bits(params) == bits(jax.tree.map(lambda m: m.astype(dtype), tree))
    assert [int(jmpp.metrics(s)["steps"]) for _, s in found] == [20, 20]


@pytest.mark.parametrize("method", [STOCHASTIC_MASTERS, jmpp.stochastic_rounding, jmpp.kahan_summation])
def test_wrappers_that_need_the_dtype_say_so_inside_loss_scaled(method):
    tx = jmpp.loss_scaled(method(optax.sgd(1.0)), jmpp.NoOpLossScale())
    with pytest.raises(ValueError, match=r"sees no float16 or bfloat16 parameter, only float32.*outermost"):
        tx.init(jnp.ones(2, jnp.bfloat16))
    tx = method(optax.sgd(1.0))
    state = tx.init(jnp.ones(2, jnp.bfloat16))
    with pytest.raises(ValueError, match="only float32"):
        tx.update(jnp.ones(2), state, jnp.ones(2))


@pytest.mark.slow
@methods
def test_the_wrapped_transformation_sees_float32(method):
    seen = []

    def update(grads, state, params=None, **extra):
        seen.append((grads.dtype, params.dtype, extra["grad"].dtype))
        return grads.astype(jnp.bfloat16), state  # Half updates are taken too.

    tx = method(optax.GradientTransformationExtraArgs(lambda p: {"m": jnp.zeros_like(p)}, update))
    params = jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    assert state.inner_state["m"].dtype == jnp.float32
    updates, _ = tx.update(params, state, params, grad=params)
    assert updates.dtype == jnp.float32
    assert seen == [(jnp.float32,) * 3]
    assert optax.apply_updates(params, updates).tolist() == [2.0, 2.0]


@pytest.mark.slow
def test_the_wrapped_transformation_sees_more_than_the_parameter_holds():
    def decay(method):
        tx = method(optax.chain(optax.scale(0.0), optax.add_decayed_weights(2.0**-10)))
        return train(tx, jnp.ones(1, jnp.bfloat16), jnp.ones(1), 300)

    want = (1 + 2.0**-10) ** 300
    assert abs(decay(jmpp.master_weights)[1].masters[0] - want) < 1e-4
    assert abs(decay(jmpp.kahan_summation)[0][0] - want) < 2.0**-8 + 300 * 2.0**-17
    assert decay(lambda tx: tx)[0][0] == 1.0


def other_leaves(dtype=jnp.bfloat16):
    return {
        "half": jnp.ones(2, dtype),
        "single": jnp.ones(2),
        "none": None,
        "boxed": nn.Partitioned(jnp.ones((2, 2), dtype), names=("a", "b")),
        "complex": jnp.ones(2, jnp.complex64),
    }


@pytest.mark.slow
@methods
def test_other_leaves_and_boxes(method):
    params = other_leaves()
    tx = method(optax.sgd(2.0**-9))
    state = tx.init(params)
    after, state = train(tx, params, params, 4)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, params)
    for name in ("single", "complex"):
        np.testing.assert_array_equal(after[name], params[name] - 4 * 2.0**-9)
    if isinstance(state, jmpp.optim.MasterWeightsState):
        assert state.masters["boxed"].names == ("a", "b")
        np.testing.assert_array_equal(state.masters["boxed"].value, np.full((2, 2), 1 - 4 * 2.0**-9))
        assert state.masters["complex"] == optax.MaskedNode()
        assert state.masters["single"].dtype == jnp.float32
    integers = method(optax.stateless(lambda u, p: u))
    mixed = {"w": jnp.ones(2, jnp.float16), "n": jnp.arange(2)}
    updates, _ = integers.update({"w": jnp.ones(2), "n": jnp.arange(2)}, integers.init(mixed), mixed)
    assert updates["n"].tolist() == [0, 1]
    assert updates["w"].tolist() == [1.0, 1.0]


@pytest.mark.slow
@methods
@pytest.mark.parametrize("params", [{}, jnp.zeros((0,), jnp.float16), None, {"a": None}])
def test_trees_without_numbers(method, params):
    tx = method(optax.adam(0.1))
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.mark.slow
@methods
def test_scan_gives_what_single_steps_give(method):
    start, grads = jnp.linspace(0.5, 1.0, 8).astype(jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    tx = method(jmpp.loss_scaled(optax.adam(1e-3), jmpp.NoOpLossScale()))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    scanned, _ = jax.lax.scan(body, (start, tx.init(start)), length=10)
    single = train(tx, start, grads, 10)
    assert bits(scanned[0]) == bits(single[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), scanned[1], single[1])


@pytest.mark.slow
@methods
def test_vmap_over_an_ensemble(method):
    start = jnp.linspace(0.5, 2.0, 4 * 64).reshape(4, 64).astype(jnp.bfloat16)
    grads = jnp.ones_like(start)

    def run(params, grads, seed):
        maker = {} if method is jmpp.master_weights or method is jmpp.kahan_summation else {"seed": seed}
        tx = method(optax.sgd(1e-3), **maker)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    seeds = jnp.arange(4)
    many = jax.jit(jax.vmap(run))(start, grads, seeds)
    one = jax.jit(run)
    for i in range(4):
        assert bits(many[i]) == bits(one(start[i], grads[i], seeds[i]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2**70, 2**63, -(2**64)])
def test_seeds_that_no_key_takes(seed):
    for make in (jmpp.stochastic_rounding, functools.partial(jmpp.master_weights, stochastic_rounding=True)):
        with pytest.raises(ValueError, match="seed must be an integer of 64 bits"):
            make(optax.sgd(1.0), seed=seed)


@pytest.mark.once
def test_random_bits_differ_between_steps_leaves_and_seeds():
    params = {"a": jnp.ones(256, jnp.bfloat16), "b": jnp.ones(256, jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0**-10), params)

    def updates(seed=0, steps=1):
        tx = jmpp.stochastic_rounding(optax.sgd(1.0), seed=seed)
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(steps):
            found, state = update(grads, state, params)
        return found

    first = updates()
    assert bits(first) == bits(updates())
    assert bits(first["a"]) != bits(first["b"])
    assert bits(first) != bits(updates(seed=1))
    assert bits(first) != bits(updates(steps=2))
    assert bits(updates(seed=1)) == bits(updates(seed=np.int64(1)))


SPECS = {"w": P("d"), "v": P(None, "d"), "b": P()}
SHAPES = {"w": (64, 32), "v": (32, 64), "b": (24,)}


def placed(kind=AxisType.Auto):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    values = {n: np.full(s, 1.0, ml_dtypes.bfloat16) for n, s in SHAPES.items()}
    return jax.device_put(values, {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()})


@pytest.mark.slow
@methods
@pytest.mark.parametrize("jit_init", [False, True])
def test_sharded_parameters_keep_everything_where_it_is(method, jit_init):
    tx = method(jmpp.loss_scaled(optax.sgd(1e-3), jmpp.NoOpLossScale()))
    params = placed()
    local = jax.tree.map(lambda p: jnp.array(np.asarray(p)), params)
    state = (jax.jit(tx.init) if jit_init else tx.init)(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    alone, alone_state = step(local, tx.init(local), local)
    text = step.lower(params, state, params).compile().as_text()
    assert not re.search(r" (all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(", text)
    new, after = step(params, state, params)
    assert bits(new) == bits(alone)
    kept = [
        getattr(s, name) for s in (state, after) for name in ("masters", "compensation") if hasattr(s, name)
    ]
    for tree in [new, *kept]:
        for name, leaf in tree.items():
            assert leaf.sharding.is_equivalent_to(params[name].sharding, leaf.ndim), name
    assert bits(after) == bits(alone_state)


@pytest.mark.slow
@methods
def test_explicit_sharding_and_shard_map(method):
    tx = method(optax.sgd(1e-3))
    local = jax.tree.map(lambda p: jnp.array(np.asarray(p)), placed())

    def step(params):
        updates, state = tx.update(params, tx.init(params), params)
        return optax.apply_updates(params, updates), state

    alone, _ = jax.jit(step)(local)
    explicit = placed(AxisType.Explicit)
    with jax.set_mesh(explicit["w"].sharding.mesh):
        new, state = jax.jit(step)(explicit)
        for name, leaf in (getattr(state, "masters", None) or new).items():
            assert leaf.sharding.is_equivalent_to(explicit[name].sharding, leaf.ndim)
    assert bits(new) == bits(alone)
    mesh = placed()["w"].sharding.mesh
    mapped = jax.jit(jax.shard_map(lambda p: step(p)[0], mesh=mesh, in_specs=(SPECS,), out_specs=SPECS))
    new = mapped(placed())
    distance = 2.0**-8
    for name in SHAPES:  # Parameters that all devices hold stay the same on all: shard_map checks it.
        assert (np.abs(np.asarray(new[name], np.float32) - 1) <= distance).all()


AROUND = {
    "chain": lambda method: optax.chain(optax.clip_by_global_norm(1e3), method(optax.adam(1e-3))),
    "masked": lambda method: optax.masked(method(optax.adam(1e-3)), {"a": True, "b": True}),
    "multi_transform": lambda method: optax.multi_transform(
        {"x": method(optax.adam(1e-3)), "y": method(optax.sgd(1e-3))}, {"a": "x", "b": "y"}
    ),
    "inject_hyperparams": lambda method: optax.inject_hyperparams(lambda rate: method(optax.adam(rate)))(
        1e-3
    ),
    "MultiSteps": lambda method: optax.MultiSteps(method(optax.adam(1e-3)), 2).gradient_transformation(),
    "inside: chain": lambda method: method(optax.chain(optax.trace(0.9), optax.scale(-1e-3))),
    "inside: masked": lambda method: method(optax.masked(optax.adam(1e-3), {"a": True, "b": False})),
    "inside: multi_transform": lambda method: method(
        optax.multi_transform({"x": optax.adam(1e-3), "y": optax.sgd(1e-3)}, {"a": "x", "b": "y"})
    ),
    "inside: inject_hyperparams": lambda method: method(optax.inject_hyperparams(optax.adamw)(1e-3)),
    "inside: MultiSteps": lambda method: method(optax.MultiSteps(optax.adam(1e-3), 2)),
    "inside: lbfgs": lambda method: method(optax.lbfgs(1e-3, linesearch=None)),
    "inside: adafactor": lambda method: method(optax.adafactor(1e-3)),
    "inside: schedule_free": lambda method: method(optax.contrib.schedule_free_adamw(1e-3)),
}


@functools.cache
def reference_of(name):
    start = {"a": jnp.full((4, 4), 0.75, jnp.float32), "b": jnp.full(3, -0.75, jnp.float32)}
    return train(AROUND[name](lambda tx: jmpp.loss_scaled(tx, jmpp.NoOpLossScale())), start, start, 6)[0]


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "method"),
    [(name, jmpp.master_weights) for name in AROUND]
    + [
        (name, m)
        for name in ("masked", "inside: adafactor")
        for m in (jmpp.kahan_summation, jmpp.stochastic_rounding)
    ],
)
def test_among_other_transformations(name, method):
    """As the same transformation on float32 parameters, to within what the parameters hold."""
    reference = reference_of(name)
    start = {"a": jnp.full((4, 4), 0.75, jnp.bfloat16), "b": jnp.full(3, -0.75, jnp.bfloat16)}
    found, _ = train(AROUND[name](method), start, jax.tree.map(lambda p: p.astype(jnp.float32), start), 6)
    distance = 2.0**-8  # Between the numbers from 0.5 to 1.
    bound = 6 * distance if method is jmpp.stochastic_rounding else 0.51 * distance
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.abs(np.asarray(a, np.float32) - b).max() <= bound


@pytest.mark.slow
@pytest.mark.parametrize("method", [jmpp.master_weights, jmpp.kahan_summation])
def test_the_loss_scale_is_found(method):
    tx = optax.chain(optax.identity(), method(jmpp.loss_scaled(optax.adam(1e-3), jmpp.DynamicLossScale(8.0))))
    params = jnp.ones(3, jnp.float16)
    state = tx.init(params)
    assert float(jmpp.optim.get_loss_scale_state(state).loss_scale.loss_scale) == 8.0
    loss, grads = jmpp.scaled_value_and_grad(lambda p: p.astype(jnp.float32).sum())(state, params)
    assert (float(loss), grads.tolist()) == (3.0, [8.0] * 3)
    _, state = jax.jit(tx.update)(grads, state, params)
    assert bool(jmpp.grads_finite(state))


@pytest.mark.slow
@methods
def test_nnx_optimizer(method):
    model = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    before = np.asarray(model.kernel[...], np.float32)
    tx = method(jmpp.loss_scaled(optax.sgd(1e-4), jmpp.DynamicLossScale(4.0)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return model(x).astype(jnp.float32).sum()

        _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model)
        optimizer.update(model, grads)

    for _ in range(50):
        step(model, optimizer, jnp.ones((2, 4), jnp.bfloat16))
    assert model.kernel[...].dtype == jnp.bfloat16
    assert jmpp.metrics(optimizer.opt_state)["steps"] == 50
    moved = np.asarray(model.kernel[...], np.float32) - before
    assert abs(moved.mean() - -50 * 2e-4) < 3e-3


@pytest.mark.slow
@methods
def test_train_state_and_serialization(method):
    params = {"w": jnp.ones(64, jnp.float16)}
    tx = method(jmpp.loss_scaled(optax.sgd(1e-5), jmpp.NoOpLossScale()))
    state = TrainState.create(apply_fn=lambda: None, params=params, tx=tx)
    step = jax.jit(lambda s: s.apply_gradients(grads={"w": jnp.full(64, -1.0, jnp.float16)}))
    for _ in range(200):
        state = step(state)
    moved = np.asarray(state.params["w"], np.float32).mean() - 1
    assert abs(moved - 2e-3) < 2.0**-10
    restored = flax.serialization.from_bytes(
        jax.tree.map(jnp.zeros_like, state), flax.serialization.to_bytes(state)
    )
    assert bits(restored) == bits(state)
    assert bits(step(restored)) == bits(step(state))


@pytest.mark.slow
@halves
@pytest.mark.parametrize("order", ["outside", "inside"])
def test_masters_follow_parameters_that_were_changed(dtype, order):
    tx = jmpp.master_weights(optax.sgd(1.0))
    if order == "inside":
        tx = jmpp.loss_scaled(tx, jmpp.NoOpLossScale())
    start = jnp.array([1.0, -2.0, 3.0, 0.1], dtype)
    grads = jnp.full(4, 1e-5)
    params, state = train(tx, start, grads, 3)
    changed = params.at[1].set(5.0)
    updates, after = jax.jit(tx.update)(grads, state, changed)
    masters, old = (getattr(s, "masters", None) for s in (after, state))
    if order == "inside":
        masters, old = after.inner_state.masters, state.inner_state.masters
    np.testing.assert_array_equal(masters, old.at[1].set(5.0) - grads)
    assert optax.apply_updates(changed, updates).tolist() == masters.astype(dtype).tolist()


@pytest.mark.slow
def test_stochastically_rounded_masters_take_either_neighbour_for_their_parameter():
    tx = STOCHASTIC_MASTERS(optax.sgd(1.0))
    params = jnp.ones(256, jnp.bfloat16)
    params, state = train(tx, params, jnp.full(256, -1e-3), 1)
    assert len(set(params.tolist())) == 2
    update = jax.jit(tx.update)
    _, after = update(jnp.zeros(256), state, params)
    assert bits(after.masters) == bits(state.masters)
    _, after = update(jnp.zeros(256), state, params.at[0].set(2.0))
    assert after.masters[0] == 2.0


@pytest.mark.once
def test_a_compensation_of_half_the_distance_does_not_move_the_parameter_by_itself():
    tx = jmpp.kahan_summation(optax.sgd(1.0))
    params = jnp.float16(1 + 2.0**-10)  # Odd: half way, rounding to even leaves it.
    state = tx.init(params)._replace(compensation=jnp.float16(2.0**-11 * 2.0**11))
    updates, after = tx.update(jnp.float16(0.0), state, params)
    assert bits(optax.apply_updates(params, updates)) == bits(params)
    assert after.compensation == 1.0
    updates, after = tx.update(jnp.float16(-(2.0**-20)), state, params)
    assert optax.apply_updates(params, updates) == 1 + 2.0**-9
    assert after.compensation == (2.0**-20 - 2.0**-11) * 2.0**11


@pytest.mark.once
def test_a_compensation_of_another_parameter_is_dropped():
    tx = jmpp.kahan_summation(optax.sgd(1.0))
    params, state = train(tx, jnp.full(2, 256.0, jnp.float16), jnp.full(2, 0.05), 1)
    assert params.tolist() == [256.0, 256.0]
    updates, _ = tx.update(jnp.full(2, 2.0**-13), state, jnp.array([256.0, 2.0**-10], jnp.float16))
    new = optax.apply_updates(jnp.array([256.0, 2.0**-10], jnp.float16), updates)
    assert new.tolist() == [256.0, 2.0**-10 - 2.0**-13]


@pytest.mark.slow
@halves
def test_overflow_and_non_finite_updates(dtype):
    largest = float(jnp.finfo(dtype).max)
    params = jnp.array([largest, -largest, 1.0, 1.0, 1.0], dtype)
    change = jnp.array([largest * 2.0**-13, -largest * 2.0**-5, jnp.nan, jnp.inf, -jnp.inf])
    for method in METHODS.values():
        tx = method(optax.stateless(lambda u, p: u))
        updates, state = jax.jit(tx.update)(change, tx.init(params), params)
        new = np.asarray(optax.apply_updates(params, updates), np.float32)
        np.testing.assert_array_equal(new, [largest, -np.inf, np.nan, np.inf, -np.inf])
        kept = getattr(state, "compensation", jnp.zeros(5, dtype))
        assert np.isfinite(np.asarray(kept, np.float32)[[0, 1, 3, 4]]).all()


@pytest.mark.slow
def test_states_are_donated_with_parameters_they_were_made_from():
    params = {"w": jnp.ones(4), "h": jnp.ones(4, jnp.float16)}
    for method in METHODS.values():
        train(method(optax.lbfgs(0.1, linesearch=None)), params, params, 2)


@pytest.mark.parametrize("name", ["master_weights", "stochastic_rounding", "kahan_summation"])
def test_errors(name):
    method = getattr(jmpp, name)
    with pytest.raises(TypeError, match=rf"{name} wraps an optax transformation.*forget to call it"):
        method(optax.adam)
    with pytest.raises(TypeError, match=rf"{name} wraps an optax transformation.*got 0\.1\.$"):
        method(0.1)
    tx = method(optax.adam(0.1))
    params = jnp.ones(2, jnp.float16)
    state = tx.init(params)
    with pytest.raises(ValueError, match=rf"{name} needs the parameters.*update\(grads, state, params\)"):
        tx.update(params, state)
    with pytest.raises(TypeError, match=f"{name} got the state of another transformation.*own init"):
        tx.update(params, optax.adam(0.1).init(params), params)
    if name != "kahan_summation":
        for seed in (True, 0.5, "one", jnp.arange(2), None):
            with pytest.raises(TypeError, match="seed must be an integer, got"):
                method(optax.adam(0.1), seed=seed)


def test_stochastic_rounding_of_masters_is_a_yes_or_no():
    with pytest.raises(TypeError, match="stochastic_rounding must be True or False, got 1"):
        jmpp.master_weights(optax.adam(0.1), stochastic_rounding=1)
