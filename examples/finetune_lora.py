"""Fine-tune a model of Hugging Face with LoRA: its code unchanged, its frozen weights in half precision.

Run `python examples/finetune_lora.py --precision bf16`: about a minute on two CPU cores. It needs
`pip install "transformers<5"` (the last version with Flax models) and no network: the weights are random,
where you would load your own with `from_pretrained`.

Only two thin matrices per kernel are trained. They and their moments are float32; the frozen weights are
stored in the compute dtype, since nothing is ever added to them.
"""

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import finish
from _train import history, judged, parse, plot, train
from flax.traverse_util import flatten_dict, unflatten_dict
from gpt import text

import jmp_policy as jmpp

DEFAULTS = {
    "precision": "fp16", "steps": 150, "seed": 0, "layers": 2, "features": 64, "heads": 4, "context": 48,
    "batch": 16, "rank": 8, "learning_rate": 1e-2, "out": "examples/out/finetune_lora",
}  # fmt: skip
KERNELS = ("c_attn", "c_proj", "c_fc")  # The layers of GPT-2 that get adapters, by name.


def adapters(params: Any, rank: int, key: jax.Array) -> dict[str, Any]:
    """Two float32 matrices for each kernel, whose product is zero to begin with."""
    kernels = {
        path: leaf for path, leaf in flatten_dict(params).items() if path[-2] in KERNELS and leaf.ndim == 2
    }
    keys = jax.random.split(key, len(kernels))
    return {
        "/".join(path): {
            "a": jax.random.normal(k, (kernel.shape[0], rank)) / rank**0.5,
            "b": jnp.zeros((rank, kernel.shape[1])),
        }
        for k, (path, kernel) in zip(keys, kernels.items(), strict=True)
    }


def adapted(params: Any, lora: dict[str, Any]) -> Any:
    """The parameters that the model computes with: each kernel plus the product of its two matrices."""
    flat = flatten_dict(params)
    for path, pair in lora.items():
        key = tuple(path.split("/"))
        flat[key] = flat[key] + (pair["a"] @ pair["b"]).astype(flat[key].dtype)
    return unflatten_dict(flat)


def run(options: Any) -> tuple[float, float]:
    """Trains and draws the picture; returns trained numbers over frozen ones, and the loss on unseen text."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    characters, numbers = text()
    split = int(0.9 * len(numbers))
    config = GPT2Config(
        vocab_size=len(characters), n_positions=options.context, n_embd=options.features,
        n_layer=options.layers, n_head=options.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.2,
    )  # fmt: skip
    published = FlaxGPT2LMHeadModel(config, seed=options.seed)
    model = options.precision.wrap(published.module)
    frozen = options.precision.policy.default.cast_to_compute(published.params)
    tx = options.precision.loss_scaled(optax.adam(options.learning_rate))
    positions = jnp.arange(options.context)[None]

    def windows(key: Any, part: np.ndarray) -> np.ndarray:
        starts = np.random.default_rng(key).integers(len(part) - options.context - 1, size=options.batch)
        return part[starts[:, None] + np.arange(options.context + 1)]

    def loss_fn(lora: Any, frozen: Any, batch: jax.Array) -> jax.Array:
        tokens = batch[:, :-1]
        params = {"params": adapted(frozen, lora)}
        logits = model.apply(
            params, tokens, jnp.ones_like(tokens), jnp.broadcast_to(positions, tokens.shape)
        ).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, frozen: Any, batch: jax.Array) -> tuple[Any, dict[str, Any]]:
        lora, opt_state = state
        loss, grads = jmpp.scaled_value_and_grad(loss_fn)(opt_state, lora, frozen, batch)
        updates, opt_state = tx.update(grads, opt_state, lora)
        return (optax.apply_updates(lora, updates), opt_state), {"loss": loss, **jmpp.metrics(opt_state)}

    lora = adapters(frozen, options.rank, jax.random.key(options.seed))
    sizes = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (lora, frozen)]
    lora, _ = train(
        options, (lora, tx.init(lora)),
        lambda state, number: step(state, frozen, windows([options.seed, number], numbers[:split])),
        name="LoRA",
    )  # fmt: skip
    plot(options, f"GPT-2 with LoRA of rank {options.rank}, {options.precision.policy.default}")
    unseen = [windows([options.seed, 10**6, i], numbers[split:]) for i in range(4)]
    return sizes[0] / sizes[1], float(np.mean([jax.jit(loss_fn)(lora, frozen, batch) for batch in unseen]))


def main(argv: list[str] | None = None) -> int:
    options = parse("Fine-tune a Flax model of Hugging Face with LoRA.", DEFAULTS, argv)
    try:
        share, loss = run(options)
    except ImportError as error:
        return finish(f"{error}. Flax models come with: pip install 'transformers<5'")
    last = {name: values[-1] for name, values in history(options).items()}
    print(f"{loss:.3f} nats per character on unseen text, with {share:.1%} as many trained numbers as frozen "
          f"ones; loss scale {last['loss_scale']:g}, {last['skipped_steps']:g} steps skipped")  # fmt: skip
    return finish(judged(options, 0.9))


if __name__ == "__main__":
    sys.exit(main())
