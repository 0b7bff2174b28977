"""What the cures for vanishing updates cost: an AdamW step on half parameters, gradients given, on the CPU.

Every ratio is over the same step on half parameters that rounds to nearest and loses small updates. The
forward and backward pass are left out: they are the same for all, and would hide the difference.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import _measure, _record

REPEATS = 21
LAYERS, WIDTH = 8, 512
DTYPES = (jnp.float16, jnp.bfloat16)


def adamw() -> optax.GradientTransformation:
    # Float32 moments, whatever the parameters are.
    return jmpp.loss_scaled(optax.adamw(1e-3), jmpp.NoOpLossScale())


#: Name -> the optimizer, and whether the parameters are half.
VARIANTS: dict[str, tuple[Callable[[], optax.GradientTransformation], bool]] = {
    "half parameters": (adamw, True),
    "float32 parameters": (adamw, False),
    "master_weights": (lambda: jmpp.master_weights(adamw()), True),
    "master_weights, stochastic": (lambda: jmpp.master_weights(adamw(), stochastic_rounding=True), True),
    "kahan_summation": (lambda: jmpp.kahan_summation(adamw()), True),
    "stochastic_rounding": (lambda: jmpp.stochastic_rounding(adamw()), True),
}
BASE = "half parameters"


def make(name: str, dtype: Any) -> tuple[Any, Any, Any]:
    """A step `(state, grads) -> (state, None)`, its state and the gradients."""
    make_tx, half = VARIANTS[name]
    tx, dtype = make_tx(), dtype if half else jnp.float32
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)).astype(dtype) for i, k in enumerate(keys)}

    def step(state: Any, grads: Any) -> tuple[Any, None]:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return step, (params, tx.init(params)), jax.tree.map(jnp.sin, params)


def rows() -> list[dict[str, Any]]:
    """One row per dtype and variant."""
    found = []
    for dtype in DTYPES:
        made = {name: make(name, dtype) for name in VARIANTS}
        counts, compiled = {}, {}
        for name, (step, state, grads) in made.items():
            traced = jax.jit(step).trace(state, grads)
            compiled[name] = traced.lower().compile()
            counts[name] = _measure.counts(traced, compiled[name])
        timed = {n: functools.partial(_measure.step_time, compiled[n], *made[n][1:]) for n in made}
        times = _measure.interleaved(timed, REPEATS)
        for name, (_, (params, opt_state), _) in made.items():
            numbers = LAYERS * WIDTH * WIDTH
            bytes_kept = sum(x.nbytes for x in jax.tree.leaves((params, opt_state)))
            found.append(
                {
                    "dtype": jnp.dtype(dtype).name,
                    "variant": name,
                    "kept_bytes_per_parameter": round(bytes_kept / numbers, 2),
                    "bytes": _measure.compare("bytes", [counts[name]["bytes"]], [counts[BASE]["bytes"]]),
                    "temp_bytes_per_parameter": round(counts[name]["temp"] / numbers, 2),
                    "step": _measure.ratio(times[name], times[BASE]),
                }
            )
    return found


def main() -> None:
    _record.save("rounding_cost", rows(), layers=LAYERS, width=WIDTH, repeats=REPEATS)


if __name__ == "__main__":
    main()
