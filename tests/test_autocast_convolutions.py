"""Convolutions are half with a half result, also where only float32 operations read it, on each platform."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_policy as jmpp

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
def test_convolutions_and_their_gradients_are_half(half):
    name, cast = HALF[half], jmpp.autocast(loss, half)
    for platform in ("cuda", "tpu"):
        assert lowered(cast, platform, W, X) == [(name, name, name)]
        assert lowered(jax.grad(cast), platform, W, X) == [(name, name, name)] * 2
    np.testing.assert_allclose(jax.jit(cast)(W, X), loss(W, X), rtol=float(jnp.finfo(half).eps))


@pytest.mark.slow
def test_a_float32_weight_gradient_stays_float32():
    policy = "params=float32, compute=float16, output=float32, grad=float32"
    gradient = jax.grad(jmpp.autocast(loss, policy))
    assert lowered(gradient, "cuda", W, X) == [("f16", "f16", "f16"), ("f16", "f16", "f32")]
    np.testing.assert_allclose(gradient(W, X), jax.grad(loss)(W, X), atol=5e-3)


def test_audit_sees_the_half_result():
    (product,) = jmpp.audit(jmpp.autocast(loss, "float16"), W, X).products
    assert (product.lhs, product.rhs, product.result) == ("float16", "float16", "float16")
