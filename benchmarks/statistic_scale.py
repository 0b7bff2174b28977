"""Does `StatisticLossScale` skip more steps than `DynamicLossScale`?

`python -m benchmarks.statistic_scale`: linear models and MLPs with and without biases, on inputs of three
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
from benchmarks import _record

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
        """Returns four numbers per row."""
        for _ in range(self.hidden):
            x = nn.relu(nn.Dense(32, use_bias=self.use_bias)(x))
        return nn.Dense(4, use_bias=self.use_bias)(x)


def skipped(name: str, size: float, rate: float, scale: Any, steps: int = STEPS) -> int:
    """Trains a model on inputs of a size, and returns how many steps were skipped."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = size * jax.random.normal(keys[0], (32, 16)), jax.random.normal(keys[1], (32, 4))
    model = jmpp.wrap(Net(*MODELS[name]), "mixed_float16")
    params = model.init(keys[2], x)
    tx = jmpp.loss_scaled(optax.adam(rate), scale)

    def loss_fn(params: Any) -> jax.Array:
        out: Any = model.apply(params, x)
        return jnp.mean((out - y) ** 2)

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        _, grads = jmpp.scaled_value_and_grad(loss_fn)(state, params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, length=steps)[0])
    return int(run((params, tx.init(params)))[1].skipped)


def rows() -> list[dict[str, Any]]:
    """One row per model, size of its inputs and learning rate."""
    found = []
    for name, size, rate in itertools.product(MODELS, INPUTS, RATES):
        scales = {"dynamic": jmpp.DynamicLossScale(), "statistic": jmpp.StatisticLossScale()}
        counts = {kind: skipped(name, size, rate, scale) for kind, scale in scales.items()}
        found.append({"model": name, "inputs": size, "learning rate": rate, **counts})
    return found


def main() -> None:
    """Writes `results/statistic_scale.json`."""
    _record.save("statistic_scale", rows(), steps=STEPS, backend=jax.default_backend())


if __name__ == "__main__":
    main()
