"""Train a Transformer on text, character by character, in float32, bfloat16 and float16; then let it write.

Run `python examples/nnx_transformer.py`: it takes one to two minutes on two CPU cores and needs no network.
The lines that make a train step mixed-precision are marked (1) to (4). Sampling needs none: the decode cache
of a wrapped model is in its compute dtype.
"""

import sys
from collections import namedtuple
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from flax import nnx
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import jmp_policy as jmpp

CONTEXT, BATCH_SIZE = 128, 12
FEATURES, HEADS, LAYERS, DROPOUT = 64, 4, 2, 0.05
LEARNING_RATE = 0.01
PROMPT, TEMPERATURE = "The ", 0.7

# Logits in float32, as is usual for language models: the policy of one module, by its path.
HALF_BUT_HEAD = {"head": "float32"}
# Growing every 50 clean steps is too eager for real training (the default is 2000), since each overflow
# costs a step. Here it lets you see overflows being skipped.
DYNAMIC = jmpp.DynamicLossScale(2.0**15, growth_interval=50)
RUNS = {
    "float32": ("float32", jmpp.NoOpLossScale()),
    "bfloat16": (jmpp.PolicyMap("mixed_bfloat16", HALF_BUT_HEAD), jmpp.NoOpLossScale()),
    "float16": (jmpp.PolicyMap("mixed_float16", HALF_BUT_HEAD), DYNAMIC),
}
MARGIN = 0.05  # in nats per character; other weights and batches (--seed) make about 0.02
Data = namedtuple("Data", "vocabulary train valid")  # characters; their indices, in two parts of the text
Row = namedtuple("Row", "name valid_loss sample history")  # history: arrays, one value a step


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(FEATURES, rngs=rngs), nnx.LayerNorm(FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, rngs=rngs)
        self.up = nnx.Linear(FEATURES, 4 * FEATURES, rngs=rngs)
        self.down = nnx.Linear(4 * FEATURES, FEATURES, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def __call__(self, x: jax.Array, decode: bool) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm_1(x), is_causal=not decode, decode=decode))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


def waves(key: jax.Array, shape: tuple[int, int], dtype: Any, **_: Any) -> jax.Array:
    """Vaswani et al.'s sinusoids, from which neighbours are learned much faster than from noise."""
    frequencies = 1e4 ** -jnp.linspace(0, 1, shape[1] // 2)
    angles = jnp.arange(shape[0])[:, None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1).astype(dtype)


class Transformer(nnx.Module):
    def __init__(self, vocabulary_size: int, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocabulary_size, FEATURES, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, FEATURES, embedding_init=waves, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.head = nnx.Linear(FEATURES, vocabulary_size, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, decode: bool = False) -> jax.Array:
        # Tokens and positions are integers, which no policy casts.
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, decode)
        return self.head(self.norm(x))


def cross_entropy(model: Transformer, windows: jax.Array) -> jax.Array:
    """Mean loss of predicting each character from those before it, in nats."""
    logits = model(windows[:, :-1], jnp.arange(CONTEXT))
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, windows: Any) -> dict:
    """One step, the same for every precision."""
    # The state of this model is the count of random numbers drawn: a skipped step leaves no trace.
    with jmpp.nnx.keep_state_on_skip(optimizer, model):  # (4)
        value_and_grad = jmpp.nnx.scaled_value_and_grad(cross_entropy)  # (3) was: nnx.value_and_grad
        loss, grads = value_and_grad(optimizer, model, windows)
        optimizer.update(model, grads)  # unscales; updates or skips
    return {"loss": loss} | jmpp.metrics(optimizer)


evaluate = nnx.jit(cross_entropy)


@partial(nnx.jit, static_argnames="length")
def generate(model: Transformer, prompt: Any, length: int, temperature: float, key: Any) -> jax.Array:
    """Continues the prompt to `length` tokens, one at a time; at most CONTEXT, since positions end there."""
    for block in model.blocks:
        block.attention.init_cache((1, length, FEATURES))
    given = jnp.pad(prompt, (0, length - len(prompt)), constant_values=-1)

    @nnx.scan(in_axes=(nnx.Carry, 0, 0, 0), out_axes=(nnx.Carry, 0))
    def write(carry: Any, position: jax.Array, given: jax.Array, key: jax.Array) -> Any:
        model, token = carry
        token = jnp.where(given < 0, token, given)
        logits = model(token[None, None], position[None], decode=True)[0, 0]
        return (model, jax.random.categorical(key, logits / temperature)), token

    steps = jnp.arange(length), given, jax.random.split(key, length)
    return write((model, prompt[0]), *steps)[1]


def load() -> Data:
    """The Python language reference as `help()` shows it, which comes with Python."""
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs)).encode("ascii", "ignore")  # topics overlap: each only once
    vocabulary, tokens = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    train, valid = np.split(tokens.astype(np.int32), [len(tokens) * 9 // 10])
    return Data("".join(map(chr, vocabulary)), train, valid)


def train(name: str, steps: int, seed: int, data: Data, progress: Progress) -> Row:
    """Trains in one of the precisions of RUNS, from the same weights and on the same batches in each."""
    policy, loss_scale = RUNS[name]
    model = Transformer(len(data.vocabulary), nnx.Rngs(seed))
    model = jmpp.wrap(model, policy)  # (1) is new
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    tx = jmpp.loss_scaled(optax.adamw(schedule), loss_scale)  # (2) was: optax.adamw(...)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    rng = np.random.default_rng(seed)
    windows = np.lib.stride_tricks.sliding_window_view(data.train, CONTEXT + 1)
    model.train()
    history = []
    for _ in progress.track(range(steps), description=f"{name:8}"):
        batch = windows[rng.integers(len(windows), size=BATCH_SIZE)]
        history.append(train_step(model, optimizer, batch))

    model.eval()
    windows = np.lib.stride_tricks.sliding_window_view(data.valid, CONTEXT + 1)[::CONTEXT]
    valid_loss = float(evaluate(model, windows))
    prompt = jnp.array([data.vocabulary.index(character) for character in PROMPT])
    written = generate(model, prompt, CONTEXT, TEMPERATURE, jax.random.key(seed))
    sample = "".join(data.vocabulary[token] for token in np.asarray(written))
    return Row(name, valid_loss, sample, jax.tree.map(lambda *x: np.array(x), *history))


def table(rows: list[Row]) -> Table:
    heads = "training\nloss", "validation\nloss", "bits per\ncharacter", "skipped\nsteps", "loss\nscale"
    result = Table("precision", *heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, valid_loss, _, seen in rows:
        losses = f"{seen['loss'][-20:].mean():.3f}", f"{valid_loss:.3f}", f"{valid_loss / np.log(2):.3f}"
        skipped, scale = f"{seen['skipped_steps'][-1]}", f"2^{np.log2(seen['loss_scale'][-1]):.0f}"
        result.add_row(name, *losses, skipped, scale)
    for column in result.columns[1:]:
        column.justify = "right"
    return result


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: both half precisions must keep up with float32."""
    full, *halves = rows
    behind = [row for row in halves if not row.valid_loss <= full.valid_loss + MARGIN]  # NaN is behind, too
    if not behind:
        return None
    names = " and ".join(f"{row.name} ({row.valid_loss:.3f})" for row in behind)
    return f"validation loss of {names} is more than {MARGIN} above that of float32 ({full.valid_loss:.3f})"


ABOUT = """
A Transformer learns the Python language reference character by character,
three times: same weights, same batches, same dropout, same train step. Then it
writes, with the same random numbers each time. The losses are in nats, that of
training with dropout; validation is on the last tenth of the text.
"""


def compare(steps: int, seed: int, quiet: bool = False) -> list[Row]:
    """Trains all of RUNS; prints the table and what each model writes."""
    console, data = Console(highlight=False), load()
    if not quiet:
        console.print(ABOUT)
    with progress_bar(console, quiet) as progress:
        rows = [train(name, steps, seed, data, progress) for name in RUNS]
    console.print(table(rows))
    for row in rows:
        console.print(Panel(Text(row.sample), title=row.name, title_align="left"))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Train a Transformer in three precisions, and compare.", steps=700)
    return finish(judge(compare(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    sys.exit(main())
