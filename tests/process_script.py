"""Trains on devices of several processes, in two ways, and writes down what each process knows at the end.

test_processes.py runs `process_script.py ADDRESS PROCESSES PROCESS OUT WHAT CHECKPOINTS` once for each, and
imports it for a training on the devices of one. Sharded training goes on from the newest checkpoint there,
with one after each step. Where WHAT is "both", it trains both ways first. With `OTHERS DIES_AFTER` as well it
trains once more at the end, with checkpoints in OTHERS, and the last process kills itself after that step.
"""

import os
import signal
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_policy as jmpp

STEPS, BATCH, BAD_STEP = 5, 16, 2
WAYS = ("jit", "shard_map")


def global_batch(step):
    """The same for any number of processes, but for the infinity in the last one's part at BAD_STEP."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(BATCH, 8)).astype(np.float32)
    if step == BAD_STEP:
        x[-1, 3] = np.inf
    return x


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(jnp.tanh(nn.Dense(32, use_bias=False)(x)))


# Gradients that are sums over devices, in whatever order, are sums in float32.
MODEL = jmpp.wrap(Net(), "params=float32, compute=float16, output=float32, grad=float32")


def step_of(tx, axis_name=None):
    def loss_fn(params, x):
        loss = jnp.mean((MODEL.apply({"params": params}, x) - jnp.sin(x)) ** 2)
        return loss if axis_name is None else lax.pmean(loss, axis_name)

    def step(params, state, x):
        loss, grads = jmpp.scaled_value_and_grad(loss_fn)(state, params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def start(mesh, way):
    """Parameters, and the jitted step. Under jit matrices are sharded, in shard_map all is replicated."""

    def place(leaf):
        largest = next((i for i, n in enumerate(leaf.shape) if n == 32), None) if way == "jit" else None
        return NamedSharding(mesh, P() if largest is None else P(*[None] * largest, "data"))

    axis_name = "data" if way == "shard_map" else None
    tx = jmpp.loss_scaled(optax.sgd(0.1, momentum=0.9), jmpp.DynamicLossScale(2.0**10), axis_name=axis_name)

    def init():
        params = MODEL.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
        return params, tx.init(params)

    places = jax.tree.map(place, jax.eval_shape(init))
    params, state = jax.jit(init, out_shardings=places)()
    step = step_of(tx, axis_name)
    if way == "shard_map":
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
        step = jax.shard_map(step, mesh=mesh, check_vma=True, **specs)
    return params, state, jax.jit(step, out_shardings=(*places, NamedSharding(mesh, P())))


def batch_of(mesh, n):
    """The batch of a step, of which each process has its rows."""
    part = BATCH // jax.process_count()
    rows = slice(jax.process_index() * part, (jax.process_index() + 1) * part)
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), global_batch(n)[rows])


def go_on(checkpoints, dies_after=-1):
    """What this process knows at the end of a training that goes on from the newest checkpoint, by name."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    *run, step = start(mesh, "jit")
    with ocp.CheckpointManager(checkpoints) as manager:
        newest = manager.latest_step()
        if newest is not None:
            run = manager.restore(newest, args=ocp.args.StandardRestore(run))
        began = 0 if newest is None else newest + 1
        for n in range(began, STEPS):
            *run, _ = step(*run, batch_of(mesh, n))
            manager.save(n, args=ocp.args.StandardSave(run))
            manager.wait_until_finished()
            if n == dies_after and jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return {**known_by(mesh, run), "began": np.array(began)}


def known_by(mesh, tree):
    """All of a tree, by path."""
    gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
    leaves = jax.tree_util.tree_leaves_with_path(gather(tree))
    return {jax.tree_util.keystr(path): own(leaf) for path, leaf in leaves}


def train(way):
    """What this process knows at the end, by name."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params, state, step = start(mesh, way)
    found = {name: [] for name in ("finite", "scale", "loss", "moved")}
    for n in range(STEPS):
        x = batch_of(mesh, n)
        before = local_bits(params)
        params, state, loss = step(params, state, x)
        found["finite"].append(own(state.grads_finite))
        found["scale"].append(own(state.loss_scale.loss_scale))
        found["loss"].append(own(loss))
        found["moved"].append([a != b for a, b in zip(before, local_bits(params), strict=True)])
    found |= known_by(mesh, {"params": params, "state": state})
    return {f"{way} {name}": np.array(value) for name, value in found.items()}


def local_bits(params):
    """The parameters' shards of this process."""
    return [np.asarray(s.data).tobytes() for p in jax.tree.leaves(params) for s in p.addressable_shards]


def own(array):
    """This process's copy of a replicated array."""
    assert array.sharding.is_fully_replicated
    return np.asarray(array.addressable_data(0))


def main(address, processes, process, out, what, checkpoints, others=None, dies_after=-1):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(address, int(processes), int(process), initialization_timeout=60)
    assert jax.process_count() == jax.device_count() == int(processes)
    ways = WAYS if what == "both" else ()
    found = {name: value for way in ways for name, value in train(way).items()}
    found |= go_on(checkpoints)
    np.savez(Path(out) / f"{process}.npz", **found)
    if others is not None:
        go_on(others, int(dies_after))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
