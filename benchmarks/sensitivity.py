"""Does `sensitivity` rank modules as half precision does? One module at a time in float16, measured.

    python -m benchmarks.sensitivity                # the zoo at its tiny size, and six more structures
    python -m benchmarks.sensitivity GPT-2 BERT-Large

`XLA_FLAGS=--xla_backend_optimization_level=0` compiles in less time, of which it needs most.

The truth is the relative error of the gradient, its mean square over three batches, when a rule puts one
module, with all below it, into float16 and all others into float32. Its program runs operation by operation,
so that each rounds as its dtype says. At most `MODULES` modules of a model are measured, evenly from the
ranking, as a program is traced for each; the whole model is none of them.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jmp_policy as jmpp
from benchmarks import _record
from benchmarks._structures import STRUCTURES
from benchmarks.models import MODELS
from jmp_policy._src.jaxpr import compat
from jmp_policy._src.jaxpr.ir import evaluate

MODULES = 10
BATCHES = 3


def loss_and_params(name: str) -> tuple[Any, Any, Any]:
    """The loss of `(params, batch)`, parameters and batches."""
    model = STRUCTURES.get(name) or MODELS[name]("tiny")
    batches = [jax.jit(model.batch)(seed) for seed in range(BATCHES)]
    variables = jax.jit(model.module.init)(jax.random.key(0), *batches[0][0])
    rest = {kind: value for kind, value in variables.items() if kind != "params"}

    def loss_fn(params, batch):
        inputs, targets = batch
        out = model.module.apply({**rest, "params": params}, *inputs, mutable=list(rest))[0]
        return model.loss(out, targets)

    return loss_fn, variables["params"], batches


def gradients(loss_fn: Any, params: Any, batches: Any, rules: Any, scale: float) -> list[np.ndarray]:
    """The gradient for each batch under rules, one operation after the other, as float64 vectors."""

    def scaled(params, batch):
        with jmpp.linen.intercept(rules):
            return loss_fn(params, batch) * scale

    def bind(eqn, values):
        return compat.bind_primitive(eqn.primitive, values, eqn.params)

    jaxpr = jax.make_jaxpr(jax.grad(scaled))(params, batches[0])
    found = [evaluate(jaxpr, jax.tree.leaves((params, batch)), bind) for batch in batches]
    return [np.concatenate([np.asarray(g, np.float64).ravel() for g in grads]) / scale for grads in found]


def row(name: str) -> dict[str, Any]:
    """Predicted against measured errors of one model."""
    loss_fn, params, batches = loss_and_params(name)
    more = [(batch,) for batch in batches[1:]]
    ranking = jmpp.sensitivity(loss_fn, params, batches[0], batches=more, probes=2)
    rows = [r for r in ranking.rows if r.path]
    rows = [rows[round(i)] for i in np.linspace(0, len(rows) - 1, min(MODULES, len(rows)))]
    exact = gradients(loss_fn, params, batches, "float32", 1.0)
    found = []
    for r in rows:
        rules = jmpp.PolicyMap("float32", {f"{r.path}/**": "mixed_float16"})
        half = gradients(loss_fn, params, batches, rules, ranking.loss_scale)
        errors = [np.linalg.norm(h - e) / np.linalg.norm(e) for h, e in zip(half, exact, strict=True)]
        found.append({
            "module": r.path,
            "predicted": float(f"{r.predicted:.3g}"),
            "measured": float(f"{np.sqrt(np.mean(np.square(errors))):.3g}"),
        })  # fmt: skip
    predicted, measured = ([m[key] for m in found] for key in ("predicted", "measured"))
    top = [set(np.argsort(values)[-3:]) for values in (predicted, measured)]
    ratios = np.array(measured) / np.maximum(predicted, 1e-30)
    return {
        "model": name,
        "modules": len(rows),
        "spearman": round(spearman(predicted, measured), 3),
        "of the top 3": len(top[0] & top[1]),
        "measured / predicted": {q: round(float(np.quantile(ratios, p)), 2) for q, p in QUANTILES.items()},
        "rows": found,
    }


#: Of the measured error over the predicted one.
QUANTILES = {"median": 0.5, "low": 0.1, "high": 0.9}


def spearman(a: Any, b: Any) -> float:
    """Correlation of ranks; equal values share the mean of theirs."""

    def ranks(values):
        values = np.asarray(values)
        return (values[:, None] > values).sum(1) + (values[:, None] == values).sum(1) / 2

    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def main(names: Sequence[str] = ()) -> None:
    """Measures models, and saves after each."""
    order = [*MODELS, *STRUCTURES]
    for name in names or order:
        new = row(name)
        rows = [*_record.kept("sensitivity", "model", new=[new]), new]
        path = _record.RESULTS / "sensitivity.json"
        old = json.loads(path.read_text())["measured"] if path.exists() else {}
        measured = {**old, name: new.pop("rows")}
        _record.save("sensitivity", sorted(rows, key=lambda r: order.index(r["model"])), measured=measured)


if __name__ == "__main__":
    main(sys.argv[1:])
