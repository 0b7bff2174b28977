"""The train step with NNX modules: scaled gradients, `nnx.Optimizer`, state kept on a skipped step."""

import functools
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from nnx_helpers import CASES, MLP, Raw, stored

import jmp_policy as jmpp

X = jax.random.normal(jax.random.key(0), (16, 32))
SCALE = jmpp.StaticLossScale(8.0)


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


def values(tree):
    return jax.tree.leaves(nnx.as_pure(tree))


def make(scale=None, cls=MLP, tx=None, policy="mixed_float16"):
    model = jmpp.wrap(cls(rngs=nnx.Rngs(0)), policy)
    scaled = jmpp.loss_scaled(tx or optax.adam(1e-3), scale or jmpp.DynamicLossScale())
    return model, nnx.Optimizer(model, scaled, wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x):
    loss, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, x)
    optimizer.update(model, grads)
    return loss, jmpp.metrics(optimizer)


@pytest.mark.slow
def test_it_trains_skips_and_recovers():
    # Close below overflow, so that it comes soon and again.
    model, optimizer = make(jmpp.DynamicLossScale(2.0**24, growth_interval=4))
    losses, seen = [], []
    for _ in range(60):
        loss, found = step(model, optimizer, X)
        losses.append(float(loss))
        seen.append(found)
    assert losses[-1] < 0.5 * losses[0]
    assert 0 < int(seen[-1]["skipped_steps"]) < 20
    assert min(float(found["loss_scale"]) for found in seen) < 2.0**24
    assert int(seen[-1]["steps"]) == 60
    assert stored(model) == {"float32"}


@pytest.mark.slow
def test_the_same_as_with_functions_of_arrays():
    """`jmpp.scaled_value_and_grad` over split state, with the optax state in hand."""
    model, optimizer = make()
    graphdef, params = nnx.split(jmpp.wrap(MLP(rngs=nnx.Rngs(0)), "mixed_float16"))
    params = nnx.as_pure(params)
    tx = jmpp.loss_scaled(optax.adam(1e-3), jmpp.DynamicLossScale())
    state = tx.init(params)

    @jax.jit
    def pure_step(params, state):
        loss, grads = jmpp.scaled_value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), X))(state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(3):
        params, state, want = pure_step(params, state)
        loss, _ = step(model, optimizer, X)
        np.testing.assert_array_equal(loss, want)
    for a, b in zip(values(nnx.state(model)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(values(optimizer.opt_state), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_second_trace_and_donation():
    traces = []

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        traces.append(None)
        loss, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, x)
        optimizer.update(model, grads)
        return loss

    model, optimizer = make(cls=Raw)
    for _ in range(3):
        step(model, optimizer, X)
    assert len(traces) == 1


@pytest.mark.slow
def test_scaled_gradients_are_the_gradients_times_the_scale():
    model, _ = make()
    plain = nnx.grad(loss_fn)(model, X)
    loss, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(jmpp.StaticLossScale(2.0**10), model, X)
    np.testing.assert_array_equal(loss, loss_fn(model, X))
    for a, b in zip(values(plain), values(grads), strict=True):
        np.testing.assert_allclose(b / 2**10, a, rtol=2e-3, atol=1e-6)
    assert jax.tree.structure(nnx.as_pure(grads)) == jax.tree.structure(nnx.as_pure(plain))


@pytest.mark.slow
def test_signature_of_value_and_grad():
    scale = jmpp.StaticLossScale(4.0)
    model = nnx.LoRALinear(8, 8, lora_rank=2, rngs=nnx.Rngs(0))
    x = X[:, :8]

    def with_aux(x, model, power):
        out = model(x)
        return jnp.mean(out**power), {"out": out}

    value_and_grad = jmpp.nnx.scaled_value_and_grad(
        with_aux, argnums=nnx.DiffState(1, nnx.LoRAParam), has_aux=True
    )
    (loss, aux), grads = value_and_grad(scale, x, model, power=2)
    plain = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2), argnums=nnx.DiffState(0, nnx.LoRAParam))
    want, want_grads = plain(model)
    np.testing.assert_array_equal(loss, want)
    assert aux["out"].shape == (16, 8)
    for a, b in zip(values(grads), values(want_grads), strict=True):
        np.testing.assert_allclose(a, 4 * b, rtol=1e-6)
    both = jmpp.nnx.scaled_value_and_grad(lambda a, b: (a(x) + b(x)).mean(), argnums=(0, 1))
    _, grads = both(scale, model, nnx.clone(model))
    assert len(grads) == 2
    _, tree = jmpp.nnx.scaled_value_and_grad(loss_fn, graph=False)(scale, MLP(rngs=nnx.Rngs(0)), X)
    assert {g.dtype.name for g in values(tree)} == {"float32"}


@pytest.mark.slow
def test_a_float16_loss_draws_a_warning_and_trains():
    model, optimizer = make(policy="p=f32,c=f16,o=f16")
    with pytest.warns(UserWarning, match="The loss is float16"):
        _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, X)
    optimizer.update(model, grads)
    assert bool(jmpp.grads_finite(optimizer))


def test_bad_input():
    model, optimizer = make()
    with pytest.raises(TypeError, match="needs a loss function, got None"):
        jmpp.nnx.scaled_value_and_grad(None)
    with pytest.raises(TypeError, match="must return one scalar"):
        jmpp.nnx.scaled_value_and_grad(lambda m, x: (m(x).sum(), 1))(optimizer, model, X)
    with pytest.raises(TypeError, match=r"must return \(loss, aux\)"):
        jmpp.nnx.scaled_value_and_grad(lambda m, x: m(x).sum(), has_aux=True)(optimizer, model, X)
    plain = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with pytest.raises(ValueError, match="There is no loss scale in this Optimizer: wrap the optimizer with"):
        jmpp.nnx.scaled_value_and_grad(loss_fn)(plain, model, X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_metrics_and_state_of_every_kind_of_optimizer():
    model, optimizer = make(jmpp.DynamicLossScale(2.0**12))
    both = nnx.ModelAndOptimizer(model, optimizer.tx)
    chained = nnx.Optimizer(model, optax.chain(optax.clip(1.0), optimizer.tx), wrt=nnx.Param)
    for holder in (optimizer, optimizer.opt_state, both, chained):
        assert float(jmpp.metrics(holder)["loss_scale"]) == 2.0**12
        assert isinstance(jmpp.metrics(holder)["loss_scale"], jax.Array)
        jmpp.check(holder)
        assert bool(nnx.jit(jmpp.grads_finite)(holder))
        state = jmpp.optim.get_loss_scale_state(holder)
        assert isinstance(state.loss_scale, jmpp.DynamicLossScale)
        assert float(state.loss_scale.scale(jnp.float32(1.0))) == 2.0**12
    _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(both, model, X)
    both.update(grads)
    assert int(jmpp.metrics(both)["steps"]) == 1
    with pytest.raises(ValueError, match="There are 2 loss scales"):
        jmpp.metrics({"a": optimizer, "b": chained})


def cnn(scale):
    case = next(c for c in CASES if c.name == "cnn")
    model = jmpp.wrap(case(), "mixed_float16")
    tx = jmpp.loss_scaled(optax.adam(1e-3), scale)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param), case.inputs()


class WritesParameters(nnx.Module):
    """Keeps a moving average in an `nnx.Param`."""

    def __init__(self):
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.average = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        h = self.layer(x)
        mean = jax.lax.stop_gradient(h).mean(0)
        self.average[...] = 0.9 * self.average[...].astype(jnp.float32) + 0.1 * mean.astype(jnp.float32)
        return h * jax.lax.stop_gradient(self.average[...])


@pytest.mark.parametrize("by", ["minimize", "keep_state_on_skip"])
def test_parameters_that_the_forward_pass_writes_are_kept_on_a_skipped_step(by):
    model = jmpp.wrap(WritesParameters(), "mixed_float16")
    scaled = jmpp.loss_scaled(optax.adamw(1e-2), jmpp.DynamicLossScale())
    if by == "minimize":
        optimizer = jmpp.nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param, precision="fp16")
    else:
        optimizer = nnx.Optimizer(model, scaled, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        def loss_fn(model):
            return jnp.square(model(x).astype(jnp.float32)).mean()

        if by == "minimize":
            return optimizer.minimize(loss_fn, model)
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            loss, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model)
            optimizer.update(model, grads)
        return loss

    def values():
        return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))

    x = jax.random.normal(jax.random.key(0), (4, 8))
    before = values()
    step(model, optimizer, x)
    changed = values()
    assert not any(
        np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (before, changed)), strict=True)
    )
    step(model, optimizer, x.at[0].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, values(), changed)
    assert jnp.isfinite(step(model, optimizer, x))


@pytest.mark.slow
def test_parameters_that_several_models_write_are_kept_on_a_skipped_step():
    def made():
        model = jmpp.wrap(WritesParameters(), "mixed_float16")
        return model, nnx.Optimizer(model, jmpp.loss_scaled(optax.sgd(0.1), SCALE), wrt=nnx.Param)

    (one, of_one), (other, of_other) = made(), made()
    x = X[:, :8].at[0].set(jnp.nan)
    gradient = jmpp.nnx.scaled_value_and_grad(loss_fn)
    with jmpp.nnx.keep_state_on_skip(of_one, one), jmpp.nnx.keep_state_on_skip(of_other, other):
        of_other.update(other, gradient(of_other, other, x)[1])
        of_one.update(one, gradient(of_one, one, x)[1])
    for model in (one, other):
        np.testing.assert_array_equal(model.average[...], jnp.ones(8))


class Held(NamedTuple):
    mean: Any


@flax.struct.dataclass
class Record:
    mean: Any


#: How a model may store its average again, other than by writing to a Variable.
REPLACED = {
    "parameter": nnx.Param,
    "variable": nnx.BatchStat,
    "array": lambda mean: mean,
    "tuple": lambda mean: nnx.data((mean, 1)),
    "list": lambda mean: nnx.data([mean]),
    "dictionary": lambda mean: nnx.data({"means": [mean, (1, 2)]}),
    "named tuple": lambda mean: nnx.data(Held(mean)),
    "dataclass": lambda mean: nnx.data(Record(mean)),
    "frozen": lambda mean: nnx.data(flax.core.freeze({"mean": mean})),
}


@pytest.mark.slow
@pytest.mark.parametrize("made", REPLACED.values(), ids=REPLACED)
def test_state_that_is_replaced_and_not_written_to_is_kept_on_a_skipped_step(made):
    class Replaces(nnx.Module):
        def __init__(self):
            self.layer, self.mean = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), made(jnp.ones(8))

        def __call__(self, x):
            h = self.layer(x)
            self.mean = made(jax.lax.stop_gradient(h).mean(0).astype(jnp.float32))
            return h

    model = jmpp.wrap(Replaces(), "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")

    @nnx.jit
    def step(model, optimizer, x):
        return optimizer.minimize(lambda model: jnp.square(model(x).astype(jnp.float32)).mean(), model)

    def state():
        return values(nnx.state(model))

    x, before, kind = X[:, :8], state(), type(model.mean)
    step(model, optimizer, x.at[0].set(jnp.nan))
    assert type(model.mean) is kind
    for pair in zip(state(), before, strict=True):
        np.testing.assert_array_equal(*pair)
    step(model, optimizer, x)
    assert not any(np.array_equal(*pair) for pair in zip(state(), before, strict=True))
    assert all(jnp.isfinite(x).all() for x in state())


#: State that a step makes anew from its batch, before and after.
OF_THE_BATCH = {
    "none": (lambda: nnx.data(None), nnx.data),
    "array": (lambda: jnp.ones((1, 8)), nnx.data),
    "other variable": (lambda: nnx.Cache(jnp.ones((1, 8))), nnx.Cache),
    "empty variable": (lambda: nnx.Cache(None), nnx.Cache),
    "other dtype": (lambda: nnx.Cache(jnp.ones((4, 8), jnp.int32)), nnx.Cache),
}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), OF_THE_BATCH.values(), ids=OF_THE_BATCH)
def test_what_has_another_shape_or_dtype_is_of_the_last_batch(before, after):
    class Remembers(nnx.Module):
        def __init__(self):
            self.layer, self.seen = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), before()
            self.inputs = nnx.Intermediate(())

        def __call__(self, x):
            self.seen = after(jax.lax.stop_gradient(x))
            self.inputs.set_value((*self.inputs.get_value(), jax.lax.stop_gradient(x)))  # As `sow` does.
            return self.layer(x)

    model = jmpp.wrap(Remembers(), "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")
    for size in (4, 4, 2):
        optimizer.minimize(lambda model, x: jnp.square(model(x)).mean(), model, X[:size, :8])
        assert model.seen.shape == (size, 8)
        assert model.seen.dtype == jnp.float32
    assert len(model.inputs.get_value()) == 3


@pytest.mark.parametrize(
    "start", [1.0, np.float32(1), np.ones(8, np.float32)], ids=lambda x: type(x).__name__
)
def test_numbers_and_numpy_arrays_are_kept_on_a_skipped_first_step(start):
    class Average(nnx.Module):
        def __init__(self):
            self.layer, self.mean = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.data(start)

        def __call__(self, x):
            h = self.layer(x)
            self.mean = nnx.data(jax.lax.stop_gradient(h).mean(0 if np.ndim(start) else None))
            return h

    model = jmpp.wrap(Average(), "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")
    optimizer.minimize(lambda model: model(X[:, :8].at[0].set(jnp.nan)).mean(), model)
    np.testing.assert_array_equal(model.mean, start)


@pytest.mark.parametrize("start", [0, jnp.zeros(8, jnp.int32), jnp.zeros(()), jnp.zeros((1, 1))])
def test_averages_that_begin_as_integers_or_one_number_have_no_nan_from_a_skipped_first_step(start):
    class Average(nnx.Module):
        def __init__(self):
            self.layer, self.mean = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchStat(start)

        def __call__(self, x):
            h = self.layer(x)
            self.mean.set_value(0.5 * self.mean.get_value() + 0.5 * h.mean(0).astype(jnp.float32))
            return h

    model = jmpp.wrap(Average(), "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")
    good = X[:, :8]
    for x in (good.at[0].set(jnp.nan), good):
        optimizer.minimize(lambda model, x: model(x).mean(), model, x)
    np.testing.assert_allclose(jnp.ravel(model.mean[...]), Average().layer(good).mean(0) / 2, atol=1e-3)


class Counts(nnx.Module):
    """State of a dtype that is not that of what is added to it."""

    def __init__(self):
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.large, self.seen = nnx.BatchStat(np.int64(2**40)), nnx.BatchStat(jnp.zeros(8, bool))
        self.phase, self.total, self.key = nnx.BatchStat(0j), nnx.data(0), nnx.Variable(jax.random.key(3))

    def __call__(self, x):
        h = self.layer(x)
        mean = h.mean().astype(jnp.float32)
        self.large.set_value(jnp.asarray(self.large.get_value(), jnp.float32) * 0.5 + mean)
        self.seen.set_value(self.seen.get_value() + h.mean(0).astype(jnp.float32))
        self.phase.set_value(self.phase.get_value() + 1j * mean)
        self.total += mean
        self.key.set_value(jax.random.split(jnp.ravel(self.key.get_value())[0], 3))
        return h


def test_state_of_any_dtype_is_put_back_on_a_skipped_first_step():
    model = jmpp.wrap(Counts(), "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")
    optimizer.minimize(lambda model, x: model(x).mean(), model, X[:, :8].at[0].set(jnp.nan))
    assert (float(model.large[...]), complex(model.phase[...]), float(model.total)) == (2**40, 0, 0)
    np.testing.assert_array_equal(model.seen[...], np.zeros(8))
    # A key that has become three is none that could be put back three times.
    assert len({tuple(data) for data in jax.random.key_data(model.key[...]).tolist()}) == 3


@pytest.mark.slow
def test_statistics_of_a_linen_module_inside_are_kept_on_a_skipped_step():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))

    bare = nnx.bridge.ToNNX(Net(), rngs=nnx.Rngs(0)).lazy_init(X, mutable=["batch_stats"])
    model = jmpp.wrap(bare, "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")

    @nnx.jit
    def step(model, optimizer, x):
        return optimizer.minimize(lambda model: jnp.square(model(x, mutable=["batch_stats"])).mean(), model)

    before = values(nnx.state(model, nnx.BatchStat))
    step(model, optimizer, X.at[0].set(jnp.nan))
    for pair in zip(values(nnx.state(model, nnx.BatchStat)), before, strict=True):
        np.testing.assert_array_equal(*pair)
    step(model, optimizer, X)
    assert not np.array_equal(values(nnx.state(model, nnx.BatchStat))[0], before[0])


@pytest.mark.slow
def test_batch_statistics_are_kept_on_a_skipped_step():
    model, optimizer, x = cnn(jmpp.DynamicLossScale())

    @nnx.jit
    def step(model, optimizer, x):
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            loss, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, x)
            optimizer.update(model, grads)
        return loss

    def state():
        return values(nnx.state(model))

    before = state()
    step(model, optimizer, jnp.asarray(x).at[0, 0, 0, 0].set(1e30))  # inf in float16.
    assert not bool(jmpp.grads_finite(optimizer))
    for a, b in zip(state(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    step(model, optimizer, x)
    assert bool(jmpp.grads_finite(optimizer))
    assert not jnp.array_equal(model.bn1.mean[...], jnp.zeros(8))
    assert all(bool(jnp.isfinite(v).all()) for v in state())


def test_state_that_was_computed_in_half_keeps_its_dtype():
    class Load(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.load = nnx.Linear(4, 8, rngs=rngs), nnx.BatchStat(jnp.zeros(8))

        def __call__(self, x):
            h = self.dense(x)
            self.load.set_value(h.mean(0))
            return h

    model = jmpp.wrap(Load(nnx.Rngs(0)), "mixed_float16")
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")
    optimizer.minimize(lambda model: jnp.square(model(jnp.ones((2, 4)))).mean(), model)
    assert (model.load.dtype, bool(model.load[...].any())) == (jnp.float32, True)


@pytest.mark.slow
def test_without_it_an_overflow_stays_in_the_statistics():
    """What it is for: this is the defect of the Flax examples."""
    model, optimizer, x = cnn(jmpp.DynamicLossScale())
    step(model, optimizer, jnp.asarray(x).at[0, 0, 0, 0].set(1e30))
    assert not bool(jnp.isfinite(model.bn1.mean[...]).all())


@pytest.mark.slow
def test_caches_random_counts_and_chosen_variables_are_kept():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.cache = nnx.Cache(jnp.zeros(()))
            self.counts = nnx.Variable({"calls": jnp.zeros((), jnp.int32)})

        def __call__(self, x):
            self.cache[...] += jnp.sum(x).astype(jnp.float32)
            self.counts["calls"] += 1
            return self.dropout(self.linear(x))

    for only, kept_count in ((None, True), (nnx.Cache, False)):
        model, optimizer = make(cls=lambda rngs: Net(rngs))
        kwargs = {} if only is None else {"only": only}
        with jmpp.nnx.keep_state_on_skip(optimizer, model, **kwargs):
            _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, X * jnp.inf)
            optimizer.update(model, grads)
        assert float(model.cache[...]) == 0
        assert (int(model.counts["calls"]) == 0) == kept_count
        assert (int(model.dropout.rngs.count[...]) == 0) == kept_count
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(optimizer, model, X)
            optimizer.update(model, grads)
        assert float(model.cache[...]) != 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_optimizers_own_state_moves_on():
    model, _ = make()
    both = nnx.ModelAndOptimizer(model, jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()))
    with jmpp.nnx.keep_state_on_skip(both, both):
        _, grads = jmpp.nnx.scaled_value_and_grad(loss_fn)(both, model, X * jnp.inf)
        both.update(grads)
    assert int(jmpp.metrics(both)["skipped_steps"]) == 1
    assert float(jmpp.metrics(both)["loss_scale"]) == 2.0**15


def test_what_is_no_module_to_keep():
    model, optimizer = make()
    for modules, given in (
        ((), "none"),
        ((nnx.state(model),), "State"),
        (([model],), "list"),
        ((optimizer,), "Optimizer"),
    ):
        error = pytest.raises(TypeError, match=f"keeps the state of modules, got {given}")
        with error, jmpp.nnx.keep_state_on_skip(optimizer, *modules):
            pass
    with pytest.raises(ValueError, match="no loss scale"), jmpp.nnx.keep_state_on_skip(model, model):
        pass


def test_an_exception_inside_the_block_passes_through():
    model, optimizer = make()

    def failing_step():
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        failing_step()


def test_training_the_wrapped_trains_the_original():
    bare = MLP(rngs=nnx.Rngs(0))
    model = jmpp.wrap(bare, "mixed_float16")
    optimizer = nnx.Optimizer(model, jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()), wrt=nnx.Param)
    before = bare(X)
    step(model, optimizer, X)
    assert not jnp.array_equal(bare(X), before)
    np.testing.assert_allclose(bare(X), model(X), atol=2e-3)


@pytest.mark.slow
def test_one_decision_for_all_devices():
    """The batch split over eight devices, an infinity on one of them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, optimizer = make()
    sharded = jax.device_put(X.at[3, 0].set(jnp.inf), jax.sharding.NamedSharding(mesh, jax.P("data")))
    before = values(nnx.state(model))
    step(model, optimizer, sharded)
    assert not bool(jmpp.grads_finite(optimizer))
    for a, b in zip(values(nnx.state(model)), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("scaled_value_and_grad", lambda f: functools.partial(jmpp.scaled_value_and_grad(f), SCALE)),
        ("scaled_value_and_grad", lambda f: lambda m, x: jmpp.scaled_value_and_grad(f, (1, 0))(SCALE, m, x)),
        ("accumulate_gradients", lambda f: functools.partial(jmpp.accumulate_gradients(f, 2), SCALE)),
        (
            "spectrum_value_and_grad",
            lambda f: functools.partial(jmpp.report.spectrum_value_and_grad(f), SCALE, None),
        ),
        ("autocast", lambda f: jmpp.autocast(f, "bfloat16")),
    ],
)
@pytest.mark.parametrize("inside", [lambda m: m, lambda m: {"net": m}, lambda m: (m, [])])
def test_functions_of_arrays_refuse_modules_and_name_their_like(name, make, inside):
    model = inside(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))

    def loss(model, x):
        (net,) = jax.tree.leaves(model, is_leaf=lambda m: isinstance(m, nnx.BatchNorm))
        return (net(x) ** 2).mean()

    with pytest.raises(TypeError, match=rf"lose its updates.*jmp_policy\.nnx\.{name}"):
        make(loss)(model, jnp.ones((8, 4)))


def test_a_module_as_a_pytree_trains_without_a_graph_as_the_error_says():
    def loss(model):
        return jnp.square(model(X[:, :8])).mean()

    model = jmpp.wrap(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "mixed_float16")
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(2.0**10))
    state = tx.init(model)
    with pytest.raises(TypeError, match=r"With graph=False its gradients are a module\."):
        jmpp.scaled_value_and_grad(loss)(state, model)
    before, grads = jmpp.nnx.scaled_value_and_grad(loss, graph=False)(state, model)
    updates, state = tx.update(grads, state, model)
    assert loss(optax.apply_updates(model, updates)) < before
