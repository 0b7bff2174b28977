"""A run that changes its policy goes on from the very state it had: parameters, moments, loss scale, counts.

What comes after the change is compared, bit for bit, with the same layers with `dtype=` by hand.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import paired

import jmp_policy as jmpp

X, Y = jax.random.normal(jax.random.key(1), (8, 16)), jax.random.normal(jax.random.key(2), (8, 2))
SCALE = jmpp.DynamicLossScale(2.0**20, growth_interval=3)
#: What the run changes to, and the dtypes by hand of its two layers.
CHANGES = {
    "float16 to bfloat16": ("mixed_bfloat16", jnp.bfloat16, jnp.bfloat16),
    "one layer to float32": (jmpp.PolicyMap("mixed_float16", {"last": "float32"}), jnp.float16, None),
    "nothing": ("mixed_float16", jnp.float16, jnp.float16),
}


def loss_of(out):
    return jnp.mean((out.astype(jnp.float32) - Y) ** 2)


class Net(nn.Module):
    first: object = None
    last: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8, dtype=self.first, name="first")(x))
        return nn.Dense(2, dtype=self.last, name="last")(x.astype(self.last or x.dtype))


class NNXNet(nnx.Module):
    def __init__(self, first=None, last=None):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(16, 8, dtype=first, rngs=rngs)
        self.last = nnx.Linear(8, 2, dtype=last, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.tanh(self.first(x)).astype(self.last.dtype or jnp.float32))


class Linen:
    """Parameters and optimizer state in plain variables."""

    bare = staticmethod(Net)

    def __init__(self):
        self.tx = jmpp.loss_scaled(optax.adam(1e-2), SCALE)
        self.params = Net().init(jax.random.key(0), X)["params"]
        self.state = self.tx.init(self.params)

    def use(self, model):
        @jax.jit
        def step(params, state):
            _, grads = jmpp.scaled_value_and_grad(lambda p: loss_of(model.apply({"params": p}, X)))(
                state, params
            )
            updates, state = self.tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = step

    def under(self, policy):
        self.use(jmpp.wrap(Net(), policy))

    def train(self):
        self.params, self.state = self.step(self.params, self.state)

    def evaluate(self, policy):
        return jmpp.wrap(Net(), policy).apply({"params": self.params}, X)

    def everything(self):
        return self.params, self.state


class TrainState(Linen):
    """Flax's TrainState: a change is another `apply_fn`."""

    def __init__(self):
        params = Net().init(jax.random.key(0), X)["params"]
        precision = jmpp.Precision("mixed_float16", SCALE)
        create = jmpp.linen.TrainState.create
        self.state = create(apply_fn=Net().apply, params=params, tx=optax.adam(1e-2), precision=precision)

    def use(self, model):
        self.state = self.state.replace(apply_fn=model.apply)

    def train(self):
        @jax.jit
        def step(state):
            loss = lambda params: loss_of(state.apply_fn({"params": params}, X))  # noqa: E731
            return state.apply_gradients(grads=state.value_and_grad(loss)(state.params)[1])

        self.state = step(self.state)

    def evaluate(self, policy):
        return jmpp.wrap(Net(), policy).apply({"params": self.state.params}, X)

    def everything(self):
        return self.state.params, self.state.opt_state, self.state.step


class NNX:
    """The wrapped models share their Variables, and the optimizer is that of all of them."""

    def __init__(self):
        self.start = self.model = NNXNet()
        self.optimizer = nnx.Optimizer(self.model, jmpp.loss_scaled(optax.adam(1e-2), SCALE), wrt=nnx.Param)

    def bare(self, first, last):
        model = NNXNet(first, last)
        nnx.update(model, nnx.state(self.model))
        return model

    def use(self, model):
        self.model = model

    def under(self, policy):
        self.use(jmpp.wrap(self.start, policy))

    def train(self):
        @nnx.jit
        def step(model, optimizer):
            loss = lambda model: loss_of(model(X))  # noqa: E731
            optimizer.update(model, jmpp.nnx.scaled_value_and_grad(loss)(optimizer, model)[1])

        step(self.model, self.optimizer)

    def evaluate(self, policy):
        return jmpp.wrap(self.start, policy)(X)

    def everything(self):
        return nnx.state(self.model), nnx.state(self.optimizer)


def bits(run):
    return [(str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(run.everything())]


@pytest.mark.once
@pytest.mark.parametrize(
    ("framework", "change"), paired([Linen, TrainState, NNX, TrainState, NNX, Linen], CHANGES)
)
def test_a_run_goes_on_under_another_policy(framework, change):
    policy, *dtypes = CHANGES[change]
    run, by_hand = framework(), framework()
    for each in (run, by_hand):
        each.under("mixed_float16")
        for _ in range(4):
            each.train()
    assert bits(run) == bits(by_hand)
    before = bits(run)
    run.under(policy)
    by_hand.use(by_hand.bare(*dtypes))
    assert bits(run) == before
    for _ in range(4):
        run.train()
        by_hand.train()
    assert bits(run) == bits(by_hand)
    assert bits(run) != before
    # Steps were skipped and counted before the change, and the scale goes on growing after it.
    state = jmpp.optim.get_loss_scale_state(run.optimizer if framework is NNX else run.everything()[1])
    assert int(state.skipped) > 0
    assert float(state.loss_scale.loss_scale) != 2.0**20


@pytest.mark.slow
@pytest.mark.parametrize("framework", [Linen, TrainState, NNX])
def test_evaluation_in_another_precision_changes_nothing(framework):
    run, undisturbed = framework(), framework()
    for each in (run, undisturbed):
        each.under("mixed_float16")
        each.train()
    outs = [run.evaluate(policy) for policy in ("float32", "mixed_bfloat16")]
    assert outs[0].dtype == outs[1].dtype == jnp.float32
    assert not np.array_equal(*outs)
    for each in (run, undisturbed):
        each.train()
    assert bits(run) == bits(undisturbed)
