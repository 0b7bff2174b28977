"""Train an MLP-Mixer of Equinox in float32, bfloat16 and float16 with the same train step, and compare.

Run `python examples/equinox_digits.py`: it takes less than a minute on two CPU cores and needs no network.
The three lines that make a train step mixed-precision are marked (1), (2) and (3). The model stays as it is:
`autocast` changes the operations of the loss function, not its modules.
"""

import sys
from collections import Counter, namedtuple
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from digits import load
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jmp_policy as jmpp

BATCH_SIZE, FEATURES, BLOCKS = 128, 32, 2
LEARNING_RATE = 3e-3
# Logits in float32: the rule names a scope, here the one that Mixer opens around its head.
RULES = {"head": "off"}
# Growing every 15 clean steps is too eager for real training (the default is 2000), since each overflow
# costs a step. Here it lets you see the scale climb to where steps overflow, and these being skipped.
DYNAMIC = jmpp.DynamicLossScale(2.0**15, growth_interval=15, max_loss_scale=2.0**40)
RUNS = {"float32": jmpp.NoOpLossScale(), "bfloat16": jmpp.NoOpLossScale(), "float16": DYNAMIC}
MARGIN = 0.02  # of the test accuracy; other weights and batches (--seed) make about 0.01
Row = namedtuple("Row", "name accuracy products history")  # history: arrays, one value a step


class Block(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm
    over_patches: eqx.nn.MLP
    over_features: eqx.nn.MLP

    def __init__(self, patches: int, key: jax.Array):
        keys = jax.random.split(key)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(FEATURES), eqx.nn.LayerNorm(FEATURES)
        self.over_patches = eqx.nn.MLP(patches, patches, 2 * patches, 1, jax.nn.gelu, key=keys[0])
        self.over_features = eqx.nn.MLP(FEATURES, FEATURES, 2 * FEATURES, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.vmap(self.over_patches, in_axes=1, out_axes=1)(jax.vmap(self.norm_1)(x))
        return x + jax.vmap(self.over_features)(jax.vmap(self.norm_2)(x))


class Mixer(eqx.Module):
    patches: eqx.nn.Conv2d
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, last, *keys = jax.random.split(key, 2 + BLOCKS)
        self.patches = eqx.nn.Conv2d(1, FEATURES, 2, stride=2, key=first)
        self.blocks = [Block(16, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(FEATURES)
        self.head = eqx.nn.Linear(FEATURES, 10, key=last)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = self.patches(jnp.moveaxis(image, -1, 0)).reshape(FEATURES, -1).T
        for block in self.blocks:
            x = block(x)
        with jax.named_scope("head"):
            return self.head(self.norm(x.mean(axis=0)))


def loss_fn(params: Any, static: Any, images: Any, labels: Any) -> jax.Array:
    logits = jax.vmap(eqx.combine(params, static))(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_step(
    name: str, tx: Any, static: Any, params: Any, opt_state: Any, images: Any, labels: Any
) -> tuple:
    """One step, the same for every precision."""
    loss_in_half = jmpp.autocast(loss_fn, name, rules=RULES)  # (1) is new
    value_and_grad = jmpp.scaled_value_and_grad(loss_in_half)  # (3) was: jax.value_and_grad(loss_fn)
    loss, grads = value_and_grad(opt_state, params, static, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)  # unscales; updates or skips
    return optax.apply_updates(params, updates), opt_state, {"loss": loss} | jmpp.metrics(opt_state)


def train(name: str, steps: int, seed: int, progress: Progress) -> Row:
    """Trains in one of the precisions of RUNS, from the same weights and on the same batches in each."""
    params, static = eqx.partition(eqx.filter_jit(Mixer)(jax.random.key(seed)), eqx.is_inexact_array)
    tx = jmpp.loss_scaled(optax.adamw(LEARNING_RATE), RUNS[name])  # (2) was: optax.adamw(...)
    opt_state = tx.init(params)

    rng = np.random.default_rng(seed)
    images, labels, test_images, test_labels = load(rng)
    plan = jmpp.explain(loss_fn, name, rules=RULES)(params, static, images, labels)
    products = Counter(row.operands for row in plan.of("dot_general", "conv_general_dilated"))
    step = jax.jit(partial(train_step, name, tx, static), donate_argnums=(0, 1))
    history = []
    for _ in progress.track(range(steps), description=f"{name:8}"):
        batch = rng.choice(len(images), BATCH_SIZE, replace=False)
        params, opt_state, seen = step(params, opt_state, images[batch], labels[batch])
        history.append(seen)

    # A module is a pytree, and what it holds besides arrays is static: no partition without gradients.
    predict = jmpp.autocast(lambda model, images: jax.vmap(model)(images), name, rules=RULES)
    logits = eqx.filter_jit(predict)(eqx.combine(params, static), test_images)
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == test_labels))
    return Row(name, accuracy, products, jax.tree.map(lambda *x: np.array(x), *history))


def table(rows: list[Row]) -> Table:
    heads = "test\nacc.", "final\nloss", "skipped\nsteps", "loss\nscale"
    result = Table("precision", *heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, accuracy, _, seen in rows:
        skipped, scale = f"{seen['skipped_steps'][-1]}", f"2^{np.log2(seen['loss_scale'][-1]):.0f}"
        result.add_row(name, f"{accuracy:.1%}", f"{seen['loss'][-20:].mean():.4f}", skipped, scale)
    for column in result.columns[1:]:
        column.justify = "right"
    return result


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: both half precisions must keep up with float32."""
    full, *halves = rows
    behind = [row for row in halves if full.accuracy - row.accuracy > MARGIN + 1e-9]
    if not behind:
        return None
    names = " and ".join(f"{row.name} ({row.accuracy:.1%})" for row in behind)
    return f"accuracy of {names} is more than {MARGIN:.0%} below that of float32 ({full.accuracy:.1%})"


ABOUT = """
An MLP-Mixer of Equinox learns to read 8 x 8 digits three times: same weights,
same batches, same train step.
"""


def compare(steps: int, seed: int, quiet: bool = False) -> list[Row]:
    """Trains all of RUNS; prints the table, and what ran in which precision."""
    console = Console(highlight=False)
    if not quiet:
        console.print(ABOUT)
    with progress_bar(console, quiet) as progress:
        rows = [train(name, steps, seed, progress) for name in RUNS]
    console.print(table(rows))
    for row in rows[1:]:
        counts = " and ".join(f"{count} in {dtype}" for dtype, count in row.products.items())
        console.print(f"products of the {row.name} run: {counts} (patches of 4 pixels, and the head)")
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Train a Mixer on digits in three precisions, and compare.", steps=300)
    return finish(judge(compare(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    sys.exit(main())
