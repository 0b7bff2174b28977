"""Functions for `autocast` to be tried on, and what the tests look at in their jaxprs.

Each program is `fn(params, *data) -> tree of results`; its gradient is of a weighted mean of all results
with respect to `params`.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import CASES, PRODUCTS, equations, vectors
from jax import lax

import jmp_policy as jmpp

HALVES = ("float16", "bfloat16")

#: Nothing is left out between casts there and back, and little time is spent on making it fast.
OPTIONS = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of float32 arrays, what it is called with, and the same by hand in half if Flax offers it.

    Args:
      name: of the test.
      make: gives the function and its arguments, of which the first is differentiated.
      by_hand: the function with `dtype=` of every layer.
      reference: dtype of the run that is taken for exact. float32, which rounds 2**13 times finer than
        float16, where the function is another one in float64: its random bits, or the dtype of a carry.
      wide_products: whether some products stay float32: those inside JAX's decompositions, which are not
        looked into, and those of few terms.
      kinks: whether it has a derivative that jumps (relu, max pooling).
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    by_hand: Callable[[Any], Callable[..., Any]] | None = None
    reference: str = "float64"
    wide_products: bool = False
    kinks: bool = False

    def __repr__(self):
        return self.name


def rng(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


# Models of Flax


class Remat(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = x + nn.remat(Block)(self.dtype)(x)
        return nn.Dense(8, dtype=self.dtype)(x)


class Block(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.silu(nn.Dense(64, dtype=self.dtype)(nn.RMSNorm(dtype=self.dtype)(x)))
        return nn.Dense(32, dtype=self.dtype)(x)


class Recurrent(nn.Module):
    cell: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(self.cell(16, dtype=self.dtype))(x)
        return nn.Dense(8, dtype=self.dtype)(x)


class Dropout(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(64, dtype=self.dtype)(x))
        x = nn.Dropout(0.3, deterministic=False)(x)
        return nn.Dense(8, dtype=self.dtype)(x)


def of_model(name, make, inputs, is_by_hand=True, **options):
    """A program of a Linen model: results are what it gives and the collections that it changes."""

    def function(dtype):
        model = make(dtype=dtype)

        def fn(params, state, x):
            out, new = model.apply(
                {"params": params, **state}, x, mutable=list(state), rngs={"dropout": jax.random.key(2)}
            )
            return out, new

        return fn

    def program():
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        state = dict(jax.jit(make(dtype=None).init, compiler_options=OPTIONS)(keys, inputs()))
        return function(None), (state.pop("params"), state, inputs())

    return Program(name, program, function if is_by_hand else None, **options)


# Functions of plain JAX


def attention(mask):
    def fn(params, x):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params)
        if mask == "causal":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)
        allowed = np.random.default_rng(1).random((2, 1, 12, 12)) < 0.7
        return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(allowed | np.eye(12, dtype=bool)))

    return fn, ([rng(16, 2, 8, seed=i, scale=0.25) for i in range(3)], rng(2, 12, 16, seed=9))


def decode_step():
    """One token with a cache of keys and values; the fourth place is written."""

    def fn(params, x, keys, values, place):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in ("q", "k", "v"))
        keys = lax.dynamic_update_slice_in_dim(keys, k, place, 1)
        values = lax.dynamic_update_slice_in_dim(values, v, place, 1)
        logits = jnp.einsum("bqhk,bshk->bhqs", q, keys) / np.sqrt(8)
        seen = jnp.arange(keys.shape[1]) <= place
        logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
        out = jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(logits), values)
        return jnp.einsum("bqhk,hkd->bqd", out, params["o"]), {"keys": keys, "values": values}

    params = {name: rng(16, 2, 8, seed=i, scale=0.25) for i, name in enumerate("qkv")}
    params["o"] = rng(2, 8, 16, seed=3, scale=0.25)
    return fn, (params, rng(2, 1, 16), rng(2, 8, 2, 8, seed=4), rng(2, 8, 2, 8, seed=5), np.int32(3))


def conv_transpose():
    def fn(w, x):
        return jnp.tanh(lax.conv_transpose(x, w, (2, 2), "SAME"))

    return fn, (rng(3, 3, 4, 6, scale=0.2), rng(2, 5, 5, 4, seed=1))


def einsum():
    def fn(params, x):
        return jnp.einsum("bij,jk,kl,bl->bi", x, params["a"], params["b"], x[:, 0, :])

    return fn, ({"a": rng(8, 12, scale=0.3), "b": rng(12, 8, seed=1, scale=0.3)}, rng(4, 6, 8, seed=2))


def message_passing():
    def fn(params, nodes, senders, receivers):
        for w, b in params:
            messages = jnp.tanh(nodes[senders] @ w + b)
            nodes = nodes + jax.ops.segment_sum(messages, receivers, len(nodes))
        return nodes

    params = [(rng(8, 8, seed=i, scale=0.3), rng(8, seed=5 + i, scale=0.1)) for i in range(2)]
    edges = np.random.default_rng(0).integers(0, 10, (2, 40)).astype(np.int32)
    return fn, (params, rng(10, 8, seed=3), *edges)


def linalg():
    def fn(w, x, y):
        product = x @ w
        gram = product.T @ product + 5 * jnp.eye(w.shape[1])
        return {
            "solve": jnp.linalg.solve(gram, y),
            "cholesky": jnp.linalg.cholesky(gram),
            "norm": jnp.linalg.norm(product),
            "norms": jnp.linalg.norm(product, axis=-1),
        }

    return fn, (rng(8, 6, scale=0.3), rng(16, 8, seed=1), rng(6, 3, seed=2))


def ragged_dot():
    def fn(params, x, sizes):
        hidden = jax.nn.silu(lax.ragged_dot(x, params[0], sizes))
        return lax.ragged_dot(hidden, params[1], sizes)

    sizes = np.array([5, 0, 9, 10], np.int32)
    return fn, ([rng(4, 8, 16, scale=0.3), rng(4, 16, 8, seed=1, scale=0.3)], rng(24, 8, seed=2), sizes)


def masks():
    """Booleans as a condition, as a factor, and as a bias of float32's lowest number."""

    def fn(w, x, keep):
        y = jnp.where(keep, x @ w, 0.0)
        y = y * keep + jnp.where(keep, y, -y)
        bias = jnp.where(keep, 0.0, jnp.finfo(jnp.float32).min)
        return jax.nn.softmax(y + bias), jnp.where(keep, y, jnp.nan_to_num(-jnp.inf)).max(-1)

    keep = np.random.default_rng(0).random((6, 8)) < 0.7
    return fn, (rng(16, 8, scale=0.25), rng(6, 16, seed=1), keep | np.eye(6, 8, dtype=bool))


def cross_entropy():
    def fn(params, x, labels):
        logits = jax.nn.gelu(x @ params["w"] + params["b"]) @ params["head"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
        return -picked.mean(), jax.nn.logsumexp(logits, axis=-1)

    params = {"w": rng(16, 32, scale=0.25), "b": rng(32, seed=1), "head": rng(32, 10, seed=2, scale=0.2)}
    return fn, (params, rng(12, 16, seed=3), np.arange(12, dtype=np.int32) % 10)


def additive_attention():
    """Queries and keys that are computed in half, and broadcast against each other."""

    def fn(params, x):
        queries, keys = jnp.tanh(x @ params["q"]), jnp.tanh(x @ params["k"])
        logits = jnp.tanh(queries[:, :, None] + keys[:, None]) @ params["v"]
        return jax.nn.softmax(logits[..., 0]) @ x

    params = {name: rng(8, 16, seed=i, scale=0.3) for i, name in enumerate("qk")}
    return fn, ({**params, "v": rng(16, 1, seed=2)}, rng(2, 8, 8, seed=3))


def gates():
    """Squeeze and excite: a factor per channel, computed in half, for each pixel of an image."""

    def fn(params, x):
        y = lax.conv_general_dilated(
            x, params["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jax.nn.silu(y)
        gate = jax.nn.sigmoid(jnp.tanh(y.mean((1, 2)) @ params["down"]) @ params["up"])
        return (y * gate[:, None, None]).reshape(len(x), -1) @ params["head"]

    params = {"conv": rng(3, 3, 3, 8, scale=0.2), "down": rng(8, 4, seed=1, scale=0.4)}
    params |= {"up": rng(4, 8, seed=2, scale=0.5), "head": rng(512, 4, seed=3, scale=0.05)}
    return fn, (params, rng(2, 8, 8, 3, seed=4))


#: What is special about the `CASES`. Scanned, an encoder by hand is as it is unrolled.
OPTIONS_OF = {
    **dict.fromkeys(("mlp", "cnn", "resnet_block"), (("kinks", True),)),
    **dict.fromkeys(("scanned_encoder", "scanned_remat_encoder"), (("is_by_hand", False),)),
    "lstm": (("reference", "float32"),),
}

PROGRAMS = [
    *(of_model(case.name, case.make, case.inputs, **dict(OPTIONS_OF.get(case.name, ()))) for case in CASES),
    of_model("remat", Remat, vectors(16, 32)),
    of_model(
        "rnn_lstm", functools.partial(Recurrent, nn.LSTMCell), vectors(4, 6, 8), False, reference="float32"
    ),
    of_model("rnn_gru", functools.partial(Recurrent, nn.GRUCell), vectors(4, 6, 8), reference="float32"),
    of_model("dropout", Dropout, vectors(16, 32), reference="float32"),
    Program("attention_causal", lambda: attention("causal")),
    Program("attention_mask", lambda: attention("mask")),
    Program("decode_step", decode_step),
    Program("conv_transpose", conv_transpose),
    Program("einsum", einsum),
    Program("message_passing", message_passing),
    Program("linalg", linalg, wide_products=True),
    Program("ragged_dot", ragged_dot),
    Program("masks", masks),
    Program("cross_entropy", cross_entropy),
    Program("additive_attention", additive_attention),
    Program("gates", gates),
]


# Losses of optax, of scores that a matrix product gives.

REAL, OTHER = rng(6, 5, seed=11), rng(6, 5, seed=12)
PROBABILITIES = np.exp(OTHER) / np.exp(OTHER).sum(-1, keepdims=True)
BINARY, SIGNS = (REAL > 0).astype(np.float32), np.sign(REAL)
CLASSES = np.array([0, 3, 1, 3, 0, 1], np.int32)
ONE_HOT = np.eye(5, dtype=np.float32)[CLASSES]
CTC = (np.zeros((2, 3), np.float32), np.array([[1, 2], [3, 1]], np.int32), np.zeros((2, 2), np.float32))

#: Of each function that optax exports: how it is called with scores of shape (6, 5).
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "binary_dice_loss": lambda loss, x: loss(x, BINARY),
    "convex_kl_divergence": lambda loss, x: loss(jax.nn.log_softmax(x), PROBABILITIES),
    "cosine_distance": lambda loss, x: loss(x, REAL),
    "cosine_similarity": lambda loss, x: loss(x, REAL, epsilon=1e-12),
    "ctc_loss": lambda loss, x: loss(x.reshape(2, 3, 5), *CTC),
    "ctc_loss_with_forward_probs": lambda loss, x: loss(x.reshape(2, 3, 5), *CTC),
    "dice_loss": lambda loss, x: loss(x, ONE_HOT),
    "generalized_kl_divergence": lambda loss, x: loss(jax.nn.log_softmax(x), PROBABILITIES),
    "hinge_loss": lambda loss, x: loss(x, SIGNS),
    "huber_loss": lambda loss, x: loss(x, REAL),
    "kl_divergence": lambda loss, x: loss(jax.nn.log_softmax(x), PROBABILITIES),
    "kl_divergence_with_log_targets": lambda loss, x: loss(jax.nn.log_softmax(x), np.log(PROBABILITIES)),
    "l2_loss": lambda loss, x: loss(x, REAL),
    "log_cosh": lambda loss, x: loss(x, REAL),
    "make_fenchel_young_loss": lambda loss, x: loss(jax.nn.logsumexp)(x, PROBABILITIES),
    "multiclass_generalized_dice_loss": lambda loss, x: loss(x, ONE_HOT),
    "multiclass_hinge_loss": lambda loss, x: loss(x, CLASSES),
    "multiclass_perceptron_loss": lambda loss, x: loss(x, CLASSES),
    "multiclass_sparsemax_loss": lambda loss, x: loss(x, CLASSES),
    "ntxent": lambda loss, x: loss(x, CLASSES, 0.5),
    "perceptron_loss": lambda loss, x: loss(x, SIGNS),
    "poly_loss_cross_entropy": lambda loss, x: loss(x, ONE_HOT),
    "ranking_softmax_loss": lambda loss, x: loss(x, BINARY),
    "safe_softmax_cross_entropy": lambda loss, x: loss(x, ONE_HOT),
    "sigmoid_binary_cross_entropy": lambda loss, x: loss(x, BINARY),
    "sigmoid_focal_loss": lambda loss, x: loss(x, BINARY),
    "smooth_labels": lambda loss, x: loss(jax.nn.softmax(x), 0.1),
    "softmax_cross_entropy": lambda loss, x: loss(x, PROBABILITIES),
    "softmax_cross_entropy_with_integer_labels": lambda loss, x: loss(x, CLASSES),
    "sparsemax_loss": lambda loss, x: loss(x[:, 0], BINARY[:, 0]),
    "squared_error": lambda loss, x: loss(x, REAL),
    "triplet_margin_loss": lambda loss, x: loss(x, REAL, OTHER),
}


_SUMMING_CLASSES = ("ctc_loss", "ctc_loss_with_forward_probs", "make_fenchel_young_loss")
_SUMMING_CLASSES += ("multiclass_hinge_loss", "multiclass_perceptron_loss")


def of_loss(name):
    def fn(w, x):
        return LOSSES[name](getattr(optax.losses, name), x @ w)

    # The rule of a custom_jvp in which nothing changes stays as it is; the sparsemax's has a product.
    # Others sum over the five classes.
    wide = name in ("multiclass_sparsemax_loss", *_SUMMING_CLASSES)
    return Program(
        name, lambda: (fn, (rng(8, 5, seed=13, scale=0.4), rng(6, 8, seed=14))), wide_products=wide
    )


LOSS_PROGRAMS = [of_loss(name) for name in sorted(LOSSES)]


def all_losses():
    """All of them, each with weights of its own, to be compiled at once."""
    parts = {program.name: program.make() for program in LOSS_PROGRAMS}

    def fn(weights, x):
        return {name: function(weights[name], x) for name, (function, _) in parts.items()}

    return fn, ({name: args[0] for name, (_, args) in parts.items()}, next(iter(parts.values()))[1][1])


ALL_LOSSES = Program("all_losses", all_losses)


# Running


@functools.cache
def made(program):
    return program.make()


@functools.cache
def function(program, how):
    """The program's function as it is (None), under autocast in a half dtype, or by hand ("hand float16")."""
    fn, _ = made(program)
    if how is None:
        return fn
    if how.startswith("hand "):
        return program.by_hand(jnp.dtype(how.removeprefix("hand ")))
    return jmpp.autocast(fn, how)


def directed(fn):
    """The weighted mean of all floating results, and the results: what is differentiated."""

    def loss(*args):
        outs = fn(*args)
        total = 0.0
        for out in jax.tree.leaves(outs):
            if jnp.issubdtype(out.dtype, jnp.floating):
                weights = 1 + np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
                total += jnp.mean(out * weights)
        return total, outs

    return loss


def gradient(program, how=None):
    """Of everything under autocast: the loss too."""
    fn = function(program, how if how and how.startswith("hand ") else None)
    loss = directed(fn)
    if how in HALVES:
        loss = jmpp.autocast(loss, how)
    return jax.grad(loss, has_aux=True)


@contextlib.contextmanager
def expected_warnings():
    """Without the warning of optax that one of its losses is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The function convex_kl_divergence is", DeprecationWarning)
        yield


@functools.cache
@expected_warnings()
def forward_jaxpr(program, how=None):
    return jax.make_jaxpr(function(program, how))(*made(program)[1]).jaxpr


@functools.cache
@expected_warnings()
def backward_jaxpr(program, how=None):
    return jax.make_jaxpr(gradient(program, how))(*made(program)[1]).jaxpr


def compiled(program, how=None):
    return jax.jit(gradient(program, how), compiler_options=OPTIONS)


def widened(tree):
    def wide(x):
        return np.asarray(x, np.float64) if np.asarray(x).dtype == np.float32 else x

    return jax.tree.map(wide, tree)


@functools.cache
@expected_warnings()
def results(program, how):
    """Gradient and results."""
    return compiled(program, how)(*made(program)[1])


@functools.cache
@expected_warnings()
def reference(program):
    """Gradient and results in float64; see `Program.reference`."""
    args = made(program)[1]
    if program.reference == "float32":
        return compiled(program)(*args)
    with jax.enable_x64(True):
        return compiled(program)(*widened(args))


def flat(tree):
    return np.concatenate(
        [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree) if x.dtype.kind in "fV"]
    )


def error(got, want):
    """Relative, in norm; of places where both are the same infinity there is none."""
    got, want = flat(got), flat(want)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    return float(np.linalg.norm((got - want)[finite]) / np.linalg.norm(want[finite]))


# Reading jaxprs


def levels(jaxpr):
    """A jaxpr and all those inside."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in inside(eqn):
            yield from levels(inner)


def inside(eqn):
    for value in eqn.params.values():
        for part in jax.tree.leaves(value, is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(part, "eqns"):
                yield getattr(part, "jaxpr", part)


def is_half(atom):
    return getattr(atom.aval, "dtype", None) in (jnp.float16, jnp.bfloat16)


def is_float32(atom):
    return getattr(atom.aval, "dtype", None) == jnp.float32


def product_dtypes(jaxpr):
    """(primitive, dtypes of its floating operands) of each product."""
    found = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            dtypes = [v.aval.dtype for v in eqn.invars]
            found.append((eqn.primitive.name, *(d.name for d in dtypes if jnp.issubdtype(d, jnp.floating))))
    return found


#: Take steps that are exact, or are counted where their operands are made.
_MOVES = frozenset(
    [
        *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "split", "gather"),
        *("concatenate", "pad", "dynamic_slice", "dynamic_update_slice", "copy", "copy_p", "rev"),
        *("name", "neg", "select_n"),
    ]
)


def roundings(jaxpr, given=None):
    """How many half results are computed one from another, on the longest way to any result of a jaxpr."""
    depth = dict(zip(jaxpr.invars, given or [0] * len(jaxpr.invars), strict=True))

    def of(atoms):
        return [0 if hasattr(atom, "val") else depth.get(atom, 0) for atom in atoms]

    for eqn in jaxpr.eqns:
        parts, counts = list(inside(eqn)), of(eqn.invars)
        if eqn.primitive.name == "scan":
            outs = _roundings_of_scan(eqn, parts[0], counts)
        elif eqn.primitive.name == "custom_linear_solve":  # In float32 throughout.
            outs = [max(counts)] * len(eqn.outvars)
        elif parts and all(
            len(p.invars) == len(counts) and len(p.outvars) == len(eqn.outvars) for p in parts
        ):
            outs = [max(ways) for ways in zip(*(roundings(p, counts) for p in parts), strict=True)]
        elif parts and all(len(p.invars) == len(counts) - 1 for p in parts):  # cond
            outs = [max(ways) for ways in zip(*(roundings(p, counts[1:]) for p in parts), strict=True)]
        else:
            assert not parts, eqn.primitive.name
            is_rounded = eqn.primitive.name not in _MOVES
            outs = [max(counts, default=0) + (is_rounded and is_half(var)) for var in eqn.outvars]
        depth.update(zip(eqn.outvars, outs, strict=True))
    return of(jaxpr.outvars)


def _roundings_of_scan(eqn, body, counts):
    invars = eqn.invars
    carries = len(body.outvars) - sum(
        1 for var, outer in zip(body.outvars, eqn.outvars, strict=True) if var.aval.shape != outer.aval.shape
    )
    slices = sum(
        1 for var, outer in zip(body.invars, invars, strict=True) if var.aval.shape != outer.aval.shape
    )
    consts = len(invars) - slices - carries
    ys = [0] * (len(body.outvars) - carries)
    for _ in range(eqn.params["length"]):
        outs = roundings(body, counts)
        counts = [*counts[:consts], *outs[:carries], *counts[consts + carries :]]
        ys = [max(pair) for pair in zip(ys, outs[carries:], strict=True)]
    return [*counts[consts : consts + carries], *ys]


def casts(jaxpr):
    """(source, dtype before, result, dtype after) of each conversion of one level of a jaxpr."""
    return [
        (eqn.invars[0], eqn.invars[0].aval.dtype, eqn.outvars[0], eqn.outvars[0].aval.dtype)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type"
    ]
