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
    with pytest.warns(UserWarning, match="self.variables"):
        model.apply(variables, X)
    assert jax.tree.map(lambda a, b: a is b, found[-1], variables) == jax.tree.map(lambda _: True, variables)
