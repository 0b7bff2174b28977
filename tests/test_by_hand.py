"""A wrapped model against the same model written by hand with `dtype=float16` in every layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CASES, cost, loss_of, products

import jmp_policy as jmpp


def gradient(model, variables, x):
    return jax.value_and_grad(loss_of(model, variables, x), has_aux=True)


#: Models in which every operation by hand is one of the wrapped model: those without a softmax.
SAME_ARITHMETIC = ("mlp", "cnn", "resnet_block", "lstm")


@pytest.mark.once
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_same_products_bytes_memory_and_values(case):
    """One compiled program each, with all that is to be said of it."""
    x = case.inputs()
    variables = jax.jit(case.make().init)(jax.random.key(0), x)
    params = variables["params"]
    models = case.make(dtype=jnp.float16), jmpp.wrap(case.make(), "mixed_float16")
    by_hand, wrapped = (gradient(model, variables, x) for model in models)
    assert products(wrapped, params) == products(by_hand, params)
    hand, ours = (jax.jit(f).lower(params).compile() for f in (by_hand, wrapped))
    (hand_bytes, hand_temp), (bytes_accessed, temp) = cost(hand), cost(ours)
    # The softmax is in float32, and by hand in float16; that may show where everything else is small.
    assert bytes_accessed <= 1.02 * hand_bytes
    assert temp <= 1.01 * hand_temp

    (want, _), want_grads = hand(params)
    (got, _), got_grads = ours(params)
    # The softmax differs: in float32 here, in float16 by hand.
    np.testing.assert_allclose(got, want, rtol=2.0**-8)
    flat = [jnp.concatenate([g.ravel() for g in jax.tree.leaves(t)]) for t in (want_grads, got_grads)]
    error = float(jnp.linalg.norm(flat[1] - flat[0]) / jnp.linalg.norm(flat[0]))
    assert error <= 2.0**-5
    if case.name in SAME_ARITHMETIC:
        np.testing.assert_array_equal(flat[0], flat[1])


@pytest.mark.slow
def test_attention_keeps_large_logits_and_masks():
    """A masked row and logits that float16's exp could not sum: as float32 within rounding."""
    attend = nn.MultiHeadDotProductAttention(2)
    x = 8 * jax.random.normal(jax.random.key(0), (2, 64, 16))
    mask = nn.make_causal_mask(jnp.ones((2, 64)))
    variables = attend.init(jax.random.key(1), x)
    want = attend.apply(variables, x, mask=mask)
    got = jmpp.wrap(attend, "mixed_float16").apply(variables, x, mask=mask)
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 2.0**-6


@pytest.mark.slow
def test_attention_softmax_weights_sum_to_one():
    """2048 equal weights of float16 summed in float16 would stop at 1 - 2**-11 * k."""
    from jmp_policy._src.autocast.softmax import softmax_in_float32

    x = jnp.zeros((1, 2048), jnp.float16)
    y = softmax_in_float32(jnp.dtype("float16"), x)
    assert y.dtype == jnp.float16
    assert float(y.astype(jnp.float32).sum()) == 1.0
    primal, tangent = jax.jvp(lambda x: softmax_in_float32(jnp.dtype("float16"), x), (x,), (x + 1,))
    assert primal.dtype == tangent.dtype == jnp.float16
    assert float(jnp.abs(tangent).max()) == 0.0  # A shift of all logits changes nothing.
    hessian = jax.hessian(lambda x: softmax_in_float32(jnp.dtype("float32"), x)[0])(jnp.ones(3))
    np.testing.assert_allclose(hessian, jax.hessian(lambda x: jax.nn.softmax(x)[0])(jnp.ones(3)), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_a_mask_has_a_barrier_before_its_derivative(masked):
    """Without it XLA for a GPU keeps the float32 exponentials of a ViT beside the half weights."""
    model = jmpp.wrap(nn.MultiHeadDotProductAttention(2), "mixed_float16")
    x, mask = jnp.ones((2, 8, 16)), nn.make_causal_mask(jnp.ones((2, 8))) if masked else None
    variables = model.init(jax.random.key(0), x, mask=mask)
    jaxpr = jax.make_jaxpr(jax.grad(lambda v: model.apply(v, x, mask=mask).sum()))(variables)
    assert str(jaxpr).count("optimization_barrier") == (0 if masked else 1)


@pytest.mark.slow
def test_attention_softmax_gradient_sums_in_float32():
    """As accurate as half precision can tell: the transposed tangent must not sum in half."""
    from jmp_policy._src.autocast.softmax import softmax_in_float32

    x = jax.random.normal(jax.random.key(0), (64, 128))
    cotangent = 1 + jax.random.normal(jax.random.key(1), (64, 128))
    x, cotangent = x.astype(jnp.float16), cotangent.astype(jnp.float16)

    def gradient(softmax, dtype):
        return jax.vjp(softmax, x.astype(dtype))[1](cotangent.astype(dtype))[0].astype(jnp.float32)

    want = gradient(jax.nn.softmax, jnp.float32)
    got = gradient(lambda x: softmax_in_float32(x.dtype, x), jnp.float16)
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 2.0**-11
