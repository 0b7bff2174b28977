"""`linen.intercept`: nesting, decoration, threads, the jit cache."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import products

import jmp_policy as jmpp
from jmp_policy.linen import intercept

F16, F32, BF16 = "float16", "float32", "bfloat16"
X = jnp.ones((2, 8))
DENSE = nn.Dense(8)
VARIABLES = DENSE.init(jax.random.key(0), X)


def test_is_part_of_the_jit_cache_key():
    traces = []

    @jax.jit
    def run(variables, x):
        traces.append(None)
        return DENSE.apply(variables, x)

    half = "p=f32,c=f16,o=f16"
    assert run(VARIABLES, X).dtype == jnp.float32
    for _ in range(2):
        with intercept(half):
            assert run(VARIABLES, X).dtype == jnp.float16
        assert run(VARIABLES, X).dtype == jnp.float32
    with intercept("p=f32,c=bf16,o=bf16"):
        assert run(VARIABLES, X).dtype == jnp.bfloat16
    assert len(traces) == 3


@pytest.mark.slow
def test_nested_in_a_method_the_innermost_wins():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            with intercept("float32"):
                v = self.param("v", nn.initializers.ones, (8,))
                assert v.dtype == jnp.float32
                x = nn.Dense(8)(x)
                assert x.dtype == jnp.float32
                with intercept("mixed_bfloat16"):
                    x = nn.Dense(8)(x)
            w = self.param("w", nn.initializers.ones, (8,))
            assert w.dtype == jnp.float16
            return nn.Dense(8)(x * v * w)

    model = jmpp.wrap(Net(), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    found = products(lambda v: model.apply(v, X), variables)
    assert found == {
        ("dot_general", F16, F16): 2,
        ("dot_general", F32, F32): 1,
        ("dot_general", BF16, BF16): 1,
    }


def test_in_a_method_of_a_module_that_is_not_governed():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            with intercept("mixed_float16"):
                x = nn.Dense(8)(x)
                assert x.dtype == jnp.float32
            return nn.Dense(8)(x)

    model = Net()
    variables = model.init(jax.random.key(0), X)
    found = products(lambda v: model.apply(v, X), variables)
    assert found == {("dot_general", F32, F32): 2, ("dot_general", F16, F16): 1}


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_as_a_decorator_of_a_method_governs_the_method(order):
    def method(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (8, 8))
        return nn.Dense(8)(x @ w)

    decorate = intercept("mixed_float16")
    call = decorate(nn.compact(method)) if order == "outside" else nn.compact(decorate(method))
    net = type("Net", (nn.Module,), {"__call__": call, "__module__": __name__})
    model = net()
    variables = model.init(jax.random.key(0), X)
    assert products(lambda v: model.apply(v, X), variables) == {("dot_general", F16, F16): 2}
    assert model.apply(variables, X).dtype == jnp.float32
    island = type("Island", (nn.Module,), {"__call__": nn.compact(intercept("float32")(method))})
    outer = jmpp.wrap(nn.Sequential([nn.Dense(8), island()]), "mixed_float16")
    variables = outer.init(jax.random.key(0), X)
    found = products(lambda v: outer.apply(v, X), variables)
    assert found == {("dot_general", F16, F16): 1, ("dot_general", F32, F32): 2}


def test_as_a_decorator_of_a_function():
    @intercept("p=f32,c=f16,o=f16")
    def run(x):
        return DENSE.apply(VARIABLES, x)

    assert run(X).dtype == run(X).dtype == jnp.float16


def test_one_object_nested_in_itself_and_reused_after_an_exception():
    half = intercept("p=f32,c=f16,o=f16")
    with half, half:
        assert DENSE.apply(VARIABLES, X).dtype == jnp.float16
    with pytest.raises(ZeroDivisionError, match="zero"), half:
        1 / 0  # noqa: B018
    assert DENSE.apply(VARIABLES, X).dtype == jnp.float32
    with half:
        assert DENSE.apply(VARIABLES, X).dtype == jnp.float16


def test_fields_are_restored_when_a_method_raises():
    class Bad(nn.Module):
        dtype: jnp.dtype | None = None

        @nn.compact
        def __call__(self, x):
            raise RuntimeError(f"in {self.dtype}")

    bound = Bad().bind({})
    with intercept("mixed_float16"), pytest.raises(RuntimeError, match="in float16"):
        bound(X)
    assert bound.dtype is None
    assert "param" not in bound.__dict__


def test_threads_trace_different_policies_at_once():
    results, barrier = {}, threading.Barrier(3)

    def trace(name):
        with intercept(f"p=f32,c={name},o={name}"):
            barrier.wait()
            for _ in range(20):
                results.setdefault(name, set()).add(DENSE.apply(VARIABLES, X).dtype.name)

    threads = [threading.Thread(target=trace, args=(n,)) for n in (F16, BF16, F32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {F16: {F16}, BF16: {BF16}, F32: {F32}}
    assert DENSE.apply(VARIABLES, X).dtype == jnp.float32


def test_rules_reach_into_nn_jit_by_path():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            # One nn.jit class has one trace for all equal modules, whatever their path.
            return nn.jit(nn.Dense)(8, name="b")(nn.jit(nn.Dense)(8, name="a")(x))

    model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {"b": "float32"}))
    variables = model.init(jax.random.key(0), X)
    found = products(lambda v: model.apply(v, X), variables)
    assert found == {("dot_general", F16, F16): 1, ("dot_general", F32, F32): 1}


def test_with_other_interceptors():
    calls = []

    def log(next_fun, args, kwargs, context):
        calls.append(context.method_name)
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(log), intercept("mixed_float16"):
        DENSE.apply(VARIABLES, X)
    assert calls == ["__call__"]


def test_keyword_arguments_and_nothing_to_cast():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, *, scale, name, key):
            self.param("w", nn.initializers.ones, (8, 8))
            assert x.dtype == scale["s"].dtype == jnp.float16
            assert name == "n"
            assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            return x, {"n": name, "t": 3}

    with intercept("mixed_float16"):
        out, rest = Net().apply(
            {"params": {"w": jnp.ones((8, 8))}}, X, scale={"s": X}, name="n", key=jax.random.key(0)
        )
    assert out.dtype == jnp.float32
    assert rest == {"n": "n", "t": 3}


def test_get_variable_of_a_parameter():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(8, name="d")(x)
            self.param("w", nn.initializers.ones, (8, 8))
            return x @ self.get_variable("params", "w")

    model = jmpp.wrap(Net(), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    assert set(products(lambda v: model.apply(v, X), variables)) == {("dot_general", F16, F16)}


def test_bad_policy_is_named_when_it_is_made():
    with pytest.raises(ValueError, match="Unknown policy 'half_float'"):
        intercept("half_float")
    assert "mixed" not in repr(intercept("float32"))
