"""Gradients that no loss scale multiplied are noticed: in the trace if it shows them, else by a warning."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.data_flow import ancestors
from jmp_policy._src.loss_scaling.forgotten_scale import SCALE_USE, ScaleUse

ERROR = "computed in this function without it.*scaled_value_and_grad"
WARNING = "no loss was multiplied by the scale.*scaled_value_and_grad"
X = jnp.linspace(-1, 1, 24).reshape(8, 3)
PARAMS = {"w": jnp.full((3, 2), 0.5), "b": jnp.zeros(2)}


@pytest.fixture(autouse=True)
def record():
    """No loss scale has been asked for yet, and a false alarm fails a test."""
    before = vars(SCALE_USE).copy()
    vars(SCALE_USE).update(vars(ScaleUse()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield SCALE_USE
    vars(SCALE_USE).update(before)


def loss_fn(params, x=X):
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def good(state, params, x=X):
    return jmpp.scaled_value_and_grad(loss_fn)(state, params, x)[1]


def bad(state, params, x=X):
    return jax.grad(loss_fn)(params, x)


def by_hand(state, params, x=X):
    scale = jmpp.optim.get_loss_scale_state(state).loss_scale
    return jax.grad(lambda p: scale.scale(loss_fn(p, x)))(params)


def by_number(state, params, x=X):
    """Without the library's function: the trace shows it all the same."""
    scale = jmpp.optim.get_loss_scale_state(state).loss_scale.loss_scale
    return jax.grad(lambda p: scale * loss_fn(p, x))(params)


def optimizer(scale=None, inner=None, **settings):
    return jmpp.loss_scaled(inner or optax.sgd(0.1), scale or jmpp.DynamicLossScale(), **settings)


def step_of(gradient, tx):
    def step(params, state, x=X):
        updates, state = tx.update(gradient(state, params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


def trace(fun, *args):
    jax.eval_shape(fun, *args)


def twice(tree):
    return jax.tree.map(lambda x: jnp.stack([x, x]), tree)


def in_jit(gradient, tx):
    trace(step_of(gradient, tx), PARAMS, tx.init(PARAMS), X)


def in_inner_jit(gradient, tx):
    trace(step_of(jax.jit(gradient), tx), PARAMS, tx.init(PARAMS), X)


def in_scan(gradient, tx):
    def body(carry, x):
        return step_of(gradient, tx)(*carry, x), None

    trace(lambda *carry: jax.lax.scan(body, carry, jnp.stack([X, X])), PARAMS, tx.init(PARAMS))


def in_vmap(gradient, tx):
    trace(jax.vmap(step_of(gradient, tx)), twice(PARAMS), twice(tx.init(PARAMS)), twice(X))


def in_shard_map(gradient, tx):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "check_vma": False}
    trace(jax.shard_map(step_of(gradient, tx), mesh=mesh, **specs), PARAMS, tx.init(PARAMS), X)


def in_train_state(gradient, tx):
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    trace(lambda s: s.apply_gradients(grads=gradient(s.opt_state, s.params)), state)


def summed_in_scan(gradient, tx):
    def gradients(state, params, x):
        def add(total, part):
            return jax.tree.map(jnp.add, total, gradient(state, params, part)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), x.reshape(4, 2, 3))[0]

    in_jit(gradients, tx)


def halved_before(gradient, tx):
    in_jit(lambda *args: jax.tree.map(lambda g: jnp.where(g == jnp.inf, g, 0.5 * g), gradient(*args)), tx)


def unrolled(gradient, tx):
    step = step_of(gradient, tx)
    trace(lambda *args: step(*step(*args)), PARAMS, tx.init(PARAMS))


def state_of_the_same_trace(gradient, tx):
    trace(lambda params: step_of(gradient, tx)(params, tx.init(params)), PARAMS)


def in_chain(gradient, tx):
    in_jit(gradient, optax.chain(optax.identity(), tx, optax.scale(1.0)))


def in_masked(gradient, tx):
    in_jit(gradient, optax.masked(tx, dict.fromkeys(PARAMS, True)))


def under_master_weights(gradient, tx):
    in_jit(lambda s, p, x: gradient(s, p, x), jmpp.master_weights(tx))


def around_multi_steps(gradient, tx):
    in_jit(gradient, jmpp.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), jmpp.DynamicLossScale()))


SHOWN = [
    in_jit, in_inner_jit, in_scan, in_vmap, in_shard_map, in_train_state, summed_in_scan, halved_before,
    unrolled, state_of_the_same_trace, in_chain, in_masked, under_master_weights, around_multi_steps,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place", SHOWN)
def test_the_trace_shows_whether_a_scale_multiplied(place):
    with pytest.raises(ValueError, match=ERROR):
        place(bad, optimizer())
    for gradient in (good, by_hand, by_number):
        place(gradient, optimizer())


@pytest.mark.parametrize(
    "scale", [jmpp.StaticLossScale(8.0), jmpp.PIDLossScale(), jmpp.StatisticLossScale()], ids=type
)
def test_every_scale_with_numbers_is_looked_for(scale):
    with pytest.raises(ValueError, match=ERROR):
        in_jit(bad, optimizer(scale))
    in_jit(good, optimizer(scale))
    in_jit(bad, optimizer(jmpp.NoOpLossScale()))


def test_nnx_modules():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    opt = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    def step(gradient, model, opt):
        _, grads = gradient(opt, model)
        opt.update(model, grads)

    def loss(model):
        return (model(X) ** 2).mean()

    with pytest.raises(ValueError, match=ERROR):
        nnx.jit(step, static_argnums=0)(lambda opt, model: nnx.value_and_grad(loss)(model), model, opt)
    nnx.jit(step, static_argnums=0)(jmpp.nnx.scaled_value_and_grad(loss), model, opt)


def test_a_flax_model_with_dropout_statistics_and_masters():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
            return nn.Dropout(0.5, deterministic=False)(nn.remat(nn.Dense)(2)(nn.relu(x)))

    model = jmpp.wrap(Net(), "p=f16, c=f16, o=f32")
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(model.init, keys, X)
    tx = jmpp.master_weights(optimizer(inner=optax.adamw(1e-3), monitor=True))

    def step(gradient, params, state, stats, key):
        def loss(params):
            variables = {"params": params, "batch_stats": stats}
            out, new = model.apply(variables, X, rngs={"dropout": key}, mutable=["batch_stats"])
            return (out**2).mean(), new

        _, grads = gradient(loss)(state, params)
        return tx.update(grads, state, params)

    state = jax.eval_shape(tx.init, variables["params"])
    args = variables["params"], state, variables["batch_stats"], jax.random.key(2)
    trace(lambda *args: step(lambda loss: jmpp.scaled_value_and_grad(loss, has_aux=True), *args), *args)

    def unscaled(loss):
        return lambda state, params: jax.value_and_grad(loss, has_aux=True)(params)

    with pytest.raises(ValueError, match=ERROR):
        trace(lambda *args: step(unscaled, *args), *args)


def test_of_several_losses_the_one_without_scale_is_named():
    tx = optimizer({"a": jmpp.DynamicLossScale(), "b": jmpp.DynamicLossScale()})

    def step(params, state, scaled):
        grads = {"a": jmpp.scaled_value_and_grad(loss_fn, loss="a")(state, params)[1]}
        grads["b"] = jax.tree.map(jnp.zeros_like, params)
        if scaled is not None:
            b = jmpp.scaled_value_and_grad(loss_fn, loss="b")(state, params)[1]
            grads["b"] = b if scaled else bad(state, params)
        return tx.update(grads, state, params)

    for scaled in (True, None):
        trace(lambda p, s, scaled=scaled: step(p, s, scaled), PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match="gradients of 'b'.*loss='b'.*loss_scale.'b'..scale"):
        trace(lambda p, s: step(p, s, False), PARAMS, tx.init(PARAMS))


def test_accumulated_gradients():
    def accumulated(state, params, x):
        return jmpp.accumulate_gradients(loss_fn, 2)(state, params, x)[1]

    in_jit(accumulated, optimizer())


def test_a_static_scale_may_be_a_constant_of_the_program():
    scale = jmpp.StaticLossScale(8.0)
    in_jit(lambda state, params, x: good(scale, params, x), optimizer(scale))
    with pytest.raises(ValueError, match=ERROR):  # One that adapts may not.
        in_jit(lambda state, params, x: good(jmpp.DynamicLossScale(), params, x), optimizer())


@pytest.mark.slow
def test_gradients_that_are_inputs_may_be_worked_on():
    """Preconditioned by the curvature of the loss, which differentiates; and decayed by the parameters."""
    tx = optimizer()
    grads = good(tx.init(PARAMS), PARAMS)

    def update(grads, params, state):
        _, curved = jax.jvp(jax.grad(loss_fn), (params,), (grads,))
        return tx.update(jax.tree.map(lambda c, g, p: c + g + 0.1 * p, curved, grads, params), state, params)

    trace(update, grads, PARAMS, tx.init(PARAMS))


def test_gradients_may_be_multiplied_by_a_number_from_outside():
    tx = optimizer(jmpp.StaticLossScale(8.0))

    def update(params, state, factor):
        return tx.update(jax.tree.map(lambda g: g * factor, jax.grad(loss_fn)(params)), state, params)

    with pytest.warns(UserWarning, match=WARNING):  # Nobody knows what the number is.
        trace(update, PARAMS, tx.init(PARAMS), jnp.float32(8.0))


def outside(gradient, tx):
    state = tx.init(PARAMS)
    return gradient(state, PARAMS), state


def all_eager(gradient, tx):
    grads, state = outside(gradient, tx)
    for _ in range(2):
        _, state = tx.update(grads, state, PARAMS)


def update_in_jit(gradient, tx):
    grads, state = outside(gradient, tx)
    trace(tx.update, grads, state, PARAMS)


def gradient_in_jit(gradient, tx):
    all_eager(jax.jit(lambda *args: gradient(*args)), tx)


def both_in_jit(gradient, tx):
    update_in_jit(jax.jit(lambda *args: gradient(*args)), tx)


def inside_multi_steps(gradient, tx):
    """The update runs in a branch, whose trace has the gradients as inputs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"optax\.MultiSteps stands around")
        in_jit(gradient, optax.MultiSteps(tx, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [all_eager, update_in_jit, gradient_in_jit, both_in_jit, inside_multi_steps]
)
def test_gradients_without_a_history_draw_one_warning(place):
    tx = optimizer()
    with pytest.warns(UserWarning, match=WARNING) as found:
        place(bad, tx)
    assert len(found) == 1
    place(bad, tx)  # Once for each optimizer.
    for gradient in (good, by_hand):
        place(gradient, optimizer())


def test_a_step_that_was_traced_as_a_whole_does_not_vouch_for_another():
    in_jit(good, optimizer())
    with pytest.warns(UserWarning, match=WARNING):
        all_eager(bad, optimizer())


def test_eager_steps_vouch_for_themselves_only(record):
    tx, other = optimizer(), optimizer()
    all_eager(good, tx)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(5):
        params, state = step_of(good, tx)(params, state)
    assert not record.open
    with pytest.warns(UserWarning, match=WARNING):
        all_eager(bad, other)


def with_jacfwd(state, params, x=X):
    return jax.jacfwd(loss_fn)(params, x)


def by_formula(state, params, x=X):
    out = x @ params["w"] + params["b"]
    return {"w": x.T @ out / out.size * 2, "b": out.sum(0) / out.size * 2}


def from_probes(state, params, x=X):
    """As in evolution strategies: losses at random places, times the way there."""
    probe = {name: jax.random.normal(jax.random.key(0), p.shape) for name, p in params.items()}
    change = loss_fn(jax.tree.map(jnp.add, params, probe), x) - loss_fn(params, x)
    return jax.tree.map(lambda p: change * p, probe)


def used_in_one_program():
    in_jit(good, optimizer())


def used_eagerly():
    all_eager(good, optimizer())


def used_in_two_programs():
    update_in_jit(jax.jit(lambda *args: good(*args)), optimizer(inner=optax.adam(0.1)))


@pytest.mark.slow
@pytest.mark.parametrize("other", [used_in_one_program, used_eagerly, used_in_two_programs])
@pytest.mark.parametrize("gradient", [with_jacfwd, by_formula, from_probes])
def test_gradients_without_a_backward_pass_draw_a_warning_whatever_others_did(gradient, other):
    other()
    for place in (in_jit, in_scan, in_vmap):
        with pytest.warns(UserWarning, match=ERROR):
            place(gradient, optimizer())
    with pytest.warns(UserWarning, match=WARNING):
        all_eager(gradient, optimizer())


def test_a_scale_that_is_given_apart_from_its_state_is_not_refused():
    def step(params, state, scale):
        grads = jax.grad(lambda params: scale * loss_fn(params))(params)
        return optimizer().update(grads, state, params)

    state = optimizer().init(PARAMS)
    with pytest.warns(UserWarning, match=WARNING):  # It may be another factor.
        trace(step, PARAMS, state, state.loss_scale.loss_scale)
    with pytest.raises(ValueError, match=ERROR):
        trace(lambda params, state, scale: step(params, state, 2.0), PARAMS, state, 1.0)


def test_gradients_of_a_line_search_are_those_of_no_scale():
    used_in_two_programs()
    tx = optimizer(inner=optax.lbfgs())

    def step(params, state):
        value, grads = optax.value_and_grad_from_state(loss_fn)(params, state=state)
        return tx.update(grads, state, params, value=value, grad=grads, value_fn=loss_fn)

    with pytest.raises(ValueError, match=ERROR):
        trace(step, PARAMS, tx.init(PARAMS))


def test_two_optimizers_in_two_programs_each_vouch_for_themselves():
    first, second = optimizer(), optimizer()
    states = first.init(PARAMS), second.init(PARAMS)
    grads = [good(state, PARAMS) for state in states]
    for tx, g, state in zip((first, second), grads, states, strict=True):
        trace(tx.update, g, state, PARAMS)


def divided(gradient, divide=lambda g, scale: g / scale):
    def by_hand(state, params, x=X):
        scale = jmpp.optim.get_loss_scale_state(state).loss_scale
        return jax.tree.map(lambda g: divide(g, scale.loss_scale), gradient(state, params, x))

    return by_hand


def clipped_right(state, params, x=X):
    """Without the scale in them, which is multiplied again."""
    scale = jmpp.optim.get_loss_scale_state(state).loss_scale
    clip = optax.clip_by_global_norm(1.0)
    return scale.scale(clip.update(scale.unscale(good(state, params, x)), optax.EmptyState())[0])


def clipped_by_true_norm(state, params, x=X):
    grads, scale = good(state, params, x), jmpp.optim.get_loss_scale_state(state).loss_scale.loss_scale
    norm = optax.tree.norm(grads) / scale
    return jax.tree.map(lambda g: jnp.where(norm > 1, g / norm, g), grads)


REPAIRED = {
    "optax": lambda g: optax.zero_nans().update(g, optax.EmptyState())[0],
    "isfinite": lambda g: jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), g),
    "nan_to_num": lambda g: jax.tree.map(jnp.nan_to_num, g),
    "jit": jax.jit(lambda g: jax.tree.map(lambda x: 0.5 * jnp.nan_to_num(x, posinf=1.0), g)),
    "isnan": lambda g: jax.tree.map(lambda x: jnp.where(jnp.isnan(x) | jnp.isinf(x), 0, x), g),
    "all": lambda g: jmpp.select_tree(jmpp.all_finite(g), g, jax.tree.map(jnp.zeros_like, g)),
}
REPAIRED |= {f"{name} in a jitted function": jax.jit(repair) for name, repair in REPAIRED.items()}


@pytest.mark.parametrize("repair", REPAIRED.values(), ids=REPAIRED)
def test_gradients_in_which_what_is_not_finite_is_replaced_draw_a_warning(repair):
    with pytest.warns(UserWarning, match="tested for NaN and infinities: .* sees no overflow"):
        in_jit(lambda s, p, x: repair(good(s, p, x)), optimizer())


def cross_entropy(params, x):
    logits, labels = x @ params["w"] + params["b"], jnp.arange(8) % 2
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def weighted_by_loss(state, params, x=X):
    (loss, grads) = jmpp.scaled_value_and_grad(cross_entropy)(state, params, x)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1 / loss), grads)


def forward_gradient(state, params, x=X):
    scale = jmpp.optim.get_loss_scale_state(state).loss_scale
    direction = jax.tree.map(jnp.ones_like, params)
    _, slope = jax.jvp(lambda p: scale.scale(cross_entropy(p, x)), (params,), (direction,))
    return jax.tree.map(lambda v: slope * v, direction)


def zero_where_the_loss_is_infinite(state, params, x=X):
    loss, grads = jmpp.scaled_value_and_grad(loss_fn)(state, params, x)
    return jax.tree.map(lambda g: jnp.where(jnp.isfinite(loss), g, 0.0), grads)


def test_a_test_of_the_loss_that_replaces_gradients_draws_a_warning():
    with pytest.warns(UserWarning, match="tested for NaN and infinities"):
        in_jit(zero_where_the_loss_is_infinite, optimizer())


@pytest.mark.parametrize("gradient", [weighted_by_loss, forward_gradient])
def test_a_test_for_infinities_in_the_loss_is_none_of_gradients(gradient):
    in_jit(gradient, optimizer())


def test_gradients_of_another_program_that_are_repaired_draw_a_warning():
    def step(params, state, grads):
        return optimizer().update(REPAIRED["isfinite"](grads), state, params)

    with pytest.warns(UserWarning, match="tested for NaN and infinities"):
        trace(step, PARAMS, optimizer().init(PARAMS), PARAMS)


def closed_over(update):
    """Places where a branch, a loop or a function gets parameters and state, and closes over gradients."""

    def place(gradient, tx):
        def step(params, state, x):
            grads = gradient(state, params, x)
            return update(lambda carry: tx.update(grads, carry[1], carry[0]), (params, state))

        trace(step, PARAMS, tx.init(PARAMS), X)

    return place


INSIDE = {
    "cond": lambda f, carry: jax.lax.cond(X[0, 0] < 0, f, lambda carry: carry, carry),
    "switch": lambda f, carry: jax.lax.switch(1, [lambda carry: carry, f], carry),
    "fori_loop": lambda f, carry: jax.lax.fori_loop(0, 2, lambda _, carry: f(carry), carry),
    "jit": lambda f, carry: jax.jit(f)(carry),
}


@pytest.mark.parametrize("update", INSIDE.values(), ids=INSIDE)
def test_an_update_in_a_branch_that_closes_over_gradients(update):
    for gradient in (good, clipped_right, clipped_by_true_norm):
        closed_over(update)(gradient, optimizer())
    vars(SCALE_USE).update(vars(ScaleUse()))
    with pytest.warns(UserWarning, match=WARNING):
        closed_over(update)(bad, optimizer())


@pytest.mark.parametrize("factor", [lambda scale: 64.0, lambda scale: scale.loss_scale])
def test_a_loss_times_the_number_of_a_static_scale_is_no_mistake(factor):
    scale = jmpp.StaticLossScale(64.0)

    def gradient(state, params, x=X):
        return jax.grad(lambda params: factor(scale) * loss_fn(params, x))(params)

    with warnings.catch_warnings(action="ignore"):  # Of a closed-over array its value is not looked at.
        in_jit(gradient, jmpp.loss_scaled(optax.sgd(0.1), scale))


@pytest.mark.slow
def test_gradients_that_were_clipped_or_divided_with_the_scale_in_them_draw_a_warning():
    outside = [
        optax.clip_by_global_norm(1.0),
        optax.clip(1.0),
        optax.adaptive_grad_clip(0.1),
        optax.add_decayed_weights(1e-4),
    ]
    for before in outside:
        for place in (in_jit, in_scan, in_train_state, update_in_jit):
            with pytest.warns(UserWarning, match="gradients that optax has clipped"):
                place(good, optax.chain(before, optimizer()))
        in_jit(good, optimizer(inner=optax.chain(before, optax.sgd(0.1))))
    for before in (
        optax.normalize_by_update_norm(),
        optax.scale_by_adam(),
        optax.trace(0.9),
    ):
        with pytest.warns(UserWarning, match="gradients that optax has clipped"):
            in_jit(good, optax.chain(optax.masked(before, True), optimizer()))
    for gradient in (
        divided(good),
        divided(good, lambda g, scale: g * (1 / scale)),
        divided(good, lambda g, scale: g * jnp.reciprocal(scale)),
        divided(good, lambda g, scale: g / (scale * 2) * 2),
        lambda s, *args: s.loss_scale.unscale(good(s, *args)),
    ):
        with pytest.warns(UserWarning, match="divided by the loss scale already"):
            in_jit(gradient, optimizer())
    in_jit(clipped_right, optimizer())
    in_jit(clipped_by_true_norm, optimizer())
    for before in (
        optax.scale(0.5),
        optax.centralize(),
        optax.scale_by_learning_rate(lambda step: 0.1),
        optax.masked(optax.set_to_zero(), True),
    ):
        in_jit(good, optax.chain(before, optimizer()))
    in_jit(good, optax.flatten(optimizer()))
    with pytest.warns(UserWarning, match="gradients that were clipped"):
        unrolled(lambda s, p, x: jax.tree.map(lambda g, p: g + 0.1 * p, good(s, p, x), p), optimizer())


def test_a_right_update_does_not_vouch_for_one_whose_gradients_were_clipped():
    tx = optimizer()
    in_jit(good, tx)
    with pytest.warns(UserWarning, match="gradients that optax has clipped"):
        in_jit(good, optax.chain(optax.clip_by_global_norm(1.0), tx))
    in_jit(good, optax.chain(optax.clip_by_global_norm(1.0), tx))  # Once.


@pytest.mark.parametrize(
    "scale", [jmpp.DynamicLossScale(), jmpp.StaticLossScale(128.0)], ids=["dynamic", "static"]
)
def test_gradients_of_a_float16_loss_were_not_changed(scale):
    def gradient(state, params, x=X):
        return jmpp.scaled_value_and_grad(lambda p: loss_fn(p, x).astype(jnp.float16))(state, params)[1]

    with pytest.warns(UserWarning, match="The loss is float16") as told:
        in_jit(gradient, optimizer(scale))
    assert len(told) == 1


def test_a_loss_function_that_scales_the_loss_itself_draws_a_warning():
    def twice(state, params, x=X):
        scale = jmpp.optim.get_loss_scale_state(state).loss_scale
        return jmpp.scaled_value_and_grad(lambda params: scale.scale(loss_fn(params, x)))(state, params)[1]

    def weighted(state, params, x=X):
        return jmpp.scaled_value_and_grad(lambda params: 0.5 * loss_fn(params, x))(state, params)[1]

    with pytest.warns(
        UserWarning, match=r"by the loss scale a second time, after test_forgotten_scale.py:\d+ \("
    ):
        in_jit(twice, optimizer())
    for gradient in (good, by_hand, weighted):
        in_jit(gradient, optimizer())


def _norm(grads):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


#: What is done by hand between the backward pass and the update, to gradients and parameters.
CHANGED = {
    "norm": lambda g, p: jax.tree.map(lambda x: x * jnp.minimum(1.0, 1 / (_norm(g) + 1e-6)), g),
    "where": lambda g, p: jax.tree.map(lambda x: jnp.where(_norm(g) > 1, x / _norm(g), x), g),
    "jit": lambda g, p: jax.jit(lambda g: jax.tree.map(lambda x: jnp.clip(x, -1, 1), g))(g),
    "direction": lambda g, p: jax.tree.map(lambda x: x / jnp.linalg.norm(x), g),
    "sign": lambda g, p: jax.tree.map(jnp.sign, g),
    "square": lambda g, p: jax.tree.map(jnp.square, g),
    "tanh": lambda g, p: jax.tree.map(jnp.tanh, g),
    "decay": lambda g, p: jax.tree.map(lambda x, w: x + 0.1 * w, g, p),
    "noise": lambda g, p: jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(0), x.shape), g),
}
#: The gradient of another loss, without the scale.
CHANGED["penalty"] = lambda g, p: jax.tree.map(jnp.add, g, jax.grad(loss_fn)(p))
CHANGED["mean"] = lambda g, p: jax.tree.map(lambda x, y: (x + y) / 2, g, jax.jit(jax.grad(loss_fn))(p))
UNCHANGED = {
    "half": lambda g, p: jax.tree.map(lambda x: 0.5 * x, g),
    "centred": lambda g, p: jax.tree.map(lambda x: x - x.mean(), g),
    "masked": lambda g, p: jax.tree.map(
        lambda x: jnp.where(jnp.arange(x.size).reshape(x.shape) > 0, x, 0), g
    ),
    "dropped": lambda g, p: jax.tree.map(
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), g
    ),
    "frozen": lambda g, p: jax.tree.map(lambda x: jnp.zeros_like(x), g),
    "row": lambda g, p: jax.tree.map(lambda x: x.at[0].set(0.0).at[1].multiply(0.1), g),
    "projected": lambda g, p: jax.tree.map(lambda x, w: x - w * jnp.vdot(x, w) / (1 + jnp.vdot(w, w)), g, p),
    "median": lambda g, p: jax.tree.map(lambda x: x - jnp.median(x), g),
    "rms": lambda g, p: jax.tree.map(lambda x: jnp.sqrt(x**2) * jnp.sign(x), g),
    "jit": lambda g, p: jax.jit(lambda g: (jax.tree.map(lambda x: 2 * x, g), _norm(g)))(g)[0],
    "two norms": lambda g, p: jax.tree.map(lambda x: x * optax.tree.norm(g) / optax.tree.norm(g), g),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_gradients_changed_by_hand_with_the_scale_in_them_draw_a_warning(change):
    with pytest.warns(UserWarning, match="gradients that were clipped, normalised or changed otherwise"):
        in_jit(lambda s, p, x: change(good(s, p, x), p), optimizer())


DIVIDED = {
    "by hand": lambda g, scale: jax.tree.map(lambda x: x / scale.loss_scale, g),
    "unscale": lambda g, scale: scale.unscale(g),
    "weighted": lambda g, scale: jax.tree.map(lambda x: 0.5 * x / (2 * scale.loss_scale), g),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("divide", DIVIDED.values(), ids=DIVIDED)
def test_gradients_divided_in_a_function_of_their_own_draw_a_warning(divide, wrap):
    def changed(change):
        return lambda s, p, x=X: wrap(change)(good(s, p, x), jmpp.optim.get_loss_scale_state(s).loss_scale)

    with pytest.warns(UserWarning, match="divided by the loss scale already"):
        in_jit(changed(divide), optimizer())
    in_jit(changed(lambda g, scale: scale.scale(divide(g, scale))), optimizer())


#: The same as in `CHANGED`, in the right proportion to the loss scale.
SCALED = {
    "norm": lambda g, p, c: jax.tree.map(lambda x: x * jnp.minimum(1.0, c / (_norm(g) + 1e-6 * c)), g),
    "where": lambda g, p, c: jax.tree.map(lambda x: jnp.where(_norm(g) > c, x * c / _norm(g), x), g),
    "value": lambda g, p, c: jax.tree.map(lambda x: jnp.clip(x, -c, c), g),
    "tanh": lambda g, p, c: jax.tree.map(lambda x: jnp.tanh(x / c) * c, g),
    "decay": lambda g, p, c: jax.tree.map(lambda x, w: x + c * 0.1 * w, g, p),
    "penalty": lambda g, p, c: jax.tree.map(lambda x, y: x + c * y, g, jax.grad(loss_fn)(p)),
    "cond": lambda g, p, c: jax.lax.cond(
        _norm(g) > c, lambda g: jax.tree.map(lambda x: x * c / _norm(g), g), lambda g: g, g
    ),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("change", SCALED.values(), ids=SCALED)
def test_gradients_changed_in_proportion_to_the_scale_draw_none(change, wrap):
    def changed(state, params, x=X):
        scale = jmpp.optim.get_loss_scale_state(state).loss_scale.loss_scale
        return wrap(change)(good(state, params, x), params, scale)

    in_jit(changed, optimizer())


def test_gradients_halved_for_a_second_update_in_one_step_draw_none():
    """The parameters of the second come of these gradients, too."""

    def step(params, state, x):
        grads = jax.tree.map(lambda g: 0.5 * g, good(state, params, x))
        updates, _ = optimizer().update(grads, state, params)
        return optimizer().update(grads, state, optax.apply_updates(params, updates))

    trace(step, PARAMS, optimizer().init(PARAMS), X)


@pytest.mark.parametrize("change", UNCHANGED.values(), ids=UNCHANGED)
def test_gradients_that_are_a_multiple_of_those_of_the_backward_pass_draw_none(change):
    in_jit(lambda s, p, x: change(good(s, p, x), p), optimizer())


def test_check_says_that_gradients_are_too_small_for_their_scale():
    tx = optimizer(monitor=True)
    state = tx.init(PARAMS)
    grads = good(state, PARAMS)
    jmpp.check(tx.update(grads, state, PARAMS)[1])
    clipped, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    for small in (clipped, state.loss_scale.unscale(grads)):
        _, after = tx.update(small, state, PARAMS)
        with pytest.warns(UserWarning, match="computed without scaled_value_and_grad, or clipped"):
            jmpp.check(after)


def test_a_state_that_was_copied_in_between_is_the_same():
    tx = optimizer(jmpp.StaticLossScale(4.0))
    state = tx.init(PARAMS)
    grads = good(state, PARAMS)
    tx.update(grads, jax.tree.map(jnp.copy, state), PARAMS)


def test_trees_without_numbers_and_scales_of_others_are_no_alarm():
    class Other:
        loss_scale = jnp.float32(4.0)

        def scale(self, tree):
            return tree

        def unscale(self, tree):
            return tree

        def adjust(self, grads_finite, grads=None):
            return self

    jax.tree_util.register_pytree_node(
        Other, lambda _: ((jnp.float32(4.0),), None), lambda _, leaves: Other()
    )
    all_eager(bad, optimizer(Other()))
    tx = optimizer()
    tx.update({}, tx.init({}), {})


def test_traces_are_read_on_this_version_of_jax():
    """Also through vmap and derivatives; what is unknown stays unknown."""
    found = {}

    def probe(x, y):
        z = jnp.sin(x) * 2
        found["z"] = {id(t) for t in ancestors([z]).inputs}
        found["x"], found["y"] = id(compat.traced_by(x)[0]), id(compat.traced_by(y)[0])
        return z

    one = jnp.ones(2)
    for wrapped in (probe, jax.vmap(probe), lambda x, y: jax.jvp(probe, (x, y), (x, y))):
        trace(wrapped, one, one)
        assert found["x"] in found["z"]
        assert found["y"] not in found["z"]
    assert compat.traced_by(one) is None
    assert not ancestors([one, 1.0, None]).nodes


def test_what_jax_no_longer_tells_is_unknown(monkeypatch):
    class Tracer:
        val = parent = None

    monkeypatch.setattr(compat.jax.core, "Tracer", Tracer)
    tracer = Tracer()
    tracer.parent = object()  # An equation of another shape.
    assert compat.traced_by(tracer) is None


def test_nothing_is_kept_alive(record):
    with jax.checking_leaks():
        trace(step_of(good, tx := optimizer()), PARAMS, tx.init(PARAMS))
    for _ in range(3):
        all_eager(good, optimizer())
    assert not record.open
