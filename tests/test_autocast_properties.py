"""Properties of autocast that hold of any program: small ones are made at random."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, is_of_one_term
from hypothesis import given, settings
from jax import lax

from jmp_policy import autocast

SIZE = 8


def _loop(x, w):
    return lax.scan(lambda c, row: (jnp.tanh(c @ w + row), c.sum()), x, jnp.stack([x, w]))[0]


def _branch(x, y):
    return lax.cond(x[0, 0] > 0, lambda: x @ y, lambda: x - y)


#: Each takes two matrices and gives one. Bounded, so that depth does not overflow.
OPERATIONS = [
    lambda x, y: x @ y / SIZE,
    lambda x, y: x @ y.T / SIZE,
    lambda x, y: jnp.einsum("ij,kj->ik", x, y) / SIZE,
    lambda x, y: x + y,
    lambda x, y: x * jnp.tanh(y),
    lambda x, y: jnp.maximum(x, 0.5 * y),
    lambda x, y: jnp.where(x > y, x, 1e-9),
    lambda x, y: jax.nn.softmax(x, axis=-1) - y,
    lambda x, y: jnp.exp(-jnp.abs(x)) * y,
    lambda x, y: x / (1 + jnp.sum(y**2, axis=0)),
    lambda x, y: jnp.concatenate([x, y])[1 : SIZE + 1],
    lambda x, y: jnp.sort(x, axis=0) + y[0],
    lambda x, y: x[jnp.array([0, 0, 2, 1, 4, 3, 7, 7])] * y.mean(),
    lambda x, y: jax.nn.gelu(x) - jax.nn.relu(y),
    lambda x, y: jax.checkpoint(lambda x, y: jnp.sin(x @ y))(x, y),
    lambda x, y: jax.jit(lambda x, y: jnp.cos(x) @ y / SIZE)(x, y),
    lambda x, y: jax.vmap(jnp.dot)(x, y)[:, None] / SIZE * y,
    lambda x, y: x.at[1].set(y[2]),
    lambda x, y: lax.stop_gradient(x) - jnp.clip(y, -1, 1),
    _loop,
    _branch,
]

#: Steps of a program: which operation, on which two of the values so far.
PROGRAMS = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 20), st.integers(0, 20)),
    min_size=1,
    max_size=6,
)


def run(steps, *inputs):
    values = list(inputs)
    for operation, left, right in steps:
        values.append(OPERATIONS[operation](values[left % len(values)], values[right % len(values)]))
    return values[-1], values[len(values) // 2]


def inputs():
    keys = jax.random.split(jax.random.key(3), 2)
    return [jax.random.normal(key, (SIZE, SIZE)) for key in keys]


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@settings(max_examples=25)
@given(steps=PROGRAMS)
def test_float32_is_the_identity_bit_for_bit(steps):
    program = functools.partial(run, steps)
    assert_same(autocast(program, "float32")(*inputs()), program(*inputs()))


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@settings(max_examples=25)
@given(steps=PROGRAMS)
def test_output_dtypes_are_kept_and_twice_equals_once(half, steps):
    program = functools.partial(run, steps)
    once = autocast(program, half)
    out = once(*inputs())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(
        lambda x: (x.shape, x.dtype), jax.eval_shape(program, *inputs())
    )
    assert_same(autocast(once, half)(*inputs()), out)


#: What never runs in half, forward or backward.
NEVER = {"exp", "exp2", "log", "log1p", "pow", "sqrt", "rsqrt", "sin", "cos", "reduce_sum", "cumsum", "sort"}


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@settings(max_examples=25)
@given(steps=PROGRAMS)
def test_products_are_half_and_sums_are_not(half, steps):
    program = functools.partial(run, steps)

    def loss(*args):
        return sum(jnp.sum(out) for out in autocast(program, half)(*args))

    gradient = jax.grad(loss, argnums=(0, 1))
    for eqn in equations(jax.make_jaxpr(gradient)(*inputs()).jaxpr):
        found = {v.aval.dtype.name for v in eqn.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)}
        if eqn.primitive.name == "dot_general":
            assert found == {half}, eqn
        elif eqn.primitive.name in NEVER and not is_of_one_term(eqn):
            assert half not in found, eqn
    assert {g.dtype for g in jax.eval_shape(gradient, *inputs())} == {np.dtype(np.float32)}


ROWS = 10
SENDERS, RECEIVERS = jnp.arange(ROWS), (jnp.arange(ROWS) * 3 + 1) % ROWS

#: Each takes two matrices of rows, the other arguments and what multiplies matrices, and gives rows.
MIXED = [
    lambda x, y, more, dot: dot(x, more["w"]) / SIZE,
    lambda x, y, more, dot: dot(x - x[:1], more["w"]) / SIZE,
    lambda x, y, more, dot: x[SENDERS] - x[RECEIVERS],
    lambda x, y, more, dot: x[RECEIVERS] + y,
    lambda x, y, more, dot: jnp.concatenate([x[:, ::2], y[:, 1::2]], 1),
    lambda x, y, more, dot: jnp.stack([x, y], 1)[SENDERS, SENDERS % 2],
    lambda x, y, more, dot: lax.dynamic_update_slice(x, y[:2], (1, 0)),
    lambda x, y, more, dot: x - x.mean(0),
    lambda x, y, more, dot: jnp.where(y > x, x, y[:1]),
    lambda x, y, more, dot: jnp.maximum(x, y[:, :1]),
    lambda x, y, more, dot: x - jnp.broadcast_to(y[:1], x.shape),
    lambda x, y, more, dot: x * more["large"] / more["large"],
    lambda x, y, more, dot: x + more["t"][:, None] - more["t"][RECEIVERS][:, None],
    lambda x, y, more, dot: x - more["table"][more["ids"].astype(int)],
    lambda x, y, more, dot: y + jnp.einsum("i,j->ij", more["t"], more["w"][0]) / more["large"],
    lambda x, y, more, dot: dot(jnp.concatenate([x, more["t"][:, None] - more["t"][0]], 1), more["wide"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, len(MIXED) - 1), st.integers(0, 20), st.integers(0, 20)),
        min_size=1,
        max_size=6,
    )
)
def test_only_what_products_read_is_rounded(half, steps):
    """Gathers, joins, indices and broadcasts of arguments are off by at most twice what products round."""
    keys = jax.random.split(jax.random.key(7), 5)
    rows = [100 + jax.random.normal(keys[0], (ROWS, SIZE)), jax.random.normal(keys[1], (ROWS, SIZE))]
    more = {
        "w": jax.random.normal(keys[2], (SIZE, SIZE)),
        "wide": jax.random.normal(keys[3], (SIZE + 1, SIZE)) / SIZE,
        "table": 300 + jax.random.normal(keys[4], (5000, SIZE)),
        "ids": jnp.array([4999.0, 0.0, 2049.0, 2050.0, 2051.0, 4095.0, 4097.0, 1.0, 3001.0, 3002.0]),
        "t": 2e5 + jnp.arange(float(ROWS)),
        "large": jnp.float32(1e6),
    }

    def program(dot, rows, more):
        values = list(rows)
        for operation, left, right in steps:
            values.append(
                MIXED[operation](values[left % len(values)], values[right % len(values)], more, dot)
            )
        return dot(values[-1] - values[-1][:1], more["w"]), values[-1]

    def rounded(x):
        return x.astype(half).astype(jnp.float32)

    exact = program(jnp.dot, rows, more)
    by_hand = program(lambda x, y: rounded(rounded(x) @ rounded(y)), rows, more)
    got = autocast(functools.partial(program, jnp.dot), half)(rows, more)
    for a, b, c in zip(got, by_hand, exact, strict=True):
        assert jnp.linalg.norm(a - c) <= 2 * jnp.linalg.norm(b - c) + 1e-6 * jnp.linalg.norm(c)
