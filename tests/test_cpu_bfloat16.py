"""Bfloat16 on a CPU: JAX's numbers, in float32 inside; on other devices the program is JAX's."""

import functools
import os
import re
import subprocess
import sys

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import primitives
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import compat, evaluator, ir
from jmp_policy._src.products import cpu_bfloat16

FLOAT32 = np.dtype(np.float32)


def operands(*shapes, seed=0):
    """Small integers: sums of their products are exact in float32, in any order."""
    draw = np.random.default_rng(seed).integers
    return [jnp.asarray(draw(-4, 5, shape), jnp.bfloat16) for shape in shapes]


def dot(a, b, dims, result=None):
    """The product as the interpreters bind it."""
    jaxpr = jax.make_jaxpr(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=result))(a, b)
    (out,) = evaluator.evaluate(
        jaxpr, [a, b], lambda eqn, values: compat.bind_primitive(eqn.primitive, values, eqn.params)
    )
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


def test_a_result_wider_than_float32_is_jaxs():
    draw = np.random.default_rng(0).normal
    a, b = jnp.asarray(draw(size=(64, 4096)), jnp.bfloat16), jnp.asarray(draw(size=(4096, 8)), jnp.bfloat16)
    dims = (((1,), (0,)), ((), ()))
    with jax.enable_x64(True):
        out = dot(a, b, dims, np.dtype(np.float64))
        np.testing.assert_array_equal(out, lax.dot_general(a, b, dims, preferred_element_type=np.float64))
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-10)


def test_an_integer_result_is_jaxs():
    a, b = (jax.random.normal(jax.random.key(i), (8, 8), jnp.bfloat16) for i in range(2))
    dims = (((1,), (0,)), ((), ()))
    want = lax.dot_general(a, b, dims, preferred_element_type=np.int32)
    np.testing.assert_array_equal(dot(a, b, dims, np.dtype(np.int32)), want)


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


def convolution(a, b, result=None, **about):
    """A convolution as the interpreters bind it."""
    function = functools.partial(lax.conv_general_dilated, preferred_element_type=result, **about)
    jaxpr = jax.make_jaxpr(function)(a, b)
    (out,) = evaluator.evaluate(
        jaxpr, [a, b], lambda eqn, values: compat.bind_primitive(eqn.primitive, values, eqn.params)
    )
    return out


def convolved(a, b, **about):
    wide = (x.astype(jnp.float32) for x in (a, b))
    return lax.conv_general_dilated(*wide, precision="highest", **about)


@hypothesis.settings(deadline=None, max_examples=25)
@hypothesis.given(st.data())
def test_convolutions(data):
    axes = data.draw(st.integers(0, 2))
    sizes, window, strides, padding, spread = [], [], [], [], []
    for _ in range(axes):
        size = data.draw(st.integers(1, 5))
        sizes.append(size)
        window.append(data.draw(st.sampled_from([1, 1, 2, size])))
        strides.append(data.draw(st.integers(1, 3)))
        padding.append((data.draw(st.integers(-1, 2)), data.draw(st.integers(-1, 2))))
        hypothesis.assume(size + sum(padding[-1]) >= 0)  # JAX refuses those.
        spread.append((data.draw(st.sampled_from([1, 1, 2])), data.draw(st.integers(1, 2))))
    specs = [data.draw(st.permutations(range(axes + 2))) for _ in range(3)]
    shapes = []
    for spec, shape in zip(specs, ((2, 16, *sizes), (4, 16, *window)), strict=False):
        shapes.append(tuple(shape[spec.index(axis)] for axis in range(axes + 2)))
    about = {
        "window_strides": strides,
        "padding": padding,
        "lhs_dilation": [left for left, _ in spread],
        "rhs_dilation": [right for _, right in spread],
        "dimension_numbers": lax.ConvDimensionNumbers(*map(tuple, specs)),
    }
    a, b = operands(*shapes)
    want = convolved(a, b, **about)
    np.testing.assert_array_equal(convolution(a, b, FLOAT32, **about), want)
    found = jax.jit(functools.partial(convolution, **about))(a, b)
    np.testing.assert_array_equal(found, want.astype(jnp.bfloat16))


CONVOLUTIONS = {
    "one position": (nn.Conv(24, (1, 1)), 0),
    "every second one": (nn.Conv(24, (1, 1), strides=2), 0),
    "the whole image": (nn.Conv(24, (5, 5), padding="VALID"), 2),
    "one of two axes": (nn.Conv(24, (1, 5), padding="VALID"), 2),
    "transposed": (nn.ConvTranspose(24, (1, 1)), 0),
    "windows": (nn.Conv(24, (3, 3)), 3),
    "windows in groups": (nn.Conv(16, (1, 1), feature_group_count=2), 3),
    "few channels": (nn.Conv(3, (1, 1)), 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("grad", ["", ",g=f32"])
def test_convolutions_that_are_products(name, grad):
    layer, expected = CONVOLUTIONS[name]
    model, x = (
        jmpp.wrap(layer, f"p=f32,c=bf16,o=f32{grad}"),
        jax.random.normal(jax.random.key(0), (2, 5, 5, 16)),
    )
    variables = model.init(jax.random.key(1), x)

    def gradients(module):
        return jax.jit(jax.grad(lambda v, x: jnp.sum(module.apply(v, x) ** 2), (0, 1)))

    text = gradients(model).lower(variables, x).as_text()
    assert text.count("stablehlo.convolution") == expected
    for found, want in zip(
        jax.tree.leaves(gradients(model)(variables, x)),
        jax.tree.leaves(gradients(layer)(variables, x)),
        strict=True,
    ):
        assert found.dtype == jnp.float32
        assert float(jnp.linalg.norm(found - want)) < 2.0**-6 * float(jnp.linalg.norm(want))


@pytest.mark.parametrize("precision", ["highest", "TF32_TF32_F32", "BF16_BF16_F32"])
def test_convolutions_of_any_precision(precision):
    """JAX's convolutions take algorithms that its products refuse on a CPU."""
    model, x = jmpp.wrap(nn.Conv(24, (1, 1)), "mixed_bfloat16"), jnp.ones((2, 4, 4, 16))
    params = model.init(jax.random.key(0), x)
    want = jax.jit(model.apply)(params, x)
    with jax.default_matmul_precision(precision):
        np.testing.assert_array_equal(jax.jit(model.apply)(params, x), want)


@pytest.mark.parametrize("over", [(0, None), (None, 0), (0, 0)])
def test_convolutions_under_vmap(over):
    a, b = operands((3, 2, 16, 5), (3, 4, 16, 1))
    args = [x if axis == 0 else x[0] for x, axis in zip((a, b), over, strict=True)]
    about = {"window_strides": (2,), "padding": ((0, 0),)}
    found = jax.vmap(functools.partial(convolution, result=FLOAT32, **about), over)(*args)
    np.testing.assert_array_equal(found, jax.vmap(functools.partial(convolved, **about), over)(*args))


@pytest.mark.parametrize("strides", [1, 2])
def test_convolutions_exported_for_images_of_any_size(strides):
    model = jmpp.wrap(nn.Conv(24, (1, 1), strides=strides), "mixed_bfloat16")
    x = jax.random.normal(jax.random.key(0), (2, 6, 6, 16))
    params = model.init(jax.random.key(1), x)
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))
    for shape in ("b, 6, 6, 16", "b, 2 * h, 6, 16"):
        given = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
        exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(params, given)
        for found, want in zip(
            jax.tree.leaves(exported.call(params, x)), jax.tree.leaves(gradient(params, x)), strict=True
        ):
            np.testing.assert_allclose(
                found, want, rtol=2.0**-6, atol=2.0**-6 * float(jnp.max(jnp.abs(want)))
            )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("strides", [1, 2])
def test_convolutions_of_sharded_arrays(kind, strides):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(kind,))
    model = jmpp.wrap(nn.Conv(16, (1, 1), strides=strides), "mixed_bfloat16")
    x = jax.random.normal(jax.random.key(0), (8, 4, 4, 16))
    params = model.init(jax.random.key(1), x)
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))
    want = gradient(params, x)["params"]
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        found = gradient(placed, jax.device_put(x, NamedSharding(mesh, P("a"))))["params"]
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=2.0**-6, atol=1e-2)


def is_marked(scope):
    def total(x):
        with scope:
            return x + x

    (eqn,) = jax.make_jaxpr(total)(jnp.ones(3)).eqns
    return bool(eqn.ctx.xla_metadata)


def test_only_bfloat16_operations_where_the_default_is_a_cpu(monkeypatch):
    scope_of, (a, b) = cpu_bfloat16.scope_of, operands((3, 5), (5, 4))
    product = primitives.dot_general_p
    assert is_marked(scope_of(product, (a, b)))
    assert is_marked(scope_of(primitives.reduce_sum_p, (a,)))
    assert not is_marked(scope_of(product, (a, b.astype(jnp.float32))))
    assert not is_marked(scope_of(primitives.add_p, (a, a)))
    assert not is_marked(cpu_bfloat16.scope(jnp.float16))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not is_marked(scope_of(product, (a, b)))


def test_programs_for_other_devices_are_as_without():
    left, right, dims = DIMS["a weight's gradient"]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (left, right)]

    def text(function, platform):
        traced = jax.jit(lambda a, b: function(a, b, dims)).trace(*shapes)
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        # Attributes are for us; XLA takes no notice.
        return re.sub(r"loc\(.*|#loc.*|@\w+| \{mhlo.frontend_attributes = [^}]*\}\}?", "", lowered)

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


class Net(nn.Module):
    """Products of layers, of jax.numpy, of a scan and of a rematerialised block."""

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2)(nn.Dense(8)(x))
        x = nn.remat(nn.Dense)(8)(x)
        x = nn.RNN(nn.SimpleCell(8))(x)
        x = jnp.einsum("bti,ij->btj", x, self.param("w", nn.initializers.lecun_normal(), (8, 8)))
        return nn.Dense(4)(x)


class NnxNet(nnx.Module):
    """Products of a layer and of jax.numpy."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return self.dense(x) @ self.w[...]


def results_of_products(lowered):
    return set(re.findall(r"dot_general.*-> tensor<(?:\d+x)*(\w+)>", lowered.as_text()))


def lowered_gradient(apply, *args):
    return jax.jit(jax.grad(lambda *args: jnp.sum(apply(*args).astype(jnp.float32)))).lower(*args)


def test_every_product_of_a_wrapped_module():
    x = jnp.ones((2, 3, 8))
    model = jmpp.wrap(Net(), "mixed_bfloat16")
    params = model.init(jax.random.key(0), x)
    assert results_of_products(lowered_gradient(model.apply, params, x)) == {"f32"}
    by_hand = nn.Dense(4, dtype=jnp.bfloat16)
    variables = by_hand.init(jax.random.key(0), x)
    # Nobody's but ours: the model by hand, in the same process, is as JAX lowers it.
    assert results_of_products(lowered_gradient(by_hand.apply, variables, x)) == {"bf16"}


def test_every_product_of_a_wrapped_nnx_module():
    model = jmpp.nnx.wrap(NnxNet(nnx.Rngs(0)), "mixed_bfloat16")
    graph, state = nnx.split(model)
    x = jnp.ones((3, 8))
    lowered = lowered_gradient(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert results_of_products(lowered) == {"f32"}


def test_jaxprs_keep_jax_s_operations():
    """What looks for JAX's own product finds it: policies of `jax.checkpoint` that save products."""
    model = jmpp.wrap(nn.Dense(4), "mixed_bfloat16")
    x = jnp.ones((3, 8))
    params = model.init(jax.random.key(0), x)

    def products(policy):
        apply = jax.checkpoint(lambda p: jnp.sum(jnp.sin(model.apply(p, x))), policy=policy)
        names = list(ir.primitives(jax.make_jaxpr(jax.grad(apply))(params)))
        return names.count("dot_general")

    policies = jax.checkpoint_policies
    assert products(policies.dots_saveable) == products(policies.everything_saveable)
    assert products(policies.nothing_saveable) == products(policies.dots_saveable) + 1


def test_sums_are_wide():
    ones = jnp.ones((4096, 2), jnp.bfloat16)

    def total(x):
        with cpu_bfloat16.scope(jnp.bfloat16):
            return lax.reduce_sum(x, (0,))

    text = jax.jit(total).lower(ones).as_text()
    assert "tensor<4096x2xf32>" in text
    np.testing.assert_array_equal(jax.jit(total)(ones), jnp.full(2, 4096, jnp.bfloat16))


@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_other_policies_mark_nothing(policy):
    model, x = jmpp.wrap(nn.Dense(4), policy), jnp.ones((3, 8))
    params = model.init(jax.random.key(0), x)
    assert "bfloat16_on_cpu" not in lowered_gradient(model.apply, params, x).as_text()


def test_a_jax_with_other_tables_keeps_its_rules(monkeypatch):
    monkeypatch.delattr(mlir, "_platform_specific_lowerings")
    monkeypatch.setattr(mlir, "register_lowering", pytest.fail)
    cpu_bfloat16._register.__wrapped__()


def test_exported_for_several_platforms_and_any_batch():
    model, x = jmpp.wrap(Net(), "mixed_bfloat16"), jnp.ones((2, 3, 8))
    params = model.init(jax.random.key(0), x)
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))
    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 3, 8), jnp.float32)
    exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(params, shape)
    for found, want in zip(
        jax.tree.leaves(exported.call(params, x)), jax.tree.leaves(gradient(params, x)), strict=True
    ):
        np.testing.assert_allclose(found, want, rtol=2.0**-6, atol=2.0**-6 * float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P("a", None, "b"), P(None, "a")])
def test_gradients_of_sharded_arrays(kind, spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    model, x = jmpp.wrap(nn.Dense(16), "mixed_bfloat16"), jax.random.normal(jax.random.key(0), (16, 4, 8))
    params = model.init(jax.random.key(1), x)
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))
    want = gradient(params, x)["params"]
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        found = gradient(placed, jax.device_put(x, NamedSharding(mesh, spec)))["params"]
    for name, value in want.items():
        # Sums are split over devices, and each part is rounded.
        bound = 2.0**-6 * float(jnp.linalg.norm(value))
        assert np.linalg.norm(np.asarray(found[name]) - np.asarray(value)) < bound


@pytest.mark.parametrize("result", [lambda x: x[..., None], jnp.transpose], ids=["an axis more", "turned"])
@pytest.mark.parametrize(
    "product",
    ["dt,ds->st", "dt,ds->ts", "bed,edf->ebf", "jik,ibk->ijb", "bthd,bshd->bhts", "tbhd,sbhd->bhts"],
)
def test_no_transpose_gets_into_a_product(product, result):
    """Of a user's operand or result: XLA folds it, and its CPU backend has no such product."""
    sizes = dict(zip("bdefhijkst", (4, 6, 3, 8, 2, 4, 6, 5, 8, 16), strict=True))
    inputs, _ = product.split("->")
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = [[sizes[axis] for axis in axes] for axes in inputs.split(",")]
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]

    def loss(arrays):
        return jnp.sum(jnp.tanh(result(jnp.einsum(product, *arrays)) / 8))

    found = jax.jit(jax.grad(jmpp.autocast(loss, "bfloat16")))(arrays)
    want = jax.grad(loss)(arrays)
    for a, b in zip(found, want, strict=True):
        assert float(jnp.linalg.norm(a - b)) < 2.0**-5 * float(jnp.linalg.norm(b))


def test_rules_are_registered_when_there_is_something_to_do():
    """Exports for several platforms have a case per operation from then on."""
    program = """
import jax, jax.numpy as jnp, flax.linen as nn, jmp_policy as jmpp
from jax import export
def cases():
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    function = jax.jit(lambda x: jnp.sum(x @ x))
    exported = export.export(function, platforms=("cuda", "rocm", "cpu"))(shape)
    return exported.mlir_module().count("stablehlo.case")
before = cases()
jmpp.wrap(nn.Dense(2), "mixed_float16").init(jax.random.key(0), jnp.ones((1, 2)))
assert cases() == before
jmpp.wrap(nn.Dense(2), "mixed_bfloat16").init(jax.random.key(0), jnp.ones((1, 2)))
assert cases() > before
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
