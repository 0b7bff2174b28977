"""Bfloat16 on a CPU: JAX's numbers, in float32 inside; on other devices the program is JAX's."""

import collections
import functools
import os
import re
import subprocess
import sys
from typing import Any

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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import ir
from jmp_policy._src.products import functions
from jmp_policy._src.products.binding import bind_product
from jmp_policy._src.products.functions import DOT_GENERAL, are_chosen, primitive_for

pytestmark = pytest.mark.slow

FLOAT32 = np.dtype(np.float32)


def operands(*shapes, seed=0):
    """Small integers: sums of their products are exact in float32, in any order."""
    draw = np.random.default_rng(seed).integers
    return [jnp.asarray(draw(-4, 5, shape), jnp.bfloat16) for shape in shapes]


def dot(a, b, dims, result=None):
    """The product as the interpreters bind it."""
    jaxpr = jax.make_jaxpr(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=result))(a, b)
    (out,) = ir.evaluate(jaxpr, [a, b], lambda eqn, values: bind_product(eqn.primitive, values, eqn.params))
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


@pytest.mark.parametrize(
    ("name", "result"), [(name, None if i % 2 else FLOAT32) for i, name in enumerate(DIMS)]
)
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
        lambda a, b: jax.jvp(jax.grad(ours, (0, 1)), (a, b), (a, b))[1],
        lambda a, b: jax.grad(lambda a, b: jnp.sum(jax.grad(ours)(a, b).astype(jnp.float32)), 1)(a, b),
    ):
        for found in jax.tree.leaves(jax.eval_shape(derivative, a, b)):
            assert found.dtype == jnp.bfloat16
    wanted = jax.grad(theirs, (0, 1))(a, b)
    for gradient in (jax.grad(ours, (0, 1)), jax.jit(jax.grad(ours, (0, 1)))):
        for found, expected in zip(gradient(a, b), wanted, strict=True):
            assert found.dtype == jnp.bfloat16
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


@pytest.mark.once
@hypothesis.settings(max_examples=25)
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


def test_only_bfloat16_products_where_the_default_is_a_cpu(monkeypatch):
    a, b = operands((3, 5), (5, 4))
    dot, none = primitives.dot_general_p, {"preferred_element_type": None}
    assert primitive_for(dot, (a, b), none) is DOT_GENERAL
    for given in (dot, DOT_GENERAL):  # Ours goes back to JAX's: programs are replayed in float32.
        assert primitive_for(given, (a, b.astype(jnp.float32)), none) is dot
    assert primitive_for(dot, (a, b), {"preferred_element_type": np.dtype(np.int32)}) is dot
    assert primitive_for(primitives.add_p, (a, a), {}) is primitives.add_p
    assert functions.stand_in(lax.dot_general, jnp.bfloat16) is functions.dot_general
    assert functions.stand_in(max, jnp.bfloat16) is max
    assert functions.stand_in(lax.dot_general, jnp.float16) is lax.dot_general
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not are_chosen(jnp.bfloat16)
    assert primitive_for(dot, (a, b), none) is dot
    assert functions.stand_in(lax.dot_general, jnp.bfloat16) is lax.dot_general


def test_programs_for_other_devices_are_as_without():
    left, right, dims = DIMS["a weight's gradient"]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (left, right)]

    def text(function, platform):
        traced = jax.jit(lambda a, b: function(a, b, dims)).trace(*shapes)
        return without_names(traced.lower(lowering_platforms=(platform,)))

    assert text(dot, "cuda") == text(lax.dot_general, "cuda")
    assert "f32" not in text(dot, "tpu")
    assert "xf32>" in text(dot, "cpu")


def without_names(lowered):
    return re.sub(r"loc\(.*|#loc.*|@\w+", "", lowered.as_text())


class Block(nn.Module):
    """A model with its dtypes by hand, where it has any."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Conv(16, (1, 1), dtype=self.dtype)(x).reshape(2, 9, 16))
        x = nn.remat(nn.Dense)(16, dtype=self.dtype)(x)
        x = nn.RNN(nn.LSTMCell(8, dtype=self.dtype))(x)
        return nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=1)(
            4, dtype=self.dtype
        )(x)


def test_a_model_for_a_gpu_is_the_one_by_hand():
    """Forward and backward, with a rematerialised layer, a scan and a batched layer."""
    x = jnp.ones((2, 3, 3, 8), jnp.bfloat16)
    params = Block().init(jax.random.key(0), x)

    def text(model, platform):
        step = jax.jit(jax.grad(lambda p, x: jnp.sum(model.apply(p, x).astype(jnp.float32) ** 2), (0, 1)))
        return without_names(step.trace(params, x).lower(lowering_platforms=(platform,)))

    wrapped, by_hand = jmpp.wrap(Block(), "p=f32,c=bf16,o=bf16"), Block(jnp.bfloat16)
    assert products_of(text(wrapped, "cuda")) == products_of(text(by_hand, "cuda"))
    assert "-> tensor<2x9x16xf32>" in text(wrapped, "cpu")


def products_of(text):
    """The products and convolutions of a lowered program, in order, and choices between platforms."""
    return re.findall(r"stablehlo\.(?:dot_general|convolution|case)\b.*: (.*)", text)


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


def own_product(*args, **kwargs):
    """A user's, which wins."""
    return lax.dot_general(*args, **kwargs)


class Net(nn.Module):
    """Products of layers, of a scan and of a rematerialised block, and two that no policy can reach."""

    has_own: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.MultiHeadDotProductAttention(2)(nn.Dense(8)(x))
        x = nn.remat(nn.Dense)(8)(x)
        x = nn.RNN(nn.SimpleCell(8))(x)
        if self.has_own:
            x = nn.Dense(8, dot_general=own_product)(x)
            x = jnp.einsum("bti,ij->btj", x, self.param("w", nn.initializers.lecun_normal(), (8, 8)))
        return nn.Dense(4)(x)


class NnxNet(nnx.Module):
    """A layer governed by settings alone, attention, and a module with a weight of its own."""

    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x):
        return self.attention(self.dense(x)) @ self.w[...]


def lowered_gradient(apply, *args):
    return jax.jit(jax.grad(lambda *args: jnp.sum(apply(*args).astype(jnp.float32)))).lower(*args)


def count_by_result(lowered):
    return collections.Counter(re.findall(r"dot_general.*-> tensor<(?:\d+x)*(\w+)>", lowered.as_text()))


@pytest.mark.parametrize("grad", ["", ",g=f32"])
def test_every_product_of_flax_layers(grad):
    x = jnp.ones((2, 3, 8))
    model = jmpp.wrap(Net(), f"p=f32,c=bf16,o=f32{grad}")
    params = model.init(jax.random.key(0), x)
    assert set(count_by_result(lowered_gradient(model.apply, params, x))) == {"f32"}
    by_hand = nn.Dense(4, dtype=jnp.bfloat16)
    variables = by_hand.init(jax.random.key(0), x)
    # Nobody's but ours: the model by hand, in the same process, is as JAX lowers it.
    assert set(count_by_result(lowered_gradient(by_hand.apply, variables, x))) == {"bf16"}


def test_products_of_the_users_stay_theirs():
    """A function that a layer was given wins, and nobody is asked about `jnp.einsum`."""
    x = jnp.ones((2, 3, 8))
    model = jmpp.wrap(Net(has_own=True), "mixed_bfloat16")
    params = model.init(jax.random.key(0), x)
    found = count_by_result(lowered_gradient(model.apply, params, x))
    assert found["bf16"] == 2 * 3  # A product has two in the backward pass.
    every = jmpp.wrap(Net(has_own=True), "p=f32,c=bf16,o=f32,g=f32")
    assert set(count_by_result(lowered_gradient(every.apply, params, x))) == {"f32"}


class OwnProduct(nn.Module):
    """A product as a module, as Flax's float8 layers have theirs."""

    @nn.compact
    def __call__(self, *args, **kwargs):
        return lax.dot_general(*args, **kwargs)


@pytest.mark.parametrize(
    ("given", "is_ours"),
    [
        ({}, True),
        ({"dot_general": lax.dot_general}, True),
        ({"dot_general": own_product}, False),
        ({"dot_general_cls": OwnProduct}, False),
    ],
)
@pytest.mark.parametrize("layer", [nn.Dense, nn.DenseGeneral])
def test_a_layer_keeps_the_product_that_it_was_given(layer, given, is_ours):
    x = jnp.ones((3, 8))
    model = jmpp.wrap(layer(4, **given), "mixed_bfloat16")
    jaxpr = jax.make_jaxpr(model.apply)(model.init(jax.random.key(0), x), x)
    (product,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert (product.primitive is DOT_GENERAL) == is_ours


def test_products_of_nnx_modules():
    """Of layers under settings alone they are JAX's: the layer equals one that is written by hand."""
    x = jnp.ones((2, 3, 8))

    def found(module, policy):
        graph, state = nnx.split(jmpp.nnx.wrap(module, policy))
        return count_by_result(lowered_gradient(lambda state, x: nnx.merge(graph, state)(x), state, x))

    alone = found(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "p=f32,c=bf16,o=f32")
    assert set(alone) == {"f32"}
    half = found(NnxNet(nnx.Rngs(0)), "mixed_bfloat16")
    assert half["bf16"] == half.total() - 3 * 2  # All but the two of the attention.
    assert set(found(NnxNet(nnx.Rngs(0)), "p=f32,c=bf16,o=f32,g=f32")) == {"f32"}


POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable", "nothing_saveable")


@pytest.mark.parametrize("name", POLICIES)
def test_checkpoint_policies_save_what_they_save_of_jaxs_products(name):
    a, b = operands((2, 6, 3), (2, 3, 4))

    def residuals(product):
        def loss(a, b):
            batched = product(a, b, (((2,), (1,)), ((0,), (0,))))
            return jnp.sum(jnp.sin(product(batched, b[0], (((2,), (1,)), ((), ())))))

        call = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, name))
        return sorted(ir.primitives(jax.make_jaxpr(jax.grad(call, (0, 1)))(a, b)))

    assert residuals(functions.dot_general) == residuals(lax.dot_general)


def test_products_offloaded_elsewhere_are_saved():
    """A policy that moves products to the host's memory is obeyed as far as saving them goes."""
    a, b = operands((6, 3), (3, 4))
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    product = functools.partial(functions.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    call = jax.checkpoint(lambda a, b: jnp.sum(jnp.sin(product(a, b))), policy=policy)
    assert [*ir.primitives(jax.make_jaxpr(jax.grad(call))(a, b))].count("dot_general") == 2


def test_jaxprs_have_jaxs_names_and_parameters():
    """What knows JAX's products by name knows ours."""
    a, b = operands((2, 6, 3), (3, 4))

    def equations(product):
        call = lambda a, b: jnp.sum(product(a, b, (((2,), (0,)), ((), ()))))  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.value_and_grad(call, (0, 1)))(a, b)
        return [(eqn.primitive.name, eqn.outvars[0].aval, str(eqn.params)) for eqn in jaxpr.eqns]

    assert equations(functions.dot_general) == equations(lax.dot_general)


def test_without_jit():
    a, b = operands((6, 3), (3, 4))
    product = functools.partial(functions.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    with jax.disable_jit():
        np.testing.assert_array_equal(product(a, b), exact(a, b, (((1,), (0,)), ((), ()))))


@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_other_policies_take_jaxs_products(policy):
    model, x = jmpp.wrap(nn.Dense(4), policy), jnp.ones((3, 8))
    params = model.init(jax.random.key(0), x)
    jaxpr = jax.make_jaxpr(model.apply)(params, x)
    (product,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general")
    assert product.primitive is primitives.dot_general_p


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


@pytest.mark.once
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


def test_nothing_is_registered_for_jaxs_operations():
    """A float32 program for several platforms is the same after a bfloat16 model was traced."""
    program = """
import re, jax, jax.numpy as jnp, flax.linen as nn, jmp_policy as jmpp
from jax import export
def text():
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    function = jax.jit(lambda x: jnp.sum(x @ x))
    module = export.export(function, platforms=("cuda", "rocm", "cpu"))(shape).mlir_module()
    return re.sub(r"loc\\(.*|#loc.*", "", module)
before = text()
model, x = jmpp.wrap(nn.Dense(2), "mixed_bfloat16"), jnp.ones((1, 2))
params = model.init(jax.random.key(0), x)
assert "f32>" in jax.jit(jax.grad(lambda p: model.apply(p, x).sum())).lower(params).as_text()
assert text() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
