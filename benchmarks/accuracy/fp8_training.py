"""What float8 recipes do to training: final losses over seeds, and errors of gradients, emulated on a CPU.

A CPU rounds to 8 bits as a GPU does and multiplies exactly, so that accuracy is that of a GPU's float8
products but for the order of sums. Seeds draw weights and batches; all policies have the same ones, one after
the other in one compiled program.
"""

import dataclasses
import time
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jmp_policy as jmpp
from benchmarks.accuracy.modules import errors, loss_and_params, under, vector
from benchmarks.models import MODELS
from benchmarks.models._model import cross_entropy
from benchmarks.models.gpt import GPT
from benchmarks.models.transformer_xl import TransformerXL
from benchmarks.table import Table
from jmp_policy._src.policy.recipes import DELAYED, NVFP4, RECIPES

SEEDS = 5
#: Batches that are not trained on, for the final loss.
UNSEEN = 8
POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    **{recipe: f"mixed_bfloat16, r={recipe}" for recipe in (*RECIPES, "nvfp4-2d", "nvfp4-sr", "nvfp4-rht")},
}


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, and a batch of its data: `draw(generator, is_unseen)` gives inputs and labels."""

    module: nn.Module
    steps: int
    learning_rate: float  # Of Adam, after a warm-up of a tenth of the steps.
    draw: Callable[[np.random.Generator, bool], tuple[np.ndarray, np.ndarray]]


#: Python's documentation, as numbers of characters.
_WORDS = list("\n".join(topics[name] for name in sorted(topics)))
TEXT = np.unique(_WORDS, return_inverse=True)[1].astype(np.int32)
#: Padded for Tensor Cores.
VOCABULARY = -(-(int(TEXT.max()) + 1) // 16) * 16


def windows(batch: int, length: int) -> Callable[[np.random.Generator, bool], Any]:
    """Draws windows of the text; the last tenth of it is for the test."""
    split = int(0.9 * len(TEXT))

    def draw(rng: np.random.Generator, is_unseen: bool) -> Any:
        part = TEXT[split:] if is_unseen else TEXT[:split]
        starts = rng.integers(len(part) - length - 1, size=batch)
        found = part[starts[:, None] + np.arange(length + 1)]
        return found[:, :-1], found[:, 1:]

    return draw


def digits(batch: int) -> Callable[[np.random.Generator, bool], Any]:
    """Draws images of digits, 8 x 8; the last 500 are for the test."""
    data: Any = load_digits()

    def draw(rng: np.random.Generator, is_unseen: bool) -> Any:
        low, high = (1297, 1797) if is_unseen else (0, 1297)
        some = rng.integers(low, high, size=batch)
        return (data.data[some] / 16).astype(np.float32), data.target[some].astype(np.int32)

    return draw


class Perceptron(nn.Module):
    """Digits from 64 pixels, through three layers of 256."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = nn.gelu(nn.Dense(256)(x))
        return nn.Dense(10, name="head")(x)


class TwoSegments(nn.Module):
    """Transformer-XL on a text in two segments, of which the second sees the memory of the first."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        model = TransformerXL(VOCABULARY, 64, 4, 16, 128, 2)
        first, second = jnp.split(tokens, 2, axis=1)
        memory = jnp.zeros((2, *first.shape, 64))
        before, memory = model(first, memory)
        return jnp.concatenate([before, model(second, memory)[0]], axis=1)


TASKS = {
    "GPT on text": Task(GPT(VOCABULARY, 64, 64, 4, 256, 2), 200, 3e-3, windows(8, 64)),
    "Transformer-XL on text": Task(TwoSegments(), 200, 3e-3, windows(8, 64)),
    "digits": Task(Perceptron(), 200, 1e-3, digits(64)),
}


def final_losses(task: Task, policy: str) -> list[float]:
    """The loss on unseen batches after training, for each seed."""
    model: Any = jmpp.wrap(task.module, policy)
    schedule = optax.warmup_cosine_decay_schedule(0, task.learning_rate, task.steps // 10, task.steps)
    # Keeps the state of fp8_delayed from Adam.
    tx = jmpp.loss_scaled(optax.adam(schedule), jmpp.NoOpLossScale())

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        # Another key for each batch, for recipes that round gradients at random.
        with jmpp.rounding_key(jax.random.fold_in(jax.random.key(1), batch[1].sum())):
            return cross_entropy(model.apply(params, batch[0]), batch[1])

    def step(carry: Any, batch: Any) -> tuple[Any, None]:
        params, state = carry
        _, grads = jmpp.scaled_value_and_grad(loss_fn)(state, params, batch)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(of_seed: Any) -> jax.Array:
        key, batches, unseen = of_seed
        params = model.init(key, jax.tree.map(lambda x: x[0], batches)[0])
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), batches)
        return jax.lax.map(lambda batch: loss_fn(params, batch), unseen).mean()

    def stacked(seed: int, count: int, is_unseen: bool) -> Any:
        rng = np.random.default_rng([seed, is_unseen])
        return jax.tree.map(lambda *x: np.stack(x), *(task.draw(rng, is_unseen) for _ in range(count)))

    data = [(stacked(seed, task.steps, False), stacked(seed, UNSEEN, True)) for seed in range(SEEDS)]
    batches, unseen = jax.tree.map(lambda *x: np.stack(x), *data)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    # One seed after the other: a vmap over them would give them one scale.
    return [float(loss) for loss in jax.jit(lambda of: jax.lax.map(run, of))((keys, batches, unseen))]


def rows(task: str, policy: str) -> list[dict[str, Any]]:
    """The loss of each seed."""
    start = time.process_time()
    losses = [round(loss, 5) for loss in final_losses(TASKS[task], POLICIES[policy])]
    return [{"losses": losses, "cpu_seconds": round(time.process_time() - start, 1)}]


#: The first step of fp8_delayed has no scales yet, and of what is random one gradient says little.
WITH_GRADIENTS = [name for name in POLICIES if name not in ("float32", DELAYED) and NVFP4 not in name]


def gradient_rows(name: str) -> list[dict[str, Any]]:
    """Relative errors of the gradient of a tiny model; without errors, if no product suits float8."""
    loss_fn, params, batches = loss_and_params(name)
    products = jmpp.audit(jax.grad(under(loss_fn, POLICIES["fp8_current"])), params, batches[0]).products
    share = round(sum(product.share for product in products if product.scales), 2)

    def vectors(policy: str) -> list[np.ndarray]:
        compiled = jax.jit(jax.grad(under(loss_fn, POLICIES[policy])))
        return [vector(compiled(params, batch)) for batch in batches]

    row = {"float8_share": share}
    if share:
        exact = vectors("float32")
        row |= {n: round(float(np.mean(errors(vectors(n), exact))), 4) for n in WITH_GRADIENTS}
    return [row]


TABLES = (
    Table("fp8_training", rows, by={"task": TASKS, "policy": POLICIES}, about={"seeds": SEEDS}),
    Table("fp8_gradients", gradient_rows, by={"model": MODELS}),
)
