"""`autocast` of whole models and losses: the dtypes of the trace, and how far its numbers are from exact."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autocast_helpers import (
    ALL_LOSSES,
    HALVES,
    LOSS_PROGRAMS,
    LOSSES,
    OPTIONS,
    PROGRAMS,
    backward_jaxpr,
    casts,
    error,
    forward_jaxpr,
    is_half,
    levels,
    product_dtypes,
    reference,
    results,
    rng,
    roundings,
    widened,
)
from helpers import equations, is_of_one_term, paired

import jmp_policy as jmpp

#: Tried in both half types: a convolution, attention with a cache, plain layers. autocast decides alike for
#: both, but for quotients and powers, of which the losses are full.
IN_BOTH = ("cnn", "decode_step", "mlp")


def cases():
    """A program and a half type each."""
    for program in (*PROGRAMS, *LOSS_PROGRAMS):
        for half in HALVES if program in LOSS_PROGRAMS or program.name in IN_BOTH else HALVES[:1]:
            is_quick = program.name in IN_BOTH and half == HALVES[0]
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param((program, half), marks=marks, id=f"{program}-{half}")


@pytest.fixture(params=cases(), scope="module")
def case(request):
    """A program and a half type. Of the module, so that the tests of one case follow each other."""
    return request.param


#: What half has no digits or no range for. Sums of two cotangents (add_any) are no such sums.
NEVER_IN_HALF = frozenset(
    [
        *(
            "exp",
            "exp2",
            "expm1",
            "log",
            "log1p",
            "pow",
            "sqrt",
            "rsqrt",
            "cbrt",
            "reduce_sum",
            "reduce_prod",
        ),
        *("reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp", "scatter-add", "scatter_add"),
    ]
)


def test_every_loss_of_optax_is_tried():
    exported = {
        name for name in dir(optax.losses) if callable(getattr(optax.losses, name)) and name[0] != "_"
    }
    assert exported - {"Callable"} == set(LOSSES)


# Dtypes in the trace


@pytest.mark.slow
def test_every_product_takes_half_and_results_keep_their_dtypes(case):
    program, half = case
    for jaxpr_of in (forward_jaxpr, backward_jaxpr):
        got, want = product_dtypes(jaxpr_of(program, half)), product_dtypes(jaxpr_of(program))
        # Not one more than without.
        assert collections.Counter(name for name, *_ in got) == collections.Counter(name for name, *_ in want)
        unlike = [(name, *dtypes) for name, *dtypes in got if set(dtypes) != {half}]
        if program.wide_products:
            assert all(set(dtypes) == {"float32"} for _, *dtypes in unlike)
            assert len(unlike) < len(got)
        else:
            assert unlike == []
        types = [
            [(v.aval.shape, v.aval.dtype) for v in jaxpr_of(program, how).outvars] for how in (half, None)
        ]
        assert types[0] == types[1]


def test_no_sum_is_in_half_and_no_argument_is_cast_twice(case):
    """No exponential, logarithm or root either; and nothing is cast there and back.

    But for rows of an embedding: all that use them see them rounded, as an activation.
    """
    program, half = case
    for jaxpr_of in (forward_jaxpr, backward_jaxpr):
        in_half = [
            str(eqn)
            for eqn in equations(jaxpr_of(program, half))
            if eqn.primitive.name in NEVER_IN_HALF
            and any(map(is_half, (*eqn.invars, *eqn.outvars)))
            and not is_of_one_term(eqn)
        ]
        assert in_half == []
    for jaxpr in levels(forward_jaxpr(program, half)):
        dtype_before, counts = {}, collections.Counter()
        rows = {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "gather"}
        for source, before, result, after in casts(jaxpr):
            counts[source] += source in jaxpr.invars and before == jnp.float32
            assert dtype_before.get(source) != after, f"{source} is cast from {after} to {before} and back"
            dtype_before[result] = None if source in rows else before
        assert all(count <= 1 for count in counts.values()), counts


# Numbers


def bounds(program, half):
    """What the relative errors of gradients and results, in norm, must be below.

    A half result is off by a random share of at most eps / 2. After a chain of `depth` of them, on the
    longest way through the jaxpr, that is sqrt(depth) * eps / 2, and less where it is not the longest. Twice
    as much is allowed, since a function may magnify an error a little.

    Where the derivative jumps, an error of d in what goes into it moves a share d of the elements to the
    other side of the jump, and these are off by all they are: sqrt(d) in norm.
    """
    eps = float(jnp.finfo(half).eps)
    backward, forward = (
        np.sqrt(max(1, *roundings(jaxpr_of(program, half)))) * eps
        for jaxpr_of in (backward_jaxpr, forward_jaxpr)
    )
    return np.sqrt(backward) if program.kinks else backward, forward


@pytest.mark.once
@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_as_close_to_float64_as_roundings_allow(program):
    """Compiled and run: finite, near the exact numbers, and no further from them than by hand.

    By hand is the same model with `dtype=` of every layer; the margin is for roundings that fall otherwise.
    """
    want = reference(program)
    for half in HALVES if program.name in IN_BOTH else HALVES[:1]:
        got = results(program, half)
        assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(got[0])))
        errors = [error(a, b) for a, b in zip(got, want, strict=True)]
        assert np.all(np.array(errors) <= bounds(program, half)), (half, errors, bounds(program, half))
        if program.by_hand:
            by_hand = [error(a, b) for a, b in zip(results(program, f"hand {half}"), want, strict=True)]
            assert np.all(np.array(errors) <= 1.25 * np.array(by_hand)), (half, errors, by_hand)


@pytest.mark.once
def test_every_loss_is_as_close_to_float64_as_roundings_allow():
    """They share one compiled program; in float16, which has the smaller range."""
    want, off, half = reference(ALL_LOSSES), {}, HALVES[0]
    got = results(ALL_LOSSES, half)
    for program in LOSS_PROGRAMS:
        errors = [error(a[program.name], b[program.name]) for a, b in zip(got, want, strict=True)]
        if not np.all(np.array(errors) <= bounds(program, half)):
            off[program.name] = (errors, bounds(program, half))
    assert off == {}


# Numbers that half cannot hold


def exactly(fn, *args):
    with jax.enable_x64(True):
        return jax.jit(fn, compiler_options=OPTIONS)(*widened(args))


def gradient_error(fn, half, *args):
    """Of the gradient with respect to the first argument under autocast, against float64."""
    got = jax.jit(jax.grad(jmpp.autocast(fn, half)), compiler_options=OPTIONS)(*args)
    return error(got, exactly(jax.grad(fn), *args))


def integers(*shape, seed, limit):
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("attend", [jax.nn.dot_product_attention, nn.dot_product_attention])
def test_attention_with_logits_beyond_the_range_of_float16(attend, half):
    """Queries and keys are exact in half, and so are the weights: of the values alone there is a rounding."""
    q, k = (64 * integers(2, 8, 2, 16, seed=seed, limit=15) for seed in (0, 1))
    v = rng(2, 8, 2, 16, seed=2)
    logits = np.einsum("bqhd,bkhd->bhqk", q, k)
    assert np.abs(logits).max() > 10 * 65504
    mask = np.tril(np.ones((8, 8), bool))[None, None]

    def loss(args):
        q, k, v = args
        return jnp.square(attend(q, k, v, mask=mask)).sum()

    value, grads = jax.jit(jax.value_and_grad(jmpp.autocast(loss, half)), compiler_options=OPTIONS)((q, k, v))
    want, want_grads = exactly(jax.value_and_grad(loss), (q, k, v))
    eps = float(jnp.finfo(half).eps)
    assert error(value, want) <= 2 * eps
    assert all(np.isfinite(x).all() for x in grads)
    assert error(grads[2], want_grads[2]) <= 2 * eps


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_masks_of_the_lowest_float32(half):
    lowest = jnp.finfo(jnp.float32).min
    keep = np.array([[True, False, True, False], [False] * 4, [True] * 4])

    def chosen(x, w):
        return jax.nn.softmax(jnp.where(keep, x @ w, lowest))

    def added(x, w):
        return jax.nn.softmax(x @ w + jnp.where(keep, 0.0, lowest))

    def scaled(x, w):
        return jax.nn.softmax(x @ w + (1.0 - keep) * lowest)

    x, w = rng(3, 8), rng(8, 4, seed=1, scale=0.2)
    for fn in (chosen, added, scaled):
        got, want = jmpp.autocast(fn, half)(x, w), fn(x, w)
        # A row with nothing to see has equal weights: the lowest number plus a logit is the lowest number.
        np.testing.assert_array_equal(got[1], np.full(4, 0.25))
        np.testing.assert_array_equal(np.asarray(got)[~keep & keep.any(-1, keepdims=True)], 0)
        np.testing.assert_allclose(got, want, atol=2 * float(jnp.finfo(half).eps))
        grads = jax.grad(lambda w, fn=fn: jnp.square(jmpp.autocast(fn, half)(x, w)).sum())(w)
        assert np.isfinite(grads).all()


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "fn",
    [
        lambda y: y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + 1e-12),
        lambda y: y / (jnp.abs(y) + 1e-12),
        lambda y: y / jnp.maximum(jnp.abs(y), 1e-12),
        lambda y: y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-12),
        lambda y: jnp.log(jnp.abs(y) + 1e-12),
        lambda y: (y + 1e-12) / (jnp.abs(y).sum(-1, keepdims=True) + 1e-12),
        lambda y: jnp.where(y == 0, 1e-12, y) / jnp.where(y == 0, 1e-12, jnp.abs(y)),
    ],
    ids=["norm", "abs", "maximum", "rsqrt", "log", "both", "where"],
)
def test_epsilons_that_half_takes_for_zero(fn, half):
    """After a product one of whose rows is zero: without the epsilon it is 0 / 0."""
    x, w = rng(4, 8), rng(8, 4, seed=1)
    x[1] = 0
    # Not near zero, so that the logarithm's error is bounded by that of its argument.
    w += np.sign(w)

    def function(x, w):
        return fn(x @ w)

    got, want = jmpp.autocast(function, half)(x, w), exactly(function, x, w)
    assert np.isfinite(got).all()
    assert error(got, want) <= 4 * float(jnp.finfo(half).eps)


def rms_norm(y):
    return y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)


def layer_norm(y):
    mean = y.mean(-1, keepdims=True)
    return (y - mean) * jax.lax.rsqrt(jnp.mean((y - mean) ** 2, -1, keepdims=True) + 1e-6)


@pytest.mark.once
@pytest.mark.parametrize(("residual", "half"), paired([False, True], HALVES))
@pytest.mark.parametrize(
    "norm",
    [
        rms_norm,
        layer_norm,
        lambda y: nn.RMSNorm().apply({"params": {"scale": jnp.ones(64)}}, y),
        lambda y: nn.LayerNorm(use_bias=False).apply({"params": {"scale": jnp.ones(64)}}, y),
    ],
    ids=["rms_norm", "layer_norm", "nn.RMSNorm", "nn.LayerNorm"],
)
def test_norms_of_large_activations(norm, residual, half):
    """Of size 300 to 1000, whose squares exceed float16; also where they are added to the result."""

    def loss(w, x):
        y = x @ w
        y = y / 512 + norm(y) if residual else norm(y)
        return jnp.square(y @ w.T).mean()

    x, w = rng(16, 64, scale=60), rng(64, 64, seed=1)
    assert 300 < np.abs(x @ w).mean() < 1000
    value = jmpp.autocast(loss, half)(w, x)
    eps = float(jnp.finfo(half).eps)
    assert error(value, exactly(loss, w, x)) <= 4 * eps
    assert gradient_error(loss, half, w, x) <= 4 * eps


# Gradients of what is used very often


def test_bias_gradient_over_a_large_batch():
    """Each of 16384 terms is rounded to bfloat16, and their sum is not.

    The arguments are exact in bfloat16: the rounding of a weight is the same in all terms.
    """

    def loss(b, w, x, head):
        y = nn.silu(x @ w + b)
        return jnp.square(y @ head + 1).mean()

    args = rng(32, scale=0.1), rng(16, 32, seed=1, scale=0.25), rng(16384, 16, seed=2), rng(32, 4, seed=3)
    args = [x.astype(jnp.bfloat16).astype(np.float32) for x in args]
    assert gradient_error(loss, "bfloat16", *args) < 1.5e-3


@pytest.mark.slow
def test_gradient_of_a_weight_that_a_loop_reads_256_times():
    """The steps are summed in float32. Cast before the loop, they would be summed in bfloat16."""

    def loss(w, x, dtype=None):
        w, x = (w, x) if dtype is None else (w.astype(dtype), x.astype(dtype))

        def step(total, x):
            return total + jnp.tanh(x @ w).astype(total.dtype).sum(), None

        return jax.lax.scan(step, jnp.zeros((), w.dtype if dtype is None else jnp.float32), x)[0]

    args = rng(16, 8, scale=0.25), rng(256, 4, 16, seed=1) + np.float32(0.5)
    want = exactly(jax.grad(loss), *args)
    by_hand = jax.jit(jax.grad(lambda w, x: loss(w, x, jnp.bfloat16)), compiler_options=OPTIONS)(*args)
    got = gradient_error(loss, "bfloat16", *args)
    assert got < 4e-3
    assert got < error(by_hand, want) / 3


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, tokens: table[tokens],
        lambda table, tokens: jnp.take(table, tokens, axis=0),
        lambda table, tokens: nn.Embed(4, 8).apply({"params": {"embedding": table}}, tokens),
        lambda table, tokens: jnp.tanh(table @ np.eye(8, dtype=np.float32))[tokens],
    ],
    ids=["index", "take", "nn.Embed", "computed"],
)
def test_gradient_of_a_row_that_is_looked_up_4096_times(look_up, half):
    """Summed in float32: in bfloat16 the sum stops growing at 256 terms, in float16 at 2048."""

    def loss(table, tokens, w):
        return (nn.silu(look_up(table, tokens)) @ w).mean()

    tokens = np.zeros(4096, np.int32)
    tokens[:3] = 1, 2, 3
    args = rng(4, 8), tokens, np.abs(rng(8, 4, seed=1))
    assert gradient_error(loss, half, *args) <= 2 * float(jnp.finfo(half).eps)
