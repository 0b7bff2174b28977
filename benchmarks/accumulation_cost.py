"""What gradient accumulation costs: against the same loop written by hand, and against the batch at once.

Models wrapped in float16, AdamW in `loss_scaled`; only how the gradients come about differs. By hand is a
`lax.scan` over runs of neighbouring rows with a float32 sum. Temporary memory over that of the batch at once
is what accumulation is for; its step time is what that costs. Bytes compare loops with loops only, as XLA
counts one iteration. On a CPU it computes convolutions in loops by a slower path, whoever wrote the loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import jmp_policy as jmpp
from benchmarks import _measure, _models, _record, _steps

REPEATS = 7
MICROBATCHES = 8
#: Numerator and denominator of each row.
COMPARISONS = {
    "library / by hand": ("library", "by hand"),
    "drop_microbatch / by hand": ("drop_microbatch", "by hand"),
    "library / batch at once": ("library", "batch at once"),
    "by hand / batch at once": ("by hand", "batch at once"),
}

Gradient = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def at_once(loss_fn: Any) -> Gradient:
    """Loss, new batch statistics and scaled gradients of the whole batch."""

    def gradient(opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        (loss, stats), grads = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)(opt_state, params, batch)
        return loss, stats, grads

    return gradient


def by_hand(loss_fn: Any) -> Gradient:
    """The same from micro-batches, as it stands in training scripts."""
    n = MICROBATCHES

    def gradient(opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        scale = jmpp.get_loss_scale_state(opt_state).loss_scale.loss_scale

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

    return gradient


def library(loss_fn: Any) -> Gradient:
    """The same by the library."""

    def gradient(opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        accumulated = jmpp.accumulate_gradients(loss_fn, MICROBATCHES, has_aux=True)
        (loss, stats), grads = accumulated(opt_state, params, batch)
        return loss, _means(stats), grads

    return gradient


def drop_microbatch(loss_fn: Any) -> Gradient:
    """The same with a test of every micro-batch."""

    def gradient(opt_state: Any, params: Any, batch: Any) -> tuple[Any, Any, Any]:
        accumulated = jmpp.accumulate_gradients(
            loss_fn, MICROBATCHES, has_aux=True, on_nonfinite="drop_microbatch"
        )
        ((loss, stats), grads), _ = accumulated(opt_state, params, batch)
        return loss, _means(stats), grads

    return gradient


def _means(stats: Any) -> Any:
    return jax.tree.map(lambda s: s.mean(0), stats)


VARIANTS = {
    "batch at once": at_once,
    "by hand": by_hand,
    "library": library,
    "drop_microbatch": drop_microbatch,
}


def step_of(model: Any, tx: Any, make_gradient: Callable[[Any], Gradient]) -> Any:
    """A training step `(state, batch) -> (state, loss)`."""

    def step(state: _steps.State, batch: Any) -> tuple[_steps.State, jax.Array]:
        def loss_fn(params: Any, batch: Any) -> Any:
            return _steps.loss_and_stats(model, params, state.stats, batch)

        loss, stats, grads = make_gradient(loss_fn)(state.opt_state, state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        stats = jmpp.select_tree(jmpp.grads_finite(opt_state), stats, state.stats)
        return _steps.State(optax.apply_updates(state.params, updates), stats, opt_state), loss

    return step


def measure(cls: Any, batch: Any) -> dict[str, dict[str, list[float]]]:
    """Times and counts of every variant: quantity -> variant -> repeats."""
    tx = jmpp.loss_scaled(optax.adamw(1e-3), jmpp.DynamicLossScale(2.0**10))
    model = jmpp.wrap(cls(), "mixed_float16")
    state = _steps.init(model, tx, batch)
    steps = {name: step_of(model, tx, make) for name, make in VARIANTS.items()}
    found: dict[str, dict[str, list[float]]] = {"trace_lower": {name: [] for name in steps}}
    compiled = {}
    for repeat in range(REPEATS + 1):
        for name, step in steps.items():
            times, traced, lowered = _measure.trace_times(step, (state, batch), repeat)
            if repeat == 0:  # The first time around, Python itself is cold.
                _, compiled[name] = _measure.compile_time(lowered)
                for quantity, value in _measure.counts(traced, compiled[name]).items():
                    found.setdefault(quantity, {})[name] = [value]
            else:
                found["trace_lower"][name].append(times["trace_lower"])

    def run(name: str) -> Callable[[], float]:
        return lambda: _measure.step_time(compiled[name], state, batch, steps=3)

    found["step"] = _measure.interleaved({name: run(name) for name in steps}, REPEATS)
    return found


def rows() -> list[dict[str, Any]]:
    """One row per model and comparison."""
    found = []
    batches = {"MLP": _models.vectors(2048), "CNN + BatchNorm": _models.images(128)}
    for model, batch in batches.items():
        measured = measure(_models.TABLE[model][0], batch)
        for comparison, (over, under) in COMPARISONS.items():
            row: dict[str, Any] = {"model": model, "comparison": comparison}
            for quantity, by_variant in measured.items():
                if quantity != "bytes" or under != "batch at once":
                    row[quantity] = _measure.compare(quantity, by_variant[over], by_variant[under])
            found.append(row)
    return found


def main() -> None:
    _record.save(
        "accumulation_cost", rows(), repeats=REPEATS, microbatches=MICROBATCHES, backend=jax.default_backend()
    )


if __name__ == "__main__":
    main()
