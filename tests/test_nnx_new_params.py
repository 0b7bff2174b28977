"""Parameters that are made during a call of a governed NNX module are stored in param dtype."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_helpers import stored

import jmp_policy as jmpp

X = jnp.ones((2, 3))


def drawn(rngs, x, cls=nnx.Param):
    """A parameter in the dtype of the input, as layers that make theirs on the first call have it."""
    return cls(jax.random.normal(rngs.params(), (x.shape[-1], 4), x.dtype))


class Lazy(nnx.Module):
    """Keeps random keys, and makes what it lacks on the first call."""

    def __init__(self, rngs):
        self.rngs = rngs
        self.list, self.data = nnx.List([]), nnx.data({})

    def __call__(self, x):
        return x @ self.weight(x)


class Attribute(Lazy):
    def weight(self, x):
        if not hasattr(self, "w"):
            self.w = drawn(self.rngs, x, nnx.LoRAParam)
        return self.w[...]


class InList(Lazy):
    def weight(self, x):
        if not self.list:
            self.list.append(drawn(self.rngs, x))
            self.more = nnx.List([drawn(self.rngs, x)])
        return self.list[0] + self.more[0]


class InDict(Lazy):
    def weight(self, x):
        if not self.data:
            self.data["a"] = {"b": (drawn(self.rngs, x),)}
            self.more = nnx.Dict(c=drawn(self.rngs, x))
        return self.data["a"]["b"][0] + self.more["c"]


class InModule(Lazy):
    def weight(self, x):
        if not hasattr(self, "layer"):
            self.layer = nnx.Linear(3, 4, param_dtype=x.dtype, rngs=self.rngs)
        return self.layer.kernel[...]


class Scaled(Lazy):
    """Replaces a parameter of its own, which keeps the dtype that it was stored in."""

    def weight(self, x):
        w = getattr(self, "w", None)
        self.w = nnx.Param(jnp.ones((3, 4), x.dtype) if w is None else w * 2)
        return self.w[...]


CLASSES = [Attribute, InList, InDict, InModule, Scaled]


@pytest.mark.slow
@pytest.mark.parametrize("cls", CLASSES, ids=[c.__name__ for c in CLASSES])
def test_new_parameters_are_stored_in_param_dtype(cls):
    model = jmpp.wrap(cls(nnx.Rngs(0)), "mixed_float16")
    shapes = nnx.eval_shape(lambda: (model := jmpp.wrap(cls(nnx.Rngs(0)), "mixed_float16"), model(X))[0])
    assert stored(shapes) == {"float32"}
    model(X)
    assert stored(model) == {"float32"}
    model(X)
    assert stored(model) == {"float32"}
    pure_half = jmpp.wrap(cls(nnx.Rngs(0)), "float16")
    pure_half(X)
    assert stored(pure_half) == {"float16"}


def test_new_parameters_under_transforms():
    class Layers(nnx.Module):
        def __init__(self):
            self.layers = nnx.vmap(Attribute)(nnx.Rngs(0).split(3))

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)

    for policy in ("mixed_float16", "params=float32, compute=float16, output=float32, grad=float32"):
        model = jmpp.wrap(Layers(), policy)
        nnx.jit(lambda model, x: model(x))(model, X)
        assert model.layers.w.get_raw_value().shape == (3, 3, 4)
        assert stored(model) == {"float32"}


def test_what_is_no_parameter_is_stored_as_it_was_made():
    class Net(nnx.Module):
        def __init__(self):
            self.aux = nnx.Variable(jnp.zeros(()))
            self.w = nnx.Param(jnp.ones(8))

        def __call__(self, x):
            self.aux[...] = x.astype(jnp.float32).mean()
            self.losses = nnx.List([nnx.Variable(x.astype(jnp.float32).sum())])
            self.mean, self.cache = nnx.BatchStat(jnp.zeros(3)), nnx.Cache(x)
            self.counts = nnx.Param(jnp.arange(3))
            self.waves = nnx.Param(jnp.ones(3, jnp.complex64))
            return x * self.w

    model = jmpp.wrap(Net(), "mixed_float16")
    model(jnp.ones((2, 8)))
    dtypes = {
        name: variable.get_raw_value().dtype.name
        for name, variable in vars(model).items()
        if isinstance(variable, nnx.Variable)
    }
    halves = {name for name, dtype in dtypes.items() if dtype == "float16"}
    assert halves == {"cache"}
    assert (dtypes["counts"], dtypes["waves"]) == ("int32", "complex64")
    assert model.losses[0].dtype == jnp.float32


def test_adapters_made_by_code_that_finds_the_module_in_the_stack():
    """As libraries do that intercept operations: the module is the caller's `self`."""

    def adapted_product(x, name):
        frame = inspect.currentframe()
        while not isinstance(module := frame.f_locals.get("self"), nnx.Module):
            frame = frame.f_back
        weight = getattr(module, name)
        if not hasattr(module, f"{name}_a"):
            for end, shape in (("a", (8, 8)), ("b", (8, 4))):
                boxed = weight.replace(jnp.ones(shape, weight.get_raw_value().dtype))
                metadata = nnx.VariableMetadata(boxed.get_value(), metadata=boxed.get_metadata())
                setattr(module, f"{name}_{end}", nnx.LoRAParam(metadata))
        a, b = (getattr(module, f"{name}_{end}")[...] for end in "ab")
        return x @ weight[...] + x @ a @ b

    class Net(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((8, 4)), note="kept")

        def __call__(self, x):
            return adapted_product(x, "w")

    model = jmpp.wrap(Net(), "mixed_float16")
    x = jnp.ones((2, 8))
    model(x)
    assert stored(model, nnx.LoRAParam) == {"float32"}
    assert model.w_a.note == "kept"
    products = jmpp.audit(nnx.jit(lambda model, x: model(x)), model, x).products
    assert {(p.lhs, p.rhs) for p in products} == {("float16", "float16")}
