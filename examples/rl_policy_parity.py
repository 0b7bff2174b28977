"""Sample tokens in half precision, train on them in float32: how many have the same probability in both?

Run `python examples/rl_policy_parity.py`: it takes two minutes on two CPU cores and needs no network. A small
GPT learns by groups of samples (as GRPO does) to write even tokens. What it samples is computed in half
precision, as servers do, and what it learns from in float32. The quotient of the two probabilities of a token
should be 1; counted are those in [0.999, 1.002]. `jmpp.recommend` says what to keep in float32.
"""

import sys
from collections import namedtuple
from functools import partial
from typing import Any

import flax.linen as nn
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

VOCABULARY, LENGTH, WIDTH, LAYERS, GROUPS, SAMPLES = 32, 12, 48, 2, 4, 8
LOW, HIGH = 0.999, 1.002
CLIP = 0.2
BUDGET = 2e-3  # Relative error of the gradient: a third of what it is with the whole model in float16.
Row = namedtuple("Row", "name same reward")  # same: share of tokens whose quotient is near 1


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.LayerNorm()(x)
        x = x + nn.SelfAttention(4)(y, mask=nn.make_causal_mask(y[..., 0]))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="tokens")(tokens)
        x = x + nn.Embed(LENGTH, WIDTH, name="positions")(jnp.arange(LENGTH))
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
        # Logits of a trained language model are large: 16 or more, where float16 has steps of 1/64.
        head = nn.Dense(VOCABULARY, kernel_init=nn.initializers.normal(0.6), name="head")
        return head(nn.LayerNorm(name="norm")(x))


def log_probabilities(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Those of each token but the first, given those before it."""
    logits = model.apply({"params": params}, tokens)[:, :-1].astype(jnp.float32)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]


def sample(model: Any, params: Any, key: jax.Array) -> jax.Array:
    """Draws groups of sequences that start with the same token."""
    first = jnp.repeat(jax.random.randint(key, (GROUPS,), 0, VOCABULARY), SAMPLES)
    start = jnp.zeros((GROUPS * SAMPLES, LENGTH), jnp.int32).at[:, 0].set(first)

    def draw(tokens: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
        logits = model.apply({"params": params}, tokens)[:, place - 1].astype(jnp.float32)
        new = jax.random.categorical(jax.random.fold_in(key, place), logits)
        return tokens.at[:, place].set(new), None

    return jax.lax.scan(draw, start, jnp.arange(1, LENGTH))[0]


def surrogate(params: Any, tokens: jax.Array, old: jax.Array, advantage: jax.Array) -> jax.Array:
    """The clipped objective of PPO and GRPO, as a loss; the model that learns is in float32."""
    ratio = jnp.exp(log_probabilities(GPT(), params, tokens) - old)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    return -jnp.minimum(ratio * advantage[:, None], clipped * advantage[:, None]).mean()


def advantages(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The reward of each sequence, its share of even tokens, and by how much it beats those of its group."""
    reward = (tokens[:, 1:] % 2 == 0).mean(-1).reshape(GROUPS, SAMPLES)
    deviation = reward - reward.mean(-1, keepdims=True)
    return reward, (deviation / (reward.std(-1, keepdims=True) + 1e-2)).ravel()


def run(name: str, policy: Any, steps: int, seed: int, tick: Any) -> Row:
    """Trains with a sampler under a policy."""
    sampler, tx = jmpp.wrap(GPT(), policy), optax.adam(3e-4)
    params = jax.jit(GPT().init)(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))["params"]

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> Any:
        tokens = sample(sampler, params, key)
        old = log_probabilities(sampler, params, tokens)
        ratio = jnp.exp(log_probabilities(GPT(), params, tokens) - old)
        reward, advantage = advantages(tokens)
        updates, state = tx.update(jax.grad(surrogate)(params, tokens, old, advantage), state)
        same = ((ratio >= LOW) & (ratio <= HIGH)).mean()
        return optax.apply_updates(params, updates), state, (same, reward.mean())

    state, found = tx.init(params), []
    for i in range(steps):
        params, state, seen = step(params, state, jax.random.key(seed + i))
        found.append(seen)
        tick()
    same, reward = np.asarray(found).T
    return Row(name, float(same.mean()), float(reward[-5:].mean()))


def recommended(seed: int) -> Any:
    """What must be in float32 for a sample's gradient to be that of float32."""
    params = jax.jit(GPT().init)(jax.random.key(seed), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tokens = sample(GPT(), params, jax.random.key(seed))
    old, (_, advantage) = log_probabilities(GPT(), params, tokens), advantages(tokens)
    return jmpp.recommend(surrogate, params, tokens, old, advantage, dtype="float16", budget=BUDGET)


def compare(steps: int, seed: int, quiet: bool) -> list[Row]:
    console, advice = Console(), recommended(seed)
    if not quiet:
        console.print(advice)
    runs = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16", "recommended": advice.policy}
    with progress_bar(console, quiet) as progress:
        task = progress.add_task("training", total=steps * len(runs))
        return [run(n, p, steps, seed, partial(_advance, progress, task)) for n, p in runs.items()]


def _advance(progress: Progress, task: Any) -> None:
    progress.advance(task)


def judge(rows: list[Row]) -> str | None:
    """Why the recommended policy did not do what this example shows, if so."""
    same = {row.name: row.same for row in rows}
    if not same["bfloat16"] < same["float16"] < same["recommended"]:
        return f"Tokens with the same probability should be more in float16, and most as recommended: {same}"
    return None


def main(argv: list[str] | None = None) -> int:
    options = Arguments(__doc__.partition("\n")[0], steps=20).parse_args(argv)
    rows = compare(options.steps, options.seed, options.quiet)
    table = Table(
        "sampler", f"probability within [{LOW}, {HIGH}] of float32's", "reward", box=box.SIMPLE_HEAD
    )
    for row in rows:
        table.add_row(row.name, f"{100 * row.same:.1f} % of tokens", f"{row.reward:.2f}")
    Console().print(table)
    return finish(judge(rows))


if __name__ == "__main__":
    sys.exit(main())
