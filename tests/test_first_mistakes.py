"""What newcomers get wrong first is answered with what to write instead."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from mistakes import MISTAKES, PARAMS, grade, gradients

import jmp_policy as jmpp

#: Where another library answers, or this one without the repair -> the grade.
LOWER = {
    "autocast's device_type": 2,
    "a tensor of torch": 1,
    "a loss that is no scalar": 1,
    "a loss of integers": 1,
    "parameters that are integers": 1,
    "gradients of other parameters": 1,
    "update without params": 1,
    "a Linen model to nnx": 1,
    "another model's checkpoint": 2,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_says_what_to_write(mistake):
    found, said = grade(mistake)
    assert found == LOWER.get(mistake, 3), said


def test_multi_steps_that_skips_by_itself_may_stand_outside():
    tx = jmpp.loss_scaled(optax.sgd(0.1), jmpp.DynamicLossScale())
    outside = optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite)
    gradients(outside.init(PARAMS), PARAMS)
    with pytest.warns(UserWarning, match=r"Put it inside: loss_scaled\(optax\.MultiSteps") as warned:
        gradients(optax.MultiSteps(tx, 2).init(PARAMS), PARAMS)
    assert len(warned) == 1


def test_a_name_that_nobody_has_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        jmpp.nonsense  # noqa: B018
    assert not hasattr(jmpp, "GradScaler")


def test_copies_and_pickles_of_loss_scales_pass_the_check_of_arguments():
    scale = jmpp.DynamicLossScale(8.0).adjust(jnp.array(True))
    for same in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale)), dataclasses.replace(scale)):
        assert jax.tree.leaves(same) == jax.tree.leaves(scale)
