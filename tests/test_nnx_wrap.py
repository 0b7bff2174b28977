"""What `wrap` means for NNX modules: sharing, rules, ties, bridges, and what it refuses."""

import copy
import dataclasses
import pickle
import typing

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from nnx_helpers import CASES, MLP, Raw

import jmp_policy as jmpp

F16 = "p=f32,c=f16,o=f16"


def rngs():
    return nnx.Rngs(0)


class Block(nnx.Module):
    """Remembers what it saw."""

    def __init__(self, features=8, *, inner=None):
        self.gain = nnx.Param(jnp.ones(features))
        self.inner = nnx.Linear(features, features, rngs=rngs()) if inner is None else inner
        self.seen = ()

    def __call__(self, x):
        gain = self.gain[...]
        out = self.inner(x * gain)
        self.seen = tuple(v.dtype.name for v in (x, gain, out))
        return out


class Net(nnx.Module):
    def __init__(self, depth=2):
        self.blocks = nnx.List([Block() for _ in range(depth)])
        self.head = Block()

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


X = jax.random.normal(jax.random.key(0), (2, 8))


def test_it_shares_every_variable_and_leaves_the_original_alone():
    bare = Net()
    before = nnx.graphdef(bare)
    model = jmpp.wrap(bare, "mixed_float16")
    assert nnx.graphdef(bare) == before
    want, got = (dict(nnx.to_flat_state(nnx.state(m))) for m in (bare, model))
    assert want.keys() == got.keys()
    assert all(got[path] is want[path] for path in want)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    model.head.gain[...] = jnp.zeros(8)
    assert float(jnp.abs(bare(X)).max()) == 0
    assert repr(model).splitlines()[0] == repr(bare).splitlines()[0]


def test_parameters_inputs_and_results_are_cast():
    model = jmpp.wrap(Net(), "mixed_float16")
    assert model(X).dtype == jnp.float32
    assert all(block.seen == ("float16",) * 3 for block in (*model.blocks, model.head))


def test_every_way_of_reading_a_parameter():
    class Reader(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))
            self.tree = nnx.Param({"a": jnp.ones(8), "n": jnp.arange(3)})

        def __call__(self, x):
            w = self.w
            seen = [w[...], w[0], w.get_value(), w.T, w @ x.T, x @ w, -w, jnp.sin(w), w.sum(), w + 1, abs(w)]
            assert {v.dtype.name for v in seen} == {"float16"}
            assert w.dtype == jnp.float16
            assert w.shape == (8, 8)
            assert isinstance(w, nnx.Param)
            assert len(w) == 8
            assert self.tree["a"].dtype == jnp.float16
            assert self.tree.get_value()["n"].dtype == jnp.int32
            return x

    jmpp.wrap(Reader(), "mixed_float16")(X)


def test_writing_goes_to_the_shared_variable_in_its_own_dtype():
    class Writer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(3))
            self.rows = nnx.List([nnx.Param(jnp.zeros(2))])
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.w[...] = jnp.full(3, 2.0, jnp.float16)
            self.rows[0][0] = x[0, 0]
            self.calls[...] += 1
            self.note = "written"
            self.made = nnx.Cache(jnp.ones(1))
            self.w2 = self.w
            if hasattr(self, "gone"):
                del self.gone
            return x

    bare = Writer()
    bare.gone = 1
    model = jmpp.wrap(bare, "mixed_float16")
    with pytest.warns(UserWarning, match="stored in float32 was overwritten with values computed in float16"):
        model(jnp.full((1, 8), 0.5))
    assert bare.w.dtype == jnp.float32
    np.testing.assert_array_equal(bare.w[...], jnp.full(3, 2.0))
    np.testing.assert_array_equal(bare.rows[0][...], jnp.array([0.5, 0.0]))
    assert int(bare.calls[...]) == 1
    assert model.note == "written"
    assert model.made.dtype == jnp.float32
    assert model.w2 is bare.w
    assert not hasattr(model, "gone")
    assert nnx.state(model)["made"][...] == 1  # NNX knows the new attribute.

    class Failing(Writer):
        def __call__(self, x):
            super().__call__(x)
            raise RuntimeError("after writing")

    bare = Failing()
    with (
        pytest.raises(RuntimeError, match="after writing"),
        pytest.warns(UserWarning, match="was overwritten with values computed in float16"),
    ):
        jmpp.wrap(bare, "mixed_float16")(X)
    assert float(bare.w[0]) == 2


def test_an_assigned_parameter_replaces_the_old_one():
    class Replacing(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros(3))

        def __call__(self, x):
            self.w = nnx.Param(self.w[...] + 1)
            return x

    model = jmpp.wrap(Replacing(), "mixed_float16")
    model(X)
    assert float(model.w[0]) == 1
    assert model.w.dtype == jnp.float32


def test_a_method_may_return_the_module_or_nothing_or_anything():
    class Odd(nnx.Module):
        def __call__(self, what):
            return {"self": self, "none": None, "text": "a", "int": jnp.arange(3), "key": jax.random.key(0)}[
                what
            ]

    model = jmpp.wrap(Odd(), "mixed_float16")
    assert model("self") is model
    assert model("none") is None
    assert model("text") == "a"
    assert model("int").dtype == jnp.int32
    assert jnp.issubdtype(model("key").dtype, jax.dtypes.prng_key)


def test_modules_and_variables_as_arguments_are_passed_on_whole():
    class Taker(nnx.Module):
        def __call__(self, other, variable, nested, *, rngs):
            assert other is LINEAR
            assert nested[0] is LINEAR
            assert variable is LINEAR.kernel
            assert isinstance(rngs, nnx.Rngs)
            return nested[1]

    LINEAR = nnx.Linear(2, 2, rngs=rngs())
    out = jmpp.wrap(Taker(), F16)(LINEAR, LINEAR.kernel, [LINEAR, X], rngs=rngs())
    assert out.dtype == jnp.float16


def test_scalars_inside_keep_float32():
    """A loss computed by a module inside is handed on as it is."""

    class Loss(nnx.Module):
        def __call__(self, x):
            return jnp.mean(x.astype(jnp.float32) ** 2), x

    class Whole(nnx.Module):
        def __init__(self):
            self.loss = Loss()

        def __call__(self, x):
            loss, x = self.loss(x)
            assert (loss.dtype, x.dtype) == (jnp.float32, jnp.float16)
            return loss

    assert jmpp.wrap(Whole(), "mixed_float16")(X.astype(jnp.float16)).dtype == jnp.float32


class Scanned(nnx.Module):
    """A body of `lax.scan` with parameters of its own."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(8))

    def __call__(self, carry, x):
        carry = carry + x * self.w
        return carry, carry


def test_a_custom_scan_body_returns_its_carry_as_it_came():
    class Loop(nnx.Module):
        def __init__(self):
            self.body = Scanned()

        def __call__(self, xs):
            carry, out = nnx.scan(
                lambda body, c, x: body(c, x), in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0)
            )(self.body, jnp.zeros(8, jnp.float32), xs.astype(jnp.float16))
            assert (carry.dtype, out.dtype) == (jnp.float32, jnp.float16)
            return out

    assert jmpp.wrap(Loop(), "mixed_float16")(X).dtype == jnp.float32


# ------------------------------------------------------------------------------------------- rules


def dtypes_seen(model):
    model(X)
    return {path: m.seen[1] for path, m in nnx.iter_graph(model) if isinstance(m, Block)}


@pytest.mark.parametrize(
    ("rules", "float32"),
    [
        ({"blocks/1": "float32"}, [("blocks", 1)]),
        ({"blocks/*": "float32"}, [("blocks", 0), ("blocks", 1)]),
        ({"blocks": "float32"}, [("blocks", 0), ("blocks", 1)]),
        ({"blocks": "float32", "blocks/0": "mixed_float16"}, [("blocks", 1)]),
        ({"**/head": "float32"}, [("head",)]),
        ({Block: "float32"}, [("blocks", 0), ("blocks", 1), ("head",)]),
        ({nnx.List: "float32"}, [("blocks", 0), ("blocks", 1)]),
        ({lambda path, module: path.endswith("0"): "float32"}, [("blocks", 0)]),
        ([("head", "mixed_float16"), (Block, "float32")], [("blocks", 0), ("blocks", 1)]),
    ],
    ids=range(9),
)
def test_rules(rules, float32):
    model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", rules))
    assert model(X).dtype == jnp.float32
    want = {path: "float32" if path in float32 else "float16" for path in dtypes_seen(Net())}
    assert dtypes_seen(model) == want


def test_values_cross_borders_in_output_dtype():
    class Outer(nnx.Module):
        def __init__(self):
            self.first, self.second = Block(), Block()

        def __call__(self, x):
            x = self.first(x)
            assert x.dtype == jnp.float32  # mixed_bfloat16's output, for code under another policy.
            return self.second(x)

    rules = jmpp.PolicyMap("mixed_float16", {"first": "mixed_bfloat16"})
    model = jmpp.wrap(Outer(), rules)
    model(X)
    assert model.first.seen == ("bfloat16",) * 3
    assert model.second.seen == ("float16",) * 3
    linear = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), nnx.Linear(8, 8, rngs=rngs()))
    mixed = jmpp.wrap(linear, jmpp.PolicyMap(F16, {"layers/0": "mixed_bfloat16", "layers/1": "float32"}))
    assert mixed.layers[0](X).dtype == jnp.float32
    assert mixed(X).dtype == jnp.float16
    inside = jmpp.wrap(
        nnx.Sequential(linear), jmpp.PolicyMap("mixed_float16", {"layers/0/layers/1": "float32"})
    )
    assert inside.layers[0](X).dtype == jnp.float16
    assert inside(X).dtype == jnp.float32


def test_a_rule_that_names_a_norm_decides_for_it():
    model = jmpp.wrap(nnx.LayerNorm(8, rngs=rngs()), jmpp.PolicyMap("mixed_float16", {nnx.LayerNorm: F16}))
    assert jmpp.nnx.policy_of(model) is None
    assert model.promote_dtype is nnx.LayerNorm(8, rngs=rngs()).promote_dtype


def test_a_params_list_under_a_rule_of_its_own():
    class Holder(nnx.Module):
        def __init__(self):
            self.masters = nnx.List([nnx.Param(jnp.ones(8))])
            self.others = nnx.Dict(w=nnx.Param(jnp.ones(8)))

        def __call__(self, x):
            return jnp.array(
                [self.masters[0][...].dtype == jnp.float32, self.others["w"].dtype == jnp.float16]
            )

    assert jmpp.wrap(Holder(), jmpp.PolicyMap("mixed_float16", {"masters": "float32"}))(X).all()


def test_a_rule_that_matches_nothing_names_the_nearest_paths():
    with pytest.raises(ValueError, match=r"'block/\*' matches no module of Net. The nearest paths are 'bl"):
        jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {"block/*": "float32"}))
    with pytest.raises(ValueError, match="rule for Dense matches no module of Net"):
        jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {nn.Dense: "float32"}))


@pytest.mark.slow
def test_a_modules_own_dtype_is_overruled_or_kept():
    class Own(nnx.Module):
        def __init__(self, **dtypes):
            self.set = nnx.Linear(8, 8, rngs=rngs(), **dtypes)
            self.unset = nnx.Linear(8, 8, rngs=rngs())
            self.embed = nnx.Embed(4, 8, rngs=rngs())
            self.cell = nnx.SimpleCell(8, 8, rngs=rngs())
            self.dtype = dtypes.get("dtype")

        def __call__(self, x):
            h, _ = self.cell(self.unset(x) * 0, x)
            return [v.dtype.name for v in (self.set(x), self.unset(x), self.embed(jnp.arange(2)), h)] + [
                str(jnp.dtype(self.dtype or jnp.float16))
            ]

    bare = Own(dtype=jnp.float32)
    assert jmpp.wrap(bare, "mixed_float16")(X) == ["float16"] * 5
    kept = jmpp.PolicyMap("mixed_float16", keep_module_dtypes=True)
    # Own asks for float32 itself; what is below it asks on its own.
    model = jmpp.wrap(bare, kept)
    assert model(X)[0] == "float32"
    assert (model.unset.dtype, model.embed.dtype, model.cell.dense_i.dtype) == (jnp.float16,) * 3
    assert jmpp.wrap(Own(), kept)(X) == ["float16"] * 5
    embed = jmpp.nnx.cast_params(nnx.Embed(4, 8, rngs=rngs()), "bfloat16")
    assert jmpp.wrap(embed, jmpp.PolicyMap("bfloat16", keep_module_dtypes=True)).dtype == jnp.bfloat16
    assert jmpp.wrap(Own(dtype=jnp.bfloat16), kept)(X)[0] == "bfloat16"
    assert bare.set.dtype == jnp.float32
    # The policy has not left its dtypes behind as wishes.
    assert nnx.graphdef(jmpp.wrap(model, kept)) == nnx.graphdef(model)


@pytest.mark.slow
def test_wrapping_again_is_refused_unless_the_policies_are_equal():
    case = next(c for c in CASES if c.name == "encoder")
    bare, rules = case(), jmpp.PolicyMap("mixed_bfloat16", {"layers/0": "float32"})
    once, ruled = jmpp.wrap(bare, "mixed_bfloat16"), jmpp.wrap(bare, rules)
    assert nnx.graphdef(jmpp.wrap(once, "mixed_bfloat16")) == nnx.graphdef(once)
    assert nnx.graphdef(jmpp.wrap(ruled, rules)) == nnx.graphdef(ruled)
    for model, policy in ((ruled, "mixed_bfloat16"), (once, rules), (once, "float32"), (ruled, "float32")):
        with pytest.raises(ValueError, match="is wrapped already, under .*give the bare module"):
            jmpp.wrap(model, policy)
    assert jmpp.nnx.policy_of(once) == jmpp.get_policy("mixed_bfloat16")
    assert jmpp.nnx.policy_of(bare) is None
    # A part that has its own policy would lose it, too.
    with pytest.raises(ValueError, match="^layers/0 is wrapped already, under 'p"):
        jmpp.wrap(nnx.Sequential(jmpp.wrap(Net(), "mixed_float16")), "mixed_bfloat16")
    own = jmpp.nnx.wrap(Net(), "mixed_float16", methods=["__call__"])
    assert nnx.graphdef(jmpp.wrap(own, "mixed_float16")) == nnx.graphdef(own)


def test_part_of_a_wrapped_model_is_under_its_policy():
    model = jmpp.wrap(Net(), "mixed_float16")
    assert model.blocks[0](X).dtype == jnp.float16
    assert model.blocks[0].seen == ("float16",) * 3


# -------------------------------------------------------------------------------------------- ties


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(8, 8, rngs=rngs())
        self.b = Block(inner=self.a)

    def __call__(self, x):
        return self.b(self.a(x))


def test_tied_modules_stay_tied():
    model = jmpp.wrap(Tied(), "mixed_float16")
    assert model.a is model.b.inner
    assert model(X).dtype == jnp.float32


def test_rules_that_disagree_on_a_tied_module_name_both_paths():
    bare = Tied()
    before = nnx.graphdef(bare)
    with pytest.raises(ValueError, match=r"Linear is shared: it is at 'a'.*at 'b/inner', where they give"):
        jmpp.wrap(bare, jmpp.PolicyMap("mixed_float16", {"b": "float32"}))
    assert nnx.graphdef(bare) == before
    rules = jmpp.PolicyMap("mixed_float16", {"b": "float32", nnx.Linear: "mixed_bfloat16"})
    assert jmpp.wrap(bare, rules)(X).dtype == jnp.float32


def test_tied_variables_are_cast_where_they_are_used():
    class Weights(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(8, 8, rngs=rngs())
            self.out = Block()
            self.out.gain = self.embed.embedding

        def __call__(self, x):
            return self.out(self.embed(jnp.arange(8)))

    bare = Weights()
    model = jmpp.wrap(bare, jmpp.PolicyMap("mixed_float16", {"out": "float32"}))
    assert model.out.gain is bare.embed.embedding
    model(X)
    assert model.out.seen == ("float32",) * 3
    with pytest.raises(ValueError, match=r"'out/gain' .and 2 more. of Weights is float32.*modules share"):
        jmpp.wrap(bare, jmpp.PolicyMap("mixed_float16", {"out": "float16"}))


def test_references_back_up_are_followed_once():
    class Child(nnx.Module):
        def __init__(self, parent):
            self.parent = parent
            self.linear = nnx.Linear(8, 8, rngs=rngs())

        def __call__(self, x):
            return self.linear(x)

    class Parent(nnx.Module):
        def __init__(self):
            self.child = Child(self)

        def __call__(self, x):
            return self.child(x)

    model = jmpp.wrap(Parent(), jmpp.PolicyMap("mixed_float16", {"child/linear": "mixed_bfloat16"}))
    assert model.child.parent is model
    assert model(X).dtype == jnp.float32
    assert model.child.linear.dtype == jnp.bfloat16


# ----------------------------------------------------------------------------------- classes of all kinds


T = typing.TypeVar("T")


@dataclasses.dataclass
class Data(nnx.Module):
    linear: nnx.Linear
    scale: float = 2.0

    def __call__(self, x):
        return self.linear(x) * self.scale


class Generic(nnx.Module, typing.Generic[T]):
    def __init__(self):
        self.linear = nnx.Linear(8, 8, rngs=rngs())

    def __call__(self, x):
        return self.linear(x)


class NoPytree(nnx.Module, pytree=False):
    def __init__(self):
        self.linears = [nnx.Linear(8, 8, rngs=rngs())]

    def __call__(self, x):
        return self.linears[0](x)


class Jitted(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(8))

    @nnx.jit
    def __call__(self, x):
        assert self.w[...].dtype == jnp.float16
        return x * self.w


class Rematted(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((8, 8)))

    @nnx.remat
    def __call__(self, x):
        assert self.w[...].dtype == jnp.float16
        return jnp.sin(x @ self.w)


class Slotted(nnx.Linear):
    """A layer of Flax's with a parameter of its own."""

    def __init__(self):
        super().__init__(8, 8, rngs=rngs())
        self.gain = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        assert self.gain[...].dtype == jnp.float16
        return super().__call__(x) * self.gain


class Residual(nnx.Sequential):
    """A container of Flax's with arithmetic of its own."""

    def __init__(self):
        super().__init__(nnx.Linear(8, 8, rngs=rngs()))

    def __call__(self, x):
        out = super().__call__(x)
        assert out.dtype == jnp.float16
        return x + out


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    linear: typing.Any
    w: typing.Any


class InRegistered(nnx.Module):
    """Modules and Params in a container that only JAX knows."""

    def __init__(self):
        self.pair = nnx.data(Pair(nnx.Linear(8, 8, rngs=rngs()), nnx.Param(jnp.ones(8))))

    def __call__(self, x):
        assert self.pair.w[...].dtype == jnp.float16
        return self.pair.linear(x) * self.pair.w


class InContainers(nnx.Module):
    def __init__(self):
        self.linears = nnx.data([nnx.Linear(8, 8, rngs=rngs())])
        self.named = nnx.data({"a": (nnx.Linear(8, 8, rngs=rngs()),)})

    def __call__(self, x):
        return self.named["a"][0](self.linears[0](x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Data(nnx.Linear(8, 8, rngs=rngs())), id="dataclass"),
        pytest.param(Generic[int], id="generic"),
        pytest.param(NoPytree, id="no pytree"),
        pytest.param(Jitted, id="jitted call"),
        pytest.param(Rematted, id="rematted call"),
        pytest.param(Slotted, id="subclassed layer"),
        pytest.param(InContainers, id="containers"),
        pytest.param(InRegistered, id="registered container"),
        pytest.param(Residual, id="subclassed container"),
    ],
)
def test_modules_of_all_kinds(make):
    bare = make()
    model = jmpp.wrap(bare, "mixed_float16")
    out = model(X)
    assert out.dtype == jnp.float32
    clone = nnx.clone(model)
    np.testing.assert_array_equal(clone(X), out)
    grads = nnx.grad(lambda m: m(X).sum())(model)
    assert {g.dtype.name for g in jax.tree.leaves(nnx.as_pure(grads))} == {"float32"}
    assert nnx.graphdef(clone) == nnx.graphdef(model)


def test_a_rematted_method_saves_no_second_copy_of_its_parameters(capsys):
    graphdef, state = nnx.split(jmpp.wrap(Rematted(), "mixed_float16"))

    def loss(state, x):
        return nnx.merge(graphdef, state)(x).sum()

    print_saved_residuals(loss, nnx.as_pure(state), X)
    saved = [line for line in capsys.readouterr().out.splitlines() if "[8,8]" in line]
    assert len(saved) == 1
    assert "f32[8,8] from the argument" in saved[0]


def test_pickle_copy_and_graph_definitions():
    model = jmpp.wrap(Net(), jmpp.PolicyMap("mixed_float16", {"head": "mixed_bfloat16"}))
    model(X)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), nnx.clone(model)):
        assert type(other) is type(model)
        assert nnx.graphdef(other) == nnx.graphdef(model)
        np.testing.assert_array_equal(other(X), model(X))
    graphdef, state = nnx.split(model)
    loaded = pickle.loads(pickle.dumps(graphdef))
    assert loaded == graphdef
    assert hash(loaded) == hash(graphdef)
    np.testing.assert_array_equal(nnx.merge(loaded, state)(X), model(X))
    assert copy.copy(model).head is model.head
    by_predicate = jmpp.wrap(
        Net(), jmpp.PolicyMap("mixed_float16", {lambda path, module: path == "head": "float32"})
    )
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(by_predicate))(X), by_predicate(X))


def test_methods_called_from_outside_are_governed_when_listed():
    class Coder(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 8)))

        def encode(self, x):
            self.seen = self.w[...].dtype.name
            return x @ self.w

        def __call__(self, x):
            z = self.encode(x)
            assert z.dtype == jnp.float16  # Its own method: no border in between.
            return z

    model = jmpp.wrap(Coder(), "mixed_float16")
    model(X)
    assert model.seen == "float16"
    model.encode(X)
    assert model.seen == "float32"
    model = jmpp.nnx.wrap(Coder(), "mixed_float16", methods=["encode"])
    assert model.encode(X).dtype == jnp.float32
    assert model.seen == "float16"
    model(X)
    with pytest.raises(TypeError, match=r"got the text 'encode': methods=\['encode'\]"):
        jmpp.nnx.wrap(Coder(), "mixed_float16", methods="encode")
    with pytest.raises(ValueError, match="'__init__' is a method that Python calls"):
        jmpp.nnx.wrap(Coder(), "mixed_float16", methods=["__init__"])
    with pytest.raises(ValueError, match=r"no module of this model defines 'encod'. Did you mean 'encode'"):
        jmpp.nnx.wrap(Coder(), "mixed_float16", methods=["encod"])


def test_parameters_that_no_governed_method_reads_draw_a_warning():
    class Table(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(8))

        def lookup(self):
            return self.w[...]

    with pytest.warns(
        UserWarning, match=r"Table has parameters of its own and no __call__.*methods=\('lookup',\)"
    ):
        jmpp.wrap(Table(), "mixed_float16")
    assert jmpp.nnx.wrap(Table(), "mixed_float16", methods=["lookup"]).lookup().dtype == jnp.float32


# ----------------------------------------------------------------------------------------- bad input


def test_parameters_must_be_in_param_dtype():
    half = nnx.Sequential(
        nnx.Linear(8, 8, param_dtype=jnp.float16, rngs=rngs()), nnx.LayerNorm(8, rngs=rngs())
    )
    with pytest.raises(
        ValueError, match=r"'layers/0/bias' \(and 1 more\) of Sequential is float16.*nnx.cast_params"
    ):
        jmpp.wrap(half, "mixed_float16")
    assert jmpp.nnx.cast_params(half, "mixed_float16") is half
    assert half.layers[0].kernel.dtype == jnp.float32
    jmpp.wrap(half, "mixed_float16")
    jmpp.nnx.cast_params(half, "float16")
    assert half.layers[0].kernel.dtype == jnp.float16
    assert half.layers[1].scale.dtype == jnp.float32  # A float32 island.
    assert jmpp.wrap(half, "float16")(X).dtype == jnp.float16


def test_cast_params_changes_nothing_where_it_fails():
    model = Tied()
    with pytest.raises(ValueError, match="is shared"):
        jmpp.nnx.cast_params(model, jmpp.PolicyMap("float16", {"b": "float32"}))
    assert model.a.kernel.dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_other_kinds_of_variables(kind):
    with nnx.var_defaults(**{kind: True}):
        bare = Raw(rngs=rngs())
    model = jmpp.wrap(bare, "mixed_float16")
    x = jax.random.normal(jax.random.key(0), (4, 32))
    plain = jmpp.wrap(Raw(rngs=rngs()), "mixed_float16")
    np.testing.assert_array_equal(model(x), plain(x))
    jmpp.nnx.cast_params(bare, "float16")
    assert bare.w.dtype == jnp.float16


def test_what_is_no_nnx_module():
    with pytest.raises(TypeError, match=r"not its class: wrap\(MLP\("):
        jmpp.nnx.wrap(MLP, "mixed_float16")
    with pytest.raises(TypeError, match="got the class MLP. Make an instance of it first"):
        jmpp.wrap(MLP, "mixed_float16")
    with pytest.raises(TypeError, match="Dense is a Linen module, and NNX was expected"):
        jmpp.nnx.wrap(nn.Dense(3), "mixed_float16")
    with pytest.raises(TypeError, match="takes a flax.nnx.Module, got GraphDef"):
        jmpp.nnx.wrap(nnx.graphdef(MLP(rngs=rngs())), "mixed_float16")
    with pytest.raises(TypeError, match="got dict"):
        jmpp.nnx.wrap({}, "mixed_float16")
    with pytest.raises(ValueError, match="asks for weight gradients in bfloat16. Products of float16"):
        jmpp.wrap(MLP(rngs=rngs()), "p=f32,c=f16,o=f32,g=bf16")
    with pytest.raises(ValueError, match="asks for float8_e4m3fn, which holds nothing above 448"):
        jmpp.wrap(MLP(rngs=rngs()), "c=float8_e4m3fn")


def test_a_class_whose_author_lets_nobody_derive_from_it():
    class Final(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 8, rngs=rngs())

        def __init_subclass__(cls, **kwargs):
            raise TypeError("no subclasses")

        def __call__(self, x):
            return self.linear(x)

    model = jmpp.wrap(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs()), Final()), F16)
    assert model(X).dtype == jnp.float16
    with pytest.raises(TypeError, match="no subclasses"):
        type("Derived", (Final,), {})


def test_an_empty_model():
    class Empty(nnx.Module):
        def __call__(self, x):
            return x

    assert jmpp.wrap(Empty(), F16)(X).dtype == jnp.float16
    assert jmpp.nnx.cast_params(Empty(), F16)(X).dtype == jnp.float32


# ------------------------------------------------------------------------------------------- bridges


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first")(x)
        self.sow("intermediates", "first", x)
        x = nn.LayerNorm()(x)
        return nn.Dense(8, name="second")(x)


@pytest.mark.slow
def test_a_linen_module_inside():
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = nnx.bridge.ToNNX(LinenNet(), rngs=rngs()).lazy_init(X)
            self.seen = None

        def __call__(self, x):
            out = self.inner(x)
            self.seen = out.dtype.name
            return out

    bare = Outer()
    model = jmpp.wrap(bare, "mixed_float16")
    assert model.inner.first["kernel"] is bare.inner.first["kernel"]
    assert model(X).dtype == jnp.float32
    assert model.seen == "float16"
    np.testing.assert_allclose(model(X), bare(X), atol=2.0**-6)
    from helpers import equations

    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, X)
    dots = [e.invars[0].aval.dtype.name for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert dots == ["float16", "float16"]
    rules = jmpp.PolicyMap("mixed_float16", {"inner/second": "float32", nn.LayerNorm: "float32"})
    graphdef, state = nnx.split(jmpp.wrap(bare, rules))
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s)(x))(state, X)
    dots = [e.invars[0].aval.dtype.name for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert dots == ["float16", "float32"]
    for unused in ("haed", nnx.Linear):
        with pytest.raises(ValueError, match="matches no module of Outer"):
            jmpp.wrap(bare, jmpp.PolicyMap("mixed_float16", {unused: "float32"}))
    # Wrapped again, made by the wrapped one, at the root.
    bare.seen = model.seen
    assert nnx.graphdef(jmpp.wrap(model, rules)) == nnx.graphdef(jmpp.wrap(bare, rules))
    late = jmpp.wrap(nnx.bridge.ToNNX(LinenNet(), rngs=rngs()), "mixed_float16").lazy_init(X)
    assert late.first["kernel"].dtype == jnp.float32
    assert late(X).dtype == jnp.float32


@pytest.mark.slow
def test_an_nnx_module_inside_a_linen_one():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(32)(x)
            out = nnx.bridge.ToLinen(MLP, name="nnx")(x)
            assert out.dtype == expected
            return nn.Dense(2)(out)

    from helpers import products

    expected = jnp.float32
    variables = Outer().init(jax.random.key(0), X)
    expected = jnp.float16
    model = jmpp.wrap(Outer(), "mixed_float16")
    again = model.init(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, again) == jax.tree.map(jnp.shape, variables)
    assert {x.dtype.name for x in jax.tree.leaves(again)} == {"float32"}
    assert {d for (_, *d2) in products(model.apply, variables, X) for d in d2} == {"float16"}
    rules = jmpp.PolicyMap("mixed_float16", {"nnx/head": "float32"})
    found = products(jmpp.wrap(Outer(), rules).apply, variables, X)
    assert found[("dot_general", "float32", "float32")] == 1
