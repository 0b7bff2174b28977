"""Does training come out as in float32 under the policy that `recommend` gives, where plain float16 fails?

Two tasks in which a layer cannot compute in float16, `SEEDS` seeds
each, in float32, under `mixed_float16` and as recommended. The policy is chosen once, before training, on one
batch. The score is that of data that was not trained on.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_policy as jmpp
from benchmarks import steps
from benchmarks.table import Table

SEEDS = 8
STEPS = 400
BATCH = 256


class Fourier(nn.Module):
    """Sine and cosine of eight times, `(batch, 8)`, each at a frequency of its own up to 2e4."""

    @nn.compact
    def __call__(self, x):
        angles = x * self.param("frequencies", lambda key: jnp.geomspace(1e3, 2e4, 8))
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


class Signal(nn.Module):
    """The value of a signal that depends on eight times per example, beside other inputs."""

    @nn.compact
    def __call__(self, x, times):
        y = nn.Dense(32, name="embed")(Fourier(name="fourier")(times))
        y = nn.gelu(y + nn.Dense(32, name="inputs")(x))
        return nn.Dense(1, name="out")(nn.gelu(nn.Dense(32, name="hidden")(y)))[:, 0]


class LogOfSoftmax(nn.Module):
    """Logarithms of probabilities: those that float16 makes zero are infinite."""

    @nn.compact
    def __call__(self, x):
        return jnp.log(nn.softmax(x))


class Classifier(nn.Module):
    """Log-probabilities of 8 classes."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, name="hidden")(x))
        return LogOfSoftmax(name="log")(nn.Dense(8, kernel_init=nn.initializers.normal(2.0), name="head")(x))


def signal(key: Any) -> Any:
    """Inputs, times, and a sum of waves and inputs."""
    a, b = jax.random.split(key)
    x, time = jax.random.normal(a, (BATCH, 4)), jax.random.uniform(b, (BATCH, 8))
    waves = jnp.sin(time * jnp.geomspace(1e3, 2e4, 8))[:, ::2].sum(-1)
    return (x, time), waves + x[:, 0] * x[:, 1]


def classes(key: Any) -> Any:
    """Normally distributed inputs, and which of eight directions each is nearest to."""
    directions = jax.random.normal(jax.random.key(7), (8, 16))
    x = jax.random.normal(key, (BATCH, 16))
    return (x,), jnp.argmax(x @ directions.T, -1)


def mean_square(out: Any, targets: Any) -> Any:
    return jnp.mean(jnp.square(out.astype(jnp.float32) - targets))


def negative_log(out: Any, labels: Any) -> Any:
    return -jnp.mean(jnp.take_along_axis(out.astype(jnp.float32), labels[:, None], 1))


def wrong(out: Any, labels: Any) -> Any:
    """Share of examples in the wrong class; one whose outputs are NaN is wrong."""
    finite = jnp.all(jnp.isfinite(jnp.where(jnp.isneginf(out), 0, out)), -1)
    return jnp.mean((jnp.argmax(out, -1) != labels) | ~finite)


#: Module, batches, loss, what is scored.
TASKS = {
    "signal with frequencies of 2e4": (Signal(), signal, mean_square, mean_square),
    "logarithm of a softmax": (Classifier(), classes, negative_log, wrong),
}


def trained(task: str, policy: Any) -> Any:
    """The scores of all seeds, and how many steps were skipped."""
    module, draw, loss, score = TASKS[task]
    model = jmpp.wrap(module, policy)
    dynamic = jmpp.DynamicLossScale(2.0**15, growth_interval=100)
    scale = jmpp.NoOpLossScale() if policy == "float32" else dynamic
    tx = jmpp.loss_scaled(optax.adam(3e-3), scale)

    def of_seed(seed: Any) -> Any:
        key = jax.random.key(seed)
        params = module.init(key, *draw(key)[0])["params"]

        def loss_fn(params: Any, i: Any) -> Any:
            inputs, targets = draw(jax.random.fold_in(key, i))
            return loss(model.apply({"params": params}, *inputs), targets)

        params, state = steps.trained(loss_fn, tx, params, jnp.arange(STEPS))
        held_out = jax.vmap(lambda i: draw(jax.random.fold_in(key, STEPS + i)))(jnp.arange(8))
        scores = jax.lax.map(lambda b: score(model.apply({"params": params}, *b[0]), b[1]), held_out)
        return scores.mean(), state.skipped

    return jax.jit(lambda seeds: jax.lax.map(of_seed, seeds))(jnp.arange(SEEDS))


def rows(task: str) -> list[dict[str, Any]]:
    module, draw, loss, _ = TASKS[task]
    inputs, targets = draw(jax.random.key(0))
    params = module.init(jax.random.key(0), *inputs)["params"]
    advice = jmpp.recommend(
        lambda p, inputs, targets: loss(module.apply({"params": p}, *inputs), targets),
        params, inputs, targets, dtype="float16",
    )  # fmt: skip
    rules = {str(pattern): str(p) for pattern, p in advice.policy.overrides}
    policies = {"float32": "float32", "float16": "mixed_float16", "recommended": advice.policy}
    found = []
    for name, policy in policies.items():
        scores, skipped = jax.device_get(trained(task, policy))
        found.append({
            "policy": name,
            "rules": rules if name == "recommended" else "",
            "score": float(f"{np.mean(scores):.4g}"),
            "deviation over seeds": float(f"{np.std(scores, ddof=1):.2g}"),
            "skipped": round(float(np.mean(skipped)), 1),
        })  # fmt: skip
    return found


ABOUT = {"seeds": SEEDS, "steps": STEPS, "batch": BATCH}
TABLES = (Table("recommended_policy", rows, by={"task": TASKS}, about=ABOUT),)
