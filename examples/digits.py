"""Train one CNN in float32, bfloat16 and float16 with the same train step, and compare.

Run `python examples/digits.py` (or `make demo`): it takes less than a minute on two CPU cores and needs no
network. The three lines that make a train step mixed-precision are marked (1), (2) and (3). The network is a
Linen module; nnx_digits.py does the same with NNX.
"""

import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits

import jmp_policy as jmpp

# Every run minimises 2**-17 (about 1e-5) times the cross-entropy, as happens to one term of a weighted
# multi-task loss. The learning rate makes up for it, and a power of two rounds nothing, so float32 learns
# as if the weight were not there. But float16 has no number between 0 and 2**-24, about the size of the
# gradient of one logit: most gradients become 0, and the few that are left are rounded beyond recognition.
# (SGD, since Adam's epsilon of 1e-8 is of the size of these gradients and would blur the comparison.)
LOSS_WEIGHT = 2.0**-17
LEARNING_RATE = 0.05 / LOSS_WEIGHT
BATCH_SIZE = 128

# Growing every 20 clean steps is too eager for real training (the default is 2000), since each overflow
# costs a step. Here it lets you see the scale climb, overflow and back off. 2**15 is a usual initial scale;
# the weight comes on top, and takes the scale beyond the default ceiling of 2**24.
DYNAMIC = jmpp.DynamicLossScale(2.0**15 / LOSS_WEIGHT, growth_interval=20, max_loss_scale=2.0**60)
RUNS = {
    "float32": ("float32", jmpp.NoOpLossScale()),
    "bfloat16": ("mixed_bfloat16", jmpp.NoOpLossScale()),
    "float16": ("mixed_float16", DYNAMIC),
    "float16 unscaled": ("mixed_float16", jmpp.NoOpLossScale()),
}
State = namedtuple("State", "params batch_stats opt_state")
Data = namedtuple("Data", "images labels test_images test_labels")
Row = namedtuple("Row", "name accuracy history param_bytes temp_bytes")  # history: arrays, one value a step


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


# Weights are float32 for every precision, so that the bare network can make them for all.
init = jax.jit(partial(Net().init, train=False))


def train_step(model: nn.Module, tx: Any, state: State, images: Any, labels: Any) -> tuple[State, dict]:
    """One step, the same for every precision."""

    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = model.apply(variables, images, train=True, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return LOSS_WEIGHT * losses.mean(), new["batch_stats"]

    value_and_grad = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)  # (3) was: jax.value_and_grad
    (loss, batch_stats), grads = value_and_grad(state.opt_state, state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)  # unscales; updates or skips
    params = optax.apply_updates(state.params, updates)
    # A forward pass that overflowed would spoil the running statistics for good: skip them as well.
    batch_stats = jmpp.select_tree(jmpp.grads_finite(opt_state), batch_stats, state.batch_stats)
    zero_grads = jnp.mean(jnp.concatenate([g.ravel() == 0 for g in jax.tree.leaves(grads)]))
    seen = {"loss": loss / LOSS_WEIGHT, "zero_grads": zero_grads} | jmpp.metrics(opt_state)
    return State(params, batch_stats, opt_state), seen


def load(rng: np.random.Generator) -> Data:
    """1797 images of 8 x 8 pixels, 500 of them for the test."""
    digits = load_digits()
    order = rng.permutation(len(digits.target))
    images = (digits.images[order, ..., None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return Data(images[500:], labels[500:], images[:500], labels[:500])


def train(name: str, steps: int, seed: int, progress: Progress) -> Row:
    """Trains in one of the precisions of RUNS, from the same weights and on the same batches in each."""
    policy, loss_scale = RUNS[name]
    model = jmpp.wrap(Net(), policy)  # (1) was: Net()
    tx = jmpp.loss_scaled(optax.sgd(LEARNING_RATE, momentum=0.9), loss_scale)  # (2) was: optax.sgd(...)

    rng = np.random.default_rng(seed)
    images, labels, test_images, test_labels = load(rng)
    variables = init(jax.random.key(seed), images[:1])
    state = State(**variables, opt_state=tx.init(variables["params"]))
    step = jax.jit(partial(train_step, model, tx), donate_argnums=0)
    step = step.lower(state, images[:BATCH_SIZE], labels[:BATCH_SIZE]).compile()
    history = []
    for _ in progress.track(range(steps), description=f"{name:16}"):
        batch = rng.choice(len(images), BATCH_SIZE, replace=False)
        state, seen = step(state, images[batch], labels[batch])
        history.append(seen)

    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = jax.jit(partial(model.apply, train=False))(variables, test_images)
    accuracy = float(np.mean(np.argmax(logits, axis=-1) == test_labels))
    memory = sum(p.nbytes for p in jax.tree.leaves(state.params)), step.memory_analysis().temp_size_in_bytes
    return Row(name, accuracy, jax.tree.map(lambda *x: np.array(x), *history), *memory)


def table(rows: list[Row]) -> Table:
    heads = "test acc.", "final loss", "loss scale", "skipped steps", "zero grads", "params", "XLA temp."
    result = Table(
        "precision", *(head.replace(" ", "\n") for head in heads), box=box.SIMPLE_HEAD, pad_edge=False
    )
    for name, accuracy, seen, param_bytes, temp_bytes in rows:
        loss, scale = f"{seen['loss'][-20:].mean():.4f}", f"2^{np.log2(seen['loss_scale'][-1]):.0f}"
        skipped, zero_grads = f"{seen['skipped_steps'][-1]}", f"{seen['zero_grads'][0]:.1%}"
        memory = f"{param_bytes / 2**10:.0f} KiB", f"{temp_bytes / 2**20:.1f} MiB"
        result.add_row(name, f"{accuracy:.1%}", loss, scale, skipped, zero_grads, *memory)
    for column in result.columns[1:]:
        column.justify = "right"
    return result


def plot(rows: list[Row], path: Path) -> None:
    """Training loss of all runs, smoothed over 10 steps, and the one loss scale that moves."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    # Okabe and Ito's colours; thin lines on thick ones, since three of the runs lie on top of each other.
    lines = ("#F0E442", 7), ("#56B4E9", 4), ("#000000", 1), ("#D55E00", 1)
    for row, (colour, width) in zip(rows, lines, strict=True):
        smooth = np.convolve(row.history["loss"], np.ones(10) / 10)[9 : len(row.history["loss"])]
        top.plot(np.arange(10, 10 + len(smooth)), smooth, color=colour, linewidth=width, label=row.name)
    top.set(ylabel="cross-entropy (training)", yscale="log")
    top.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
    seen = next(row.history for row in rows if row.name == "float16")
    step, scale = np.arange(1, 1 + len(seen["loss_scale"])), seen["loss_scale"]
    bottom.step(step, scale, where="post", color="#000000", linewidth=1, label="float16")
    skip = ~seen["grads_finite"]
    bottom.plot(step[skip], scale[skip], "v", color="#0072B2", label="overflow: step skipped, scale halved")
    bottom.set(xlabel="step", ylabel="loss scale")
    bottom.set_yscale("log", base=2)
    bottom.legend(frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: float16 with loss scaling must keep up with float32."""
    full, half = (next(row.accuracy for row in rows if row.name == name) for name in ("float32", "float16"))
    if full - half <= 0.01 + 1e-9:
        return None
    return f"float16 with loss scaling reached {half:.1%}, more than 1 point behind float32 ({full:.1%})"


ABOUT = """
A CNN with BatchNorm learns to read 8 x 8 digits four times: same weights, same
batches, same train step. The loss is multiplied by 2^-17 and the learning rate
by 2^17. float32 cannot tell, but most gradients are now too small for float16,
unless the loss scale lifts them.
"""
CAPTION = """\
final loss: cross-entropy, mean of the last 20 steps
zero grads: share of weight gradients that are exactly 0 on the first batch
params:     float32 master weights in every run
XLA temp.:  activations and other temporaries of the train step, as XLA reports
            them for this backend ({}). On a CPU it computes float16 products
            in float32, so the figures say little about a GPU's memory."""


def compare(steps: int, seed: int, out: Path, quiet: bool = False, train: Callable = train) -> list[Row]:
    """Trains all of RUNS, prints the table and saves the plot."""
    console = Console(highlight=False)
    if not quiet:
        console.print(ABOUT)
    with progress_bar(console, quiet) as progress:
        rows = [train(name, steps, seed, progress) for name in RUNS]
    console.print(table(rows))
    if not quiet:
        console.print(CAPTION.format(jax.default_backend()))
    plot(rows, out)
    console.print(f"\nLoss and loss scale over time: {out}", soft_wrap=True, markup=False)
    return rows


def main(argv: list[str] | None = None, train: Callable = train, out: str = "out/digits.png") -> int:
    parser = Arguments("Train a CNN on digits in four precisions, and compare.", steps=600)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / out, help="the plot")
    return finish(judge(compare(**vars(parser.parse_args(argv)), train=train)))


if __name__ == "__main__":
    sys.exit(main())
