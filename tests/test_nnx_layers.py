"""Every layer of `flax.nnx` under a policy: what it computes in, stores, and hands on."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import equations, products
from nnx_helpers import stored

import jmp_policy as jmpp

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


def image(*shape):
    return jax.random.normal(jax.random.key(0), shape)


def rngs():
    return nnx.Rngs(0)


R = rngs()
#: name -> (make, input, number of products in the forward pass)
LAYERS = {
    "Linear": (lambda: nnx.Linear(8, 4, rngs=R), image(2, 8), 1),
    "LinearGeneral": (lambda: nnx.LinearGeneral((4, 8), (2, 3), axis=(-2, -1), rngs=R), image(2, 4, 8), 1),
    "Einsum": (lambda: nnx.Einsum("nta,hab->nthb", (2, 8, 4), (2, 4), rngs=R), image(2, 3, 8), 1),
    "Conv": (lambda: nnx.Conv(3, 4, (3, 3), rngs=R), image(2, 6, 6, 3), 1),
    "Conv masked": (lambda: nnx.Conv(3, 4, (3,), mask=jnp.ones((3, 3, 4)), rngs=R), image(2, 6, 3), 1),
    "ConvTranspose": (lambda: nnx.ConvTranspose(3, 4, (3, 3), rngs=R), image(2, 6, 6, 3), 1),
    "Embed": (lambda: nnx.Embed(16, 8, rngs=R), jnp.arange(6), 0),
    "BatchNorm": (lambda: nnx.BatchNorm(8, rngs=R), image(4, 8), 0),
    "LayerNorm": (lambda: nnx.LayerNorm(8, rngs=R), image(4, 8), 0),
    "RMSNorm": (lambda: nnx.RMSNorm(8, rngs=R), image(4, 8), 0),
    "GroupNorm": (lambda: nnx.GroupNorm(8, num_groups=2, rngs=R), image(4, 5, 8), 0),
    "InstanceNorm": (lambda: nnx.InstanceNorm(8, rngs=R), image(4, 5, 8), 0),
    "WeightNorm": (lambda: nnx.WeightNorm(nnx.Linear(8, 4, rngs=R), rngs=R), image(2, 8), 1),
    "SpectralNorm": (
        lambda: nnx.SpectralNorm(nnx.Linear(8, 4, use_bias=False, rngs=R), rngs=R), image(2, 8), 1
    ),
    "MultiHeadAttention": (lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=R), image(2, 5, 8), 6),
    "MultiHeadAttention grouped": (
        lambda: nnx.MultiHeadAttention(4, 8, num_kv_heads=2, decode=False, rngs=R), image(2, 5, 8), 6
    ),
    "MultiHeadAttention normalised": (
        lambda: nnx.MultiHeadAttention(2, 8, normalize_qk=True, decode=False, rngs=R), image(2, 5, 8), 6
    ),
    "MultiHeadAttention dropout": (
        lambda: nnx.MultiHeadAttention(
            2, 8, decode=False, dropout_rate=0.5, deterministic=False, rngs=rngs()
        ),
        image(2, 5, 8),
        6,
    ),
    "LoRA": (lambda: nnx.LoRA(8, 2, 4, base_module=nnx.Linear(8, 4, rngs=R), rngs=R), image(2, 8), 3),
    "LoRALinear": (lambda: nnx.LoRALinear(8, 4, lora_rank=2, rngs=R), image(2, 8), 3),
    "PReLU": (lambda: nnx.PReLU(), image(2, 8), 0),
    "Dropout": (lambda: nnx.Dropout(0.5, deterministic=True), image(2, 8), 0),
    "Sequential": (lambda: nnx.Sequential(nnx.Linear(8, 4, rngs=R), nnx.relu), image(2, 8), 1),
    "RNN LSTM": (lambda: nnx.RNN(nnx.LSTMCell(8, 8, rngs=R), rngs=rngs()), image(2, 3, 8), 8),
    "RNN OptimizedLSTM": (
        lambda: nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=R), rngs=rngs()), image(2, 3, 8), 2
    ),
    "RNN GRU": (lambda: nnx.RNN(nnx.GRUCell(8, 8, rngs=R), rngs=rngs()), image(2, 3, 8), 2),
    "RNN Simple": (lambda: nnx.RNN(nnx.SimpleCell(8, 8, rngs=R), rngs=rngs()), image(2, 3, 8), 2),
    "Bidirectional": (
        lambda: nnx.Bidirectional(
            nnx.RNN(nnx.GRUCell(8, 8, rngs=R), rngs=rngs()), nnx.RNN(nnx.GRUCell(8, 8, rngs=R), rngs=rngs())
        ),
        image(2, 3, 8),
        4,
    ),
}  # fmt: skip

#: Bases and what holds no computation of its own.
NOT_RUN = {"Module", "Pytree", "Object", "RNNCellBase", "List", "Dict", "RoPE"}


def test_the_table_has_every_layer():
    exported = {
        name
        for name, cls in vars(nnx).items()
        if inspect.isclass(cls) and issubclass(cls, nnx.Module) and cls.__module__.startswith("flax.nnx.")
    }
    cells = {"LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"}  # Inside the RNNs of the table.
    assert exported - NOT_RUN - cells <= {name.split()[0] for name in LAYERS}


@pytest.fixture(params=LAYERS, ids=str)
def layer(request):
    make, x, count = LAYERS[request.param]
    return request.param, make(), x, count


def run(model):
    """The model as a function of arrays, so that it can be traced from outside."""
    graphdef, state = nnx.split(model)

    def call(state, x):
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))(x)

    return functools.partial(call, state)


#: The library treats both half types alike, so bfloat16 is tried on a layer of products and on a norm.
IN_BOTH = ("MultiHeadAttention", "LayerNorm")


@pytest.mark.slow
def test_products_in_half_output_as_asked_and_close_to_float32(layer):
    name, bare, x, count = layer
    graphdef, state = nnx.split(bare)
    # Compiled: one operation at a time takes far longer. Spectral norms change their weights.
    want = None if "dropout" in name else jax.jit(run(nnx.merge(graphdef, state)))(x)
    for dtype in ("float16", "bfloat16") if name in IN_BOTH else ("float16",):
        for policy, out_dtype in ((f"mixed_{dtype}", "float32"), (f"p=f32,c={dtype},o={dtype}", dtype)):
            model = jmpp.wrap(nnx.clone(bare), policy)
            call = run(model)
            if not (name == "Dropout" and out_dtype == dtype):
                assert jax.eval_shape(call, x).dtype == out_dtype
            found = products(call, x)
            spectral = name == "SpectralNorm"  # Power iteration on the float32 weights.
            assert sum(found.values()) == count + 4 * spectral
            assert sum(n for (_, *operands), n in found.items() if set(operands) == {dtype}) == count
            if want is not None and out_dtype == "float32":  # The other policy rounds this result once more.
                error = jnp.linalg.norm(jax.jit(call)(x) - want) / jnp.linalg.norm(want)
                assert float(error) < (2.0**-7 if dtype == "float16" else 2.0**-4)
            assert stored(model) <= {"float32"}


@pytest.mark.slow
def test_the_original_computes_as_before(layer):
    _, bare, x, _ = layer
    before = products(run(bare), x)
    jmpp.wrap(bare, "mixed_float16")
    assert jax.eval_shape(run(bare), x).dtype == jnp.float32
    assert products(run(bare), x) == before


@pytest.mark.slow
def test_backward_products_in_half_and_gradients_float32(layer):
    _, bare, x, _ = layer
    if not stored(bare):
        return
    model = jmpp.wrap(bare, "mixed_float16")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest))(x).sum()

    found = products(jax.grad(loss), params)
    assert sum(n for (_, *d), n in found.items() if "float16" in d) == sum(
        n for (_, *d), n in found.items() if set(d) == {"float16"}
    )
    gradients = jax.eval_shape(jax.grad(loss), params)
    assert {g.dtype.name for g in jax.tree.leaves(gradients)} == {"float32"}


def test_embed_attends_in_half():
    embed = nnx.Embed(16, 8, rngs=R)
    for policy, out in (("mixed_float16", "float32"), ("p=f32,c=f16,o=f16", "float16")):
        wrapped = jmpp.wrap(embed, policy)
        assert wrapped.attend(image(2, 8)).dtype == out
        assert wrapped(jnp.arange(3)).dtype == out


NORMS = {
    "BatchNorm": lambda: nnx.BatchNorm(4, use_running_average=True, rngs=R),
    "LayerNorm": lambda: nnx.LayerNorm(4, rngs=R),
    "RMSNorm": lambda: nnx.RMSNorm(4, rngs=R),
    "GroupNorm": lambda: nnx.GroupNorm(4, num_groups=2, rngs=R),
    "InstanceNorm": lambda: nnx.InstanceNorm(4, rngs=R),
}


class Inside(nnx.Module):
    """A layer within a float16 model."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        out = self.layer(x)
        assert out.dtype == jnp.float16
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", NORMS)
def test_norms_compute_in_float32_and_hand_on_half(name):
    norm = NORMS[name]()
    # float16 knows neither 1 + 2**-12 nor the square of 2**10.
    norm.scale[...] = jnp.full(4, 1 + 2.0**-12)
    x = (jnp.round(image(8, 6, 4) * 2**10)).astype(jnp.float16)
    want = norm(x.astype(jnp.float32))
    got = jmpp.wrap(Inside(norm), "mixed_float16")(x)
    np.testing.assert_array_equal(got, want.astype(jnp.float16))
    off = jmpp.wrap(Inside(norm), jmpp.PolicyMap("mixed_float16", float32_islands=False))
    half_scale = nnx.clone(norm)
    half_scale.scale[...] = jnp.ones(4)
    np.testing.assert_array_equal(
        off.layer(x), half_scale(x.astype(jnp.float32)).astype(jnp.float16)
    )  # The parameter has been rounded.


def test_batch_norm_in_evaluation_with_a_variance_that_float16_cannot_hold():
    norm = nnx.BatchNorm(4, use_running_average=True, rngs=R)
    norm.var[...] = jnp.full(4, 1e5)
    x = 300 * image(8, 4)
    got = jmpp.wrap(norm, "mixed_float16")(x)
    np.testing.assert_allclose(got, norm(x), rtol=2.0**-9)
    assert float(jnp.abs(got).max()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
@pytest.mark.parametrize("policy", ["mixed_float16", jmpp.PolicyMap("mixed_float16", float32_islands=False)])
def test_weight_norms_do_not_round_the_master_weights(norm, policy):
    def make():
        return norm(nnx.Linear(8, 4, rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2))

    bare, under_policy = make(), make()
    for _ in range(3):
        bare(image(2, 8))
        out = jmpp.wrap(under_policy, policy)(image(2, 8))
    assert out.dtype == jnp.float32
    for want, got in zip(
        *(jax.tree.leaves(nnx.as_pure(nnx.state(m))) for m in (bare, under_policy)), strict=True
    ):
        np.testing.assert_array_equal(want, got)


@pytest.mark.slow
def test_recurrent_cells_accumulate_in_float32_and_hand_on_half():
    for make in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell):
        model = jmpp.wrap(Inside(nnx.RNN(make(8, 8, rngs=R), rngs=rngs())), "mixed_float16")
        assert model(image(2, 3, 8)).dtype == jnp.float32
        cell = model.layer.cell
        carry = cell.initialize_carry((2, 8), nnx.Rngs(0))
        new, out = cell(carry, image(2, 8).astype(jnp.float16))
        assert jax.tree.map(lambda c: c.dtype, new) == jax.tree.map(lambda c: c.dtype, carry)
        assert out.dtype == jnp.float16
    rnn = nnx.RNN(nnx.GRUCell(8, 8, rngs=R), return_carry=True, rngs=rngs())
    carry, out = jmpp.wrap(rnn, "mixed_float16")(image(2, 3, 8), initial_carry=jnp.ones((2, 8)))
    assert carry.dtype == out.dtype == jnp.float32


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("partial", [False, True])
def test_attention_softmax_is_float32(dropout, partial):
    function = functools.partial(nnx.dot_product_attention, bias=jnp.ones((2, 64, 64)))
    attend = nnx.MultiHeadAttention(
        2, 16, dropout_rate=dropout, deterministic=False, decode=False, rngs=nnx.Rngs(0),
        attention_fn=function if partial else nnx.dot_product_attention,
    )  # fmt: skip
    model = jmpp.wrap(attend, "mixed_float16")
    jaxpr = jax.make_jaxpr(run(model))(8 * image(2, 64, 16))
    exps = {e.outvars[0].aval.dtype.name for e in equations(jaxpr.jaxpr) if e.primitive.name == "exp"}
    assert exps == {"float32"}


@pytest.mark.slow
def test_attention_masks_and_causality_as_in_flax():
    q, k, v = (image(3, 2, 5, 4, 8)[i] for i in range(3))
    from jmp_policy._src.flax.nnx.attention import attention

    mask, bias = nnx.make_causal_mask(jnp.ones((2, 5))), image(2, 4, 5, 5)

    def check(q, k, v, **kwargs):
        want = nnx.dot_product_attention(q, k, v, **kwargs)
        np.testing.assert_allclose(attention(q, k, v, **kwargs), want, atol=1e-6)

    check(q, k, v)
    check(q, k, v, mask=mask)
    check(q, k, v, is_causal=True)
    check(q, k, v, mask=mask, is_causal=True)
    check(q, k, v, bias=bias)
    check(q, k[:, :, :2], v[:, :, :2])
    check(q, k, v, dropout_rng=jax.random.key(3), dropout_rate=0.5)
    np.testing.assert_allclose(attention(q[0], k[0], v[0]), attention(q, k, v)[0], atol=1e-6)
    with pytest.raises(ValueError, match="multiple of them as query heads; got 4 query, 3 key"):
        attention(q, k[:, :, :3], v[:, :, :3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "normalize"), [("by the wrapped", True), ("by the bare", False), ("in float16", True)]
)
def test_decode_cache(made, normalize):
    """One token at a time gives what the whole sequence gives, whoever made the cache, in any dtype."""
    attend = nnx.MultiHeadAttention(2, 16, normalize_qk=normalize, rngs=nnx.Rngs(0))
    x = image(2, 5, 16)
    whole = jmpp.wrap(attend, "mixed_float16")(x, is_causal=True, decode=False)
    if made == "by the bare":
        attend.init_cache(x.shape)
    model = jmpp.wrap(attend, "mixed_float16")
    if made == "by the wrapped":
        model.init_cache(x.shape)
        assert model.cached_key.dtype == jnp.float32
    if made == "in float16":
        model.init_cache(x.shape, jnp.float16)
    before = model.cached_key.dtype

    @nnx.jit
    def one(model, token):
        return model(token, decode=True)

    steps = [one(model, x[:, i : i + 1]) for i in range(5)]
    assert model.cached_key.dtype == before
    assert int(model.cache_index[...]) == 5
    np.testing.assert_allclose(jnp.concatenate(steps, 1), whole, atol=2.0**-8)


@pytest.mark.slow
def test_decode_cache_of_a_view():
    attend = jmpp.wrap(nnx.MultiHeadAttention(2, 16, rngs=nnx.Rngs(0)), "mixed_float16")
    attend.init_cache((2, 5, 16))
    view = nnx.view(attend, decode=True)
    assert view(image(2, 1, 16)).dtype == jnp.float32
    assert int(attend.cache_index[...]) == 1  # Views share Variables.


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this version of Flax has no RoPE")
def test_rotary_embeddings_rotate_in_float32():
    rope = nnx.RoPE(embedding_size=8, max_seq_len=4096)
    attend = nnx.MultiHeadAttention(
        2, 16, decode=False, rngs=nnx.Rngs(0),
        attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
    )  # fmt: skip
    x = image(2, 5, 16)
    model = jmpp.wrap(attend, "mixed_float16")
    np.testing.assert_allclose(model(x), attend(x), atol=2.0**-7)
    inside = jmpp.wrap(Inside(rope), "mixed_float16")
    np.testing.assert_allclose(inside(image(3000, 8))[2900:], rope(image(3000, 8))[2900:], atol=2.0**-8)
    positions = jnp.arange(2990.0, 2995.0)
    wrapped = jmpp.wrap(rope, "mixed_float16")
    np.testing.assert_allclose(wrapped(image(5, 8), positions), rope(image(5, 8), positions), atol=2.0**-8)


def test_integer_positions_are_exact_and_a_float_argument_can_be_exempted():
    class Clock(nnx.Module):
        def __call__(self, t):
            return t.astype(jnp.float32) * 1.0

    class Net(nnx.Module):
        def __init__(self):
            self.clock = Clock()

        def __call__(self, t):
            return self.clock(t)

    model = jmpp.wrap(Net(), "mixed_float16")
    assert float(model(jnp.array([3001]))[0]) != 3001  # Handed on in half: float16 has no 3001.
    exempt = jmpp.wrap(Clock(), "float32")
    assert float(exempt(jnp.array([3001.0]))[0]) == 3001
    table = nnx.Embed(4096, 4, rngs=R)
    np.testing.assert_array_equal(
        jmpp.wrap(table, "mixed_float16")(jnp.array([3001])),
        table(jnp.array([3001])).astype(jnp.float16).astype(jnp.float32),
    )
