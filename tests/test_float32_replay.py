"""Programs computed in float32: everything half is float32, and nothing else has changed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import CASES, MLP, paired, vectors
from jax.sharding import PartitionSpec as P

import jmp_policy
from jmp_policy._src.jaxpr import compat, ir, source_lines
from jmp_policy._src.jaxpr.float32_replay import evaluate_in_float32, replay_equation, replay_in_float32

HALF = jnp.float16


def scan(x):
    return jax.lax.scan(lambda c, i: (jnp.tanh(c + i.astype(HALF)).astype(HALF), c), x, jnp.arange(5.0))


def while_loop(x):
    return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] * HALF(1.5), c[1] + 1), (x, 0))


def cond(x):
    first = jax.lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: -x, x)
    return first, jax.lax.switch(1, [jnp.sin, jnp.cos], x)


def remat(x):
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * x))
    return inner(x), jax.grad(lambda x: inner(x).sum())(x)


@jax.custom_vjp
def sine(x):
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))


def custom_vjp(x):
    return sine(x), jax.grad(lambda x: sine(x).sum())(x)


def custom_jvp(x):
    return jax.nn.relu(x), jax.grad(lambda x: jax.nn.silu(x).sum())(x)


def shard_map(x):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda x: jax.lax.psum((x @ x.T).astype(HALF), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
    )(x)


def conv(x):
    image, kernel = x[None, None], x[None, None, :3, :3]
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME")


def scatter(x):
    return x.at[jnp.array([0, 1, 1])].add(1), x.at[0].mul(3), x.at[1].set(0)


def reductions(x):
    pooled = jax.lax.reduce_window(x, HALF(0), lambda a, b: a + b, (2, 2), (1, 1), "SAME")
    return pooled, jax.lax.reduce(x, HALF(0), jax.lax.add, (0,)), jnp.sort(x), jax.lax.top_k(x, 2)


def max_pool(x):
    return jax.grad(lambda x: nn.max_pool(x[None, :, :, None], (2, 2)).sum())(x)


def integers(x):
    return x.astype(jnp.int32), jnp.arange(4, dtype=HALF), jnp.arange(4).astype(HALF), x.argmax(), x > 0


def references(x):
    ref = jax.new_ref(x)

    def body(i, carry):
        ref[...] = ref[...] * HALF(2)
        return carry

    jax.lax.fori_loop(0, 3, body, 0)
    return ref[...]


def products(x):
    wide = jax.lax.dot(x, x, preferred_element_type=jnp.float32)
    return wide, jnp.einsum("ij,kj->ik", x, x), jax.vmap(jnp.dot)(x, x)


def float8(x):
    return x.astype(jnp.float8_e4m3fn).astype(HALF)


def rounded(x):
    return jax.lax.reduce_precision(x, 5, 3), jax.lax.reduce_precision(x.astype(jnp.float32), 8, 23)


def jitted(x):
    return jax.jit(lambda x: jnp.tanh(x) * 3, donate_argnums=0)(x + 1)


def constant(x):
    return x + np.arange(4, dtype=HALF)


def branches(x):
    return jax.lax.platform_dependent(x, cpu=lambda x: x * 2, default=lambda x: x * 2)


#: All within a few roundings of float16 of what they are as traced, but for the last two.
PROGRAMS = [
    scan, while_loop, cond, remat, custom_vjp, custom_jvp, shard_map, conv, scatter, reductions, max_pool,
    integers, references, products, jitted, constant, branches, float8, rounded,
]  # fmt: skip
COARSE = {"float8": 2**-3, "rounded": 2**-3}


def matrix():
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), HALF)


def has_half(jaxpr):
    opened = compat.open_jaxpr(jaxpr)
    atoms = [*opened.invars, *opened.outvars, *(a for e in opened.eqns for a in (*e.invars, *e.outvars))]
    named = any("float16" in str(value) for e in opened.eqns for value in e.params.values())
    half = any(ir.dtype_of(atom) in (np.dtype(HALF), np.dtype(jnp.bfloat16)) for atom in atoms)
    return half or named or any(has_half(inner) for e in opened.eqns for inner in ir.subjaxprs(e))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_every_half_value_becomes_float32(program):
    x = matrix()
    traced = jax.eval_shape(program, x)
    wanted = jax.tree.map(lambda t: np.dtype(np.float32) if t.dtype == HALF else t.dtype, traced)
    out = replay_in_float32(program)(x)
    for got in (out, jax.eval_shape(replay_in_float32(program), x), jax.jit(replay_in_float32(program))(x)):
        assert jax.tree.map(lambda t: t.dtype, got) == wanted
        assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, traced)
    # 2^-11 is a rounding of float16; a handful of them, each times a sum of up to eight terms near 3.
    bound = COARSE.get(program.__name__, 2**-11 * 32)
    for got, half in zip(jax.tree.leaves(out), jax.tree.leaves(program(x)), strict=True):
        got, half = np.asarray(got, np.float64), np.asarray(half, np.float64)
        np.testing.assert_allclose(got, half, rtol=bound, atol=bound)
    inside = jax.make_jaxpr(replay_in_float32(lambda x: program(x.astype(HALF))))(x.astype(jnp.float32))
    assert not has_half(inside)


@dataclasses.dataclass(frozen=True)
class Twin:
    """A program in half and the same in float32."""

    name: str
    make: Callable[[Any], Callable[[Any], Any]]


TWINS = [
    Twin("scan", lambda d: lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) + 1, c), x, None, length=4)),
    Twin("grad", lambda d: jax.grad(lambda x: (jnp.tanh(x @ x) ** 2).sum())),
    Twin("remat", lambda d: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.exp(jnp.sin(x)))(x).sum())),
    Twin("range", lambda d: lambda x: jnp.exp(x * 20) / jnp.exp(x * 20).sum()),
    Twin("iota", lambda d: lambda x: x[0, 0] + jnp.arange(4000, dtype=d)),
    Twin("to half and back", lambda d: lambda x: (x * 2.0**15 * 4).astype(d).astype(jnp.float32) / 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("twin", "dtype"), paired(TWINS, ["float16", "bfloat16"]), ids=lambda of: getattr(of, "name", of)
)
def test_what_it_computes_is_the_float32_program(twin, dtype):
    x = matrix().astype(dtype)
    got = jax.jit(replay_in_float32(twin.make(dtype)))(x)
    wanted = jax.jit(twin.make("float32"))(x.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_products_are_in_full_float32_on_every_device():
    def function(x):
        return (x @ x.T).astype(jnp.float16) @ x.astype(jnp.float16)

    x = jnp.ones((4, 4))
    jaxpr = jax.make_jaxpr(function)(x)

    def asked(replay):
        eqns = jax.make_jaxpr(replay)(x).eqns
        return [eqn.params["precision"] for eqn in eqns if eqn.primitive.name == "dot_general"]

    assert asked(lambda x: evaluate_in_float32(jaxpr, [x])) == [(jax.lax.Precision.HIGHEST,) * 2] * 2
    # What is compiled to be compared with multiplies in TF32 where the program would.
    assert asked(replay_in_float32(function)) == [None] * 2


@pytest.mark.once
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_gradients_of_wrapped_models_are_those_of_the_models(case):
    model, inputs = case.make(), case.inputs()
    variables = jax.jit(model.init)(jax.random.key(0), inputs)

    def gradients(model):
        def loss(params, inputs):
            out, _ = model.apply({**variables, "params": params}, inputs, mutable=True)
            return (out.astype(jnp.float32) ** 2).mean()

        return jax.grad(loss)

    wrapped = jmp_policy.wrap(model, "p=float32,c=bfloat16,o=float32")
    got = jax.jit(replay_in_float32(gradients(wrapped)))(variables["params"], inputs)
    wanted = jax.jit(gradients(model))(variables["params"], inputs)
    # Sums of some hundred terms in another order, and constants such as sqrt(2 / pi) in bfloat16.
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    bound = 1e-5 if case.name in EXACT else 2**-8
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound * scale), got, wanted)


EXACT = {"mlp", "cnn", "lstm"}


@pytest.mark.slow
def test_training_step_in_float16():
    model, inputs = MLP(), vectors(16, 8)()
    params = model.init(jax.random.key(0), inputs)
    wrapped = jmp_policy.wrap(model, "mixed_float16")
    tx = jmp_policy.loss_scaled(optax.sgd(0.1), jmp_policy.StaticLossScale(1024.0))

    def step(params, state, x):
        def loss(params):
            return (wrapped.apply(params, x) ** 2).mean()

        value, grads = jmp_policy.scaled_value_and_grad(loss)(state, params)
        return value, grads, tx.update(grads, state, params)

    value, grads, _ = jax.jit(replay_in_float32(step))(params, tx.init(params), inputs)
    wanted = jax.jit(jax.value_and_grad(lambda p: (model.apply(p, inputs) ** 2).mean()))(params)
    # A scale that is a power of two changes no digit of float32.
    grads = jax.tree.map(lambda g: np.asarray(g), grads)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    for got, exact in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted[1]), strict=True):
        ratio = 1024.0 if np.abs(got).max() > 100 * np.abs(exact).max() else 1.0
        np.testing.assert_allclose(got / ratio, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_random_numbers_are_those_of_half():
    def draw(key):
        mask = jax.random.bernoulli(key, 0.5, (64,))
        normal = jax.random.normal(key, (64,), HALF)
        return jax.random.uniform(key, (64,), HALF), normal, jax.random.gamma(key, HALF(2), (8,), HALF), mask

    key = jax.random.key(0)
    for got, half in zip(replay_in_float32(draw)(key), draw(key), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(half))


def test_kernels_and_callbacks_see_what_they_were_traced_with():
    seen = []

    def host(x):
        seen.append(x.dtype)
        return x

    x = matrix()
    out = replay_in_float32(lambda x: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2)(
        x
    )
    assert out.dtype == jnp.float32
    assert seen == [HALF]


def test_names_and_lines_are_kept():
    def named(x):
        with jax.named_scope("block"):
            return jnp.sin(x.astype(HALF))

    (eqn,) = compat.open_jaxpr(jax.make_jaxpr(replay_in_float32(named))(jnp.float32(1))).eqns
    assert "block" in str(eqn.source_info.name_stack)
    assert source_lines.source_line(eqn).startswith("test_float32_replay.py")


def test_one_equation():
    jaxpr = jax.make_jaxpr(scan)(matrix())
    (eqn,) = (e for e in compat.open_jaxpr(jaxpr).eqns if e.primitive.name == "scan")
    values = [jnp.ones(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    outs = replay_equation(eqn, values)
    assert {out.dtype for out in outs} == {np.dtype(np.float32)}
    assert [out.dtype for out in evaluate_in_float32(jaxpr, [matrix()])] == [np.dtype(np.float32)] * 2


def test_float64_stays_and_differentiation_works():
    with jax.enable_x64(True):
        out = replay_in_float32(lambda x: (x.astype(jnp.float64) * 2, x.astype(HALF)))(jnp.ones(3, HALF))
        assert [o.dtype for o in out] == [np.dtype(np.float64), np.dtype(np.float32)]
    grads = jax.grad(lambda x: replay_in_float32(remat)(x)[0].sum())(matrix().astype(jnp.float32))
    assert grads.dtype == jnp.float32


def test_arguments_that_are_no_arrays_are_static():
    def f(x, n, *, how):
        return x * n if how == "times" else x

    assert float(replay_in_float32(f)(HALF(2), 3, how="times")) == 6


def test_only_functions():
    with pytest.raises(TypeError, match=r"takes a function.*call it already"):
        replay_in_float32(jnp.ones(2))  # type: ignore[arg-type]
