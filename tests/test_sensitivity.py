"""`sensitivity` predicts what half precision does to a gradient, module by module, before it is done."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import jmp_policy as jmpp
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import evaluate
from jmp_policy._src.report.sensitivity.rounding_errors import AppliedRounding, _rounded, lost
from jmp_policy._src.report.sensitivity.traced_loss import DTYPES


class Decay(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jax.lax.scan(lambda m, _: (m * 0.9999, None), x, None, length=100)[0]  # Half: 1.


@pytest.mark.slow
def test_a_constant_that_a_loop_reads_counts_for_the_loop_and_not_for_what_is_before_it():
    model, x = (
        nn.Sequential([nn.Dense(16), Decay(), nn.Dense(8)]),
        jax.random.normal(jax.random.key(0), (8, 16)),
    )
    params = model.init(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.square(model.apply(params, x)).mean()

    errors = {row.path: row.predicted for row in jmpp.sensitivity(loss_fn, params, x).rows}
    assert errors["layers_1"] == pytest.approx(1 - 0.9999**200, rel=0.3)
    assert max(errors["layers_0"], errors["layers_2"]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_in_float32_is_the_cast(dtype):
    # Every exponent (of bfloat16 those whose errors are normal in float32), what lies beyond, and ties.
    exponents = np.arange(-26, 18) if dtype == "float16" else np.arange(-110, 127)
    mantissas = np.concatenate(
        [np.linspace(1, 2, 97), 1 + 2.0 ** -np.arange(6.0, 14), 1 + 3 * 2.0 ** -np.arange(9.0, 13)]
    )
    x = (mantissas * 2.0 ** exponents[:, None]).ravel().astype(np.float32)
    x = np.concatenate([x, -x, [0.0, np.inf, -np.inf]]).astype(np.float32)
    with np.errstate(over="ignore"):
        cast = x.astype(jnp.dtype(dtype))
    half = _rounded(jnp.asarray(x), dtype)
    overflow, underflow = lost(half, jnp.asarray(x))
    assert overflow.tolist() == (np.isinf(cast) & np.isfinite(x)).tolist()
    assert underflow.tolist() == ((cast == 0) & (x != 0)).tolist()
    np.testing.assert_array_equal(half, cast.astype(np.float32))


class Act(nn.Module):
    function: Any
    dtype: Any = jnp.float32

    def __call__(self, x):
        return self.function(x.astype(self.dtype)).astype(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "function", [nn.sigmoid, jnp.exp2, lambda x: jnp.cumsum(x, 1)], ids=["1/(1+exp)", "exp2", "cumsum"]
)
def test_operations_that_round_in_several_steps_count_with_each(function, dtype):
    draw = functools.partial(jax.random.normal, jax.random.key(0))
    x, y = draw((256, 32)), draw((256, 1))

    def loss_fn(params, dtype=jnp.float32):
        model = nn.Sequential([nn.Dense(64), Act(function, dtype), nn.Dense(1)])
        return jnp.square(model.apply(params, x) - y).mean()

    params = nn.Sequential([nn.Dense(64), Act(function), nn.Dense(1)]).init(jax.random.key(0), x)
    found = jmpp.sensitivity(loss_fn, params, dtype=dtype)
    exact, half = (ravel_pytree(jax.grad(loss_fn)(params, dtype))[0] for dtype in (jnp.float32, dtype))
    error = jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact)
    assert {row.path: row.predicted for row in found.rows}["layers_1"] == pytest.approx(float(error), rel=0.2)


class Lattice(nn.Module):
    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(8)(x) - 3

        def step(alpha, logits):
            return jnp.logaddexp(alpha, jnp.roll(alpha, 1, 1)) + logits, None

        alpha, _ = jax.lax.scan(step, logits[:, 0], logits.swapaxes(0, 1))
        return -alpha[:, -1].astype(jnp.float32).mean()


@pytest.mark.slow
def test_a_derivative_that_is_computed_from_a_rounded_result_counts():
    x = jax.random.normal(jax.random.key(7), (4, 30, 8))
    model = Lattice()
    params = model.init(jax.random.key(8), x)

    def loss_fn(params, x, model=model):
        return model.apply(params, x)

    found = jmpp.sensitivity(loss_fn, params, x, dtype="bfloat16")
    half = functools.partial(loss_fn, model=jmpp.wrap(model, "mixed_bfloat16"))
    exact, half = (ravel_pytree(jax.grad(fn)(params, x))[0] for fn in (loss_fn, half))
    error = float(jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact))
    assert error > 0.05
    assert found.rows[0].predicted == pytest.approx(error, rel=0.1)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(8, name="first")(x))
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(3, name="last")(x)


X = jax.random.normal(jax.random.key(1), (16, 12))
PARAMS = Net().init(jax.random.key(0), X)["params"]
Y = jax.random.normal(jax.random.key(2), (16, 3))


def loss_fn(params, x=X):
    return jnp.mean((Net().apply({"params": params}, x) - Y) ** 2)


@functools.cache
def found():
    return jmpp.sensitivity(loss_fn, PARAMS, X)


def gradient(rules, scale):
    """The gradient under rules, one operation after the other."""

    def scaled(params):
        with jmpp.linen.intercept(rules):
            return loss_fn(params) * scale

    jaxpr = jax.make_jaxpr(jax.grad(scaled))(PARAMS)
    bind = lambda eqn, values: compat.bind_primitive(eqn.primitive, values, eqn.params)  # noqa: E731
    return np.concatenate([np.ravel(g) / scale for g in evaluate(jaxpr, jax.tree.leaves(PARAMS), bind)])


@pytest.mark.once
def test_errors_are_those_of_one_module_in_half():
    """The same roundings, one by one: not a mean of what they may be, but what they are."""
    exact = gradient("float32", 1.0)
    assert {row.path for row in found().rows} == {"", "first", "norm", "last"}
    for row in found().rows:
        rules = jmpp.PolicyMap("float32", {f"{row.path}/**" if row.path else "**": "mixed_float16"})
        error = np.linalg.norm(gradient(rules, found().loss_scale) - exact) / np.linalg.norm(exact)
        # Half computes the derivative of tanh in several steps, which are one here.
        assert row.predicted == pytest.approx(error, rel=0.01 if row.path else 0.2), row
    assert found().rows[0].path == ""
    assert found().of("norm").predicted < found().of("last").predicted


@pytest.mark.slow
def test_what_is_computed_with_a_weight_that_is_not_trained_counts():
    class Features(nn.Module):
        @nn.compact
        def __call__(self, x):
            weights = jax.lax.stop_gradient(self.param("weights", nn.initializers.normal(16.0), (16,)))
            return nn.Dense(3, name="last")(jnp.sin(x[:, :1] * weights * 2 * jnp.pi))

    bare = Features()
    params = bare.init(jax.random.key(0), X)["params"]

    def loss(params, model=bare):
        return jnp.mean((model.apply({"params": params}, X) - Y) ** 2)

    half = functools.partial(loss, model=jmpp.wrap(bare, "mixed_float16"))
    exact, rounded = (np.ravel(jax.grad(f)(params)["last"]["kernel"]) for f in (loss, half))
    found = jmpp.sensitivity(loss, params)
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert error > 0.005
    assert error / 2 < found.of("").predicted < 2 * error
    assert found.of("last").predicted < 0.1 * found.of("").predicted


class Kink(nn.Module):
    """In float32 the relu lets through 2**-12; in half its input is 0."""

    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(1, name="dense")(x))


@pytest.mark.once
def test_decisions_that_rounding_turns_are_seen():
    params = {"dense": {"kernel": jnp.ones((8, 1)), "bias": -jnp.ones(1)}}
    arguments = (
        lambda params, x: Kink().apply({"params": params}, x).sum(),
        params,
        jnp.zeros((1, 8)).at[0, 0].set(1 + 2**-12),
    )
    found = jmpp.sensitivity(*arguments)
    assert found.of("dense").predicted == found.of("dense").loss == 1.0  # Nothing of them is left.


@pytest.mark.once
def test_the_result_is_a_report():
    assert isinstance(found(), jmpp.report.Sensitivity)
    assert isinstance(found().rows[0], jmpp.report.SensitivityRow)
    worst = found().rows[1]
    assert "In float16, the whole model changes the gradient by" in found().verdict
    assert f"of its modules {worst.path} changes it most: by {worst.predicted:.2g}." in found().verdict
    assert "(all)" in str(found())
    assert found().to_dict()["rows"][0]["path"] == ""
    with pytest.raises(KeyError, match=r"no row 'middle'; there are '', .*'first'"):
        found().of("middle")


@pytest.mark.slow
def test_the_whole_is_never_better_than_its_worst_module():
    rows = {row.path: row for row in found().rows}
    assert rows[""].predicted >= max(row.predicted for row in rows.values())
    assert rows[""].loss >= max(row.loss for row in rows.values())


def padded(rows):
    """A batch of 8 features, the last of them zero."""
    return jnp.zeros((len(rows), 8)).at[:, : len(rows[0])].set(jnp.asarray(rows))


def test_numbers_that_half_has_are_not_rounded():
    """Everything is a small integer: no error in either pass."""
    w = jnp.zeros((8, 2)).at[:2].set(jnp.asarray([[2.0, 1.0], [4.0, -1.0]]))

    def loss(w, x):
        with jax.named_scope("product"):
            return (x @ w).astype(jnp.float32).sum()

    (row,) = jmpp.sensitivity(loss, w, padded([[1.0, 2.0], [3.0, -4.0]])).rows
    assert (row.path, row.predicted, row.loss, row.overflow, row.underflow) == ("product", 0.0, 0.0, 0, 0)
    (row,) = jmpp.sensitivity(loss, w, padded([[1.0, 2.0], [3.0, 1 / 3]])).rows
    # The third is the derivative by two of the weights; so is the sum of 2 and it, which is rounded as well.
    third, total = (abs(float(np.float16(number)) - number) for number in (1 / 3, 7 / 3))
    exact = math.sqrt(2 * (third**2 + total**2)) / math.sqrt(2 * (4**2 + (7 / 3) ** 2))
    assert row.predicted == pytest.approx(exact, rel=0.9)


class Large(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, kernel_init=nn.initializers.constant(3e4), name="large")(x)
        x = nn.LayerNorm(name="norm")(x + nn.Dense(8, name="small")(x * 1e-5))
        return nn.Dense(2, name="head")(x)


class Masked(nn.Module):
    """Attention with a mask of a number that float16 does not hold."""

    fill: float

    @nn.compact
    def __call__(self, x):
        query, key, value = (nn.Dense(16)(x) for _ in range(3))
        scores = query @ key.swapaxes(-1, -2)
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, self.fill)
        return nn.softmax(scores) @ value if self.fill < -1e6 else jnp.log1p(-scores) @ value


@pytest.mark.slow
@pytest.mark.parametrize(("fill", "overflows"), [(-1e9, False), (-1e5, True)])
def test_what_a_mask_hides_from_a_softmax_does_not_overflow(fill, overflows):
    x, model = jax.random.normal(jax.random.key(0), (2, 8, 16)) / 8, Masked(fill)
    params = model.init(jax.random.key(1), x)
    found = jmpp.sensitivity(
        lambda params, x: jnp.square(model.apply(params, x)).mean(), params, x, dtype="float16"
    )
    assert any(row.overflow for row in found.rows) is overflows
    assert ("overflow" in found.verdict) is overflows


class Steep(nn.Module):
    """Divides small numbers by their root mean square: one derivative of that is beyond float16."""

    by: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, kernel_init=nn.initializers.normal(2e-4), name="small")(x)
        with jax.named_scope(self.by):
            square = jnp.square(32 * x).mean(-1, keepdims=True) + 1e-6
            scale = {"rsqrt": jax.lax.rsqrt, "power": lambda x: x**-1, "quotient": lambda x: 1 / x}[self.by]
            x = x * self.param("scale", nn.initializers.ones, (16,)) * scale(square)
        return nn.Dense(8, name="head")(x)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["rsqrt", "power", "quotient"])
def test_a_derivative_that_overflows_is_seen(by):
    x = jax.random.normal(jax.random.key(0), (8, 16))
    params = Steep(by).init(jax.random.key(1), x)

    def loss_of(model):
        return lambda params, x: 1e-3 * jnp.square(model.apply(params, x)).mean()

    half = jax.grad(loss_of(jmpp.wrap(Steep(by), "mixed_float16")))(params, x)
    assert not all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(half))
    (whole, *_) = jmpp.sensitivity(loss_of(Steep(by)), params, x).rows
    assert whole.overflow > 0
    assert math.isinf(whole.predicted)
    assert jmpp.sensitivity(loss_of(Steep(by)), params, x, dtype="bfloat16").rows[0].overflow == 0


@pytest.mark.once
def test_overflow_is_found_and_ranks_first():
    params = Large().init(jax.random.key(0), jnp.ones((2, 8)))
    x = padded([[1.0, 2.0, 3.0, 1.0], [1.0, 0.5, 0.25, 1.0]])
    found = jmpp.sensitivity(
        lambda p: jnp.sum(Large().apply(p, x)[:, 0]), params, candidates=["large", "head"]
    )
    assert [row.path for row in found.rows] == ["large", "head"]
    assert math.isinf(found.rows[0].predicted)
    assert math.isinf(found.rows[0].loss)
    # The product, and it again with the bias added.
    assert found.rows[0].overflow == 32
    assert found.rows[1].overflow == 0
    assert found.verdict == "In float16 values overflow in large."
    found = jmpp.sensitivity(
        lambda p: jnp.sum(Large().apply(p, x)[:, 0]), params, dtype="bfloat16", candidates=["large"]
    )
    assert found.rows[0].overflow == 0
    assert found.loss_scale == 1


@pytest.mark.once
@jax.custom_jvp
def bent(x):
    return x


@jax.custom_jvp
def slope(x):
    return jnp.ones_like(x)


bent.defjvps(lambda dx, _, x: slope(x) * dx)
slope.defjvps(lambda dx, _, x: jnp.float32(1e25) * dx)


@pytest.mark.slow
def test_second_derivatives_that_float32_cannot_hold_do_not_matter():
    def loss_of(params):
        return jnp.square(bent(Net().apply({"params": params}, X).astype(jnp.float32))).mean()

    found = jmpp.sensitivity(loss_of, Net().init(jax.random.key(0), X)["params"])
    assert all(0 <= row.predicted < 1 for row in found.rows)


@pytest.mark.slow
@pytest.mark.parametrize("of", [jmpp.sensitivity, jmpp.recommend])
def test_a_loss_that_is_not_finite_in_float32_is_refused(of):
    params = Net().init(jax.random.key(0), X)["params"]
    with pytest.raises(ValueError, match="not finite even where nothing is rounded.* `diagnose` finds"):
        of(lambda params: loss_fn(params) / 0.0, params, dtype="float16")


@pytest.mark.slow
def test_candidates_are_the_patterns_of_a_policy_map():
    by_class = jmpp.sensitivity(loss_fn, PARAMS, X, candidates=[nn.Dense, "*", "norm"])
    rows = {row.path: row.predicted for row in by_class.rows}
    assert set(rows) == {"Dense", "*", "norm"}
    assert rows["*"] >= rows["Dense"] > rows["norm"]
    with pytest.raises(ValueError, match=r"rule for 'frist' matches no module of loss_fn\. .*'first'"):
        jmpp.sensitivity(loss_fn, PARAMS, X, candidates=["frist"])


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"candidates is a list of patterns: candidates=\['first'\]"):
        jmpp.sensitivity(loss_fn, PARAMS, X, candidates="first")
    with pytest.raises(ValueError, match="float16 and bfloat16, got dtype='float32'"):
        jmpp.sensitivity(loss_fn, PARAMS, X, dtype="float32")
    with pytest.raises(ValueError, match="those in `batches` must have the shapes"):
        jmpp.sensitivity(loss_fn, PARAMS, X, batches=[(X[:3],)])
    with pytest.raises(ValueError, match="Nothing of <lambda> would be computed in float16 .*custom_vjp"):
        jmpp.sensitivity(lambda w: jnp.sin(w), jnp.float32(1.0))
    with pytest.raises(ValueError, match="sensitivity found no floating arrays in the parameters"):
        jmpp.sensitivity(lambda w: jnp.float32(1.0), {"count": jnp.int32(1)})
    with pytest.raises(TypeError, match="must return one scalar"):
        jmpp.sensitivity(lambda p: (loss_fn(p), 1), PARAMS)
    for of in (jmpp.sensitivity, jmpp.recommend):
        with pytest.raises(
            TypeError, match=r"batches are tuples .* batches=\[\(x, y\), \.\.\.\]; one .* ArrayImpl"
        ):
            of(loss_fn, PARAMS, X, batches=[X])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_models_that_keep_a_policy_of_their_own_are_refused(policy):
    model = jmpp.wrap(nn.Dense(2), policy)
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    with pytest.raises(ValueError, match="Dense is wrapped: .* Call the model as it was before `wrap`"):
        jmpp.sensitivity(lambda p: model.apply(p, jnp.ones((1, 3))).sum(), params)


def test_a_model_that_the_loss_merges_is_to_be_an_argument():
    graph, state = nnx.split(nnx.Linear(12, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match=r"Linear is made inside\. Give it the model: sensitivity\(lambda model"
    ):
        jmpp.sensitivity(lambda state, x: nnx.merge(graph, state)(x).sum(), state, X)


@pytest.mark.slow
def test_a_teacher_that_is_frozen_in_half_stays_as_it_is():
    student, teacher = NNXNet(nnx.Rngs(0)), NNXNet(nnx.Rngs(1))
    graph, state = nnx.split(teacher)
    frozen = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))

    def loss(student, teacher, x):
        return jnp.square(student(x) - jax.lax.stop_gradient(teacher(x))).mean()

    found = jmpp.sensitivity(loss, student, frozen, X)
    closed_over = jmpp.sensitivity(lambda model, x: loss(model, frozen, x), student, X)
    assert found.of("first").predicted == pytest.approx(closed_over.of("first").predicted, rel=0.5)
    with pytest.raises(
        ValueError, match=r"NNXNet has half parameters\. Give it a copy: jmp_policy\.nnx\.cast"
    ):
        jmpp.sensitivity(lambda model, x: jnp.square(model(x)).mean(), frozen, X)
    student.cache = nnx.Cache(jnp.zeros(4, jnp.bfloat16))  # It is no parameter.
    assert jmpp.sensitivity(loss, student, frozen, X).of("first") == found.of("first")
    copy = jmpp.nnx.cast_params(nnx.clone(frozen), "float32")
    assert jmpp.sensitivity(lambda model, x: jnp.square(model(x)).mean(), copy, X).rows


@pytest.mark.once
def test_batches_are_averaged():
    zeros, aux = jnp.zeros_like(X), lambda params, x: (loss_fn(params, x), x)
    one, other, both = (
        jmpp.sensitivity(aux, PARAMS, batch, batches=more, has_aux=True, candidates=["first"]).rows[0]
        for batch, more in ((X, ()), (zeros, ()), (zeros, [(X,)]))
    )
    assert both.predicted**2 == pytest.approx((one.predicted**2 + other.predicted**2) / 2, rel=0.3)
    assert one.predicted != pytest.approx(other.predicted, rel=0.3)


@jax.custom_vjp
def half_cotangent(x):
    return x * 1


half_cotangent.defvjp(lambda x: (x * 1, x.astype(jnp.float16)), lambda x, g: (g / 2 + 0 * x.astype(g.dtype),))


@jax.custom_jvp
def double_tangent(x):
    return jnp.sin(x)


double_tangent.defjvp(lambda xs, ts: (jnp.sin(xs[0]), 2 * jnp.cos(xs[0]) * ts[0]))


class Everything(nn.Module):
    """Loops, branches, checkpoints, and derivatives that are not those of the function."""

    @nn.compact
    def __call__(self, x, flag):
        x = nn.remat(nn.Dense)(8, name="kept")(x)
        x = jnp.where(x > 3, 1.0, half_cotangent(x))
        x = nn.RNN(nn.SimpleCell(8, name="cell"), name="rnn")(x[None])[0]
        x = jax.lax.cond(flag, lambda x: double_tangent(x) * 3, lambda x: x * 2, x)
        x = jax.lax.fori_loop(0, 2, lambda i, x: x * 0.7, x)
        return nn.Dense(2, name="head")(jax.vmap(nn.relu)(x))


@pytest.mark.once
def test_programs_of_all_kinds_keep_their_gradient(monkeypatch):
    """The tapped program is that of float32: its gradient, with custom rules, is compared."""
    x = jax.random.normal(jax.random.key(4), (5, 8))
    params = jax.jit(Everything().init)(jax.random.key(0), x, True)["params"]

    def loss(params, x, flag):
        return jnp.sum(Everything().apply({"params": params}, x, flag) ** 2)

    gradients = []
    of_modules = AppliedRounding.of_modules
    monkeypatch.setattr(
        AppliedRounding,
        "of_modules",
        lambda self, groups: gradients.append(self._exact[0][1]) or of_modules(self, groups),
    )
    found = jmpp.sensitivity(loss, params, x, jnp.bool_(True))
    exact = sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params, x, True)))
    # Numbers in the program (0.7) are half ones.
    assert float(sum(jnp.sum(g**2) for g in gradients[0])) == pytest.approx(float(exact), rel=5e-3)
    assert {"", "kept", "cell", "cell/i", "cell/h", "rnn", "head"} == {row.path for row in found.rows}
    # Nothing is rounded where cells are only called.
    assert all(row.predicted < 0.01 for row in found.rows)
    assert found.of("cell").predicted > found.of("cell/h").predicted > 0


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(12, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


@pytest.mark.once
def test_nnx_modules_and_functions_without_modules():
    model, sharded = (
        NNXNet(nnx.Rngs(0)),
        jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
    )
    x = jax.device_put(X, jax.NamedSharding(sharded, jax.P("data")))
    found = jmpp.sensitivity(lambda model, x: jnp.mean(model(x) ** 2), model, x)
    assert found.rows[0].path == ""
    assert {row.path for row in found.rows} == {"", "first", "last"}

    def plain(params, x):
        with jax.named_scope("first"):
            x = jax.nn.relu(x @ params["first"])
        with jax.named_scope("last"):
            return jnp.mean((x @ params["last"]) ** 2)

    params = {"first": model.first.kernel[...], "last": model.last.kernel[...]}
    same = jmpp.sensitivity(plain, params, x)
    assert {row.path for row in same.rows} == {"first", "last"}
    for row in same.rows:
        assert row.predicted == pytest.approx(found.of(row.path).predicted, rel=0.7)


@pytest.mark.slow
def test_modules_that_the_rule_of_a_custom_vjp_calls():
    class Reversed(nn.Module):
        """As in Flax's documentation of `nn.custom_vjp`: its forward pass calls the module again."""

        @nn.compact
        def __call__(self, x):
            def call(module, x):
                return module(x)

            same = nn.custom_vjp(call, lambda module, x: nn.vjp(call, module, x), lambda vjp, ct: vjp(ct))
            return nn.Dense(3, name="last")(nn.tanh(same(nn.Dense(8, name="first"), x)))

    params = Reversed().init(jax.random.key(0), X)["params"]
    found = jmpp.sensitivity(lambda p, x: jnp.square(Reversed().apply({"params": p}, x)).mean(), params, X,
                             dtype="float16")  # fmt: skip
    (row,) = (row for row in found.rows if row.path == "last")  # Inside, nothing is rounded.
    assert 1e-4 < row.predicted < 1e-3


@pytest.mark.slow
def test_experts_of_a_ragged_product_are_measured():
    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.lecun_normal(), (2, 8, 16))
            return nn.Dense(3)(jax.lax.ragged_dot(nn.Dense(8)(x), w, jnp.array([7, 9])))

    params = Experts().init(jax.random.key(0), X)["params"]

    def loss_fn(params, x):
        return jnp.square(Experts().apply({"params": params}, x)).mean()

    found = jmpp.sensitivity(loss_fn, params, X)
    assert 1e-5 < found.of("").predicted < 1e-2
    assert jmpp.recommend(loss_fn, params, X, dtype="float16").half_share == 1


@pytest.mark.slow
def test_float32_in_64_bit_mode_is_measured_as_without():
    x = X.reshape(4, 4, 12)
    cell = nn.RNN(nn.SimpleCell(8))  # A loop hands on the counts.
    params = cell.init(jax.random.key(0), x)["params"]

    def error():
        found = jmpp.sensitivity(lambda p, x: jnp.square(cell.apply({"params": p}, x)).mean(), params, x,
                                 dtype="float16")  # fmt: skip
        return found.rows[0].predicted

    wanted = error()
    with jax.enable_x64(True):
        assert error() == pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
def test_meshes_with_explicit_axes():
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(explicit, explicit))
    rng = np.random.default_rng(0)
    table, w = (jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(2))
    tokens = jnp.asarray(rng.integers(0, 8, 16))

    def loss_of(look_up):
        def loss_fn(params, tokens):
            with jax.named_scope("embed"):
                h = look_up(params["table"], tokens)
            with jax.named_scope("head"):
                return jnp.square(jnp.tanh(h @ params["w"])).mean()

        return loss_fn

    params = {"table": table, "w": w}
    one = jmpp.sensitivity(loss_of(lambda table, i: table[i]), params, tokens, dtype="float16")
    with jax.set_mesh(mesh):
        # Gathers of sharded indices run inside jax.sharding.auto_axes, where no axis is explicit.
        loss_fn = loss_of(lambda table, i: table.at[i].get(out_sharding=jax.P("data")))
        params["w"] = jax.device_put(w, jax.NamedSharding(mesh, jax.P(None, "model")))
        tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("data")))
        params["table"] = jax.device_put(table, jax.NamedSharding(mesh, jax.P()))
        many = jmpp.sensitivity(loss_fn, params, tokens, dtype="float16")
    assert [row.path for row in many.rows] == [row.path for row in one.rows]
    assert [row.path for row in one.rows] == ["head"]  # Rows are rounded where a product reads them.
    for found, wanted in zip(many.rows, one.rows, strict=True):
        assert found.predicted == pytest.approx(wanted.predicted, rel=1e-2)


@pytest.mark.slow
def test_a_value_that_a_loop_reads_and_what_is_after_it_too():
    """What is found out about it inside of the loop stays there."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8, name="first")(x)
            c, _ = jax.lax.scan(lambda c, _: (c + h, None), jnp.zeros_like(h), None, 8)
            return nn.Dense(4, name="last")(h + c / 8)

    x = jax.random.normal(jax.random.key(0), (8, 8))
    params = Net().init(jax.random.key(1), x)

    def loss_fn(params, x):
        return jnp.square(Net().apply(params, x)).mean()

    measured = {row.path: row.predicted for row in jmpp.sensitivity(loss_fn, params, x).rows}
    assert measured.keys() == {"", "first", "last"}
    assert all(1e-5 < error < 1e-2 for error in measured.values())


class Attends(nn.Module):
    """Attention with a mask of its own, and a softmax of as many rows in another shape."""

    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x, mask):
        h = nn.Dense(16)(x)
        scores = jnp.where(mask, h @ h.T, -1e9).reshape(*self.shape, len(h))
        return nn.softmax(scores).reshape(mask.shape) @ h


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_a_mask_that_becomes_infinite_is_no_overflow(shape):
    x = jax.random.normal(jax.random.key(0), (6, 16))
    real = jnp.arange(6) < 4
    mask = jnp.broadcast_to(real, (6, 6))
    params = Attends(shape).init(jax.random.key(1), x, mask)

    def loss_of(model):
        def loss_fn(params):
            out = model.apply(params, x, mask).astype(jnp.float32)
            return jnp.where(real[:, None], jnp.square(out), 0).mean()

        return loss_fn

    half = jax.grad(loss_of(jmpp.wrap(Attends(shape), "mixed_float16")))(params)
    assert bool(jmpp.all_finite(half))
    found = jmpp.sensitivity(loss_of(Attends(shape)), params, dtype="float16")
    assert found.rows[0].overflow == 0


class Pools(nn.Module):
    """Attention over the tokens of a sequence, with the heads behind them."""

    @nn.compact
    def __call__(self, x, real):
        h = nn.tanh(nn.Dense(16)(x))
        weights = nn.softmax(jnp.where(real[..., None], nn.Dense(4)(h), -1e9), axis=1)
        largest = jnp.where(real[..., None], h, -1e9).max(1)
        return jnp.einsum("bth,btd->bhd", weights, h).sum(1) + largest


@pytest.mark.slow
def test_a_mask_of_whole_rows_over_another_axis_hides_them():
    x, real = jax.random.normal(jax.random.key(0), (2, 6, 16)), jnp.arange(6) < jnp.array([[6], [4]])
    params = Pools().init(jax.random.key(1), x, real)

    def loss_of(model):
        return lambda params: jnp.square(model.apply(params, x, real).astype(jnp.float32)).mean()

    assert jmpp.all_finite(jax.grad(loss_of(jmpp.wrap(Pools(), "mixed_float16")))(params))
    found = jmpp.sensitivity(loss_of(Pools()), params, dtype="float16")
    assert not any(row.overflow for row in found.rows)


class Chooses(nn.Module):
    """A module that ends in a choice, by `jnp.where` or `lax.select`, of the shape of a softmax elsewhere."""

    choose: Any

    @nn.compact
    def __call__(self, x, keep):
        h = nn.tanh(nn.Dense(16)(x))
        return self.choose(keep, h * 1.25, jnp.zeros_like(h))


class ReadsChosen(nn.Module):
    choose: Any

    @nn.compact
    def __call__(self, x, keep):
        return nn.softmax(nn.Dense(16, name="reader")(Chooses(self.choose, name="chooses")(x, keep)))


@pytest.mark.slow
def test_the_reader_of_what_a_mask_chose_rounds_it():
    x, keep = (
        jax.random.normal(jax.random.key(0), (8, 16)),
        jax.random.bernoulli(jax.random.key(2), 0.8, (8, 16)),
    )
    params = ReadsChosen(jnp.where).init(jax.random.key(1), x, keep)

    def predicted(choose):
        def loss_fn(params):
            return jnp.square(ReadsChosen(choose).apply(params, x, keep).astype(jnp.float32)).sum()

        found = jmpp.sensitivity(loss_fn, params, dtype="float16", candidates=["reader"])
        return found.rows[0].predicted

    assert predicted(jax.lax.select) == pytest.approx(predicted(jnp.where), rel=1e-3)


class Reads(nn.Module):
    """Rows of a table in every step."""

    @nn.compact
    def __call__(self, h, x):
        return nn.tanh(nn.Dense(8)(h) + nn.Embed(10, 8)(x)), None


@pytest.mark.slow
@pytest.mark.parametrize("around", ["scan", "checkpoint"])
def test_rows_that_are_read_within_a_loop_or_a_checkpoint(around):
    """The places of the rows are values of that trace."""
    x, start = jnp.arange(8).reshape(2, 4), jnp.ones((4, 8))
    loop = nn.scan(Reads, variable_broadcast="params", split_rngs={"params": False})
    model, x = (loop(), x) if around == "scan" else (nn.remat(Reads)(), x[0])
    params = model.init(jax.random.key(0), start, x)
    found = jmpp.sensitivity(lambda p: jnp.square(model.apply(p, start, x)[0]).mean(), params)
    assert all(0 < row.predicted < 0.01 for row in found.rows)
    assert any(row.path.endswith("Embed_0") for row in found.rows)


class Quotient(nn.Module):
    """Divides by numbers of about 400, whose squares float16 does not have."""

    @nn.compact
    def __call__(self, x):
        near = nn.initializers.constant(400.0)
        return 400 * nn.Dense(16, name="a")(x) / nn.Dense(16, name="b", bias_init=near)(x)


@pytest.mark.slow
def test_a_derivative_that_a_division_loses_counts():
    x, model = jax.random.normal(jax.random.key(0), (32, 16)), Quotient()
    params = model.init(jax.random.key(1), x)

    def loss_of(model):
        return lambda params: jnp.square(model.apply(params, x).astype(jnp.float32) - 1).mean()

    exact, half = (
        ravel_pytree(jax.grad(loss_of(m))(params))[0] for m in (model, jmpp.wrap(model, "mixed_float16"))
    )
    measured = float(jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact))
    assert jmpp.sensitivity(loss_of(model), params).rows[0].predicted == pytest.approx(measured, rel=0.1)
