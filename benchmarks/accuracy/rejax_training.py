"""Do agents learn in half precision what they learn in float32? PPO and SAC of rejax, on small tasks.

Three changes, and nothing of the algorithms is written again: `wrap` around the networks, `loss_scaled`
around the optimizers, and `scaled_value_and_grad` where they call `jax.grad`. In float32 nothing is changed.
All seeds of a precision are one program. rejax is no dependency: `pip install rejax "gymnax<1"`.

SAC draws actions with deviations down to exp(-10). The gradient of a log-probability holds one over their
square, which overflows in float16 below 2**-8, at any loss scale: such steps are skipped.
"""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

import jmp_policy as jmpp
from benchmarks.table import Table

HALF = "mixed_float16"
#: What the actor makes of float32 means or logits is float32, too.
POLICIES = {
    "float32": {},
    "float16": {"actor": HALF, "critic": HALF},
    "bfloat16": {"actor": "mixed_bfloat16", "critic": "mixed_bfloat16"},
    "float16, actions in float32": {"actor": jmpp.PolicyMap(HALF, {"action_*": "float32"}), "critic": HALF},
}
#: As rejax's own configs have them.
SETTINGS = {
    "PPO": {
        "env": "CartPole-v1", "agent_kwargs": {"activation": "tanh"}, "num_envs": 5, "num_steps": 100,
        "num_epochs": 5, "num_minibatches": 5, "learning_rate": 7.5e-4, "max_grad_norm": 0.5,
    },
    "SAC": {
        "env": "Pendulum-v1", "agent_kwargs": {"activation": "swish"}, "buffer_size": 10_000,
        "fill_buffer": 256, "batch_size": 256, "learning_rate": 0.01, "polyak": 0.98,
        "normalize_observations": True,
    },
}  # fmt: skip
#: Size -> algorithm -> steps of the environment before each of the `PARTS` evaluations, and seeds.
RUNS = {
    "tiny": {"PPO": (500, 2), "SAC": (300, 2)},
    "small": {"PPO": (4000, 4), "SAC": (1000, 4)},
    "full": {"PPO": (25_000, 64), "SAC": (2500, 16)},
}
PARTS = 4


def scaled_grad(opt_state: Any) -> Callable[..., Any]:
    """A `jax.grad` of the loss times the scale that an optimizer state holds."""

    def grad(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        def gradients(*args: Any) -> Any:
            value, grads = jmpp.scaled_value_and_grad(fun, has_aux=has_aux)(opt_state, *args)
            return (grads, value[1]) if has_aux else grads

        return gradients

    return grad


def in_mixed_precision(algorithm: type) -> type:
    """A class of rejax with a loss scale for each optimizer; its networks are still to be wrapped."""
    from rejax.algos.algorithm import register_init

    def scaled(name: str) -> Callable[..., Any]:
        def update(self: Any, ts: Any, *args: Any) -> Any:
            with mock.patch.object(jax, "grad", scaled_grad(getattr(ts, f"{name}_ts").opt_state)):
                return getattr(algorithm, f"update_{name}")(self, ts, *args)

        return update

    class Mixed(algorithm):
        update_actor, update_critic, update_alpha = map(scaled, ("actor", "critic", "alpha"))

        @register_init
        def initialize_network_params(self, rng: Any) -> dict[str, Any]:
            found = super().initialize_network_params(rng)
            for name in [name for name in found if name.endswith("_ts")]:
                tx = jmpp.loss_scaled(found[name].tx, jmpp.DynamicLossScale())
                found[name] = found[name].replace(tx=tx, opt_state=tx.init(found[name].params))
            return found

    return Mixed


def trained(algorithm: str, precision: str, size: str) -> tuple[np.ndarray, Any]:
    """Mean returns of 128 episodes, by seed and part of the training, and the last states."""
    try:
        found = importlib.import_module("rejax").get_algo(algorithm.lower())
    except ImportError as error:
        raise SystemExit('This trains agents of rejax: pip install rejax "gymnax<1"') from error
    (steps, seeds), policies = RUNS[size][algorithm], POLICIES[precision]
    evaluated = {"total_timesteps": PARTS * steps, "eval_freq": steps, "skip_initial_evaluation": True}
    agent = (in_mixed_precision(found) if policies else found).create(**SETTINGS[algorithm], **evaluated)
    for name, policy in policies.items():
        agent = agent.replace(**{name: jmpp.wrap(getattr(agent, name), policy)})
    train = jax.jit(jax.vmap(agent.train), compiler_options={"xla_allow_excess_precision": False})
    states, (_, returns) = train(jax.random.split(jax.random.PRNGKey(0), seeds))
    return np.asarray(returns, np.float64).mean(-1), states


def rows(algorithm: str, precision: str, size: str) -> dict[str, Any]:
    """The last mean return over the seeds, those before it, and the steps that a seed skipped on average."""
    returns, states = trained(algorithm, precision, size)
    means, errors = returns.mean(0), returns.std(0, ddof=1) / len(returns) ** 0.5
    row: dict[str, Any] = {"task": SETTINGS[algorithm]["env"], "steps": PARTS * RUNS[size][algorithm][0]}
    row |= {"seeds": len(returns), "mean": float(means[-1]), "standard_error": float(errors[-1])}
    for name in POLICIES[precision]:
        row[f"{name}_skipped"] = float(getattr(states, f"{name}_ts").opt_state.skipped.mean())
    row |= {"means": means.tolist(), "standard_errors": errors.tolist(), "values": returns[:, -1].tolist()}
    versions = {name: importlib.metadata.version(name) for name in ("rejax", "gymnax")}
    return {"rows": [row], "packages": versions}


ABOUT = {"episodes": 128, "settings": SETTINGS}
TABLES = (Table("rejax", rows, by={"algorithm": SETTINGS, "precision": POLICIES}, about=ABOUT, size="full"),)
