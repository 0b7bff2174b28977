"""Weight gradients in float32 from half products: which layers, which values, what the devices send."""

import contextlib
import functools
import logging
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import compat, ir
from jmp_policy._src.report.lowering.compiler import is_installed
from jmp_policy._src.weight_grads.transform import as_cast_of

F16, F32 = jnp.float16, jnp.float32
HALF, WIDE = "p=f32,c=f16,o=f32", "p=f32,c=f16,o=f32,g=f32"
X = jax.random.normal(jax.random.key(0), (4, 8, 8))
IDS = jnp.arange(32).reshape(4, 8) % 7
MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("derivative", [jax.grad, jax.hessian])
def test_a_loss_that_holds_a_derivative_learns_from_it(framework, derivative):
    """As gradient penalties and physics-informed losses: the weights' part in the derivative is not lost."""
    x = jax.random.normal(jax.random.key(0), (8, 4))

    def make():
        if framework == "linen":
            model = nn.Sequential([nn.Dense(16), jnp.tanh, nn.Dense(1, use_bias=False)])
            params = model.init(jax.random.key(1), x)
            return model, params
        rngs = nnx.Rngs(1)
        layers = nnx.Linear(4, 16, rngs=rngs), jnp.tanh, nnx.Linear(16, 1, use_bias=False, rngs=rngs)
        return nnx.Sequential(*layers), None

    def gradient(policy):
        model, params = make()
        model = model if policy is None else jmpp.wrap(model, policy)

        def loss(apply):
            return jnp.square(jax.vmap(derivative(lambda x: apply(x[None])[0, 0]))(x) - 1).mean()

        if framework == "nnx":
            found = nnx.jit(nnx.grad(loss))(model)
        else:
            found = jax.jit(jax.grad(lambda params: loss(functools.partial(model.apply, params))))(params)
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(found)])

    exact = gradient(None)
    errors = [jnp.linalg.norm(gradient(policy) - exact) / jnp.linalg.norm(exact) for policy in (HALF, WIDE)]
    assert errors[1] < 1.2 * errors[0] < 0.01


class ScannedCell(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(16)(x)), None


class ScannedCells(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(ScannedCell, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layers()(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the inputs", "the parameters"])
def test_second_derivatives_through_scanned_layers_reach_the_weights(by):
    """Gradient penalties, Hessian-vector products, MAML: JAX differentiates the body of a scan twice."""
    x = jax.random.normal(jax.random.key(0), (8, 16))
    params = jax.jit(ScannedCells().init)(jax.random.key(1), x)

    def gradient(policy):
        apply = (ScannedCells() if policy is None else jmpp.wrap(ScannedCells(), policy)).apply

        def loss(params, x):
            return jnp.square(apply(params, x) - 1).mean()

        if by == "the inputs":
            outer = jax.grad(lambda params: jnp.square(8 * jax.grad(loss, 1)(params, x) - 1).mean())
        else:
            outer = jax.grad(lambda params: optax.tree.norm(jax.grad(loss)(params, x)))
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.jit(outer)(params))])

    exact = gradient(None)
    errors = [jnp.linalg.norm(gradient(policy) - exact) / jnp.linalg.norm(exact) for policy in (HALF, WIDE)]
    assert errors[1] < 1.2 * errors[0] < 0.01


# Layers. Every gradient of a parameter that meets half values must hold more than float16 can.


class RawDots(nn.Module):
    """Products written out, with all the ways in which a weight gets there."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (8, 2, 4))
        x = jnp.einsum("bsd,dhk->bshk", x, w).reshape(*x.shape[:2], 8)
        stacked = self.param("stacked", nn.initializers.normal(), (3, 8, 8))
        x = x @ stacked[0] + x @ stacked[1].T
        x, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stacked)
        tied = self.param("tied", nn.initializers.normal(), (8, 8))
        x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ tied), None), x, None, length=3)
        x = lax.cond(x.sum() > 0, lambda x: x @ tied, lambda x: x @ tied.T, x)
        return x + jnp.concatenate([self.param("b", nn.initializers.zeros, (4,))] * 2)


class InTransforms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.remat(nn.Dense)(8)(x)
        x = nn.jit(nn.Dense)(8)(x)
        x, _ = nn.scan(
            lambda layer, carry, _: (jnp.tanh(layer(carry)), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )(nn.Dense(8), x, None)
        cell = nn.RNN(nn.OptimizedLSTMCell(8))
        return nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=4)(8)(
            cell(x)
        )


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(7, 8)
        positions = self.param("positions", nn.initializers.normal(), (8, 8))
        return embed.attend(jnp.tanh(embed(ids) + positions))


LINEN = {
    "dense": (nn.Dense(5), X),
    "general": (nn.DenseGeneral((2, 3), axis=(1, 2)), X),
    "einsum": (nn.Einsum((8, 5), "...d,de->...e"), X),
    "conv": (nn.Conv(5, (3,), feature_group_count=1), X),
    "strided": (nn.Conv(4, (3,), strides=(2,), padding="SAME", feature_group_count=2), X),
    "dilated": (nn.Conv(4, (3,), kernel_dilation=(2,), padding="CIRCULAR"), X),
    "local": (nn.ConvLocal(4, (3,)), X),
    "transposed": (nn.ConvTranspose(4, (3,), strides=(2,)), X),
    "attention": (nn.MultiHeadDotProductAttention(1), X),
    "lstm": (nn.RNN(nn.OptimizedLSTMCell(8)), X),
    "gru": (nn.RNN(nn.GRUCell(8)), X),
    "raw": (RawDots(), X),
    "transforms": (InTransforms(), X),
    "tokens": (Tokens(), IDS),
}


@functools.cache
def parameters(name):
    """Compiled as one program: one operation at a time takes far longer."""
    model, x = LINEN[name]
    return jax.jit(model.init)(jax.random.key(1), x)["params"]


def linen_case(name, policy):
    model, x = LINEN[name]
    model, params = jmpp.wrap(model, policy), parameters(name)

    def loss(params):
        out = model.apply({"params": params}, x)
        return (out * jnp.sin(jnp.arange(out.size, dtype=F32).reshape(out.shape))).mean()

    return loss, params


class NnxRaw(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((3, 8, 8)))
        self.b = nnx.Param(jnp.zeros(8))

    def __call__(self, x):
        x, _ = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, self.w[...])
        return x @ self.w[0].T + self.b


class NnxTokens(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(7, 8, rngs=rngs)
        self.block = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(nnx.remat(lambda block, x: block(x))(self.block, self.embed(ids)))


NNX = {
    "linear": (lambda r: nnx.Linear(8, 5, rngs=r), X),
    "general": (lambda r: nnx.LinearGeneral((8, 8), (2, 3), axis=(1, 2), rngs=r), X),
    "einsum": (lambda r: nnx.Einsum("bsd,de->bse", (8, 5), (5,), rngs=r), X),
    "conv": (lambda r: nnx.Conv(8, 4, (3,), feature_group_count=2, rngs=r), X),
    "transposed": (lambda r: nnx.ConvTranspose(8, 4, (3,), rngs=r), X),
    "attention": (lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r), X),
    "lstm": (lambda r: nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=r)), X),
    "lora": (lambda r: nnx.LoRA(8, 2, 5, base_module=nnx.Linear(8, 5, rngs=r), rngs=r), X),
    "sequential": (lambda r: nnx.Sequential(nnx.Linear(8, 8, rngs=r), nnx.relu, nnx.Linear(8, 8, rngs=r)), X),
    "raw": (NnxRaw, X),
    "tokens": (NnxTokens, IDS),
}


def nnx_case(name, policy):
    make, x = NNX[name]
    graph, params, rest = nnx.split(jmpp.wrap(make(nnx.Rngs(0)), policy), nnx.Param, ...)

    def loss(params):
        out = nnx.merge(graph, params, jax.tree.map(jnp.copy, rest))(x)
        return (out * jnp.sin(jnp.arange(out.size, dtype=F32).reshape(out.shape))).mean()

    return loss, nnx.to_pure_dict(params)


def autocast_case(name, policy):
    model, x = LINEN[name]
    params = parameters(name)

    def loss(params):
        out = model.apply({"params": params}, x)
        return (out * jnp.sin(jnp.arange(out.size, dtype=F32).reshape(out.shape))).mean()

    return jmpp.autocast(loss, policy), params


CASES = [
    *((linen_case, name) for name in LINEN),
    *((nnx_case, name) for name in NNX),
    *((autocast_case, name) for name in LINEN),
]


def values(tree):
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(tree)}


def in_half(x):
    """Whether an array holds nothing but float16 numbers."""
    return np.array_equal(x.astype(np.float16).astype(np.float32), x)


@functools.cache
def exact_gradient(case, name):
    """In float32, where nothing is to be done to a loss function, however it would be done."""
    loss, params = case(name, "float32")
    return values(jax.jit(jax.grad(loss))(params))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), CASES, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_every_weight_gradient_is_float32_and_nothing_else_changes(case, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (half_loss, params), (wide_loss, _) = case(name, HALF), case(name, WIDE)
        value, grads = jax.jit(jax.value_and_grad(half_loss))(params)
        wide_value, wide = jax.jit(jax.value_and_grad(wide_loss))(params)
    assert float(value) == float(wide_value)
    grads, wide = values(grads), values(wide)
    exact = exact_gradient(nnx_case if case is nnx_case else linen_case, name)
    for path in wide:
        assert wide[path].dtype == np.float32
        if np.abs(exact[path]).max() < 1e-6:
            continue  # Of a bias that has no influence.
        assert not in_half(wide[path]), path
        # As near to the gradient in float32 as the half one, whose products are the same.
        size = np.abs(exact[path]).max() + 1e-5
        error = [np.abs(g[path] - exact[path]).max() / size for g in (grads, wide)]
        assert error[1] <= error[0] + 2.0**-9, path


def products(jaxpr):
    """Dtypes of the results of all products."""
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            yield {v.aval.dtype.name for v in eqn.invars}, eqn.outvars[0].aval.dtype.name
        for inside in ir.subjaxprs(eqn):
            yield from products(inside)


@pytest.mark.slow
@pytest.mark.parametrize("case", [linen_case, autocast_case])
@pytest.mark.parametrize(("name", "count"), [("dense", 1), ("conv", 1), ("attention", 4), ("tokens", 1)])
def test_only_the_weights_products_are_wide(case, name, count):
    loss, params = case(name, WIDE)
    half, _ = case(name, HALF)
    found = list(products(jax.make_jaxpr(jax.grad(loss))(params)))
    before = list(products(jax.make_jaxpr(jax.grad(half))(params)))
    assert all(operands == {"float16"} for operands, _ in found)
    assert len(found) == len(before)
    wide = [sum(result == "float32" for _, result in these) for these in (found, before)]
    assert wide[0] - wide[1] == count


def test_numbers_of_the_program_that_meet_an_operation_often():
    """Dropout counts its keys so. Python's integers stand in jaxprs without a shape."""

    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x, n):
            for _ in range(3):
                n = n + 1
            return nn.Dense(2)(x) * n

    model, x = jmpp.wrap(Counts(), WIDE), jnp.ones((4, 3))
    params = model.init(jax.random.key(0), x, 0)
    grads = jax.jit(jax.grad(lambda params, n: model.apply(params, x, n).sum()))(params, 2)
    np.testing.assert_array_equal(grads["params"]["Dense_0"]["kernel"], np.full((3, 2), 4 * 5.0))


@pytest.mark.slow
def test_off_leaves_no_trace():
    loss, params = linen_case("attention", HALF)
    same, _ = linen_case("attention", "p=f32,c=f16,o=f32,g=f16")
    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert "custom_vjp" not in text
    assert text == str(jax.make_jaxpr(jax.grad(same))(params))
    assert "float32_gradient" not in jax.jit(loss).lower(params).as_text(debug_info=True)


# Values that float16 cannot give.


def test_a_sum_beyond_float16():
    x = jnp.full((4096, 8), 8.0)
    for policy, expected in ((HALF, np.inf), (WIDE, 4096 * 8 * 4.0)):
        model = jmpp.wrap(nn.Dense(1, use_bias=False), policy)
        grad = jax.jit(jax.grad(lambda p, m=model: 4.0 * m.apply(p, x).sum()))(
            {"params": {"kernel": jnp.ones((8, 1))}}
        )
        assert float(grad["params"]["kernel"][0, 0]) == expected


def test_a_frequent_token_keeps_its_gradient():
    ids = jnp.zeros(4096, jnp.int32)
    table = {"params": {"embedding": jnp.ones((2, 4))}}
    weight = jnp.linspace(1.0, 1.5, 4096)[:, None]
    exact = 4 * [float(weight.sum())]
    grads = {}
    for policy in (HALF, WIDE):
        model = jmpp.wrap(nn.Embed(2, 4), policy)
        grads[policy] = jax.jit(jax.grad(lambda p, m=model: (m.apply(p, ids) * weight).sum()))(table)
    found = {k: np.asarray(g["params"]["embedding"][0]) for k, g in grads.items()}
    # Each of 4096 terms is rounded to half once: errors of both signs, of 2^-12 on average.
    np.testing.assert_allclose(found[WIDE], exact, rtol=2.0**-12)
    assert np.abs(found[HALF] / exact - 1).max() > 0.1


@pytest.mark.slow
def test_a_bias_is_summed_in_float32():
    x, params = jnp.ones((16384, 8)), {"params": {"kernel": jnp.ones((8, 1)), "bias": jnp.zeros(1)}}
    weight = jnp.linspace(1.0, 1.37, 16384)[:, None]
    grads = {}
    for policy in (HALF, WIDE):
        model = jmpp.wrap(nn.Dense(1), policy.replace("f16", "bf16"))
        grads[policy] = jax.grad(lambda p, m=model: (m.apply(p, x) * weight).sum())(params)["params"]["bias"]
    exact = float(weight.sum())
    assert abs(float(grads[WIDE][0]) / exact - 1) < 2.0**-12 < abs(float(grads[HALF][0]) / exact - 1)


# Around it.


@pytest.mark.slow
def test_state_and_random_numbers_are_those_without():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
            self.sow("intermediates", "h", x)
            return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))

    found = {}
    for policy in (HALF, WIDE):
        model = jmpp.wrap(Net(), policy)
        variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

        @jax.jit
        def run(params, model=model, state=variables["batch_stats"]):
            out, new = model.apply(
                {"params": params, "batch_stats": state},
                X,
                rngs={"dropout": jax.random.key(2)},
                mutable=["batch_stats", "intermediates"],
            )
            return out, new

        found[policy] = run(variables["params"])
    assert jax.tree.structure(found[HALF]) == jax.tree.structure(found[WIDE])
    jax.tree.map(np.testing.assert_array_equal, found[HALF], found[WIDE])


@pytest.mark.slow
def test_nnx_state_is_kept():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return self.dropout(self.norm(self.linear(x)))

    models = [jmpp.wrap(Net(nnx.Rngs(0)), policy) for policy in (HALF, WIDE)]
    step = nnx.jit(nnx.value_and_grad(lambda model: (model(X) ** 2).mean()))
    values = [[step(model)[0] for _ in range(3)] for model in models]
    assert values[0] == values[1]
    assert len({float(v) for v in values[0]}) == 3
    for one, other in zip(*(jax.tree.leaves(nnx.state(m, nnx.Not(nnx.Param))) for m in models), strict=True):
        np.testing.assert_array_equal(
            jax.random.key_data(one) if jnp.issubdtype(one.dtype, jax.dtypes.prng_key) else one,
            jax.random.key_data(other) if jnp.issubdtype(other.dtype, jax.dtypes.prng_key) else other,
        )
    assert int(models[1].calls[...]) == 3


@pytest.mark.slow
def test_a_rule_for_one_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="head")(jnp.tanh(nn.Dense(8, name="body")(x)))

    model = jmpp.wrap(Net(), jmpp.PolicyMap(HALF, {"head": WIDE}))
    params = model.init(jax.random.key(0), X)
    grads = jax.jit(jax.grad(lambda p: (model.apply(p, X) ** 2).mean()))(params)["params"]
    assert in_half(np.asarray(grads["body"]["kernel"]))
    assert not in_half(np.asarray(grads["head"]["kernel"]))


@pytest.mark.slow
def test_as_submodule_under_intercept_and_as_decorator():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            with jmpp.linen.intercept(WIDE):
                x = nn.Dense(8, name="island")(x)
            return nn.Dense(2, name="own")(self.inner(x))

    model = Outer(jmpp.wrap(nn.Dense(8), WIDE))
    params = model.init(jax.random.key(0), X)
    text = str(jax.make_jaxpr(jax.grad(lambda p: model.apply(p, X).sum()))(params))
    grads = jax.jit(jax.grad(lambda p: (model.apply(p, X) ** 2).mean()))(params)["params"]
    assert "custom_vjp" not in text
    assert not in_half(np.asarray(grads["island"]["kernel"]))
    assert not in_half(np.asarray(grads["inner"]["kernel"]))

    @jmpp.linen.intercept(WIDE)
    def loss(params):
        return (nn.Dense(8).apply(params, X) ** 2).mean()

    dense = nn.Dense(8).init(jax.random.key(0), X)
    assert not in_half(np.asarray(jax.grad(loss)(dense)["params"]["kernel"]))


@pytest.mark.slow
def test_one_trace_serves_many_calls_and_a_float32_caller_is_safe():
    traces = []

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            traces.append(1)
            return nn.Dense(8)(x)

    model = jmpp.wrap(Net(), WIDE)
    params = model.init(jax.random.key(0), X)
    traces.clear()
    step = jax.jit(jax.grad(lambda p, x: model.apply(p, x).sum()))
    step(params, X), step(params, X)
    assert len(traces) == 1
    # Nothing is differentiated: it runs as it is.
    traces.clear()
    model.apply(params, X)
    assert len(traces) == 1


@pytest.mark.slow
def test_loss_scaling_and_optimizer_with_it():
    loss, params = linen_case("dense", WIDE)
    tx = jmpp.loss_scaled(optax.sgd(1.0), jmpp.DynamicLossScale(2.0**10))
    state = tx.init(params)
    _, grads = jax.jit(jmpp.scaled_value_and_grad(loss))(state, params)
    plain = jax.grad(loss)(params)
    for path, grad in values(grads).items():
        np.testing.assert_allclose(grad / 2.0**10, values(plain)[path], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_second_derivatives_in_reverse():
    found = {}
    for policy in (WIDE, "float32"):
        loss, params = linen_case("raw", policy)

        def penalty(params, loss=loss):
            return sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(loss)(params)))

        found[policy] = values(jax.jit(jax.grad(penalty))(params))
    for path, value in found["float32"].items():
        np.testing.assert_allclose(found[WIDE][path], value, atol=0.05 * np.abs(value).max() + 1e-7)


# Ways from a parameter to its product. Each gradient is beyond float16.

SIDE = 8  # with fewer terms products are float32
BIG = jnp.full((4096, SIDE), 8.0)
MASK = np.tri(SIDE, dtype=np.float32)


def zeros(shape, w):
    return jnp.zeros(shape, w.dtype)


WAYS = {
    "mask": lambda x, w, v: x @ (w * MASK.astype(w.dtype)),
    "scalar": lambda x, w, v: x @ (w * np.asarray(2, w.dtype)),
    "where": lambda x, w, v: x @ jnp.where(MASK > 0, w, 0),
    "tril": lambda x, w, v: x @ jnp.tril(w),
    "modulated": lambda x, w, v: x @ (w * jax.nn.sigmoid(x.mean(0))[:, None]),
    "concatenate": lambda x, w, v: x @ jnp.concatenate([w, zeros((SIDE, 1), w)], 1),
    "stack": lambda x, w, v: jnp.einsum("bi,kij->bkj", x, jnp.stack([w, v])),
    "pad": lambda x, w, v: x @ jnp.pad(w, ((0, 0), (0, 2))),
    "set": lambda x, w, v: x @ zeros((SIDE, 10), w).at[:, :SIDE].set(w),
    "update": lambda x, w, v: x @ lax.dynamic_update_slice(zeros((SIDE, 10), w), w, (0, 1)),
    "kron": lambda x, w, v: jnp.tile(x, (1, SIDE)) @ jnp.kron(w, v),
    "straight through": lambda x, w, v: x @ (w + lax.stop_gradient(jnp.round(w) - w)),
    "two weights": lambda x, w, v: x @ (w @ v),
    "added to two": lambda x, w, v: x @ (w + v @ v),
    "taken": lambda x, w, v: x @ jnp.take(w, jnp.arange(SIDE)[::-1], axis=0),
    "sliced": lambda x, w, v: x @ lax.dynamic_slice(w, (jnp.int32(0), jnp.int32(0)), (SIDE, 1)),
    "cast twice": lambda x, w, v: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype),
    "cast back": lambda x, w, v: x @ (w.astype(F32) * MASK).astype(x.dtype),
    "named": lambda x, w, v: x @ checkpoint_name(w, "w"),
    "barrier": lambda x, w, v: x @ lax.optimization_barrier((w, x))[0],
    "normalised": lambda x, w, v: x @ (w / jnp.abs(w).max()),
    "in a cond": lambda x, w, v: lax.cond(x[0, 0] > 0, lambda w: x @ w, lambda w: x @ w.T, w),
    "in a scan": lambda x, w, v: lax.scan(lambda c, w: (c, x @ w), 0.0, jnp.stack([w, v]))[1],
    "in a jit": lambda x, w, v: jax.jit(lambda x, w: x @ (w * MASK.astype(w.dtype)))(x, w),
}


class Way(nn.Module):
    name_: str

    @nn.compact
    def __call__(self, x):
        w, v = (self.param(name, nn.initializers.constant(0.5), (SIDE, SIDE)) for name in ("w", "v"))
        return WAYS[self.name_](x, w, v)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_every_way_from_a_parameter_to_its_product(name):
    found = {}
    for policy in (HALF, WIDE, "float32"):
        model = jmpp.wrap(Way(name), policy)
        shapes = jax.eval_shape(model.init, jax.random.key(0), BIG)
        params = jax.tree.map(lambda s: jnp.full(s.shape, 0.5, s.dtype), shapes)

        def loss(params, model=model):
            return 4 * model.apply(params, BIG).astype(F32).sum()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found[policy] = values(jax.jit(jax.grad(loss))(params))
    for path, exact in found["float32"].items():
        np.testing.assert_allclose(found[WIDE][path], exact, rtol=2e-3, atol=64)
    assert not all(np.isfinite(g).all() for g in found[HALF].values())


class Shifted(nn.Module):
    """Its products are of inputs that parameters were added to before."""

    @nn.compact
    def __call__(self, x):
        shift, log_scale = (self.param(n, nn.initializers.normal(), x.shape[-1:]) for n in ("b", "s"))
        return nn.Dense(4)(nn.relu((x + shift) * jnp.exp(log_scale)))


@pytest.mark.slow
def test_inputs_that_a_parameter_is_added_to_are_no_weights():
    x, found = jax.random.normal(jax.random.key(0), (64, 16)), []
    params = Shifted().init(jax.random.key(1), x)
    for policy in (HALF, WIDE):
        model = jmpp.wrap(Shifted(), policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(jmpp.audit(lambda p, m=model: m.apply(p, x).sum(), params, grad=True).products)
    without, wide = ([(p.lhs, p.rhs, p.m, p.n, p.k, p.backward) for p in products] for products in found)
    assert len(wide) == 3
    assert sorted(wide) == sorted(without)


def test_where_it_does_not_reach_it_says_so():
    class Custom(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (8, 8))

            @jax.custom_vjp
            def dot(x, w):
                return x @ w

            def backward(residuals, ct):
                x, w = residuals
                return ct @ w.T, jnp.einsum("bsd,bse->de", x, ct)

            dot.defvjp(lambda x, w: (x @ w, (x, w)), backward)
            return dot(x, w)

    class Relu(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ nn.relu(self.param("w", nn.initializers.normal(), (8, 8)))

    for module, why in ((Custom(), "custom_vjp_call"), (Relu(), "custom_jvp_call")):
        model = jmpp.wrap(module, WIDE)
        params = model.init(jax.random.key(0), X)
        match = (
            rf"does not reach a weight at test_grad_dtype.py:\d+ .*into a {why}, whose derivative is given"
        )
        with pytest.warns(UserWarning, match=match):
            grads = jax.jit(jax.grad(lambda p, m=model: m.apply(p, X).sum()))(params)
        assert in_half(np.asarray(grads["params"]["w"]))


class SignOfGradient(nn.Module):
    """As in Flax's documentation of `nn.custom_vjp`: its forward pass calls the module again."""

    @nn.compact
    def __call__(self, x):
        def backward(transpose, ct):
            params, *inputs = transpose(ct)
            return jax.tree.map(jnp.sign, params), *inputs

        def call(module, x):
            return module(x)

        of_sign = nn.custom_vjp(call, lambda module, x: nn.vjp(call, module, x), backward)
        return nn.Dense(8)(of_sign(nn.Dense(16), x))


class Reversible(nn.Module):
    """Keeps nothing for the backward pass, which runs the layer again."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(x.shape[-1], parent=None)
        params = self.param("layer", lambda key: layer.init(key, x)["params"])

        def plain(params, x):
            return layer.apply({"params": params}, x)

        block = jax.custom_vjp(plain)
        block.defvjp(lambda *args: jax.vjp(plain, *args), lambda transpose, ct: transpose(ct))
        return nn.Dense(8)(block(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("module", [SignOfGradient(), Reversible()])
@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
def test_modules_that_the_rule_of_a_custom_vjp_calls_are_governed(module, run):
    x = jax.random.normal(jax.random.key(0), (4, 16))
    params = module.init(jax.random.key(1), x)
    found = []
    for policy in ("mixed_float16", WIDE):
        model = jmpp.wrap(module, policy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "grad_dtype=float32 does not reach")
            loss_fn = lambda p, m=model: jnp.square(m.apply(p, x)).mean()  # noqa: E731
            found.append(run(jax.grad(loss_fn))(params))
            assert jmpp.audit(loss_fn, params, grad=True).half_share == 1
    for half, wide in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(wide, half, rtol=0.01, atol=1e-3)


@pytest.mark.slow
def test_float64_parameters():
    with jax.enable_x64(True):
        model = jmpp.wrap(nn.Dense(1, use_bias=False), "p=f64,c=f16,o=f32,g=f32")
        params = {"params": {"kernel": jnp.full((SIDE, 1), 0.5, jnp.float64)}}
        grad = jax.grad(lambda p: 4 * model.apply(p, BIG).astype(F32).sum())(params)["params"]["kernel"]
    assert grad.dtype == jnp.float64
    assert np.asarray(grad)[0, 0] == 4096 * 8 * 4


# Flax sees a module once.


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_what_is_captured_and_intercepted_is_as_without(jit):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, targets=None, fn=None, scopes=None, transform=None, mdl=None):
            return nn.Dense(2)(nn.Dense(8)(x)) + (0 if targets is None else targets)

    seen = {}
    for policy in (HALF, WIDE):
        calls = seen[policy] = []

        def note(next_fun, args, kwargs, context, calls=calls):
            if context.method_name in ("__call__", "setup"):
                calls.append((context.module.path, context.method_name))
            return next_fun(*args, **kwargs)

        model = jmpp.wrap(Net(), policy)
        params = model.init(jax.random.key(0), X)

        def run(params, model=model, note=note):
            given = {"targets": 1.0, "fn": 1, "scopes": 2, "transform": 3, "mdl": 4}
            with nn.intercept_methods(note):
                return model.apply(params, X, **given, capture_intermediates=True)[1]["intermediates"]

        seen[policy] = (
            calls,
            jax.tree.map(lambda x: (x.shape, x.dtype), (jax.jit(run) if jit else run)(params)),
        )
    assert seen[HALF] == seen[WIDE]


@pytest.mark.slow
@pytest.mark.usefixtures("names_of_operations")
def test_names_of_operations_are_those_without():
    names = {}
    for policy in (HALF, WIDE):
        loss, params = linen_case("dense", policy)
        text = jax.jit(loss).lower(params).compile().as_text()
        names[policy] = set(re.findall(r'op_name="([^"]*dot_general)"', text))
    assert names[HALF] == names[WIDE]
    found = jmpp.diagnose(lambda p: jnp.log(loss(p) * 0 - 1), params)
    assert "float32_gradient" not in str(found)


@pytest.mark.slow
def test_eager_gradients_compile_once():
    many = jax.jit(lambda x, w: functools.reduce(lambda x, _: jnp.tanh(x @ w), range(20), x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return many(x, self.param("w", nn.initializers.normal(), (8, 8)))

    model = jmpp.wrap(Net(), WIDE)
    params = model.init(jax.random.key(0), X)
    gradient = jax.grad(lambda p: model.apply(p, X).astype(F32).sum())
    gradient(params)
    with jax.log_compiles(), pytest_compiles() as compiled:
        gradient(params)
    assert compiled == []


@contextlib.contextmanager
def pytest_compiles():
    """The messages about compilations in a with-block."""
    messages, logger = [], logging.getLogger("jax")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
        messages[:] = [m for m in messages if m.startswith("Finished XLA compilation")]


# Devices.


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(128)(nn.relu(nn.Dense(256)(x)))


def sharded(policy, fsdp):
    model = jmpp.wrap(Two(), policy)
    x = jax.device_put(jnp.ones((64, 256)), NamedSharding(MESH, P("d")))
    params = model.init(jax.random.key(0), x)["params"]
    shardings = jax.tree.map(lambda _: NamedSharding(MESH, P("d") if fsdp else P()), params)
    step = jax.jit(
        jax.grad(lambda p, x: (model.apply({"params": p}, x) ** 2).mean()), out_shardings=shardings
    )
    return step, jax.device_put(params, shardings), x


def collectives(text):
    """Dtypes of what is sent, by operation, but for single numbers."""
    found = {}
    for types, name in re.findall(r"= (.*?) (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", text):
        dtypes = {dtype for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", types) if shape}
        found.setdefault(name, set()).update(dtypes)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_devices_sum_in_float32_and_gather_in_half(fsdp):
    step, params, x = sharded(WIDE, fsdp)
    found = collectives(step.lower(params, x).compile().as_text())
    assert found.pop("all-reduce") == {"f32"}
    assert found == ({"all-gather": {"f16"}} if fsdp else {})
    # Without, they would not.
    step, params, x = sharded(HALF, fsdp)
    assert "f16" in collectives(step.lower(params, x).compile().as_text())["all-reduce"]


class Embedded(nn.Module):
    """Rows of a table, of which a norm takes squares."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1024, 64)(tokens) * 8.0
        return nn.Dense(64)(nn.RMSNorm()(x))


@pytest.mark.slow
def test_a_table_whose_rows_are_normalised_is_gathered_in_half():
    tokens, place = jnp.arange(4096).reshape(64, 64) % 1024, NamedSharding(MESH, P("d"))
    params = jax.jit(Embedded().init)(jax.random.key(0), tokens)

    def gradient(policy):
        model = jmpp.wrap(Embedded(), policy)
        return jax.grad(lambda p, t: (model.apply(p, t) ** 2).mean())

    for policy in (WIDE, HALF):
        step = jax.jit(gradient(policy), in_shardings=(place, place), out_shardings=place)
        text = step.lower(params, tokens).compile().as_text()
        assert re.findall(r"= (\w+)\[1024,64\]\S* all-gather", text) == ["f16"]
    grads, expected = (jax.jit(gradient(policy))(params, tokens) for policy in (WIDE, "float32"))
    assert grads["params"]["Embed_0"]["embedding"].dtype == F32
    error = optax.tree.norm(optax.tree.sub(grads, expected)) / optax.tree.norm(expected)
    assert error < 0.005


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")
@pytest.mark.parametrize("fsdp", [False, True])
def test_gpus_sum_in_float32_and_gather_in_half(fsdp):
    report = jmpp.lowering_report(*sharded(WIDE, fsdp), target="H100")
    found: dict[str, set[str]] = {}
    for collective in report.collectives:
        found.setdefault(collective.collective, set()).add(collective.operands)
    sums = found["reduce-scatter" if fsdp else "all-reduce"]
    assert (sums, found.get("all-gather")) == ({"float32"}, {"float16"} if fsdp else None)
    assert {k.operands for k in report.kernels if k.flops} == {"float16 x float16"}


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_in_shard_map_and_explicit_meshes(axis_type):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    model = jmpp.wrap(Two(), WIDE)
    x = jax.random.normal(jax.random.key(3), (64, 256))
    params = model.init(jax.random.key(0), x)["params"]

    def loss(params, x):
        return (model.apply({"params": params}, x) ** 2).sum()

    expected = values(jax.grad(loss)(params, x))
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(params, NamedSharding(mesh, P())),
            jax.device_put(x, NamedSharding(mesh, P("d"))),
        )
        mapped = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
        for function in (jax.jit(mapped), jax.jit(jax.grad(loss))):
            for path, grad in values(function(*placed)).items():
                size = np.abs(expected[path]).max()
                np.testing.assert_allclose(grad, expected[path], atol=2e-3 * size, err_msg=path)
                assert not in_half(grad)


@pytest.mark.parametrize("axes", [(0, 0), (1, 1), (0, None), (None, 0), (1, 0)])
def test_what_stands_for_the_cast_of_a_weight_is_mapped_over_either_operand(axes):
    arrays = [jnp.arange(6, dtype=dtype).reshape(3, 2) for dtype in (jnp.float16, jnp.float32)]
    arrays = [
        a[0] if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in zip(arrays, axes, strict=True)
    ]

    def mapped(half, weight):
        return jax.vmap(as_cast_of, axes)(half, weight).astype(jnp.float32)

    out, transposed = jax.vjp(mapped, *arrays)
    np.testing.assert_array_equal(out, [[0, 1]] * 3 if axes[0] is None else [[0, 1], [2, 3], [4, 5]])
    to_half, to_weight = transposed(jnp.ones((3, 2)))
    assert not to_half.any()
    np.testing.assert_array_equal(to_weight, jnp.full(arrays[1].shape, 3.0 if axes[1] is None else 1.0))


@pytest.mark.slow
def test_vmap_over_an_ensemble():
    loss, params = linen_case("raw", WIDE)
    stacked = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), params)
    both = values(jax.jit(jax.vmap(jax.grad(loss)))(stacked))
    for path, grad in values(jax.jit(jax.grad(loss))(params)).items():
        np.testing.assert_allclose(both[path][0], grad, rtol=1e-3, atol=1e-3 * np.abs(grad).max())
