"""Half precision that silently isn't: what no policy reaches in an NNX model is governed or warned of."""

import inspect
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_helpers import stored

import jmp_policy as jmpp

X = jnp.ones((2, 4))
HALF = {("float16", "float16")}


def products(model, x=X):
    report = jmpp.audit(nnx.jit(lambda model, x: model(x)), model, x)
    return {(p.lhs, p.rhs) for p in report.products}


def twice(call):
    call()
    call()


def adapter():
    return nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(0))


class Model(nnx.Module):
    def __init__(self, *blocks):
        self.blocks = nnx.List(blocks)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Array(nnx.Module):
    def __init__(self):
        self.w, self.table, self.key = jnp.ones((4, 4)), jnp.arange(4), jax.random.key(0)

    def __call__(self, x):
        assert (self.table.dtype, self.key.shape) == (jnp.int32, ())
        return x @ self.w


class Arrays(nnx.Module):
    def __init__(self):
        self.ws = nnx.List([jnp.ones((4, 4))])

    def __call__(self, x):
        return x @ self.ws[0]


class Param(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((4, 4)))


class Vars(Param):
    def __call__(self, x):
        return x @ vars(self)["w"]


class State(Param):
    def __call__(self, x):
        return x @ nnx.state(self)["w"][...]


class Graph(Param):
    def __call__(self, x):
        for _, value in nnx.iter_graph(self):
            x = x @ value if isinstance(value, nnx.Param) else x
        return x


def stored_value():
    """Takes the parameter of the module that calls, as libraries do that intercept products."""
    module = inspect.currentframe().f_back.f_locals["self"]
    return module.w.get_raw_value()


class Stored(Param):
    def __call__(self, x):
        return x @ stored_value()


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (Array, "self.w is an array and no nnx.Param"),
        (Arrays, "self.ws is an array and no nnx.Param"),
        (Vars, "vars(self) gives w as stored"),
        (State, "nnx.state(self) gives w as stored"),
        (Graph, "nnx.iter_graph(self) gives w as stored"),
        (Stored, "test_nnx_uncast.stored_value takes the stored value of a Param"),
    ],
    ids=["array", "arrays", "vars", "state", "graph", "stored value"],
)
def test_weights_that_are_read_as_they_are_stored(cls, what):
    model = jmpp.wrap(Model(cls(), cls()), "mixed_float16")
    with pytest.warns(UserWarning, match=re.escape(what)) as found:
        twice(lambda: model(X))
    assert len(found) == 1
    assert str(found[0].message).startswith(f"{cls.__name__} at 'blocks/0' computes in float32")
    assert found[0].filename == __file__
    jmpp.wrap(Model(cls()), "float32")(X)
    jmpp.wrap(Model(cls()), jmpp.PolicyMap("mixed_float16", {"blocks/0": "float32"}))(X)


def test_reads_that_do_no_harm():
    class Net(nnx.Module):
        def __init__(self):
            self.w, self.table = nnx.Param(jnp.ones((4, 4))), jnp.ones(4)
            self.linear, self.norm = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            assert len([v for v in vars(self).values() if isinstance(v, nnx.Module)]) == 2
            assert len(jax.tree.leaves(nnx.state(self, nnx.Param))) == 5
            x = nnx.remat(lambda self, x: self.norm(self.linear(x)))(self, x)
            return ((x @ self.w).astype(jnp.float32) * self.table).astype(x.dtype)

    assert jmpp.wrap(Net(), "mixed_float16")(X).dtype == jnp.float32


class Head(nnx.Module):
    def __init__(self):
        self.linear, self.w = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((4, 4)))
        self.more = nnx.List([])

    def __call__(self, x):
        x = self.linear(x)
        for module in self.more:
            x = module(x)
        return x @ self.w


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m, "linear", adapter()), "LoRALinear at 'blocks/0/linear'"),
        (lambda m: m.more.append(Head()), "Head at 'blocks/0/more/0'"),
        (lambda m: m.more.append(nnx.Linear(4, 4, rngs=nnx.Rngs(0))), "Linear at 'blocks/0/more/0'"),
        (
            lambda m: setattr(m.linear, "kernel_a", nnx.LoRAParam(jnp.ones((4, 2)))),
            "'kernel_a' of Linear at ",
        ),
    ],
    ids=["adapter", "module in a list", "layer in a list", "parameter"],
)
def test_what_is_put_in_after_wrap(change, what):
    model = jmpp.wrap(Model(Head()), "mixed_float16")
    change(model.blocks[0])
    with pytest.warns(UserWarning, match=f"{re.escape(what)}.*put into Model after wrap") as found:
        twice(lambda: nnx.jit(lambda model, x: model(x))(model, X))
    assert len({str(w.message) for w in found}) == 1
    again = jmpp.wrap(model, "mixed_float16")
    assert products(again) == HALF
    assert again.blocks[0].linear.kernel is model.blocks[0].linear.kernel
    assert stored(again) == {"float32"}


def test_adapters_in_a_layer_of_flax_are_read_in_compute_dtype():
    """A library that puts parameters into `nnx.Linear`, and intercepts its product to read them."""

    def adapted(lhs, kernel, *args, **kwargs):
        frame = inspect.currentframe()
        while not isinstance(module := frame.f_locals.get("self"), nnx.Linear):
            frame = frame.f_back
        return lhs @ kernel + lhs @ module.kernel_a[...] @ module.kernel_b[...]

    head = Head()
    linear = head.linear
    linear.dot_general = adapted
    linear.kernel_a, linear.kernel_b = nnx.LoRAParam(jnp.ones((4, 2))), nnx.LoRAParam(jnp.ones((2, 4)))
    assert products(jmpp.wrap(Model(head), "mixed_float16")) == HALF


@pytest.mark.slow
def test_linen_modules_in_bridges_of_other_libraries():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(nn.Dense(4, dtype=jnp.float32)(x))

    class Bridge(nnx.Module):
        """Keeps a Linen module and its variables, which it collects in a way of its own."""

        def __init__(self, module, *args):
            self.linen = module
            variables = module.init(jax.random.key(0), *args)["params"]
            self.params = nnx.data(jax.tree.map(nnx.Param, variables))

        def __call__(self, *args):
            is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
            params = vars(self)["params"]
            params = jax.tree.map(lambda x: x.get_raw_value(), params, is_leaf=is_variable)
            return self.linen.apply({"params": params}, *args)

    bare = Model(Bridge(Inner(), X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products(jmpp.wrap(bare, "mixed_float16")) == HALF
        rules = jmpp.PolicyMap("mixed_float16", {"**/head": "float32"})
        assert products(jmpp.wrap(bare, rules)) == HALF | {("float32", "float32")}
    assert products(bare) == {("float32", "float32")}
