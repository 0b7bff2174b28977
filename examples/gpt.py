"""Train a GPT on text with gradient accumulation; kill it, run it again, and it goes on bit for bit.

Run `python examples/gpt.py --precision fp16`: one to two minutes on two CPU cores, no network; the text is
the documentation that comes with Python. Each step splits its batch into micro-batches, of which only one is
in memory. TensorBoard shows loss, loss scale and skipped steps, if `tensorboardX` is installed.
"""

import sys
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import finish
from _train import history, judged, parse, plot, train

import jmp_policy as jmpp

DEFAULTS = {
    "precision": {"policy": "fp16", "rules": [["head", "p=f32, c=f16, o=f32"]]}, "steps": 200, "seed": 0,
    "layers": 2, "features": 64, "heads": 4, "context": 64, "batch": 32, "micro_batches": 4,
    "learning_rate": 3e-3, "out": "examples/out/gpt",
}  # fmt: skip


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features, mask = x.shape[-1], nn.make_causal_mask(x[..., 0])
        y = nn.LayerNorm(name="norm_0")(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attention")(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * features, name="up")(nn.LayerNorm(name="norm_1")(x)))
        return x + nn.Dense(features, name="down")(y)


class GPT(nn.Module):
    vocabulary: int
    layers: int
    features: int
    heads: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[-1])
        x = nn.Embed(self.vocabulary, self.features, name="tokens")(tokens)
        x = x + nn.Embed(self.context, self.features, name="positions")(positions)
        for layer in range(self.layers):
            x = Block(self.heads, name=f"block_{layer}")(x)
        return nn.Dense(self.vocabulary, name="head")(nn.LayerNorm(name="norm")(x))


def text() -> tuple[list[str], np.ndarray]:
    """Python's documentation: its characters, and the text as numbers of characters."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(whole))
    number = {character: i for i, character in enumerate(characters)}
    return characters, np.array([number[character] for character in whole], np.int32)


def tensorboard(options: Any) -> Any:
    """A writer of TensorBoard's files, or None where its package is missing."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        if not options.quiet:
            print("No TensorBoard log: pip install tensorboardX.")
        return None
    return SummaryWriter(str(options.out / "tensorboard"), flush_secs=10)


def run(options: Any) -> float:
    """Trains, draws the picture, and returns the loss on text that was not trained on, in nats."""
    characters, numbers = text()
    split = int(0.9 * len(numbers))
    model = GPT(len(characters), options.layers, options.features, options.heads, options.context)
    wrapped, tx = (
        options.precision.wrap(model),
        options.precision.loss_scaled(optax.adamw(options.learning_rate)),
    )

    def windows(key: Any, part: np.ndarray) -> np.ndarray:
        starts = np.random.default_rng(key).integers(len(part) - options.context - 1, size=options.batch)
        return part[starts[:, None] + np.arange(options.context + 1)]

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = wrapped.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: jax.Array) -> tuple[Any, dict[str, Any]]:
        params, opt_state = state
        accumulated = jmpp.accumulate_gradients(loss_fn, options.micro_batches)
        loss, grads = accumulated(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **jmpp.metrics(opt_state)}

    params = jax.jit(wrapped.init)(jax.random.key(options.seed), windows(0, numbers)[:1, :-1])["params"]
    log = tensorboard(options)
    params, _ = train(
        options, (params, tx.init(params)),
        lambda state, number: step(state, windows([options.seed, number], numbers[:split])),
        name="gpt", log=log,
    )  # fmt: skip
    if log:
        log.close()
    plot(options, f"GPT, {options.micro_batches} micro-batches, {options.precision.policy.default}")
    unseen = [windows([options.seed, 10**6, i], numbers[split:]) for i in range(4)]
    return float(np.mean([jax.jit(loss_fn)(params, batch) for batch in unseen]))


def main(argv: list[str] | None = None) -> int:
    options = parse("Train a GPT with gradient accumulation and restarts.", DEFAULTS, argv)
    if options.batch % options.micro_batches:
        raise SystemExit(f"--batch {options.batch} is no multiple of --micro_batches {options.micro_batches}")
    loss = run(options)
    last = {name: values[-1] for name, values in history(options).items()}
    print(f"{loss:.3f} nats per character on unseen text; loss scale {last['loss_scale']:g}, "
          f"{last['skipped_steps']:g} steps skipped")  # fmt: skip
    return finish(judged(options, 0.9))


if __name__ == "__main__":
    sys.exit(main())
