"""Wrapped NNX modules in every NNX transform, and in the tools that look at modules."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from nnx_helpers import CASES, MLP, EncoderLayer, Raw

import jmp_policy as jmpp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:orbax", "ignore::DeprecationWarning:flax")


def make(cls=Raw, policy="mixed_float16", **kwargs):
    return jmpp.wrap(cls(rngs=nnx.Rngs(0), **kwargs), policy)


X = jax.random.normal(jax.random.key(0), (4, 32))


def values(tree):
    return jax.tree.leaves(nnx.as_pure(tree))


def assert_same(a, b):
    for left, right in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [MLP, Raw])
@pytest.mark.parametrize("graph", [True, False])
def test_jit_grad_and_value_and_grad_in_graph_and_tree_mode(cls, graph):
    model = make(cls)
    want = model(X)
    np.testing.assert_array_equal(
        nnx.jit(lambda m, x: m(x), graph=graph)(model, X), jax.jit(lambda x: model(x))(X)
    )
    np.testing.assert_allclose(want, jax.jit(lambda x: model(x))(X), rtol=2e-3, atol=1e-6)
    loss, grads = nnx.value_and_grad(lambda m: m(X).sum(), graph=graph)(model)
    assert loss.dtype == jnp.float32
    assert {g.dtype.name for g in values(grads)} == {"float32"}
    assert_same(grads, nnx.grad(lambda m: m(X).sum(), graph=graph)(model))
    graphdef, state = nnx.split(model, graph=graph)
    np.testing.assert_array_equal(nnx.merge(graphdef, state)(X), want)
    shapes = nnx.eval_shape(lambda: make(cls))
    assert jmpp.nnx.policy_of(shapes) == jmpp.get_policy("mixed_float16")
    assert nnx.graphdef(shapes) == nnx.graphdef(model)


def test_tree_mode_as_a_plain_pytree():
    model = make()
    doubled = jax.tree.map(lambda x: 2 * x if jnp.issubdtype(x.dtype, jnp.floating) else x, model)
    assert type(doubled) is type(model)
    np.testing.assert_array_equal(jax.jit(lambda m, x: m(x))(model, X), nnx.jit(lambda m, x: m(x))(model, X))
    with nnx.set_graph_mode(False):
        np.testing.assert_array_equal(jmpp.wrap(Raw(rngs=nnx.Rngs(0)), "mixed_float16")(X), model(X))


def test_wrap_inside_a_transform():
    bare = Raw(rngs=nnx.Rngs(0))

    @nnx.jit
    def run(bare, x):
        model = jmpp.wrap(bare, "mixed_float16")
        model.calls = nnx.Variable(jnp.zeros(()))  # The new tree belongs to this trace.
        return model(x)

    np.testing.assert_allclose(run(bare, X), make()(X), rtol=2e-3)


@pytest.mark.slow
def test_vmap_over_modules_and_inputs():
    ensemble = jmpp.wrap(nnx.vmap(lambda rngs: Raw(rngs=rngs))(nnx.Rngs(0).split(3)), "mixed_float16")
    assert ensemble.w.shape == (3, 32, 16)
    out = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(ensemble, X)
    assert (out.shape, out.dtype) == ((3, 4, 16), jnp.float32)
    made_wrapped = nnx.vmap(lambda rngs: make())(nnx.Rngs(0).split(3))
    assert made_wrapped.w.shape == (3, 32, 16)
    one = nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(make(), X)
    np.testing.assert_allclose(one, make()(X), rtol=2e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers(remat):
    layers = nnx.vmap(lambda rngs: EncoderLayer(rngs=rngs))(nnx.Rngs(0).split(3))
    wrapped = jmpp.wrap(layers, "p=f32,c=f16,o=f16")
    x = jax.random.normal(jax.random.key(0), (2, 5, 32))

    def body(x, layer):
        return layer(x)

    body = nnx.remat(body) if remat else body
    run = nnx.jit(lambda layers, x: nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers))
    out = run(wrapped, x.astype(jnp.float16))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, run(layers, x), atol=0.03)
    assert {
        g.dtype.name for g in values(nnx.grad(lambda m: run(m, x.astype(jnp.float16)).sum())(wrapped))
    } == {"float32"}


def test_cond_switch_while_and_fori():
    model = make()
    want = nnx.jit(lambda m, x: m(x))(model, X)
    out = nnx.jit(lambda m, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: m(x) * 0, m, x))(model, X)
    np.testing.assert_array_equal(out, want)
    square = jmpp.wrap(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), "mixed_float16")
    out = nnx.fori_loop(0, 2, lambda i, v: (v[0], v[0](v[1])), (square, X))[1]
    np.testing.assert_allclose(out, square(square(X)), rtol=2e-3, atol=1e-3)


def test_cached_partial_and_custom_vjp():
    model = make()
    optimizer = nnx.Optimizer(model, jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale()), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jmpp.nnx.scaled_value_and_grad(lambda m: m(x).mean())(optimizer, model)
        optimizer.update(model, grads)
        return loss

    cached = nnx.cached_partial(step, model, optimizer)
    losses = [float(cached(X)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]

    @nnx.custom_vjp
    def f(m, x):
        return m(x).sum()

    def backward(saved, cotangents):
        (of_model, _), of_out = cotangents
        return jax.tree.map(lambda g: jnp.full_like(g, of_out), of_model), jnp.zeros_like(saved)

    f.defvjp(lambda m, x: (f(m, x), x), backward)
    assert {float(g.min()) for g in values(nnx.grad(f)(model, X))} == {1.0}


@pytest.mark.slow
def test_shard_map_and_sharded_parameters():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    class Sharded(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
            self.linear = nnx.Linear(32, 16, kernel_init=init, rngs=rngs)
            self.w = nnx.Param(jnp.ones((16, 8)), out_sharding=("model", None))

        def __call__(self, x):
            return self.linear(x) @ self.w

    with jax.set_mesh(mesh):
        bare = Sharded(nnx.Rngs(0))
        model = jmpp.wrap(bare, "mixed_float16")
        assert nnx.get_partition_spec(nnx.state(model)) == nnx.get_partition_spec(nnx.state(bare))
        out = nnx.jit(lambda m, x: m(x))(model, X)
        np.testing.assert_allclose(out, nnx.jit(lambda m, x: m(x))(bare, X), atol=0.02)
        assert model.w[...].sharding.spec == bare.w[...].sharding.spec


@pytest.mark.slow
def test_views_modes_and_attributes():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(32, 32, rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    model = make(lambda rngs: Net(rngs))
    view = nnx.view(model, deterministic=True, use_running_average=True)
    assert view.linear.kernel is model.linear.kernel
    np.testing.assert_array_equal(view(X), view(X))
    assert not jnp.array_equal(model(X), model(X))
    assert int(model.dropout.rngs.count[...]) == 2
    traces = []

    @nnx.jit
    def run(m, x):
        traces.append(None)
        return m(x)

    for _ in range(2):
        run(nnx.view(model, deterministic=True, use_running_average=True), X)
    assert len(traces) == 1
    model.eval()
    np.testing.assert_array_equal(model(X), view(X))
    model.train()
    assert not model.dropout.deterministic
    model.set_attributes(nnx.Dropout, rate=0.0)
    assert model.dropout.rate == 0.0


def test_tabulate_and_repr():
    table = re.sub(r"\x1b\[[0-9;]*m", "", nnx.tabulate(make(), X, console_kwargs={"width": 200}))
    assert [line.split("│")[2:5] for line in table.splitlines() if "Linear" in line] == [
        [" Linear ", " float16[4,16] ", " float16[4,16] "]
    ]
    assert "w: float32[32,16]" in table
    assert repr(make()).startswith("Raw(")
    np.testing.assert_array_equal(make()(X), make()(X))  # tabulate puts the methods back.


def test_perturbations_have_the_dtype_of_what_they_are_added_to():
    class Net(nnx.Module):
        def __init__(self):
            self.lin = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            x = self.perturb("p", self.lin(x))
            return x @ x.T

    def run(model, perturbations):
        return nnx.capture(model, nnx.Intermediate, init=perturbations)(x)[0].sum()

    x = jnp.ones((4, 8))
    model = jmpp.nnx.wrap(Net(), "mixed_float16")
    _, perturbations = nnx.capture(model, nnx.Perturbation)(x)
    assert perturbations["p"].dtype == jnp.float16
    found = jmpp.audit(run, model, perturbations).products
    assert [(p.lhs, p.rhs) for p in found] == [("float16", "float16")] * 2
    grads = nnx.grad(run, argnums=1)(model, perturbations)
    assert (jnp.abs(grads["p"][...]) > 0).all()


def test_capture_of_intermediates():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones((32, 8)))

        def __call__(self, x):
            out = x @ self.w
            self.sow(nnx.Intermediate, "out", out)
            return out

    model = make(Sowing)
    _, found = nnx.capture(model, nnx.Intermediate)(X)
    assert values(found)[0].dtype == jnp.float16


@pytest.mark.slow
def test_orbax_checkpoints_go_both_ways(tmp_path):
    """A wrapped model's checkpoint loads into the bare one, and back."""
    case = next(c for c in CASES if c.name == "cnn")
    bare, trained = case(), jmpp.wrap(case(), "mixed_float16")
    trained.head.kernel[...] += 1
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "wrapped", nnx.as_pure(nnx.state(trained)))
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.as_pure(nnx.state(bare)))
        nnx.update(bare, checkpointer.restore(tmp_path / "wrapped", target))
        assert_same(nnx.state(bare), nnx.state(trained))
        checkpointer.save(tmp_path / "bare", nnx.as_pure(nnx.state(bare)))
        checkpointer.wait_until_finished()
        shapes = nnx.eval_shape(lambda: jmpp.wrap(case(), "mixed_float16"))
        graphdef, state = nnx.split(shapes)
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.as_pure(state))
        restored = nnx.merge(graphdef, checkpointer.restore(tmp_path / "bare", target))
    x = case.inputs()
    np.testing.assert_array_equal(restored(x), trained(x))


def test_modules_that_make_their_submodules_when_called():
    class Compact(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x):
            return x

    with pytest.raises(TypeError, match=r"Compact at 'layers/0' is a flax.nnx.bridge.Module.*cannot reach"):
        jmpp.wrap(nnx.Sequential(Compact()), "mixed_float16")


def test_threads_do_not_disturb_each_other():
    import concurrent.futures

    model = make()
    want = model(X)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: model(X), range(64)))
    assert all(jnp.array_equal(out, want) for out in outs)
    assert model.w.dtype == jnp.float32
