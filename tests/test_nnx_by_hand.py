"""A wrapped NNX model against the same model written by hand with `dtype=` in every layer."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import cost, equations, products
from nnx_helpers import CASES, pure_gradient, stored

import jmp_policy as jmpp
from jmp_policy._src.flax.nnx.attention import attention

BY_NAME = {case.name: case for case in CASES}


def by_hand(case, dtype=jnp.float16):
    """With the attention function that compiles for a CPU in float16, where there is one."""
    return case(dtype, attention_fn=attention) if "encoder" in case.name else case(dtype)


def casts_to_float32(model, x):
    return model(x).astype(jnp.float32)


@pytest.mark.once
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_same_products_and_no_more_bytes_or_memory(case):
    x = case.inputs()
    (hand, params), (wrapped, _) = map(pure_gradient, (by_hand(case), jmpp.wrap(case(), "mixed_float16")))
    assert products(wrapped, params, x) == products(hand, params, x)
    assert {d for _, *d2 in products(wrapped, params, x) for d in d2} == {"float16"}
    (hand_bytes, hand_temp), (bytes_accessed, temp) = (
        cost(jax.jit(f).lower(params, x).compile()) for f in (hand, wrapped)
    )
    assert bytes_accessed <= 1.01 * hand_bytes
    assert temp <= 1.01 * hand_temp


def traced(model, x):
    """What a forward and backward pass is made of: how often each primitive gives each dtype."""
    gradient, params = pure_gradient(model)
    eqns = equations(jax.make_jaxpr(gradient)(params, x).jaxpr)
    return collections.Counter((e.primitive.name, *(v.aval.dtype.name for v in e.outvars)) for e in eqns)


class WithOutputCast(nnx.Module):
    """What a policy's output dtype is, by hand."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x).astype(jnp.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["mlp", "raw"])
def test_the_very_same_primitives(name, dtype):
    case = BY_NAME[name]
    x = case.inputs()
    hand = WithOutputCast(case(jnp.dtype(dtype)))
    assert traced(jmpp.wrap(case(), f"mixed_{dtype}"), x) == traced(hand, x)


@pytest.mark.once
@pytest.mark.parametrize(("name", "islands"), [("cnn", False), ("mlp", True), ("lstm", False), ("raw", True)])
def test_bitwise_equal_after_100_steps(name, islands):
    """Norms round their parameters by hand; without islands the library does too, and nothing differs."""
    case = BY_NAME[name]
    x = case.inputs()
    policy = jmpp.PolicyMap("mixed_float16", float32_islands=islands)
    trained = []
    for model in (WithOutputCast(case(jnp.float16)), jmpp.wrap(case(), policy)):
        gradient, params = pure_gradient(model)
        tx = optax.adam(1e-3)

        def step(carry, _, gradient=gradient, tx=tx):
            params, state = carry
            (loss, _), grads = gradient(params, x)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        (params, _), losses = jax.jit(
            lambda params, step=step, tx=tx: jax.lax.scan(step, (params, tx.init(params)), length=100)
        )(params)
        assert losses[-1] < losses[0]
        trained.append([losses, *jax.tree.leaves(nnx.as_pure(params))])
    for a, b in zip(*trained, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.once
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_close_to_float32_and_all_masters_float32(case):
    """Under each policy what is computed; the step, which stores what the param dtype says, under one."""
    x = case.inputs()
    call = nnx.jit(lambda model, x: model(x))
    want = call(case(), x)
    half = (("mixed_bfloat16", 2.0**-4), ("mixed_float16", 2.0**-7))
    for policy, rounding in (("float32", 0), *(half if case.name == "encoder" else half[1:])):
        wrapped = jmpp.wrap(case(), policy)
        out = call(wrapped, x)
        assert out.dtype == jnp.float32
        assert float(jnp.linalg.norm(out - want)) <= rounding * float(jnp.linalg.norm(want))
    tx = jmpp.loss_scaled(optax.adam(1e-3), jmpp.DynamicLossScale())
    optimizer = nnx.Optimizer(wrapped, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        gradient = jmpp.nnx.scaled_value_and_grad(lambda m, x: jnp.mean(m(x) ** 2))
        loss, grads = gradient(optimizer, model, x)
        optimizer.update(model, grads)
        return loss

    loss = step(wrapped, optimizer, x)
    assert loss.dtype == jnp.float32
    assert stored(wrapped) == {"float32"}
    assert stored(wrapped, nnx.BatchStat) <= {"float32"}
    moments = nnx.as_pure(optimizer.opt_state.inner_state[0])
    assert {m.dtype.name for m in jax.tree.leaves((moments.mu, moments.nu))} == {"float32"}


@pytest.mark.slow
def test_graph_definitions_equal_those_by_hand_where_settings_suffice():
    def make(dtype=None, norm=None):
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(16, 8, dtype=dtype, rngs=rngs),
            nnx.relu,
            nnx.Conv(8, 8, (3,), dtype=dtype, rngs=rngs),
            nnx.Sequential(nnx.LinearGeneral(8, (2, 4), dtype=dtype, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)),
            nnx.LayerNorm(4, dtype=dtype, rngs=rngs),
        )

    policy = jmpp.PolicyMap("p=f32,c=bf16,o=bf16", float32_islands=False)
    assert nnx.graphdef(jmpp.wrap(make(), policy)) == nnx.graphdef(make(jnp.bfloat16))
    by_hand, wrapped = BY_NAME["mlp"](jnp.float16), jmpp.wrap(BY_NAME["mlp"](), "mixed_float16")
    assert nnx.graphdef(wrapped.layers) == nnx.graphdef(by_hand.layers)
    assert nnx.graphdef(wrapped) != nnx.graphdef(by_hand)  # The model itself casts inputs and outputs.


def test_nothing_is_traced_twice():
    """Neither a second step, nor another wrap of an equal model, nor a view of it."""
    traces = []

    @nnx.jit
    def run(model, x):
        traces.append(None)
        return model(x)

    x = BY_NAME["raw"].inputs()
    for _ in range(2):
        model = jmpp.wrap(BY_NAME["raw"](), "mixed_float16")
        run(model, x)
        run(model, x)
    assert len(traces) == 1
    run(nnx.merge(*nnx.split(model)), x)
    run(nnx.clone(model), x)
    assert len(traces) == 1
    run(jmpp.wrap(BY_NAME["raw"](), "mixed_bfloat16"), x)
    assert len(traces) == 2
