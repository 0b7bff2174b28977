"""Convolutions that only float32 operations read: half on GPUs, where there is none with a float32 result."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from jax import lax

import jmp_policy as jmpp
from jmp_policy._src.products.functions import CONV_WITH_FLOAT32_RESULT

X = jax.random.normal(jax.random.key(0), (2, 6, 6, 4))
W = jax.random.normal(jax.random.key(1), (3, 3, 4, 8))


def convolution(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loss(w, x):
    return jax.nn.logsumexp(convolution(w, x))


def lowered(function, platform, *args):
    """Element types of the operands and results of convolutions."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    types = [re.findall(r"tensor<[\dx]*x(\w+)>", line.split(" : ")[-1]) for line in lines]
    return [tuple(found) for found in types]


HALF = {"float16": "f16", "bfloat16": "bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("half", HALF)
def test_rounded_on_gpus_alone(half):
    name, cast = HALF[half], jmpp.autocast(loss, half)
    for platform in ("cuda", "rocm"):
        assert lowered(cast, platform, W, X) == [(name, name, name)]
        # The gradient of the weights is half anywhere, as that of a half convolution.
        assert lowered(jax.grad(cast), platform, W, X) == [(name, name, name)] * 2
    assert lowered(cast, "tpu", W, X) == [(name, name, "f32")]
    exact = loss(*(a.astype(half).astype("float32") for a in (W, X)))
    np.testing.assert_allclose(jax.jit(cast)(W, X), exact, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    {
        "vmap": lambda f: jax.vmap(f, (None, 0)),
        "checkpoint": jax.checkpoint,
        "scan": lambda f: lambda w, x: lax.scan(lambda c, x: (c + f(w, x), None), 0.0, x)[0],
    }.items(),
    ids=lambda item: item[0],
)
def test_under_transformations(transform):
    _, of = transform
    x = X if of is jax.checkpoint else jnp.stack([X, 2 * X])
    transformed = of(jmpp.autocast(loss, "float16"))
    assert lowered(transformed, "cuda", W, x) == [("f16", "f16", "f16")]
    np.testing.assert_allclose(jax.jit(transformed)(W, x), of(loss)(W, x), rtol=1e-3)


@pytest.mark.slow
def test_a_float32_weight_gradient_stays_float32():
    policy = "params=float32, compute=float16, output=float32, grad=float32"
    gradient = jax.grad(jmpp.autocast(loss, policy))
    assert lowered(gradient, "cuda", W, X) == [("f16", "f16", "f16"), ("f16", "f16", "f32")]
    np.testing.assert_allclose(gradient(W, X), jax.grad(loss)(W, X), atol=2e-3)


def test_it_is_one_convolution_to_those_who_look():
    jaxpr = jax.make_jaxpr(jmpp.autocast(loss, "float16"))(W, X)
    (eqn,) = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "conv_general_dilated"]
    assert eqn.primitive is CONV_WITH_FLOAT32_RESULT
    assert eqn.outvars[0].aval.dtype == jnp.float32
    (product,) = jmpp.audit(jmpp.autocast(loss, "float16"), W, X).products
    assert (product.lhs, product.rhs, product.result) == ("float16", "float16", "float32")


def test_one_that_is_handed_on_in_half_is_jaxs():
    def two(w, x):
        return jax.nn.logsumexp(convolution(jnp.swapaxes(w, 2, 3)[..., :4], convolution(w, x)))

    jaxpr = jax.make_jaxpr(jmpp.autocast(two, "float16"))(W, X)
    found = [e.primitive for e in equations(jaxpr.jaxpr) if e.primitive.name == "conv_general_dilated"]
    assert [p is CONV_WITH_FLOAT32_RESULT for p in found] == [False, True]
