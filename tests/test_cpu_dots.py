"""Bfloat16 products on a CPU: JAX's numbers, in float32 inside; on other devices the program is JAX's."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy import _jax
from jmp_policy._cpu_dots import chosen

FLOAT32 = np.dtype(np.float32)


def operands(*shapes, seed=0):
    """Small integers: sums of their products are exact in float32, in any order."""
    draw = np.random.default_rng(seed).integers
    return [jnp.asarray(draw(-4, 5, shape), jnp.bfloat16) for shape in shapes]


def dot(a, b, dims, result=None):
    """The product as the interpreters bind it."""
    jaxpr = jax.make_jaxpr(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=result))(a, b)
    (out,) = _jax.evaluate(jaxpr, [a, b], lambda eqn, values: _jax.bound(eqn.primitive, values, eqn.params))
    return out


def exact(a, b, dims):
    wide = (x.astype(jnp.float32) for x in (a, b))
    return lax.dot_general(*wide, dims, precision="highest")


DIMS = {
    "rows by columns": ((3, 5), (5, 4), (((1,), (0,)), ((), ()))),
    "both transposed": ((5, 3), (4, 5), (((0,), (1,)), ((), ()))),
    "a weight's gradient": ((2, 6, 3), (2, 6, 4), (((0, 1), (0, 1)), ((), ()))),
    "axes in another order": ((2, 6, 3), (6, 4, 2), (((1, 0), (0, 2)), ((), ()))),
    "batches": ((2, 7, 3, 5), (2, 3, 4, 5), (((3,), (3,)), ((0, 2), (0, 1)))),
    "a vector": ((5,), (5,), (((0,), (0,)), ((), ()))),
    "outer": ((3,), (4,), (((), ()), ((), ()))),
    "nothing": ((0, 5), (5, 4), (((1,), (0,)), ((), ()))),
    "a sum of nothing": ((3, 0), (0, 4), (((1,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("result", [None, FLOAT32])
@pytest.mark.parametrize("name", DIMS)
def test_values_and_derivatives_of_any_order(name, result):
    left, right, dims = DIMS[name]
    a, b = operands(left, right)
    function = functools.partial(dot, dims=dims, result=result)
    want = exact(a, b, dims)
    for call in (function, jax.jit(function)):
        out = call(a, b)
        assert out.dtype == (result or jnp.bfloat16)
        np.testing.assert_array_equal(out, want.astype(out.dtype))

    def ours(a, b):
        return jnp.sum(function(a, b).astype(jnp.float32) * weights)

    def theirs(a, b):
        return jnp.sum(exact(a, b, dims) * weights)

    weights = operands(want.shape, seed=1)[0].astype(jnp.float32)
    for derivative in (
        jax.grad(ours, (0, 1)),
        jax.jit(jax.grad(ours, (0, 1))),
        lambda a, b: jax.jvp(jax.grad(ours, (0, 1)), (a, b), (a, b))[1],
        lambda a, b: jax.grad(lambda a, b: jnp.sum(jax.grad(ours)(a, b).astype(jnp.float32)), 1)(a, b),
    ):
        for found in jax.tree.leaves(derivative(a, b)):
            assert found.dtype == jnp.bfloat16
    for found, expected in zip(jax.grad(ours, (0, 1))(a, b), jax.grad(theirs, (0, 1))(a, b), strict=True):
        np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))
    tangents = operands(left, right, seed=2)
    wide = [x.astype(jnp.float32) for x in (a, b, *tangents)]
    found = jax.jvp(function, (a, b), tuple(tangents))[1]
    expected = jax.jvp(functools.partial(exact, dims=dims), tuple(wide[:2]), tuple(wide[2:]))[1]
    np.testing.assert_allclose(
        found, expected, rtol=2.0**-7, atol=2.0**-7 * float(jnp.max(jnp.abs(expected), initial=0))
    )


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.integers(0, 4), st.integers(0, 4), st.data())
def test_any_axes(batch, contracted, data):
    free = data.draw(st.integers(0, 2))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=batch + contracted, max_size=batch + contracted))
    orders = [data.draw(st.permutations(range(batch + contracted + free))) for _ in range(2)]
    shapes, dims = [], []
    for order in orders:
        shape = [(sizes + [2] * free)[axis] for axis in order]
        shapes.append(tuple(shape))
        dims.append([order.index(axis) for axis in range(batch + contracted)])
    numbers = ([d[batch:] for d in dims], [d[:batch] for d in dims])
    numbers = tuple(tuple(map(tuple, pair)) for pair in numbers)
    a, b = operands(*shapes)
    np.testing.assert_array_equal(dot(a, b, numbers, FLOAT32), exact(a, b, numbers))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
def test_under_vmap(axes):
    left, right, dims = DIMS["a weight's gradient"]
    a, b = operands(left, right)
    stack = [
        jnp.stack([x, 2 * x, 3 * x], axis) if axis is not None else x
        for x, axis in zip((a, b), axes, strict=True)
    ]
    found = jax.vmap(functools.partial(dot, dims=dims, result=FLOAT32), axes)(*stack)
    want = jax.vmap(functools.partial(exact, dims=dims), axes)(*stack)
    np.testing.assert_array_equal(found, want)


def test_only_bfloat16_products_for_a_cpu(monkeypatch):
    a, b = operands((3, 5), (5, 4))
    product = primitives.dot_general_p
    assert chosen(product, (a, b)).name == product.name
    assert chosen(product, (a, b)) is not product
    assert chosen(product, (a, b.astype(jnp.float32))) is product
    assert chosen(primitives.add_p, (a, a)) is primitives.add_p
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen(product, (a, b)) is product


def test_programs_for_other_devices_are_as_without():
    left, right, dims = DIMS["a weight's gradient"]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (left, right)]

    def text(function, platform):
        traced = jax.jit(lambda a, b: function(a, b, dims)).trace(*shapes)
        return re.sub(r"loc\(.*|#loc.*|@\w+", "", traced.lower(lowering_platforms=(platform,)).as_text())

    assert text(dot, "cuda") == text(lax.dot_general, "cuda")
    assert "f32" not in text(dot, "tpu")
    assert "xf32>" in text(dot, "cpu")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_devices(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    left, right, dims = (8, 5), (5, 4), DIMS["rows by columns"][2]
    a, b = operands(left, right)
    with jax.set_mesh(mesh):
        rows = jax.device_put(a, NamedSharding(mesh, P("data")))
        whole = jax.device_put(b, NamedSharding(mesh, P()))
        found = jax.jit(functools.partial(dot, dims=dims))(rows, whole)
        assert found.sharding.spec[0] == "data"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(exact(a, b, dims).astype(jnp.bfloat16)))

    def local(a, b):
        return dot(a, b, dims, FLOAT32)

    if kind is AxisType.Auto:
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        np.testing.assert_array_equal(jax.jit(mapped)(a, b), exact(a, b, dims))


@pytest.mark.parametrize("grad", ["", ",g=f32"])
def test_gradients_of_stacked_rows_run(grad):
    """XLA folds the transpose of such a gradient into a product that its CPU backend cannot run."""
    import flax.linen as nn

    model = jmpp.wrap(nn.Dense(32), f"p=f32,c=bf16,o=f32{grad}")
    x = jax.random.normal(jax.random.key(0), (2, 64, 16))
    params = model.init(jax.random.key(1), x)
    loss = lambda apply: lambda params: jnp.sum(apply(params, x) ** 2)  # noqa: E731
    found = jax.jit(jax.grad(loss(model.apply)))(params)["params"]["kernel"]
    want = jax.grad(loss(nn.Dense(32).apply))(params)["params"]["kernel"]
    assert found.dtype == jnp.float32
    assert float(jnp.linalg.norm(found - want)) < 2.0**-6 * float(jnp.linalg.norm(want))


def test_autocast_too():
    x, w = jnp.ones((2, 64, 16)), jnp.full((16, 32), 0.5)
    grad = jax.jit(jax.grad(jmpp.autocast(lambda w: jnp.sum((x @ w) ** 2), "bfloat16")))(w)
    np.testing.assert_array_equal(grad, jnp.full((16, 32), 2 * 8.0 * 128))
