"""Does `StatisticLossScale` skip more steps than `DynamicLossScale`?

Linear models and MLPs with and without biases, on inputs of three
sizes, 200 steps of Adam in float16. With small inputs the gradients of activations are larger than those of
parameters, by which the statistic scale goes, and overflow first.
"""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.table import Table

STEPS = 200
MODELS = {"linear": (0, False), "linear + bias": (0, True), "MLP": (2, False), "MLP + biases": (2, True)}
INPUTS = (1e-1, 1e-2, 1e-3)
RATES = (1e-2, 1e-1)


class Net(nn.Module):
    """Dense layers, `hidden` of them with an activation."""

    hidden: int
    use_bias: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.hidden):
            x = nn.relu(nn.Dense(32, use_bias=self.use_bias)(x))
        return nn.Dense(4, use_bias=self.use_bias)(x)


def skipped(name: str, size: float, rate: float, scale: Any) -> int:
    """How many steps are skipped in training a model on inputs of a size."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = size * jax.random.normal(keys[0], (32, 16)), jax.random.normal(keys[1], (32, 4))
    model = jmpp.wrap(Net(*MODELS[name]), "mixed_float16")
    tx = jmpp.loss_scaled(optax.adam(rate), scale)

    def loss_fn(params: Any, _: None) -> jax.Array:
        out: Any = model.apply(params, x)
        return jnp.mean((out - y) ** 2)

    run = jax.jit(lambda params: steps.trained(loss_fn, tx, params, None, STEPS)[1].skipped)
    return int(run(model.init(keys[2], x)))


def rows() -> list[dict[str, Any]]:
    scales = {"dynamic": jmpp.DynamicLossScale(), "statistic": jmpp.StatisticLossScale()}
    return [
        {"model": name, "inputs": size, "learning rate": rate}
        | {kind: skipped(name, size, rate, scale) for kind, scale in scales.items()}
        for name, size, rate in itertools.product(MODELS, INPUTS, RATES)
    ]


TABLES = (Table("statistic_scale", rows, about={"steps": STEPS}),)
