"""nnx.autocast: functions of modules, whose state is kept and whose places are scopes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from helpers import products

import jmp_policy as jmpp

X = jax.random.normal(jax.random.key(0), (16, 8))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(nnx.relu(self.linear(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.classify(x)

    def classify(self, x):
        return self.head(x)


def loss_fn(net, x):
    return jnp.mean(net(x) ** 2)


def make():
    return Net(nnx.Rngs(0))


def operands(policy, **options):
    rows = jmpp.nnx.explain(loss_fn, policy, **options)(make(), X).of("dot_general")
    return {row.path: row.operands for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_value_gradient_and_state(half):
    net, bare = make(), make()
    cast = jmpp.nnx.autocast(loss_fn, half)
    loss, grads = nnx.jit(nnx.value_and_grad(cast))(net, X)
    expected, expected_grads = nnx.value_and_grad(loss_fn)(bare, X)
    eps = float(jnp.finfo(half).eps)
    assert loss.dtype == np.float32
    # Six roundings on the way, of values of the loss's order.
    np.testing.assert_allclose(loss, expected, rtol=6 * eps)
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert got.dtype == np.float32
        assert np.linalg.norm(got - wanted) <= 16 * eps * max(np.linalg.norm(wanted), 0.1)
    np.testing.assert_allclose(net.norm.mean[...], bare.norm.mean[...], atol=4 * eps)
    assert net.norm.mean[...].dtype == np.float32
    for block, other in zip(net.blocks, bare.blocks, strict=True):
        assert block.drop.rngs.count[...] == other.drop.rngs.count[...] == 1
    # The same masks: the same random bits.
    assert type(net) is Net
    assert type(net.blocks[0].linear) is nnx.Linear


@pytest.mark.slow
def test_only_what_changed_is_written():
    net = make()
    kernel, mean = net.stem.kernel.get_raw_value(), net.norm.mean.get_raw_value()
    jmpp.nnx.autocast(loss_fn, "float16")(net, X)
    assert net.stem.kernel.get_raw_value() is kernel
    assert net.norm.mean.get_raw_value() is not mean


def test_modules_are_scopes():
    assert set(operands("float16")) == {
        "Net/stem", "Net/blocks/0/linear", "Net/blocks/1/linear", "Net/head",
    }  # fmt: skip
    rules = (("*head*", "off"), ("blocks/1", "bfloat16"))
    assert operands("float16", rules=rules) == {
        "Net/stem": "float16",
        "Net/blocks/0/linear": "float16",
        "Net/blocks/1/linear": "bfloat16",
        "Net/head": "float32",
    }
    lowered = nnx.jit(nnx.value_and_grad(jmpp.nnx.autocast(loss_fn, "float16"))).lower(make(), X)
    assert "/blocks/1/linear/" in lowered.as_text(debug_info=True)


@pytest.mark.parametrize(
    "overrides",
    [{"head": "float32"}, {"blocks/*": "mixed_bfloat16"}, {Block: "float32", "stem": "mixed_bfloat16"}],
    ids=["path", "glob", "class"],
)
def test_a_policy_map_means_what_it_means_to_wrap(overrides):
    rules = jmpp.PolicyMap("mixed_float16", overrides)

    def count(model, function):
        graph, state = nnx.split(model)
        return products(lambda state, x: function(nnx.merge(graph, state), x), state, X)

    wrapped = count(jmpp.wrap(make(), rules), loss_fn)
    assert count(make(), jmpp.nnx.autocast(loss_fn, rules)) == wrapped


@pytest.mark.slow
def test_bad_rules():
    with pytest.raises(ValueError, match=r"'hed' matches no .*nearest paths are 'head'"):
        operands(jmpp.PolicyMap("mixed_float16", {"hed": "float32"}))
    with pytest.raises(ValueError, match=r"'hed' matches no .*nearest paths are 'Net/head'"):
        operands("float16", rules={"hed": "off"})
    net = make()
    cast = jmpp.nnx.autocast(loss_fn, "float16", rules={"hed": "off"})
    with pytest.raises(ValueError, match="matches no"):
        cast(net, X)
    assert loss_fn(net, X).dtype == np.float32  # Still whole, and of its own classes.
    assert type(net.head) is nnx.Linear


def test_what_is_no_function_of_modules():
    with pytest.raises(TypeError, match=r"nnx\.autocast takes a function of modules, got Net"):
        jmpp.nnx.autocast(make(), "float16")
    with pytest.raises(TypeError, match=r"Use jmp_policy\.nnx\.autocast"):
        jmpp.autocast(loss_fn, "float16")(make(), X)
    with pytest.raises(TypeError, match=r"For an NNX module use jmp_policy\.nnx\.autocast"):
        jmpp.autocast(make(), "float16")
    with pytest.raises(TypeError, match=r"Use jmp_policy\.nnx\.autocast"):
        jmpp.autocast(lambda rngs: rngs.params(), "float16")(nnx.Rngs(0))


def test_pure_functions_of_states_need_nothing():
    graph, state = nnx.split(make())
    pure = jmpp.autocast(lambda state, x: nnx.merge(graph, state)(x).sum(), "float16")
    assert {v for key in products(pure, state, X) for v in key[1:]} == {"float16"}


@pytest.mark.slow
def test_results_may_hold_modules_and_new_state():
    net = make()
    same, out, text = jmpp.nnx.autocast(lambda net, x: (net, net(x), "a"), "float16")(net, X)
    assert same is net
    assert (out.dtype, text) == (np.float32, "a")

    class Keeper(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.hidden = nnx.Cache(self.linear(x))
            return x

    keeper = Keeper()
    jmpp.nnx.autocast(lambda m, x: m(x), "float16")(keeper, X)
    assert keeper.hidden[...].shape == (16, 8)

    class Grower(nnx.Module):
        def __init__(self):
            self.seen = nnx.Intermediate(())

        def __call__(self, x):
            self.seen.set_value((*self.seen.get_value(), x.sum()))
            return x

    grower = Grower()
    for count in (1, 2, 3):
        jmpp.nnx.autocast(lambda m, x: m(x), "float16")(grower, X)
        assert len(grower.seen.get_value()) == count
    twice = jmpp.nnx.autocast(lambda a, b, x: a(x) + b(x), "float16")(net, net, X)
    assert twice.shape == (16, 3)
    assert type(net) is Net
    rngs = nnx.Rngs(0)
    key = jmpp.nnx.autocast(lambda rngs: rngs.params(), "float16")(rngs)
    assert key == nnx.Rngs(0).params()
    assert rngs.params.count[...] == 1


@pytest.mark.slow
def test_transforms_inside():
    class Stacked(nnx.Module):
        def __init__(self, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def make(rngs):
                return nnx.Linear(8, 8, rngs=rngs)

            self.layers = make(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def step(layer, x):
                return jnp.tanh(layer(x))

            return nnx.jit(step)(self.layers, x)

    def function(net, x):
        return nnx.remat(lambda net, x: net(x))(net, x).sum()

    net = Stacked(nnx.Rngs(0))
    cast = jmpp.nnx.autocast(function, "bfloat16")
    loss, grads = nnx.jit(nnx.value_and_grad(cast))(net, X)
    expected, expected_grads = nnx.value_and_grad(function)(net, X)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(loss, expected, atol=8 * eps * X.size)
    got, wanted = grads.layers.kernel[...], expected_grads.layers.kernel[...]
    assert np.linalg.norm(got - wanted) <= 16 * eps * np.linalg.norm(wanted)


@pytest.mark.slow
def test_three_line_step():
    net = make()
    tx = jmpp.loss_scaled(optax.adam(1e-2), jmpp.DynamicLossScale(2.0**18))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x):
        with jmpp.nnx.keep_state_on_skip(optimizer, net):
            cast = jmpp.nnx.autocast(loss_fn, "float16")
            loss, grads = jmpp.nnx.scaled_value_and_grad(cast)(optimizer, net, x)
            optimizer.update(net, grads)
        return loss

    losses = [float(step(net, optimizer, X)) for _ in range(25)]
    assert losses[-1] < losses[0]
    assert jnp.isfinite(net.norm.mean[...]).all()
    assert net.head.kernel[...].dtype == np.float32


@pytest.mark.slow
def test_no_tracer_leaks():
    net = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))

    def loss(net, x):
        return net(x).sum()

    half, x = jmpp.nnx.autocast(loss, "bfloat16"), jnp.ones((2, 3))
    with jax.checking_leaks():
        nnx.jit(nnx.value_and_grad(half))(net, x)
        jmpp.nnx.explain(loss, "bfloat16")(net, x)


def test_of_a_module_in_the_closure_the_repair_is_told():
    model = Net(nnx.Rngs(0))
    with pytest.raises(errors.TraceContextError, match="Cannot mutate") as raised:
        jmpp.autocast(lambda x: model(x), "float16")(X)
    assert any("jmp_policy.nnx.autocast(lambda model, x: model(x)" in note for note in raised.value.__notes__)
