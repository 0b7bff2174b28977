"""Train an LSTM of Haiku to add in float32, bfloat16 and float16 with the same train step, and compare.

Run `python examples/haiku_lstm.py`: it takes less than a minute on two CPU cores and needs no network. The
three lines that make a train step mixed-precision are marked (1), (2) and (3). Haiku's modules are scopes, so
that a rule names one by its path.
"""

import sys
from collections import Counter, namedtuple
from functools import partial
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jmp_policy as jmpp

LENGTH, BATCH_SIZE, FEATURES = 16, 64, 64
LEARNING_RATE = 5e-3
# The answer in float32: the rule governs the module called "head" and whatever is inside.
RULES = {"head": "off"}
RUNS = {
    "float32": jmpp.NoOpLossScale(),
    "bfloat16": jmpp.NoOpLossScale(),
    "float16": jmpp.DynamicLossScale(
        2.0**15, growth_interval=50
    ),  # 2000, the default, is for longer training
}
# Of the mean squared error, that of the constant answer being 1/6; other weights and batches (--seed) make
# about 0.002.
MARGIN = 0.01
Row = namedtuple("Row", "name error products skipped_steps")


def answer(numbers: jax.Array) -> jax.Array:
    core = hk.LSTM(FEATURES, name="memory")
    x, _ = hk.dynamic_unroll(core, jnp.swapaxes(numbers, 0, 1), core.initial_state(len(numbers)))
    return hk.Linear(1, name="head")(x[-1])[:, 0]


model = hk.without_apply_rng(hk.transform(answer))


def loss_fn(params: Any, numbers: Any, sums: Any) -> jax.Array:
    return jnp.mean((model.apply(params, numbers) - sums) ** 2)


def examples(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of numbers from 0 to 1, two of which are marked; and the sum of these two."""
    values, marks = rng.random((size, LENGTH)), np.zeros((size, LENGTH))
    for half in np.split(np.arange(LENGTH), 2):
        marks[np.arange(size), rng.choice(half, size)] = 1
    numbers = np.stack([values, marks], axis=-1)
    return numbers.astype(np.float32), (values * marks).sum(axis=1).astype(np.float32)


def train_step(name: str, tx: Any, params: Any, opt_state: Any, numbers: Any, sums: Any) -> tuple:
    """One step, the same for every precision."""
    loss_in_half = jmpp.autocast(loss_fn, name, rules=RULES)  # (1) is new
    value_and_grad = jmpp.scaled_value_and_grad(loss_in_half)  # (3) was: jax.value_and_grad(loss_fn)
    _, grads = value_and_grad(opt_state, params, numbers, sums)
    updates, opt_state = tx.update(grads, opt_state, params)  # unscales; updates or skips
    return optax.apply_updates(params, updates), opt_state


def train(name: str, steps: int, seed: int, progress: Progress) -> Row:
    """Trains in one of the precisions of RUNS, from the same weights and on the same batches in each."""
    rng = np.random.default_rng(seed)
    params = jax.jit(model.init)(jax.random.key(seed), examples(rng, 1)[0])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    tx = jmpp.loss_scaled(tx, RUNS[name])  # (2) is new
    opt_state = tx.init(params)

    step = jax.jit(partial(train_step, name, tx), donate_argnums=(0, 1))
    for _ in progress.track(range(steps), description=f"{name:8}"):
        params, opt_state = step(params, opt_state, *examples(rng, BATCH_SIZE))

    unseen = examples(rng, 1000)
    error = float(jax.jit(jmpp.autocast(loss_fn, name, rules=RULES))(params, *unseen))
    plan = jmpp.explain(loss_fn, name, rules=RULES)(params, *unseen)
    products = Counter((row.path, row.operands) for row in plan.of("dot_general"))
    return Row(name, error, products, int(jmpp.metrics(opt_state)["skipped_steps"]))


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: both half precisions must keep up with float32."""
    full, *halves = rows
    behind = [row for row in halves if not row.error <= full.error + MARGIN]  # NaN is behind, too
    if not behind:
        return None
    names = " and ".join(f"{row.name} ({row.error:.4f})" for row in behind)
    return f"error of {names} is more than {MARGIN} above that of float32 ({full.error:.4f})"


def compare(steps: int, seed: int, quiet: bool = False) -> list[Row]:
    """Trains all of RUNS; prints the table, and what ran in which precision."""
    console = Console(highlight=False)
    if not quiet:
        console.print(f"\nAn LSTM of Haiku learns to add two of {LENGTH} numbers, three times.\n")
    with progress_bar(console, quiet) as progress:
        rows = [train(name, steps, seed, progress) for name in RUNS]
    table = Table("precision", "mean squared\nerror", "skipped\nsteps", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(row.name, f"{row.error:.4f}", f"{row.skipped_steps}")
    console.print(table)
    for row in rows[1:]:
        products = ", ".join(f"{path} in {dtype}" for path, dtype in row.products)
        console.print(f"products of the {row.name} run: {products}")
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Train an LSTM in three precisions, and compare.", steps=500)
    return finish(judge(compare(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    sys.exit(main())
