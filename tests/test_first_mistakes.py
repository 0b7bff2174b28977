"""What newcomers get wrong first is answered with what to write instead."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp_policy as jmpp

NET = nn.Dense(8)
PARAMS = {"w": jnp.ones(2)}
TX = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale())


def gradients(state, *args):
    return jmpp.scaled_value_and_grad(lambda params: jnp.sum(params["w"] ** 2))(state, *args)


class Equinox:
    """A model of a library that makes models callable pytrees."""

    def __call__(self, x):
        return x


MISTAKES = {
    "autocast as a context": (
        lambda: jmpp.autocast("float16"),
        r"autocast\(function, 'float16'\).*with jmp_policy\.region",
    ),
    "a model to autocast": (lambda: jmpp.autocast(NET, "fp16"), r"module\.apply"),
    "a model of another library": (lambda: jmpp.wrap(Equinox(), "fp16"), r"jmp_policy\.autocast\(fn"),
    "a function to wrap": (lambda: jmpp.wrap(lambda x: x, "fp16"), r"jmp_policy\.autocast\(fn"),
    "a method to wrap": (lambda: jmpp.wrap(NET.apply, "fp16"), "Wrap the module"),
    "a class to wrap": (lambda: jmpp.wrap(nn.Dense, "fp16"), "instance"),
    "a dtype to wrap": (lambda: jmpp.wrap(NET, jnp.float16), "Write 'mixed_float16'"),
    "torch's scaler": (lambda: jmpp.GradScaler, "loss_scaled.*scaled_value_and_grad"),
    "Keras's policy": (lambda: jmpp.set_global_policy, r"jmp_policy\.wrap"),
    "Flax's state": (lambda: jmpp.TrainState, r"jmp_policy\.linen\.TrainState"),
    "torch's init_scale": (lambda: jmpp.DynamicLossScale(init_scale=8.0), "Did you mean 'loss_scale'"),
    "jmp's period": (lambda: jmpp.DynamicLossScale(period=8), "Did you mean 'growth_interval'"),
    "apex's scale_factor": (lambda: jmpp.DynamicLossScale(scale_factor=2), "Did you mean 'growth_factor'"),
    "Keras's initial_scale": (lambda: jmpp.StaticLossScale(initial_scale=8.0), "Did you mean 'loss_scale'"),
    "a word that is none": (lambda: jmpp.DynamicLossScale(colour=8.0), "takes loss_scale, growth_interval"),
    "parameters first": (lambda: gradients(PARAMS), "in this dict.*first argument before the parameters"),
    "a number first": (lambda: gradients(8.0, PARAMS), "in this float.*first argument before the parameters"),
    "two loss scales": (
        lambda: gradients(jmpp.loss_scaled(TX, jmpp.DynamicLossScale()).init(PARAMS), PARAMS),
        "twice.*Remove one",
    ),
    "axis_name without an axis": (
        lambda: jmpp.all_finite(jnp.ones(2), axis_name="batch"),
        "axis_name='batch' names no mapped axis.*leave it out",
    ),
    "axis_name of an update": (
        lambda: jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale(), axis_name="i").update(
            PARAMS, TX.init(PARAMS), PARAMS
        ),
        "axis_name='i' names no mapped axis",
    ),
    "an NNX model to the core": (
        lambda: jmpp.scaled_value_and_grad(lambda m: m(jnp.ones((1, 8))).sum())(
            jmpp.DynamicLossScale(), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        ),
        r"jmp_policy\.nnx\.scaled_value_and_grad",
    ),
    "yes in YAML": (lambda: jmpp.from_config(True), "YAML.*'fp16'"),
    "accelerate's key": (lambda: jmpp.from_config({"mixed_precision": "fp16"}), "Did you mean 'policy'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_write(mistake):
    make, repair = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError, AttributeError, NameError), match=f"(?s){repair}"):
        make()


def test_a_name_that_nobody_has_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        jmpp.nonsense  # noqa: B018
    assert not hasattr(jmpp, "GradScaler")


def test_copies_and_pickles_of_loss_scales_pass_the_check_of_arguments():
    import copy
    import dataclasses
    import pickle

    scale = jmpp.DynamicLossScale(8.0).adjust(jnp.array(True))
    for same in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale)), dataclasses.replace(scale)):
        assert jax.tree.leaves(same) == jax.tree.leaves(scale)
