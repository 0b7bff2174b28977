"""What autocast keeps for the backward pass: half operands of elementwise parts, weights of softmaxes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

import jmp_policy as jmpp
from jmp_policy._src.autocast import parts

ROWS, WIDTH = 16, 64
HALVES = ("float16", "bfloat16")
SCALE, OFFSET = jnp.linspace(0.5, 1.5, WIDTH), jnp.linspace(-0.1, 0.1, WIDTH)
MASK = jnp.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 3 > 0


def normalized(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * SCALE + OFFSET


@jax.custom_jvp
def clipped_exp(x):
    return jnp.minimum(jnp.exp(x), 2.0)


@clipped_exp.defjvp
def _(primals, tangents):
    return clipped_exp(*primals), tangents[0] * jnp.exp(primals[0])


#: Functions of two half arrays whose result is read in half, with what they may keep beside the operands of
#: products: bytes per element. Without parts it is at least 4.
FUNCTIONS = {
    "tanh of exp": (lambda x, u: x * jnp.tanh(jnp.exp(x) + x), 0),
    "exact gelu": (lambda x, u: jax.nn.gelu(x, approximate=False), 0),
    "gated gelu": (lambda x, u: jax.nn.gelu(x, approximate=False) * u, 0),
    "softplus": (lambda x, u: jax.nn.softplus(x), 0),
    "elu": (lambda x, u: jax.nn.elu(x), 0),
    "mish": (lambda x, u: jax.nn.mish(x), 0),
    "logaddexp": (lambda x, u: jnp.logaddexp(x, u), 0),
    "custom_jvp": (lambda x, u: clipped_exp(x) + 1.0, 0),
    "quotient": (lambda x, u: x / (2.0 + jnp.exp(u)), 0),
    "broadcast": (lambda x, u: jnp.exp(x * SCALE) + OFFSET, 0),
    "masked": (lambda x, u: jnp.where(MASK, jnp.exp(x), 0.0), 0),
    "moved": (lambda x, u: jnp.exp(x).reshape(4, -1, WIDTH).swapaxes(0, 1).reshape(ROWS, WIDTH), 0),
    "normalized": (lambda x, u: normalized(x), 4),  # The float32 operand of the squares that are summed.
    "softmax": (lambda x, u: jax.nn.softmax(x), 0),
    "softmax, dropped": (lambda x, u: jnp.where(MASK, jax.nn.softmax(x) / 0.9, 0.0), 6),
    "softmax of both axes": (lambda x, u: jax.nn.softmax(x, axis=(0, 1)), 0),
}
PARAMS = {
    name: 0.06 * jax.random.normal(jax.random.key(i), (WIDTH, WIDTH))
    for i, name in enumerate(("w", "u", "v"))
}
X = jax.random.normal(jax.random.key(7), (ROWS, WIDTH))


def loss_of(function):
    def loss(params, x):
        h, u = x @ params["w"], x @ params["u"]
        # Products read them as well, so that they are half.
        return jnp.sum((function(h, u) @ params["v"]) ** 2) + jnp.sum(h @ params["v"] + u @ params["v"])

    return loss


def loss_without_parts(function, half, monkeypatch):
    loss = jmpp.autocast(loss_of(function), half)

    def unjoined(*args):
        with monkeypatch.context() as patch:
            patch.setattr(parts, "join", lambda plan: plan.program)
            return loss(*args)

    return unjoined


def residuals(loss, *args):
    """Types of what the backward pass gets."""

    def kept(params, *others):
        return jax.tree.leaves(jax.vjp(lambda p: loss(p, *others), params)[1])

    jaxpr = jax.make_jaxpr(kept)(*args).jaxpr
    made = {var for eqn in jaxpr.eqns for var in eqn.outvars}
    outs = [var for var in jaxpr.outvars if not isinstance(var, Literal)]
    return [var.aval for var in dict.fromkeys(outs) if var in made]


def whole_arrays(loss, *args):
    return sum(a.dtype.itemsize for a in residuals(loss, *args) if a.size == ROWS * WIDTH)


def value_and_grad(loss, x=X):
    return jax.jit(jax.value_and_grad(loss))(PARAMS, x)


def errors(grads, exact):
    return [float(jnp.linalg.norm(grads[k] - exact[k]) / jnp.linalg.norm(exact[k])) for k in exact]


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_kept(name, monkeypatch):
    function, most = FUNCTIONS[name]
    for half in HALVES:
        # What the products keep, and the float32 operand of the squares.
        products = whole_arrays(jmpp.autocast(loss_of(lambda x, u: x + u), half), PARAMS, X)
        kept = whole_arrays(jmpp.autocast(loss_of(function), half), PARAMS, X)
        before = whole_arrays(loss_without_parts(function, half, monkeypatch), PARAMS, X)
        assert kept - products <= most
        assert before - products >= max(4, most + 2)


@pytest.mark.once
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_no_worse(name, monkeypatch):
    # A part computes what was computed, in float32. What its operand's gradient is added to others in, was
    # float32 and is half: one more rounding, by 2^-12 (float16) or 2^-9. The weights of a softmax, a factor
    # of its derivative twice, are rounded to half.
    function, _ = FUNCTIONS[name]
    loss = loss_of(function)
    exact_value, exact = value_and_grad(loss)
    for half, unit in zip(HALVES, (2.0**-11, 2.0**-8), strict=True):
        value, grads = value_and_grad(jmpp.autocast(loss, half))
        _, before = value_and_grad(loss_without_parts(function, half, monkeypatch))
        extra = unit if "softmax" in name else unit / 2
        for now, then in zip(errors(grads, exact), errors(before, exact), strict=True):
            assert now <= 1.05 * then + extra
        assert abs(value - exact_value) <= 8 * unit * abs(exact_value)
        assert {g.dtype for g in grads.values()} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_gradients_of_one_part_are_those_of_float32_rounded_once():
    x = jnp.linspace(-12, 12, 4096, dtype="float16").reshape(64, 64)

    def half_of(f):
        return jmpp.autocast(lambda x, w: f(x.astype(jnp.float32)) @ w, "float16")

    for f in (jax.nn.gelu, jax.nn.softplus, lambda x: jax.nn.gelu(x, approximate=False), jax.nn.elu):
        got = jax.jit(jax.vjp(lambda x, f=f: half_of(f)(x, jnp.eye(64)), x)[1])(jnp.ones((64, 64)))[0]
        exact = jax.jit(jax.vmap(jax.grad(f)))(x.astype(jnp.float32).ravel()).reshape(x.shape)
        np.testing.assert_allclose(got, exact.astype("float16"), rtol=2.0**-9, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["exact gelu", "gated gelu", "custom_jvp", "masked", "normalized", "softmax"]
)
def test_forward_mode_second_derivatives_and_vmap(name):
    loss = loss_of(FUNCTIONS[name][0])
    half = jmpp.autocast(loss, "float16")
    xs = jnp.stack([X, 0.5 * X])
    tangent = {k: jnp.ones_like(v) for k, v in PARAMS.items()}

    def derivatives(loss):
        def along(params, x):
            return jax.jvp(lambda p: loss(p, x), (params,), (tangent,))[1]

        return (
            jax.vmap(along, (None, 0))(PARAMS, xs),
            jax.vmap(jax.grad(loss), (None, 0))(PARAMS, xs)["w"],
            jax.grad(along)(PARAMS, X)["w"],
            jax.jvp(lambda p: jax.grad(loss)(p, X)["w"], (PARAMS,), (tangent,))[1],
        )

    got, exact = jax.jit(lambda: derivatives(half))(), jax.jit(lambda: derivatives(loss))()
    for one, other in zip(got, exact, strict=True):
        assert jnp.linalg.norm(one - other) <= 0.03 * jnp.linalg.norm(other)


def primitives_of(function, *args):
    from jmp_policy._src.jaxpr import ir

    return list(ir.primitives(jax.make_jaxpr(function)(*args)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.nn.relu(x),  # A mask.
        lambda x: x * 2.0 + 1.0,  # Nothing.
        lambda x: jnp.clip(-x, -1.0, 1.0),
        lambda x: jax.nn.silu(x),  # All in half.
    ],
)
def test_derivatives_that_need_nothing_in_float32_get_no_part(function):
    loss = jmpp.autocast(loss_of(lambda x, u: function(x)), "float16")
    assert "checkpoint" not in primitives_of(jax.grad(loss), PARAMS, X)


def test_results_in_float32_are_not_rounded():
    def f(x, w):
        h = x @ w
        return jax.nn.gelu(h), jnp.tanh(h) @ w, jax.nn.softmax(h), jnp.exp(h.sum(-1))

    loss = jmpp.autocast(lambda x, w: sum(map(jnp.sum, f(x, w))), "bfloat16")
    assert "checkpoint" not in primitives_of(jax.grad(loss), X, PARAMS["w"])
    twice = lambda x: jnp.exp(x) / (1 + x * x)  # noqa: E731 - float32 in, float32 out
    assert np.array_equal(jmpp.autocast(twice, "float16")(X), twice(X))


def test_what_the_caller_asks_for_is_in_half():
    def f(x, w):
        return (jnp.exp(x @ w) * (x @ w)) @ w

    asked = jmpp.autocast(f, "float16", lower={"exp"})
    assert "f16[16,64] = exp" in str(jax.make_jaxpr(asked)(X, PARAMS["w"]))
    row = jmpp.explain(f, "float16")(X, PARAMS["w"]).of("exp")[0]
    assert (row.operands, row.why) == (
        "float32",
        "full: multiplies a large operand's rounding; exceeds float16 above 11.1",
    )


def test_a_part_is_traced_once_however_often_it_occurs():
    def f(x, ws):
        for name in ("w", "u", "v"):
            x = jax.nn.gelu(x @ ws[name], approximate=False)
        return jnp.sum(x @ ws["w"])

    parts.kept_function.cache_clear()
    loss = jmpp.autocast(f, "float16")
    jax.make_jaxpr(jax.grad(loss))(X, PARAMS)
    assert parts.kept_function.cache_info().misses == 1
    jax.make_jaxpr(jax.grad(loss))(X, PARAMS)
    assert parts.kept_function.cache_info().misses == 1


@pytest.mark.slow
def test_scans_and_checkpoints():
    def block(x, w):
        return x + jax.nn.gelu(x @ w, approximate=False) @ w

    def scanned(ws, x, step=block):
        return jnp.sum(lax.scan(lambda x, w: (step(x, w), None), x @ ws[0], ws)[0] ** 2)

    ws = jnp.stack(list(PARAMS.values()))
    exact = jax.grad(scanned)(ws, X)
    for policy in (None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable):
        step = jax.checkpoint(block, policy=policy)
        loss = jmpp.autocast(lambda ws, x, step=step: scanned(ws, x, step), "float16")
        assert jnp.linalg.norm(jax.jit(jax.grad(loss))(ws, X) - exact) <= 0.01 * jnp.linalg.norm(exact)
    kept = residuals(jmpp.autocast(scanned, "float16"), ws, X)
    stacked = [a for a in kept if a.shape[:1] == (3,) and a.size == 3 * ROWS * WIDTH]
    assert {a.dtype.name for a in stacked} == {"float16"}
    assert len(stacked) <= 3


def test_a_softmax_has_one_barrier_which_is_on_its_half_result():
    def loss(x):
        return (jax.nn.softmax(x @ PARAMS["w"]) @ PARAMS["u"]).sum()

    lowered = jax.jit(jax.grad(jmpp.autocast(loss, "float16"))).lower(X)
    # One on the cotangent too would copy whole arrays on TPUs.
    (barrier,) = re.findall("stablehlo.optimization_barrier .*", lowered.as_text())
    assert barrier.endswith(f" : tensor<{ROWS}x{WIDTH}xf16>")


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_arrays_of_no_elements_and_of_one(half):
    def f(w, x):
        return jnp.sum(jax.nn.gelu(x @ w, approximate=False) @ w) + jnp.sum(jax.nn.softmax(x @ w) @ w)

    for rows, width in ((0, 4), (3, 0), (1, 1)):
        grad = jax.grad(jmpp.autocast(f, half))(jnp.ones((width, width)), jnp.ones((rows, width)))
        assert grad.shape == (width, width)
        assert jnp.isfinite(grad).all()
