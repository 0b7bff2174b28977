"""Training with the optimizer's moments in bfloat16 against float32: losses over seeds, state, H100 memory.

A small network on the digits that scikit-learn has, AdamW with a cosine schedule, five seeds; and the
BERT-width step of `loss_scaling_cost` compiled for an H100.
"""

import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.counts import encoder
from benchmarks.gpu_target import compile_for_gpu, table_rows
from benchmarks.table import Table

SEEDS = range(5)
STEPS, WIDTH, BATCH = 1500, 128, 64
VARIANTS = {
    "float32": lambda tx: tx,
    "bfloat16": jmpp.half_moments,
    "bfloat16, to nearest": functools.partial(jmpp.half_moments, stochastic_rounding=False),
    "bfloat16 mu, float32 nu": functools.partial(jmpp.half_moments, nu="float32"),
    "fp8_block": functools.partial(jmpp.half_moments, mu="fp8_block", nu="fp8_block"),
    "fp8_block, to nearest": functools.partial(
        jmpp.half_moments, mu="fp8_block", nu="fp8_block", stochastic_rounding=False
    ),
}


def trained(wrap: Any, seed: int) -> tuple[float, float]:
    """Loss on the training and accuracy on the test digits after training."""
    digits = load_digits()
    x, y = jnp.float32(digits.data / 16), jnp.int32(digits.target)
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
    sizes = [(64, WIDTH), (WIDTH, WIDTH), (WIDTH, 10)]
    keys = jax.random.split(jax.random.key(seed), 4)
    params = [jax.random.normal(k, s) * s[0] ** -0.5 for k, s in zip(keys[:3], sizes, strict=True)]
    tx = wrap(optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS)))

    def logits(params: Any, x: Any) -> Any:
        x = jax.nn.gelu(x @ params[0])
        return jax.nn.gelu(x @ params[1]) @ params[2]

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()

    def step(carry: Any, key: Any) -> tuple[Any, None]:
        params, state = carry
        at = jax.random.randint(key, (BATCH,), 0, 1400)
        updates, state = tx.update(jax.grad(loss)(params, train_x[at], train_y[at]), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params: Any) -> Any:
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), jax.random.split(keys[3], STEPS))
        return loss(params, train_x, train_y), (logits(params, test_x).argmax(-1) == test_y).mean()

    found, accuracy = run(params)
    return float(found), float(accuracy)


def trajectories() -> list[dict[str, Any]]:
    """One row per variant: means over the seeds, and the mean difference from float32 with its deviation."""
    results = {name: [trained(wrap, seed) for seed in SEEDS] for name, wrap in VARIANTS.items()}
    rows = []
    for name, found in results.items():
        gaps = [a[0] - b[0] for a, b in zip(found, results["float32"], strict=True)]
        rows.append({
            "variant": name,
            "loss": round(statistics.mean(loss for loss, _ in found), 6),
            "loss_minus_float32": round(statistics.mean(gaps), 6),
            "deviation": round(statistics.stdev(gaps), 6),
            "test_accuracy": round(statistics.mean(accuracy for _, accuracy in found), 4),
        })  # fmt: skip
    return rows


def compiled() -> list[dict[str, Any]]:
    """The step of the BERT-width encoder on an H100, and the bytes of the optimizer's state per parameter."""
    made = {
        name: steps.types(
            steps.plain(encoder.wrapped())._replace(tx=VARIANTS[name](steps.ADAMW)), encoder.TOKENS
        )
        for name in ("float32", "bfloat16", "bfloat16, to nearest", "fp8_block")
    }
    reports = {name: compile_for_gpu(*parts) for name, parts in made.items()}
    rows = table_rows(reports, {name: "float32" for name in reports if name != "float32"})
    for row, (_, (state, _)) in zip(rows, made.values(), strict=True):
        count = sum(x.size for x in jax.tree.leaves(state.params))
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))
        row["state_bytes_per_parameter"] = round(size / count, 3)
    return rows


PARTS = {"training": trajectories, "H100, compiled only": compiled}
ABOUT = {"seeds": list(SEEDS), "steps": STEPS, "optimizer": "AdamW"}
TABLES = (Table("half_moments", lambda part: PARTS[part](), by={"part": PARTS}, about=ABOUT),)
