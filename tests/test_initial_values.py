"""Initial parameters of a wrapped Linen model are those of the bare one, bit for bit."""

import importlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmpp

ROOT = Path(__file__).parent.parent
X = jnp.linspace(-1, 1, 24).reshape(3, 8)


class WeightNormed(nn.Module):
    """A convolution of speech models: the size of a parameter is the initial value of another one."""

    def setup(self):
        self.weight = self.param("weight", nn.initializers.he_normal(), (8, 5))
        self.size = self.param("size", lambda _: jnp.linalg.norm(self.weight, axis=0))

    def __call__(self, x):
        return x @ (self.weight / jnp.linalg.norm(self.weight, axis=0) * self.size)


class Closure(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.he_normal(), (8, 5))
        self.param("size", lambda key, of=weight: jnp.linalg.norm(of, axis=0))
        return x @ weight


class Argument(nn.Module):
    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.he_normal(), (8, 5))
        self.param("size", lambda key, of: jnp.linalg.norm(of, axis=0), weight)
        return x @ weight


class Scaled(nn.Module):
    """Attention that folds its scaling into the initial kernel, with a constant in its dtype."""

    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        scaling = jnp.sqrt(jnp.float32(48)).astype(self.dtype)

        def kernel_init(*args):
            return nn.initializers.lecun_normal()(*args) / scaling

        x = nn.Dense(8, kernel_init=kernel_init, name="query")(x)
        self.variable("cache", "x", jnp.zeros, x.shape, x.dtype)
        return x


class Local(nn.Module):
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x):
        dtype = self.dtype
        return x @ self.param("w", lambda key: nn.initializers.normal()(key, (8, 8), dtype))


class Inside(nn.Module):
    cls: type

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.remat(self.cls)()(nn.Dense(8)(x)))


def check_equal(bare, wrapped):
    for a, b in zip(jax.tree.leaves(bare["params"]), jax.tree.leaves(wrapped["params"]), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "policy"),
    [
        *((cls, "mixed_float16") for cls in (WeightNormed, Closure, Argument, Scaled)),
        *((cls, "mixed_bfloat16") for cls in (Scaled, Local)),
    ],
)
def test_initialisers_that_see_what_was_computed(cls, policy):
    for model in (cls(), Inside(cls)):
        want = model.init(jax.random.key(0), X)
        for out, got in (
            jmpp.wrap(model, policy).init_with_output(jax.random.key(0), X),
            (None, jmpp.wrap(model, policy).lazy_init(jax.random.key(0), X)),
        ):
            check_equal(want, got)
            assert jax.tree.structure(want) == jax.tree.structure(got)
            assert out is None or out.dtype == jnp.float32
            if "cache" in got:  # What the model computed stays half.
                half = jmpp.get_policy(policy).compute_dtype
                assert {leaf.dtype for leaf in jax.tree.leaves(got["cache"])} == {half}


def test_the_bare_model_runs_only_where_it_must():
    calls = []

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls.append(x.dtype.name)
            shift = self.param("shift", lambda key, shape: jnp.full(shape, 0.1), (8,))
            return (
                nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.normal(), (None, "x")))(x)
                + shift
            )

    jmpp.wrap(Plain(), "mixed_float16").init(jax.random.key(0), X)
    assert calls == ["float16"]


@pytest.mark.once
def test_half_parameters_are_the_bare_ones_rounded():
    want = WeightNormed().init(jax.random.key(0), X)
    got = jmpp.wrap(WeightNormed(), "float16").init(jax.random.key(0), X)
    check_equal(jax.tree.map(lambda x: x.astype(jnp.float16), want), got)


@pytest.mark.once
@pytest.mark.parametrize("name", ["Conv seq2seq", "GPT-2", "WaveNet"])
def test_models_of_the_zoo(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    model = importlib.import_module("benchmarks.models").MODELS[name]("tiny")
    inputs, _ = model.batch()
    run = jax.jit(lambda module: module.init(jax.random.key(0), *inputs)["params"], static_argnums=0)
    check_equal({"params": run(model.module)}, {"params": run(jmpp.wrap(model.module, "mixed_float16"))})
