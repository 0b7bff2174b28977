"""A small float16 model with batch statistics, in Linen and in NNX, and a train step to plant faults in."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_policy as jmpp

WIDTHS = (16, 32, 4)
BATCH = 16
CONFIG = {
    "growth_interval": 4,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "min_loss_scale": 2.0**8,
    "max_loss_scale": 2.0**14,
    "hysteresis": 1,
}
START = 2.0**12
FLOOR, CEILING = CONFIG["min_loss_scale"], CONFIG["max_loss_scale"]


class Plant(NamedTuple):
    """What is added, in one step, to one element of each; 0 for none."""

    inputs: Any = np.float32(0)
    labels: Any = np.float32(0)
    parameters: Any = np.float32(0)
    gradient: Any = np.float32(0)
    loss: Any = np.float32(0)
    statistics: Any = np.float32(0)
    row: Any = np.int32(0)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTHS[1])(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        return nn.Dense(WIDTHS[2])(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTHS[0], WIDTHS[1], rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTHS[1], momentum=0.9, rngs=rngs)
        self.last = nnx.Linear(WIDTHS[1], WIDTHS[2], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.norm(self.first(x))))


class Training(NamedTuple):
    """A loss `(params, stats, batch, plant) -> (loss, stats)`, its jitted step and the first state."""

    loss_fn: Callable[..., Any]
    step: Callable[..., Any]
    start: dict[str, Any]


def planted(tree: Any, value: Any, row: Any) -> Any:
    """The tree with a value added to one element of its first matrix, or else of its first array."""
    leaves, treedef = jax.tree.flatten(tree)
    place = next((i for i, leaf in enumerate(leaves) if leaf.ndim == 2), 0)
    at = (row, 1) if leaves[place].ndim == 2 else (row,)
    leaves[place] = leaves[place].at[at].add(jnp.asarray(value, leaves[place].dtype))
    return jax.tree.unflatten(treedef, leaves)


@functools.cache
def linen() -> Training:
    model = jmpp.wrap(LinenNet(), "mixed_float16")
    variables = model.init(jax.random.key(0), jnp.ones((BATCH, WIDTHS[0])))

    def forward(params: Any, stats: Any, x: jax.Array) -> Any:
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return out, new["batch_stats"]

    return training(forward, variables["params"], variables["batch_stats"])


@functools.cache
def of_nnx() -> Training:
    model = jmpp.wrap(NnxNet(nnx.Rngs(0)), "mixed_float16")
    graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

    def forward(params: Any, stats: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, params, jax.tree.map(lambda x: x, stats))  # Variables of this trace.
        return model(x), nnx.state(model, nnx.BatchStat)

    return training(forward, params, stats)


MODELS = {"Linen": linen, "NNX": of_nnx}


def training(forward: Callable[..., Any], params: Any, stats: Any) -> Training:
    """The step of a forward pass `(params, stats, x) -> (out, stats)`."""
    tx = jmpp.loss_scaled(optax.adamw(3e-3), jmpp.DynamicLossScale(START, **CONFIG))

    def loss_fn(params: Any, stats: Any, batch: Any, plant: Plant) -> Any:
        x = batch["x"].at[plant.row, 0].add(plant.inputs)
        y = batch["y"].at[plant.row, 0].add(plant.labels)
        out, stats = forward(planted(params, plant.parameters, plant.row), stats, x)
        return jnp.mean((out - y) ** 2) + plant.loss, planted(stats, plant.statistics, plant.row)

    @jax.jit
    def step(state: Any, batch: Any, plant: Plant) -> Any:
        gradient = jmpp.scaled_value_and_grad(loss_fn, has_aux=True)
        old, opt_state = state["stats"], state["opt_state"]
        (loss, stats), grads = gradient(opt_state, state["params"], old, batch, plant)
        grads = planted(grads, plant.gradient, plant.row)
        updates, opt_state = tx.update(grads, opt_state, state["params"])
        keep = jmpp.grads_finite(opt_state) & jmpp.all_finite(stats)
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "stats": jmpp.select_tree(keep, stats, old),
            "opt_state": opt_state,
        }
        return new, loss, grads

    return Training(loss_fn, step, {"params": params, "stats": stats, "opt_state": tx.init(params)})


@functools.cache
def batches(number: int = 24) -> list[dict[str, np.ndarray]]:
    """Inputs, and labels that a linear map of them gives."""
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(WIDTHS[0], WIDTHS[2]))
    xs = rng.normal(size=(number, BATCH, WIDTHS[0]))
    return [{"x": x.astype(np.float32), "y": (x @ truth / 4).astype(np.float32)} for x in xs]


def scaled_by(state: Any, scale: float) -> Any:
    """The state with another loss scale."""
    opt_state = state["opt_state"]
    new = jmpp.DynamicLossScale(scale, **CONFIG)
    return {**state, "opt_state": opt_state._replace(loss_scale=new)}


def trained(state: Any) -> dict[str, Any]:
    """What a skipped step must leave alone: parameters, moments and counts, statistics."""
    return {"params": state["params"], "inner": state["opt_state"].inner_state, "stats": state["stats"]}


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )
