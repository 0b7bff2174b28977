"""What an NNX class's author has Python run for new subclasses does not run for those the library makes."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_helpers import loss_fn

import jmp_policy as jmpp

X = jnp.ones((2, 4))
SEEN = []


class Registered:
    """Keeps every subclass; the keyword must be given."""

    def __init_subclass__(cls, *, tag, **keywords):
        super().__init_subclass__(**keywords)
        SEEN.append((cls, tag))


class RegisteredByMeta(type(nnx.Module)):
    def __new__(meta, name, bases, namespace):
        SEEN.append(name)
        return super().__new__(meta, name, bases, namespace)

    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        SEEN.append(cls)


class Weight(nnx.Param):
    def __init_subclass__(cls):
        super().__init_subclass__()
        SEEN.append(cls)


class Holder(nnx.Pytree, Registered, tag="holder"):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(4))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.w, self.holder = Weight(rngs.normal((4, 4))), Holder()
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear((x * self.holder.w) @ self.w)


class Own(Net):
    def __init_subclass__(cls):
        super().__init_subclass__()
        SEEN.append(cls)


class MixinFirst(Registered, Net, tag="first"):
    pass


class MixinLast(Net, Registered, tag="last"):
    pass


class OfMeta(Net, metaclass=RegisteredByMeta):
    pass


class NoPytree(Net, Registered, pytree=False, tag="no pytree"):
    pass


CLASSES = [Own, MixinFirst, MixinLast, OfMeta, NoPytree]


@pytest.mark.parametrize("cls", CLASSES, ids=[c.__name__ for c in CLASSES])
def test_wrapped_classes_go_unnoticed(cls):
    before, bare = list(SEEN), cls(nnx.Rngs(0))
    model = jmpp.wrap(bare, "mixed_float16")
    shape = nnx.eval_shape(lambda: jmpp.wrap(cls(nnx.Rngs(0)), "mixed_float16")(X))
    assert shape.dtype == jnp.float32
    assert before == SEEN
    assert type(model).__mro__[-len(cls.__mro__) :] == cls.__mro__
    copies = [copy.deepcopy(model), nnx.clone(model), pickle.loads(pickle.dumps(model))]
    assert {type(m) for m in copies} == {type(model)}
    assert len(jax.tree.leaves(nnx.state(model))) == 4
    if cls is not NoPytree:
        assert len(jax.tree.leaves(model)) == 4


@pytest.mark.slow
def test_reports_on_bare_models_go_unnoticed():
    before, model = list(SEEN), MixinLast(nnx.Rngs(0))
    jmpp.audit(loss_fn, model, X)
    jmpp.summary(model, "mixed_float16", X)
    jmpp.gradient_spectrum(loss_fn, model, X)
    jmpp.diagnose(loss_fn, model, X)
    jmpp.nnx.autocast(loss_fn, "float16")(model, X)
    assert before == SEEN


def test_classes_derived_from_a_wrapped_one_are_the_authors():
    wrapped = type(jmpp.wrap(MixinFirst(nnx.Rngs(0)), "mixed_float16"))

    class Derived(wrapped, tag="derived"):
        pass

    assert SEEN[-1] == (Derived, "derived")
    assert "__init_subclass__" not in vars(MixinFirst)
    assert Own.__init_subclass__.__func__ is vars(Own)["__init_subclass__"].__func__
