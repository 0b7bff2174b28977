"""Steps that are interrupted, and threads that trace at once."""

import functools
import itertools
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import io_callback

import jmp_policy as jmpp
from benchmarks import _fault_steps as steps

DTYPES = ("float16", "bfloat16", "float32")
POLICIES = [f"p=float32,c={compute},o={out}" for compute, out in itertools.product(DTYPES, DTYPES)]


class InterruptedStepError(RuntimeError):
    """What the host raises in the middle of a step."""


def on_the_host(training: steps.Training, error: type[BaseException], at: int) -> dict[str, bool]:
    """An exception between gradient and update; then the same step again."""
    gradient = jax.jit(jmpp.scaled_value_and_grad(training.loss_fn, has_aux=True))
    state, whole, seen = training.start, True, []
    for i, batch in enumerate(steps.batches()[: at + 2]):
        before = jax.tree.map(np.array, state)
        if i == at:
            try:
                gradient(state["opt_state"], state["params"], state["stats"], batch, steps.Plant())
                raise error
            except error:
                whole = steps.same(before, state)
        state, loss, _ = training.step(state, batch, steps.Plant())
        seen.append(loss)
    clean = training.start
    for batch in steps.batches()[: at + 2]:
        clean, loss, _ = training.step(clean, batch, steps.Plant())
    return {"old state whole": whole, "same bits": steps.same(clean, state)}


def _interrupt(flag: np.ndarray) -> np.ndarray:
    if flag:
        raise KeyboardInterrupt
    return np.float32(0)


@functools.cache
def _interruptible(donate: bool) -> Callable[..., Any]:
    """A step with a callback to the host between gradient and update."""
    training = steps.linen()

    @functools.partial(jax.jit, donate_argnums=(0,) if donate else ())
    def step(state: Any, batch: Any, flag: jax.Array) -> Any:
        zero = io_callback(_interrupt, jax.ShapeDtypeStruct((), jnp.float32), flag)
        state, loss, _ = training.step(state, batch, steps.Plant(gradient=zero))
        return state, loss

    return step


def in_a_callback(donate: bool) -> dict[str, bool]:
    """KeyboardInterrupt from a callback of a compiled step: what is left of the state that went in."""
    step, state = _interruptible(donate), jax.tree.map(jnp.array, steps.linen().start)
    clean, batch = jax.tree.map(np.array, state), steps.batches()[0]
    logger, found = logging.getLogger("jax._src.callback"), {"the step raised": False}
    logger.disabled = True  # It prints the traceback of every callback that fails.
    try:
        jax.block_until_ready(step(state, batch, np.True_))
    except jax.errors.JaxRuntimeError as error:
        found["the step raised"] = "KeyboardInterrupt" in str(error)
    finally:
        logger.disabled = False
    if donate:
        return found | {
            "donated buffers are gone": all(x.is_deleted() for x in jax.tree.leaves(state["params"]))
        }
    want, _, _ = steps.linen().step(clean, batch, steps.Plant())
    whole = steps.same(clean, state)
    got, _ = step(state, batch, np.False_)
    return found | {"old state whole": whole, "same bits": steps.same(want, got)}


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
    jitted = jax.jit(bare.apply)
    jitted_nnx = jax.jit(lambda graph, state, x: nnx.merge(graph, state)(x), static_argnums=0)

    def intercepted(apply: Callable[..., Any], policy: str, x: jax.Array) -> Any:
        with jmpp.linen.intercept(policy):
            return jax.eval_shape(apply, variables, x)

    def wrapped(policy: str, x: jax.Array) -> Any:
        return jax.eval_shape(jmpp.wrap(bare, policy).apply, variables, x)

    def wrapped_nnx(policy: str, x: jax.Array) -> Any:
        model = jmpp.wrap(bare_nnx, policy)
        return jax.eval_shape(lambda x: model(x), x)

    return {
        "wrap, Linen": wrapped,
        "wrap, Linen, jit": lambda policy, x: jax.jit(jmpp.wrap(bare, policy).apply).eval_shape(variables, x),
        "intercept": functools.partial(intercepted, bare.apply),
        "intercept, one jit": functools.partial(intercepted, jitted),
        "wrap, NNX": wrapped_nnx,
        "wrap, NNX, one jit": lambda policy, x: jitted_nnx.eval_shape(
            *nnx.split(jmpp.wrap(bare_nnx, policy)), x
        ),
    }


def threads(number: int = 8, rounds: int = 2) -> dict[str, int]:
    """Counts the calls of all threads, and those with a dtype that is not their policy's."""
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
                wrong.append((way, policy, got))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"calls": sum(calls), "wrong": len(wrong)} | ({"first wrong": wrong[0]} if wrong else {})
