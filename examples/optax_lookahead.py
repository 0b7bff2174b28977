"""The shape of optax's own examples: an MLP, `jax.grad`, and an optimizer that is more than Adam.

Run `python examples/optax_lookahead.py`: it takes less than a minute on two CPU cores and needs no network.
`optax.lookahead` keeps two copies of the parameters. The lines that make the script mixed-precision are
marked (1) to (3); without them it is plain Flax and optax.
"""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import compare
from sklearn.datasets import load_digits

import jmp_policy as jmpp

BATCH_SIZE, TEST = 64, 400


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (128, 64):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


def train(word: str, steps: int, seed: int) -> float:
    """Returns the accuracy on unseen images."""
    precision = jmpp.from_config(word)
    net = precision.wrap(MLP())  # (1) was: MLP()
    schedule = optax.cosine_decay_schedule(3e-3, steps)
    solver = optax.lookahead(optax.adamw(schedule), sync_period=5, slow_step_size=0.5)
    solver = precision.loss_scaled(solver)  # (2) is new

    def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
        logits = net.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        value_and_grad = jmpp.scaled_value_and_grad(loss_fn)  # (3) was: jax.value_and_grad(loss_fn)
        _, grads = value_and_grad(state, params.fast, images, labels)
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(seed)
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    images, labels = digits.data[order].astype(np.float32) / 16, digits.target[order]
    params = optax.LookaheadParams.init_synced(net.init(jax.random.key(seed), images[:1]))
    state = solver.init(params)
    for _ in range(steps):
        batch = rng.integers(TEST, len(images), BATCH_SIZE)
        params, state = train_step(params, state, images[batch], labels[batch])
    found = jnp.argmax(jax.jit(net.apply)(params.slow, images[:TEST]), axis=-1)
    return float(np.mean(found == labels[:TEST]))


def main(argv: list[str] | None = None) -> int:
    return compare(train, "Accuracy of an MLP on digits, trained with optax.lookahead.", 500, 0.01, argv)


if __name__ == "__main__":
    sys.exit(main())
