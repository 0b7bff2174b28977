"""`audit`: planted faults are named by module and line, sizes and costs are the analytic ones."""

import dataclasses
import functools
import importlib.util
import json
import math
import warnings
from pathlib import Path

import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import nnx_helpers
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.experimental import sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.core.tables import folded

F16, F32, BF16 = jnp.float16, jnp.float32, jnp.bfloat16
LINES = Path(__file__).read_text().splitlines()


def here(marker):
    """The file and line of this file that ends in such a comment: "test_audit.py:41"."""
    (number,) = [i for i, line in enumerate(LINES, 1) if line.endswith(f"  # plant: {marker}")]
    return f"{Path(__file__).name}:{number}"


def array(*shape, dtype=F16):
    return jax.ShapeDtypeStruct(shape, dtype)


def squares(out):
    """A float32 loss, whose own casts are asked for."""
    return (out.astype(F32) ** 2).sum()


class LinenBlock(nn.Module):
    """A float32 product hidden in a half model."""

    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dtype=self.dtype)(x)
        w = self.param("w", nn.initializers.lecun_normal(), (16, 16))
        x = x.astype(F32) @ w.astype(F32)  # plant: linen dot
        return nn.Dense(16, dtype=self.dtype)(x)


class LinenNet(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dtype=self.dtype)(LinenBlock(self.dtype, name="block")(x))


class NnxBlock(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.up = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)
        self.w = nnx.Param(jnp.ones((16, 16)))
        self.down = nnx.Linear(16, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        x = x.astype(F32) @ self.w[...].astype(F32)  # plant: nnx dot
        return self.down(x)


class NnxNet(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.block = NnxBlock(rngs=rngs, dtype=dtype)
        self.head = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(x))


def linen_loss(model, x):
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return lambda variables, x: squares(model.apply(variables, x)), variables, x


def nnx_loss(model, x):
    return lambda model, x: squares(model(x)), model, x


def plain_loss():
    def loss(params, x):
        with jax.named_scope("net"):
            x = x @ params["up"]
            with jax.named_scope("block"):
                x = x.astype(F32) @ params["w"]  # plant: plain dot
            return squares(x.astype(F16) @ params["down"])

    params = {"up": array(8, 16), "w": array(16, 16, dtype=F32), "down": array(16, 8)}
    return loss, params, array(8, 8)


X = jax.ShapeDtypeStruct((8, 8), F32)
PLANTED = {
    "linen bare": (lambda: linen_loss(LinenNet(F16), X), "LinenNet/block", "linen dot"),
    "linen wrapped": (
        lambda: linen_loss(jmpp.wrap(LinenNet(), "mixed_float16"), X),
        "LinenNet/block",
        "linen dot",
    ),
    "nnx bare": (lambda: nnx_loss(NnxNet(rngs=nnx.Rngs(0), dtype=F16), X), "NnxNet/block", "nnx dot"),
    "nnx wrapped": (
        lambda: nnx_loss(jmpp.wrap(NnxNet(rngs=nnx.Rngs(0)), "mixed_float16"), X),
        "NnxNet/block",
        "nnx dot",
    ),
    "plain": (plain_loss, "net/block", "plain dot"),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", PLANTED)
@pytest.mark.parametrize("grad", [False, True])
def test_a_float32_product_hidden_in_a_float16_model_is_named(which, grad):
    make, path, marker = PLANTED[which]
    found = jmpp.audit(*make(), grad=grad)
    wide = found.wide_products
    assert {(p.path, p.line.partition(" ")[0], p.lhs, p.rhs) for p in wide} == {
        (path, here(marker), "float32", "float32")
    }
    assert [p.backward for p in wide] == [False, True, True][: 1 + 2 * grad]
    place = f"{path} ({here(marker)})"
    assert f"{len(wide)} product{'s' * grad} in float32: {place}" in found.verdict
    assert found.half_share == pytest.approx(1 - sum(p.share for p in wide))
    # Explicit casts are what somebody asked for.
    assert not found.upcasts


LINEN = {case.name: case for case in helpers.CASES}
NNX = {case.name: case for case in nnx_helpers.CASES}
MODELS = [("linen", name) for name in ("mlp", "cnn", "scanned_remat_encoder", "lstm")]
MODELS += [("nnx", name) for name in ("mlp", "cnn", "scanned_remat_encoder")]


def model_loss(kind, name, policy):
    case = {"linen": LINEN, "nnx": NNX}[kind][name]
    x = case.inputs()
    if kind == "nnx":
        model = case() if policy is None else jmpp.wrap(case(), policy)
        return nnx_helpers.loss_fn, (model, x)
    model = case.make() if policy is None else jmpp.wrap(case.make(), policy)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    state = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, state, x):
        out, new = model.apply({"params": params, **state}, x, mutable=list(state))
        return jnp.mean(out.astype(F32) ** 2), new

    return loss, (variables["params"], state, x)


@pytest.mark.once
@pytest.mark.parametrize(("kind", "name"), MODELS)
@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_every_product_of_a_model_is_listed_with_its_place(kind, name, policy):
    loss, args = model_loss(kind, name, policy)
    found = jmpp.audit(loss, *args, grad=True)
    if kind == "linen":
        gradient = jax.value_and_grad(loss, has_aux=True)
        expected = helpers.products(gradient, *args)
    else:
        gradient, params = nnx_helpers.pure_gradient(args[0])
        expected = helpers.products(gradient, params, args[1])
    listed = [(p.operation, p.lhs, p.rhs) for p in found.products]
    assert {key: listed.count(key) for key in dict.fromkeys(listed)} == dict(expected)
    assert sum(p.share for p in found.products) == pytest.approx(1)
    assert found.flops == sum(p.flops for p in found.products)
    assert any(p.backward for p in found.products)
    assert not all(p.backward for p in found.products)
    file = "helpers.py" if kind == "linen" else "nnx_helpers.py"
    assert all(p.line.startswith(f"{file}:") or name == "lstm" for p in found.products)
    title = {"mlp": "MLP", "cnn": "CNN", "lstm": "LSTM"}.get(name, "Encoder")
    assert all(p.path == title or p.path.startswith(f"{title}/") for p in found.products)
    assert found.half_share == pytest.approx(0.0 if policy is None else 1.0)
    assert not [u for u in found.upcasts if u.reaches]


def conv(x, kernel, strides=(1, 1), **kwargs):
    numbers = ("NHWC", "HWIO", "NHWC")
    return squares(lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=numbers, **kwargs))


def scanned(x, w, length=5):
    return squares(lax.scan(lambda c, _: (c @ w, None), x, None, length=length)[0])


MESH = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))


def sharded(x, w):
    out = jax.shard_map(lambda x, w: x @ w, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d"))(x, w)
    return squares(out)


DOT = 2 * 8 * 16 * 16
W, BATCH = array(16, 16), array(8, 16)


@dataclasses.dataclass(frozen=True)
class Cost:
    """A loss, its forward products as (batch, m, n, k) and times, and what gradients multiply the cost by."""

    name: str
    loss: object
    args: tuple
    sizes: list
    flops: int
    gradients: float = 3
    times: int = 1

    def __repr__(self):
        return self.name


COSTS = [
    Cost("dot", lambda x, w: squares(x @ w), (BATCH, W), [(1, 8, 16, 16)], DOT),
    Cost(
        "batched dot",
        lambda q, k: squares(jnp.einsum("bhqd,bhkd->bhqk", q, k)),
        (array(2, 4, 8, 16), array(2, 4, 24, 16)),
        [(8, 8, 24, 16)],
        2 * 8 * 8 * 24 * 16,
    ),
    Cost("jitted twice", lambda x, w: squares(JITTED(JITTED(x, w), w)),
         (BATCH, W), [(1, 8, 16, 16)] * 2, 2 * DOT),
    Cost("scan", scanned, (BATCH, W), [(1, 8, 16, 16)], 5 * DOT, times=5),
    Cost(
        "scan of scan",
        lambda x, w: squares(lax.scan(lambda c, _: (SCAN3(c, w), None), x, None, length=4)[0]),
        (BATCH, W),
        [(1, 8, 16, 16)],
        12 * DOT,
        times=12,
    ),
    Cost(
        "fori_loop",
        lambda x, w: squares(lax.fori_loop(0, 7, lambda i, c: c @ w, x)),
        (BATCH, W),
        [(1, 8, 16, 16)],
        7 * DOT,
        times=7,
    ),
    Cost("remat", lambda x, w: squares(jnp.sin(jax.checkpoint(lambda x: jnp.sin(x @ w) @ w)(x))),
         (BATCH, W), [(1, 8, 16, 16)] * 2, 2 * DOT, gradients=3.5),
    Cost("vmap", lambda x, w: squares(jax.vmap(lambda r: r @ w)(x)), (BATCH, W), [(1, 8, 16, 16)], DOT),
    Cost("vmap over weights", lambda x, w: squares(jax.vmap(jnp.dot)(x, w)),
         (array(4, 8, 16), array(4, 16, 24)), [(4, 8, 24, 16)], 2 * 4 * 8 * 24 * 16),
    Cost("cond", lambda x, w: squares(lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x)),
         (BATCH, W), [(1, 8, 16, 16)], DOT),
    Cost("shard_map", sharded, (array(64, 16), W), [(1, 8, 16, 16)], DOT),
    Cost("custom_vjp", lambda x, w: squares(CUSTOM(x, w)), (BATCH, W), [(1, 8, 16, 16)], DOT),
    Cost(
        "ragged_dot",
        lambda x, w: squares(lax.ragged_dot(x, w, jnp.full(4, 8, jnp.int32))),
        (array(32, 16), array(4, 16, 8)),
        [(1, 32, 8, 16)],
        2 * 32 * 16 * 8,
    ),
    Cost(
        "vmapped ragged_dot",
        lambda x, w: squares(jax.vmap(lax.ragged_dot)(x, w, jnp.full((2, 4), 8, jnp.int32))),
        (array(2, 32, 16), array(2, 4, 16, 8)),
        [(2, 32, 8, 16)],
        2 * 2 * 32 * 16 * 8,
    ),
    Cost("conv", conv, (array(2, 8, 8, 8), array(3, 3, 8, 16)), [(1, 128, 16, 72)], 2 * 128 * 16 * 72),
    Cost(
        "strided conv",
        lambda x, k: conv(x, k, (2, 2)),
        (array(2, 16, 16, 8), array(3, 3, 8, 16)),
        [(1, 128, 16, 72)],
        2 * 128 * 16 * 72,
    ),
    Cost(
        "grouped conv",
        lambda x, k: conv(x, k, (2, 2), feature_group_count=2),
        (array(2, 16, 16, 16), array(3, 3, 8, 32)),
        [(2, 128, 16, 72)],
        2 * 128 * 32 * 72,
    ),
    Cost(
        "depthwise conv",
        lambda x, k: conv(x, k, feature_group_count=8),
        (array(2, 8, 8, 8), array(3, 3, 1, 8)),
        [(8, 128, 1, 9)],
        2 * 128 * 8 * 9,
    ),
]  # fmt: skip

JITTED = jax.jit(lambda x, w: x @ w)
SCAN3 = lambda x, w: lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0]  # noqa: E731
CUSTOM = jax.custom_vjp(lambda x, w: x @ w)
CUSTOM.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))


@pytest.mark.parametrize("case", COSTS, ids=repr)
def test_sizes_and_flops_are_the_analytic_ones(case):
    found = jmpp.audit(case.loss, *case.args)
    assert [(p.batch, p.m, p.n, p.k) for p in found.products] == case.sizes
    assert {p.times for p in found.products} == {case.times}
    assert not any(p.backward for p in found.products)
    assert found.flops == case.flops
    assert not found.uncounted

    # Each product has two gradients of the same cost; what is computed a second time counts again.
    both = jmpp.audit(lambda both: case.loss(*both), case.args, grad=True)
    assert both.flops == case.gradients * case.flops
    assert {p.times for p in both.products} == {case.times}
    assert sum(p.flops for p in both.products if not p.backward) == case.flops
    assert {(p.lhs, p.rhs) for p in both.products} == {("float16", "float16")}


def test_a_while_loop_is_counted_once_and_says_so():
    def loop(x, w):
        return lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ w, x)

    found = jmpp.audit(loop, BATCH, W)
    assert (found.flops, found.uncounted) == (DOT, True)
    assert "counted once" in str(found)
    inside_scan = jmpp.audit(
        lambda x, w: lax.scan(lambda c, _: (loop(c, w), None), x, None, length=3)[0], BATCH, W
    )
    assert (inside_scan.flops, inside_scan.uncounted) == (3 * DOT, True)
    beside = jmpp.audit(lambda x, w: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: 2 * c, x) @ w, BATCH, W)
    assert (beside.flops, beside.uncounted) == (DOT, False)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return jnp.sin(nn.Dense(16, use_bias=False)(x)), None


class Stack(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer) if self.remat else Layer
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return stack(name="layers")(x, None)[0]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_lifted_modules_keep_their_path(remat, policy):
    model = Stack(remat) if policy is None else jmpp.wrap(Stack(remat), policy)
    loss, variables, x = linen_loss(model, array(8, 16, dtype=F32))
    found = jmpp.audit(loss, variables, x, grad=True)
    assert {p.path for p in found.products} == {"Stack/layers/Dense_0"}
    assert {p.times for p in found.products} == {3}
    # The gradient in the input of the first layer is computed too: the scan's trips are alike.
    assert found.flops == 3 * DOT * (4 if remat else 3)


def promoted(x, b, w):
    with jax.named_scope("net"):
        x = x + b  # plant: promotion
        return jnp.tanh(x) @ w


def carried(x, b, w):
    def body(carry, _):
        wide, narrow = carry
        out = wide @ w
        wide = narrow + b  # plant: carried
        return (wide, out.astype(x.dtype)), None

    return lax.scan(body, (x.astype(F32), x), None, length=3)[0]


def through_calls(x, b, w):
    @jax.jit
    def add(x):
        return x + b  # plant: in jit

    return jax.checkpoint(lambda x: jnp.sin(x) @ w)(add(x))


def met_at_the_product(x, b, w):
    return x @ (w.astype(F32) * b[0])  # plant: mixed product


def in_a_branch(x, b, w):
    y = lax.cond(x[0, 0] > 0, lambda x: x * b, lambda x: 0 * b + 1.0 * x.astype(F32), x)  # plant: branch
    return y @ w


UPCASTS = [
    (promoted, "net", "promotion", 1),
    (carried, "", "carried", 1),
    (through_calls, "", "in jit", 1),
    (met_at_the_product, "", "mixed product", 1),
    (in_a_branch, "", "branch", 1),
]


@pytest.mark.parametrize(
    ("fn", "path", "marker", "reaches"), UPCASTS, ids=lambda v: getattr(v, "__name__", "")
)
@pytest.mark.parametrize("half", [F16, BF16])
def test_silent_upcasts_are_named_with_the_products_they_reach(fn, path, marker, reaches, half):
    found = jmpp.audit(fn, array(8, 16, dtype=half), array(16, dtype=F32), array(16, 16, dtype=half))
    (upcast,) = found.upcasts
    assert (upcast.path, upcast.line.partition(" ")[0]) == (path, here(marker))
    assert (upcast.narrow, upcast.wide, upcast.shape) == (jnp.dtype(half).name, "float32", (8, 16))
    assert len(upcast.reaches) == reaches
    assert [p.place for p in found.wide_products] == list(upcast.reaches)
    assert [p.cause for p in found.wide_products] == [upcast.place]
    assert upcast.place in str(found.to_dict())


EXPLICIT = {
    "astype": lambda x, b, w: x.astype(F32) @ w.astype(F32),
    "astype on the sum": lambda x, b, w: (x + b.astype(F16)) @ w,
    "lax": lambda x, b, w: lax.convert_element_type(x, F32) + b,
    "asarray": lambda x, b, w: jnp.asarray(x, F32) + b,
    "preferred_element_type": lambda x, b, w: jnp.dot(x, w, preferred_element_type=F32) + b,
    "python scalar": lambda x, b, w: (2.5 * x) @ w,
    "narrowed": lambda x, b, w: x + b.astype(x.dtype),
    "loss in float32": lambda x, b, w: squares(x @ w),
}


def test_the_verdict_has_one_sentence_for_equal_layers():
    weight = jnp.ones((16, 16))  # Never cast: in each layer it meets float16.

    def fn(x):
        for i in range(9):
            with jax.named_scope(f"layer_{i}"):
                x = (x @ weight).astype(jnp.float16)
        return x

    found = jmpp.audit(fn, jnp.ones((16, 16), jnp.float16))
    (line,) = {product.line.partition(" ")[0] for product in found.products}
    layers = f"layer_0 ... layer_8 ({line}) (9 x)"
    assert found.verdict.endswith(
        f"9 products in float32: {layers}, as half values met float32 in {layers}: cast to half there "
        "(NumPy numbers, as np.sqrt(2), by float)."
    )


@pytest.mark.parametrize("which", EXPLICIT)
def test_what_was_asked_for_is_no_silent_upcast(which):
    found = jmpp.audit(EXPLICIT[which], BATCH, array(16, dtype=F32), W)
    assert not found.upcasts
    # A cast that is written is named as the cause, where a product reads it.
    assert {p.cause for p in found.wide_products} == (
        {found.products[0].place} if which == "astype" else set()
    )


def with_noise(w, x):
    h = jax.nn.relu(x @ w)
    return (h + jax.random.normal(jax.random.key(0), h.shape)) @ w


def with_float32_operations(w, x):
    h = jax.nn.gelu(x @ w)
    h = h + jax.nn.softmax(h) @ w
    n = (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    h = h + n @ w + jnp.exp(h) * jnp.log1p(jnp.abs(h)) @ w
    h = h / jnp.linalg.norm(h, axis=-1, keepdims=True) + jax.nn.softmax(jnp.where(h > 0, h, -1e9))
    return h @ w, jax.nn.log_softmax(h), jnp.cumsum(h, 0), jnp.exp(h)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [with_noise, with_float32_operations])
def test_what_autocast_widens_is_no_silent_upcast(fn, grad):
    def loss(w, x):
        return sum(jnp.sum(out) for out in jax.tree.leaves(jmpp.autocast(fn, "bfloat16")(w, x)))

    found = jmpp.audit(jax.jit(loss), array(16, 16, dtype=F32), array(8, 16, dtype=F32), grad=grad)
    assert not found.upcasts
    assert found.half_share == 1


@pytest.mark.parametrize("name", ["normalization", "reductions", "model"])
def test_a_users_file_may_be_called_as_one_of_the_libraries_is(tmp_path, name):
    path = tmp_path / f"{name}.py"
    path.write_text("def promoted(x, b):\n    return x + b\n")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = jmpp.audit(module.promoted, array(8, 16), array(16, dtype=F32))
    assert [upcast.line for upcast in found.upcasts] == [f"{name}.py:2 (promoted)"]


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(dtype=F16), nn.BatchNorm(use_running_average=False, dtype=F16)]
)
def test_norms_and_sums_of_the_libraries_compute_in_float32_on_purpose(norm):
    def f(x):
        return norm.init_with_output(jax.random.key(0), x)[0].sum(dtype=F32), jnp.mean(x)

    assert not jmpp.audit(f, array(8, 16)).upcasts


def test_what_is_narrow_again_no_longer_reaches():
    found = jmpp.audit(lambda x, b, w: (x + b).astype(F16) @ w, BATCH, array(16, dtype=F32), W)
    (upcast,) = found.upcasts
    assert not upcast.reaches
    assert "no product" in str(found)
    assert found.half_share == 1


HALF = {
    "exp": lambda x: jnp.exp(x),
    "log": lambda x: jnp.log(x),
    "reduce_sum": lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
    "rsqrt": lambda x: lax.rsqrt(x),
}


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize("half", [F16, BF16])
def test_operations_still_in_half_are_listed(name, half):
    with_scope = jax.named_scope("part")(HALF[name])
    found = jmpp.audit(with_scope, array(8, 16, dtype=half))
    assert [(h.operation, h.dtype, h.path, h.backward, h.times) for h in found.half_operations] == [
        (name, jnp.dtype(half).name, "part", False, 1)
    ]
    assert found.half_operations[0].line.startswith("test_audit.py:")
    assert found.half_operations[0].why
    assert not jmpp.audit(with_scope, array(8, 16, dtype=F32)).half_operations


@pytest.mark.parametrize(
    "layer", [nnx.Linear, nnx.LinearGeneral, lambda n, m, rngs: nnx.Conv(n, m, (3,), rngs=rngs)]
)
def test_an_nnx_layer_under_a_rule_in_float32_is_no_silent_upcast(layer):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body, self.head = nnx.Linear(8, 8, rngs=rngs), layer(8, 8, rngs=rngs)

        def __call__(self, x):
            return self.head(self.body(x))

    def loss(model, x):
        return squares(model(x))

    rules = jmpp.PolicyMap("mixed_float16", {"head": "float32"})
    model = jmpp.wrap(Net(nnx.Rngs(0)), rules)
    found = jmpp.audit(loss, model, array(4, 16, 8))
    assert not found.upcasts
    assert "1 product in float32: Net/head (" in found.verdict
    assert "), cast to float32 there." in found.verdict


def test_a_softmax_in_half_is_listed():
    found = jmpp.audit(lambda x: jax.nn.softmax(x), BATCH)
    assert "exp" in {h.operation for h in found.half_operations}


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 4)])
def test_gradients_of_convolutions_take_the_flops_of_the_forward_pass(stride, dilation, groups, padding):
    def conv(params):
        return squares(
            lax.conv_general_dilated(
                *params, (stride, stride), padding, rhs_dilation=(dilation, dilation),
                feature_group_count=groups, dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        )  # fmt: skip

    args = array(2, 9, 11, 8), array(3, 3, 8 // groups, 16)
    forward, *backward = jmpp.audit(conv, args, grad=True).products
    assert [p.flops for p in backward] == [forward.flops] * 2
    if padding == "VALID":
        (product,) = jmpp.audit(lambda x, w: conv((x, w)), *args).products
        plain = [jax.ShapeDtypeStruct(a.shape, F32) for a in args]
        linear = lambda x, w: lax.conv_general_dilated(  # noqa: E731
            x, w, (stride, stride), padding, rhs_dilation=(dilation, dilation), feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        assert product.flops == jax.jit(linear).lower(*plain).cost_analysis()["flops"]


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_gradients_of_transposed_convolutions_take_the_flops_of_the_forward_pass(stride):
    def up(params):
        return squares(lax.conv_transpose(*params, (stride, stride), "SAME"))

    args = array(2, 8, 8, 16), array(stride, stride, 16, 8)
    products = jmpp.audit(up, args, grad=True).products
    assert [p.flops for p in products] == [2 * (2 * 8 * 8) * 16 * 8 * stride**2] * 3


class WithEpsilon:
    """An epsilon that the line which adds it does not show."""

    def __init__(self, epsilon):
        self.epsilon = epsilon

    def __call__(self, x):
        return x / (jnp.sqrt(jnp.square(x)) + self.epsilon)


BOOLS = np.arange(16) % 2 == 0
LOST = {
    "div": (lambda x: x / 100000, "/ 100000", "inf"),
    "mul": (lambda x: x * 1e-8, "* 1e-08", "0"),
    "add": (lambda x: jnp.log(x + 1e-8), "+ 1e-08", "0"),
    "add, left": (lambda x: 1e-8 + x, "1e-08", "0"),
    "add of an array": (lambda x: x + jnp.asarray(1e-8, x.dtype), "+ 1e-08", "0"),
    "of two lines": (lambda x: (x
        * 1e-9), "* 1e-09", "0"),
    "clip": (lambda x: jnp.clip(x, 1e-8, 1.0), "1e-08", "0"),
    "maximum": (lambda x: x / jnp.maximum(jnp.abs(x), 1e-8), "1e-08", "0"),
    "where": (lambda x: jnp.where(BOOLS, x, -1e9), "-1e+09", "-inf"),
    "product mask": (lambda x: x + (1 - (x > 0).astype(x.dtype)) * -1e9, "* -1000000000.0", "-inf"),
    "mask array": (lambda x: x + jnp.where(BOOLS, 0, -1e9).astype(x.dtype), "-1e+09", "-inf"),
    "of a library": (lambda x: jax.nn.standardize(x, epsilon=1e-8), "1e-08", "0"),
    "another name": (WithEpsilon(1e-8), "+ 1e-08", "0"),
}  # fmt: skip

KEPT = {
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
    "log_sigmoid": jax.nn.log_sigmoid,
    "a zero by another name": lambda x: jnp.sqrt(jnp.abs(x)) + x.dtype.type(0),
    "one": lambda x: (1.0 * x) / 1,
    "an infinite mask": lambda x: jnp.where(BOOLS, x, -jnp.inf),
    "largest": lambda x: jnp.max(x, initial=-jnp.inf),
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(jnp.where(BOOLS, x, -jnp.inf)),
    "relu": jax.nn.relu,
    "a bound": lambda x: jnp.clip(x, -1e9, 1e9),
    "a comparison": lambda x: x < 1e9,
    "finfo": lambda x: jnp.where(BOOLS, x, jnp.finfo(x.dtype).min),
    "zero": lambda x: (x + 0.0) * 0.0 + 0,
    "sum": lambda x: sum([x, x]),
    "variance": lambda x: x / jnp.sqrt(jnp.var(x) + 1e-5),
    "attention": lambda x: nn.SelfAttention(2, dtype=F16).init_with_output(jax.random.key(0), x)[0],
    "norm": lambda x: nn.LayerNorm(dtype=F16).init_with_output(jax.random.key(0), x)[0],
}


@pytest.mark.parametrize("name", LOST)
def test_constants_that_float16_makes_infinite_or_zero_are_listed_with_their_line(name):
    fn, written, becomes = LOST[name]
    (found,) = jmpp.audit(fn, BATCH).constants
    assert (found.written, found.becomes, found.dtype) == (written, becomes, "float16")
    assert found.line.startswith("test_audit.py:")
    report = jmpp.audit(fn, BATCH)
    assert found.text in report.verdict
    assert "Constants that half precision makes" in str(report)
    assert jmpp.audit(lambda x: fn(x).sum().astype(F32), BATCH, grad=True).constants == (found,)
    assert not jmpp.audit(fn, array(8, 16, dtype=F32)).constants
    assert not jmpp.audit(fn, array(8, 16, dtype=BF16)).constants


@pytest.mark.parametrize("name", KEPT)
def test_constants_that_are_meant_are_not_listed(name):
    assert not jmpp.audit(KEPT[name], BATCH).constants


class OwnEpsilon(nn.Module):
    epsilon: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        return x / (jnp.abs(x) + self.epsilon(x.dtype))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    "epsilon",
    [
        lambda dtype: 1e-3 if dtype == F16 else 1e-8,
        lambda dtype: jnp.finfo(dtype).eps,
        lambda dtype: jnp.finfo(dtype).tiny,
    ],
)
def test_an_epsilon_that_is_chosen_by_dtype_is_not_lost(epsilon, policy):
    model, x = OwnEpsilon(epsilon), array(4, 16, dtype=F32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    for fn in (jmpp.wrap(model, policy).apply, jmpp.autocast(model.apply, policy)):
        assert not jmpp.audit(fn, variables, x).constants


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_decay_that_becomes_one_is_listed(dtype):
    (found,) = jmpp.audit(lambda x: 0.9999 * x, array(8, dtype=dtype)).constants
    assert (found.written, found.becomes, found.dtype) == ("0.9999", "1", str(jnp.dtype(dtype)))
    assert not jmpp.audit(lambda x: 0.5 * x + 0.9999, array(8, dtype=dtype)).constants
    assert not jmpp.audit(lambda x: 0.9999 * x, array(8, dtype=F32)).constants


def test_limits_are_said_of_both_half_types_and_a_size_of_one_has_no_advice():
    def summed(x):
        return jax.lax.reduce_sum(x, (0,))

    for dtype in (F16, BF16):
        (found,) = jmpp.audit(summed, array(600, 8, dtype=dtype)).half_operations
        assert "2048 times a term in float16, 256 in bfloat16" in found.why
    verdict = jmpp.audit(jnp.matmul, array(512, 16, dtype=F16), array(16, 1, dtype=F16)).verdict
    assert "a size of 1, where padding does not help: " in verdict
    assert verdict.endswith(", n 1.")


EPSILON = 1e-7


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("bounded", "written"),
    [
        (lambda p: jnp.clip(p, 0.25, 1 - 1e-7), "0.9999999"),
        (lambda p: jnp.clip(p, EPSILON, 1.0 - EPSILON), "0.9999999"),
        (lambda p: jax.lax.clamp(p.dtype.type(0), p, p.dtype.type(0.99999)), "0.99999"),
        (lambda p: jnp.minimum(p, 0.99999), "0.99999"),
        (lambda p: jnp.clip(p, 0, 1), None),
        (lambda p: jnp.clip(p, 0, 0.99), None),
        (lambda p: jax.nn.hard_sigmoid(p), None),
    ],
)
def test_a_bound_that_becomes_one_is_listed(dtype, bounded, written):
    """Without it `log(1 - p)` is infinite where p is 1."""
    found = jmpp.audit(lambda p: jnp.log1p(-bounded(p).astype(F32)), array(8, dtype=dtype))
    assert [(c.written, c.becomes) for c in found.constants] == ([(written, "1")] if written else [])
    assert ("before jnp.clip" in str(found)) is bool(written)


def test_what_a_layer_does_in_a_loop_has_the_line_that_calls_the_layer():
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RNN(nn.GRUCell(8))(x)

    x = array(2, 4, 8, dtype=F32)
    params = jax.eval_shape(Recurrent().init, jax.random.key(0), x)
    model = jmpp.wrap(Recurrent(), "mixed_float16")
    found = jmpp.audit(lambda params, x: model.apply(params, x).mean(), params, x, grad=True)
    assert all("Recurrent.__call__" in p.line for p in found.products if not p.backward)
    assert not any("recurrent.py" in p.line for p in found.products)


BETA = 0.9999


def averaged(decay, x):
    """The exponential mean of rows."""
    return jax.lax.scan(lambda mean, row: (decay * mean + (1 - decay) * row, None), x[0], x)[0]


class Average(nn.Module):
    decay: float = 0.5

    @nn.compact
    def __call__(self, x):
        eps = 1e-9
        return BETA * averaged(self.decay, x) / jnp.sqrt(jnp.square(x).mean() + eps)


class NnxAverage(nnx.Module):
    def __init__(self):
        self.decay, self.w = 0.9999, nnx.Param(jnp.ones(8))

    def __call__(self, x):
        return averaged(self.decay, x) * self.w[...]


def test_a_number_with_any_name_is_found_by_a_trace_in_float32():
    model, x = jmpp.wrap(Average(0.9999), "mixed_float16"), array(2, 8, dtype=F32)
    found = jmpp.audit(lambda x: model.apply({}, x.astype(F16)), x).constants
    # The factor outside of the loop loses no more than a rounding does.
    assert [(c.written, c.becomes) for c in found] == [("0.9999", "1"), ("+ 1e-09", "0")]
    model = jmpp.wrap(NnxAverage(), "mixed_float16")
    kept = jmpp.audit(lambda model, x: model(x.astype(F16)), model, x).constants
    assert [c.written for c in kept] == ["0.9999"]
    params, rate = jnp.ones(8, F16), 1e-4
    moved = jmpp.drift(lambda old, new: (1 - rate) * old + rate * new, params, params)
    assert [c.written for c in moved.constants] == ["0.9999"]


def scaled_sum(a, b, decay):
    return a * decay + b * (1 - decay)


def test_numbers_of_a_line_that_runs_several_times_are_those_of_each_time():
    def step(half, mean, other):
        half = scaled_sum(half, 1.0, 1.0)  # Meant.
        mean = scaled_sum(mean, half.mean().astype(F32), 0.9999)  # In float32, and right.
        other = scaled_sum(scaled_sum(other, half, 0.9999), half, 0.99999)
        return half, mean, other

    half, wide = jnp.ones(4, F16), jnp.ones((), F32)
    found = jmpp.drift(step, half, wide, half)
    assert [c.written for c in found.constants] == ["* 0.9999", "* 0.99999"]


def test_a_result_of_another_structure_in_float32_is_no_error():
    def doubled(x):
        return {"a": 0.9999 * x, **({} if x.dtype == F16 else {"b": x})}

    x = jnp.ones(4, F16)
    assert [r.name for r in jmpp.drift(doubled, x).results] == ["result/a"]
    assert jmpp.diagnose(doubled, x).finite


def test_a_relu_needs_no_second_trace():
    traced = []

    def layer(x):
        traced.append(x.dtype)
        return jax.nn.relu(x) + jnp.where(x > 0, x, 0)

    jmpp.audit(layer, array(4, dtype=F16))
    assert len(traced) == 1


def test_a_zero_in_bfloat16_was_written_as_zero():
    # Adam's eps_root: no epsilon is so small that bfloat16 makes it zero.
    tx, w = optax.adam(1e-3), array(8, 8, dtype=BF16)
    assert not jmpp.audit(lambda g, s: tx.update(g, s), w, jax.eval_shape(tx.init, w)).constants


def test_the_zeros_of_a_derivative_are_looked_for_in_no_trace_in_float32():
    def traces(activation):
        model, traced = jmpp.wrap(nn.Dense(8), "params=float32,compute=float16"), []

        def loss_fn(params, x):
            traced.append(x)
            return activation(model.apply(params, x)).astype(F32).sum()

        jmpp.audit(loss_fn, model.init(jax.random.key(0), x), x, grad=True)
        return len(traced)

    x, config = jnp.ones((2, 8)), {"epsilon": 1e-9}
    assert traces(nn.relu) == traces(jnp.tanh) == traces(lambda h: jnp.minimum(h, 20.0)) == 1
    # Its number could be any, until the trace in float32 shows it.
    assert traces(lambda h: jnp.maximum(h, np.float16(config["epsilon"]))) == 2
    assert traces(lambda h: jnp.where(h == 0, np.float16(config["epsilon"]), h)) == 2


def test_a_sparse_float32_matrix_is_where_half_values_become_float32():
    class Graph(nn.Module):
        @nn.compact
        def __call__(self, edges, x):
            return nn.Dense(8)(edges @ nn.Dense(8)(x))  # plant: sparse

    edges = sparse.BCOO.fromdense(jnp.eye(16) + jnp.eye(16, k=1))
    model, x = jmpp.wrap(Graph(), "params=float32,compute=float16"), jnp.ones((16, 8))
    variables = model.init(jax.random.key(0), edges, x)

    def report(edges):
        return jmpp.audit(lambda v: model.apply(v, edges, x).astype(F32).sum(), variables, grad=True)

    found = report(edges)
    assert [upcast.line.split()[0] for upcast in found.upcasts] == [here("sparse")]
    assert any(found.upcasts[0].place == product.cause for product in found.products)
    assert found.opaque["bcoo_dot_general"] > 0
    half = report(sparse.BCOO((edges.data.astype(F16), edges.indices), shape=edges.shape))
    assert not half.upcasts
    assert half.half_share == 1


def test_constants_of_a_model_are_named_by_module():
    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.square(nn.Dense(4)(x)).sum() / 100000  # plant: constant

    model = jmpp.wrap(Mean(), "mixed_float16")
    variables = {"params": {"Dense_0": {"kernel": array(8, 4, dtype=F32), "bias": array(4, dtype=F32)}}}
    (found,) = jmpp.audit(model.apply, variables, array(2, 8, dtype=F32), grad=True).constants
    assert (found.path, found.written) == ("Mean", "/ 100000")
    assert found.place == f"Mean ({here('constant')})"


def test_a_constant_in_a_loop_and_one_that_is_given_to_a_function():
    def looped(x):
        scale = jax.jit(lambda x, epsilon: x + epsilon)
        return lax.scan(lambda c, _: (scale(c, 1e-9), None), x, None, length=3)[0]

    found = jmpp.audit(looped, BATCH).constants
    assert [c.becomes for c in found] == ["0"]


def serial_sums(fn, *args, **kwargs):
    found = jmpp.audit(fn, *args, **kwargs)
    return [(h.operation, h.terms) for h in found.half_operations if "one after another" in h.why]


def embedding(policy, tokens=(8, 1024)):
    model = jmpp.wrap(nn.Embed(16, 4), policy)
    tokens = array(*tokens, dtype=jnp.int32)
    variables = {"params": {"embedding": array(16, 4, dtype=F32)}}
    return lambda v, t: model.apply(v, t).astype(F32).sum(), variables, tokens


@pytest.mark.slow
def test_the_gradient_of_an_embedding_is_a_sum_in_half_that_float32_gradients_repair():
    found = jmpp.audit(*embedding("mixed_float16"), grad=True)
    (row,) = [h for h in found.half_operations if h.operation.startswith("scatter")]
    assert (row.terms, row.backward, row.dtype) == (8192, True, "float16")
    assert "g=f32" in row.why
    assert "up to 8192 terms one after another" in found.verdict
    assert "8192" in str(found)
    assert not serial_sums(*embedding("p=f32,c=f16,o=f32,g=f32"), grad=True)
    assert not serial_sums(*embedding("mixed_float16", (1, 8)), grad=True)

    loss, _, _ = embedding("mixed_float16")
    repaired, _, _ = embedding("p=f32,c=f16,o=f32,g=f32")
    tokens, variables = jnp.zeros((8, 1024), jnp.int32), {"params": {"embedding": jnp.ones((16, 4))}}
    sums = [
        jax.grad(lambda v, f=f: 0.1 * f(v, tokens))(variables)["params"]["embedding"]
        for f in (loss, repaired)
    ]
    assert sums[0][0, 0] < 0.9 * 819.2
    np.testing.assert_allclose(sums[1][0], 819.2, rtol=1e-3)


LONG = array(8192)
INDICES = array(8192, dtype=jnp.int32)
SERIAL = {
    "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 4), (LONG, INDICES), 8192),
    "batched": (
        jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, 4)),
        (array(4, 200), array(4, 200, dtype=jnp.int32)),
        200,
    ),
    "scan": (lambda x: lax.scan(lambda c, y: (c + y, None), x[0], x)[0], (LONG,), 8192),
    "fori_loop": (lambda x: lax.fori_loop(0, 300, lambda i, c: c + x[i], x[0]), (LONG,), 300),
    "while": (
        lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] + x[c[0]]), (0, x[0])),
        (LONG,),
        0,
    ),
}
NOT_SERIAL = {
    "few terms": (lambda x, i: jnp.zeros(4, F16).at[i].add(x), (array(128), array(128, dtype=jnp.int32))),
    "one per row": (
        lambda x, i: x.at[jnp.arange(512), i].add(1.0),
        (array(512, 64), array(512, dtype=jnp.int32)),
    ),
    "take_along_axis": (
        jax.grad(lambda x, i: jnp.take_along_axis(x, i[:, None], 1).sum().astype(F32)),
        (array(512, 64), array(512, dtype=jnp.int32)),
    ),
    "unique": (lambda x, i: jnp.zeros(9000, F16).at[i].add(x, unique_indices=True), (LONG, INDICES)),
    "float32": (lambda x, i: jax.ops.segment_sum(x.astype(F32), i, 4), (LONG, INDICES)),
    "float32 carry": (lambda x: lax.scan(lambda c, y: (c + y, None), jnp.float32(0), x)[0], (LONG,)),
    "residual stream": (
        lambda x: lax.scan(lambda c, _: (c + jnp.tanh(c), None), x, None, length=48)[0],
        (LONG,),
    ),
    "short scan": (lambda x: lax.scan(lambda c, y: (c + y, None), x[0], x)[0], (array(128),)),
}


@pytest.mark.parametrize("name", SERIAL)
def test_sums_that_add_one_term_after_another_are_listed(name):
    fn, args, terms = SERIAL[name]
    (found,) = serial_sums(fn, *args)
    assert found[1] == terms


@pytest.mark.parametrize("name", NOT_SERIAL)
def test_other_sums_are_not(name):
    fn, args = NOT_SERIAL[name]
    assert not serial_sums(fn, *args)


def test_sums_over_axes_say_how_many_terms():
    found = jmpp.audit(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), array(8, 16))
    assert [h.terms for h in found.half_operations] == [8]
    assert [h.terms for h in jmpp.audit(lambda x: lax.cumsum(x), array(100)).half_operations] == [100]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.RNN(nn.LSTMCell(8))(x).mean()


@pytest.mark.slow
def test_the_float32_carry_of_a_recurrent_cell_is_no_silent_upcast():
    model = jmpp.wrap(Recurrent(), "mixed_float16")
    x = array(2, 20, 8, dtype=F32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = jmpp.audit(lambda v, x: model.apply(v, x).astype(F32), variables, x, grad=True)
    assert not found.upcasts
    assert found.half_share == 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_float32_softmax_of_attention_is_no_silent_upcast(policy):
    x = array(4, 16, 32, dtype=F32)
    linen = jmpp.wrap(nn.MultiHeadDotProductAttention(num_heads=2), policy)
    variables = jax.eval_shape(linen.init, jax.random.key(0), x)
    attention = nnx.MultiHeadAttention(2, 32, 32, decode=False, rngs=nnx.Rngs(0))
    for found in (
        jmpp.audit(linen.apply, variables, x),
        jmpp.audit(jmpp.wrap(attention, policy), x),
        jmpp.audit(jmpp.autocast(lambda q: jax.nn.dot_product_attention(q, q, q), policy), array(2, 8, 2, 8)),
    ):
        assert not found.upcasts
        assert found.half_share == 1


class AttentionBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x)


class OneBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return AttentionBlock(name="block_0")(x)


def test_names_are_whole_and_nothing_is_cut_off_in_100_columns():
    x = array(4, 12, 32, dtype=F32)
    model = jmpp.wrap(OneBlock(), "mixed_float16")
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = jmpp.audit(lambda v, x: model.apply(v, x).sum(), variables, x, grad=True)
    assert all(len(line) <= 100 for line in str(found).splitlines())
    text = found.table(full=True)
    lines = [line for line in text.splitlines() if line.strip().startswith("attention")]
    assert len(lines) == 15
    assert "  OneBlock/block_0/  test_audit.py:" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    words = " ".join(text.split())
    assert "m 12 to 16, n 12 to 16" in words
    # Four rows, and one line that says why.
    assert words.count("reduce_sum") == 5
    assert "|" not in text


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(16):
            x = nn.MultiHeadDotProductAttention(2, name=f"h_{i}")(x)
        return nn.Dense(8, name="head")(x)


@pytest.mark.once
def test_equal_layers_are_one_row_and_every_row_is_there_when_asked_for():
    x = array(4, 16, 32, dtype=F32)
    model = jmpp.wrap(Deep(), "mixed_float16")
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = jmpp.audit(lambda v, x: model.apply(v, x).sum(), variables, x, grad=True)
    text = str(found)
    assert len(text.splitlines()) <= 40
    assert "Deep/h_0 ... h_15/query (16 x)" in text
    assert "Deep/head" in text
    whole = found.table(full=True)
    assert all(f"Deep/h_{i}/query" in whole for i in range(16))
    assert "..." not in whole
    html = found._repr_html_()
    assert "<summary>Deep/h_0 ... h_15/query (16 x)</summary><table>" in html
    assert html.count('<td style="text-align:left">Deep/h_7/query</td>') > 3
    shown = str(jmpp.summary(Deep(), "mixed_float16", x))
    assert len(shown.splitlines()) <= 40
    # The first one takes float32 inputs, the others half ones.
    assert "h_1 ... h_15/ DenseGeneral" in " ".join(shown.split())
    assert shown.count("(15 x)") == 4


def test_rows_of_other_layers_stay_apart():
    columns = ("module", "line", "largest ")
    rows = [("Net/Dense_0", "a.py:1", "1 k"), ("Net/Dense_1", "a.py:2", "2"), ("Net/Dense_2", "a.py:3", "3")]
    assert folded(columns, rows) == rows
    rows = [(f"Net/layer_{i}/{part}", "a.py:1", f"{i}.5 %") for i in range(12) for part in ("mlp", "attn")]
    assert [list(row) for row in folded(columns, [("Net", "a.py:9", 1), *rows])] == [
        ["Net", "a.py:9", 1],
        ["Net/layer_0 ... layer_11/mlp (12 x)", "a.py:1", "0.5 ... 11.5 %"],
        ["Net/layer_0 ... layer_11/attn (12 x)", "a.py:1", "0.5 ... 11.5 %"],
    ]
    assert folded(columns, rows[:4]) == rows[:4]
    assert folded(columns, []) == []


class Vocabulary(nn.Module):
    """A head whose vocabulary no Tensor Core likes."""

    dtype: object = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, dtype=self.dtype)(x)
        return nn.Dense(1001, dtype=self.dtype, name="head")(x)  # plant: linen vocabulary


class NnxVocabulary(nnx.Module):
    def __init__(self, *, rngs, dtype=None):
        self.body = nnx.Linear(8, 16, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(16, 1001, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))  # plant: nnx vocabulary


def plain_vocabulary():
    def loss(params, x):
        x = x @ params["body"]
        with jax.named_scope("head"):
            return squares(x @ params["head"])  # plant: plain vocabulary

    return loss, {"body": array(8, 16), "head": array(16, 1001)}, array(8, 8)


VOCABULARIES = {
    "linen bare": (lambda: linen_loss(Vocabulary(F16), X), "Vocabulary/head", "linen"),
    "linen wrapped": (
        lambda: linen_loss(jmpp.wrap(Vocabulary(), "mixed_float16"), X), "Vocabulary/head", "linen",
    ),
    "nnx bare": (
        lambda: nnx_loss(NnxVocabulary(rngs=nnx.Rngs(0), dtype=F16), X), "NnxVocabulary/head", "nnx",
    ),
    "nnx wrapped": (
        lambda: nnx_loss(jmpp.wrap(NnxVocabulary(rngs=nnx.Rngs(0)), "mixed_float16"), X),
        "NnxVocabulary/head",
        "nnx",
    ),
    "plain": (plain_vocabulary, "head", "plain"),
}  # fmt: skip


@pytest.mark.parametrize("which", VOCABULARIES)
def test_an_unaligned_vocabulary_is_named_with_what_to_pad_to(which):
    make, path, marker = VOCABULARIES[which]
    found = jmpp.audit(*make(), grad=True)
    unaligned = [p for p in found.products if not p.is_aligned]
    assert len(unaligned) == 3
    place = f"{path} ({here(marker + ' vocabulary')})"
    assert {p.place for p in unaligned} == {place}
    assert {p.pad.partition(" ")[2] for p in unaligned} == {"1001 to 1008"}
    assert f"on shapes to pad: {place}, n 1001 to 1008" in found.verdict
    share = sum(p.flops for p in unaligned) / found.flops
    assert found.tensor_core_share == pytest.approx(1 - share)
    assert found.half_share == pytest.approx(1)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(F16, "n 20 to 24, k 12 to 16"), (F32, ""), (jnp.float8_e4m3fn, "m 8 to 16, n 20 to 32, k 12 to 16")],
)
def test_alignment_is_of_16_bytes(dtype, pad):
    found = jmpp.audit(lambda x, w: lax.dot(x, w), array(8, 12, dtype=dtype), array(12, 20, dtype=dtype))
    assert found.products[0].pad == pad


def test_a_convolution_is_padded_by_its_channels_in_both_passes():
    args = array(3, 8, 8, 3), array(3, 3, 3, 20)  # A batch of 3 needs no padding.
    found = jmpp.audit(lambda both: conv(*both), args, grad=True)
    assert [p.pad for p in found.products] == [
        "input channels 3 to 8, output channels 20 to 24",
        "input channels 3 to 8, output channels 20 to 24",
        "input channels 20 to 24, output channels 3 to 8",
    ]
    aligned = array(3, 8, 8, 8), array(3, 3, 8, 16)
    assert jmpp.audit(lambda both: conv(*both), aligned, grad=True).tensor_core_share == 1


def test_the_verdict_adds_up():
    def mixed(x, w, wide, odd):
        return x @ w, x.astype(F32) @ wide, x @ odd, (x.astype(BF16) @ w.astype(BF16))

    found = jmpp.audit(mixed, BATCH, W, array(16, 48, dtype=F32), array(16, 9))
    total = 16 + 48 + 9 + 16
    assert [p.share for p in found.products] == pytest.approx([16 / total, 48 / total, 9 / total, 16 / total])
    assert found.tensor_core_share == pytest.approx(32 / total)
    assert found.half_share == pytest.approx(41 / total)
    share = f"{100 * 16 / total:.3g} %"
    assert found.verdict.startswith(
        f"{share} of FLOPs in float16 and {share} of FLOPs in bfloat16 on Tensor-Core"
    )
    assert f"{100 * 9 / total:.3g} % in half precision on shapes to pad" in found.verdict
    assert "1 product in float32: test_audit.py:" in found.verdict
    assert "\n" not in found.verdict


def test_without_products():
    found = jmpp.audit(lambda x: x + 1, BATCH)
    assert found.verdict == "<lambda> has no matrix products or convolutions."
    assert math.isnan(found.half_share)
    assert math.isnan(found.tensor_core_share)
    assert str(found).endswith(found.verdict)
    empty = jmpp.audit(jnp.dot, array(0, 16), W)
    assert (empty.flops, empty.products[0].share) == (0, 0.0)
    assert str(empty)


def report():
    def step(params, x, b):
        y = (x + b) @ params["w"].astype(F16) + x @ params["w"].astype(F16)
        return squares(jnp.exp(y.astype(F16)))

    return jmpp.audit(step, {"w": array(16, 9, dtype=F32)}, BATCH, array(16, dtype=F32), grad=True)


def test_a_report_is_read_as_text_html_and_data():
    found = report()
    assert all((found.products, found.upcasts, found.half_operations))
    text = " ".join(str(found).split())
    assert text.endswith(found.verdict)
    for title in ("Products of step", "Silent upcasts", "Still in half precision"):
        assert title in text
        assert title in found._repr_html_()
    assert found.verdict in found._repr_html_().replace("&gt;", ">").replace("&lt;", "<")
    data = json.loads(json.dumps(found.to_dict()))
    assert [row["m"] for row in data["products"]] == [p.m for p in found.products]
    assert data["flops"] == found.flops


def test_products_as_a_data_frame():
    pytest.importorskip("pandas")
    found = report()
    frame = found.to_pandas()
    assert list(frame["flops"]) == [p.flops for p in found.products]
    assert "place" not in frame


def test_nothing_runs_and_nothing_is_changed():
    def refuse(x):
        raise AssertionError("ran")

    def loss(w, x):
        y = jax.pure_callback(refuse, jax.ShapeDtypeStruct((8, 16), F16), x)
        return squares(y @ w)

    found = jmpp.audit(loss, W, BATCH)
    assert found.opaque == {"pure_callback": 1}
    assert "Not looked into: pure_callback (1)" in str(found)

    model = NnxNet(rngs=nnx.Rngs(0), dtype=F16)
    before = [type(m) for _, m in nnx.iter_modules(model)]
    jmpp.audit(*nnx_loss(model, X), grad=True)
    assert [type(m) for _, m in nnx.iter_modules(model)] == before
    assert all(not isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("struct", [False, True])
def test_arguments_may_be_arrays_shapes_keywords_and_static(struct):
    make = array if struct else lambda *shape: np.ones(shape, np.float16)

    def fn(x, mode, *, w, twice=False):
        assert mode == "go"
        return (x @ w) @ w if twice else x @ w

    assert len(jmpp.audit(fn, make(8, 16), "go", w=make(16, 16)).products) == 1
    assert len(jmpp.audit(fn, make(8, 16), "go", w=make(16, 16), twice=True).products) == 2


def without_causes(found):
    return [dataclasses.replace(p, cause="") for p in found.products]


def test_a_step_that_differentiates_itself_is_audited_alike():
    loss, variables, x = linen_loss(jmpp.wrap(LinenNet(), "mixed_float16"), X)
    outer = jmpp.audit(loss, variables, x, grad=True)
    inner = jmpp.audit(jax.value_and_grad(loss), variables, x)
    jitted = jmpp.audit(jax.jit(jax.value_and_grad(loss)), variables, x)
    for found in (inner, jitted):
        # A cast in a function that differentiates itself looks like one of its backward pass.
        assert without_causes(found) == without_causes(outer)

    model = jmpp.wrap(NnxNet(rngs=nnx.Rngs(0)), "mixed_float16")
    outer = jmpp.audit(*nnx_loss(model, X), grad=True)
    inner = jmpp.audit(lambda m, x: nnx.value_and_grad(lambda m: squares(m(x)))(m), model, X)
    shown = [[(p.path, p.m, p.n, p.k, p.lhs, p.backward) for p in f.products] for f in (outer, inner)]
    assert shown[0] == shown[1]


def test_an_nnx_module_itself():
    model = NnxNet(rngs=nnx.Rngs(0), dtype=F16)
    found = jmpp.audit(model, X)
    assert [p.path for p in found.products] == [
        "NnxNet/block/up",
        "NnxNet/block",
        "NnxNet/block/down",
        "NnxNet/head",
    ]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda: jmpp.audit(jnp.ones(3)),
            "audit takes a function and its arguments, got Array.*call it already",
        ),
        (lambda: jmpp.audit(nn.Dense, BATCH), "audit takes a function and its arguments, got <class"),
        (lambda: jmpp.audit(nn.Dense(3), BATCH), "a Linen module keeps no parameters.*model.apply"),
        (
            lambda: jmpp.audit(lambda w: w @ w, W, grad=True),
            r"grad=True\) needs a loss, a function that returns a scalar.*<lambda> returns \(16, 16\)",
        ),
    ],
    ids=["an array", "a class", "a Linen module", "no loss"],
)
def test_what_is_no_function_is_refused(call, match):
    with pytest.raises(TypeError, match=match):
        call()


def test_products_of_every_platform_are_listed():
    def f(w, x):
        half = lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)  # noqa: E731
        return jax.lax.platform_dependent(x, w, cuda=half, default=lambda x, w: x @ w)

    found = jmpp.audit(f, jnp.ones((3, 2)), jnp.ones((4, 3)))
    assert sorted(p.lhs for p in found.products) == ["float16", "float32"]


def test_products_of_few_terms_say_why_they_are_float32():
    def function(x, w):
        return jnp.tanh(x @ w) @ jnp.ones((16, 16))

    found = jmpp.audit(jmpp.autocast(function, "bfloat16"), jnp.ones((8, 3)), jnp.ones((3, 16)))
    assert [p.lhs for p in found.products] == ["float32", "bfloat16"]
    assert "1 product in float32 of fewer than 8 terms, where half precision gains nothing" in found.verdict


def test_gradients_of_products_of_few_terms_say_so():
    model, x = jmpp.wrap(nn.Dense(32), "mixed_float16"), jnp.ones((32, 6))
    params = model.init(jax.random.key(0), x)
    found = jmpp.audit(lambda params: model.apply(params, x).sum(), params, grad=True)
    assert [(p.lhs, p.backward) for p in found.products] == [("float32", False), ("float32", True)]
    assert "; 1 product in float32 for gradients of such products: Dense" in found.verdict
    assert "never half" not in found.verdict


@pytest.mark.slow
def test_gradients_of_products_of_few_half_features_say_so():
    """Half values meet float32 there, and there is nothing to cast."""

    class Coupling(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(32, name="small")(nn.gelu(nn.Dense(32, name="body")(x))[:, :4])

    model, x = jmpp.wrap(Coupling(), "mixed_float16"), jnp.ones((32, 16))
    params = model.init(jax.random.key(0), x)
    found = jmpp.audit(lambda params: model.apply(params, x).sum(), params, grad=True)
    assert "2 products in float32 for gradients of such products: Coupling/small" in found.verdict
    assert "cast to half" not in found.verdict


def test_equal_names_around_remat_are_two_scopes():
    def function(w):
        with jax.named_scope("block"), jax.named_scope("block"):
            return jnp.sum(jax.checkpoint(lambda w: jnp.tanh(w @ w))(w))

    assert [p.path for p in jmpp.audit(function, W).products] == ["block/block"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_what_remat_computes_again_has_the_path_of_its_module(kind):
    class Part(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(16, name="inner")(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(16, name="out")(nn.remat(Part)(name="part")(x))

    class NnxNet(nnx.Module):
        def __init__(self, rngs):
            self.part, self.out = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.remat(lambda part, x: jnp.tanh(part(x)))(self.part, x))

    x = jnp.ones((8, 16))
    if kind == "linen":
        model = jmpp.wrap(Net(), "mixed_float16")
        params = model.init(jax.random.key(0), x)
        found = jmpp.audit(lambda params: jnp.square(model.apply(params, x)).sum(), params, grad=True)
        assert {p.path for p in found.products} == {"Net/part/inner", "Net/out"}
    else:
        model = jmpp.wrap(NnxNet(nnx.Rngs(0)), "mixed_float16")
        found = jmpp.audit(lambda model: jnp.square(model(x)).sum(), model, grad=True)
        assert {p.path for p in found.products} == {"NnxNet/part", "NnxNet/out"}


def test_noise_in_float32_is_named_with_a_repair_that_mends():
    def noisy(w, x, dtype=None):
        h = x @ w
        h = h + jax.random.normal(jax.random.key(0), h.shape, dtype or h.dtype)  # plant: float32 noise
        return jax.nn.relu(h)

    w, x = array(16, 16, dtype=BF16), array(8, 16, dtype=BF16)
    found = jmpp.audit(lambda w, x: noisy(w, x, F32), w, x)
    assert [u.line.partition(" ")[0] for u in found.upcasts] == [here("float32 noise")]
    assert "for noise `jax.random.normal(key, x.shape).astype(x.dtype)`" in " ".join(str(found).split())
    assert not jmpp.audit(noisy, w, x).upcasts


class SharedCell(nnx.Module):
    def __init__(self, rngs):
        self.cell = nnx.SimpleCell(8, 8, rngs=rngs)
        self.rnn = nnx.RNN(self.cell)

    def __call__(self, x):
        return self.rnn(x)


def test_a_shared_module_has_the_path_of_the_call():
    found = jmpp.audit(jmpp.wrap(SharedCell(nnx.Rngs(0)), "mixed_float16"), array(2, 5, 8, dtype=F32))
    assert {p.path for p in found.products} == {"SharedCell/rnn/cell/dense_i", "SharedCell/rnn/cell/dense_h"}


def test_a_loop_that_sums_gradients_names_the_policy():
    class Flow(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
            return jax.lax.scan(lambda y, _: (y + jnp.tanh(y @ kernel), None), x, None, 200)[0]

    x, policies = jnp.ones((4, 8)), ("mixed_float16", "p=f32,c=f16,o=f32,g=f32")
    params = Flow().init(jax.random.key(0), x)

    def repairs(policy):
        found = jmpp.audit(lambda p: jmpp.wrap(Flow(), policy).apply(p, x).sum(), params, grad=True)
        return [h.why for h in found.half_operations if h.operation == "scan"]

    summed, repaired = map(repairs, policies)
    assert [why.partition(": ")[2] for why in summed] == [
        "g=f32 in the policy (for an activation: a cast to float32 before it is read) makes it a float32 sum"
    ]
    assert not repaired


def test_a_scan_that_sums_from_its_first_half_element_is_listed():
    def function(w, x):
        h = x @ w
        return jax.lax.scan(lambda c, row: (c + row, None), h[0], h[1:])[0] @ w

    found = jmpp.audit(jmpp.autocast(function, "bfloat16"), jnp.eye(8), jnp.ones((1000, 8)))
    assert [(row.operation, row.terms) for row in found.half_operations] == [("scan", 999)]


# Integers of numbers that were rounded.


class Rows(nn.Module):
    """Looks up rows by the last column of its input, which is as long as a parameter's axis."""

    cast: str = "float32"

    @nn.compact
    def __call__(self, x):
        table = self.param("table", nn.initializers.normal(1.0), (5000, x.shape[1]))
        ids = jnp.floor(x.astype(self.cast)[:, -1]).astype(jnp.int32)
        return x[:, :1] + jnp.take(table, ids, 0)


@pytest.mark.parametrize(
    ("model", "is_found"),
    [
        (jmpp.wrap(Rows(), "mixed_float16"), True),
        (jmpp.wrap(Rows(), "float32"), False),
        (Rows("bfloat16"), True),
        (Rows(), False),
    ],
)
def test_integers_of_rounded_arguments_are_named(model, is_found):
    x = jnp.full((3, 16), 2049.0)
    variables = Rows().init(jax.random.key(0), x)
    found = jmpp.audit(lambda variables, x: model.apply(variables, x), variables, x)
    named = [h for h in found.half_operations if h.operation == "convert_element_type"]
    assert len(named) == is_found
    if is_found:
        assert "makes integers of 'x' after it was rounded" in found.verdict
        assert named[0].path == "Rows"


@pytest.mark.parametrize(("dtype", "most"), [(F16, 2048), (BF16, 256)])
def test_integers_made_of_half_values_are_named(dtype, most):
    def look_up(table, w, x):
        place = (x.astype(dtype) @ w)[:, 0]
        return table[jnp.round(place).astype(jnp.int32)] + jnp.round(place).astype(jnp.int8)

    found = jmpp.audit(look_up, jnp.ones(9), jnp.ones((16, 1), dtype), jnp.ones((4, 16)))
    (named,) = (h for h in found.half_operations if h.operation == "convert_element_type")
    assert named.why == f"makes integers of numbers that are whole up to {most}: compute them in float32"


def test_a_sum_of_one_term_is_none():
    """Keys of one head, as of multi-query attention, are summed over an axis of size 1."""

    def scores(query, key):
        return jnp.einsum("bthd,bskd->bhts", query, key)

    query = jnp.ones((2, 8, 4, 16), F16)
    assert jmpp.audit(scores, query, query[:, :, :1]).half_operations == ()
    (found,) = jmpp.audit(scores, query, query[:, :, :2]).half_operations
    assert (found.operation, found.terms) == ("reduce_sum", 2)


def test_a_product_of_integers_and_float32_is_one_in_float32():
    found = jmpp.audit(lambda a, b: jnp.einsum("m,d->md", a, b), jnp.arange(4), jnp.ones(8))
    assert "1 product in float32 of fewer than 8 terms" in found.verdict


@pytest.mark.slow
@pytest.mark.parametrize("grad", [False, True])
def test_what_autocast_leaves_is_no_fault_of_a_cast_before_it(grad):
    def function(w, x):
        h = jnp.tanh(x @ w)
        with jmpp.region("off"):
            h = jnp.tanh(h @ w)
        return (h @ w).mean()

    found = jmpp.audit(jmpp.autocast(function, "float16"), jnp.ones((16, 16)), jnp.ones((8, 16)), grad=grad)
    assert {p.cause for p in found.wide_products} == {"autocast"}
    assert ", which autocast leaves: in region('off'), by rules=" in found.verdict


@pytest.mark.slow
def test_products_of_an_optimizer_are_the_optimizers():
    model, x, tx = jmpp.wrap(nn.Dense(16), "mixed_float16"), jnp.ones((8, 16)), optax.contrib.muon(0.1)
    params = model.init(jax.random.key(0), x)

    def step(params, state, x):
        grads = jax.grad(lambda params: model.apply(params, x).sum())(params)
        return tx.update(grads, state, params)

    found = jmpp.audit(step, params, tx.init(params), x)
    assert {p.cause for p in found.wide_products} == {"optax"}
    assert "in optax, which computes in float32" in found.verdict


def test_products_that_an_optimizer_calls_are_the_models():
    model, x = nn.Dense(16), jnp.ones((8, 16))
    params = model.init(jax.random.key(0), x)
    tx = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True)
    gradient = jax.grad(lambda params: model.apply(params, x).sum())

    def step(params, state):
        return tx.update(gradient(params), state, params, grad_fn=lambda params, _: gradient(params))

    found = jmpp.audit(step, params, tx.init(params))
    assert {p.cause for p in found.wide_products} == {""}
    assert "whose operands were never half: wrap the module" in found.verdict


def test_half_types_that_do_not_meet_are_not_said_to():
    def function(x, w):
        one = (x.astype(jnp.float16) * w) @ w
        return one + (x.astype(jnp.bfloat16) * jnp.sin(w)) @ w

    verdict = jmpp.audit(function, jnp.ones((16, 16)), jnp.ones((16, 16))).verdict
    assert "as half values met float32 in test_audit.py" in verdict
    assert "cast to half there" in verdict


def test_a_precision_that_is_asked_for_without_autocast_is_no_cause():
    found = jmpp.audit(
        lambda x, w: jnp.dot(x, w, precision="highest"), jnp.ones((16, 16)), jnp.ones((16, 16))
    )
    assert "autocast leaves" not in found.verdict
    assert "wrap the module" in found.verdict


def test_two_half_types_that_meet_are_both_named():
    def function(x, w):
        h = x.astype(jnp.float16) @ w.astype(jnp.float16)
        return jnp.tanh(h * w.astype(jnp.bfloat16)) @ w

    found = jmpp.audit(function, jnp.ones((16, 16)), jnp.ones((16, 16)))
    assert "as bfloat16 met float16 in test_audit.py" in found.verdict
    assert "cast to one of them there" in found.verdict


def test_integers_of_computed_half_values_are_no_finding():
    """A quantised activation was meant to be rounded, and so was an argument that came in half."""

    def quantised(w, x, y):
        h = jnp.tanh(x.astype(jnp.float16) @ w.astype(jnp.float16))
        return (h * 127).astype(jnp.int8), y.astype(jnp.int32)

    found = jmpp.audit(quantised, jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8, jnp.float16))
    assert not [h for h in found.half_operations if h.operation == "convert_element_type"]


def test_why_a_product_is_not_half_fits_the_program():
    x, w = jnp.ones((16, 16)), jnp.ones((16, 16))
    assert "wrap the module, or autocast the function" in jmpp.audit(jnp.dot, x, w).verdict
    partly = jmpp.audit(
        lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16)).sum() + (x @ w).sum(), x, w
    )
    assert "never half: by a rule, in a norm (a float32 island), in a module without para" in partly.verdict
    assert jmpp.audit(jnp.dot, x + 1j, w + 1j).verdict.endswith("and no complex dtype is half.")
    exact = functools.partial(jnp.matmul, precision="highest")
    asked = jmpp.audit(jmpp.autocast(lambda x, w: exact(x, w).sum() + (x @ w).sum(), "float16"), x, w)
    assert "autocast leaves what asks for precision=HIGHEST" in asked.verdict
    assert sorted(product.precision for product in asked.products) == ["", "HIGHEST"]


def test_a_product_that_asks_for_precision_is_not_said_to_be_float32_for_its_operands():
    def loss(w, x):
        h = x * jax.nn.sigmoid(x @ w) * 2  # In float32, of half values.
        return jnp.mean(jnp.matmul(h, w, precision="highest") ** 2)

    found = jmpp.audit(jmpp.autocast(loss, "float16"), jnp.ones((16, 16)) / 4, jnp.ones((16, 16)), grad=True)
    assert "autocast leaves what asks for precision=HIGHEST" in found.verdict
    assert "cast to" not in found.verdict


@pytest.mark.parametrize("kind", ["vmap", "scan", "scan over axis 1"])
def test_a_bias_of_mapped_or_scanned_layers_is_no_silent_upcast_under_autocast(kind):
    def layer(h, params):
        w, b = params
        return h + jax.nn.gelu(h @ w + b) @ w.T, None

    def loss(params, x):
        if kind == "scan over axis 1":  # As T5X and MaxText stack the parameters of layers.
            params = jax.tree.map(lambda p: jnp.moveaxis(p, 1, 0), params)
        if kind != "vmap":
            return jnp.square(jax.lax.scan(jax.checkpoint(layer), x, params)[0]).mean()
        first = jax.tree.map(lambda p: p[0], params)  # As Equinox's layers, which take one example.
        return jnp.square(jax.vmap(jax.vmap(lambda x: layer(x, first)[0]))(x[None])).mean()

    params = jnp.ones((2, 16, 32)) / 4, jnp.zeros((2, 32))
    if kind == "scan over axis 1":
        params = jax.tree.map(lambda p: jnp.moveaxis(p, 0, 1), params)
    found = jmpp.audit(jmpp.autocast(loss, "fp16"), params, jnp.ones((8, 16)), grad=True)
    assert found.half_share == 1.0
    assert not found.upcasts


def test_backward_products_under_autocast_have_the_path_of_their_module_once():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10, name="head")(nn.tanh(nn.Dense(16, name="inject")(x)))

    x = jnp.ones((16, 16))
    params = Net().init(jax.random.key(0), x)

    def loss(params, x):
        logits = Net().apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(16) % 10).mean()

    found = jmpp.audit(jmpp.autocast(loss, "fp16"), params, x, grad=True)
    assert {p.path for p in found.products} == {"Net/inject", "Net/head"}


def test_a_sum_over_rows_that_were_read_names_what_mends_it():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, sources, ids):
            hidden = nn.Dense(16)(x)
            return (hidden[sources] + nn.Embed(64, 16)(ids)).sum()

    x, sources, ids = jnp.ones((65, 16)), jnp.zeros(500, jnp.int32), jnp.zeros(500, jnp.int32)
    params = Net().init(jax.random.key(0), x, sources, ids)
    of_rows, of_weights = "a cast to float32 before it is read", "g=f32 in the policy"
    for policy, repairs in (("mixed_float16", {of_rows, of_weights}), ("p=f32,c=f16,o=f32,g=f32", {of_rows})):
        model = jmpp.wrap(Net(), policy)
        found = jmpp.audit(lambda p, m=model: m.apply(p, x, sources, ids), params, grad=True)
        sums = [h for h in found.half_operations if h.operation == "scatter-add"]
        assert len(sums) == len(repairs)
        assert {h.why.partition(": ")[2] for h in sums} == {f"{r} makes it a float32 sum" for r in repairs}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_a_weights_gradient_that_an_optimizer_computes_with_is_no_activations(policy):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(8)(nn.Embed(16, 16)(ids)).sum()

    model, ids, tx = jmpp.wrap(Net(), policy), jnp.zeros(500, jnp.int32), optax.adam(0.1)
    params = model.init(jax.random.key(0), ids)

    def step(params, state):
        grads = jax.grad(lambda params: model.apply(params, ids).astype(jnp.float32))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    found = jmpp.audit(step, params, tx.init(params)).half_operations
    (whole,) = [h.why for h in found if h.operation == "scatter-add"]
    assert "g=f32 in the policy makes it" in whole


def test_a_constant_that_was_cast_to_half_is_named_in_it_wherever_it_is_read():
    def attend(scores):
        mask = jnp.where(jnp.tri(8, dtype=bool), 0, -1e9).astype(jnp.float16)
        return jax.nn.softmax(scores.astype(jnp.float32) + mask.astype(jnp.float32))

    (constant,) = jmpp.audit(attend, jnp.ones((8, 8), jnp.float16)).constants
    assert (constant.dtype, constant.becomes) == ("float16", "-inf")


class Draws(nn.Module):
    """Chooses by logits in half, and adds noise that is drawn in float32."""

    @nn.compact
    def __call__(self, x, key):
        x = x + jax.random.normal(key, x.shape).astype(x.dtype)
        return jax.random.categorical(key, nn.Dense(32)(x))


@pytest.mark.parametrize(
    ("policy", "numbers"), [("mixed_bfloat16", 128), ("mixed_float16", 1024), ("float32", 0)]
)
def test_random_numbers_that_are_drawn_in_half(policy, numbers):
    """As many as the dtype has digits: of equal logits the first is chosen too often."""
    x, key = jnp.ones((4, 16)), jax.random.key(0)
    params = Draws().init(key, x, key)
    found = jmpp.audit(jmpp.wrap(Draws(), policy).apply, params, x, key)
    drawn = [row for row in found.half_operations if row.operation == "jax.random"]
    assert [row.path for row in drawn] == ["Draws"] * bool(numbers)
    assert (f"draws one of {numbers} numbers" in found.verdict) == bool(numbers)


def test_a_program_that_prints():
    """An operation without results."""

    def fn(x):
        jax.debug.print("{}", x.sum())
        return x @ x

    found = jmpp.audit(fn, jnp.ones((16, 16), jnp.float16))
    assert found.half_share == 1


def test_casts_for_products_of_few_terms_are_no_silent_upcasts():
    """`wrap` leaves such products in float32."""
    model = nn.Sequential([nn.Dense(32), nn.Dense(4), nn.Dense(32)])
    x = jnp.ones((32, 16))
    wrapped, variables = jmpp.wrap(model, "mixed_float16"), model.init(jax.random.key(0), x)
    for found in (
        jmpp.audit(wrapped.apply, variables, x),
        jmpp.audit(lambda v: wrapped.apply(v, x).mean(), variables, grad=True),
    ):
        assert found.upcasts == ()
        assert "in float32 of fewer than 8 terms" in found.verdict
        assert all(not product.cause for product in found.products)


class _Masked(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = jnp.arange(2, dtype=jnp.float32)
        return nn.Dense(2)(nn.Dense(32)(x)) * mask


def test_upcasts_that_reach_products_of_few_terms_alone_are_in_the_verdict():
    model, x = nn.Sequential([_Masked() for _ in range(3)]), jnp.ones((64, 2))
    found = jmpp.audit(jmpp.wrap(model, "mixed_float16").apply, model.init(jax.random.key(0), x), x)
    assert [upcast.reaches for upcast in found.upcasts] == [()] * 3
    assert "; 3 silent upcasts: Sequential/layers_0 ... layers_2 (" in found.verdict


def _scaled(tx):
    return jmpp.loss_scaled(tx, jmpp.StaticLossScale(2.0))


def _frozen(tx):
    return optax.multi_transform({"train": tx, "freeze": optax.set_to_zero()}, {"w": "freeze", "b": "train"})


_WRAPPED = {
    "plain": (lambda tx: tx, True),
    "loss_scaled": (_scaled, True),
    "masters outside": (lambda tx: jmpp.master_weights(_scaled(tx)), False),
    "masters inside": (lambda tx: _scaled(jmpp.master_weights(tx)), False),
    "kahan": (lambda tx: jmpp.kahan_summation(_scaled(tx)), False),
    "frozen": (_frozen, False),
    "frozen and scaled": (lambda tx: _scaled(_frozen(tx)), False),
}


@pytest.mark.parametrize(("wrapped", "is_found"), _WRAPPED.values(), ids=_WRAPPED)
@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 512), ("float16", 4096)])
def test_parameters_that_are_updated_in_half_are_named(wrapped, is_found, dtype, least):
    tx = wrapped(optax.adam(1e-3))
    params = {"w": jnp.ones((16, 8), dtype), "b": jnp.ones(8, jnp.float32)}

    def step(params, state, x):
        def loss(params):
            return jnp.mean((x @ params["w"] + params["b"].astype(dtype)).astype(jnp.float32) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The loss is not scaled.
        found = jmpp.audit(step, params, tx.init(params), jnp.ones((4, 16), dtype))
    said = f"optax.apply_updates in {dtype} rounds away updates below 1/{least} of a parameter"
    assert (said in found.verdict) == is_found
    assert not found.upcasts


def test_a_constant_index_of_two_axes_says_how_many_terms_a_sum_has():
    """The positions of Swin's windows: 49 x 49 of 169 rows, none of which is read more than 49 times."""
    at = np.stack(np.meshgrid(np.arange(7), np.arange(7))).reshape(2, -1)
    index = np.tensordot([13, 1], at[:, :, None] - at[:, None] + 6, 1)
    assert np.bincount(index.ravel()).max() == 49

    def loss(table, index):
        return jnp.sum(table.astype(jnp.float16)[index].astype(jnp.float32) ** 2)

    table = jnp.ones((169, 4))
    found = jmpp.audit(lambda table: loss(table, index), table, grad=True)
    assert "scatter-add" not in found.verdict
    found = jmpp.audit(loss, table, jnp.asarray(index), grad=True)
    assert "scatter-add in float16 adds up to 2401 terms" in found.verdict
