"""`scaled_value_and_grad` behaves as `jax.value_and_grad` does, with scaled gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import paired

import jmp_policy as jmpp

SCALE = jmpp.StaticLossScale(2.0**10)


def loss(params, x, *, power=2):
    return jnp.sum(params["w"] ** power * x) + params["b"]


PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.float32(3.0)}
X = jnp.array([0.5, 0.25])


@pytest.mark.slow
@pytest.mark.parametrize(("argnums", "has_aux"), paired([0, 1, (0, 1), (1,), -1, [0], 0], [False, True]))
def test_as_value_and_grad(argnums, has_aux):
    fun = (lambda *a, **k: (loss(*a, **k), {"n": 3})) if has_aux else loss
    want, want_grads = jax.value_and_grad(fun, argnums, has_aux)(PARAMS, X, power=3)
    got, grads = jmpp.scaled_value_and_grad(fun, argnums, has_aux)(SCALE, PARAMS, X, power=3)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert float(jax.tree.leaves(got)[0]) == float(jax.tree.leaves(want)[0])
    assert jax.tree.structure(grads) == jax.tree.structure(want_grads)
    jax.tree.map(np.testing.assert_array_equal, SCALE.unscale(grads), want_grads)


def test_takes_a_scale_or_any_state_that_holds_one():
    tx = optax.chain(optax.clip(1.0), jmpp.loss_scaled(optax.adam(1e-3), SCALE))
    state = tx.init(PARAMS)
    for given in (SCALE, state, {"opt": state, "other": 1}):
        _, grads = jmpp.scaled_value_and_grad(loss)(given, PARAMS, X)
        assert float(grads["b"]) == 2.0**10
    with pytest.raises(ValueError, match=r"no loss scale in this tuple: wrap .*loss_scaled"):
        jmpp.scaled_value_and_grad(loss)(optax.adam(1e-3).init(PARAMS), PARAMS, X)


def test_value_is_untouched_and_aux_too():
    def fun(w):
        return jnp.sum(w).astype(jnp.bfloat16), {"logits": w.astype(jnp.float16), "key": jax.random.key(0)}

    (value, aux), _ = jmpp.scaled_value_and_grad(fun, has_aux=True)(SCALE, jnp.ones(2))
    assert value.dtype == jnp.bfloat16
    assert aux["logits"].dtype == jnp.float16


@pytest.mark.slow
def test_float64_complex_and_integer_leaves():
    with jax.enable_x64(True):
        value, grad = jmpp.scaled_value_and_grad(lambda w: jnp.sum(w**2))(SCALE, jnp.ones(2, jnp.float64) / 3)
        assert value.dtype == grad.dtype == jnp.float64
        np.testing.assert_array_equal(grad, 2.0**10 * 2 * np.ones(2) / 3)
    z = jnp.array(1.0 + 2.0j)
    value, grad = jmpp.scaled_value_and_grad(lambda z: jnp.abs(z) ** 2)(SCALE, z)
    np.testing.assert_allclose(SCALE.unscale(grad), jax.grad(lambda z: jnp.abs(z) ** 2)(z), rtol=1e-6)
    value, grad = jmpp.scaled_value_and_grad(lambda z: z**2, holomorphic=True)(SCALE, z)
    np.testing.assert_allclose(SCALE.unscale(grad), 2 * z, rtol=1e-6)
    tree = {"w": jnp.ones(2), "n": jnp.arange(2)}
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jmpp.scaled_value_and_grad(lambda t: t["w"].sum())(SCALE, tree)
    _, grads = jmpp.scaled_value_and_grad(lambda t: t["w"].sum(), allow_int=True)(SCALE, tree)
    assert grads["n"].dtype == jax.dtypes.float0
    assert SCALE.unscale(grads)["n"] is grads["n"]


@pytest.mark.parametrize(
    ("fun", "has_aux", "message"),
    [
        (lambda w: w, False, "scalar-output"),
        (lambda w: (w.sum(), 3), False, "use has_aux=True"),
        (lambda w: w.sum(), True, r"must return \(loss, aux\)"),
        (lambda w: jnp.arange(3).sum(), False, "real-valued outputs"),
        (lambda w: None, False, "must return one scalar"),
    ],
)
def test_bad_losses(fun, has_aux, message):
    with pytest.raises(TypeError, match=message):
        jmpp.scaled_value_and_grad(fun, has_aux=has_aux)(SCALE, jnp.ones(2))


def test_bad_arguments():
    with pytest.raises(TypeError, match="needs a loss function, got 3"):
        jmpp.scaled_value_and_grad(3)
    gradient = jmpp.scaled_value_and_grad(jnp.sum)
    for use in (jmpp.scaled_value_and_grad, lambda fun: jmpp.accumulate_gradients(fun, 2)):
        with pytest.raises(TypeError, match="the loss function itself, and got what one of them returned"):
            use(gradient)


def test_a_float16_loss_warns_and_does_not_overflow_for_ever():
    scale = jmpp.StaticLossScale(2.0**20)

    def fun(w):
        return jnp.mean(w.astype(jnp.float16) ** 2)

    with pytest.warns(UserWarning, match=r"The loss is float16.*Compute the loss in float32"):
        value, grad = jmpp.scaled_value_and_grad(fun)(scale, jnp.full(64, 0.5, jnp.float32))
    assert value.dtype == jnp.float16
    assert grad.dtype == jnp.float32
    np.testing.assert_allclose(scale.unscale(grad), 2 * 0.5 / 64, rtol=2.0**-9)


def test_the_loss_is_multiplied_in_float32():
    """A loss of 3 * 2**15 times 2**16 is no float16 number, and no reason to skip."""
    _, grad = jmpp.scaled_value_and_grad(lambda w: 3 * 2.0**15 * w)(
        jmpp.StaticLossScale(2.0**16), jnp.float32(1)
    )
    assert float(grad) == 3 * 2.0**31


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_bad_loss_makes_bad_gradients(bad):
    """Its own gradient is finite: 1."""
    value, grad = jmpp.scaled_value_and_grad(lambda w: w.sum() + bad)(SCALE, jnp.ones(2))
    assert not bool(jnp.isfinite(value))
    assert not bool(jmpp.all_finite(grad))


def test_keyword_arguments_may_have_any_name_and_argnums_any_integer_type():
    def fun(w, scale, scale_or_opt_state):
        return jnp.sum(w * scale * scale_or_opt_state)

    for number in (np.int64(0), np.array(0), jnp.array(0)):
        value_and_grad = jmpp.scaled_value_and_grad(fun, number)
        _, grad = value_and_grad(SCALE, jnp.ones(2), scale=2.0, scale_or_opt_state=3.0)
        assert grad.tolist() == [6 * 2.0**10] * 2
    with pytest.raises(ValueError, match="must have value greater than"):
        jmpp.scaled_value_and_grad(jnp.sum, -5)(SCALE, jnp.ones(2))


@pytest.mark.slow
def test_debug_nans_and_checks_see_nothing_in_a_clean_step():
    tx = jmpp.loss_scaled(optax.adam(0.1), jmpp.DynamicLossScale())
    with jax.debug_nans(True), jax.enable_checks(True), jax.checking_leaks():
        state = tx.init(PARAMS)
        for run in (lambda f: f, jax.jit):
            _, grads = run(lambda s: jmpp.scaled_value_and_grad(loss)(s, PARAMS, X))(state)
            run(tx.update)(grads, state, PARAMS)


def test_second_order():
    def penalised(w, x):
        inner = jax.grad(lambda x: jnp.sum(jnp.tanh(w * x)))(x)
        return jnp.sum(inner**2)

    want = jax.grad(penalised)(jnp.ones(3), jnp.arange(3.0))
    _, got = jmpp.scaled_value_and_grad(penalised)(SCALE, jnp.ones(3), jnp.arange(3.0))
    np.testing.assert_array_equal(SCALE.unscale(got), want)


def overflowing(w, limit):
    """Gradients that are infinite above a scale of `limit`, as a float16 cotangent would be."""

    @jax.custom_vjp
    def saturating(w):
        return w

    def backward(_, g):
        return (jnp.where(jnp.abs(g) > limit, jnp.inf, g),)

    saturating.defvjp(lambda w: (w, None), backward)
    return jnp.sum(saturating(w))
