"""Operations of one dtype inside Linen modules: loops, branches, caches, and what knows no half precision."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import dtypes, products
from jax import lax

import jmp_policy as jmpp

X = jnp.linspace(-1, 1, 24).reshape(3, 8)


class Runs(nn.Module):
    """Runs a function of a layer and the inputs."""

    function: object

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(8)
        return self.function(dense, dense(x))


def zeros():
    return jnp.zeros((3, 8))


LOOPS = {
    "scan": lambda dense, h: lax.scan(lambda c, _: (dense(c), None), zeros(), None, length=2)[0],
    "scan over half": lambda dense, h: lax.scan(
        lambda c, x: (jnp.tanh(dense(c) + x), c), zeros(), jnp.stack([h, h])
    )[0],
    "while": lambda dense, h: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, nn.relu(dense(c[1]))), (0, zeros())
    )[1],
    "nn.while": lambda dense, h: nn.while_loop(
        lambda _, c: c[0] < 2, lambda mdl, c: (c[0] + 1, mdl(c[1])), dense, (0, zeros())
    )[1],
    "fori": lambda dense, h: lax.fori_loop(0, 2, lambda _, c: dense(c), zeros()),
}


@pytest.mark.slow
@pytest.mark.parametrize("function", LOOPS.values(), ids=LOOPS)
def test_loops_over_float32_carries_that_the_module_makes(function):
    bare, model = Runs(function), jmpp.wrap(Runs(function), "mixed_bfloat16")
    variables = model.init(jax.random.key(0), X)
    assert np.allclose(model.apply(variables, X), bare.apply(variables, X), atol=0.05)
    assert set(products(model.apply, variables, X)) == {("dot_general", "bfloat16", "bfloat16")}


def test_outside_of_loops_results_are_half_whatever_came():
    model = jmpp.wrap(Runs(lambda dense, h: dense(zeros())), "p=f32,c=f16,o=f16")
    assert model.init_with_output(jax.random.key(0), X)[0].dtype == jnp.float16


@pytest.mark.parametrize("rule", ["p=f32,c=f32,o=f16", "p=f32,c=f16,o=f32"])
@pytest.mark.parametrize("start", [zeros, lambda: jnp.zeros((3, 8), jnp.float16)], ids=["float32", "half"])
def test_carries_of_a_cell_whose_rule_has_another_output_dtype(start, rule):
    class Cell(nn.Module):
        @nn.compact
        def __call__(self, carry, x):
            h = jnp.tanh(nn.Dense(8)(jnp.concatenate([carry, x], -1)))
            return h, h

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False})
            return scan(name="cell")(start(), nn.Dense(8)(jnp.stack([x, x])))[1]

    # Under float32 a half carry is float32's to promote.
    for default in ("mixed_float16", *["float32"] * (start is zeros)):
        model = jmpp.wrap(Net(), jmpp.PolicyMap(default, {"cell": rule}))
        assert model.init_with_output(jax.random.key(0), X)[0].dtype == jnp.float32


FAILING = {
    "carry": lambda dense, h: lax.scan(lambda c, x: (2 * x, None), zeros()[0], h)[0],
    "branches": lambda dense, h: lax.cond(True, lambda: h, zeros),
    "buffer": lambda dense, h: lax.dynamic_update_slice(jnp.zeros((9, 8)), h, (0, 0)),
    "select": lambda dense, h: lax.select(h > 0, h, zeros()),
    "fft": lambda dense, h: jnp.fft.irfft(jnp.fft.rfft(h)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAILING)
def test_other_failures_name_the_module_and_the_rule_that_helps(kind):
    function = FAILING[kind]

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(Runs(function, name="mixer")(x))

    with pytest.raises(
        (TypeError, ValueError), match="(?s)float16.*\n\nRuns at 'mixer' computes in float16"
    ) as e:
        jmpp.wrap(Outer(), "mixed_float16").init(jax.random.key(0), X)
    assert str(e.value).count("computes in float16") == 1
    # What is around a transform is half; a carry or branch around is float32.
    output = "float16" if kind == "fft" else "float32"
    rule = f"params=float32,compute=float32,output={output}"
    assert f'PolicyMap(..., {{"mixer": "{rule}"}})' in str(e.value)
    helped = jmpp.PolicyMap("mixed_float16", {"mixer": rule})
    assert jmpp.wrap(Outer(), helped).init_with_output(jax.random.key(0), X)[0].dtype == jnp.float32


def test_linear_algebra_outside_of_jit():
    def inverse(dense, h):
        return jnp.linalg.inv(h.T @ h + jnp.eye(8, dtype=h.dtype))

    with pytest.raises((NotImplementedError, TypeError), match="Runs computes in bfloat16 under its policy"):
        jmpp.wrap(Runs(inverse), "mixed_bfloat16").init(jax.random.key(0), X)


@pytest.mark.parametrize("given", ["float32", "float16"])
def test_a_branch_that_returns_its_input_takes_it_in_half(given):
    class Residual(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(8)(x)

    class Skips(nn.Module):
        def setup(self):
            self.layer = Residual()

        def __call__(self, x):
            x = x.astype(given)
            if self.is_initializing():
                return self.layer(x)
            return nn.cond(jnp.sum(x) > 0, lambda mdl, x: mdl.layer(x), lambda mdl, x: x, self, x)

    variables = Skips().init(jax.random.key(0), X)
    model = jmpp.wrap(Skips(), "mixed_float16")
    if given == "float16":
        assert model.apply(variables, X).dtype == jnp.float32
        return
    with pytest.raises(TypeError, match=r"returns its input that in half \(x\.astype\(jnp\.float16\)\)") as e:
        model.apply(variables, X)
    rule = "params=float32,compute=float32,output=float32"
    assert str(e.value).endswith(f'PolicyMap(..., {{Skips: "{rule}"}}).')
    helped = jmpp.wrap(Skips(), jmpp.PolicyMap("mixed_float16", {Skips: rule}))
    assert helped.apply(variables, X).dtype == jnp.float32


class Caches(nn.Module):
    """A layer that takes a cache and returns it."""

    @nn.compact
    def __call__(self, x, cache):
        cache = lax.dynamic_update_slice(cache, nn.Dense(8)(x), (0, 0))
        return cache.sum(), cache


def test_a_cache_that_came_back_in_float32_says_what_keeps_it_half():
    cache = jnp.zeros((9, 8), jnp.float16)
    variables = Caches().init(jax.random.key(0), X, jnp.zeros((9, 8)))
    model = jmpp.wrap(Caches(), "mixed_float16")
    _, returned = model.apply(variables, X, cache)
    assert returned.dtype == jnp.float32
    with pytest.raises(TypeError, match="a cache that the model has returned: output=float16 keeps it half"):
        model.apply(variables, X, returned)
    model = jmpp.wrap(Caches(), "params=float32,compute=float16,output=float16")
    for _ in range(2):
        _, cache = model.apply(variables, X, cache)
    assert cache.dtype == jnp.float16


class Rotary(nn.Module):
    """Attention whose queries and keys a rotary embedding makes float32."""

    half: bool = False

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.DenseGeneral((2, 8))(x) for _ in range(3))
        turned = [h * jnp.cos(jnp.arange(8.0)) for h in (q, k)]
        q, k = [h.astype(v.dtype) for h in turned] if self.half else turned
        return jax.nn.dot_product_attention(q, k, v)


def test_attention_of_two_dtypes_says_what_to_cast_and_that_helps():
    x = jnp.ones((2, 3, 8))
    variables = Rotary().init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="met float32 numbers") as e:
        jmpp.wrap(Rotary(), "mixed_float16").apply(variables, x)
    assert str(e.value).endswith("cast them back before it (q.astype(jnp.float16)).")
    assert jmpp.wrap(Rotary(half=True), "mixed_float16").apply(variables, x).shape == (2, 3, 2, 8)


class Strict(nn.Module):
    """A module with a check of its own."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8)(x)
        if h.dtype != jnp.float32:
            raise TypeError(f"the input dtype should be float32, got {h.dtype}")
        return h


def test_a_check_of_a_modules_own_is_no_error_of_attention():
    x = jnp.ones((3, 8))
    variables = Strict().init(jax.random.key(0), x)
    with pytest.raises(TypeError, match=r"let the module compute in float32 by a rule: PolicyMap\("):
        jmpp.wrap(Strict(), "mixed_float16").apply(variables, x)


def test_errors_that_have_other_causes_are_as_they_were():
    def wrong(dense, h):
        return lax.dynamic_update_slice(zeros(), h[0], (0, 0))

    messages = []
    for model in (Runs(wrong), jmpp.wrap(Runs(wrong), "mixed_float16"), jmpp.wrap(Runs(wrong), "float32")):
        with pytest.raises((TypeError, ValueError), match="dynamic_update_slice") as e:
            model.init(jax.random.key(0), X)
        messages.append(str(e.value))
    assert not [m for m in messages if "policy" in m]


def test_failures_in_nnx():
    class Spectral(nnx.Module):
        def __call__(self, x):
            return jnp.fft.irfft(jnp.fft.rfft(x))

    with pytest.raises(ValueError, match="Spectral computes in float16 under its policy"):
        jmpp.wrap(Spectral(), "mixed_float16")(X.astype(jnp.float16))


class Decoder(nn.Module):
    """Attention with a cache, as published decoders write it."""

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.Dense(8, name=name)(x) for name in ("q", "k", "v"))
        is_initialized = self.has_variable("cache", "key")
        keys = self.variable("cache", "key", jnp.zeros, key.shape, key.dtype)
        values = self.variable("cache", "value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "index", lambda: jnp.array(0, jnp.int32))
        if is_initialized:
            key = lax.dynamic_update_slice(keys.value, key, (index.value, 0))
            value = lax.dynamic_update_slice(values.value, value, (index.value, 0))
            keys.value, values.value, index.value = key, value, index.value + len(x)
        return nn.Dense(8)(nn.softmax(query @ key.T) @ value)


CACHES = {
    "float32 cache, half model": ("float32", "mixed_float16", jnp.float32),
    "half cache, half model": ("mixed_float16", "mixed_float16", jnp.float16),
    "half cache, float32 model": ("mixed_float16", "float32", jnp.float16),
    "half cache, other half": ("mixed_float16", "mixed_bfloat16", jnp.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize(("maker", "user", "stored"), CACHES.values(), ids=CACHES)
def test_decode_caches_are_read_in_the_models_dtype_and_stored_in_their_own(maker, user, stored):
    variables = jmpp.wrap(Decoder(), maker).init(jax.random.key(0), X)
    params, cache, model = variables["params"], variables["cache"], jmpp.wrap(Decoder(), user)
    assert cache["key"].dtype == stored

    def step(cache, x):
        y, new = model.apply({"params": params, "cache": cache}, x[None], mutable=["cache"])
        return new["cache"], y[0]

    end, outputs = lax.scan(step, cache, X)
    assert dtypes(end) == dtypes(cache)
    half = jmpp.get_policy(user).compute_dtype.name
    assert {t for _, *types in products(step, cache, X[0]) for t in types} == {half}
    exact, want = Decoder().init(jax.random.key(0), X)["cache"], []
    for x in X:
        y, new = Decoder().apply({"params": params, "cache": exact}, x[None], mutable=["cache"])
        exact = new["cache"]
        want.append(y[0])
    assert np.allclose(outputs, jnp.stack(want), atol=0.03)


def test_state_that_a_module_makes_in_float32_stays_so():
    class Sums(nn.Module):
        @nn.compact
        def __call__(self, x):
            total = self.variable("cache", "total", lambda: jnp.zeros(8))
            total.value = total.value + x.sum(0)
            return total.value

    variables = {"cache": {"total": jnp.full(8, 4096.0, jnp.float32)}}
    _, new = jmpp.wrap(Sums(), "mixed_float16").apply(variables, jnp.ones((3, 8)), mutable=["cache"])
    assert new["cache"]["total"].dtype == jnp.float32
    assert new["cache"]["total"][0] == 4099


@pytest.mark.parametrize("puts", [False, True], ids=["value", "put_variable"])
def test_state_that_begins_as_an_activation_is_float32_as_in_the_bare_model(puts):
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8)(x)
            mean = self.variable("ema", "mean", lambda: jnp.zeros_like(h[0]))
            value = jnp.asarray(0.999 * mean.value + 0.001 * h.mean(0), h.dtype)
            if puts:
                self.put_variable("ema", "mean", value)
                self.put_variable("ema", "last", h)
            else:
                mean.value = value
            return h

    model = jmpp.wrap(Mean(), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    assert jax.eval_shape(Mean().init, jax.random.key(0), X) == jax.eval_shape(lambda: variables)
    _, new = model.apply(variables, X, mutable="ema")
    assert jax.eval_shape(lambda: new["ema"]) == jax.eval_shape(lambda: variables["ema"])


def test_parameters_made_as_variables_are_cast_where_they_are_read():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.variable("params", "w", lambda: jnp.ones((8, 2))).value

    model = jmpp.wrap(Net(), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    assert variables["params"]["w"].dtype == jnp.float32
    assert set(products(model.apply, variables, X)) == {("dot_general", "float16", "float16")}


class Load(nn.Module):
    """Keeps the mean of what it computed last."""

    @nn.compact
    def __call__(self, x):
        load = self.variable("stats", "load", jnp.zeros, 8)
        h, before = nn.Dense(8)(x), load.value
        load.value = h.mean(0)
        return h * (1 + before)


def test_state_that_a_module_computes_in_half_is_stored_in_its_own_dtype():
    model, x = jmpp.wrap(Load(), "mixed_float16"), jnp.ones((2, 4))
    variables = model.init(jax.random.key(0), x)
    assert jax.eval_shape(Load().init, jax.random.key(0), x) == jax.eval_shape(lambda: variables)

    def step(stats, x):
        out, new = model.apply({**variables, **stats}, x, mutable="stats")
        return new, out

    stats, _ = jax.lax.scan(step, {"stats": variables["stats"]}, jnp.stack([x, x]))
    assert stats["stats"]["load"].dtype == jnp.float32
