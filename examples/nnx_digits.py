"""The comparison of digits.py with an NNX module: the same runs, network, data, table and plot.

Run `python examples/nnx_digits.py`: it takes less than a minute on two CPU cores and needs no network. What
depends on NNX is here, all else is imported. The lines that make a train step mixed-precision are marked (1)
to (3); (4) is for models with batch statistics.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import BATCH_SIZE, LEARNING_RATE, LOSS_WEIGHT, RUNS, Row, load, main
from flax import nnx
from rich.progress import Progress

import jmp_policy as jmpp


class Block(nnx.Module):
    def __init__(self, features_in: int, features: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(features_in, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.Sequential(Block(1, 16, rngs), Block(16, 32, rngs))
        self.head = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.blocks(x).reshape(len(x), -1))


@nnx.jit
def train_step(model: Net, optimizer: nnx.Optimizer, images: Any, labels: Any) -> dict:
    """One step, the same for every precision."""

    def loss_fn(model: Net) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return LOSS_WEIGHT * losses.mean()

    # A forward pass that overflowed would spoil the running statistics for good: skip them as well.
    with jmpp.nnx.keep_state_on_skip(optimizer, model):  # (4)
        value_and_grad = jmpp.nnx.scaled_value_and_grad(loss_fn)  # (3) was: nnx.value_and_grad
        loss, grads = value_and_grad(optimizer, model)
        optimizer.update(model, grads)  # unscales; updates or skips
    zero_grads = jnp.mean(jnp.concatenate([g.ravel() == 0 for g in jax.tree.leaves(grads)]))
    return {"loss": loss / LOSS_WEIGHT, "zero_grads": zero_grads} | jmpp.metrics(optimizer)


@nnx.jit
def predict(model: Net, images: Any) -> jax.Array:
    return jnp.argmax(model(images), axis=-1)


def train(name: str, steps: int, seed: int, progress: Progress) -> Row:
    """Trains in one of the precisions of RUNS, from the same weights and on the same batches in each."""
    policy, loss_scale = RUNS[name]
    model = jmpp.wrap(Net(nnx.Rngs(seed)), policy)  # (1) was: Net(nnx.Rngs(seed))
    tx = jmpp.loss_scaled(optax.sgd(LEARNING_RATE, momentum=0.9), loss_scale)  # (2) was: optax.sgd(...)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    rng = np.random.default_rng(seed)
    images, labels, test_images, test_labels = load(rng)
    step = train_step.lower(model, optimizer, images[:BATCH_SIZE], labels[:BATCH_SIZE]).compile()
    history = []
    for _ in progress.track(range(steps), description=f"{name:16}"):
        batch = rng.choice(len(images), BATCH_SIZE, replace=False)
        history.append(step(model, optimizer, images[batch], labels[batch]))

    model.eval()
    accuracy = float(np.mean(predict(model, test_images) == test_labels))
    param_bytes = sum(p.nbytes for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    temp_bytes = step.memory_analysis().temp_size_in_bytes
    return Row(name, accuracy, jax.tree.map(lambda *x: np.array(x), *history), param_bytes, temp_bytes)


if __name__ == "__main__":
    sys.exit(main(train=train, out="out/nnx_digits.png"))
