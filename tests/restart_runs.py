"""A training run that may be killed at any time, and the supervisor that kills it.

`python tests/restart_runs.py DIRECTORY STEPS` is the run.
"""

import functools
import hashlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jmp_policy as jmpp

SCALES = {
    "dynamic": jmpp.DynamicLossScale(2.0**10, growth_interval=2, hysteresis=2),
    "static": jmpp.StaticLossScale(2.0**10),
    "noop": jmpp.NoOpLossScale(),
    "statistic": jmpp.StatisticLossScale(),
    "pid": jmpp.PIDLossScale(),
}


def batch_of(step):
    """The batch of a step; every fourth one is infinite, so that there is something to skip."""
    x = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
    return np.full_like(x, np.inf) if step % 4 == 1 else x


def tx_of(scale):
    return jmpp.loss_scaled(optax.adamw(optax.linear_schedule(0.1, 0.0, 100)), SCALES[scale])


def init(scale="dynamic"):
    """The fresh state of a run."""
    rng = np.random.default_rng(0)
    params = {
        name: {"kernel": jnp.array(rng.normal(0, 0.3, shape), jnp.float32), "bias": jnp.zeros(shape[1])}
        for name, shape in {"body": (16, 16), "head": (16, 8)}.items()
    }
    stats = {"mean": jnp.zeros(16), "count": jnp.int32(0)}
    state = {"params": params, "opt_state": tx_of(scale).init(params), "batch_stats": stats}
    return {**state, "step": jnp.int32(0)}


@functools.cache
def step_of(scale="dynamic"):
    """The step of a run in float16: it counts, skips, and moves batch statistics."""

    @jax.jit
    def step(state, x):
        params, opt_state, old = state["params"], state["opt_state"], state["batch_stats"]

        def loss_fn(params):
            params = jmpp.get_policy("mixed_float16").cast_to_compute(params)
            x16 = x.astype(jnp.float16) @ params["body"]["kernel"] + params["body"]["bias"]
            mean = x16.astype(jnp.float32).mean(0)
            x16 = jnp.tanh(x16 - mean.astype(jnp.float16)) @ params["head"]["kernel"] + params["head"]["bias"]
            stats = {"mean": 0.9 * old["mean"] + 0.1 * mean, "count": old["count"] + 1}
            return jnp.mean((x16.astype(jnp.float32) - 1.0) ** 2), stats

        (_, stats), grads = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)(opt_state, params)
        updates, opt_state = tx_of(scale).update(grads, opt_state, params)
        return {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
            "batch_stats": jmpp.select_tree(jmpp.grads_finite(opt_state), stats, old),
            "step": state["step"] + 1,
        }

    return step


def run(state, count, scale="dynamic"):
    """The state after so many more steps."""
    for _ in range(count):
        state = step_of(scale)(state, batch_of(int(state["step"])))
    return state


def fingerprint(state):
    """Paths, types and bits of all leaves, in short."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def train(directory, steps):
    """Trains to the end from where the last complete checkpoint is, saving every step in the background."""
    template = init()
    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
        state, latest = template, manager.latest_step()
        if latest is not None:
            state = jmpp.restore_state(template, manager.restore(latest, args=ocp.args.StandardRestore()))
        same = fingerprint(state) == fingerprint(run(init(), int(state["step"])))
        print("start", int(state["step"]), "same" if same else "different", flush=True)
        while int(state["step"]) < steps:
            state = run(state, 1)
            print("saving", flush=True)
            manager.save(int(state["step"]), args=ocp.args.StandardSave(state))
            print("training", flush=True)
    print(fingerprint(state), fingerprint(run(init(), steps)), flush=True)


def start(directory, steps):
    """The run as a process of its own."""
    command = [sys.executable, __file__, str(directory), str(steps)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def finish(process):
    """The fingerprints of a run that is left alone to its end, and of one that was never disturbed."""
    lines = process.communicate()[0].splitlines()
    assert process.returncode == 0, lines
    return lines[-1].split()


def kill(process: Any, saves: int, delay: float) -> int:
    """Ends a run with SIGKILL `delay` seconds after its `saves`-th save began; where had it started?"""
    _, step, same = process.stdout.readline().split()
    assert same == "same", f"the state restored at step {step} is not that of a run without a kill"
    for _ in range(saves):
        while (line := process.stdout.readline()) and line != "saving\n":
            pass
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return int(step)


def survive(directory: pathlib.Path, steps: int, kills: int, seed: int = 0) -> tuple[list[int], str, str]:
    """The steps that a run started from, killed so often, and what `finish` says of its end.

    Every other kill comes as a save begins, the others up to 50 ms later.
    """
    chance = random.Random(seed)
    started = []
    for number in range(kills):
        delay = chance.uniform(0, 0.05) if number % 2 else 0.0
        started.append(kill(start(directory, steps), chance.randint(3, 5), delay))
    survived, undisturbed = finish(start(directory, steps))
    return started, survived, undisturbed


if __name__ == "__main__":
    train(pathlib.Path(sys.argv[1]).absolute(), int(sys.argv[2]))
