"""Generate with a Transformer decoder in float32, bfloat16 and float16 from the same weights, and compare.

Run `python examples/autocast_inference.py`: it takes less than a minute on two CPU cores and needs no
network. The decoder is plain JAX: functions of a dictionary of arrays, with a cache of keys and values, under
`jax.lax.scan`. The line that makes it mixed-precision is marked (1). What comes out is exported, as any other
JAX function can be.
"""

import sys
from collections import Counter, namedtuple
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
from _run import Arguments, finish, progress_bar
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jmp_policy as jmpp

VOCABULARY, PROMPT, LENGTH, TEXTS = 32, 8, 24, 32
FEATURES, HEADS, LAYERS = 64, 4, 2
RUNS = ("float32", "bfloat16", "float16")
# The least share of the same tokens, and the largest error of a logit, as a share of the largest logit and in
# units of the dtype's eps: every operation on the way to a logit rounds by half of that.
AGREEMENT, LOGIT_ERROR = 0.98, 4.0
Row = namedtuple("Row", "name tokens logits logit_error products exported_bytes")


def init(key: jax.Array) -> dict:
    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, now = jax.random.split(key)
        return jax.random.normal(now, shape) / shape[-2] ** 0.5

    shapes = {"qkv": (FEATURES, 3 * FEATURES), "out": (FEATURES, FEATURES)}
    shapes |= {"up": (FEATURES, 4 * FEATURES), "down": (4 * FEATURES, FEATURES)}
    params = {name: normal(LAYERS, *shape) for name, shape in shapes.items()}
    return params | {"tokens": normal(VOCABULARY, FEATURES), "positions": normal(LENGTH, FEATURES)}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layer(x: jax.Array, weights: dict, cache: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For one token each of several texts; the cache holds keys and values of the tokens before it."""
    q, k, v = jnp.split((norm(x) @ weights["qkv"]).reshape(len(x), 3 * HEADS, -1), 3, axis=1)
    cache = jax.lax.dynamic_update_index_in_dim(cache, jnp.stack([k, v]), position, axis=2)
    scores = jnp.einsum("bhd,bthd->bht", q, cache[0]) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -jnp.inf)
    mixed = jnp.einsum("bht,bthd->bhd", jax.nn.softmax(scores), cache[1])
    x = x + mixed.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], cache


def decode(params: dict, given: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Goes through texts, taking the likeliest token for each that is -1; gives all tokens and logits."""
    stack = {name: params[name] for name in ("qkv", "out", "up", "down")}

    def step(carry: Any, inputs: Any) -> Any:
        token, caches = carry
        position, given = inputs
        token = jnp.where(given < 0, token, given)
        x = params["tokens"][token] + params["positions"][position]
        x, caches = jax.lax.scan(lambda x, w: layer(x, *w, position), x, (stack, caches))
        logits = norm(x) @ params["tokens"].T
        return (jnp.argmax(logits, axis=-1), caches), (token, logits)

    caches = jnp.zeros((LAYERS, 2, len(given), LENGTH, HEADS, FEATURES // HEADS))
    start = jnp.zeros(len(given), int), caches
    _, (tokens, logits) = jax.lax.scan(step, start, (jnp.arange(LENGTH), given.T))
    return tokens.T, jnp.moveaxis(logits, 0, 1)


def texts(rng: np.random.Generator) -> np.ndarray:
    """Some tokens, over and over again."""
    return np.tile(rng.integers(0, VOCABULARY, (TEXTS, PROMPT)), LENGTH // PROMPT).astype(np.int32)


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    _, logits = decode(params, tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses[:, PROMPT - 1 :].mean()


def train(steps: int, seed: int, progress: Progress) -> dict:
    """Weights, trained in float32."""
    rng, tx = np.random.default_rng(seed), optax.adam(3e-3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: dict, opt_state: Any, tokens: jax.Array) -> Any:
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, tokens), opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = jax.jit(init)(jax.random.key(seed))
    opt_state = tx.init(params)
    for _ in progress.track(range(steps), description="train"):
        params, opt_state = step(params, opt_state, texts(rng))
    return params


def generate(name: str, params: dict, prompts: np.ndarray, full: Row | None) -> Row:
    """Continues the prompts, by way of an exported program; and compares the logits for float32's tokens."""
    in_half = jax.jit(jmpp.autocast(decode, name))  # (1) was: jax.jit(decode)
    exported = jax.export.export(in_half)(params, prompts).serialize()
    run = jax.export.deserialize(exported).call
    tokens, logits = run(params, prompts)
    if full is not None:
        _, logits = run(params, full.tokens)
    error = 0.0 if full is None else float(jnp.abs(logits - full.logits).max() / jnp.abs(full.logits).max())
    plan = jmpp.explain(decode, name)(params, prompts)
    products = Counter(row.operands for row in plan.of("dot_general"))
    return Row(name, np.asarray(tokens), logits, error, products, len(exported))


def agreement(row: Row, full: Row) -> float:
    """Share of the generated tokens that are those of float32."""
    return float(np.mean(row.tokens[:, PROMPT:] == full.tokens[:, PROMPT:]))


def judge(rows: list[Row]) -> str | None:
    """Why the comparison failed, or None: both half precisions must say what float32 says."""
    full, *halves = rows
    for row in halves:
        same = agreement(row, full)
        if same < AGREEMENT:
            return f"{row.name} agrees with float32 on {same:.1%} of the tokens, less than {AGREEMENT:.0%}"
        bound = LOGIT_ERROR * float(jnp.finfo(row.name).eps)
        if not row.logit_error <= bound:  # NaN is too large, too
            return f"the largest logit error of {row.name} is {row.logit_error:.2e}, more than {bound:.2e}"
    return None


def table(rows: list[Row]) -> Table:
    heads = "same tokens\nas float32", "largest\nlogit error", "products", "exported"
    result = Table("precision", *heads, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        products = ", ".join(f"{count} in {dtype}" for dtype, count in row.products.items())
        error, size = f"{row.logit_error:.1e}", f"{row.exported_bytes / 2**10:.1f} KiB"
        result.add_row(row.name, f"{agreement(row, rows[0]):.1%}", error, products, size)
    return result


def compare(steps: int, seed: int, quiet: bool = False) -> list[Row]:
    """Trains, generates in all of RUNS, and prints the table."""
    console = Console(highlight=False)
    if not quiet:
        console.print(
            "\nA Transformer goes on with what was repeated: trained once, run in three precisions.\n"
        )
    with progress_bar(console, quiet) as progress:
        params = train(steps, seed, progress)
    prompts = np.where(np.arange(LENGTH) < PROMPT, texts(np.random.default_rng(seed + 1)), -1)
    rows = [generate("float32", params, prompts, None)]
    rows += [generate(name, params, prompts, rows[0]) for name in RUNS[1:]]
    console.print(table(rows))
    size = sum(p.nbytes for p in jax.tree.leaves(params)) / 2**10
    console.print(
        f"One set of weights for all: {size:.0f} KiB in float32. Each row ran as exported and read back."
    )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = Arguments("Generate with a Transformer in three precisions, and compare.", steps=80)
    return finish(judge(compare(**vars(parser.parse_args(argv)))))


if __name__ == "__main__":
    sys.exit(main())
