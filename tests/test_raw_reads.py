"""Parameters that a Linen module reads round the side: cast where that can be, else one warning says so."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmpp
from tests.helpers import products

X = jnp.linspace(-1, 1, 12).reshape(3, 4)
HALF = {("dot_general", "float16", "float16")}


class Product(nn.Module):
    @nn.compact
    def __call__(self, w):
        return w @ w


class Net(nn.Module):
    """Makes a parameter, and reads it again in another way."""

    read: object

    @nn.compact
    def __call__(self, x):
        if self.is_initializing():
            assert "kernel" not in self.variables.get("params", {})  # Looking is free.
        self.param("kernel", nn.initializers.lecun_normal(), (4, 4))
        child = nn.Dense(4, name="child", use_bias=False)
        return x @ self.read(self, child, child(x))


def product_types(read, policy="mixed_float16"):
    model = jmpp.wrap(Net(read), policy)
    variables = model.init(jax.random.key(0), X)
    return set(products(model.apply, variables, X))


GOVERNED = {
    "get_variable": lambda self, child, h: self.get_variable("params", "kernel"),
    "scope": lambda self, child, h: self.scope.get_variable("params", "kernel"),
    "child's scope": lambda self, child, h: child.scope.get_variable("params", "kernel"),
    "apply": lambda self, child, h: nn.Dense(4, use_bias=False).apply(
        {"params": {"kernel": child.variables["params"]["kernel"].T}}, h.T[:, :3] @ h[:3]
    ),
    "another module": lambda self, child, h: Product(name="product")(child.variables["params"]["kernel"]),
    "other collections": lambda self, child, h: (h.T @ h) * (1 + ("cache" in self.variables)),
    "by name": lambda self, child, h: h.T @ h * len(self.variables.get("batch_stats", ())),
}


class Tied(nn.Module):
    """A head that runs a layer on a table, as those of language models do."""

    @nn.compact
    def __call__(self, h, table):
        return nn.Dense(4, use_bias=False).apply({"params": {"kernel": table}}, h)


class Reads(nn.Module):
    """Reads all parameters, for something that is no product of its own."""

    use: object

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(4, name="body")(x)
        return h if self.is_initializing() else self.use(self, h)


def decay(module):
    return sum((p**2).sum() for p in jax.tree.leaves(module.variables["params"]))


HARMLESS = {
    "counted": lambda m, h: h / sum(p.size for p in jax.tree.leaves(m.variables["params"])),
    "decay": lambda m, h: (h, decay(m)),
    "sown decay": lambda m, h: (m.sow("losses", "decay", decay(m)), h)[1],
    "checkpointed head": lambda m, h: nn.remat(Tied)()(h, m.variables["params"]["body"]["kernel"]),
    "transposed": lambda m, h: Tied()(h, m.variables["params"]["body"]["kernel"].T),
}


@pytest.mark.parametrize("use", HARMLESS.values(), ids=HARMLESS)
def test_reads_of_which_no_float32_array_comes_draw_no_warning(use):
    model = jmpp.wrap(Reads(use), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(lambda v: model.apply(v, X, mutable=["losses"]))(variables)


@pytest.mark.parametrize("read", GOVERNED.values(), ids=GOVERNED)
def test_reads_that_are_cast_or_lose_nothing_draw_no_warning(read):
    assert product_types(read) == HALF


LOSING = {
    "self.variables": lambda self, child, h: self.variables["params"]["kernel"],
    "the variables of 'child'": lambda self, child, h: child.variables["params"]["kernel"],
}


@pytest.mark.parametrize(("whose", "read"), LOSING.items(), ids=LOSING)
def test_reads_that_are_not_cast_draw_one_warning(whose, read):
    model = jmpp.wrap(Net(read), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    with pytest.warns(
        UserWarning, match=f"Net computes in float16 and reads {whose}.*get_variable"
    ) as caught:
        [jax.make_jaxpr(model.apply)(variables, X) for _ in range(2)]
    assert [(w.filename, w.category) for w in caught] == [(__file__, UserWarning)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product_types(read, "float32") == {("dot_general", "float32", "float32")}


def test_variables_are_those_of_the_bare_module():
    found = []

    class Looks(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            found.append(self.variables)
            return x

    model = jmpp.wrap(Looks(), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    model.apply(variables, X)
    assert jax.tree.map(lambda a, b: a is b, found[-1], variables) == jax.tree.map(lambda _: True, variables)
