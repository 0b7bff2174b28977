"""What gradient accumulation costs: against the same loop written by hand, and against the batch at once.

Models wrapped in float16, AdamW in `loss_scaled`; only how the gradients come about differs. By hand is a
`lax.scan` over runs of neighbouring rows with a float32 sum. Temporary memory over that of the batch at once
is what accumulation is for; its step time is what that costs. Bytes compare loops with loops only, as XLA
counts one iteration. On a CPU it computes convolutions in loops by a slower path, whoever wrote the loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jmp_policy as jmpp
from benchmarks import measure, steps
from benchmarks.measure import USUAL
from benchmarks.models import small
from benchmarks.table import Table
from benchmarks.times.overhead import compared

REPEATS = 7
MICROBATCHES = 8


def at_once(loss_fn: Any, opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Loss, new batch statistics and gradients of the whole batch."""
    (loss, stats), grads = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)(opt_state, params, batch)
    return loss, stats, grads


def by_hand(loss_fn: Any, opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
    """The same from micro-batches, as it stands in training scripts."""
    n, scale = MICROBATCHES, jmpp.optim.get_loss_scale_state(opt_state).loss_scale.loss_scale

    def scaled_loss(params: Any, micro: Any) -> Any:
        loss, stats = loss_fn(params, micro)
        return loss * scale, (loss, stats)

    def body(total: Any, micro: Any) -> Any:
        (_, beside), grads = jax.value_and_grad(scaled_loss, has_aux=True)(params, micro)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), beside

    runs = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    total, (losses, stats) = lax.scan(body, zeros, runs)
    return losses.mean(), _means(stats), jax.tree.map(lambda t: t / n, total)


def library(loss_fn: Any, opt_state: Any, params: Any, batch: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The same by the library; with `drop_microbatch` it tests every micro-batch."""
    accumulated = jmpp.accumulate_gradients(loss_fn, MICROBATCHES, has_aux=True, **options)
    found = accumulated(opt_state, params, batch)
    (loss, stats), grads = found[0] if options else found
    return loss, _means(stats), grads


def _means(stats: Any) -> Any:
    return jax.tree.map(lambda s: s.mean(0), stats)


VARIANTS = {
    "batch at once": at_once,
    "by hand": by_hand,
    "library": library,
    "drop_microbatch": functools.partial(library, on_nonfinite="drop_microbatch"),
}
COMPARISONS = (
    ("library", "by hand"),
    ("drop_microbatch", "by hand"),
    ("library", "batch at once"),
    ("by hand", "batch at once"),
)
BATCHES = {"MLP": small.vectors(2048), "CNN + BatchNorm": small.images(128)}


def rows(model: str) -> list[dict[str, Any]]:
    wrapped, batch = jmpp.wrap(small.TABLE[model][0](), "mixed_float16"), BATCHES[model]
    tx = jmpp.loss_scaled(steps.ADAMW, jmpp.DynamicLossScale(2.0**10))
    first = steps.init(wrapped, tx, batch)

    def begun(gradient: Callable[..., Any]) -> Any:
        def step(state: steps.State, batch: Any) -> tuple[steps.State, jax.Array]:
            def loss_fn(params: Any, batch: Any) -> Any:
                return steps.loss_and_stats(wrapped, params, state.stats, batch)

            loss, stats, grads = gradient(loss_fn, state.opt_state, state.params, batch)
            return steps.updated(state, tx, grads, stats), loss

        return step, first

    made = {name: functools.partial(begun, gradient) for name, gradient in VARIANTS.items()}
    found = measure.in_turn(made, batch, REPEATS, steps=3)
    rows = [compared(found, *pair, *USUAL) for pair in COMPARISONS]
    for row in rows:
        if row["comparison"].endswith("batch at once"):
            row.pop("bytes")
    return rows


ABOUT = {"repeats": REPEATS, "microbatches": MICROBATCHES}
TABLES = (Table("accumulation_cost", rows, by={"model": BATCHES}, about=ABOUT),)
