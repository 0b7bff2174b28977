"""`autocast` of models that other libraries make: Equinox's modules and Haiku's transformed functions."""

import collections
import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import PRODUCTS, dtypes, equations, images, paired, products, vectors

import jmp_policy as jmpp

HALVES = ("float16", "bfloat16")


# A case gives a function of parameters, state and input that returns outputs and new state; and these three.
# Activations are smooth: rounding takes some inputs of a ReLU across its kink, an error of about sqrt(eps).


class Residual(eqx.Module):
    """Images, channels first, and a norm with or without state."""

    conv: eqx.nn.Conv2d
    norm: eqx.Module
    head: eqx.nn.Linear

    def __init__(self, norm, key):
        keys = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(3, 16, 3, key=keys[0])
        self.norm = norm()
        self.head = eqx.nn.Linear(16, 8, key=keys[1])

    def __call__(self, x, state):
        x = self.conv(x)
        if isinstance(self.norm, eqx.nn.StatefulLayer):
            x, state = self.norm(x, state)
        else:
            x = self.norm(x)
        return self.head(jax.nn.gelu(x).mean((1, 2))), state


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(16, 32, key=keys[0])
        self.head = eqx.nn.Linear(32, 8, key=keys[1])

    def __call__(self, x):
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(32), x)
        return self.head(last)


def attend(attention, x):
    return attention(x, x, x)


def equinox(make, x, call=lambda model, x: model(x)):
    """A module of one example, and a batch."""
    params, static = eqx.partition(make(key=jax.random.key(0)), eqx.is_inexact_array)

    def apply(params, state, x):
        model = eqx.combine(params, static)
        return jax.vmap(functools.partial(call, model))(x), state

    return apply, params, None, x


def equinox_images(norm):
    model, state = eqx.nn.make_with_state(Residual)(norm, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(params, state, x):
        model = eqx.combine(params, static)
        return jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)

    return apply, params, state, np.moveaxis(images(), -1, 1)


def haiku(function, x):
    model = hk.transform_with_state(function)
    params, state = model.init(jax.random.key(0), x)

    def apply(params, state, x):
        return model.apply(params, state, None, x)

    return apply, params, state, x


def conv_norm(x):
    x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(16, 3)(x), is_training=True)
    return hk.Linear(8, name="head")(jax.nn.gelu(x).mean((1, 2)))


def lstm(x):
    core = hk.LSTM(32)
    out, _ = hk.dynamic_unroll(core, jnp.swapaxes(x, 0, 1), core.initial_state(len(x)))
    return hk.Linear(8, name="head")(out[-1])


def attention(x):
    return hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling())(x, x, x)


CASES = {
    "equinox_mlp": lambda: equinox(
        functools.partial(eqx.nn.MLP, 32, 8, 64, 2, jax.nn.gelu), vectors(16, 32)()
    ),
    "equinox_group_norm": lambda: equinox_images(lambda: eqx.nn.GroupNorm(4, 16)),
    "equinox_batch_norm": lambda: equinox_images(lambda: eqx.nn.BatchNorm(16, "batch", mode="ema")),
    "equinox_attention": lambda: equinox(
        functools.partial(eqx.nn.MultiheadAttention, 4, 32), vectors(4, 8, 32)(), attend
    ),
    "equinox_gru": lambda: equinox(Recurrent, vectors(4, 6, 16)()),
    "haiku_mlp": lambda: haiku(
        lambda x: hk.nets.MLP([64, 64, 8], activation=jax.nn.gelu)(x), vectors(16, 32)()
    ),
    "haiku_batch_norm": lambda: haiku(conv_norm, images()),
    "haiku_lstm": lambda: haiku(lstm, vectors(4, 6, 16)()),
    "haiku_attention": lambda: haiku(attention, vectors(4, 8, 32)()),
}
made = functools.cache(lambda name: CASES[name]())


def loss_of(apply):
    def loss(params, state, x):
        out, state = apply(params, state, x)
        weights = 1 + jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return -jnp.mean(weights * jax.nn.log_softmax(out)), state

    return loss


@functools.cache
def reference(name):
    apply, *args = made(name)
    return jax.jit(jax.value_and_grad(loss_of(apply), has_aux=True))(*args)


#: What loses its digits or its range in half.
NEVER_IN_HALF = ("exp", "log", "sqrt", "rsqrt", "reduce_sum")


def is_of_one_term(eqn):
    """Whether it is a sum along axes of size 1: the gradient of `x[None]`."""
    return eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size


def in_half(jaxpr):
    """The equations of `NEVER_IN_HALF` that read half."""
    return [
        str(eqn)
        for eqn in equations(jaxpr)
        if eqn.primitive.name in NEVER_IN_HALF
        and any(getattr(v.aval, "dtype", None) in HALVES for v in eqn.invars)
        and not is_of_one_term(eqn)
    ]


def norm(tree):
    return np.sqrt(
        sum(np.sum(np.square(x, dtype=np.float64)) for x in map(np.asarray, jax.tree.leaves(tree)))
    )


BOTH = ("equinox_mlp", "haiku_mlp")


# Autocast decides alike for both half types: bfloat16 on one model of each library.
@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "half"), [*((name, "float16") for name in CASES), *((n, "bfloat16") for n in BOTH)]
)
def test_products_run_in_half_and_gradients_are_those_of_float32(name, half):
    apply, *args = made(name)
    loss = loss_of(apply)
    value_and_grad = jax.value_and_grad(jmpp.autocast(loss, half), has_aux=True)

    for function, full in ((jmpp.autocast(loss, half), loss), (value_and_grad, jax.grad(loss, has_aux=True))):
        got, expected = products(function, *args), products(full, *args)
        assert got == collections.Counter({(n, half, half): count for (n, _, _), count in expected.items()})
        assert in_half(jax.make_jaxpr(function)(*args).jaxpr) == []

    (value, state), grads = jax.jit(value_and_grad)(*args)
    (full_value, full_state), full_grads = reference(name)
    assert jax.tree.structure(state) == jax.tree.structure(full_state)
    assert value.dtype == full_value.dtype
    assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(full_state)]
    assert set(jax.tree.leaves(dtypes(grads))) == {"float32"}
    # One rounding errs by up to eps / 2, by 0.3 eps in the root mean square. Forward and backward, a gradient
    # has at most 100 of them behind it here (the recurrences: 6 steps with up to 8 each way), as often up as
    # down, so that their sum grows with the root: sqrt(100) * 0.3 eps. Measured: up to 0.9 eps.
    eps = float(jnp.finfo(half).eps)
    error = norm(jax.tree.map(lambda a, b: a - b, grads, full_grads))
    assert error < 3 * eps * norm(full_grads)
    assert abs(value - full_value) < 3 * eps * abs(full_value)
    assert error > 1e-3 * eps * norm(full_grads)  # It was not float32 all along.
    for stat, full_stat in zip(jax.tree.leaves(state), jax.tree.leaves(full_state), strict=True):
        np.testing.assert_allclose(stat, full_stat, atol=3 * eps, rtol=3 * eps)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_results_are_what_the_function_returns(name):
    """Also where one of them is a constant, as BatchNorm's "no longer the first time" is."""
    apply, *args = made(name)

    def results_of(function):
        out = function(*args)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out))
        return out

    out = jax.eval_shape(lambda: results_of(jmpp.autocast(apply, "bfloat16")))
    full = jax.eval_shape(lambda: results_of(apply))
    assert jax.tree.structure(out) == jax.tree.structure(full)
    assert jax.tree.leaves(out) == jax.tree.leaves(full)


@pytest.mark.slow
def test_modules_of_equinox_are_arguments_and_results():
    model, x = eqx.nn.MLP(32, 8, 64, 2, jax.nn.gelu, key=jax.random.key(0)), vectors(16, 32)()

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    auto = jmpp.autocast(loss, "float16")
    eps = float(jnp.finfo("float16").eps)
    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(auto))(model, x)
    np.testing.assert_allclose(value, eqx.filter_jit(loss)(model, x), rtol=3 * eps)
    assert value.dtype == jnp.float32
    assert isinstance(grads, eqx.nn.MLP)
    assert set(jax.tree.leaves(dtypes(eqx.filter(grads, eqx.is_array)))) == {"float32"}

    same, out = jmpp.autocast(lambda model, x: (model, jax.vmap(model)(x)), "float16")(model, x)
    assert jax.tree.structure(same) == jax.tree.structure(model)
    assert eqx.tree_equal(eqx.filter(same, eqx.is_array), eqx.filter(model, eqx.is_array))
    assert out.dtype == jnp.float32
    assert products(jmpp.autocast(model, "float16"), x[0]) == {("dot_general", "float16", "float16"): 3}


@pytest.mark.once
@pytest.mark.parametrize(
    ("lift", "half"), paired(["filter_jit", "filter_checkpoint", "error_if", "scan"], HALVES)
)
def test_transforms_of_equinox_inside_are_looked_into(lift, half):
    make = functools.partial(eqx.nn.MLP, 32, 32, 64, 1, jax.nn.gelu)
    layers = eqx.filter_vmap(lambda key: make(key=key))(jax.random.split(jax.random.key(0), 2))
    params, static = eqx.partition(layers, eqx.is_inexact_array)

    def layer(x, params):
        model = eqx.combine(params, static)
        if lift == "error_if":
            x = eqx.error_if(x, jnp.isnan(x).any(), "not a number")
        elif lift != "scan":
            model = getattr(eqx, lift)(model)
        return x + jax.vmap(model)(x), None

    def loss(params, x):
        if lift == "scan":
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)
        for index in range(2):
            x, _ = layer(x, jax.tree.map(lambda p: p[index], params))
        return jnp.mean(x**2)

    x = vectors(16, 32)()
    auto = jax.grad(jmpp.autocast(loss, half))
    got = products(auto, params, x)
    assert set(got) == {("dot_general", half, half)}
    assert got.total() == products(jax.grad(loss), params, x).total()
    grads, full = jax.jit(auto)(params, x), jax.jit(jax.grad(loss))(params, x)
    error = norm(jax.tree.map(lambda a, b: a - b, grads, full))
    assert error < 3 * float(jnp.finfo(half).eps) * norm(full)


def counts_by_path(function, *args, **options):
    """How many products of each dtype a path has."""
    rows = jmpp.explain(function, "float16", **options)(*args)
    return collections.Counter((row.path, row.operands) for row in rows.of(*PRODUCTS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", [{"head": "off"}, {"he*": "float32"}, (("head", jmpp.get_policy("float32")),)]
)
@pytest.mark.parametrize("name", ["haiku_batch_norm", "haiku_lstm"])
def test_rules_name_modules_of_haiku(name, rules):
    apply, *args = made(name)
    counts = counts_by_path(apply, *args, rules=rules)
    assert counts[("head", "float32")] == counts.total() - 1 == 1
    assert {dtype for path, dtype in counts if path != "head"} == {"float16"}
    # In the gradient, too: the product itself, and those for its two operands.
    grad = jax.grad(jmpp.autocast(loss_of(apply), "float16", rules=rules), has_aux=True)
    assert products(grad, *args)[("dot_general", "float32", "float32")] == 3


@pytest.mark.slow
def test_rules_reach_what_is_inside_of_modules_of_haiku():
    apply, *args = made("haiku_lstm")
    assert set(counts_by_path(apply, *args, rules={"lstm": "off"})) == {
        ("lstm/linear", "float32"),
        ("head", "float16"),
    }
    assert set(counts_by_path(apply, *args, rules={"lstm": "off", "lstm/linear": "lower"})) == {
        ("lstm/linear", "float32"),
        ("head", "float16"),
    }
    with pytest.raises(ValueError, match=r"lstn.*lstm"):
        counts_by_path(apply, *args, rules={"lstn": "off"})


@pytest.mark.slow
def test_layers_of_equinox_are_known_by_class_and_by_the_users_scopes():
    apply, *args = made("equinox_gru")
    assert set(counts_by_path(apply, *args, rules={"eqx.nn.Linear": "off"})) == {
        ("eqx.nn.GRUCell", "float16"),
        ("eqx.nn.Linear", "float32"),
    }

    class Scoped(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            x = jax.nn.relu(self.body(x))
            with jax.named_scope("head"):
                return self.head(x)

    keys = jax.random.split(jax.random.key(0))
    model = Scoped(eqx.nn.Linear(32, 32, key=keys[0]), eqx.nn.Linear(32, 8, key=keys[1]))
    x = vectors(16, 32)()
    counts = counts_by_path(lambda model, x: jax.vmap(model)(x), model, x, rules={"head": "off"})
    assert set(counts) == {("eqx.nn.Linear", "float16"), ("head/eqx.nn.Linear", "float32")}


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_markers_inside_of_modules(half):
    class Head(hk.Module):
        @jmpp.full_precision
        def __call__(self, x):
            return hk.Linear(8)(x)

    def function(x):
        return Head()(jax.nn.relu(hk.Linear(32)(x)))

    class Model(eqx.Module):
        body: eqx.nn.Linear
        head: eqx.nn.Linear

        def __call__(self, x):
            x = jax.nn.relu(self.body(x))
            with jmpp.region("off"):
                return self.head(x)

    def make(key):
        keys = jax.random.split(key)
        return Model(eqx.nn.Linear(32, 32, key=keys[0]), eqx.nn.Linear(32, 8, key=keys[1]))

    for apply, *args in (haiku(function, vectors(16, 32)()), equinox(make, vectors(16, 32)())):
        assert products(jmpp.autocast(apply, half), *args) == {
            ("dot_general", half, half): 1,
            ("dot_general", "float32", "float32"): 1,
        }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["equinox_batch_norm", "haiku_batch_norm"])
def test_a_step_that_overflows_is_skipped_and_leaves_the_state(name):
    """The three lines of a train step, with a state of the model."""
    apply, params, state, x = made(name)
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(2.0**15))

    @jax.jit
    def step(params, state, opt_state, x):
        loss = jmpp.autocast(loss_of(apply), "float16")
        (_, new), grads = jmpp.scaled_value_and_grad(loss, has_aux=True)(opt_state, params, state, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = jmpp.select_tree(jmpp.grads_finite(opt_state), new, state)
        return optax.apply_updates(params, updates), new, opt_state

    before = params, state
    after = step(*before, tx.init(params), np.full_like(x, 1e5))
    assert not jmpp.grads_finite(after[-1])
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after[:2]), strict=True):
        np.testing.assert_array_equal(one, other)
    params, new, opt_state = step(*after, x)
    assert jmpp.grads_finite(opt_state)
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
