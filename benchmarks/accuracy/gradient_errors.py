"""Relative errors of one gradient in bfloat16, by hand, wrapped and under autocast: `gradient_errors`.

Of the norm over all parameters, against float32, of the models of the zoo in their tiny size on a CPU.
"""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.models import MODELS, TODAY
from benchmarks.table import Table

ALL = {**TODAY, **MODELS}
SEEDS = 9


def rows(name: str) -> list[dict[str, Any]]:
    """The median over a few batches and initial values: now and then a ReLU turns."""
    model = ALL[name]("tiny")
    ways = {
        "by hand": (steps.ByHand(model.module, jnp.bfloat16), lambda loss_fn: loss_fn),
        "wrapped": (jmpp.wrap(model.module, "mixed_bfloat16"), lambda loss_fn: loss_fn),
        "autocast": (model.module, lambda loss_fn: jmpp.autocast(loss_fn, "bfloat16")),
    }

    def gradient(module: Any, around: Any) -> Any:
        def of(params: Any, stats: Any, batch: Any) -> Any:
            loss_fn = around(lambda p: steps.loss_and_stats(module, p, stats, batch, model.loss)[0])
            return jax.grad(loss_fn)(params)

        return jax.jit(of)

    @jax.jit
    def begun(key: Any) -> Any:
        batch = model.draw(key)
        return batch, steps.init(model.module, optax.sgd(0.0), batch, key=key)

    exact = gradient(model.module, lambda loss_fn: loss_fn)
    computed = {way: gradient(*parts) for way, parts in ways.items()}
    errors: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(SEEDS):
        batch, state = begun(jax.random.key(seed))
        wanted = exact(state.params, state.stats, batch)
        for way, function in computed.items():
            found = optax.tree.sub(function(state.params, state.stats, batch), wanted)
            errors[way].append(float(optax.tree.norm(found) / optax.tree.norm(wanted)))
    return [{way: round(statistics.median(some), 5) for way, some in errors.items()}]


TABLES = (Table("gradient_errors", rows, by={"model": ALL}, about={"seeds": SEEDS}),)
