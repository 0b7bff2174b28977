"""Gathers of one element of each row, as a cross-entropy takes: the same numbers, without a scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import equations
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.autocast.operation_rules import chosen_axis, one_of_each_row

ROWS, LABELS = 6, 40
X = jax.random.normal(jax.random.key(0), (ROWS, LABELS))
#: One of them is beyond the row: JAX gives NaN for it, and no gradient.
Y = jnp.array([0, 39, 7, 40, 7, 12])


def taken(mode=None):
    return lambda x, y: jnp.take_along_axis(x, y[:, None], -1, mode=mode)[:, 0]


#: Gathers, with the axis along which they take one element of each row.
GATHERS = {
    "fill": (taken(), X, Y, 1),
    "clip": (taken("clip"), X, Y, 1),
    "first axis": (lambda x, y: jnp.take_along_axis(x.T, y[None], 0), X, Y, 0),
    "middle axis": (
        lambda x, y: jnp.take_along_axis(x.reshape(2, LABELS, 3), y.reshape(2, 1, 3), 1),
        X,
        Y,
        1,
    ),
    "no rows": (lambda x, y: jnp.take(x, y), X[0], jnp.int32(7), 0),
    "small integers": (taken("clip"), jnp.zeros((3, 300)), jnp.array([0, 255, 9], jnp.uint8), 1),
    "two of each row": (lambda x, y: jnp.take_along_axis(x, y.reshape(-1, 2), -1), X[:3], Y, None),
    "rows of a table": (lambda x, y: x[y], X, Y % ROWS, None),
    "without batch": (lambda x, y: x[jnp.arange(ROWS), y], X, Y, None),
}


def gather_of(function, x, y):
    (eqn,) = [e for e in equations(jax.make_jaxpr(function)(x, y).jaxpr) if e.primitive.name == "gather"]
    operand, indices = (jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    return eqn, operand, indices


@pytest.mark.parametrize("name", GATHERS)
def test_which_take_one_of_each_row(name):
    function, x, y, axis = GATHERS[name]
    assert chosen_axis(gather_of(function, x, y)[0]) == axis


def names(function, *args):
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(function)(*args).jaxpr)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, case in GATHERS.items() if case[-1] is not None])
def test_values_and_derivatives_are_jaxs(name):
    function, x, y, _ = GATHERS[name]

    def weighted(f):
        return lambda x: jnp.nansum(jnp.sin(f(x)) * jnp.arange(1.0, 1 + y.size).reshape(f(x).shape))

    plain, half = (weighted(lambda x, f=f: f(x, y)) for f in (function, jmpp.autocast(function, "float16")))
    np.testing.assert_array_equal(jax.jit(half)(x), jax.jit(plain)(x))
    for order in (jax.grad, jax.jacfwd, jax.hessian):
        np.testing.assert_array_equal(jax.jit(order(half))(x), jax.jit(order(plain))(x))
    assert "scatter-add" in names(jax.grad(plain), x)
    assert "scatter-add" not in names(jax.grad(half), x)
    stacked = jnp.stack([x, 2 * x])
    got, want = (jax.jit(jax.vmap(jax.grad(f)))(stacked) for f in (half, plain))
    np.testing.assert_array_equal(got, want)


def test_nan_beside_the_chosen_element_stays_out_of_its_tangent():
    t = jnp.full_like(X, jnp.nan).at[:, 7].set(3.0)
    eqn, *_ = gather_of(taken("clip"), X, Y)
    indices = jnp.full((ROWS, 1, 1), 7)
    _, tangent = jax.jvp(lambda x: one_of_each_row(eqn)(x, indices), (X,), (t,))
    np.testing.assert_array_equal(tangent.ravel(), 3.0)


def cross_entropy(w, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, y).mean()


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_cross_entropy_keeps_labels_and_writes_no_zeros_to_scatter_into(half):
    w, x = jax.random.normal(jax.random.key(1), (8, LABELS)), jnp.ones((ROWS, 8))
    loss = jmpp.autocast(cross_entropy, half)
    y = Y % LABELS
    whole = [
        eqn
        for eqn in equations(jax.make_jaxpr(jax.grad(loss))(w, x, y).jaxpr)
        if "scatter" in eqn.primitive.name and eqn.outvars[0].aval.shape == (ROWS, LABELS)
    ]
    assert not whole
    kept = jax.tree.leaves(jax.vjp(lambda w: loss(w, x, y), w)[1])
    assert not [a for a in kept if a.shape == (ROWS, LABELS) and a.dtype == bool]
    # By the formula: the mean of x (softmax - one-hot).
    p = jax.nn.softmax(x @ w) - jax.nn.one_hot(y, LABELS)
    np.testing.assert_allclose(jax.grad(loss)(w, x, y), x.T @ p / ROWS, atol=2 * float(jnp.finfo(half).eps))


def test_where_autocast_is_off_nothing_is_rewritten():
    def off(x):
        with jmpp.region("off"):
            return taken()(jnp.sin(x), Y).sum() + (x @ x.T).sum()

    assert "scatter-add" in names(jax.grad(jmpp.autocast(off, "float16")), X)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_several_devices(kind):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    w, x, y = jnp.ones((8, LABELS)), jnp.ones((ROWS, 8)), Y % LABELS
    gradient = jax.grad(jmpp.autocast(cross_entropy, "float16"))
    want = jax.jit(gradient)(w, x, y)
    with jax.set_mesh(mesh):
        parts = [jax.device_put(a, jax.NamedSharding(mesh, P("d"))) for a in (x, y)]
        np.testing.assert_allclose(jax.jit(gradient)(w, *parts), want, atol=1e-3)
        if kind == "Auto":
            mapped = jax.shard_map(
                lambda w, x, y: lax.pmean(gradient(w, x, y), "d"),
                in_specs=(P(), P("d"), P("d")),
                out_specs=P(),
                check_vma=False,
            )
            np.testing.assert_allclose(jax.jit(mapped)(w, *parts), want, atol=1e-3)
            varying = jax.shard_map(
                lambda w, x, y: lax.pmean(jmpp.autocast(cross_entropy, "float16")(w, x, y), "d"),
                in_specs=(P(), P("d"), P("d")),
                out_specs=P(),
            )
            np.testing.assert_allclose(jax.jit(jax.grad(varying))(w, *parts), want, atol=1e-3)
