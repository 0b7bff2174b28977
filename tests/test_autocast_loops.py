"""autocast of loops, branches and custom derivatives: values of several dtypes, and Python numbers."""

import functools

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import products
from jax import lax

from jmp_policy import autocast, region

W = jax.random.normal(jax.random.key(0), (8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (4, 8))


def carries_change_places(w, x):
    """Carries that are bfloat16, float16 and float32, each in the place of the next one."""

    def body(carry, _):
        first, second, third = carry
        return (jnp.tanh(third @ w), first, second), None

    with region("bfloat16"):
        first = x @ w
    carry, _ = lax.scan(body, (first, x @ w, x), length=4)
    return sum(jnp.sum(part) for part in carry)


def half_a_scan_in_another_region(w, x):
    def body(carry, _):
        first, second = carry
        with region("bfloat16"):
            new = jnp.tanh(second @ w)
        with region("off"):
            return (new, jnp.tanh(first @ w)), new.sum(0)

    carry, sums = lax.scan(body, (x @ w, x), length=3)
    return carry[0].sum() + carry[1].sum() + sums.sum()


def casts_of_the_users(w, x):
    def body(carry, _):
        whole, half = carry
        new = jnp.tanh(whole @ w)
        return (new, new.astype(jnp.float16)), half.astype(jnp.float32) * 0.5

    carry, halves = lax.scan(body, (x, x.astype(jnp.float16)), length=3)
    return carry[0].sum() + halves.sum()


def while_in_another_region(w, x):
    def body(state):
        step, first, second = state
        with region("bfloat16"):
            second = jnp.tanh(first @ w)
        return step + 1, second, first

    _, first, second = lax.while_loop(lambda s: s[0] < 3, body, (0, x @ w, x))
    return jnp.tanh(first).sum() + second.sum()


def branches_in_other_regions(w, x):
    def in_bfloat16(h, factor):
        with region("bfloat16"):
            return h @ w * factor

    branches = [in_bfloat16, lambda h, factor: h * factor, lambda h, factor: h.at[0].add(factor)]
    return sum(jnp.sum(lax.switch(place, branches, x @ w, 0.5) @ w) for place in range(3))


def numbers_as_carries(w, x):
    total, last = lax.scan(lambda c, row: (c + jnp.tanh(row @ w).sum(), c * 0.5), 0.0, x)
    factor, _ = lax.scan(lambda c, row: (c * jax.nn.sigmoid(row @ w).mean() + 1, None), 1.0, x)
    return total + last.sum() + factor


def mapped(w, x):
    return lax.map(lambda row: jnp.clip(jnp.tanh(row @ w), 0.0, 0.9) @ w, x, batch_size=3).sum()


def linear_recurrence(w, x):
    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    elements = jax.nn.sigmoid(x @ w), jnp.tanh(x @ w)
    return (lax.associative_scan(combine, elements)[1] @ w).sum()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped_gradient(x, largest):
    return x * 1.0


clipped_gradient.defvjp(
    lambda x, largest: (x * 1.0, None), lambda largest, _, ct: (jnp.clip(ct, -largest, largest),)
)


@jax.custom_vjp
def scaled(x, factor):
    return x * factor


scaled.defvjp(lambda x, f: (x * f, (x, f)), lambda kept, ct: (ct * kept[1], jnp.sum(ct * kept[0])))


@jax.custom_jvp
def soft(x, sharpness):
    return jnp.log1p(jnp.exp(x * sharpness)) / sharpness


soft.defjvp(lambda p, t: (soft(*p), jax.nn.sigmoid(p[0] * p[1]) * t[0]))


def custom_derivatives_of_numbers(w, x):
    h = scaled(clipped_gradient(x @ w, 0.5), 0.25)
    return (scaled(soft(soft(h, 2.0), 3), 2) @ w).sum()


def checkpoints(w, x):
    policies = [
        None,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.save_only_these_names("kept"),
    ]

    def block(w, x, slope):
        h = jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), "kept")
        return jax.nn.leaky_relu(h @ w, slope)

    for policy in policies:
        x = jax.checkpoint(block, policy=policy)(w, x, 0.2)
    return x.sum()


#: Each with the half dtypes of its products under float16.
FUNCTIONS = {
    carries_change_places: {"float16", "bfloat16"},
    half_a_scan_in_another_region: {"float32", "bfloat16"},
    casts_of_the_users: {"float16"},
    while_in_another_region: {"float16", "bfloat16"},
    branches_in_other_regions: {"float16", "bfloat16"},
    numbers_as_carries: {"float16"},
    mapped: {"float16"},
    linear_recurrence: {"float16"},
    custom_derivatives_of_numbers: {"float16"},
    checkpoints: {"float16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_values_dtypes_and_transformations(function):
    cast = autocast(function, "float16")
    np.testing.assert_allclose(jax.jit(cast)(W, X), jax.jit(function)(W, X), rtol=0.03, atol=0.03)
    assert {dtype for _, *dtypes in products(cast, W, X) for dtype in dtypes} >= FUNCTIONS[function]
    rows = jnp.stack([X, X])
    for lift, args in ((jax.checkpoint, (W, X)), (lambda f: jax.vmap(f, (None, 0)), (W, rows))):
        for lifted in (lift(cast), autocast(lift(function), "float16")):
            assert jax.eval_shape(lifted, *args) == jax.eval_shape(lift(function), *args)
    if function is not while_in_another_region:
        for half in (jax.grad(cast), autocast(jax.grad(function), "bfloat16")):
            assert jax.eval_shape(half, W, X) == jax.eval_shape(jax.grad(function), W, X)
