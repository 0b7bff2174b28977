"""TrainState and Optimizer with a precision train as the three lines do, and keep state on skipped steps."""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jmp_policy as jmpp

X = jax.random.normal(jax.random.key(1), (8, 8))
BAD = X.at[0, 0].set(jnp.inf)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x)))


class WithStats(jmpp.linen.TrainState):
    batch_stats: dict


class FlaxWithStats(train_state.TrainState):
    batch_stats: dict


FP16 = {"policy": "fp16", "loss_scale": {"type": "dynamic", "loss_scale": 64.0}}


def started(precision=FP16, cls=WithStats, **options):
    variables = Net().init(jax.random.key(0), X)
    fields = {"params": variables["params"], "tx": optax.adam(0.01), "apply_fn": Net().apply}
    if cls is WithStats:
        fields["batch_stats"] = variables["batch_stats"]
    return cls.create(precision=precision, **{**fields, **options})


def loss_of(apply_fn, stats, x):
    def loss_fn(params):
        out, new = apply_fn({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return (out**2).mean(), new["batch_stats"]

    return loss_fn


@jax.jit
def object_step(state, x):
    loss_fn = loss_of(state.apply_fn, state.batch_stats, x)
    (loss, stats), grads = state.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


@jax.jit
def by_lines(params, opt_state, stats, x):
    model = jmpp.wrap(Net(), "mixed_float16")
    loss_fn = loss_of(model.apply, stats, x)
    (loss, new), grads = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)(opt_state, params)
    updates, opt_state = lines_tx().update(grads, opt_state, params)
    stats = jmpp.select_tree(jmpp.grads_finite(opt_state), new, stats)
    return optax.apply_updates(params, updates), opt_state, stats, loss


def lines_tx():
    return jmpp.loss_scaled(optax.adam(0.01), jmpp.DynamicLossScale(64.0))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_train_state_is_the_three_lines():
    state = started()
    params, opt_state, stats = state.params, lines_tx().init(state.params), state.batch_stats
    for x in (X, BAD, X):
        state, loss = object_step(state, x)
        params, opt_state, stats, other = by_lines(params, opt_state, stats, x)
        np.testing.assert_array_equal(loss, other)
    assert_equal((state.params, state.opt_state, state.batch_stats), (params, opt_state, stats))
    assert int(state.step) == 3
    assert int(jmpp.metrics(state.opt_state)["skipped_steps"]) == 1
    assert np.isfinite(jax.flatten_util.ravel_pytree(state.batch_stats)[0]).all()


def test_train_state_computes_in_the_precision():
    for precision, dtype in (("fp16", "float16"), ("bf16", "bfloat16"), ("no", "float32")):
        state = started(precision)
        loss_fn = loss_of(state.apply_fn, state.batch_stats, X)
        found = jmpp.audit(lambda p, f=loss_fn: f(p)[0], state.params)
        assert {p.lhs for p in found.products} == {dtype}


def loss_with(state, apply_fn):
    loss_fn = loss_of(apply_fn, state.batch_stats, X)
    return jax.make_jaxpr(lambda params: state.value_and_grad(loss_fn, has_aux=True)(params))(state.params)


def test_a_loss_that_calls_the_bare_model_draws_a_warning():
    state = started()
    with pytest.warns(
        UserWarning, match=r"No module that the loss calls has a policy: .* Call state\.apply_fn"
    ):
        loss_with(state, Net().apply)
    loss_with(state, state.apply_fn)
    loss_with(state, jmpp.wrap(Net(), "mixed_float16").apply)
    with jmpp.linen.intercept("mixed_float16"):
        loss_with(state, Net().apply)
    loss_with(started("float32"), Net().apply)


def test_a_bare_model_beside_the_governed_one_draws_none():
    state, teacher = started(), Net()

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        outs = [apply(variables, X, train=False) for apply in (teacher.apply, state.apply_fn)]
        return ((outs[0] - outs[1]) ** 2).mean()

    state.value_and_grad(loss_fn)(state.params)


def test_train_state_of_a_function_that_calls_modules():
    def apply(variables, x, **options):
        return Net().apply(variables, x, **options)

    state = started(apply_fn=apply)
    loss_fn = loss_of(state.apply_fn, state.batch_stats, X)
    assert {p.lhs for p in jmpp.audit(lambda p: loss_fn(p)[0], state.params).products} == {"float16"}


def test_checkpoints_go_to_and_from_flax_own_train_state():
    state, _ = object_step(started(), X)
    plain = FlaxWithStats.create(
        apply_fn=None, params=state.params, tx=lines_tx(), batch_stats=state.batch_stats
    )
    saved = flax.serialization.to_bytes(state)
    plain = flax.serialization.from_bytes(plain, saved)
    assert_equal(jax.tree.leaves(plain), jax.tree.leaves(state))
    again = flax.serialization.from_bytes(started(), flax.serialization.to_bytes(plain))
    assert_equal(jax.tree.leaves(again), jax.tree.leaves(state))


@pytest.mark.slow
def test_train_state_float8_variables_stay_on_a_skipped_step():
    model = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    x = jnp.ones((16, 16))
    state = jmpp.linen.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=optax.sgd(0.1), precision="bf16"
    )
    own = "_overwrite_with_gradient"

    def step(state, factor):
        _, grads = state.value_and_grad(lambda v: factor * (state.apply_fn(v, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    good = step(state, 1.0)
    assert jax.tree.leaves(good.params[own])[0].max() > 0
    assert_equal(step(good, jnp.inf).params, good.params)


def test_train_state_refuses_what_is_wired_wrongly():
    with pytest.raises(ValueError, match="has a loss scale already"):
        started(tx=lines_tx())
    with pytest.raises(ValueError, match="Unknown policy 'fp61'"):
        started("fp61")
    rules = jmpp.PolicyMap("mixed_float16", {"**/Dense_0": "float32"})
    for precision in ("fp16", "no"):
        with pytest.raises(ValueError, match=r"Net is wrapped already.*precision=Precision\(rules\)"):
            started(precision, apply_fn=jmpp.wrap(Net(), rules).apply)
    started(jmpp.Precision(rules), apply_fn=jmpp.wrap(Net(), rules).apply)
    half = jax.tree.map(jnp.float16, Net().init(jax.random.key(0), X)["params"])
    with pytest.raises(ValueError, match=r"'BatchNorm_0/bias' is float16, .* keeps parameters in float32"):
        started(params=half)
    started({"policy": "fp16", "rules": {"Dense_0": "p=f16,c=f16"}}, params=half)


class WithCache(jmpp.linen.TrainState):
    cache: dict
    name: str = flax.struct.field(pytree_node=False)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_fields_that_cannot_stay_on_a_skipped_step_are_refused(jit):
    state = started(cls=WithCache, cache={"k": jnp.zeros(2)}, name="a")
    grads = jax.tree.map(jnp.ones_like, state.params)

    def applied(**fields):
        return jit(lambda state, grads: state.apply_gradients(grads=grads, **fields))(state, grads)

    assert_equal(applied(cache={"k": jnp.ones(2)}).cache, {"k": jnp.ones(2)})
    assert applied(name="a").name == "a"
    with pytest.raises(ValueError, match=r"apply_gradients\(cache=...\).*differ in structure"):
        applied(cache={"k": jnp.ones(2), "v": jnp.full(2, jnp.nan)})
    with pytest.raises(ValueError, match=r"apply_gradients\(cache=...\).*shapes and dtypes"):
        applied(cache={"k": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"(?s)apply_gradients\(name=...\).*state.replace\(name=...\)"):
        applied(name="b")
    with pytest.raises(TypeError, match=r"apply_gradients\(tx=...\)"):
        applied(tx=optax.sgd(1.0))


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.body, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.body(x)))


def nnx_loss(model, x):
    return (model(x) ** 2).mean()


@pytest.mark.slow
def test_nnx_optimizer_is_the_three_lines():
    precision = jmpp.from_config(FP16)
    model, other = (precision.wrap(NNXNet(nnx.Rngs(0))) for _ in range(2))
    optimizer = jmpp.nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param, precision=precision)
    plain = nnx.Optimizer(other, lines_tx(), wrt=nnx.Param)

    @nnx.jit
    def step(optimizer, model, x):
        return optimizer.minimize(nnx_loss, model, x)

    @nnx.jit
    def lines(optimizer, model, x):
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            loss, grads = jmpp.nnx.scaled_value_and_grad(nnx_loss)(optimizer, model, x)
            optimizer.update(model, grads)
        return loss

    for x in (X, BAD, X):
        np.testing.assert_array_equal(step(optimizer, model, x), lines(plain, other, x))
    # The same state by the same paths: checkpoints of one are those of the other.
    assert_equal(nnx.to_pure_dict(nnx.state(optimizer)), nnx.to_pure_dict(nnx.state(plain)))
    assert_equal(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(other)))
    assert int(jmpp.metrics(optimizer)["skipped_steps"]) == 1


@pytest.mark.slow
def test_nnx_optimizer_of_some_parameters_and_with_aux():
    precision = jmpp.from_config("bf16")
    model = precision.wrap(NNXNet(nnx.Rngs(0)))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt, precision=precision)
    with pytest.raises(TypeError, match=r"minimize\(loss_fn, model\); got"):
        optimizer.minimize(model, nnx_loss, X)
    loss, aux = optimizer.minimize(lambda m, x: (nnx_loss(m, x), {"n": 3}), model, X, has_aux=True)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert loss.dtype == jnp.float32
    assert aux == {"n": 3}
    assert_equal(before["body"], after["body"])
    assert (before["head"]["kernel"] != after["head"]["kernel"]).any()


def test_nnx_optimizer_refuses_what_is_wired_wrongly():
    bare = NNXNet(nnx.Rngs(0))
    said = r"NNXNet.*is not wrapped.*: precision = jmp_policy\.from_config\('bf16'\); model = precision\.wrap"
    with pytest.raises(ValueError, match=said):
        jmpp.nnx.Optimizer(bare, optax.sgd(0.1), wrt=nnx.Param, precision="bf16")
    with pytest.raises(ValueError, match=r"optimizer: model = precision\.wrap\(model\)"):
        jmpp.nnx.Optimizer(bare, optax.sgd(0.1), wrt=nnx.Param, precision=jmpp.from_config("bf16"))
    with pytest.raises(ValueError, match="has a loss scale already"):
        jmpp.nnx.Optimizer(jmpp.wrap(bare, "float32"), lines_tx(), wrt=nnx.Param, precision="no")
    wrapped = jmpp.nnx.wrap(bare, "mixed_bfloat16", methods=["__call__"])
    optimizer = jmpp.nnx.Optimizer(wrapped, optax.sgd(0.1), wrt=nnx.Param, precision="bf16")
    with pytest.raises(ValueError, match="of a wrapped model, and NNXNet is not wrapped"):
        optimizer.minimize(nnx_loss, bare, X)
    with pytest.raises(TypeError, match="missing a required argument: 'model'"):
        optimizer.value_and_grad(nnx_loss)()
    of_second = optimizer.value_and_grad(
        lambda teacher, model, x: nnx_loss(model, x), argnums=nnx.DiffState(1, nnx.Param)
    )
    assert of_second(NNXNet(nnx.Rngs(1)), wrapped, X)[0].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"NNXNet is wrapped already, under .*compute=bfloat16"):
        jmpp.nnx.Optimizer(wrapped, optax.sgd(0.1), wrt=nnx.Param, precision="fp16")


def test_minimize_keeps_the_state_of_all_models_on_a_skipped_step():
    precision = jmpp.from_config("fp16")
    model, other = (precision.wrap(NNXNet(nnx.Rngs(i))) for i in range(2))
    optimizer = jmpp.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param, precision=precision)
    before = nnx.to_pure_dict(nnx.state(other))
    optimizer.minimize(
        lambda model, x, others: nnx_loss(model, x) + nnx_loss(*others, x), model, BAD, [other]
    )
    assert int(jmpp.metrics(optimizer)["skipped_steps"]) == 1
    assert_equal(before, nnx.to_pure_dict(nnx.state(other)))


def test_minimize_gives_the_loss_to_the_optimizer():
    precision = jmpp.from_config("bf16")
    model = precision.wrap(NNXNet(nnx.Rngs(0)))
    optimizer = jmpp.nnx.Optimizer(model, optax.polyak_sgd(), wrt=nnx.Param, precision=precision)
    losses = [optimizer.minimize(nnx_loss, model, X) for _ in range(2)]
    assert losses[1] < losses[0]
