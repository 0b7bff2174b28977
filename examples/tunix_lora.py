"""Fine-tune a Qwen3 of tunix with LoRA, by tunix's own `PeftTrainer`.

Run `python examples/tunix_lora.py`: it takes less than a minute on two CPU cores. It needs
`pip install google-tunix` and no network: the model is small and its frozen weights are random, where you
would load a checkpoint. The lines that make the fine-tuning mixed-precision are marked (1) to (3).

`autocast` reaches the adapters, which qwix keeps outside of what `wrap` sees.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _run import compare, finish
from flax import nnx
from gpt import text

import jmp_policy as jmpp

CONTEXT, BATCH_SIZE, RANK, LEARNING_RATE = 32, 16, 8, 1e-2


@functools.cache
def make_model(vocabulary: int, seed: int) -> nnx.Module:
    import qwix
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=1, vocab_size=vocabulary, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16,
        num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6,
    )  # fmt: skip
    adapters = qwix.LoraProvider(module_path=".*(_proj|lm_head)", rank=RANK, alpha=2.0 * RANK)

    @nnx.jit
    def create() -> nnx.Module:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))
        return qwix.apply_lora_to_model(model, adapters, **model.get_model_input(), rngs=nnx.Rngs(seed))

    return create()


def batches(numbers: np.ndarray, count: int, seed: int) -> Iterator[Any]:
    from tunix.sft.peft_trainer import TrainingInput

    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(len(numbers) - CONTEXT, size=BATCH_SIZE)
        tokens = numbers[starts[:, None] + np.arange(CONTEXT)]
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def model_input(batch: Any) -> dict[str, jax.Array]:
    tokens = jnp.asarray(batch.input_tokens)
    return {
        "input_tokens": tokens,
        "positions": jnp.broadcast_to(jnp.arange(CONTEXT), tokens.shape),
        "attention_mask": jnp.tril(jnp.ones((len(tokens), CONTEXT, CONTEXT), bool)),
    }


def cross_entropy(model: Any, input_tokens: Any, positions: Any, attention_mask: Any) -> jax.Array:
    logits, _ = model(input_tokens, positions, None, attention_mask)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_tokens[:, 1:]).mean()


def make_trainer(model: nnx.Module, tx: optax.GradientTransformation, steps: int) -> Any:
    from tunix.sft import peft_trainer

    class Trainer(peft_trainer.PeftTrainer):
        def _train_step(self, model: Any, optimizer: Any, inputs: Any) -> Any:
            # (3) was: nnx.value_and_grad, without `optimizer`
            grad_fn = jmpp.nnx.scaled_value_and_grad(self.loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))
            loss, grads = grad_fn(optimizer, model, **self.gen_model_input_fn(inputs))
            optimizer.update(model, grads)
            return loss, None, optax.global_norm(grads)

    return Trainer(model, tx, peft_trainer.TrainingConfig(eval_every_n_steps=steps, max_steps=steps))


def train(word: str, steps: int, seed: int) -> float:
    """Returns the likelihood of unseen text, in nats per character."""
    precision = jmpp.from_config(word)
    characters, numbers = text()
    split = int(0.9 * len(numbers))
    model = nnx.clone(make_model(len(characters), seed))
    loss_fn = jmpp.nnx.autocast(cross_entropy, precision.policy)  # (1) was: cross_entropy
    tx = precision.loss_scaled(optax.adam(LEARNING_RATE))  # (2) was: optax.adam(...)
    trainer = make_trainer(model, tx, steps).with_loss_fn(loss_fn).with_gen_model_input_fn(model_input)
    trainer.train(batches(numbers[:split], steps, seed))
    unseen = [model_input(batch) for batch in batches(numbers[split:], 8, seed + 1)]
    likelihood = nnx.jit(loss_fn)
    return -float(np.mean([likelihood(model, **inputs) for inputs in unseen]))


def main(argv: list[str] | None = None) -> int:
    try:
        return compare(train, "Likelihood of text under a Qwen3 fine-tuned by tunix.", 100, 0.05, argv)
    except ImportError as error:
        return finish(f"{error}. It comes with: pip install google-tunix")


if __name__ == "__main__":
    sys.exit(main())
