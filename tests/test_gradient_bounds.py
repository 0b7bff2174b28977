"""The finite test of gradients that are made in float32 of others, as it is lowered for one GPU."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gpu_helpers import bits, lowered_for_gpu

import jmp_policy as jmpp
from jmp_policy._src.loss_scaling.finiteness import gradients_finite

ROWS, COLUMNS = 90, 100


def draw(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


#: What gradients may be made of; each is used in one way.
VALUES = {
    "g": draw(ROWS, COLUMNS, dtype="float16"),
    "v": draw(ROWS, COLUMNS),
    "a": draw(COLUMNS) + 3,
    "b": draw(1, COLUMNS) + 3,
    "r": draw(ROWS, 1) + 3,
    "n": jnp.float32(3),
}
BOUNDED = {
    "weight normalisation": lambda g, v, a, b, r, n: (g * a * b + v * a + a * v) / n,
    "subtracted": lambda g, v, a, b, r, n: n * g - v * b,
    "negative": lambda g, v, a, b, r, n: -(g / a) + v,
    "rows": lambda g, v, a, b, r, n: g * r - v / r,
    "gradient twice": lambda g, v, a, b, r, n: g * a + v * b + b * g,
    "no parameter": lambda g, v, a, b, r, n: g * a * 2.5,
}
READ = {
    "no vector": lambda g, v, a, b, r, n: g + n * v,
    "vectors of two axes": lambda g, v, a, b, r, n: g * a * r,
    "divided by an array": lambda g, v, a, b, r, n: g * a / v,
    "three arrays": lambda g, v, a, b, r, n: g * a + v + jnp.sin(v),
    "one element": lambda g, v, a, b, r, n: jnp.sqrt(g * a),
    # Each doubles the ways from the last to the first: as many steps to look at as 2**20.
    "many operations": lambda g, v, a, b, r, n: functools.reduce(lambda x, _: x + x * a, range(20), v),
}


def made(f, values):
    """A gradient, of a half one that was cast."""
    return f(**values | {"g": values["g"].astype("float32")})


def read_by_test(text):
    """Shapes of the arrays that a program tests for infinities and NaN."""
    return re.findall(r"stablehlo.is_finite .* : \(?tensor<(\w+)xf32>", text)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_gradient_with_a_bound_is_not_read_and_what_is_not_finite_is_found(name):
    f = BOUNDED[name]
    text, on_gpu = lowered_for_gpu(lambda values: gradients_finite(made(f, values)), VALUES)
    assert read_by_test(text) == [f"{ROWS if name == 'rows' else COLUMNS}"]
    assert on_gpu(VALUES)
    for poisoned in poisonings():
        assert bool(on_gpu(poisoned)) == bool(jnp.isfinite(made(f, poisoned)).all())


def poisonings():
    for name, value in VALUES.items():
        for bad in (np.nan, np.inf, -np.inf):
            yield VALUES | {name: value.at[(-1,) * value.ndim].set(bad)}


@pytest.mark.parametrize("name", READ)
def test_a_gradient_without_a_bound_is_read(name):
    text, on_gpu = lowered_for_gpu(lambda values: gradients_finite(made(READ[name], values)), VALUES)
    assert read_by_test(text) == [f"{ROWS}x{COLUMNS}"]
    assert bool(on_gpu(VALUES)) == bool(jnp.isfinite(made(READ[name], VALUES)).all())


def test_overflow_in_float32_is_found_and_large_gradients_are_finite():
    def gradient(factor, g, a, b, **_):
        return g * (a * factor) * b

    largest = float(np.finfo(np.float32).max)
    _, on_gpu = lowered_for_gpu(lambda f, v: gradients_finite(gradient(f, **v)), jnp.float32(1), VALUES)
    # Between these, a finite gradient may count as overflowed.
    for factor, is_finite in ((1, True), (1e15, True), (1e30, True), (largest / 4, False), (largest, False)):
        assert bool(jnp.isfinite(gradient(jnp.float32(factor), **VALUES)).all()) == is_finite
        assert bool(on_gpu(jnp.float32(factor), VALUES)) == is_finite
    # The public test, of any arrays, is exact.
    _, exact = lowered_for_gpu(lambda f, v: jmpp.all_finite(gradient(f, **v)), jnp.float32(1), VALUES)
    assert jnp.isfinite(gradient(jnp.float32(1e36), **VALUES)).all()
    assert exact(jnp.float32(1e36), VALUES)
    assert not on_gpu(jnp.float32(1e36), VALUES)
    assert not exact(jnp.float32(largest), VALUES)


@pytest.mark.parametrize(
    ("gradient", "large"),
    [
        (lambda v, a: v * a, [2e38, -2e38]),  # Magnitudes are added up, not what cancels.
        (lambda v, a: v * (a / a) - v * (-a / a), [2e38, 0]),  # A difference of them would be 0.
    ],
)
def test_terms_that_cancel_hide_no_overflow(gradient, large):
    v = jnp.zeros((ROWS, COLUMNS)).at[:2, 0].set(jnp.array(large))
    _, on_gpu = lowered_for_gpu(lambda v, a: gradients_finite(gradient(v, a)), v, VALUES["a"])
    for factor, is_finite in ((1e-8, True), (1, False)):
        assert bool(jnp.isfinite(gradient(factor * v, VALUES["a"])).all()) == is_finite
        assert bool(on_gpu(factor * v, VALUES["a"])) == is_finite


def test_overflow_in_float16_is_found():
    def gradient(g, a, **_):
        return (g * g).astype("float32") * a

    text, on_gpu = lowered_for_gpu(lambda values: gradients_finite(gradient(**values)), VALUES)
    assert read_by_test(text) == [f"{COLUMNS}"]
    assert on_gpu(VALUES)
    assert not on_gpu(VALUES | {"g": VALUES["g"].at[3, 4].set(300)})


def test_elsewhere_the_gradient_is_read():
    def test(values):
        return gradients_finite(made(BOUNDED["weight normalisation"], values))

    assert read_by_test(jax.jit(test).lower(VALUES).as_text()) == [f"{ROWS}x{COLUMNS}"]
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    placed = jax.device_put(VALUES, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    text = jax.jit(test).trace(placed).lower(lowering_platforms=("cuda",)).as_text()
    assert read_by_test(text) == [f"{ROWS}x{COLUMNS}"]
    assert test(VALUES)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x * jnp.inf]), VALUES)
    assert jax.vmap(test)(stacked).tolist() == [True, False]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.WeightNorm(nn.Dense(128))(x))
        return nn.WeightNorm(nn.Conv(96, (3,)))(x)


@pytest.mark.slow
def test_a_step_with_weight_normalisation_has_the_bits_of_the_cpus():
    model, x = jmpp.wrap(Net(), "mixed_float16"), draw(2, 8, 96)
    params = model.init(jax.random.key(0), x)["params"]
    tx = jmpp.loss_scaled(optax.adamw(1e-2), jmpp.DynamicLossScale(2.0**10))

    def step(params, state, x):
        def loss(params):
            return (model.apply({"params": params}, x) ** 2).mean()

        _, grads = jmpp.scaled_value_and_grad(loss)(state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    text, on_gpu = lowered_for_gpu(step, params, state, x)
    # The bounds of both kernels together; biases and scales.
    assert sorted(read_by_test(text)) == ["128", "128", f"{128 + 96}", "96", "96"]
    new, after = on_gpu(params, state, x)
    assert bits((new, after)) == bits(jax.jit(step)(params, state, x))
    assert bool(after.grads_finite)
    same, skipped = on_gpu(new, after, x.at[0, 0, 0].set(3e4))
    assert bits(same) == bits(new)
    assert bits(skipped.inner_state) == bits(after.inner_state)
    assert int(skipped.skipped) == 1
