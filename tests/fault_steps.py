"""A small float16 model with batch statistics, in Linen and in NNX, and a train step to plant faults in.

Below are steps that are interrupted, and threads that trace at once.
"""

import functools
import itertools
import logging
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import io_callback

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


def taken(
    tx: Any, loss_fn: Any, params: Any, state: Any, *args: Any, poison: Any = None
) -> tuple[Any, Any, Any]:
    """The loss, parameters and state after a step; `poison` is added to the gradients."""
    loss, grads = jmpp.scaled_value_and_grad(loss_fn)(state, params, *args)
    grads = grads if poison is None else jax.tree.map(lambda g: g + poison, grads)
    updates, state = tx.update(grads, state, params)
    return loss, optax.apply_updates(params, updates), state


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


DTYPES = ("float16", "bfloat16", "float32")
POLICIES = [f"p=float32,c={compute},o={out}" for compute, out in itertools.product(DTYPES, DTYPES)]


class InterruptedStepError(RuntimeError):
    """What the host raises in the middle of a step."""


def on_the_host(training: Training, error: type[BaseException], at: int) -> dict[str, bool]:
    """An exception between gradient and update; then the same step again."""
    gradient = jax.jit(jmpp.scaled_value_and_grad(training.loss_fn, has_aux=True))
    state, whole = training.start, True
    for i, batch in enumerate(batches()[: at + 2]):
        before = jax.tree.map(np.array, state)
        if i == at:
            try:
                gradient(state["opt_state"], state["params"], state["stats"], batch, Plant())
                raise error
            except error:
                whole = same(before, state)
        state, _, _ = training.step(state, batch, Plant())
    clean = training.start
    for batch in batches()[: at + 2]:
        clean, _, _ = training.step(clean, batch, Plant())
    return {"old state whole": whole, "same bits": same(clean, state)}


def _interrupt(flag: np.ndarray) -> np.ndarray:
    if flag:
        raise KeyboardInterrupt
    return np.float32(0)


@functools.cache
def _interruptible(donate: bool) -> Callable[..., Any]:
    """A step with a callback to the host between gradient and update."""
    training = linen()

    @functools.partial(jax.jit, donate_argnums=(0,) if donate else ())
    def step(state: Any, batch: Any, flag: jax.Array) -> Any:
        zero = io_callback(_interrupt, jax.ShapeDtypeStruct((), jnp.float32), flag)
        state, loss, _ = training.step(state, batch, Plant(gradient=zero))
        return state, loss

    return step


def in_a_callback(donate: bool) -> dict[str, bool]:
    """KeyboardInterrupt from a callback of a compiled step: what is left of the state that went in."""
    step, state = _interruptible(donate), jax.tree.map(jnp.array, linen().start)
    clean, batch = jax.tree.map(np.array, state), batches()[0]
    logger, found = logging.getLogger("jax._src.callback"), {"the step raised": False}
    logger.disabled = True  # It prints the traceback of every callback that fails.
    try:
        jax.block_until_ready(step(state, batch, np.True_))
    except jax.errors.JaxRuntimeError as error:
        found["the step raised"] = "KeyboardInterrupt" in str(error)
    finally:
        logger.disabled = False
    if donate:
        found["donated buffers are gone"] = all(x.is_deleted() for x in jax.tree.leaves(state["params"]))
        return found
    want, _, _ = linen().step(clean, batch, Plant())
    whole = same(clean, state)
    got, _ = step(state, batch, np.False_)
    return found | {"old state whole": whole, "same bits": same(want, got)}


def code(x: jax.Array) -> jax.Array:
    """The dtype that a module computes in, as the length of an array of integers: no policy casts it."""
    return jnp.zeros(DTYPES.index(str(x.dtype)), jnp.int32)


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(4)(x), code(x)


class _Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        x = nnx.relu(self.first(x))
        return self.last(x), code(x)


def ways() -> dict[str, Callable[[str, jax.Array], Any]]:
    """Ways to trace modules, shared by all threads, under a policy: `(policy, x) -> (out, code)`."""
    bare, bare_nnx, x = _Linen(), _Nnx(nnx.Rngs(0)), jnp.ones((2, 8))
    variables = bare.init(jax.random.key(0), x)
    jitted_nnx = jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)

    def intercepted(apply: Callable[..., Any], policy: str, x: jax.Array) -> Any:
        with jmpp.linen.intercept(policy):
            return jax.eval_shape(apply, variables, x)

    def wrapped_nnx(policy: str, x: jax.Array) -> Any:
        model = jmpp.wrap(bare_nnx, policy)
        return jax.eval_shape(lambda x: model(x), x)

    return {
        "wrap, Linen": lambda policy, x: jax.eval_shape(jmpp.wrap(bare, policy).apply, variables, x),
        "wrap, Linen, jit": lambda policy, x: jax.jit(jmpp.wrap(bare, policy).apply).eval_shape(variables, x),
        "intercept": functools.partial(intercepted, bare.apply),
        "intercept, one jit": functools.partial(intercepted, jax.jit(bare.apply)),
        "wrap, NNX": wrapped_nnx,
        "wrap, NNX, one jit": lambda p, x: jitted_nnx.eval_shape(*nnx.split(jmpp.wrap(bare_nnx, p)), x),
    }


def threads(number: int, rounds: int) -> tuple[int, list[str]]:
    """Counts the calls of all threads, and lists those with a dtype that is not their policy's."""
    each, barrier, wrong = ways(), threading.Barrier(number), []
    calls = [0] * number

    def work(index: int) -> None:
        jobs = [(way, policy) for way in each for policy in POLICIES] * rounds
        random.Random(index).shuffle(jobs)
        x = jnp.ones((2 + index, 8))  # A shape of its own: every thread traces for itself.
        barrier.wait()
        for way, policy in jobs:
            calls[index] += 1
            try:
                out, computed = each[way](policy, x)
                got = f"p=float32,c={DTYPES[computed.shape[0]]},o={out.dtype}"
            except Exception as error:
                got = repr(error)
            if got != policy:
                wrong.append(f"{way}, {policy}: {got}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(calls), wrong
