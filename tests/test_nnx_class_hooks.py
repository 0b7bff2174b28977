"""Classes of NNX models that the library stands its own in for.

What a class's author has Python run for new subclasses does not run for the library's, and a module that
asks about its class gets the answer that it gets without.
"""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from nnx_helpers import loss_fn

import jmp_policy as jmpp

X = jnp.ones((2, 8))
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
        self.w = nnx.Param(jnp.ones(8))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.w, self.holder = Weight(rngs.normal((8, 8))), Holder()
        self.linear = nnx.Linear(8, 8, rngs=rngs)

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


class HasHooks(nnx.Module):
    """Asks, as bases with hooks do, whether somebody has overridden one."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def before(self, x):
        return x

    def features(self, x):
        classes = type(self).__mro__
        below = classes[: classes.index(HasHooks)]
        asked = type(self).before is HasHooks.before, any("before" in vars(cls) for cls in below)
        assert asked == self.expected, asked
        return self.linear(self.before(x))

    def __call__(self, x):
        assert type(self).features is HasHooks.features
        return self.features(x)


class OverridesNothing(HasHooks):
    expected = True, False


class Overrides(HasHooks):
    expected = False, True

    def before(self, x):
        return 2 * x


class DefinesItself(HasHooks):
    before, features = HasHooks.before, HasHooks.features
    expected = True, True


HOOKED = (OverridesNothing, Overrides, DefinesItself)


@pytest.mark.parametrize("cls", HOOKED)
def test_a_module_that_asks_about_its_class_gets_its_own_answer(cls):
    model = cls(nnx.Rngs(0))
    half = jmpp.wrap(model, "mixed_float16")
    expected = model(X)
    for out in (half(X), half.features(X), jmpp.nnx.autocast(lambda m, x: m(x), "float16")(model, X)):
        assert jnp.allclose(out, expected, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("cls", HOOKED)
def test_a_module_that_asks_about_its_class_gets_its_own_answer_in_reports(cls):
    model = cls(nnx.Rngs(0))
    for given in (model, jmpp.wrap(model, "mixed_float16")):
        for report in (jmpp.audit, jmpp.drift, jmpp.gradient_spectrum, jmpp.diagnose):
            report(loss_fn, given, X)
            report(lambda model, x: model.features(x).astype(jnp.float32).sum(), given, X)
    jmpp.sensitivity(loss_fn, model, X)
    jmpp.summary(model, "mixed_float16", X)


@pytest.mark.slow
def test_a_report_shows_methods_that_are_inherited():
    def loss(model, x):
        return model.before(model(x)).sum()

    spectrum = jmpp.gradient_spectrum(loss, OverridesNothing(nnx.Rngs(0)), X)
    assert "OverridesNothing.before" in {row.path for row in spectrum.tensors}


class AsksItsMethod(HasHooks):
    def __call__(self, x):
        assert self.before.__func__ is HasHooks.before
        assert self.before == HasHooks.before.__get__(self)
        return self.linear(self.before(x))


def test_a_module_that_asks_for_the_function_of_a_method_gets_its_own():
    model = AsksItsMethod(nnx.Rngs(0))
    jmpp.wrap(model, "mixed_float16")(X)
    found = jmpp.nnx.explain(lambda model, x: model(x), "float16")(model, X)
    assert found.of("dot_general")[0].operands == "float16"
