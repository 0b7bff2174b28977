"""`all_finite` and `select_tree`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

DTYPES = ["float16", "bfloat16", "float32", "complex64", "float8_e5m2"]


@pytest.mark.once
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5)), max_size=6),
    st.integers(0, 40),
    st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_finds_a_single_bad_element(leaves, where, bad):
    arrays = [np.ones(size, np.float32) for _, size in leaves]
    flat = [(i, j) for i, a in enumerate(arrays) for j in range(a.size)]
    assert bool(jmpp.all_finite([jnp.asarray(a).astype(d) for a, (d, _) in zip(arrays, leaves, strict=True)]))
    if flat:
        i, j = flat[where % len(flat)]
        arrays[i][j] = bad
        tree = [jnp.asarray(a).astype(d) for a, (d, _) in zip(arrays, leaves, strict=True)]
        assert not bool(jmpp.all_finite(tree))


@pytest.mark.parametrize(
    "tree",
    [
        {},
        None,
        [],
        jnp.zeros((0, 3)),
        {"i": jnp.arange(3), "b": jnp.array(True), "key": jax.random.key(0), "t": "x", "p": 3},
        np.zeros(3, jax.dtypes.float0),
        jnp.finfo(jnp.float16).max * jnp.ones(3, jnp.float16),
        1.5,
    ],
)
def test_finite_trees(tree):
    finite = jmpp.all_finite(tree)
    assert bool(finite)
    assert finite.shape == ()
    assert finite.dtype == jnp.bool_
    assert not bool(jmpp.all_finite([tree, jnp.float32(jnp.inf)]))
    assert not bool(jmpp.all_finite([tree, float("nan")]))
    assert not bool(jmpp.all_finite([tree, jnp.array(complex(0, jnp.inf))]))


@pytest.mark.slow
def test_axis_name():
    bad = jnp.array([[1.0], [jnp.nan], [1.0]])
    one = jax.vmap(lambda x: jmpp.all_finite(x))(bad)
    agreed = jax.vmap(lambda x: jmpp.all_finite(x, axis_name="i"), axis_name="i")(bad)
    assert one.tolist() == [True, False, True]
    assert agreed.tolist() == [False, False, False]
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x: jmpp.all_finite(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    assert not bool(mapped(bad))


def test_symbolic_shapes():
    (batch,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 3), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: jmpp.all_finite([x, x * 2])))(shape)
    assert bool(exported.call(jnp.ones((4, 3))))
    assert not bool(exported.call(jnp.full((4, 3), jnp.nan)))


def test_vmap_grad_and_jit_of_all_finite():
    assert jax.vmap(jmpp.all_finite)(jnp.array([[1.0, 2.0], [jnp.inf, 0.0]])).tolist() == [True, False]

    def loss(x):
        return jnp.where(jmpp.all_finite({"a": x, "b": x * 2}), jnp.sum(x), 0.0)

    assert jax.jit(jax.grad(loss))(jnp.ones(2)).tolist() == [1.0, 1.0]


def test_select_tree():
    key = jax.random.key(0)
    new = {"a": jnp.ones(2, jnp.float16), "n": jnp.int32(3), "k": jax.random.key(1), "s": "x", "none": None}
    old = {"a": jnp.zeros(2, jnp.float16), "n": jnp.int32(2), "k": key, "s": "x", "none": None}
    for pred in (True, jnp.array(True), np.array(True)):
        got = jmpp.select_tree(pred, new, old)
        assert got["a"].tolist() == [1, 1]
        assert got["a"].dtype == jnp.float16
    got = jmpp.select_tree(jnp.array(False), new, old)
    assert int(got["n"]) == 2
    assert bool((jax.random.key_data(got["k"]) == jax.random.key_data(key)).all())
    assert got["s"] == "x"


def test_select_tree_is_bit_exact():
    old = {"x": jnp.array([-0.0, jnp.nan, 1e-45])}
    new = {"x": jnp.ones(3)}
    got = jmpp.select_tree(jnp.array(False), new, old)
    assert np.asarray(got["x"]).tobytes() == np.asarray(old["x"]).tobytes()


@pytest.mark.parametrize(
    ("pred", "new", "old", "error", "message"),
    [
        (jnp.ones(2, bool), 1, 1, TypeError, r"boolean scalar .* bool\[2\]"),
        (jnp.float32(1), 1, 1, TypeError, "boolean scalar"),
        (True, {"a": 1}, {"b": 1}, ValueError, "differ in structure"),
        (True, {"a": jnp.ones(2)}, {"a": jnp.ones(3)}, ValueError, r"\['a'\] is float32\[2\]"),
        (True, {"a": jnp.ones(2, jnp.float16)}, {"a": jnp.ones(2)}, TypeError, "shapes and dtypes"),
        (True, "x", "y", TypeError, "Only arrays can be selected"),
        (True, 1, 1.0, TypeError, "is int 1 in on_true and float 1.0 in on_false"),
    ],
)
def test_select_tree_errors(pred, new, old, error, message):
    with pytest.raises(error, match=message):
        jmpp.select_tree(pred, new, old)
