"""`wrap` as users meet it: rules, islands, submodules, errors."""

import functools
import gc
import pickle
import subprocess
import sys
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from helpers import CNN, Encoder, dtypes, paired, products

import jmp_policy as jmpp


class Leaf(nn.Module):
    """Says in which dtypes it was called and what it computed in."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.ones, (x.shape[-1],))
        self.sow("seen", "dtypes", jnp.zeros((), (x * w).dtype))
        return x * w


class Tree(nn.Module):
    def setup(self):
        self.encoder = [Leaf(), Leaf()]
        self.decoder = nn.Sequential([Leaf(), Leaf()])
        self.head = Leaf()

    def __call__(self, x):
        for leaf in self.encoder:
            x = leaf(x)
        return self.head(self.decoder(x))


def computed(policy, module=None, **kwargs):
    """path -> the dtype that Leaf computed in."""
    model = jmpp.wrap(module or Tree(), policy)
    x = jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    out, state = model.apply({"params": variables["params"]}, x, mutable=["seen"], **kwargs)
    seen = {
        "/".join(str(k.key) for k in path[:-2]): value.dtype.name
        for path, value in jax.tree_util.tree_leaves_with_path(state["seen"])
    }
    return out, seen


F16, F32, BF16 = "float16", "float32", "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        ({}, [F16, F16, F16, F16, F16]),
        ({"head": F32}, [F16, F16, F16, F16, F32]),
        ({"decoder": F32}, [F16, F16, F32, F32, F16]),
        ({"decoder/layers_1": BF16, "decoder": F32}, [F16, F16, F32, BF16, F16]),
        ({"encoder_*": F32}, [F32, F32, F16, F16, F16]),
        ({"*": F32}, [F32, F32, F32, F32, F32]),
        ({"**/layers_[0]": F32}, [F16, F16, F32, F16, F16]),
        ({nn.Sequential: F32}, [F16, F16, F32, F32, F16]),
        ({nn.Sequential: F32, "decoder/layers_0": F16}, [F16, F16, F16, F32, F16]),
        ({lambda path, module: path == "head": F32}, [F16, F16, F16, F16, F32]),
        ({"head": BF16, Leaf: F32}, [F32, F32, F32, F32, BF16]),
    ],
)
def test_rules(overrides, want):
    _, seen = computed(jmpp.PolicyMap("mixed_float16", overrides))
    paths = ["encoder_0", "encoder_1", "decoder/layers_0", "decoder/layers_1", "head"]
    assert [seen[path] for path in paths] == want


@pytest.mark.slow
def test_output_dtype_applies_at_the_border_only():
    dtypes = {}

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, name="a")(x)
            dtypes["a"] = x.dtype.name
            x = nn.Dense(8, name="island")(x)
            dtypes["island"] = x.dtype.name
            return nn.Dense(8, name="b")(x)

    model = jmpp.wrap(Outer(), jmpp.PolicyMap("mixed_float16", {"island": "p=f32,c=bf16,o=f32"}))
    out, _ = model.init_with_output(jax.random.key(0), jnp.ones((1, 8)))
    assert dtypes == {"a": F16, "island": F32}
    assert out.dtype == jnp.float32


def test_scalars_of_inner_modules_stay_float32():
    class Loss(nn.Module):
        def __call__(self, x):
            return jnp.mean(x.astype(jnp.float32) ** 2)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Loss()(nn.Dense(8)(x))

    model, x = jmpp.wrap(Outer(), "mixed_float16"), jnp.ones((1, 8))
    variables = model.init(jax.random.key(0), x)
    state = jmpp.StaticLossScale(2.0**16)
    _, grads = jmpp.scaled_value_and_grad(lambda v: model.apply(v, x))(state, variables)
    assert bool(jmpp.all_finite(grads))


def test_a_call_among_own_methods_crosses_no_border():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.loss(nn.Dense(8)(x).astype(jnp.float32))

        def loss(self, logits):
            assert logits.dtype == jnp.float32
            return logits.sum()

    jmpp.wrap(Net(), "mixed_float16").init(jax.random.key(0), jnp.ones((1, 8)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "policy"),
    paired(
        [nn.BatchNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm],
        ["mixed_float16", "float16", "p=f32,c=f16"],
    ),
)
def test_norms_are_float32_islands(norm, policy):
    class Sub(norm):
        """A subclass is an island too."""

    kwargs = {"use_running_average": False} if norm is nn.BatchNorm else {}
    kwargs |= {"num_groups": 2} if norm is nn.GroupNorm else {}
    model = nn.Sequential([nn.Dense(8), Sub(**kwargs, force_float32_reductions=False)])
    x = 300 * jnp.ones((2, 3, 8)) + jnp.arange(8)  # 300**2 is infinite in float16.
    wrapped = jmpp.wrap(model, policy)
    variables = wrapped.init(jax.random.key(0), x)
    stats = {**variables.get("batch_stats", {}), "params": variables["params"]["layers_1"]}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(stats)} == {F32}
    out, state = wrapped.apply(variables, x, mutable=["batch_stats"], capture_intermediates=True)
    assert out.dtype == jmpp.get_policy(policy).output_dtype
    assert bool(jmpp.all_finite((out, state)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        jmpp.PolicyMap("mixed_float16", float32_islands=False),
        jmpp.PolicyMap("mixed_float16", {nn.BatchNorm: "mixed_float16"}),
        jmpp.PolicyMap("mixed_float16", {"BatchNorm_*": "mixed_float16"}),
    ],
)
def test_islands_can_be_switched_off(rules):
    x = jnp.ones((2, 8, 8, 3))
    text = {}
    for name, policy in {"on": "mixed_float16", "off": rules}.items():
        model = jmpp.wrap(CNN(), policy)
        variables = CNN().init(jax.random.key(0), x)
        jaxpr = jax.make_jaxpr(lambda v, m=model: m.apply(v, x, mutable=["batch_stats"]))(variables)
        text[name] = str(jaxpr).count("float16")
    assert text["off"] > text["on"]  # The norm's own parameters are cast as well.


@pytest.mark.slow
def test_a_sweeping_rule_keeps_the_islands():
    x = jnp.ones((2, 8, 8, 3))
    variables = CNN().init(jax.random.key(0), x)

    def trace(policy):
        model = jmpp.wrap(CNN(), policy)
        return str(jax.make_jaxpr(lambda v: model.apply(v, x, mutable=["batch_stats"]))(variables))

    assert trace(jmpp.PolicyMap("mixed_bfloat16", {"**": "mixed_float16"})) == trace("mixed_float16")


def test_module_dtypes_are_overruled_unless_kept():
    model, x = nn.Sequential([nn.Dense(8, dtype=jnp.float32), nn.Dense(8)]), jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)

    def found(policy):
        return products(lambda v: jmpp.wrap(model, policy).apply(v, x), variables)

    assert found("mixed_float16") == {("dot_general", F16, F16): 2}
    kept = found(jmpp.PolicyMap("mixed_float16", keep_module_dtypes=True))
    assert kept == {("dot_general", F32, F32): 1, ("dot_general", F16, F16): 1}


def test_a_field_called_dtype_that_is_none():
    class Odd(nn.Module):
        dtype: str = "train"

        @nn.compact
        def __call__(self, x):
            assert self.dtype == "train"
            return nn.Dense(2)(x)

    jmpp.wrap(Odd(), "mixed_float16").init(jax.random.key(0), jnp.ones((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "near"),
    [
        ("hed", "'head'"),
        ("encoder/layer_0", "'encoder_0'"),
        ("decoder/layer_1", "'decoder/layers_1'"),
        (nn.Conv, "Conv matches no module of Tree"),
        (lambda path, module: False, "<lambda>"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_unused_rules_are_errors_that_name_the_nearest_path(rule, near, jit):
    model = jmpp.wrap(Tree(), jmpp.PolicyMap("mixed_float16", {rule: "float32"}))
    init = jax.jit(model.init) if jit else model.init
    with pytest.raises(ValueError, match=near):
        init(jax.random.key(0), jnp.ones((2, 8)))
    variables = Tree().init(jax.random.key(0), jnp.ones((2, 8)))
    with pytest.raises(ValueError, match="matches no module"):
        model.apply(variables, jnp.ones((2, 8)))


@pytest.mark.slow
def test_a_rule_for_a_part_that_this_method_does_not_run_is_no_error():
    class Net(nn.Module):
        def setup(self):
            self.a, self.b = nn.Dense(2), nn.Dense(2)

        def __call__(self, x):
            return self.b(self.a(x))

        def encode(self, x):
            return self.a(x)

    x = jnp.ones((1, 2))
    variables = Net().init(jax.random.key(0), x)
    for rule in ("b", nn.Dense):
        model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {rule: "float32"}))
        model.apply(variables, x, method="encode")
        model.apply(variables, x)
    model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {"c": "float32"}))
    with pytest.raises(ValueError, match="'c' matches no module"):
        model.apply(variables, x, method="encode")


@pytest.mark.slow
@pytest.mark.parametrize("as_submodule", [False, True])
def test_a_module_left_out_of_a_later_run_is_no_error(as_submodule):
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(8)(x)
            return nn.Dropout(0.5, deterministic=False)(x) if train else x

    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, x, train):
            return self.inner(x, train)

    def model(rule):
        inner = jmpp.wrap(Inner(), jmpp.PolicyMap("mixed_float16", {rule: "float32"}))
        return Outer(inner) if as_submodule else inner

    x, rngs = jnp.ones((2, 8)), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    good = model(nn.Dropout)
    variables = good.init(rngs, x, train=True)
    good.apply(variables, x, train=False)
    with pytest.raises(ValueError, match="'Dropout_1' matches no module"):
        model("Dropout_1").init(rngs, x, train=True)


def test_as_a_submodule_names_and_tree_stay():
    class Outer(nn.Module):
        policy: str | None

        def setup(self):
            self.inside = self.wrapped(nn.Dense(8))

        def wrapped(self, module):
            return module if self.policy is None else jmpp.wrap(module, self.policy)

        def __call__(self, x):
            return self.inside(x)

    class Compact(nn.Module):
        policy: str | None
        given: nn.Module

        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(8)
            dense = dense if self.policy is None else jmpp.wrap(dense, self.policy)
            return Outer(self.policy)(self.given(dense(x)))

    x = jnp.ones((2, 8))
    bare = Compact(None, nn.Dense(8))
    outer = Compact("mixed_float16", jmpp.wrap(nn.Dense(8), "mixed_float16"))
    want, got = bare.init(jax.random.key(0), x), outer.init(jax.random.key(0), x)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    jax.tree.map(np.testing.assert_array_equal, want, got)
    assert products(lambda v: outer.apply(v, x), got) == {("dot_general", F16, F16): 3}
    assert outer.apply(got, x).dtype == jnp.float32


@pytest.mark.slow
def test_the_innermost_wrap_wins():
    x = jnp.ones((2, 8))
    inner = jmpp.wrap(nn.Dense(8), "mixed_bfloat16")
    outer = jmpp.wrap(nn.Sequential([nn.Dense(8), inner]), "mixed_float16")
    variables = outer.init(jax.random.key(0), x)
    found = products(lambda v: outer.apply(v, x), variables)
    assert found == {("dot_general", F16, F16): 1, ("dot_general", BF16, BF16): 1}


def test_wrapping_again_is_refused_unless_the_policies_are_equal():
    rules = jmpp.PolicyMap("mixed_float16", {"layers_0": "float32"})
    model = jmpp.wrap(nn.Sequential([nn.Dense(4)]), rules)
    assert jmpp.wrap(model, rules) == model
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        message = (
            r"Sequential is wrapped already, under PolicyMap\(.*layers_0.*; wrapped again, under PolicyMap"
        )
        with pytest.raises(ValueError, match=message):
            jmpp.wrap(model, policy)

    class Derived(type(model)):
        pass

    jmpp.wrap(Derived([nn.Dense(4)]), "mixed_bfloat16")


def test_a_submodule_that_asks_about_its_class_gets_its_own_answer():
    class Base(nn.Module):
        def before(self, x):
            return x

        @nn.compact
        def __call__(self, x):
            assert type(self).before is Base.before
            return nn.Dense(4)(self.before(x))

    class Net(Base):
        pass

    x, wrapped = jnp.ones((2, 8)), jmpp.wrap(Net(), "mixed_float16")
    outer = nn.Sequential([wrapped])
    in_half = {("dot_general", "float16", "float16"): 1}
    assert products(outer.apply, outer.init(jax.random.key(0), x), x) == in_half
    assert products(wrapped.bind(wrapped.init(jax.random.key(0), x)), x) == in_half


def test_bind_hash_equality_pickle_and_repr():
    model = jmpp.wrap(nn.Dense(8), "mixed_float16")
    x = jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    assert model.bind(variables)(x).dtype == jnp.float32
    assert products(lambda v: model.bind(v)(x), variables) == {("dot_general", F16, F16): 1}
    assert hash(model) == hash(jmpp.wrap(nn.Dense(8), "mixed_float16"))
    assert model == jmpp.wrap(nn.Dense(8), "mixed_float16") != jmpp.wrap(nn.Dense(8), "float32")
    assert model != nn.Dense(8)
    tree = jmpp.wrap(Tree(), jmpp.PolicyMap("mixed_float16", {"head": "float32"}))
    assert pickle.loads(pickle.dumps(tree)) == tree  # Dense itself cannot be pickled.
    assert isinstance(model, nn.Dense)
    assert model.features == 8
    assert "wrap(Dense(" in repr(model)
    assert "compute=float16" in repr(model)


@pytest.mark.slow
def test_submodules_of_a_bound_module_are_governed():
    class Net(nn.Module):
        given: nn.Module

        def setup(self):
            self.layers = [nn.Dense(8), nn.Sequential([nn.Dense(8), nn.Dense(8)])]
            self.head = nn.Dense(8)

        def __call__(self, x):
            return self.head(self.layers[1](self.layers[0](self.given(x))))

    x = jnp.ones((2, 8))
    rules = jmpp.PolicyMap("mixed_float16", {"layers_1/layers_0": "mixed_bfloat16", "head": "float32"})
    model = jmpp.wrap(Net(nn.Dense(8)), rules)
    variables = model.init(jax.random.key(0), x)

    def parts(variables):
        bound = model.bind(variables)
        y = bound.given(bound.layers[0](x))
        return bound.head(bound.layers[1].layers[0](y)) + bound.layers[1](y)

    found = products(parts, variables)
    assert found == {
        ("dot_general", F16, F16): 3,
        ("dot_general", BF16, BF16): 2,
        ("dot_general", F32, F32): 1,
    }
    assert type(model.given) is nn.Dense


def test_modules_with_attribute_access_and_equality_of_their_own():
    class Net(nn.Module):
        inner: nn.Module

        def __getattr__(self, name):
            return 42 if name.startswith("zz") else super().__getattr__(name)

        def __eq__(self, other):
            return type(self) is type(other)

        def __hash__(self):
            return 7

        @property
        def width(self):
            return self.zz_width - 34

        @nn.compact
        def __call__(self, x):
            return self.inner(nn.Dense(self.width)(x))

    model = jmpp.wrap(Net(nn.Dense(8)), "mixed_float16")
    variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
    found = products(lambda v: model.apply(v, jnp.ones((1, 8))), variables)
    assert found == {("dot_general", F16, F16): 2}
    assert (model.zz, model.width, model.inner.features, hash(model)) == (42, 8, 8, 7)
    assert model == jmpp.wrap(Net(nn.Dense(3)), "mixed_float16")


class Block(nn.Module):
    @nn.compact
    def __call__(self, carry, _):
        return carry + nn.Dense(8)(nn.LayerNorm()(carry)), None


class Stack(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return nn.Dense(8, name="head")(scan(name="scanned")(x, None)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "rule", "types"),
    [
        (True, Block, (F16, F32)),
        (False, "scanned", (F16, F32)),
        (False, Block, (F32, F16)),
        (True, "scanned/Dense_0", (F32, F16)),
        (True, "scanned", (F16, BF16)),
        (False, "scanned/Dense_0", (F16, BF16)),
    ],
)
def test_rules_inside_a_scan_keep_its_carry(remat, rule, types):
    outer, inner = types
    model = jmpp.wrap(Stack(remat), jmpp.PolicyMap(f"c={outer}", {rule: f"c={inner}"}))
    x = jnp.ones((2, 8))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    found = products(lambda v: model.apply(v, x), variables)
    assert set(found) == {("dot_general", inner, inner), ("dot_general", outer, outer)}


@pytest.mark.slow
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.OptimizedLSTMCell])
@pytest.mark.parametrize("types", [(F32, F16), (F16, F32)])
def test_rules_for_recurrent_cells(cell, types):
    model = jmpp.wrap(
        nn.RNN(cell(8)), jmpp.PolicyMap(f"mixed_{types[0]}".replace("mixed_float32", F32), {cell: types[1]})
    )
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 3, 8)))
    found = products(lambda v: model.apply(v, jnp.ones((2, 3, 8))), variables)
    assert set(found) == {("dot_general", types[1], types[1])}


class Lifting(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Stack()(nn.remat(nn.Dense)(8)(x))


@pytest.mark.parametrize("rule", ["", "inner", Lifting])
def test_what_is_lifted_inherits_the_rule_of_the_module_around_it(rule):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Lifting(name="inner")(x)

    model = jmpp.wrap(Net(), jmpp.PolicyMap("float32", {rule: "mixed_float16"}))
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8)))
    found = products(lambda v: model.apply(v, jnp.ones((2, 8))), variables)
    assert set(found) == {("dot_general", F16, F16)}


@pytest.mark.slow
def test_rules_keep_neither_parameters_nor_tracers_alive():
    gc.freeze()  # Then the collection below passes over what other tests have left.
    model = jmpp.wrap(nn.Sequential([nn.Dense(8)]), jmpp.PolicyMap("mixed_float16", {"layers_0": "float32"}))
    variables = model.init(jax.random.key(0), jnp.ones((2, 8)))
    kernel = weakref.ref(variables["params"]["layers_0"]["kernel"])
    with jax.checking_leaks():
        jax.jit(model.apply)(variables, jnp.ones((2, 8)))
    model.apply(variables, jnp.ones((2, 8)))
    del variables
    gc.collect()
    assert kernel() is None


def test_original_module_is_untouched():
    bare = nn.Dense(8)
    variables = bare.init(jax.random.key(0), jnp.ones((2, 8)))
    jmpp.wrap(bare, "mixed_float16").apply(variables, jnp.ones((2, 8)))
    assert type(bare) is nn.Dense
    assert bare.dtype is None
    assert products(lambda v: bare.apply(v, jnp.ones((2, 8))), variables) == {("dot_general", F32, F32): 1}


def test_equal_wraps_share_a_jit_cache_entry():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(model, variables, x):
        traces.append(model)
        return model.apply(variables, x)

    x = jnp.ones((2, 8))
    variables = nn.Dense(8).init(jax.random.key(0), x)
    for _ in range(3):
        run(jmpp.wrap(nn.Dense(8), "mixed_float16"), variables, x)
    assert len(traces) == 1


@pytest.mark.slow
def test_three_lines_in_a_train_state():
    model = jmpp.wrap(CNN(), "mixed_float16")
    tx = jmpp.loss_scaled(optax.adamw(1e-2), jmpp.DynamicLossScale())
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, 8, 3)), jnp.float32)
    labels = jnp.arange(8)
    variables = model.init(jax.random.key(0), x)
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)

    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(state, stats):
        traces.append(1)

        def loss_fn(params):
            logits, new = state.apply_fn({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        value_and_grad = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)
        (loss, new), grads = value_and_grad(state.opt_state, state.params)
        state = state.apply_gradients(grads=grads)
        kept = jmpp.select_tree(jmpp.grads_finite(state.opt_state), new["batch_stats"], stats)
        return state, kept, loss

    stats, losses = variables["batch_stats"], []
    state = state.replace(step=jnp.zeros((), jnp.int32))  # Flax starts with a Python int.
    for _ in range(12):
        state, stats, loss = step(state, stats)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert len(traces) == 1
    assert int(jmpp.metrics(state.opt_state)["skipped_steps"]) == 0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda x: x, "got function. For functions"),
        (nn.Dense, "the class Dense. Make an instance"),
        (3, "got int"),
        (None, "got NoneType"),
    ],
)
def test_what_cannot_be_wrapped(module, message):
    with pytest.raises(TypeError, match=message):
        jmpp.wrap(module, "mixed_float16")


def test_methods_are_named_for_nnx_only():
    for wrap in (jmpp.wrap, jmpp.linen.wrap):
        with pytest.raises(TypeError, match="unexpected keyword argument 'methods'"):
            wrap(nn.Dense(2), "mixed_float16", methods=["encode"])

    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((2, 2)))

        def encode(self, x):
            return x @ self.w

    model = jmpp.wrap(Net(), "p=f32,c=f16,o=f16", methods=["encode"])
    assert model.encode(jnp.ones((1, 2))).dtype == F16


@pytest.mark.slow
def test_methods_of_narrower_signatures():
    class Standardised(nn.Conv):
        def param(self, name, init_fn, *init_args):
            value = super().param(name, init_fn, *init_args)
            return value - value.mean((0, 1, 2)) if name == "kernel" else value

        def get_variable(self, col, name):
            return super().get_variable(col, name)

        def variable(self, col, name, init_fn):
            return super().variable(col, name, init_fn)

    class Reading(Standardised):
        @nn.compact
        def __call__(self, x):
            self.variable("seen", "calls", lambda: jnp.zeros(()))
            out = super().__call__(x)
            assert (
                self.get_variable("params", "kernel").dtype
                == self.get_variable("params", "bias").dtype
                == F16
            )
            return out

    x = jnp.ones((1, 8, 8, 3))
    bare = Standardised(2, (3, 3)).init(jax.random.key(0), x)
    model = jmpp.wrap(Standardised(2, (3, 3)), "mixed_float16")
    variables = model.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], bare["params"])
    assert products(lambda v: model.apply(v, x), variables) == {("conv_general_dilated", F16, F16): 1}
    jmpp.wrap(Reading(2, (3, 3)), "mixed_float16").apply(bare, x, mutable=["seen"])


def test_bad_policies():
    with pytest.raises(ValueError, match="Did you mean 'mixed_float16'"):
        jmpp.wrap(nn.Dense(2), "mixed_flaot16")
    with pytest.raises(TypeError, match="A policy is a jmp_policy.Policy"):
        jmpp.wrap(nn.Dense(2), 16)
    with pytest.raises(ValueError, match="asks for float32 gradients of float16 parameters"):
        jmpp.wrap(nn.Dense(2), "p=f16,c=f16,o=f32,g=f32")
    with pytest.raises(ValueError, match="asks for weight gradients in bfloat16"):
        jmpp.linen.intercept("p=f32,c=f16,o=f32,g=bf16")
    eight = r"asks for float8_e\w+, which holds nothing above .* needs a scale .*Fp8DirectDotGeneralOp"
    for policy in ("c=float8_e4m3fn", "params=float8_e5m2,compute=float16", "c=f16,o=float8_e4m3fn"):
        for applied in (lambda p: jmpp.wrap(nn.Dense(2), p), jmpp.linen.intercept):
            for given in (policy, jmpp.PolicyMap("mixed_float16", {"head": jmpp.get_policy(policy)})):
                with pytest.raises(ValueError, match=eight):
                    applied(given)
    with pytest.raises(TypeError, match="takes a module, not its class"):
        jmpp.linen.wrap(nn.Dense, "mixed_float16")
    with pytest.raises(TypeError, match="takes a flax.linen.Module, got int"):
        jmpp.linen.wrap(3, "mixed_float16")


@pytest.mark.once
def test_the_package_does_not_import_flax():
    code = (
        "import sys; sys.modules['flax'] = None; import jmp_policy as j, jax.numpy as jnp, optax;"
        "tx = j.loss_scaled(optax.sgd(1.), j.DynamicLossScale()); tx.init(jnp.ones(3));"
        "print(j.get_policy('mixed_float16').cast_to_compute(jnp.ones(1)).dtype)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "float16", result.stderr
    code = "import sys, jmp_policy; print('flax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


def test_partial_dropout_streams_are_the_bare_ones():
    model = nn.Sequential([nn.Dropout(0.5, deterministic=False)])
    x, rngs = jnp.ones((8, 64)), {"dropout": jax.random.key(3)}
    want = model.apply({}, x, rngs=rngs)
    got = jmpp.wrap(model, "mixed_float16").apply({}, x, rngs=rngs)
    np.testing.assert_array_equal(want, got)


@pytest.mark.slow
def test_wrapped_checkpoint_is_the_bare_one():
    x = jnp.zeros((2, 8), jnp.int32)
    wrapped = jmpp.wrap(Encoder(), "mixed_float16").init(jax.random.key(0), x)
    bare = Encoder().init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, wrapped, bare)
    assert dtypes(wrapped) == dtypes(bare)


class Adapted(nn.Module):
    """Adds to a layer that it shares its scope with, as LoRA and quantisation wrappers do."""

    inner: nn.Module

    def setup(self):
        nn.share_scope(self, self.inner)

    @nn.compact
    def __call__(self, x):
        return self.inner(x) + x @ self.param("a", nn.initializers.normal(), (8, 8))


def test_a_rule_for_a_module_that_shares_the_scope_of_another_names_the_other():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Adapted(nn.Dense(8), name="adapted")(x)

    x = jnp.ones((4, 8))
    variables = Net().init(jax.random.key(0), x)
    for pattern in ("adapted", "**/adapted"):
        model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {pattern: "float32"}))
        with pytest.raises(ValueError, match="shares the scope of 'Dense_0'.*Write the rule for 'Dense_0'"):
            model.apply(variables, x)
    for pattern in ("Dense_0", "*"):
        model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {pattern: "float32"}))
        assert set(products(lambda v, m=model: m.apply(v, x), variables)) == {("dot_general", F32, F32)}
    with pytest.raises(ValueError, match="The nearest paths are 'Dense_0'."):
        jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {"no": "float32"})).apply(variables, x)


def test_perturbations_have_the_dtype_of_what_they_are_added_to():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = self.perturb("p", nn.Dense(8)(x))
            return x @ x.T

    x = jnp.ones((4, 8))
    model = jmpp.wrap(Net(), "mixed_float16")
    variables = model.init(jax.random.key(0), x)
    assert variables["perturbations"]["p"].dtype == F16
    assert products(lambda v: model.apply(v, x), variables) == {("dot_general", F16, F16): 2}
    grads = jax.grad(lambda v: model.apply(v, x).sum())(variables)
    assert (jnp.abs(grads["perturbations"]["p"]) > 0).all()
    alone = {"params": variables["params"]}
    np.testing.assert_array_equal(model.apply(alone, x), model.apply(variables, x))


@pytest.mark.parametrize("aux", [False, True])
def test_a_layer_that_returns_a_pair_keeps_the_stream_half(aux):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.Dense(8)(x)
            return (x, jnp.mean(x)) if aux else x

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + jnp.sin(jnp.arange(8.0))
            for cls in (Layer, nn.remat(Layer)):
                x = cls()(x)[0] if aux else cls()(x)
                assert x.dtype == F16
            return x

    x = jnp.ones((4, 8))
    jmpp.wrap(Net(), "mixed_float16").init(jax.random.key(0), x)


def test_a_param_method_that_another_library_has_replaced(monkeypatch):
    flax_own = nn.Module.param

    def param(self, name, init_fn, shape, dtype=None, **kwargs):  # As gemma does when it is imported.
        return flax_own(self, name, init_fn, shape, dtype, **kwargs)

    monkeypatch.setattr(nn.Module, "param", param)
    model, x = jmpp.wrap(nn.Dense(8), "mixed_float16"), jnp.ones((4, 8))
    variables = model.init(jax.random.key(0), x)
    assert products(lambda v: model.apply(v, x), variables) == {("dot_general", F16, F16): 1}
