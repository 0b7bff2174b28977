"""The recipe fp8_delayed: its products, and its state in the variables of Flax's float8 layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as STATE
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

DELAYED, HALF = "mixed_bfloat16, r=fp8_delayed", "mixed_bfloat16"
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32)
OP = "Fp8DirectDotGeneralOp_0"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def loss_of(model):
    return lambda variables, x: jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2)


def trained(variables, grads):
    """Variables after a step, as Flax's TrainState has them: the state is its own gradient."""
    return {"params": variables["params"], STATE: grads[STATE]}


def scale(largest, format):
    return 2.0 ** np.ceil(np.log2(largest / float(jnp.finfo(format).max)))


def rounded(x, scale, format):
    limit = float(jnp.finfo(format).max)
    x = np.clip(np.asarray(x, np.float32) / scale, -limit, limit)
    return x.astype(jnp.dtype(format)).astype(np.float32) * scale


def error(found, exact):
    found, exact = (np.asarray(x, np.float32) for x in (found, exact))
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def dense(policy=DELAYED, **fields):
    return jmpp.wrap(nn.Dense(48, use_bias=False, **fields), policy)


@pytest.mark.slow
def test_products_have_the_scales_of_the_steps_before():
    model = dense()
    variables = model.init(jax.random.key(0), X)
    w = np.asarray(variables["params"]["kernel"], jnp.bfloat16)
    x = np.asarray(X, jnp.bfloat16)
    # The largest values of the step before were these; now values of the input lie beyond.
    largest = {"input": 0.5, "kernel": 0.25, "output_grad": 0.5}
    before = dict(variables[STATE][OP])
    for name, value in largest.items():
        before[f"{name}_amax_history"] = before[f"{name}_amax_history"].at[3].set(value)
    out, vjp = jax.vjp(model.apply, {"params": variables["params"], STATE: {OP: before}}, X)
    sx, sw, sg = (scale(v, f) for v, f in zip(largest.values(), (E4M3, E4M3, E5M2), strict=True))
    assert error(out, rounded(x, sx, E4M3) @ rounded(w, sw, E4M3)) < 2**-7
    ct = jnp.asarray(RNG.normal(size=out.shape), jnp.float32)
    grads, by_x = vjp(ct)
    g = rounded(jnp.asarray(ct, jnp.bfloat16), sg, E5M2)
    assert error(by_x, g @ rounded(w, sw, E4M3).T) < 2**-7
    assert error(grads["params"]["kernel"], rounded(x, sx, E4M3).T @ g) < 2**-7
    after = grads[STATE][OP]
    newest = {
        "input": np.abs(x).max(),
        "kernel": np.abs(w).max(),
        "output_grad": np.abs(jnp.bfloat16(ct)).max(),
    }
    for name, used in (("input", sx), ("kernel", sw), ("output_grad", sg)):
        assert float(after[f"{name}_scale"][0]) == used
        found = np.asarray(after[f"{name}_amax_history"])
        assert found[0] == np.float32(newest[name])
        assert found[2] == largest[name]
        assert np.count_nonzero(found) == 2


@pytest.mark.slow
def test_the_state_is_that_of_flaxs_layer():
    ours, theirs = dense(), dense(HALF, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    a, b = (model.init(jax.random.key(0), X) for model in (ours, theirs))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for _ in range(3):
        grads, expected = jax.grad(loss_of(ours))(a, X), jax.grad(loss_of(theirs))(a, X)
        for name in ("input_amax_history", "kernel_amax_history"):
            np.testing.assert_array_equal(grads[STATE][OP][name], expected[STATE][OP][name])
        for name in ("input_scale", "kernel_scale", "output_grad_scale"):
            ratio = float(grads[STATE][OP][name][0] / expected[STATE][OP][name][0])
            assert 1 <= ratio <= 2.1  # The next power of two.
        a = trained(a, grads)


@pytest.mark.slow
def test_a_layer_that_was_not_used_begins_anew():
    model = dense()
    variables = model.init(jax.random.key(0), X)
    zeros = {"params": variables["params"], STATE: jax.tree.map(jnp.zeros_like, variables[STATE])}
    assert np.array_equal(model.apply(zeros, X), model.apply(variables, X))


@pytest.mark.slow
@pytest.mark.parametrize("uses", [0, 1, 3])
def test_histories_go_on_however_often_a_layer_is_used(uses):
    """JAX adds up what the uses return: of a history only the newest value may be a sum."""
    model = dense()
    variables = model.init(jax.random.key(0), X)
    before = dict(variables[STATE][OP])
    for name in before:
        is_history = name.endswith("_amax_history")
        before[name] = jnp.arange(1.0, 1025.0) * 2**-10 if is_history else jnp.full(1, 0.25)
    variables = variables | {STATE: {OP: before}}

    def loss(variables, x):
        return sum((loss_of(model)(variables, x) for _ in range(uses)), jnp.float32(0))

    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.StaticLossScale(8.0))
    state = tx.init(variables)
    _, grads = jmpp.scaled_value_and_grad(loss)(state, variables, X)
    updates, _ = tx.update(grads, state, variables)
    after = optax.apply_updates(variables, updates)[STATE][OP]
    largest = float(jnp.max(jnp.abs(X.astype(jnp.bfloat16))))
    np.testing.assert_allclose(after["input_amax_history"][0], uses * largest, rtol=1e-6)
    for name in ("input", "kernel", "output_grad"):
        history = before[f"{name}_amax_history"]
        np.testing.assert_allclose(after[f"{name}_amax_history"][1:], np.roll(history, -1)[1:], rtol=1e-6)
        kept = 0.25 if not uses else uses * scale(1.0, E5M2 if name == "output_grad" else E4M3)
        np.testing.assert_allclose(after[f"{name}_scale"], kept, rtol=1e-6)


@pytest.mark.once
def test_values_that_are_not_finite_show_and_do_not_stay():
    model = dense()
    variables = model.init(jax.random.key(0), X)
    variables = trained(variables, jax.grad(loss_of(model))(variables, X))
    bad = X.at[3, 3].set(jnp.inf)
    out = np.asarray(model.apply(variables, bad))
    assert np.isnan(out).all(1).nonzero()[0].tolist() == [3]
    grads = jax.grad(loss_of(model))(variables, bad)
    assert np.isnan(grads["params"]["kernel"]).any()
    assert np.isfinite(jax.tree.leaves(grads[STATE])[0]).all()
    after = grads[STATE][OP]
    assert all(np.isfinite(value).all() for value in after.values())
    assert float(after["input_amax_history"][0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("mapped", ["vmap", "shard_map"])
def test_the_largest_value_is_that_of_the_whole(mapped):
    model, xs = dense(), jnp.asarray(RNG.normal(size=(128, 64)), jnp.float32)
    variables = model.init(jax.random.key(0), xs)
    whole = jax.grad(loss_of(model))(variables, xs)[STATE][OP]

    def loss(variables, x):
        # Each part's mean over all of the parts, so that cotangents are those of the whole.
        if mapped == "vmap":
            outs = jax.vmap(lambda x: model.apply(variables, x))(x.reshape(8, 16, 64))
            return jnp.mean(outs.astype(jnp.float32) ** 2)
        return jnp.mean(model.apply(variables, x).astype(jnp.float32) ** 2) / 8

    if mapped == "vmap":
        found = jax.grad(loss)(variables, xs)[STATE][OP]
    else:
        mesh = jax.make_mesh((8,), ("d",))
        gradient = jax.shard_map(
            lambda v, x: jax.grad(loss)(v, x)[STATE],
            mesh=mesh,
            in_specs=(P(), P("d")),
            out_specs=P(),
            check_vma=False,
        )
        found = jax.jit(gradient)(variables, jax.device_put(xs, NamedSharding(mesh, P("d"))))[OP]
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.once
def test_a_train_state_keeps_the_state_on_skipped_steps_and_under_weight_decay():
    model = nn.Dense(48)
    variables = jmpp.wrap(model, DELAYED).init(jax.random.key(0), X)
    state = jmpp.linen.TrainState.create(
        apply_fn=model.apply,
        params=variables,
        tx=optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-3, weight_decay=0.5)),
        precision={"policy": "p=f32,c=f16,o=f32,r=fp8_delayed", "loss_scale": 2.0**10},
    )

    @jax.jit
    def step(state, x):
        def loss(variables):
            return jnp.mean(state.apply_fn(variables, x) ** 2)

        _, grads = state.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads)

    one = step(state, X)
    # The largest value, not one that was divided by the loss scale, clipped or decayed.
    assert float(one.params[STATE][OP]["input_amax_history"][0]) == float(
        jnp.abs(X).max().astype(jnp.float16)
    )
    skipped = step(one, X.at[0, 0].set(jnp.inf))
    assert not jmpp.grads_finite(skipped.opt_state)
    jax.tree.map(np.testing.assert_array_equal, skipped.params, one.params)


@pytest.mark.once
def test_accumulation_takes_the_maximum_and_checkpoints_keep_the_state(tmp_path):
    model = dense()
    variables = model.init(jax.random.key(0), X)
    x = X.at[:16].multiply(100)
    _, grads = jmpp.accumulate_gradients(loss_of(model), 2)(jmpp.StaticLossScale(8.0), variables, x)
    largest = np.abs(np.asarray(x, jnp.bfloat16)).max()
    assert float(grads[STATE][OP]["input_amax_history"][0]) == float(largest)
    after = trained(variables, grads)
    fresh = dense().init(jax.random.key(1), X)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(after))
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", after)
    checkpointer.wait_until_finished()
    for found in (
        restored,
        checkpointer.restore(tmp_path / "state", fresh),
        jmpp.restore_state(fresh, after),
    ):
        jax.tree.map(np.testing.assert_array_equal, found, after)


@pytest.mark.once
def test_a_run_leaves_the_recipe_and_keeps_its_optimizer():
    """At step 2 to bfloat16, and back: the same step as one that was there from the start."""
    tx = optax.adamw(1e-2)
    delayed, half = dense(), dense(HALF)
    variables = delayed.init(jax.random.key(0), X)
    params, state = variables["params"], tx.init(variables["params"])
    for _ in range(2):
        grads = jax.grad(loss_of(delayed))(variables, X)
        updates, state = tx.update(grads["params"], state, params)
        params = optax.apply_updates(params, updates)
        variables = {"params": params, STATE: grads[STATE]}
    for left in ({"params": params}, variables):  # What a layer does not use may stay or go.
        grads = jax.grad(loss_of(half))(left, X)["params"]
        exact = jax.grad(loss_of(jmpp.wrap(nn.Dense(48, use_bias=False, dtype=jnp.bfloat16), HALF)))
        jax.tree.map(np.testing.assert_array_equal, grads, exact({"params": params}, X)["params"])
        tx.update(grads, state, params)
    assert jax.tree.structure(tx.init(half.init(jax.random.key(0), X)["params"])) == jax.tree.structure(state)


@pytest.mark.once
def test_a_run_begins_the_recipe_and_keeps_all_else():
    """At step 2 from bfloat16: every bit is as it was, and the next step is Adam's as it goes on."""
    model, adam = nn.Dense(48, use_bias=False), optax.adam(1e-2)
    initial, fresh = (dense(p).init(jax.random.key(i), X) for i, p in enumerate((HALF, DELAYED)))

    def state_of(params, policy):
        scale = jmpp.DynamicLossScale(2.0**8, growth_interval=3)
        precision = jmpp.Precision(jmpp.PolicyMap(policy), scale)
        return jmpp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=adam, precision=precision)

    @jax.jit
    def step(state, x):
        def loss(params):
            variables = params if STATE in params else {"params": params}
            return jnp.mean(state.apply_fn(variables, x).astype(jnp.float32) ** 2)

        return state.apply_gradients(grads=state.value_and_grad(loss)(state.params)[1])

    def assert_equal(found, expected):
        jax.tree.map(np.testing.assert_array_equal, found, expected)

    before = step(step(state_of(initial["params"], HALF), X), X)
    kept = {"params": before.params, STATE: fresh[STATE]}
    by_hand = before.replace(params=kept, apply_fn=dense().apply)
    restored = jmpp.restore_state(state_of(fresh, DELAYED), before)
    for state in (by_hand, restored):
        assert_equal((state.params, state.opt_state, state.step), (kept, before.opt_state, 2))
    skipped = step(restored, X.at[0, 0].set(jnp.inf))
    assert_equal(skipped.params, kept)
    after = step(restored, X)
    assert float(after.opt_state.loss_scale.loss_scale) == 2.0**9  # The third clean step.

    grads = jax.grad(lambda v: 2.0**8 * loss_of(dense())(v, X))(kept)
    assert_equal(after.params[STATE], grads[STATE])
    grads = jax.tree.map(lambda g: g / 2.0**8, grads["params"])
    updates, _ = adam.update(grads, before.opt_state.inner_state, before.params)
    expected = optax.apply_updates(before.params, updates)["kernel"]
    np.testing.assert_allclose(after.params["params"]["kernel"], expected, rtol=1e-6)

    left = jmpp.restore_state(state_of(initial["params"], HALF), after)
    assert_equal((left.params, left.opt_state), (after.params["params"], after.opt_state))
    # A TrainState of whole variables: Adam's moments have one name more in it.
    whole = jmpp.restore_state(state_of({"params": initial["params"]}, HALF), left)
    assert_equal(whole.params, {"params": left.params})
    assert_equal(whole.opt_state.inner_state[0].mu, {"params": left.opt_state.inner_state[0].mu})
    fresh_again = state_of(fresh, DELAYED)
    begun, left = jmpp.restore_state(fresh_again, whole), jmpp.restore_state(fresh_again, left)
    assert_equal((begun.params, begun.opt_state), (left.params, left.opt_state))
    with pytest.raises(ValueError, match=r"1 missing:\n  kernel: .*\n1 left over:\n  params/kernel: "):
        jmpp.optim.check_restored({"params": before.params}, before.params)
    with pytest.raises(ValueError, match="left over:\n  _overwrite_with_gradient/"):
        jmpp.optim.check_restored(kept, {"params": before.params})


@pytest.mark.once
def test_layers_that_stay_have_no_state_and_others_are_named():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(40, name="head")(nn.Dense(40)(nn.Dense(64)(x)))

    variables = jmpp.wrap(Net(), DELAYED).init(jax.random.key(0), X)
    assert list(variables[STATE]) == ["Dense_1"]
    notes = {row.path: row.note for row in jmpp.summary(Net(), DELAYED, X).modules}
    assert (notes["Dense_1"], notes["head"]) == ("fp8_delayed", "not in float8: a head")
    model = jmpp.wrap(Net(), DELAYED)
    found = jmpp.audit(lambda v: loss_of(model)(v, X), variables, grad=True).products
    assert sum(p.scales == "fp8_delayed" for p in found) == 2  # The input's gradient is not asked for.


def test_variables_without_the_state_get_an_error_that_says_where_it_comes_from():
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0}, split_rngs={"params": True}, length=2,
            )  # fmt: skip
            return scan(nn.Dense(32, name="inner"), x, None)[0]

    bare = nn.Sequential([nn.Dense(32), nn.Dense(32)])
    variables = bare.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="those of layers_0 are not given. Call init of the wrapped model"):
        jmpp.wrap(bare, DELAYED).apply(variables, X)
    with pytest.raises(
        ValueError, match="those of inner are not given.*variable_axes={'params': 0, '_overwrite"
    ):
        jmpp.wrap(Scanned(), DELAYED).init(jax.random.key(0), X)


def test_without_linen_there_is_no_place_for_the_state():
    with pytest.raises(
        ValueError, match="fp8_delayed keeps scales in variables of Flax Linen.*which NNX has"
    ):
        jmpp.wrap(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), DELAYED)
    with pytest.raises(ValueError, match="which autocast has not. Ask for fp8_current"):
        jmpp.autocast(lambda x: jnp.tanh(x) @ x, lower="fp8_delayed")(X[:, :32])
    with pytest.raises(ValueError, match="keeps one state for both passes"):
        jmpp.get_policy("mixed_bfloat16, r=fwd:fp8_delayed")
    assert jmpp.get_policy(DELAYED).to_dict()["recipe"] == "fp8_delayed"
