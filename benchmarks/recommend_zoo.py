"""Does the policy that `recommend` gives fit its budget, with all in half that can be?

    python -m benchmarks.recommend_zoo              # the zoo at its tiny size, and six more structures
    python -m benchmarks.recommend_zoo GPT-2

Each model has one batch and the default budget. `XLA_FLAGS=--xla_backend_optimization_level=0` compiles
sooner.
"""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jmp_policy as jmpp
from benchmarks import _record
from benchmarks._structures import STRUCTURES
from benchmarks.models import MODELS
from benchmarks.sensitivity import loss_and_params


def error(loss_fn: Any, params: Any, batch: Any, rules: Any, scale: float) -> float:
    """The relative error of the gradient under rules, compiled on this machine."""

    def gradient(rules, scale):
        with jmpp.linen.intercept(rules):
            grads = jax.jit(jax.grad(lambda p: loss_fn(p, batch) * scale))(params)
        return np.concatenate([np.asarray(g, np.float64).ravel() / scale for g in jax.tree.leaves(grads)])

    exact = gradient("float32", 1.0)
    return float(np.linalg.norm(gradient(rules, scale) - exact) / np.linalg.norm(exact))


def row(name: str) -> dict[str, Any]:
    """What is recommended for one model."""
    loss_fn, params, (batch, *_) = loss_and_params(name)
    found = jmpp.recommend(loss_fn, params, batch, dtype="float16", probes=1)
    half = jmpp.PolicyMap("mixed_float16")
    scale = float(found.loss_scale.loss_scale)
    all_half = found.measured if found.policy == half else error(loss_fn, params, batch, half, scale)
    return {
        "model": name,
        "budget": found.budget,
        "error": float(f"{found.measured:.3g}"),
        "share of FLOPs in half": round(found.half_share, 4),
        "rules": {str(pattern): str(policy) for pattern, policy in found.policy.overrides},
        "error with all in half": float(f"{all_half:.3g}"),
    }


def main(names: Sequence[str] = ()) -> None:
    """Measures models, and saves after each."""
    order = [*MODELS, *STRUCTURES]
    for name in names or order:
        new = row(name)
        rows = [*_record.kept("recommend_zoo", "model", new=[new]), new]
        _record.save("recommend_zoo", sorted(rows, key=lambda r: order.index(r["model"])))


if __name__ == "__main__":
    main(sys.argv[1:])
