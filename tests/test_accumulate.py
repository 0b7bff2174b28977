"""Gradient accumulation: the gradient of the whole batch, and one synchronisation for it."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp
from jmp_policy._src.report.lowering.compiler import is_installed

SCALE = jmpp.StaticLossScale(8.0)
ROWS, WIDTHS = 32, (6, 10, 4)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"w1": normal(1, *WIDTHS[:2]), "w2": normal(2, *WIDTHS[1:])}
X, Y = normal(3, ROWS, WIDTHS[0]), normal(4, ROWS, WIDTHS[-1])


def mlp(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["w1"]) @ params["w2"] - y) ** 2)


def linear(params, x, y):
    """Exact in float32 for small integers, whatever the order: a mean over rows, a sum over columns."""
    return jnp.mean(jnp.sum((x @ params["w"] - y) ** 2, axis=-1))


@functools.cache
def whole_batch(rows=tuple(range(ROWS))):
    """What `scaled_value_and_grad` makes of these rows at once."""
    return jax.jit(jmpp.scaled_value_and_grad(mlp))(SCALE, PARAMS, X[np.array(rows)], Y[np.array(rows)])


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-4, 5, size=shape).astype(np.float32)


def equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def close(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5)


@pytest.mark.slow
@hypothesis.settings(max_examples=8)
@hypothesis.given(
    n=st.sampled_from([1, 2, 4, 8]), rows=st.sampled_from([1, 2, 4]), inner=st.integers(0, 5)
)  # fmt: skip
def test_exact_arithmetic_gives_the_gradient_of_the_batch_bit_for_bit(n, rows, inner):
    params, x, y = {"w": integers(1, inner, 3)}, integers(2, n * rows, inner), integers(3, n * rows, 3)
    want = jax.jit(jmpp.scaled_value_and_grad(linear))(SCALE, params, x, y)
    got = jax.jit(jmpp.accumulate_gradients(linear, n))(SCALE, params, x, y)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8, 32])
def test_an_mlp_differs_by_rounding_only(n):
    """By at most 2 u per addition and product in the longest chain, times the sum of their magnitudes.

    Both sides of the comparison have that error against the exact gradient, hence once more the factor 2.
    """
    (rows, inner, hidden, outer), u = (ROWS, *WIDTHS), 2.0**-24
    w1, w2, x, y = (np.abs(np.asarray(a, np.float64)) for a in (PARAMS["w1"], PARAMS["w2"], X, Y))
    h = x @ w1
    d = 2 * (h @ w2 + y) / (rows * outer)  # The network without signs and without cancellation.
    magnitudes = {"w1": x.T @ (d @ w2.T), "w2": h.T @ d}
    chain = inner + hidden + outer + rows + n + 8
    want = jax.jit(jmpp.scaled_value_and_grad(mlp))(SCALE, PARAMS, X, Y)
    got = jax.jit(jmpp.accumulate_gradients(mlp, n))(SCALE, PARAMS, X, Y)
    differs = 0
    for name, magnitude in magnitudes.items():
        error = np.abs(np.asarray(got[1][name], np.float64) - want[1][name]) / 8
        assert (error <= 4 * chain * u * magnitude).all()
        differs += error.any()
    assert differs  # Or the batch was not split.
    np.testing.assert_allclose(got[0], want[0], rtol=2 * chain * u)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_one_microbatch_is_scaled_value_and_grad(dtype):
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype).at[0].set(0), PARAMS)

    def loss_fn(params, x, y, key):
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return mlp(params, jnp.where(mask, x, -0.0).astype(dtype), y).astype(jnp.float32)

    args = (SCALE, params, X, Y, jax.random.key(0))
    loss, grads = jax.jit(jmpp.scaled_value_and_grad(loss_fn))(*args)
    want = loss, jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    equal(jax.jit(jmpp.accumulate_gradients(loss_fn, 1))(*args), want)


def test_half_gradients_add_up_in_float32():
    """2048 + 1 is 2048 in float16, and 40000 + 40000 is infinite."""
    params = jnp.ones(2, jnp.float16)
    x = jnp.array([[2048, 40000], [1, 40000]], jnp.float16)

    def loss_fn(params, x):
        return (params.astype(jnp.float32) * x.astype(jnp.float32)).sum()

    one = jmpp.NoOpLossScale()
    _, grads = jmpp.accumulate_gradients(loss_fn, 2)(one, params, x)
    assert grads.dtype == jnp.float32
    assert grads.tolist() == [1024.5, 40000.0]
    _, half = jmpp.accumulate_gradients(loss_fn, 2, accumulator_dtype="float16")(one, params, x)
    assert half.dtype == jnp.float16
    assert half.tolist() == [1024.0, float("inf")]
    with pytest.warns(UserWarning, match="The loss is float16"):
        value, grads = jmpp.accumulate_gradients(lambda p, x: (p * x).mean(), 2)(SCALE, params, x[:, :1])
    assert (value.dtype, grads.dtype) == (jnp.float16, jnp.float32)
    assert float(value) == 1024.0


@pytest.mark.once
def test_float64_complex_integers_and_empty_arrays():
    def loss_fn(params, x):
        z = params["z"] * x.sum()
        parts = (params["d"] * x).sum(), jnp.abs(z), params["none"].sum(), (params["f"] * x).sum()
        return sum(p.astype(jnp.float32) for p in parts) + params["n"] * 0

    with jax.enable_x64(True):
        params = {
            "d": jnp.float64(1.0), "z": jnp.complex64(1 + 1j), "none": jnp.zeros((0, 3), jnp.float16),
            "f": jnp.float32(1.0), "n": jnp.arange(1)[0],
        }  # fmt: skip
        x = jnp.arange(4.0)
        accumulated = jmpp.accumulate_gradients(loss_fn, 2, allow_int=True)
        _, grads = accumulated(SCALE, params, x)
        assert grads.pop("n").dtype == jax.dtypes.float0
        assert {name: g.dtype.name for name, g in grads.items()} == {
            "d": "float64", "z": "complex64", "none": "float32", "f": "float32",
        }  # fmt: skip
        assert (float(grads["d"]), grads["none"].shape) == (24.0, (0, 3))
        wide = jmpp.accumulate_gradients(loss_fn, 2, allow_int=True, accumulator_dtype="float64")
        assert wide(SCALE, params, x)[1]["f"].dtype == jnp.float64
    with pytest.raises(TypeError, match="requires real- or complex-valued inputs"):
        jmpp.accumulate_gradients(loss_fn, 2)(SCALE, {"n": jnp.arange(1)[0]}, x)
    # No rows and no columns: nothing to compute, and nothing that fails.
    value, grads = jmpp.accumulate_gradients(lambda p, x: (p * x).sum(), 2)(SCALE, jnp.ones(3), X[:0, :3])
    assert (float(value), grads.tolist()) == (0.0, [0.0] * 3)


def test_what_is_split_and_what_is_not():
    seen = []

    def loss_fn(params, batch, factor, step, *, labels, name):
        seen.append((batch["x"].shape, labels.shape, factor, step.shape, name, batch["none"]))
        return params * batch["x"].mean() * factor * step, {"x": batch["x"], "sum": labels.sum()}

    batch = {"x": jnp.arange(6.0), "none": None}
    accumulated = jmpp.accumulate_gradients(loss_fn, 3, has_aux=True)
    (loss, aux), grads = jax.jit(accumulated, static_argnums=3, static_argnames="name")(
        SCALE, jnp.float32(1), batch, 2.0, jnp.int32(1), labels=np.arange(6), name="a"
    )
    assert seen == [((2,), (2,), 2.0, (), "a", None)]  # Traced once.
    assert aux["x"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert aux["sum"].tolist() == [3, 5, 7]
    assert (float(loss), float(grads)) == (5.0, 40.0)


@pytest.mark.slow
def test_every_microbatch_draws_its_own_random_numbers():
    def loss_fn(params, x, key, keys):
        return params * x.mean(), (jax.random.uniform(key), jax.vmap(jax.random.uniform)(keys))

    key, keys = jax.random.key(0), jax.random.split(jax.random.key(1), 4)
    accumulated = jmpp.accumulate_gradients(loss_fn, 2, has_aux=True)
    (_, (drawn, each)), _ = accumulated(SCALE, jnp.float32(1), X[:4], key, keys)
    equal(drawn, jnp.stack([jax.random.uniform(jax.random.fold_in(key, i)) for i in range(2)]))
    equal(each, jax.vmap(jax.random.uniform)(keys).reshape(2, 2).T)
    # Without a batch: as many draws.
    noise = jmpp.accumulate_gradients(lambda p, key: (p * 0.0, jax.random.uniform(key)), 2, has_aux=True)
    equal(noise(SCALE, jnp.float32(1), key)[0][1], drawn)
    with pytest.raises(ValueError, match=r"batch\[1\]: uint32\[2\].*make PRNG keys with\s+jax.random.key"):
        accumulated(SCALE, jnp.float32(1), X[:4], jax.random.PRNGKey(0), keys)


@pytest.mark.parametrize(
    ("arguments", "batch", "message"),
    [
        (
            {"n": 3},
            (X, Y),
            r"32 rows cannot be split into 3 .*batch\[0\]: float32\[32,6\], batch\[1\]",
        ),
        ({}, (), "There is no array to split into 2 micro-batches: pass the batch as an argument"),
        ({}, (X, Y[:30]), r"differ in length there: .*float32\[30,4\]"),
        ({"axis_name": "data"}, (X, Y), "'data' is no mapped axis here, and there is no mesh"),
        ({"n": 0}, (X, Y), "n must be"),
        ({"accumulator_dtype": "float31"}, (X, Y), "Unknown dtype 'float31' of the accumulator"),
        ({"accumulator_dtype": "int32"}, (X, Y), "of the accumulator is int32, which is not floating"),
        ({"accumulator_dtype": "float64"}, (X, Y), "accumulator_dtype=float64 needs 64-bit mode"),
        ({"mesh": 1}, (X, Y), "mesh= needs axis_name="),
    ],
)
def test_bad_input(arguments, batch, message):
    arguments = {"n": 2} | arguments
    for accumulate in (jmpp.accumulate_gradients, jmpp.nnx.accumulate_gradients):
        model = PARAMS if accumulate is jmpp.accumulate_gradients else nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            accumulate(mlp, **arguments)(SCALE, model, *batch)
        with pytest.raises(TypeError, match="needs a loss function, got None"):
            accumulate(None, 2)


@pytest.mark.parametrize("namespace", [jmpp, jmpp.nnx])
def test_numbers_beside_the_loss_become_arrays_and_others_are_refused(namespace):
    model = {"w": jnp.ones(6)} if namespace is jmpp else nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    parts = jax.tree.leaves if namespace is jmpp else lambda model: [model.kernel[...]]

    def accumulated(aux):
        function = namespace.accumulate_gradients(lambda m, x: (parts(m)[0].sum(), aux), 2, has_aux=True)
        return function(SCALE, model, X)[0][1]

    aux = accumulated({"n": 3, "f": 0.5})
    assert aux["n"].tolist() == [3, 3]
    assert (aux["f"].dtype, jax.typeof(aux["f"]).weak_type) == (jnp.float32, False)
    with pytest.raises(TypeError, match="'train'.* is not a valid JAX"):
        accumulated({"split": ["train"]})


def test_each_loss_has_its_own_scale():
    tx = jmpp.loss_scaled(optax.sgd(0.1), {"a": SCALE, "b": jmpp.StaticLossScale(2.0)})
    state = tx.init(PARAMS)
    (value, grads), want = jmpp.accumulate_gradients(mlp, 4, loss="b")(state, PARAMS, X, Y), whole_batch()
    close(value, want[0])
    close(jax.tree.map(lambda g: g * 4, grads), want[1])
    with pytest.raises(ValueError, match="Say whose is meant"):
        jmpp.accumulate_gradients(mlp, 4)(state, PARAMS, X, Y)
    with pytest.raises(ValueError, match="'c', which is none of the losses: 'a', 'b'"):
        jmpp.accumulate_gradients(mlp, 4, loss="c")(state, PARAMS, X, Y)


def test_losses_that_are_no_scalar():
    with pytest.raises(TypeError, match="must return one scalar"):
        jmpp.accumulate_gradients(lambda p, x: (p * x.sum(), 1), 2)(SCALE, jnp.float32(1), X)
    with pytest.raises(TypeError, match=r"must return \(loss, aux\)"):
        jmpp.accumulate_gradients(lambda p, x: p * x.sum(), 2, has_aux=True)(SCALE, jnp.float32(1), X)
    with pytest.raises(ValueError, match="There is no loss scale in this dict"):
        jmpp.accumulate_gradients(mlp, 2)({}, PARAMS, X, Y)


def make_step(tx, **kwargs):
    """A train step, and how often its loss function was traced."""
    traces = []

    def loss_fn(params, x, y):
        traces.append(None)
        return mlp(params, x, y)

    accumulated = jmpp.accumulate_gradients(loss_fn, **kwargs)

    def step(carry, batch):
        params, state = carry
        loss, grads = accumulated(state, params, *batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    return step, traces


def scaled(loss_scale=None, tx=None):
    return jmpp.loss_scaled(tx or optax.adam(0.1), loss_scale or jmpp.DynamicLossScale(2.0**10))


def start(tx):
    params = jax.tree.map(jnp.asarray, PARAMS)
    return params, tx.init(params)


@pytest.mark.slow
def test_in_jit_in_scan_and_donated():
    tx = scaled()
    step, traces = make_step(tx, n=4)
    jitted = jax.jit(step, donate_argnums=0)
    carry, losses = start(tx), []
    for _ in range(3):
        carry, loss = jitted(carry, (X, Y))
        losses.append(loss)
    assert len(traces) == 1
    batches = jax.tree.map(lambda x: jnp.stack([x] * 3), (X, Y))
    scanned, all_losses = jax.jit(lambda c, b: lax.scan(step, c, b))(start(tx), batches)
    close((scanned, all_losses), (carry, jnp.stack(losses)))
    assert losses[2] < losses[0]
    assert jmpp.metrics(carry[1])["steps"] == 3


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_microbatch_skips_the_window(bad):
    tx = scaled()
    step, _ = make_step(tx, n=4)
    before = start(tx)
    (params, state), loss = jax.jit(step)(before, (X.copy(), np.where(np.arange(ROWS)[:, None] == 5, bad, Y)))
    equal((params, state.inner_state), (before[0], before[1].inner_state))
    assert not np.isfinite(loss)
    assert jmpp.metrics(state)["skipped_steps"] == 1
    assert float(state.loss_scale.loss_scale) == 2.0**9


def poisoned(*rows):
    return np.where(np.isin(np.arange(ROWS), rows)[:, None], np.float32(np.inf), X)


def test_a_loss_that_is_not_finite_counts_though_its_gradients_are():
    def loss_fn(params, x):
        return (params * x).mean() + jnp.where(x[0] > 2, jnp.nan, 0.0)

    x = jnp.arange(4.0) + 1
    assert np.isnan(jmpp.accumulate_gradients(loss_fn, 4)(SCALE, jnp.float32(1), x)).all()


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))


def collectives(compiled):
    """How often each collective stands in the main computation, and how often elsewhere: in loops."""
    main, loops = {}, {}
    assert " while(" in compiled.as_text()
    for computation in compiled.as_text().split("\n\n"):
        found = main if computation.lstrip().startswith("ENTRY ") else loops
        for op in re.findall(r" (all-[\w]+|collective-permute|reduce-scatter)(?:-start)?\(", computation):
            found[op] = found.get(op, 0) + 1
    return main, loops


def sharded(mesh, x=X, y=Y):
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    return params, *jax.device_put((x, y), NamedSharding(mesh, P("data")))


def ways(kind, mesh, **kwargs):
    """The ways to accumulate on the devices of a mesh."""
    accumulate = functools.partial(jmpp.accumulate_gradients, mlp, 4, **kwargs)
    if kind == "jit":
        return accumulate()
    if kind == "axis_name":
        return accumulate(axis_name="data", mesh=mesh)
    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    local = accumulate(axis_name="data")
    return jax.shard_map(local, mesh=mesh, check_vma=kind == "shard_map", **specs)


WAYS = ("jit", "axis_name", "shard_map", "shard_map without check")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_devices_synchronise_once_per_window_and_the_batch_stays_where_it_is(way):
    mesh = mesh_of()
    function = jax.jit(ways(way, mesh))
    args = (SCALE, *sharded(mesh))
    compiled = function.lower(*args).compile()
    main, loops = collectives(compiled)
    assert set(main) | set(loops) == {"all-reduce"}
    if way == "jit":  # Without the name of the axis XLA adds up in the loop: what the name is for.
        assert loops["all-reduce"] >= 1
    else:
        assert (main, loops) == ({"all-reduce": 1}, {})
    got = compiled(*args)
    close(got, whole_batch())
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(got))


@pytest.mark.slow
def test_parameters_spread_over_devices():
    """FSDP: the batch and the parameters are split over the same axis."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "data"))
    params = {"w1": normal(1, 16, 8), "w2": normal(2, 8, 16)}
    x, y = normal(3, ROWS, 16), normal(4, ROWS, 16)
    places = {"w1": rows, "w2": columns}
    spread = jax.device_put(params, places)
    batch = jax.device_put((x, y), rows)
    want = jmpp.scaled_value_and_grad(mlp)(SCALE, params, x, y)
    for arguments in ({}, {"axis_name": "data", "mesh": mesh}):
        function = jax.jit(
            jmpp.accumulate_gradients(mlp, 4, **arguments),
            out_shardings=(NamedSharding(mesh, P()), places),
        )
        compiled = function.lower(SCALE, spread, *batch).compile()
        value, grads = compiled(SCALE, spread, *batch)
        close((value, grads), want)
        assert {k: g.sharding for k, g in grads.items()} == places
        main, loops = collectives(compiled)
        if arguments:  # Parameters are gathered before the loop, gradients reduced after it.
            assert loops == {}
            assert main["all-gather"] >= 1


@pytest.mark.slow
@pytest.mark.skipif(not is_installed(), reason="needs the extra gpu-lowering")
@pytest.mark.parametrize("way", ["jit", "axis_name"])
def test_on_gpus_too(way):
    """XLA's GPU compiler moves some sums behind the loop itself, in the dtype that it finds them in."""
    mesh = mesh_of()

    def half(params, x, y):
        params = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        return mlp(params, x.astype(jnp.float16), y).astype(jnp.float32)

    kwargs = {} if way == "jit" else {"axis_name": "data", "mesh": mesh}
    function = jmpp.accumulate_gradients(half, 4, **kwargs)
    scale = jax.device_put(SCALE, NamedSharding(mesh, P()))
    found = jmpp.lowering_report(function, scale, *sharded(mesh)).collectives
    if way == "axis_name":
        assert [(k.collective, k.times, k.operands) for k in found] == [("all-reduce", 1, "float32")]
    else:
        assert any(k.times == 4 for k in found)
        assert any("float16" in k.operands for k in found)


def test_rows_in_runs_would_move_the_batch():
    """What the interleaved split avoids."""
    mesh = mesh_of()

    def by_runs(params, x, y):
        def body(total, micro):
            return jax.tree.map(jnp.add, total, jax.grad(mlp)(params, *micro)), None

        runs = jax.tree.map(lambda a: a.reshape(4, ROWS // 4, -1), (x, y))
        return lax.scan(body, jax.tree.map(jnp.zeros_like, params), runs)[0]

    main, loops = collectives(jax.jit(by_runs).lower(*sharded(mesh)).compile())
    assert "all-gather" in set(main) | set(loops)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [None, 5])
def test_all_devices_decide_the_same(way, bad):
    mesh, tx = mesh_of(), scaled()
    function = ways(way, mesh)
    params, x, y = sharded(mesh, X if bad is None else poisoned(bad))

    @jax.jit
    def step(params, state, x, y):
        loss, grads = function(state.loss_scale, params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    new, state, loss = step(params, tx.init(params), x, y)
    assert bool(state.grads_finite) is (bad is None) is bool(np.isfinite(loss))
    for name, leaf in new.items():
        shards = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert len(shards) == 1
        assert (shards == {PARAMS[name].tobytes()}) is (bad is not None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_other_axes_of_the_mesh_stay_as_they_were(kind):
    """Tensor parallelism beside it; in explicit mode the loss function itself would have to say how."""
    mesh = mesh_of(kind)
    params, x, y = sharded(mesh)
    specs = (
        {"w1": P(None, "model"), "w2": P("model", None)} if kind == AxisType.Auto else {"w1": P(), "w2": P()}
    )
    params = jax.device_put(params, {k: NamedSharding(mesh, spec) for k, spec in specs.items()})
    with jax.set_mesh(mesh):  # Found without mesh=.
        got = jax.jit(jmpp.accumulate_gradients(mlp, 4, axis_name="data"))(SCALE, params, x, y)
        with pytest.raises(ValueError, match=r"32 rows cannot be split into 3 .* each of 4 devices"):
            jmpp.accumulate_gradients(mlp, 3, axis_name="data")(SCALE, params, x, y)
        with pytest.raises(ValueError, match=r"'rows' is no mapped axis .* has the axes \('data', 'model'\)"):
            jmpp.accumulate_gradients(mlp, 4, axis_name="rows")(SCALE, params, x, y)
    for name, spec in specs.items():
        assert got[1][name].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    close(got, whole_batch())


def test_two_axes_together_and_the_aux_of_every_device():
    mesh = mesh_of()
    x = jax.device_put(np.arange(ROWS, dtype=np.float32), NamedSharding(mesh, P(("data", "model"))))

    def loss_fn(params, x, key):
        return (params * x).mean(), {"x": x, "drawn": jax.random.uniform(key)}

    function = jmpp.accumulate_gradients(loss_fn, 2, has_aux=True, axis_name=("data", "model"), mesh=mesh)
    (loss, aux), grad = jax.jit(function)(SCALE, jnp.float32(1), x, jax.random.key(0))
    assert (float(loss), float(grad)) == (15.5, 124.0)
    assert sorted(aux["x"].ravel().tolist()) == list(range(ROWS))
    assert aux["x"][:2].tolist() == [[0, 2], [1, 3]]  # Device 0.
    assert len(set(aux["drawn"].tolist())) == 16
    by_hand = [jax.random.uniform(jax.random.fold_in(jax.random.key(0), i)) for i in range(16)]
    equal(aux["drawn"], jnp.stack(by_hand))


@pytest.mark.slow
def test_a_loss_averaged_over_devices_is_refused():
    def loss_fn(params, x, y):
        return lax.pmean(mlp(params, x, y), "data")

    local = jmpp.accumulate_gradients(loss_fn, 4, axis_name="data")
    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
    with pytest.raises(ValueError, match=r"the loss is the same on all devices of 'data'.*without pmean"):
        jax.shard_map(local, mesh=mesh_of(), **specs)(SCALE, PARAMS, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap])
def test_under_vmap_and_pmap(mapped):
    local = jmpp.accumulate_gradients(mlp, 2, axis_name="data")
    rows = jax.tree.map(lambda a: a.reshape(4, ROWS // 4, -1), (X, Y))
    got = mapped(local, in_axes=(None, None, 0, 0), axis_name="data")(SCALE, PARAMS, *rows)
    close(jax.tree.map(lambda x: x[3], got), whole_batch())


def test_memory_is_that_of_one_microbatch():
    rows, width = 1024, 32
    x, y = np.ones((rows, WIDTHS[0]), np.float32), np.ones((rows, width), np.float32)
    params = {"w1": np.ones((WIDTHS[0], 64), np.float32), "w2": np.ones((64, width), np.float32)}

    def temporary(function):
        return jax.jit(function).lower(SCALE, params, x, y).compile().memory_analysis().temp_size_in_bytes

    whole = temporary(jmpp.scaled_value_and_grad(mlp))
    activations = rows * 64 * 4
    assert whole > activations
    assert temporary(jmpp.accumulate_gradients(mlp, 16)) < whole / 4


@pytest.mark.once
def test_optax_multi_steps_inside_loss_scaled():
    """The other way to accumulate: one micro-batch per call. Bad ones are left out, good ones wait for k."""
    n, sgd = 4, optax.sgd(0.5)
    tx = scaled(jmpp.StaticLossScale(2.0**10), optax.MultiSteps(sgd, n))
    gradient = jmpp.scaled_value_and_grad(mlp)

    @jax.jit
    def step(carry, x, y):
        params, state = carry
        _, grads = gradient(state, params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    carry, bad = start(tx), poisoned(1, 3)
    for i, x in ((0, X), (1, bad), (1, X), (2, X), (3, bad), (3, X)):
        equal(carry[0], start(tx)[0])
        carry = step(carry, x[i::n], Y[i::n])
    assert int(carry[1].skipped) == 2
    one = scaled(jmpp.StaticLossScale(2.0**10), sgd)
    window, _ = make_step(one, n=n)
    (by_window, _), _ = jax.jit(window)(start(one), (X, Y))
    whole = optax.apply_updates(PARAMS, jax.tree.map(lambda g: -0.5 * g, jax.grad(mlp)(PARAMS, X, Y)))
    close(carry[0], by_window)
    close(carry[0], whole)


class Net(nnx.Module):
    def __init__(self, rngs, sows=False):
        self.first, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.sows = sows

    def __call__(self, x):
        h = nnx.relu(self.norm(self.first(x)))
        if self.sows:
            self.hidden = nnx.Cache(h)
        return self.last(self.dropout(h))


def nnx_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


nnx_step = nnx.jit(jmpp.nnx.scaled_value_and_grad(nnx_loss))


def other_state(model):
    kept = nnx.state(model, nnx.Any(nnx.BatchStat, nnx.RngCount))
    return jax.tree.map(jnp.copy, nnx.as_pure(kept))


@pytest.mark.slow
def test_nnx_state_goes_from_microbatch_to_microbatch():
    model, by_hand = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    found = [nnx_step(SCALE, by_hand, X[i::4], Y[i::4]) for i in range(4)]

    @nnx.jit
    def step(model, x, y):
        return jmpp.nnx.accumulate_gradients(nnx_loss, 4)(SCALE, model, x, y)

    got = step(model, X, Y)
    want = jax.tree.map(lambda *x: sum(x) / 4, *[nnx.as_pure(f) for f in found])
    close(nnx.as_pure(got), want)
    close(other_state(model), other_state(by_hand))
    assert int(model.dropout.rngs.count[...]) == 4


@pytest.mark.slow
def test_nnx_trains_and_a_skipped_window_leaves_the_state():
    model = jmpp.wrap(Net(nnx.Rngs(0)), "mixed_float16")
    optimizer = nnx.Optimizer(model, scaled(), wrt=nnx.Param)
    traces = []

    @nnx.jit
    def step(model, optimizer, x, y):
        traces.append(None)
        with jmpp.nnx.keep_state_on_skip(optimizer, model):
            loss, grads = jmpp.nnx.accumulate_gradients(nnx_loss, 4)(optimizer, model, x, y)
            optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, X, Y)) for _ in range(8)]
    assert min(losses[4:]) < losses[0]
    before = other_state(model)
    step(model, optimizer, poisoned(5), Y)
    assert not bool(jmpp.grads_finite(optimizer))
    equal(other_state(model), before)
    assert len(traces) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["axis_name", "shard_map"])
def test_nnx_on_devices(way):
    mesh, tx = mesh_of(), SCALE
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def local(state, x, y, **kwargs):
        model = nnx.merge(graph, state)
        accumulate = jmpp.nnx.accumulate_gradients(nnx_loss, 4, axis_name="data", **kwargs)
        value, grads = accumulate(tx, model, x, y)
        return value, grads, nnx.state(model)

    if way == "axis_name":
        function = functools.partial(local, mesh=mesh)
    else:
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
        function = jax.shard_map(local, mesh=mesh, **specs)
    _, x, y = sharded(mesh)
    compiled = jax.jit(function).lower(state, x, y).compile()
    assert collectives(compiled) == ({"all-reduce": 1}, {})
    loss, grads, after = compiled(state, x, y)
    assert np.isfinite(loss)
    assert jax.tree.structure(nnx.as_pure(grads)) == jax.tree.structure(
        nnx.as_pure(nnx.state(Net(nnx.Rngs(0)), nnx.Param))
    )
    # Every device has its own rows in its own running mean; the mean of those is that of all rows.
    momentum, hidden = 0.99, X @ np.asarray(state["first"]["kernel"][...])
    means = np.zeros(8)
    for i in range(4):
        means = momentum * means + (1 - momentum) * hidden[i::4].mean(0)
    np.testing.assert_allclose(after["norm"]["mean"][...], means, rtol=1e-4, atol=1e-6)
    equal(
        jax.random.key_data(after["dropout"]["rngs"]["key"][...]),
        jax.random.key_data(state["dropout"]["rngs"]["key"][...]),
    )


@pytest.mark.slow
def test_nnx_other_parameters_and_variables_that_appear():
    lora = nnx.LoRALinear(6, 4, lora_rank=2, rngs=nnx.Rngs(0))
    wrt = nnx.LoRAParam
    got = jmpp.nnx.accumulate_gradients(nnx_loss, 4, wrt=wrt)(SCALE, lora, X, Y)
    want = jmpp.nnx.scaled_value_and_grad(nnx_loss, argnums=nnx.DiffState(0, wrt))(SCALE, lora, X, Y)
    close(nnx.as_pure(got), nnx.as_pure(want))
    lora.step = nnx.Param(jnp.int32(3))
    both = {"wrt": (nnx.Param, nnx.LoRAParam), "allow_int": True}
    _, got = jmpp.nnx.accumulate_gradients(nnx_loss, 4, **both)(SCALE, lora, X, Y)
    assert got.step[...].dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="real- or complex-valued inputs"):
        jmpp.nnx.accumulate_gradients(nnx_loss, 4)(SCALE, lora, X, Y)
    with pytest.raises(ValueError, match=r"added Variables to the module or removed some \(\['hidden'\]"):
        jmpp.nnx.accumulate_gradients(nnx_loss, 4)(SCALE, Net(nnx.Rngs(0), sows=True), X, Y)
    with pytest.raises(TypeError, match="splits all that comes after the model, and Net is a module"):
        jmpp.nnx.accumulate_gradients(nnx_loss, 4)(SCALE, Net(nnx.Rngs(0)), X, Net(nnx.Rngs(0)))
