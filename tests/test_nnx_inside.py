"""What the methods of a governed NNX module see and do, for modules written in every way."""

import concurrent.futures
import copy
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import products

import jmp_policy as jmpp
from jmp_policy._src.flax.nnx import precision_plan

F16 = "p=f32,c=f16,o=f16"
X = jax.random.normal(jax.random.key(0), (2, 8))


def linear():
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


def test_nothing_is_stale_inside_or_after_a_call():
    """A method sees itself, its children see it, and what is returned or kept is the module's own."""

    class Child(nnx.Module):
        def __init__(self, parent, w):
            self.parent, self.w = parent, w

        def __call__(self, x):
            assert float(self.w[0]) == 3
            self.w[...] = self.w[...].astype(jnp.float32) * 5
            return x * self.parent.factor

    class Parent(nnx.Module):
        def __init__(self):
            self.factor = 1.0
            self.w = nnx.Param(jnp.ones(8))
            self.parts = nnx.Dict({"w": nnx.Param(jnp.ones(2)), "calls": 0})
            self.ws = nnx.data([nnx.Param(jnp.ones(2))])
            self.list = nnx.List([nnx.Param(jnp.ones(2))])
            self.child = Child(self, self.w)

        def __call__(self, x):
            self.factor = 5.0
            self.w[...] = self.w[...].astype(jnp.float32) * 3
            x = self.child(x)
            assert float(self.w[0]) == 15
            self.parts["calls"] += 1
            self.parts["made"] = nnx.Param(jnp.ones(1))
            self.ws = nnx.data([*self.ws, nnx.Param(jnp.zeros(1))])
            self.list.append(nnx.Param(jnp.zeros(1)))
            self.last = nnx.data([self.w, self.list])
            return x, self.w, self.list, lambda: self.w[...]

    model = jmpp.wrap(Parent(), "mixed_float16")
    x, w, held, later = model(jnp.ones((1, 8)))
    assert float(x[0, 0]) == 5
    assert float(model.w[0]) == 15
    assert w is model.w
    assert held is model.list
    assert model.parts["calls"] == 1
    assert model.parts["made"].dtype == jnp.float32
    assert [len(model.ws), len(model.list)] == [2, 2]
    assert model.last[0] is model.w
    assert model.last[1] is model.list
    model.w[...] = jnp.zeros(8)
    assert (float(later()[0]), later().dtype) == (0, jnp.float16)
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 7


def test_methods_from_bases_that_are_no_modules():
    class Mixin:
        def __call__(self, x):
            assert self.w[...].dtype == jnp.float16
            return self.linear(x * self.w)

    class Net(Mixin, nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(8))
            self.linear = linear()

    assert jmpp.wrap(Net(), "mixed_float16")(X).dtype == jnp.float32


KEPT_FUNCTIONS = {
    "Net.kept": lambda net: net.run,
    "Net.kept[1]": lambda net: [nnx.relu, net.run],
    "Net.kept['ops']['run']": lambda net: {"ops": {"run": net.linear.__call__}},
    "Net.kept[0]": lambda net: (functools.partial(functools.partial(net.run)),),
    "List.0": lambda net: nnx.Sequential(net.run),
    "List.1": lambda net: nnx.List([1, functools.partial(nnx.Linear.__call__, net.linear)]),
}


@pytest.mark.parametrize("where", KEPT_FUNCTIONS)
def test_a_method_or_partial_that_a_module_keeps_is_refused(where):
    class Net(nnx.Module):
        def __init__(self):
            self.linear = linear()
            self.kept = KEPT_FUNCTIONS[where](self)

        def run(self, x):
            return self.linear(x)

    message = f"{re.escape(where)} is a bound method, or a functools.partial, that holds a module"
    for apply in (jmpp.wrap, jmpp.nnx.cast_params, lambda model, policy: jmpp.summary(model, policy, X)):
        with pytest.raises(ValueError, match=message):
            apply(Net(), "mixed_float16")


def test_functions_that_a_module_keeps_and_that_hold_none_stay():
    class Net(nnx.Module):
        def __init__(self):
            self.linear = linear()
            self.activate = functools.partial(nnx.leaky_relu, negative_slope=0.1)
            self.methods = {"run": "run", "pool": Pool().run, "relu": nnx.relu, "lower": str.lower}

        def run(self, x):
            return self.activate(self.linear(x))

        def __call__(self, x):
            return self.methods["pool"](getattr(self, self.methods["run"])(x))

    class Pool(nnx.Module):
        def run(self, x):
            return x

    assert products(jmpp.wrap(Net(), F16), X) == {("dot_general", "float16", "float16"): 1}


def test_functions_that_hold_a_module_of_the_model_draw_a_warning():
    layer = linear()

    @dataclasses.dataclass
    class Called:
        layer: nnx.Linear

        def __call__(self, x):
            return self.layer(x)

    def by_default(x, layer=layer):
        return layer(x)

    holding = [lambda x: layer(x), jax.jit(lambda x: layer(x)), nnx.remat(lambda x: layer(x)), by_default]
    for function in (*holding, Called(layer)):
        with pytest.warns(UserWarning, match=r"The function List.1 holds a module of the model"):
            jmpp.wrap(nnx.Sequential(layer, function), "mixed_float16")
    with pytest.warns(UserWarning, match=r"The function Dict.ops\[0\] holds a module of the model"):
        jmpp.wrap(nnx.Dict(layer=layer, ops=holding[:1]), "mixed_float16")


def test_functions_that_hold_parameters_outside_of_the_model_draw_one_warning():
    # As the blocks of a published U-Net: closures over layers that are no attributes.
    class Net(nnx.Module):
        def __init__(self):
            self.first, self.second = self.block(), self.block()
            self.last = linear()

        def block(self):
            layers = [linear(), nnx.LayerNorm(8, rngs=nnx.Rngs(0))]
            return lambda x: layers[1](layers[0](x))

        def __call__(self, x):
            return self.last(self.second(self.first(x)))

    text = (
        r"hold modules or parameters that are no attributes of it: Net.first \(Linear\) and 1 more. NNX does"
    )
    with pytest.warns(UserWarning, match=text) as warned:
        jmpp.wrap(Net(), F16)
    assert len(warned) == 1
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))  # It has random streams, and no parameters.
    jmpp.wrap(nnx.Sequential(linear(), lambda x: dropout(x)), F16)
    # Kept from training on purpose, and in half.
    in_half = nnx.Linear(8, 8, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    by_hand = nnx.Sequential(in_half, nnx.LayerNorm(8, rngs=nnx.Rngs(0)))
    wrapped = [jmpp.wrap(linear(), F16), jmpp.wrap(nnx.Sequential(linear(), linear()), F16)]
    for teacher in (*wrapped, in_half, by_hand):
        jmpp.wrap(nnx.Sequential(linear(), lambda x, teacher=teacher: teacher(x)), F16)
    scale = nnx.Param(jnp.ones(8))
    jmpp.wrap(nnx.Dict(scale=scale, scaled=lambda x: x * scale[...]), F16)  # It is an attribute, too.
    in_bfloat16 = nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    half_of_it = [nnx.Sequential(first, linear()) for first in (jmpp.wrap(linear(), F16), in_bfloat16)]
    for unseen in (lambda x: x * scale[...], *(lambda x, part=part: part(x) for part in half_of_it)):
        with pytest.warns(UserWarning, match=r"no attributes of it: List\.1 \((Param|Sequential)\)"):
            jmpp.wrap(nnx.Sequential(linear(), unseen), F16)


def test_a_dtype_that_the_class_defines():
    class Net(nnx.Module):
        dtype = jnp.float32

        def __init__(self):
            self.w = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            assert self.dtype == expected
            return x.astype(self.dtype) * self.w

    expected = jnp.float16
    assert jmpp.wrap(Net(), F16)(X).dtype == jnp.float16
    expected = jnp.float32
    assert jmpp.wrap(Net(), jmpp.PolicyMap(F16, keep_module_dtypes=True))(X).dtype == jnp.float16
    assert Net.dtype == jnp.float32


def test_a_class_derived_from_a_wrapped_one_keeps_its_own_code():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            return x * self.w

    class Doubled(type(jmpp.wrap(Net(), "mixed_float16"))):
        def __call__(self, x):
            return 2 * super().__call__(x)

    derived = Doubled()
    assert derived(X).dtype == jnp.float32
    np.testing.assert_allclose(derived(X), 2 * X, rtol=2e-3)
    np.testing.assert_allclose(jmpp.wrap(derived, "mixed_bfloat16")(X), 2 * X, rtol=2e-2)


def test_results_in_another_dtype_by_a_layers_own_means():
    wide = nnx.Linear(8, 8, preferred_element_type=jnp.float32, rngs=nnx.Rngs(0))
    assert jmpp.wrap(wide, F16)(X).dtype == jnp.float16
    ends = nnx.Sequential(linear(), lambda x: x.astype(jnp.float32))
    assert jmpp.wrap(ends, F16)(X).dtype == jnp.float16


def test_the_output_dtype_of_a_tied_module_does_not_depend_on_names():
    class Net(nnx.Module):
        def __init__(self):
            layer = linear()
            self.a, self.b = nnx.Dict(l=layer), nnx.Dict(l=layer)

    for other in "ab":
        rules = jmpp.PolicyMap("mixed_float16", {other: "mixed_bfloat16", "*/l": "mixed_float16"})
        assert jmpp.wrap(Net(), rules).a["l"](X).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "policy"), [("layers", "float32"), (nnx.Linear, "mixed_bfloat16")])
def test_rules_for_layers_that_are_scanned(pattern, policy):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.linear(x)

    class Net(nnx.Module):
        def __init__(self):
            self.first = linear()
            self.layers = nnx.vmap(Layer)(nnx.Rngs(0).split(3))

        def __call__(self, x):
            scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(self.first(x), self.layers)

    bare = Net()
    out = jmpp.wrap(bare, jmpp.PolicyMap("mixed_float16", {pattern: policy}))(X)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, bare(X), atol=0.3)


def test_a_pair_in_a_plain_loop_is_no_carry():
    class Block(nnx.Module):
        def __init__(self):
            self.linear = linear()

        def __call__(self, x):
            return self.linear(x), None

    class Net(nnx.Module):
        def __init__(self):
            self.block = Block()

        def __call__(self, x):
            x, _ = self.block(x.astype(jnp.float32))
            assert x.dtype == jnp.float16
            return x

    jmpp.wrap(Net(), "mixed_float16")(X)


def test_one_class_however_many_threads_ask():
    for _ in range(10):

        class Local(nnx.Module):
            def __call__(self, x):
                return x

        def ask(_, cls=Local):
            return type(jmpp.wrap(cls(), "mixed_float16"))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(ask, range(16)))) == 1


def test_shared_modules_at_too_many_paths(monkeypatch):
    class Pair(nnx.Module):
        def __init__(self, inner):
            self.a = self.b = inner

    model = linear()
    for _ in range(20):
        model = Pair(model)
    jmpp.wrap(model, "mixed_float16")
    monkeypatch.setattr(precision_plan, "_MOST_PATHS", 1000)
    with pytest.raises(ValueError, match="shared so often that they are at more than 1000 paths"):
        jmpp.wrap(model, jmpp.PolicyMap("mixed_float16", {"a": "float32"}))


@pytest.mark.slow
@pytest.mark.parametrize("lift", [lambda f: f, nnx.remat, nnx.jit], ids=["plainly", "remat", "jit"])
def test_transforms_that_are_no_loops_change_no_dtypes(lift):
    class Head(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((8, 8), 0.3))

        def __call__(self, x):
            return x @ self.w + 1e5

    class Net(nnx.Module):
        def __init__(self):
            self.first, self.head = linear(), Head()

        def __call__(self, x):
            return lift(lambda head, x: head(x))(self.head, self.first(x))

    out = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {"head": "float32"}))(X)
    assert bool(jnp.isfinite(out).all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("index", "value"),
    [
        (..., 0.5),
        (..., np.ones(8)),
        (..., np.ones(8, int)),
        (..., jnp.float32(2)),
        (0, 3.0),
        (slice(0, 4), np.ones((4, 8))),
    ],
    ids=range(6),
)
def test_writing_as_without_a_policy(index, value):
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full((8, 8), 0.30001))

        def __call__(self, x):
            self.w[index] = value
            return x

    bare, other = Net(), Net()
    bare(X)
    jmpp.wrap(other, "mixed_bfloat16")(X)
    np.testing.assert_array_equal(other.w.get_raw_value(), bare.w.get_raw_value())
    assert (other.w.get_raw_value().dtype, other.w.get_raw_value().shape) == (jnp.float32, (8, 8))


def test_writing_part_of_a_parameter_in_half_rounds_that_part():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.full(8, 0.30001))

        def __call__(self, x):
            self.w[:4] = jnp.clip(self.w[:4], -1, 1)
            return x

    model = jmpp.wrap(Net(), "mixed_bfloat16")
    with pytest.warns(UserWarning, match="overwritten with values computed in bfloat16"):
        model(X)
    assert float(model.w[7]) == float(jnp.float32(0.30001))


def test_parameters_in_nested_containers():
    class Net(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Dict(w=nnx.Param(jnp.ones((8, 8)))) for _ in range(2)])
            self.plain = nnx.data({"a": {"w": nnx.Param(jnp.ones(2))}, "t": ([nnx.Param(jnp.ones(1))],)})

        def __call__(self, x):
            for layer in self.layers:
                assert layer["w"].dtype == jnp.float16
                x = x @ layer["w"]
            assert self.plain["a"]["w"].dtype == self.plain["t"][0][0].dtype == jnp.float16
            return x

    model = jmpp.wrap(Net(), "mixed_float16")
    model(X)
    assert model.plain["a"]["w"].dtype == model.plain["t"][0][0].dtype == jnp.float32


def test_nothing_of_the_inside_gets_out():
    class Child(nnx.Module):
        def __init__(self, w):
            self.w = w

    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

        def __call__(self, x):
            assert self.w is self.w
            assert self.w.type is nnx.Param
            self.child, self.list = Child(self.w), nnx.List([self.w])
            self.ema = nnx.clone(self)
            return x @ self.w, Child(self.w)

    model = jmpp.wrap(Net(), "mixed_float16")
    _, child = model(X)
    assert child.w is model.child.w is model.list[0] is model.w
    assert model.ema.w.dtype == jnp.float32
    assert type(model.ema) is type(model)
    assert len(jax.tree.leaves(nnx.state(model, nnx.Param))) == 2  # The clone's is another.


def test_methods_of_variables():
    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            self.w.set_metadata(note="here")
            self.w.copy_from(nnx.Param(jnp.zeros(8), note="copied"))
            self.kept = copy.copy(self.w)
            return x

    model = jmpp.wrap(Net(), "mixed_float16")
    model(X)
    assert model.w.note == "copied"
    assert float(model.w[0]) == 0
    assert model.kept.dtype == jnp.float32


def test_what_modules_return_is_captured():
    class Base(nnx.Module):
        def __call__(self, x):
            return self.linear(x * self.w)

    class Block(Base):
        def __init__(self):
            self.linear, self.w = linear(), nnx.Param(jnp.ones(8))

    class Net(nnx.Module):
        def __init__(self):
            self.blocks, self.norm = nnx.List([Block()]), nnx.LayerNorm(8, rngs=nnx.Rngs(0))

        def features(self, x):
            return self.norm(self.blocks[0](x))

        def __call__(self, x):
            return self.features(x).sum()

    model = jmpp.wrap(Net(), "mixed_float16")
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(run(X)[1]))
    found = {jax.tree_util.keystr(path, simple=True): leaf.dtype.name for path, leaf in leaves}
    inside = dict.fromkeys(("blocks0__call__0", "blocks0linear__call__0", "norm__call__0"), "float16")
    assert found == {"__call__0": "float32", **inside}
    assert not any(hasattr(m, "_does_capturing") for m in vars(type(model)).values())
    assert model(X).dtype == jnp.float32


class Mean(nnx.Module):
    """Keeps what it computed last, and a mean of it, in Variables that are no Params."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.mean, self.last = nnx.BatchStat(jnp.zeros(16)), nnx.Variable(jnp.zeros((4, 16)))
        self.steps = nnx.Variable(jnp.int32(0))
        self.others = nnx.Dict({"last": nnx.Variable(jnp.zeros((4, 16)))})

    def __call__(self, x):
        h = self.dense(x)
        self.others["last"].set_value(h)
        self.mean[...] = jnp.asarray(0.999 * self.mean + 0.001 * h.mean(0), h.dtype)
        self.last.set_value(h)
        self.steps[...] += 1
        return h


def test_state_that_is_written_in_half_stays_float32():
    model, x = jmpp.wrap(Mean(nnx.Rngs(0)), "mixed_float16"), jnp.ones((4, 16))
    before = jax.eval_shape(lambda: nnx.state(model))
    assert model(x).dtype == jnp.float32
    assert jax.eval_shape(lambda: nnx.state(model)) == before

    def body(model, x):
        model(x)
        return model

    nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(model, jnp.stack([x, x]))
    assert model.steps[...] == 3
