"""Thousands of steps: does anything drift, retrace, grow or wrap?

A small float16 model, in chunks of `lax.scan`, then single jitted calls. A
gradient overflows above a scale of 2**16, by a term of the loss that is there for it: with the default
`growth_interval` the scale tries 2**17 after each 2000 clean steps, overflows once, and falls back. One skip
in 2001 steps, a share of 0.05 %, is what looking for a larger scale costs at most, once the scale has found
its place.
"""

import functools
import resource
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jmp_policy as jmpp

#: One step in so many may be skipped.
GROWTH_INTERVAL = 2000
LARGEST_COUNT = 2**31 - 1


class Run:
    """A model, its jitted steps, and how often they were traced."""

    def __init__(self, growth_interval: int = GROWTH_INTERVAL):
        self.traces = {"scan": 0, "step": 0}
        self.model = jmpp.wrap(nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(1)]), "mixed_float16")
        scale = jmpp.DynamicLossScale(growth_interval=growth_interval)
        self.tx = jmpp.loss_scaled(optax.adamw(1e-3), scale)
        self.step = jax.jit(self._step)
        self.chunk = functools.partial(jax.jit, static_argnums=1)(self._chunk)

    def start(self) -> Any:
        """Parameters and one more that overflows at large scales, optimizer state, PRNG key."""
        params = self.model.init(jax.random.key(0), jnp.ones((8, 4)))["params"]
        params = {"net": params, "edge": jnp.zeros(())}
        return params, self.tx.init(params), jax.random.key(1)

    def _step(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        self.traces["step"] += 1
        return self._update(state)

    def _chunk(self, state: Any, length: int) -> tuple[Any, dict[str, jax.Array]]:
        self.traces["scan"] += 1
        return jax.lax.scan(lambda state, _: self._update(state), state, length=length)

    def _update(self, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        params, opt_state, key = state
        key, now = jax.random.split(key)
        x = jax.random.normal(now, (8, 4))

        def loss_fn(params: Any) -> jax.Array:
            out = self.model.apply({"params": params["net"]}, x)
            # Adds 0 with the derivative 0.75: in float16, 0.75 * 2**16 is finite and 0.75 * 2**17 is not.
            edge = params["edge"].astype(jnp.float16).astype(jnp.float32) * 0.75
            edge = edge - jax.lax.stop_gradient(edge)
            # A sixteenth, so that the model's own gradients overflow at larger scales only.
            return jnp.mean((out[:, 0] - jnp.sin(x.sum(1))) ** 2) / 16 + edge

        loss, grads = jmpp.scaled_value_and_grad(loss_fn)(opt_state, params)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        values = {"loss": loss, "skipped": ~jmpp.grads_finite(opt_state)}
        values["scale"] = jmpp.metrics(opt_state)["loss_scale"]
        return (optax.apply_updates(params, updates), opt_state, key), values


def kinds(tree: Any) -> list[Any]:
    """Shape, dtype and weak type of every leaf."""
    return [(x.shape, str(x.dtype), x.aval.weak_type) for x in jax.tree.leaves(tree)]


def megabytes() -> float:
    """The largest amount of memory that the process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_chunks(run: Run, chunks: int, length: int) -> dict[str, Any]:
    """`chunks` calls of `length` steps each; the first tenth is warm-up."""
    found, seen = followed(run.chunk, run.start(), chunks, length)
    warm = max(chunks // 10, 1)
    skipped, losses = seen["skipped"], seen["loss"]
    return {
        "run": f"{chunks} calls of {length} steps in lax.scan",
        "traces": run.traces["scan"],
        **found,
        "skipped, steady": sum(skipped[warm:]),
        "share, steady": sum(skipped[warm:]) / ((chunks - warm) * length),
        "largest scale": max(seen["scale"]),
        "loss, first chunk": losses[0],
        "loss, last chunk": losses[-1],
    }


def one_by_one(run: Run, steps: int) -> dict[str, Any]:
    """Single calls of the jitted step."""
    found, _ = followed(run.step, run.start(), steps)
    return {"run": f"{steps} jitted calls", "traces": run.traces["step"], **found}


def followed(
    function: Any, state: Any, calls: int, *args: Any
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """What changes over so many calls after the first tenth, and numbers of each call."""
    before, warm = kinds(state), max(calls // 10, 1)
    seen: dict[str, list[Any]] = {"skipped": [], "loss": [], "scale": []}
    arrays, memory = [], []
    for _ in range(calls):
        state, values = function(state, *args)
        seen["skipped"].append(int(values["skipped"].sum()))
        seen["loss"].append(float(values["loss"].mean()))
        seen["scale"].append(float(values["scale"].max()))
        del values
        arrays.append(len(jax.live_arrays()))
        memory.append(megabytes())
    return {
        "steps": int(jmpp.metrics(state[1])["steps"]),
        "same dtypes": kinds(state) == before,
        "live arrays more": arrays[-1] - arrays[warm],
        "MB more": round(memory[-1] - memory[warm], 1),
        "skipped": sum(seen["skipped"]),
    }, seen


def counters(run: Run, steps: int = 6) -> dict[str, Any]:
    """Steps with every counter close to the largest int32, the second half skipped."""
    params, opt_state, key = run.start()
    near = jnp.int32(LARGEST_COUNT - 2)
    opt_state = opt_state._replace(skipped=near, consecutive_skips=near, steps=near)
    inner = jax.tree.map(lambda x: near if x.dtype == jnp.int32 else x, opt_state.inner_state)
    state, seen = (params, opt_state._replace(inner_state=inner), key), []
    for i in range(steps):
        if i == steps // 2:
            params = state[0] | {"edge": jnp.float32(jnp.nan)}
            again = state[1]._replace(consecutive_skips=near)
            state = (params, again, key)
        state, _ = run.step(state)
        opt = state[1]
        counts = [x for x in jax.tree.leaves(opt.inner_state) if x.dtype == jnp.int32]
        seen.append([int(x) for x in (opt.steps, opt.skipped, opt.consecutive_skips, *counts)])
    names = ("steps", "skipped", "consecutive skips", "adam's count")
    last = dict(zip(names, seen[-1], strict=False))
    return {"run": f"counters from 2**31 - 3, {steps} steps", "last": last, "smallest": min(map(min, seen))}
