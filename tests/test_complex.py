"""Layers with complex parameters or inputs, and with integer parameters: no policy casts those."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmpp

COMPLEX, POLICIES = jnp.complex64, ["float32", "mixed_float16", "bfloat16"]
REAL = jax.random.normal(jax.random.key(0), (2, 4, 4, 4))
INPUTS = {"real": REAL, "complex": REAL + 1j * REAL[::-1]}

LAYERS = [
    functools.partial(nn.Dense, 3),
    functools.partial(nn.DenseGeneral, 3),
    functools.partial(nn.Einsum, (4, 3), "...a,ab->...b"),
    functools.partial(nn.Conv, 3, (2, 2)),
    functools.partial(nn.ConvTranspose, 3, (2, 2)),
    functools.partial(nn.ConvLocal, 3, (2, 2)),
    functools.partial(nn.MultiHeadDotProductAttention, 2),
    functools.partial(nn.BatchNorm, use_running_average=False),
    nn.LayerNorm,
    functools.partial(nn.GroupNorm, 2),
]


class Custom(nn.Module):
    """Layer whose parameters are complex without its saying so in a field."""

    param_dtype: object = None  # Only to be called like the others.
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        def init(key):
            return jax.random.normal(key, (4,), COMPLEX)

        x, w = nn.dtypes.promote_dtype(x, self.param("w", init), dtype=self.dtype)
        return nn.Dense(3, dtype=self.dtype, param_dtype=COMPLEX)(x * w)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layer", [*LAYERS, Custom], ids=lambda f: getattr(f, "func", f).__name__)
@pytest.mark.parametrize(
    ("inputs", "param_dtype"), [("real", COMPLEX), ("complex", COMPLEX), ("complex", jnp.float32)]
)
def test_the_imaginary_part_stays(layer, inputs, param_dtype):
    x, bare = INPUTS[inputs], layer(param_dtype=param_dtype)
    if not jnp.iscomplexobj(x) and param_dtype != COMPLEX and layer is not Custom:
        return
    variables = jax.eval_shape(bare.init, jax.random.key(0), x)
    want = jax.eval_shape(lambda v: bare.apply(v, x, mutable=["batch_stats"])[0], variables)
    assert want.dtype == COMPLEX
    for policy in POLICIES:
        model = jmpp.wrap(bare, policy)
        out, made = jax.eval_shape(model.init_with_output, jax.random.key(0), x)
        assert out == want
        kinds = [jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in jax.tree.leaves(made)]
        assert kinds == [leaf.dtype == COMPLEX for leaf in jax.tree.leaves(variables)]
        got = jax.eval_shape(lambda v, m=model: m.apply(v, x, mutable=["batch_stats"])[0], made)
        assert got == want


class Machine(nn.Module):
    """Restricted Boltzmann machine, as physicists write it for wave functions."""

    param_dtype: object = COMPLEX

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.1)
        h = nn.Dense(6, param_dtype=self.param_dtype, kernel_init=init, bias_init=init)(x)
        bias = self.param("visible_bias", init, (x.shape[-1],), self.param_dtype)
        return jnp.sum(jnp.log(jnp.cosh(h)), -1) + x @ bias


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_values_and_gradients_of_a_complex_model():
    x = jnp.asarray(np.random.default_rng(0).choice([-1.0, 1.0], (5, 4)), jnp.float32)
    variables = Machine().init(jax.random.key(0), x)

    def values(model):
        return jax.jit(jax.value_and_grad(lambda v: jnp.abs(model.apply(v, x)).sum()))(variables)

    # Spins are exact in half, and nothing else is real.
    want, got = values(Machine()), values(jmpp.wrap(Machine(), "mixed_float16"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_integer_parameters_are_not_cast(policy):
    big = 2**24 + 1  # No float32 number, let alone a half one.
    model = jmpp.wrap(nn.Embed(2, 3, param_dtype=jnp.int32, embedding_init=nn.initializers.ones), policy)
    out = model.apply({"params": {"embedding": jnp.full((2, 3), big)}}, jnp.array([0, 1]))
    assert out.dtype == jnp.int32
    assert (out == big).all()
    dense = jmpp.wrap(nn.Dense(3, param_dtype=jnp.int8, kernel_init=nn.initializers.ones), policy)
    variables = dense.init(jax.random.key(0), jnp.ones((1, 4)))
    assert variables["params"]["kernel"].dtype == jnp.int8
    assert dense.apply(variables, jnp.ones((1, 4))).dtype == jmpp.get_policy(policy).output_dtype


NNX_LAYERS = [
    lambda **k: nnx.Linear(4, 3, **k),
    lambda **k: nnx.LinearGeneral(4, 3, **k),
    lambda **k: nnx.Einsum("...a,ab->...b", (4, 3), (3,), **k),
    lambda **k: nnx.Conv(4, 3, (2, 2), **k),
    lambda **k: nnx.LayerNorm(4, **k),
]


class ComplexThenReal(nnx.Module):
    """Its second layer has real parameters, and complex inputs."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, param_dtype=COMPLEX, rngs=rngs)
        self.second = nnx.Linear(4, 2, rngs=rngs)
        self.phase = nnx.Param(jnp.exp(1j * jnp.arange(4)))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)) * self.phase)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_nnx_layers_behind_complex_ones_keep_the_imaginary_part(policy):
    bare, x = ComplexThenReal(nnx.Rngs(0)), jnp.linspace(-1, 1, 12).reshape(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, want = jmpp.wrap(bare, policy)(x), bare(x)
    assert got.dtype == COMPLEX
    np.testing.assert_allclose(got, want, rtol=2.0**-6)
    again = jmpp.wrap(jmpp.wrap(bare, policy), policy)
    assert nnx.graphdef(again) == nnx.graphdef(jmpp.wrap(bare, policy))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(4))
def test_nnx_layers_with_complex_inputs(index):
    bare = NNX_LAYERS[index](rngs=nnx.Rngs(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, want = jmpp.wrap(bare, "mixed_float16")(INPUTS["complex"]), bare(INPUTS["complex"])
    assert got.dtype == COMPLEX
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    by_hand = NNX_LAYERS[index](dtype=jnp.float16, rngs=nnx.Rngs(0))
    rules = jmpp.PolicyMap("p=f32, c=f16", keep_small_inputs=False)
    assert nnx.graphdef(jmpp.wrap(bare, rules)) == nnx.graphdef(by_hand)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("index", range(len(NNX_LAYERS)))
@pytest.mark.parametrize("inputs", INPUTS)
def test_nnx_layers_with_complex_parameters(index, inputs):
    bare = NNX_LAYERS[index](param_dtype=COMPLEX, rngs=nnx.Rngs(0))
    want = nnx.eval_shape(lambda m: m(INPUTS[inputs]), bare)
    for policy in POLICIES:
        got = nnx.eval_shape(lambda m: m(INPUTS[inputs]), jmpp.wrap(bare, policy))
        assert got == want
        assert got.dtype == COMPLEX
