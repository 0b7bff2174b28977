"""Fine-tune an NNX language model with LoRA: only `nnx.LoRAParam`s are trained, by `wrt=` as in Flax.

Run `python examples/nnx_lora.py`: it takes less than a minute on two CPU cores and needs no network. The
model is that of nnx_transformer.py, trained a little in float32, as a published one would be. Adapters are
Flax's `nnx.LoRA` around its linear layers. The lines that make the fine-tuning mixed-precision are marked (1)
to (3).
"""

import functools
import sys

import jax
import numpy as np
import optax
from _run import compare
from flax import nnx
from nnx_transformer import CONTEXT, Transformer, cross_entropy, load

import jmp_policy as jmpp

BATCH_SIZE, RANK, LEARNING_RATE, PUBLISHED_STEPS = 8, 8, 1e-2, 150


@nnx.jit
def plain_step(model: nnx.Module, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(cross_entropy)(model, windows)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, windows: jax.Array) -> jax.Array:
    # (3) was: nnx.value_and_grad and update, as above, with argnums=nnx.DiffState(0, nnx.LoRAParam)
    return optimizer.minimize(cross_entropy, model, windows)


def sample(rng: np.random.Generator, text: np.ndarray, size: int) -> np.ndarray:
    starts = rng.integers(len(text) - CONTEXT - 1, size=size)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


@functools.cache
def published(seed: int) -> Transformer:
    """A model that has learned something: from the text backwards."""
    data, rng = load(), np.random.default_rng(seed)
    model = Transformer(len(data.vocabulary), nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(LEARNING_RATE), wrt=nnx.Param)
    for _ in range(PUBLISHED_STEPS):
        plain_step(model, optimizer, sample(rng, data.train[::-1], BATCH_SIZE))
    return model


def add_adapters(model: Transformer, rngs: nnx.Rngs) -> None:
    for block in model.blocks:
        for name in ("up", "down"):
            linear = getattr(block, name)
            sizes = linear.in_features, RANK, linear.out_features
            setattr(block, name, nnx.LoRA(*sizes, base_module=linear, rngs=rngs))


def train(word: str, steps: int, seed: int) -> float:
    """Returns the likelihood of unseen text, in nats per character."""
    precision = jmpp.from_config(word)
    data, rng = load(), np.random.default_rng(seed)
    model = nnx.clone(published(seed))
    add_adapters(model, nnx.Rngs(seed))
    model = precision.wrap(model)  # (1) is new
    tx = optax.adam(LEARNING_RATE)
    optimizer = jmpp.nnx.Optimizer(
        model, tx, wrt=nnx.LoRAParam, precision=precision
    )  # (2) was: nnx.Optimizer
    for _ in range(steps):
        train_step(model, optimizer, sample(rng, data.train, BATCH_SIZE))
    model.eval()
    return -float(nnx.jit(cross_entropy)(model, sample(rng, data.valid, 64)))


def main(argv: list[str] | None = None) -> int:
    return compare(train, "Likelihood of text under a model fine-tuned with LoRA.", 100, 0.05, argv)


if __name__ == "__main__":
    sys.exit(main())
