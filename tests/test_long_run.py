"""Thousands of steps: does anything drift, retrace, grow or wrap?

A small float16 model, in chunks of `lax.scan`, then single jitted calls. A gradient overflows above a scale
of 2**16, by a term of the loss that is there for it: after each `growth_interval` clean steps the scale tries
2**17, overflows once, and falls back.
"""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_policy as jmpp

pytestmark = pytest.mark.once

LARGEST_COUNT = 2**31 - 1


class Run:
    """A model, its jitted steps, and how often they were traced."""

    def __init__(self, growth_interval: int = 2000):
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


def followed(function, state, calls, *args):
    """What so many calls of a step, or of a chunk of steps, come to; the first tenth is warm-up."""
    before, warm = kinds(state), max(calls // 10, 1)
    skipped, losses, scales, arrays = 0, [], [], []
    for _ in range(calls):
        state, values = function(state, *args)
        skipped += int(values["skipped"].sum())
        losses.append(float(values["loss"].mean()))
        scales.append(float(values["scale"].max()))
        del values
        arrays.append(len(jax.live_arrays()))
    assert kinds(state) == before
    assert arrays[-1] == arrays[warm]
    assert int(jmpp.metrics(state[1])["steps"]) == calls * math.prod(args)
    return skipped, losses, scales


def test_three_thousand_steps():
    run = Run(growth_interval=100)
    skipped, losses, scales = followed(run.chunk, run.start(), 27, 100)
    # It starts at the largest scale that fits, and tries the next one after each 100 clean steps.
    assert skipped == 2700 // 101
    assert max(scales) == 2.0**17
    assert losses[-1] < 0.5 * losses[0]
    assert followed(run.step, run.start(), 300)[0] == 300 // 101
    assert run.traces == {"scan": 1, "step": 1}


def test_counters_saturate():
    """Steps with every counter close to the largest int32, the second half skipped."""
    run = Run()
    params, opt_state, key = run.start()
    near = jnp.int32(LARGEST_COUNT - 2)
    opt_state = opt_state._replace(skipped=near, consecutive_skips=near, steps=near)
    inner = jax.tree.map(lambda x: near if x.dtype == jnp.int32 else x, opt_state.inner_state)
    state, seen = (params, opt_state._replace(inner_state=inner), key), []
    for i in range(6):
        if i == 3:
            params = state[0] | {"edge": jnp.float32(jnp.nan)}
            again = state[1]._replace(consecutive_skips=near)
            state = (params, again, key)
        state, _ = run.step(state)
        opt = state[1]
        counts = [x for x in jax.tree.leaves(opt.inner_state) if x.dtype == jnp.int32]
        seen.append([int(x) for x in (opt.steps, opt.skipped, opt.consecutive_skips, *counts)])
    assert min(map(min, seen)) >= 0
    assert set(seen[-1]) == {2**31 - 1}
