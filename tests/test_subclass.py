"""Subclasses that the library makes of users' classes, and those that others make of the library's."""

import abc
import dataclasses
import functools
import types
from typing import Generic, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import products
from jax import lax

import jmp_policy as jmpp
from jmp_policy._src.core.classes import make_subclass
from jmp_policy._src.products import functions

F16, BF16, INT8 = "float16", "bfloat16", "int8"
X = jnp.ones((2, 8))


@pytest.fixture
def made():
    """Names of the classes that the hooks of `Registering` and `Meta` have seen."""
    SEEN.clear()
    return SEEN


SEEN: list[str] = []


class Registering:
    def __init_subclass__(cls, *, key, **kwargs):
        super().__init_subclass__(**kwargs)
        SEEN.append(f"{key}: {cls.__name__}")


class Meta(abc.ABCMeta):
    def __new__(meta, name, bases, namespace, **kwargs):
        SEEN.append(f"new: {name}")
        return super().__new__(meta, name, bases, namespace, **kwargs)

    def __init__(cls, name, bases, namespace, **kwargs):
        SEEN.append(f"init: {name}")
        super().__init__(name, bases, namespace)


T = TypeVar("T")


def linen_classes():
    class Before(Registering, nn.Module, key=1):
        width: int = 2

        def __call__(self, x):
            return x

    class After(nn.Module, Registering, key=1):
        width: int = 2

        def __call__(self, x):
            return x

    class Abstract(nn.Module, metaclass=Meta):
        width: int = 2

        @abc.abstractmethod
        def __call__(self, x): ...

    class WithMeta(Abstract, Generic[T]):
        def __call__(self, x):
            return x

    class Slots(nn.Module):
        __slots__ = ("more",)
        width: int = 2

        def __call__(self, x):
            return x

    return Before, After, WithMeta, Slots


@pytest.mark.parametrize("index", range(4))
def test_the_authors_hooks_do_not_see_a_subclass(index, made):
    bare = linen_classes()[index]
    made.clear()
    for cls in (make_subclass(bare, {"mark": 1}, root=nn.Module), type(jmpp.wrap(bare(), F16))):
        assert not made
        assert (cls.__name__, cls.__qualname__, cls.__module__) == (
            bare.__name__,
            bare.__qualname__,
            bare.__module__,
        )
        assert cls.__bases__ == (bare,)
        assert cls.__mro__[1:] == bare.__mro__
        assert type(cls) is type(bare)
        assert issubclass(cls, bare)
        assert not isinstance(bare(), cls)
    assert jmpp.wrap(bare(), F16).apply({}, X).dtype == F16


def test_a_subclass_of_an_nnx_class_has_its_layout(made):
    class Net(Registering, nnx.Module, key=1):
        pass

    made.clear()
    finished = []
    cls = make_subclass(Net, {}, root=nnx.Module, finish=finished.append)
    assert (made, finished, cls.__bases__) == ([], [cls], (Net,))


def test_hooks_run_again_for_a_users_subclass_of_a_wrapped_class(made):
    class Net(Registering, nn.Module, key=1):
        def __call__(self, x):
            return x

    class Mine(type(jmpp.wrap(Net(), F16)), key=2):
        pass

    assert made == ["1: Net", "2: Mine"]


@pytest.mark.slow
def test_a_registry_of_models_keeps_the_users_classes():
    registry = {}

    class Model(nn.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            registry[cls.__name__] = cls

    class Net(Model):
        @nn.compact
        def __call__(self, x):
            return Head()(x)

    class Head(Model):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(x)

    model = jmpp.wrap(Net(), F16)
    variables = model.init(jax.random.key(0), X)
    bound = model.bind(variables)
    assert jmpp.linen.wrap(bound, F16)(X).dtype == F16

    def loss(variables):
        return Net().apply(variables, X).sum()

    jmpp.audit(loss, variables)
    jmpp.summary(Net(), F16, X)
    jmpp.gradient_spectrum(loss, variables)
    jmpp.diagnose(loss, variables)
    assert registry == {"Net": Net, "Head": Head}
    made_later = registry["Head"]()
    assert products(lambda v: made_later.apply(v, X), made_later.init(jax.random.key(0), X)) == {
        ("dot_general", "float32", "float32"): 1
    }


@pytest.mark.slow
def test_a_replaced_init_runs_in_clones():
    class Config(nn.Module):
        width: int
        depth: int = 1
        rate: float = dataclasses.field(default=0.5, kw_only=True)

        @nn.compact
        def __call__(self, x):
            for _ in range(self.config["depth"]):
                x = nn.Dense(self.config["width"])(x)
            return x

    plain = Config.__init__

    @functools.wraps(plain)
    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        object.__setattr__(self, "config", fields)

    Config.__init__ = init
    bare = Config(4, depth=2)
    model = jmpp.wrap(bare, F16)
    for one in (model, model.clone(), model.copy(rate=0.1), type(model)(4, depth=2), jmpp.wrap(bare, BF16)):
        assert one.config | {"rate": 0, "parent": None} == bare.config | {"rate": 0, "parent": None}
        params = one.init(jax.random.key(0), X)["params"]
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(
            jnp.shape, bare.init(jax.random.key(0), X)["params"]
        )
    assert model.copy(rate=0.1).config["rate"] == 0.1
    assert type(model).__init__ is Config.__init__

    class Outer(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(x)

    outer = Outer(jmpp.wrap(bare, F16))
    assert outer.init_with_output(jax.random.key(0), X)[0].dtype == F16


def test_post_init_runs_as_often_as_in_the_bare_module():
    class Net(nn.Module):
        width: int = 2

        def __post_init__(self):
            self.width += 1
            super().__post_init__()

        def __call__(self, x):
            return x

    bare = Net()
    assert (jmpp.wrap(bare, F16).width, type(jmpp.wrap(bare, F16))().width) == (bare.clone().width, 3)


class Derived(type(jmpp.wrap(nn.Dense(8), F16))):  # type: ignore[misc]
    """Class that somebody derives from a wrapped one."""

    depth: int = 3


def test_classes_that_others_derive_from_a_wrapped_one():
    model = jmpp.wrap(nn.Dense(8), F16)
    before = [f.name for f in dataclasses.fields(model)]
    derived = Derived(8)
    assert [f.name for f in dataclasses.fields(model)] == before
    assert [f.name for f in dataclasses.fields(nn.Dense)] == before
    variables = derived.init(jax.random.key(0), X)
    assert products(lambda v: derived.apply(v, X), variables) == {("dot_general", F16, F16): 1}
    again = jmpp.wrap(derived, BF16)
    assert isinstance(again, Derived)
    assert again.depth == 3
    assert products(lambda v: again.apply(v, X), variables) == {("dot_general", BF16, BF16): 1}
    assert "depth = 3" in repr(derived)
    lifted = jmpp.wrap(nn.remat(type(model))(8), F16)
    assert "remat" in str(jax.make_jaxpr(lifted.apply)(variables, X))


def quantised(model):
    """Returns a model as qwix does: a subclass whose method replaces the code of `lax.dot_general`.

    As there, the code is replaced only while Flax runs a method of the model.
    """
    cls, code = type(model), lax.dot_general.__code__
    method = cls.__call__
    while hasattr(method, "method_handler_wrapped"):
        method = method.__wrapped__

    @functools.wraps(method)
    def call(self, *args):
        lax.dot_general.__code__ = in_int8.__code__
        try:
            return method(self, *args)
        finally:
            lax.dot_general.__code__ = code

    def in_int8(lhs, rhs, dimension_numbers, *_, **__):
        import jax.numpy as jnp
        from jax.extend.core import primitives

        out = primitives.dot_general_p.bind(
            lhs.astype(jnp.int8),
            rhs.astype(jnp.int8),
            dimension_numbers=dimension_numbers,
            precision=None,
            preferred_element_type=jnp.dtype("int32"),
            out_sharding=None,
        )
        return out.astype(lhs.dtype)

    new = model.copy()
    object.__setattr__(new, "__class__", type(cls.__name__, (cls,), {"__call__": call}))
    return new


@pytest.mark.parametrize("policy", [F16, "mixed_bfloat16"])
def test_a_library_may_quantise_a_wrapped_model(policy):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))

    for model in (quantised(jmpp.wrap(Net(), policy)), jmpp.wrap(quantised(Net()), policy)):
        variables = jax.eval_shape(model.init, jax.random.key(0), X)
        assert products(lambda v, m=model: m.apply(v, X), variables) == {("dot_general", INT8, INT8): 2}
        assert jax.eval_shape(model.apply, variables, X).dtype == jmpp.get_policy(policy).output_dtype


def test_a_library_may_store_quantised_parameters():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = nn.Dense(3)(x).mean()
            return x * self.param("scale", lambda key: scale)

    class Stored(type(jmpp.wrap(Net(), F16))):
        def param(self, name, init_fn, *args, **kwargs):
            kept = super().param(name, lambda *a: (init_fn(*a).astype(INT8), jnp.ones(())), *args, **kwargs)
            return kept[0] * kept[1]

    params = jax.eval_shape(Stored().init, jax.random.key(0), X)["params"]
    assert [leaf.dtype for leaf in params["scale"]] == [INT8, "float32"]


def test_a_function_of_jax_that_somebody_replaced_is_not_stood_in_for(monkeypatch):
    monkeypatch.setattr(functions, "are_chosen", lambda dtype: True)
    assert functions.stand_in(lax.dot_general, jnp.bfloat16) is functions.dot_general
    original = lax.dot_general
    copy = types.FunctionType(original.__code__, original.__globals__, original.__name__)
    monkeypatch.setattr(lax, "dot_general", copy)
    assert functions.stand_in(original, jnp.bfloat16) is original
    assert functions.stand_in([], jnp.bfloat16) == []
