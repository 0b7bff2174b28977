"""The shape of big_vision's and scenic's trainers: a config, one's own TrainState, a ViT, one jitted step.

Run `python examples/vit_config_loop.py`: it takes less than a minute on two CPU cores and needs no network.
`config.precision` is new. The other lines that make the trainer mixed-precision are marked (1) to (3). The
state stays a dataclass of arrays, with the loss scale inside of `opt_state`.
"""

import sys
from functools import partial
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from _run import compare
from sklearn.datasets import load_digits

import jmp_policy as jmpp


def get_config(precision: str, steps: int, seed: int) -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict({"seed": seed, "total_steps": steps, "precision": precision})
    config.model = {"width": 48, "depth": 2, "num_heads": 4, "patch": 2, "dropout": 0.05}
    config.optim = {"lr": 4e-3, "warmup": 0.1, "wd": 1e-2, "grad_clip_norm": 1.0}
    config.input = {"batch_size": 64, "test": 400}
    return config


class ViT(nn.Module):
    width: int
    depth: int
    num_heads: int
    patch: int
    dropout: float

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(self.width, (self.patch,) * 2, strides=(self.patch,) * 2, name="embedding")(images)
        x = x.reshape(len(x), -1, self.width)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.depth):
            y = nn.MultiHeadDotProductAttention(self.num_heads)(nn.LayerNorm()(x))
            x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
            y = nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        return nn.Dense(10, name="head")(nn.LayerNorm()(x).mean(axis=1))


@flax.struct.dataclass
class TrainState:
    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array


def make_tx(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    warmup = int(config.optim.warmup * config.total_steps)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.optim.lr, warmup, config.total_steps)
    kernels = partial(jax.tree.map, lambda x: x.ndim > 1)
    adamw = optax.adamw(schedule, weight_decay=config.optim.wd, mask=kernels)
    return optax.chain(optax.clip_by_global_norm(config.optim.grad_clip_norm), adamw)


def train(word: str, steps: int, seed: int) -> float:
    """Returns the accuracy on unseen images."""
    config = get_config(word, steps, seed)
    precision = jmpp.from_config(config.precision)
    model = precision.wrap(ViT(**config.model))  # (1) was: ViT(**config.model)
    tx = precision.loss_scaled(make_tx(config))  # (2) was: make_tx(config)

    @partial(jax.jit, donate_argnums=0)
    def update_fn(state: TrainState, images: Any, labels: Any) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(state.rng, state.step)

        def loss_fn(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, images, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 10)).mean()

        value_and_grad = jmpp.scaled_value_and_grad(loss_fn)  # (3) was: jax.value_and_grad(loss_fn)
        loss, grads = value_and_grad(state.opt_state, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return new, {"loss": loss, **jmpp.metrics(opt_state)}

    numbers, digits, test = np.random.default_rng(config.seed), load_digits(), config.input.test
    order = numbers.permutation(len(digits.target))
    images, labels = digits.images[order, ..., None].astype(np.float32) / 16, digits.target[order]
    init_key, key = jax.random.split(jax.random.key(config.seed))
    params = jax.jit(model.init)(init_key, images[:1])["params"]
    state = TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), key)
    for _ in range(config.total_steps):
        batch = numbers.integers(test, len(images), config.input.batch_size)
        state, _ = update_fn(state, images[batch], labels[batch])
    logits = jax.jit(model.apply)({"params": state.params}, images[:test])
    return float(np.mean(jnp.argmax(logits, axis=-1) == labels[:test]))


def main(argv: list[str] | None = None) -> int:
    # Other weights and batches (--seed) make about 0.02.
    return compare(train, "Accuracy of a small ViT on digits, in a trainer with a config.", 250, 0.03, argv)


if __name__ == "__main__":
    sys.exit(main())
