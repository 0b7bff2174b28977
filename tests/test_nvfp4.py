"""The recipe of 4 bits: how operands are rounded, and where the key comes from."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import dtypes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.policy.recipes import last_blocks
from jmp_policy._src.products.fp8.functions import Float8DotGeneral
from jmp_policy._src.products.fp8.nvfp4 import data_of

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(64, 96)), jnp.bfloat16)
W = jnp.asarray(RNG.normal(size=(96, 32)) / 10, jnp.bfloat16)
DIMS = (((1,), (0,)), ((), ()))
#: The numbers of e2m1.
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def product(recipe="nvfp4", key=None):
    return Float8DotGeneral(recipe, key=None if key is None else lambda: data_of(key))


def rounded(x, rows=1):
    """What x (rows, terms) is rounded to: NumPy, in double precision, number by number."""
    x = np.asarray(x, np.float64)
    whole = 2.0 ** np.ceil(np.log2(np.abs(x).max() / (6 * 448)))
    out = np.zeros_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], 16):
            block = x[i : i + rows, j : j + 16] / whole
            scale = float(jnp.float32(np.abs(block).max() / 6).astype(jnp.float8_e4m3fn))
            sizes = np.minimum(np.abs(block) / scale, 6)
            far = np.abs(sizes[..., None] - NUMBERS)
            # Ties go to the number with an even last bit: every other one.
            place = np.where(far == far.min(-1, keepdims=True), np.arange(8) % 2, 2).argmin(-1)
            out[i : i + rows, j : j + 16] = np.sign(block) * NUMBERS[place] * scale * whole
    return out


def error(a, b):
    return float(np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b)))


@pytest.mark.slow
def test_products_are_those_of_the_rounded_operands():
    want = rounded(X) @ rounded(W.T, rows=16).T
    assert error(product()(X, W, DIMS), want) < 4e-3
    flat = rounded(X) @ rounded(W.T).T
    assert error(product("nvfp4-2d")(X, W, DIMS), flat) < 4e-3
    assert error(flat, want) > 0.05


@pytest.mark.slow
def test_forward_and_backward_see_the_same_weight():
    def gradient(recipe):
        return jax.grad(lambda x: 2688 * product(recipe)(x, W, DIMS).astype(jnp.float32).sum())(X)

    # A cotangent of 6 * 448 is kept exactly: the gradient is the sum of what the weight became.
    square = 2688 * rounded(W.T, rows=16).sum(0)
    assert error(gradient("nvfp4-sr"), np.broadcast_to(square, X.shape)) < 4e-3
    assert error(gradient("nvfp4-sr-2d"), np.broadcast_to(square, X.shape)) > 0.01


@pytest.mark.once
def test_gradients_are_right_on_average():
    out, back = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, DIMS), X, W)
    cotangent = jnp.asarray(RNG.normal(size=out.shape), out.dtype)

    def gradients(recipe, key):
        return jax.vjp(lambda x, w: product(recipe, key)(x, w, DIMS), X, W)[1](cotangent)

    at_random = jax.jit(lambda key: gradients("bwd:nvfp4-rht", key))
    # What is left is the error of the other operand, which is rounded to nearest.
    mean = [np.mean(found, 0) for found in zip(*map(at_random, jax.random.split(KEY, 64)), strict=True)]
    nearest = gradients("bwd:nvfp4-sr-rht", None)
    exact = np.asarray(cotangent, np.float64)
    assert error(mean[0], exact @ rounded(W.T, rows=16)) < 0.03
    assert error(mean[1], rounded(X.T).T.T @ exact) < 0.03
    assert error(nearest[1], rounded(X.T).T.T @ exact) > 0.06
    assert all(error(found, want) < 0.2 for found, want in zip(mean, back(cotangent), strict=True))
    # Each of the two products draws its own bits, and each key others.
    assert not np.array_equal(at_random(KEY)[1], at_random(jax.random.key(1))[1])


@pytest.mark.once
def test_the_hadamard_transform_spreads_outliers_of_weight_gradients():
    # One token of 16 is 60 times as large as the others, which become 0 beside it, and has no gradient.
    is_large = np.arange(1024)[:, None] % 16 == 0
    x = jnp.asarray(np.where(is_large, 60, RNG.uniform(0.5, 1.5, (1024, 32))), jnp.bfloat16)
    cotangent = jnp.asarray(np.where(is_large, 0, np.ones((1024, 32))), jnp.bfloat16)

    def gradient(product):
        return jax.vjp(lambda w: product(x, w, DIMS), W[:32])[1](cotangent)[0]

    exact = gradient(jax.lax.dot_general)
    errors = [error(gradient(product(recipe)), exact) for recipe in ("nvfp4-sr", "nvfp4-sr-rht")]
    assert errors[0] < 0.7
    assert errors[1] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_values_that_are_not_finite_show(bad):
    out = product()(X.at[3, 4].set(bad), W, DIMS)
    assert np.isnan(np.asarray(out, np.float32)).all()
    grads = jax.grad(lambda w: product("nvfp4", KEY)(X, w, DIMS).astype(jnp.float32).sum() * bad)(W)
    assert np.isnan(np.asarray(grads, np.float32)).all()


def test_zeros_and_empty_arrays():
    assert not np.asarray(product()(jnp.zeros_like(X), W, DIMS)).any()
    # An empty product stays in compute dtype, as Tensor Cores have none.
    assert product()(X[:0], W, DIMS).shape == (0, 32)


def test_a_gradient_without_a_key_is_refused_and_says_how():
    def loss(w):
        return product()(X, w, DIMS).astype(jnp.float32).sum()

    assert np.isfinite(loss(W))
    with pytest.raises(ValueError, match=r"rngs=\{'sr_rng': key\}.*rounding_key\(key\).*'nvfp4-sr'"):
        jax.grad(loss)(W)
    with jmpp.rounding_key(KEY):
        assert np.isfinite(np.asarray(jax.grad(loss)(W), np.float32)).all()
    for wrong in (3, jax.random.split(KEY), jnp.ones(2)):
        with pytest.raises(TypeError, match="rounding_key takes one key"), jmpp.rounding_key(wrong):
            pass


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(64)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))


class Net(nn.Module):
    blocks: int = 4

    @nn.compact
    def __call__(self, x):
        for i in range(self.blocks):
            x = nn.remat(Block)(name=f"layers_{i}")(x)
        return nn.Dense(16, name="head")(x)


@functools.cache
def model_and_params():
    x = jnp.asarray(RNG.normal(size=(32, 64)), jnp.float32)
    return x, jax.jit(Net().init)(KEY, x)


@pytest.mark.slow
def test_linen_layers_draw_from_their_stream():
    x, params = model_and_params()
    model = jmpp.wrap(Net(), "mixed_bfloat16, r=nvfp4")

    @jax.jit
    def gradient(params, key):
        return jax.grad(lambda p: (model.apply(p, x, rngs={"sr_rng": key}) ** 2).mean())(params)

    first, again, other = (gradient(params, jax.random.key(seed)) for seed in (0, 0, 1))
    # Keys of the old kind are taken too.
    assert dtypes(jax.eval_shape(gradient, params, jax.random.PRNGKey(0))) == dtypes(first)
    kernel = lambda grads: np.asarray(grads["params"]["layers_0"]["Dense_0"]["kernel"])  # noqa: E731
    assert np.array_equal(kernel(first), kernel(again))
    assert not np.array_equal(kernel(first), kernel(other))
    in_half = jmpp.wrap(Net(), "mixed_bfloat16")
    half = jax.jit(jax.grad(lambda p: (in_half.apply(p, x) ** 2).mean()))(params)
    assert error(kernel(first), kernel(half)) < 0.6


@pytest.mark.slow
def test_the_last_blocks_and_heads_stay_and_summary_says_so():
    x, _ = model_and_params()
    notes = {row.path: row.note for row in jmpp.summary(Net(7), "mixed_bfloat16, r=nvfp4", x).modules}
    assert notes["layers_5/Dense_0"] == "nvfp4"
    assert notes["layers_6/Dense_1"] == "not in float4: one of the last blocks"
    assert notes["head"] == "not in float4: a head"
    rules = jmpp.PolicyMap("mixed_bfloat16", {"layers_6/Dense_1": "mixed_bfloat16, r=nvfp4"})
    notes = {row.path: row.note for row in jmpp.summary(Net(7), rules, x).modules}
    assert (notes["layers_6/Dense_1"], notes["layers_0/Dense_1"]) == ("nvfp4", "")
    # The layers of one block are none of them.
    assert last_blocks([("Dense_0", "kernel"), ("Dense_1", "kernel"), ("Dense_2", "kernel")]) == set()
    assert last_blocks([("a", str(i), "b", "0", "w") for i in range(20)]) == {"a/17", "a/18", "a/19"}


class NNXNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


@pytest.mark.slow
def test_nnx_modules_and_functions_take_the_key_of_a_block():
    x, _ = model_and_params()
    model = jmpp.wrap(NNXNet(), "mixed_bfloat16, r=nvfp4")

    @nnx.jit
    def gradient(model, key):
        def loss(model):
            with jmpp.rounding_key(key):
                return (model(x) ** 2).mean()

        return nnx.grad(loss)(model)

    first, other = (gradient(model, jax.random.key(seed)) for seed in (0, 1))
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
    assert not all(np.array_equal(a, b) for a, b in leaves)
    assert [row.note for row in jmpp.summary(NNXNet(), "mixed_bfloat16, r=nvfp4", x).modules if row.note]

    def loss(ws, x, key):
        with jmpp.rounding_key(key):
            run = jmpp.autocast(lambda ws, x: jnp.sum(jnp.tanh(jnp.tanh(x @ ws) @ ws) @ ws), lower="nvfp4")
            return run(ws, x)

    ws = jnp.asarray(RNG.normal(size=(64, 64)) / 8, jnp.float32)
    grads = [jax.jit(jax.grad(loss))(ws, x, jax.random.key(seed)) for seed in (0, 0, 1)]
    assert np.array_equal(grads[0], grads[1])
    assert not np.array_equal(grads[0], grads[2])
    assert error(grads[0], jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) @ w))(ws)) < 0.4


@pytest.mark.slow
def test_vmap_scan_and_further_derivatives():
    xs, half = jnp.stack([X, 2 * X]), jax.lax.dot_general

    def summed(product):
        return lambda w: jnp.sum(jax.vmap(lambda x: product(x, w, DIMS))(xs).astype(jnp.float32) ** 2)

    with_key = product("nvfp4", KEY)
    assert error(*(jax.jit(jax.grad(summed(product)))(W) for product in (with_key, half))) < 0.3
    keys = jax.random.split(KEY, 2)
    each = jax.vmap(lambda x, key: jax.grad(lambda w: product("nvfp4", key)(x, w, DIMS).sum())(W))
    assert jax.eval_shape(each, xs, keys).shape == (2, *W.shape)

    def looped(product):
        square = jnp.asarray(RNG.normal(size=(3, 96, 96)) / 10, jnp.bfloat16)
        step = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, w, DIMS)), None))
        loss = lambda ws: jnp.sum(jax.lax.scan(step, X, ws)[0].astype(jnp.float32) ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))(square)

    assert np.isfinite(np.asarray(looped(with_key), np.float32)).all()

    def second(product):
        inner = lambda x, w: jnp.sum(jnp.tanh(product(x, w, DIMS)).astype(jnp.float32))  # noqa: E731
        return jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(inner)(X, w).astype(jnp.float32) ** 2)))(W)

    assert error(second(with_key), second(half)) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_results_do_not_depend_on_the_number_of_devices(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))

    @jax.jit
    def gradient(x, w):
        return jax.grad(lambda w: jnp.sum(jnp.tanh(product("nvfp4", KEY)(x, w, DIMS).astype(jnp.float32))))(w)

    spread = jax.device_put(X, NamedSharding(mesh, P("data"))), jax.device_put(W, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        # Devices add 16-bit numbers in another order, and a block of a weight gradient is on two of them.
        assert error(gradient(*spread), gradient(X, W)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        *(("nvfp4", "nvfp4-sr"), ("nvfp4", "fp8_current"), ("fp8_current", "nvfp4-sr")),
        *(("fp8_rowwise", "mxfp8"), ("mxfp8", "fp8_rowwise"), ("mxfp8", "fp8_current")),
    ],
)
def test_each_pass_has_its_own_numbers(forward, backward):
    def gradients(product):
        return jax.grad(lambda x, w: jnp.tanh(product(x, w, DIMS).astype(jnp.float32)).sum(), (0, 1))(X, W)

    found = gradients(product(f"fwd:{forward}+bwd:{backward}"))
    errors = [error(a, b) for a, b in zip(found, gradients(jax.lax.dot_general), strict=True)]
    assert max(errors) < (0.25 if "nvfp4" in (forward, backward[:5]) else 0.1)


@pytest.mark.slow
def test_keys_of_a_batch_draw_their_own_bits():
    def gradient(key):
        return jax.grad(lambda w: product("bwd:nvfp4-rht", key)(X, w, DIMS).astype(jnp.float32).sum() * 1.3)(
            W
        )

    found = jax.vmap(gradient)(jax.random.split(KEY, 3))
    assert not np.array_equal(found[0], found[1])
    assert not np.array_equal(found[1], found[2])


@pytest.mark.slow
def test_parts_of_an_array_in_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    half = jmpp.autocast(lambda w, x: jnp.tanh(jnp.tanh(jnp.tanh(x) @ w) @ w).sum(), lower="nvfp4-sr")

    def loss(w, x):
        run = lambda w, x: jax.lax.psum(half(w, x), "data")  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)

    x = jnp.asarray(RNG.normal(size=(8 * 32, 64)), jnp.float32)
    w = jnp.asarray(RNG.normal(size=(64, 64)) / 8, jnp.float32)
    exact = jax.grad(lambda w: jnp.tanh(jnp.tanh(jnp.tanh(x) @ w) @ w).sum())(w)
    assert error(jax.jit(jax.grad(loss))(w, x), exact) < 0.3


def test_texts_of_the_recipe():
    policy = jmpp.Policy("mixed_bfloat16, r=nvfp4-rht-2d")
    assert policy.recipe == "nvfp4-2d-rht"
    assert jmpp.get_policy(str(policy)) == policy
    assert jmpp.Policy("mixed_bfloat16, r=fwd:nvfp4+bwd:fp8_current").recipe == "fwd:nvfp4+bwd:fp8_current"
    assert jmpp.report.worthwhile("nvfp4-sr", target="B200") == "nvfp4-sr@B200"
    with pytest.raises(ValueError, match="Unknown recipe 'nvfp4-dither'.*'nvfp4-2d-sr-rht'"):
        jmpp.Policy("mixed_bfloat16, r=nvfp4-dither")
