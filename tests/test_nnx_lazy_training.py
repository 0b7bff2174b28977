"""Training NNX models that get parameters late: adapters alone, and parameters made by the first call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_helpers import loss_fn, stored

import jmp_policy as jmpp

X = jax.random.normal(jax.random.key(0), (4, 8))


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((8, 8)))
        self.lora = nnx.LoRA(8, 2, 8, base_module=nnx.Linear(8, 8, rngs=rngs), rngs=rngs)
        self.head = nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.lora(x @ self.w)))


class Lazy(nnx.Module):
    def __init__(self, rngs):
        self.rngs, self.linear = rngs, nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        if not hasattr(self, "w"):
            self.w = nnx.Param(jax.random.normal(self.rngs.params(), (8, 4), x.dtype))
        return x @ self.w


def optimizer(model, wrt=nnx.Param):
    return nnx.Optimizer(model, jmpp.loss_scaled(optax.adam(1e-2), jmpp.DynamicLossScale(2.0**10)), wrt=wrt)


def whole_batch(wrt):
    return jmpp.nnx.scaled_value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))


def two_halves(wrt):
    return jmpp.nnx.accumulate_gradients(loss_fn, 2, wrt=wrt)


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [whole_batch, two_halves])
def test_adapters_alone_are_trained(gradient):
    model = jmpp.wrap(Adapted(nnx.Rngs(0)), "mixed_float16")
    opt = optimizer(model, nnx.LoRAParam)
    frozen, trained = (np.asarray(v.get_raw_value()) for v in (model.w, model.lora.lora_b))

    @nnx.jit
    def step(model, opt):
        loss, grads = gradient(nnx.LoRAParam)(opt, model, X)
        opt.update(model, grads)
        return loss

    losses = [float(step(model, opt)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert stored(model) == {"float32"}
    np.testing.assert_array_equal(model.w.get_raw_value(), frozen)
    assert (np.asarray(model.lora.lora_b.get_raw_value()) != trained).any()
    halves = {(p.lhs, p.rhs) for p in jmpp.audit(gradient(nnx.LoRAParam), opt, model, X).products}
    assert halves == {("float16", "float16")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gradient", "error"),
    [
        # JAX's own, of the update; versions write keys in two ways.
        (whole_batch, r"symmetric difference on key sets is\s+(w\b|\['w'\])"),
        (two_halves, r"(?s)The loss function added.*\bw\b.*before the optimizer is made"),
    ],
)
def test_parameters_made_by_the_loss_function(gradient, error):
    model = jmpp.wrap(Lazy(nnx.Rngs(0)), "mixed_float16")
    opt = optimizer(model)
    with pytest.raises(ValueError, match=error):
        opt.update(model, gradient(nnx.Param)(opt, model, X)[1])
    model = jmpp.wrap(Lazy(nnx.Rngs(0)), "mixed_float16")
    model(X)
    opt = optimizer(model)
    _, grads = gradient(nnx.Param)(opt, model, X)
    opt.update(model, grads)
    assert stored(model) == {"float32"}


@pytest.mark.slow
def test_parameters_that_are_not_floating_are_never_cast():
    class Net(nnx.Module):
        def __init__(self):
            self.waves = nnx.Param(jnp.full((8, 4), 1 + 1j, jnp.complex64))
            self.more = nnx.List([nnx.Param(jnp.ones(4, jnp.complex64))])
            self.table, self.mask = nnx.Param(jnp.arange(8)), nnx.Param(jnp.ones(8, bool))
            self.scale = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            own = (self.waves, self.more[0], self.table, self.mask, self.scale)
            seen.append([v.dtype.name for v in own])
            return (x * self.scale * self.table * self.mask) @ self.waves * self.more[0]

    seen = []
    float32 = "params=float32, compute=float16, output=float32, grad=float32"
    for policy in ("mixed_float16", "mixed_bfloat16", float32):
        model = jmpp.wrap(Net(), policy)
        assert model(X).dtype == jnp.complex64
        assert seen.pop() == [
            "complex64",
            "complex64",
            "int32",
            "bool",
            jmpp.get_policy(policy).compute_dtype,
        ]
        both = nnx.DiffState(0, lambda _, v: v.dtype in (jnp.float32, jnp.complex64))
        loss = lambda model: jnp.abs(model(X)).sum().astype(jnp.float32)  # noqa: E731
        _, grads = jmpp.nnx.scaled_value_and_grad(loss, argnums=both)(jmpp.StaticLossScale(8.0), model)
        assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32", "complex64"}
        assert stored(model) == {"float32", "complex64", "int32", "bool"}
        seen.clear()
