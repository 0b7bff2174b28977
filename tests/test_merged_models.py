"""Reports on functions that make their NNX modules themselves, with `nnx.merge`."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp_policy as jmpp

X = jnp.ones((2, 8))
OWN_MERGE = nnx.merge


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        ones = nnx.initializers.ones
        self.layers = nnx.List([nnx.Linear(8, 8, kernel_init=ones, rngs=rngs)])
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.layers[0](x * 3e4) / 1e4)


def of_state(model):
    graph, params = nnx.split(model)
    return lambda params, x: jnp.square(nnx.merge(graph, params)(x)).mean(), params


def of_bare_state(model):
    graph, params = nnx.split(model)
    return lambda params, x: jnp.square(jmpp.wrap(nnx.merge(graph, params), "fp16")(x)).mean(), params


def of_model_and_optimizer(model):
    optimizer = nnx.Optimizer(model, jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    return lambda state, x: jnp.square(nnx.merge(graph, state)[0](x)).mean(), state


def of_jitted(model):
    loss, params = of_state(model)
    jitted = jax.jit(loss)
    jitted(params, X)  # The trace that jit keeps has no names.
    return jitted, params


@pytest.mark.slow
@pytest.mark.parametrize("make", [of_state, of_bare_state, of_model_and_optimizer, of_jitted])
def test_their_modules_are_named_and_rules_are_tried_on_them(make):
    # Nobody keeps the model itself.
    loss, state = make(Net() if make is of_bare_state else jmpp.wrap(Net(), "fp16"))
    found = jmpp.diagnose(loss, state, X)
    assert found.path == "Net/layers/0"
    assert found.rule == {"layers/0": "float32"}
    assert {p.path for p in jmpp.audit(loss, state, X).products} == {"Net/layers/0", "Net/last"}
    assert nnx.merge is nnx.graphlib.merge is OWN_MERGE
    model = jmpp.wrap(Net(), "fp16")
    assert type(nnx.merge(*nnx.split(model))) is type(model)


def test_a_merge_elsewhere_is_left_alone():
    """A report inside the function of another one ends without an end to the names of the outer one."""
    graph, params = nnx.split(Net())

    def loss(params, x):
        inner = jmpp.audit(lambda x: x @ x.T, jnp.ones((8, 8)))
        assert not inner.products[0].path
        return nnx.merge(graph, params)(x).sum()

    assert {p.path for p in jmpp.audit(loss, params, X).products} == {"Net/layers/0", "Net/last"}
    assert nnx.merge is OWN_MERGE


def test_an_error_in_the_function_gives_merge_back():
    def loss(params):
        raise ArithmeticError("of the user")

    with pytest.raises(ArithmeticError, match="of the user"):
        jmpp.audit(loss, jnp.ones(2))
    assert nnx.merge is OWN_MERGE
