"""Programs written for DeepMind's jmp run on `jmp_policy.compat.jmp`, and what jmp gets wrong is right."""

import dataclasses
import functools
import importlib
import itertools
import pickle

import flax.linen as nn
import flax.serialization
import haiku as hk
import jax
import jax.numpy as jnp
import jmp as deepmind
import numpy as np
import optax
import pytest
from helpers import paired

import jmp_policy as jmpp
from jmp_policy.compat import jmp as jmp_names

HALVES = (jnp.float16, jnp.bfloat16)


def test_both_ways_to_import_give_the_names_of_jmp_and_no_others():
    assert importlib.import_module("jmp_policy.compat.jmp") is jmp_names
    assert set(jmp_names.__all__) == set(deepmind.__all__)
    assert all(hasattr(jmp_names, name) for name in jmp_names.__all__)


# ---- Policies: what jmp's documentation shows, and the answers of jmp itself.


def test_documented_policy():
    policy = jmp_names.Policy(compute_dtype=jnp.float16, param_dtype=jnp.float32, output_dtype=jnp.float16)

    def layer(params, x):
        params, x = policy.cast_to_compute((params, x))
        return policy.cast_to_output(x @ params["w"] + params["b"])

    params = {"w": jnp.ones((3, 2), policy.param_dtype), "b": jnp.zeros(2, dtype=policy.param_dtype)}
    assert params["w"].dtype == jnp.float32
    assert layer(params, jnp.ones((1, 3))).dtype == jnp.float16
    assert policy.cast_to_param(layer(params, jnp.ones((1, 3)))).dtype == jnp.float32
    policy = policy.with_output_dtype(jnp.float32)
    assert layer(params, jnp.ones((1, 3))).dtype == jnp.float32
    assert jmp_names.Policy(jnp.float32, jnp.float16, jnp.float32) == policy


WORDS = ("f16", "float16", "bf16", "bfloat16", "full", "f32", "float32", "f64", "float64", "half")
TEXTS = [
    *WORDS,
    *(f"c={word}" for word in WORDS),
    *(
        f"params={a},compute={b},output={c}"
        for a, b, c in itertools.product(("f32", "half", "bf16"), repeat=3)
    ),
    "o=f32,c=f16",
    "p=f16,c=bf16",
    "output=half",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_mean_what_they_mean_in_jmp(text):
    ours, theirs = jmp_names.get_policy(text), deepmind.get_policy(text)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == np.dtype(getattr(theirs, field))
    # Each library reads what the other writes.
    assert jmp_names.get_policy(str(theirs)) == ours
    assert deepmind.get_policy(str(ours)) == theirs


@pytest.mark.parametrize("text", ["", "f61", "c=f61", "x=f16", "c=f16,", "c"])
def test_what_jmp_refuses_is_refused(text):
    with pytest.raises(ValueError, match="Unknown|not enough"):
        deepmind.get_policy(text)
    with pytest.raises(ValueError, match="Unknown"):
        jmp_names.get_policy(text)


def test_a_half_is_jmps_half_and_not_this_librarys():
    assert jmp_names.half_dtype() is deepmind.half_dtype() is jnp.float16
    assert jmpp.best_half_dtype() == jnp.bfloat16
    assert str(jmp_names.get_policy("p=f32, c=HALF")) == "params=float32,compute=float16,output=float16"
    assert jmp_names.get_policy("mixed_half").compute_dtype == jnp.float16
    with pytest.raises(TypeError, match="got None"):
        jmp_names.get_policy(None)


def test_policies_that_jmp_cannot_print_or_parse():
    policy = jmp_names.Policy(jnp.dtype("bfloat16"), "float32", np.float32)
    with pytest.raises(KeyError, match="bfloat16"):
        str(deepmind.Policy(jnp.dtype("bfloat16"), jnp.float32, jnp.float32))
    assert jmp_names.get_policy(str(policy)) == policy
    assert jmp_names.get_policy("p=f32, c=f16") == jmp_names.get_policy("p=f32,c=f16")


MIXED = {
    "f32": jnp.ones(2), "f16": jnp.ones(2, jnp.float16), "numpy": np.ones(2, np.float32),
    "int": jnp.arange(2), "bool": jnp.array(True), "complex": jnp.ones(2, jnp.complex64),
    "python": 1.5, "none": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ["cast_to_half", "cast_to_full"])
def test_casts_give_what_jmps_give(name):
    ours, theirs = getattr(jmp_names, name)(MIXED), getattr(deepmind, name)(MIXED)
    assert jax.tree.map(jnp.result_type, ours) == jax.tree.map(jnp.result_type, theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    policy = {"cast_to_half": jmp_names.get_policy("half"), "cast_to_full": jmp_names.get_policy("full")}[
        name
    ]
    jax.tree.map(np.testing.assert_array_equal, policy.cast_to_compute(MIXED), ours)


def test_haiku_modules_take_the_policies():
    class Layer(hk.Linear):
        pass

    policy = jmp_names.get_policy("params=float32,compute=half,output=full")
    hk.mixed_precision.set_policy(Layer, policy)
    try:
        net = hk.without_apply_rng(hk.transform(lambda x: Layer(4)(x)))
        params = net.init(jax.random.key(0), jnp.ones((2, 3)))
        assert params["layer"]["w"].dtype == jnp.float32
        assert net.apply(params, jnp.ones((2, 3))).dtype == jnp.float32
        assert "f16[2,4] = dot_general" in str(jax.make_jaxpr(net.apply)(params, jnp.ones((2, 3))))
    finally:
        hk.mixed_precision.clear_policy(Layer)


def test_policies_are_this_librarys():
    model = jmpp.wrap(nn.Dense(2), jmp_names.get_policy("p=f32,c=half,o=half"))
    out, variables = model.init_with_output(jax.random.key(0), jnp.ones((2, 3)))
    assert (out.dtype, variables["params"]["kernel"].dtype) == (jnp.float16, jnp.float32)


# ---- Loss scaling as jmp's documentation has it: a training step that is the same for all loss scales.


def data():
    x = jax.random.normal(jax.random.key(0), (64, 4))
    return x, x @ jnp.array([1.0, -2.0, 0.5, 3.0])


def make_step(policy):
    def loss_fn(params, loss_scale: jmp_names.LossScale, x, y):
        params, x, y = policy.cast_to_compute((params, x, y))
        error = policy.cast_to_output(x @ params["w"] - y)
        return loss_scale.scale(jnp.mean(error**2))

    def optimizer(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    def step(params, loss_scale: jmp_names.LossScale, x, y):
        grads = loss_scale.unscale(jax.grad(loss_fn)(params, loss_scale, x, y))
        if not isinstance(loss_scale, jmp_names.DynamicLossScale):
            return optimizer(params, grads), loss_scale
        grads_finite = jmp_names.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        return jmp_names.select_tree(grads_finite, optimizer(params, grads), params), loss_scale

    return step


LOSS_SCALES = {
    "none": lambda: jmp_names.NoOpLossScale(),
    "static": lambda: jmp_names.StaticLossScale(2**6),
    "static half": lambda: jmp_names.StaticLossScale(jmp_names.half_dtype()(2**6)),
    "dynamic": lambda: jmp_names.DynamicLossScale(jmp_names.half_dtype()(2**15)),
    "dynamic array": lambda: jmp_names.DynamicLossScale(jnp.asarray(2.0**15)),
    "dynamic integer": lambda: jmp_names.DynamicLossScale(2**15, period=5),
}


# Not: float32 gradients of float16 parameters, from a dynamic scale that is no float16 number. The optimizer
# of this step promotes, and select_tree refuses two types; in jmp, too.
TRAINING = [
    (name, text)
    for name in LOSS_SCALES
    for text in ("full", "params=float32,compute=half,output=float32", "c=half", "half")
    if text != "half" or name not in ("dynamic array", "dynamic integer")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), TRAINING)
def test_documented_training(name, text):
    policy, loss_scale = jmp_names.get_policy(text), LOSS_SCALES[name]()
    traces = []

    @jax.jit
    def step(*args):
        traces.append(args)
        return make_step(policy)(*args)

    params, batch = {"w": jnp.zeros(4, policy.param_dtype)}, data()
    for _ in range(60):
        params, loss_scale = step(params, loss_scale, *batch)
    assert len(traces) == 1
    assert params["w"].dtype == policy.param_dtype
    np.testing.assert_allclose(params["w"].astype(jnp.float32), [1.0, -2.0, 0.5, 3.0], rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "half"),
    paired(
        [64, 64.0, jnp.float32(64), jnp.float16(64), jnp.bfloat16(64), np.float64(64), 64.0], [False, True]
    ),
)
def test_static_scaling_gives_jmps_values_and_types(scale, half):
    tree = {"f32": jnp.array([3.0, -0.5]), "f64": np.ones(2), "f16": jnp.ones(2, jnp.float16)}
    tree |= {"bf16": jnp.full(2, 0.25, jnp.bfloat16), "complex": jnp.array(1 - 2j), "none": None}
    if half:
        tree = jmp_names.cast_to_half(tree)
    ours, theirs = jmp_names.StaticLossScale(scale), deepmind.StaticLossScale(scale)
    for method in ("scale", "unscale"):
        a, b = getattr(ours, method)(tree), getattr(theirs, method)(tree)
        jax.tree.map(np.testing.assert_array_equal, a, b)
        dtypes = [jax.tree.map(lambda x: jax.dtypes.canonicalize_dtype(x.dtype), t) for t in (a, b)]
        assert dtypes[0] == dtypes[1]
    assert float(ours.loss_scale) == 64
    assert ours.adjust(jnp.array(False)) is ours


def test_a_typed_integer_widens_both_ways():
    """jmp multiplies by it in half, and divides in float32."""
    for scale, half in itertools.product((np.int32(64), jnp.int32(64)), HALVES):
        ours, x = jmp_names.StaticLossScale(scale), jnp.ones(2, half)
        assert (
            ours.scale(x).dtype == ours.unscale(x).dtype == deepmind.StaticLossScale(scale).unscale(x).dtype
        )


def test_documented_no_op():
    scale, loss, grads = jmp_names.NoOpLossScale(), jnp.float16(3), {"w": jnp.ones(2, jnp.bfloat16)}
    assert loss is scale.scale(loss)
    assert grads is scale.unscale(grads)
    assert scale is scale.adjust(jnp.array(True))
    assert scale.loss_scale == 1


SEQUENCES = {
    "growth": [True] * 12,
    "floor": [False] * 12,
    "counter": [True, True, False, True, True, True, False, False, True, True, True, True, True],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("period", "factor", "min_loss_scale"), [(1, 2, 1.0), (3, 2, 8.0), (4, 1.5, 1.0), (3, 4, 8.0)]
)
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_dynamic_states_are_jmps(sequence, period, factor, min_loss_scale):
    config = {"period": period, "factor": factor, "min_loss_scale": np.float32(min_loss_scale)}
    ours = jmp_names.DynamicLossScale(jnp.float32(64), **config)
    theirs = deepmind.DynamicLossScale(jnp.float32(64), **config)
    for finite in SEQUENCES[sequence]:
        ours, theirs = ours.adjust(jnp.array(finite)), theirs.adjust(jnp.array(finite))
        assert (float(ours.loss_scale), int(ours.counter)) == (float(theirs.loss_scale), int(theirs.counter))


def test_the_fields_and_their_order_are_jmps():
    ours = jmp_names.DynamicLossScale(jnp.float32(4), np.int32(2), 3, 4, jnp.float32(2))
    fields = [f.name for f in dataclasses.fields(deepmind.DynamicLossScale)]
    defaults = [
        [getattr(library.DynamicLossScale(1.0), f) for f in fields] for library in (jmp_names, deepmind)
    ]
    assert defaults[0] == defaults[1] == [1, 0, 2000, 2, 1]
    assert [float(x) for x in jax.tree.leaves(ours)] == [4.0, 2.0]
    assert (ours.period, ours.factor, ours.min_loss_scale) == (3, 4, 2)
    grown = ours.adjust(jnp.array(True))
    assert (float(grown.loss_scale), int(grown.counter)) == (16.0, 0)
    other = dataclasses.replace(ours, loss_scale=jnp.float32(32))
    assert (float(other.loss_scale), int(other.counter), other.period) == (32.0, 2, 3)


@pytest.mark.parametrize(
    "scale", [2**15, 2.0**15, jnp.float16(2**15), jnp.bfloat16(2**15), jnp.asarray(2.0**15)]
)
def test_dynamic_scales_keep_their_types_where_jmps_change_or_raise(scale):
    state, traces = jmp_names.DynamicLossScale(scale, period=2), []

    @jax.jit
    def step(state, grads):
        traces.append(state)
        return state.adjust(jmp_names.all_finite(grads)), state.unscale(grads)

    values = []
    for _ in range(5):
        state, grads = step(state, jnp.ones(2, jnp.float16))
        values.append((float(state.loss_scale), grads.dtype))
    assert len(traces) == 1
    own = jnp.float16 if getattr(scale, "dtype", None) == jnp.float16 else jnp.float32
    assert values == [(s, own) for s in (2.0**15, 2.0**16, 2.0**16, 2.0**17, 2.0**17)]
    assert state.loss_scale.dtype == jnp.float32


def test_small_gradients_survive():
    """2**-10 in float16 over 2**24 is no float16 number: a scale with a float32 type does not flush it."""
    grads = jnp.full(2, 2.0**-10, jnp.float16)
    for scale in (jmp_names.DynamicLossScale(2.0**24), jmp_names.StaticLossScale(jnp.float32(2.0**24))):
        np.testing.assert_array_equal(scale.unscale(grads), np.full(2, 2.0**-34, np.float32))


STATES = {
    "none": jmp_names.NoOpLossScale(),
    "static": jmp_names.StaticLossScale(jnp.float16(8)),
    "dynamic": jmp_names.DynamicLossScale(16.0, period=3, min_loss_scale=4.0).adjust(True),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize(
    "there_and_back",
    [
        lambda s: jax.tree.map(lambda x: x, s),
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: flax.serialization.from_bytes(s, flax.serialization.to_bytes(s)),
        jax.jit(lambda s: s),
        lambda s: jax.lax.scan(lambda c, _: (c, None), s, length=2)[0],
    ],
    ids=["tree", "pickle", "flax", "jit", "scan"],
)
def test_states_survive(name, there_and_back):
    before = STATES[name]
    after = there_and_back(before)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert repr(after) == repr(before)
    low = functools.reduce(lambda s, _: s.adjust(jnp.array(False)), range(6), after)
    assert float(low.loss_scale) == {"none": 1, "static": 8, "dynamic": 4}[name]


@pytest.mark.parametrize("name", STATES)
def test_states_can_be_lowered_and_mapped(name):
    state = STATES[name]
    jax.jit(lambda s: s.adjust(jnp.array(True))).lower(jax.eval_shape(lambda: state))
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), state)
    assert all(spec == jax.sharding.PartitionSpec() for spec in jax.tree.leaves(specs))


def test_vmapped_scales():
    scales = jax.vmap(lambda s: jmp_names.DynamicLossScale(s, period=1))(jnp.array([4.0, 1.0]))
    after = jax.vmap(lambda s, f: s.adjust(f))(scales, jnp.array([True, False]))
    assert after.loss_scale.tolist() == [8.0, 1.0]


def test_scales_stay_numbers():
    scale = jmp_names.DynamicLossScale(2.0**125, period=1, min_loss_scale=0.0)
    high = functools.reduce(lambda s, _: s.adjust(True), range(9), scale)
    low = functools.reduce(lambda s, _: s.adjust(False), range(300), scale)
    assert (float(high.loss_scale), float(low.loss_scale)) == (2.0**126, 2.0**-126)
    assert float(high.unscale(high.scale(jnp.float32(1)))) == 1.0


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: jmp_names.StaticLossScale(0), "loss_scale"),
        (lambda: jmp_names.DynamicLossScale(jnp.inf), "loss_scale"),
        (lambda: jmp_names.DynamicLossScale(jnp.ones(2)), "scalar"),
        (lambda: jmp_names.DynamicLossScale(1.0, period=0), "period"),
        (lambda: jmp_names.DynamicLossScale(1.0, factor=0), "factor"),
        (lambda: jmp_names.DynamicLossScale(1.0, min_loss_scale=np.nan), "min_loss_scale"),
    ],
)
def test_what_cannot_work_is_refused(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_integers_keys_and_the_rest_are_not_scaled():
    scale = jmp_names.StaticLossScale(8.0)
    tree = {"int": jnp.int32(3), "key": jax.random.key(0), "bool": np.True_, "text": "a"}
    for result in (scale.scale(tree), scale.unscale(tree)):
        assert all(result[name] is tree[name] for name in tree)


# ---- all_finite and select_tree.

TREES = [
    [],
    {"a": 3, "b": jnp.arange(3), "c": 1.0},
    {"a": jnp.ones(3, jnp.float16), "b": jnp.array([1.0, jnp.inf])},
    {"a": jnp.array(jnp.nan, jnp.bfloat16)},
    {"a": float("inf")},
    {"a": jnp.array(1 + 1j * jnp.nan)},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda t: ",".join(t) or "empty")
def test_all_finite_answers_as_jmp(tree):
    ours = jmp_names.all_finite(tree)
    assert (ours.shape, ours.dtype) == ((), jnp.bool_)
    assert bool(ours) == bool(deepmind.all_finite(tree))


PAIRS = {
    "arrays": (jnp.ones(2), jnp.zeros(2)),
    "python floats": (1.0, 2.0),
    "python integers": (3, 2),
    "python and array": (3.0, jnp.float32(2)),
    "numpy and array": (np.ones(2), jnp.zeros(2)),
    "numpy float64": (np.ones(2), np.zeros(2)),
    "booleans": (True, False),
    "keys": (jax.random.key(0), jax.random.key(1)),
    "nothing": (None, None),
    "tree": ({"a": (1, jnp.ones(2))}, {"a": (2, jnp.zeros(2))}),
}


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_select_tree_selects_as_jmp(name, pred):
    a, b = PAIRS[name]
    ours, theirs = (library.select_tree(jnp.array(pred), a, b) for library in (jmp_names, deepmind))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert x.dtype == y.dtype
        assert bool((x == y).all())


def test_select_tree_beyond_jmp():
    none = np.zeros(2, jax.dtypes.float0)
    assert jmp_names.select_tree(True, none, none) is none
    with pytest.raises(TypeError, match="boolean scalar"):
        jmp_names.select_tree(jnp.ones(2, jnp.bool_), jnp.ones(2), jnp.zeros(2))


# ---- Moving on piece by piece.


@pytest.mark.parametrize(
    "scale", [jmp_names.DynamicLossScale(2.0**15, period=2), jmp_names.StaticLossScale(jnp.float32(8))]
)
def test_scales_serve_this_librarys_training(scale):
    assert isinstance(scale, jmp_names.LossScale)
    assert isinstance(scale, jmpp.LossScale)
    tx = jmpp.loss_scaled(optax.sgd(0.1), scale)
    params = jnp.array([3.0])
    state = tx.init(params)
    for _ in range(2):
        _, grads = jmpp.scaled_value_and_grad(lambda w: jnp.sum(w**2))(state, params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, [3.0 * 0.8**2], rtol=1e-6)
    after = float(jmpp.metrics(state)["loss_scale"])
    assert after == float(scale.loss_scale) * (2 if isinstance(scale, jmp_names.DynamicLossScale) else 1)


@pytest.mark.parametrize("several", [False, True])
def test_in_loss_scaled_the_optimizer_gets_float32_whatever_the_scale_hands_on(several):
    scale = jmp_names.NoOpLossScale()
    grads = {"w": jnp.ones(3, jnp.float16)}
    assert scale.unscale(grads)["w"].dtype == jnp.float16

    def keep(updates, state, params=None):
        return updates, {"seen": updates}

    inner = optax.GradientTransformation(lambda params: {"seen": jmpp.NoOpLossScale().unscale(params)}, keep)
    tx = jmpp.loss_scaled(inner, {"a": scale} if several else scale)
    state = tx.init(grads)
    _, state = tx.update({"a": grads} if several else grads, state, grads)
    assert state.inner_state["seen"]["w"].dtype == jnp.float32
